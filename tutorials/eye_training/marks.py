"""Marks of the eye on canvases that it has not seen, and the sheet of such canvases that ships with it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tutorials.eye_training.canvases import EDGE, Material, paint
from tutorials.eye_training.scenes import COLOURS, DIGITS, GROUNDS, PHOTOS, PLAIN, Scene, random_scene

Answer = Callable[[Tensor], list[str]]
"""Canvases, uint8 [scenes, 3, 64, 64] -> what is said of each, asked what it shows."""

MARKS = {"digit": 0.90, "colour": 0.95, "ground": 0.90, "photographs": 0.85, "blank": 0.95}
"""Shares that the eye was to reach."""


class Said(NamedTuple):
    """What an answer names, in order. ground: None if it names none."""

    digits: list[str]
    colours: list[str]
    ground: str | None


def read_answer(answer: str) -> Said:
    """What stands before the last "on" is about digits."""
    before, _, after = answer.lower().rpartition(" on ")
    shown, below = (re.findall(r"[a-z]+", part) for part in (before, after))
    names = [word for word in (shown if before else below) if word in DIGITS]
    colours = [word for word in shown if word in COLOURS]
    return Said(names, colours, next((name for name in GROUNDS if name in below), None))


def rate_answers(scenes: Sequence[Scene], answers: Sequence[str]) -> dict[str, list[bool]]:
    """Right or wrong by mark: for each digit, its colour, each ground below digits, each photograph without
    digits, each blank canvas."""
    rated: dict[str, list[bool]] = {name: [] for name in MARKS}
    for scene, answer in zip(scenes, answers):
        said = read_answer(answer)
        if scene.digits:
            for number, (digit, colour) in enumerate(scene.digits):
                rated["digit"].append(said.digits[number : number + 1] == [DIGITS[digit]])
                rated["colour"].append(said.colours[number : number + 1] == [colour])
            rated["ground"].append(said.ground == scene.ground)
        elif scene.ground in PLAIN:
            rated["blank"].append(not said.digits)
        else:
            rated["photographs"].append(said.ground == scene.ground)
    return rated


def held_out_scenes(count: int, seed: int = 7) -> list[Scene]:
    """Half of them with one digit, a quarter with two, the rest without."""
    numbers = random.Random(seed)
    scenes = [random_scene(numbers, (1, 1, 2, 0)[index % 4]) for index in range(count)]
    names = [*PHOTOS, *PLAIN, *PLAIN]
    empty = iter(range(count))
    return [scene if scene.digits else Scene(names[next(empty) % len(names)]) for scene in scenes]


def measure(answer: Answer, held_out: Material, count: int) -> dict[str, float]:
    """The share that is right, by mark."""
    scenes = held_out_scenes(count)
    canvases = paint(scenes, held_out, random.Random(7))
    rated = rate_answers(scenes, answer(canvases))
    return {name: sum(found) / len(found) for name, found in rated.items()}


def write_sheet(folder: Path, held_out: Material, count: int = 64) -> None:
    """Write canvases that the eye has not seen, 8 in a row, and what they show."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    scenes = held_out_scenes(count, seed=11)
    canvases = paint(scenes, held_out, random.Random(11))
    sheet = Image.new("RGB", (8 * EDGE, -(-count // 8) * EDGE))
    for index, canvas in enumerate(canvases):
        place = index % 8 * EDGE, index // 8 * EDGE
        sheet.paste(Image.fromarray(canvas.permute(1, 2, 0).numpy()), place)
    sheet.save(folder / "sheet.png")
    entries = [
        {"ground": scene.ground, "digits": scene.digits, "is_stacked": scene.is_stacked} for scene in scenes
    ]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    (folder / "scenes.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_sheet(folder: Path) -> list[tuple[Scene, Any]]:
    """(scene, its canvas as an image of PIL) of every canvas in a folder that ``write_sheet`` wrote."""
    from PIL import Image

    sheet = Image.open(folder / "sheet.png").convert("RGB")
    found = []
    for index, entry in enumerate(json.loads((folder / "scenes.json").read_text(encoding="utf-8"))):
        left, top = index % 8 * EDGE, index // 8 * EDGE
        digits = tuple((digit, colour) for digit, colour in entry["digits"])
        scene = Scene(entry["ground"], digits, entry["is_stacked"])
        found.append((scene, sheet.crop((left, top, left + EDGE, top + EDGE))))
    return found
