"""The command line of the training: a phase, a folder for checkpoints, how much of it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tutorials.eye_training.canvases import load_material
from tutorials.eye_training.language import Language
from tutorials.eye_training.marks import MARKS, measure, write_sheet
from tutorials.eye_training.model import TrainedEye
from tutorials.eye_training.scenes import WHAT
from tutorials.eye_training.training import learn_language, learn_words

SHIPPED = Path(__file__).parents[1] / "eye"


def main() -> None:
    """Run a phase, print the marks, or write the folder that ships."""
    parser = argparse.ArgumentParser(prog="python -m tutorials.eye_training", description=__doc__)
    parser.add_argument("phase", choices=("words", "language", "marks", "ship"))
    parser.add_argument("folder", type=Path, help="where its checkpoint lies")
    parser.add_argument("--start", type=Path, help="checkpoint that the second phase starts from")
    parser.add_argument("--steps", type=int, help="of the phase, if not as many as the shipped eye took")
    parser.add_argument("--batch", type=int, help="canvases of a step")
    parser.add_argument("--count", type=int, default=400, help="canvases that are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    material = load_material()
    if given.phase == "words":
        learn_words(given.folder, material, given.steps or 2500, given.batch or 64, given.seed)
    elif given.phase == "language":
        start = given.start or given.folder
        learn_language(start, given.folder, material, given.steps or 250, given.batch or 16, given.seed)
    elif given.phase == "marks":
        eye, language = TrainedEye().load(given.folder), Language()
        with torch.no_grad():
            found = measure(
                lambda canvases: language.answer(eye(canvases), WHAT[0]), material[1], given.count
            )
        for name, share in found.items():
            print(f"{name:12} {share:.3f}  (was to be {MARKS[name]:.2f})")
    else:
        TrainedEye().load(given.folder).save(SHIPPED, torch.float16)
        write_sheet(SHIPPED / "unseen", material[1])


if __name__ == "__main__":
    main()
