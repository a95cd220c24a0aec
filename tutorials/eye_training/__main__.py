"""Trains the eye, measures it, or writes the folder that ships."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tutorials.eye_training.canvases import load_material
from tutorials.eye_training.language import Language
from tutorials.eye_training.marks import MARKS, measure, write_sheet
from tutorials.eye_training.model import TrainedEye
from tutorials.eye_training.scenes import WHAT
from tutorials.eye_training.training import learn_attributes, learn_language, learn_words

SHIPPED = Path(__file__).parents[1] / "eye"
SIZES = {"attributes": (1600, 64), "words": (1600, 64), "language": (120, 16), "polish": (450, 64)}
"""Steps and canvases of a step that the shipped eye took."""


def main() -> None:
    """Run a phase, print the marks, or write the folder that ships."""
    parser = argparse.ArgumentParser(prog="python -m tutorials.eye_training", description=__doc__)
    parser.add_argument("task", choices=(*SIZES, "marks", "ship"))
    parser.add_argument("folder", type=Path, help="with a checkpoint of each phase")
    parser.add_argument("--steps", type=int, help="of the phase, if not as many as the shipped eye took")
    parser.add_argument("--count", type=int, default=400, help="canvases that are measured")
    parser.add_argument("--start", type=Path, help="a checkpoint, if not the one of the phase before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    material = load_material()
    folders = {phase: given.folder / phase for phase in SIZES}
    if given.task in SIZES:
        steps, batch = SIZES[given.task]
        amount = material, given.steps or steps, batch, given.seed
        if given.task == "attributes":
            learn_attributes(folders["attributes"], *amount)
        elif given.task == "words":
            learn_words(given.start or folders["attributes"], folders["words"], *amount)
        elif given.task == "language":
            learn_language(given.start or folders["words"], folders["language"], *amount)
        else:
            start = given.start or folders["language"]
            learn_words(start, folders["polish"], *amount, peak=4e-4, keeps_facts=False)
        return
    eye, language = TrainedEye().load(folders["polish"]), Language()
    # SmolLM2 was told how to answer by what the third phase made of the projector.
    projector = TrainedEye().load(folders["language"]).parts["multi_modal_projector"]
    eye.parts["multi_modal_projector"] = projector
    with torch.no_grad():
        found = measure(lambda canvases: language.answer(eye(canvases), WHAT[0]), material[1], given.count)
    for name, share in found.items():
        print(f"{name:12} {share:.3f}  (was to be {MARKS[name]:.2f})")
    if given.task == "ship":
        eye.save(SHIPPED)
        write_sheet(SHIPPED / "unseen", material[1])
        shares = {name: round(share, 3) for name, share in found.items()}
        (SHIPPED / "unseen" / "marks.json").write_text(json.dumps(shares, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
