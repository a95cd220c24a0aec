"""Where tokens of a prompt with images stand in time and in space (M-RoPE: Wang et al. 2024, Qwen2-VL).

An image is a moment: its placeholders share one position in time, and differ in row and column. What follows
it goes on after the largest position that the image has taken. The three positions of a text are equal.

    text     image of 2 x 3       text
    0 1 2    3 3 3 3 3 3          6 7      time
    0 1 2    3 3 3 4 4 4          6 7      row
    0 1 2    3 4 5 3 4 5          6 7      column
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm.messages import ImageItem


def shift_after(images: Sequence[ImageItem]) -> int:
    """What is added to positions after all images of a prompt; 0 or less."""
    return sum(_shift(image) for image in images)


def positions_in_space(images: Sequence[ImageItem], start: int, count: int) -> np.ndarray:
    """int32 [count, 3]: time, row and column of the tokens from position ``start`` on.
    images: of their prompt, in its order."""
    positions = np.arange(start, start + count, dtype=np.int32)
    found = np.repeat(positions[:, None], 3, axis=1)
    shift = 0
    for image in images:
        rows, columns = image.grid
        if not rows:
            continue
        first = image.offset + image.runs[0][0]
        number = positions - first
        inside = (number >= 0) & (number < rows * columns)
        here = number[inside]
        found[inside] = first + shift + np.stack([0 * here, here // columns, here % columns], axis=1)
        found[number >= rows * columns] += _shift(image)
        shift += _shift(image)
    return found


def _shift(image: ImageItem) -> int:
    rows, columns = image.grid
    return max(rows, columns) - rows * columns
