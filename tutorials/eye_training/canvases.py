"""Canvases of 64 × 64 pixels: handwritten digits, coloured, on plain grounds or on crops of photographs.

One digit lies near the middle, two lie near the middles of the halves: an eye of so few layers would need
many times the canvases to find them anywhere.

The digits are those of scikit-learn (8 × 8 pixels, 1,797), the photographs those of scikit-learn and
scikit-image. Both are divided before anything else, so what is held out shares no stroke and no pixel with
what is trained on: a fifth of the digits, and a quarter of each photograph, three of twelve cells.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tutorials.eye_training.scenes import COLOURS, PLAIN, Scene

EDGE = 64
ROWS, COLUMNS = 3, 4
HELD_OUT_CELLS = ((0, 1), (1, 3), (2, 0))
"""Of each photograph (row, column)."""
WIDTHS = (288, 344, 400)
"""Of a photograph, when crops are taken [pixels]."""


@dataclass(frozen=True)
class Material:
    """What canvases are made of. digits: float32 [count, 8, 8] by digit, from 0 to 1. cells: pieces of
    photographs by ground, uint8 [height, width, 3], at least as large as a canvas."""

    digits: Sequence[Tensor]
    cells: dict[str, list[np.ndarray[Any, Any]]]


def load_material() -> tuple[Material, Material]:
    """What is trained on, and what is held out. Raises ImportError without scikit-learn and scikit-image."""
    from skimage import data
    from sklearn.datasets import load_digits, load_sample_images

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.images))
    images, names = torch.from_numpy(found.images[order] / 16).float(), found.target[order]
    border = len(images) * 4 // 5
    temple, flower = load_sample_images().images  # china.jpg, flower.jpg
    photos = {
        "flower": flower,
        "temple": temple,
        "cat": data.chelsea(),
        "coffee": data.coffee(),
        "rocket": data.rocket(),
        "stars": data.hubble_deep_field(),
        "bricks": data.brick(),
        "grass": data.grass(),
    }
    materials = []
    for is_held_out, part in ((False, slice(border)), (True, slice(border, None))):
        digits = [images[part][torch.from_numpy(names[part] == digit)] for digit in range(10)]
        cells = {name: _cells(photo, is_held_out) for name, photo in photos.items()}
        materials.append(Material(digits, cells))
    return materials[0], materials[1]


def printed_material() -> Material:
    """Printed digits, of Pillow's font in several sizes, and no photographs. Needs Pillow alone."""
    from PIL import Image, ImageDraw, ImageFont

    digits = []
    for digit in range(10):
        drawn = []
        for size in (20, 32, 44):
            image = Image.new("L", (64, 64))
            ImageDraw.Draw(image).text((16, 4), str(digit), fill=255, font=ImageFont.load_default(size))
            cut = image.crop(image.getbbox()).resize((6, 8), Image.Resampling.BOX)
            framed = Image.new("L", (8, 8))
            framed.paste(cut, (1, 0))
            drawn.append(torch.from_numpy(np.asarray(framed) / 255).float())
        digits.append(torch.stack(drawn))
    return Material(digits, {})


def _cells(photo: np.ndarray[Any, Any], is_held_out: bool) -> list[np.ndarray[Any, Any]]:
    from PIL import Image

    found = []
    for width in WIDTHS:
        image = Image.fromarray(photo).convert("RGB")
        image = image.resize((width, image.height * width // image.width))
        high, wide = image.height // ROWS, image.width // COLUMNS
        if high < EDGE:  # a wide photograph: its rows overlap nowhere, so they are made higher
            image = image.resize((image.width, ROWS * EDGE))
            high = EDGE
        for row in range(ROWS):
            for column in range(COLUMNS):
                if ((row, column) in HELD_OUT_CELLS) == is_held_out:
                    box = column * wide, row * high, (column + 1) * wide, (row + 1) * high
                    found.append(np.asarray(image.crop(box)))
    return found


def paint(scenes: Sequence[Scene], material: Material, random: random.Random) -> Tensor:
    """uint8 [scenes, 3, 64, 64]. Digits are 24 to 40 pixels high, slightly turned, with a dark rim."""
    canvas = torch.stack([_ground(scene.ground, material, random) for scene in scenes])
    for number in range(2):
        shown = [index for index, scene in enumerate(scenes) if len(scene.digits) > number]
        if not shown:
            continue
        digits, turns, colours = [], [], []
        for index in shown:
            digit, colour = scenes[index].digits[number]
            choices = material.digits[digit]
            digits.append(choices[random.randrange(len(choices))])
            turns.append(_place(scenes[index], number, random))
            colours.append([value + random.uniform(-20, 20) for value in COLOURS[colour]])
        grid = functional.affine_grid(torch.tensor(turns), [len(shown), 1, EDGE, EDGE], align_corners=False)
        mask = functional.grid_sample(torch.stack(digits)[:, None], grid, mode="bicubic", align_corners=False)
        mask = (1.5 * mask - 0.15).clamp(0, 1)
        rim = functional.max_pool2d(mask, 3, stride=1, padding=1)
        before = canvas[shown] * (1 - 0.7 * rim)
        canvas[shown] = before * (1 - mask) + torch.tensor(colours)[:, :, None, None] * mask
    return canvas.clamp(0, 255).to(torch.uint8)


def _ground(name: str, material: Material, random: random.Random) -> Tensor:
    """float32 [3, 64, 64]."""
    if name in PLAIN:
        colour = torch.tensor([float(value + random.randint(-10, 10)) for value in PLAIN[name]])
        return colour[:, None, None].expand(3, EDGE, EDGE)
    cell = random.choice(material.cells[name])
    row = random.randint(0, cell.shape[0] - EDGE)
    column = random.randint(0, cell.shape[1] - EDGE)
    crop = torch.from_numpy(cell[row : row + EDGE, column : column + EDGE].copy()).permute(2, 0, 1)
    if random.random() < 0.5:
        crop = crop.flip(-1)
    return crop * random.uniform(0.6, 1.0)


def _place(scene: Scene, number: int, random: random.Random) -> list[list[float]]:
    """Where a digit lies: what affine_grid turns places of the canvas into places of the digit with."""
    if len(scene.digits) == 1:
        size = random.uniform(32, 40)
        x, y = (EDGE / 2 + random.uniform(-6, 6) for _ in range(2))
    else:
        size = random.uniform(24, 31)
        along = EDGE * (1 + 2 * number) / 4 + random.uniform(-2, 2)
        across = EDGE / 2 + random.uniform(-6, 6)
        x, y = (across, along) if scene.is_stacked else (along, across)
    angle = random.uniform(-0.15, 0.15)
    cosine, sine = np.cos(angle) * EDGE / size, np.sin(angle) * EDGE / size
    x, y = 2 * x / EDGE - 1, 2 * y / EDGE - 1
    return [
        [float(cosine), float(sine), float(-cosine * x - sine * y)],
        [float(-sine), float(cosine), float(sine * x - cosine * y)],
    ]
