"""Tokens of images are rotated by row and column as transformers does, wherever a step begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.batch.image_positions import positions_in_space, shift_after
from minivllm.errors import ModelError
from minivllm.families.entries import Entries
from minivllm.families.rotary import read_rotary_set
from minivllm.messages import ImageItem
from tests.multimodal.conftest import engine
from tests.multimodal.models import expected, picture, prompt, reference

GRIDS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5)), max_size=4)


def item(offset: int, rows: int, columns: int) -> ImageItem:
    count = rows * columns
    return ImageItem(b"", offset, count, [(0, count)], count, (3, 8, 8), 1, (rows, columns))


@settings(max_examples=200, deadline=None)
@given(grids=GRIDS, before=st.integers(1, 5), data=st.data())
def test_positions_are_those_of_transformers(
    directories: dict[str, Path], grids: list[tuple[int, int, int]], before: int, data: st.DataObject
) -> None:
    """grids: rows and columns of each image, and the tokens of text after it."""
    model, _ = reference(directories["qwen2.5-vl"])
    types, items = [0] * before, []
    for rows, columns, after in grids:
        items.append(item(len(types), rows, columns))
        types += [1] * (rows * columns) + [0] * after
    expected, deltas = model.model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        torch.tensor([types]),
        torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns, _ in grids]) if grids else None,
    )
    start = data.draw(st.integers(0, len(types)))
    count = data.draw(st.integers(0, len(types) - start))
    assert positions_in_space(items, start, count).T.tolist() == (
        expected[:, 0, start : start + count].tolist()
    )
    assert shift_after(items) == int(deltas)
    later = positions_in_space(items, len(types), 3)
    assert later.tolist() == [[len(types) + number + shift_after(items)] * 3 for number in range(3)]


@pytest.mark.parametrize("kind", ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5"))
def test_an_answer_after_an_image_goes_on_after_its_largest_position(
    directories: dict[str, Path], kind: str
) -> None:
    text, image = "<s>Ends with an image: <image>", picture(3, 33, 21)
    model, processor = reference(directories[kind])
    inputs = processor(images=[image], text=text, return_tensors="pt")
    expected: list[int] = []
    for _ in range(4):  # the whole sequence at once, so that each position is computed from the image's grid
        more = torch.tensor([expected], dtype=torch.int64)
        model.model.rope_deltas = None
        with torch.inference_mode():
            out = model(
                input_ids=torch.cat([inputs["input_ids"], more], dim=1),
                mm_token_type_ids=torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(more)], dim=1),
                pixel_values=inputs["pixel_values"],
                image_grid_thw=inputs["image_grid_thw"],
                use_cache=False,
            )
        expected.append(int(out.logits[0, -1].argmax()))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with engine(directories[kind]) as llm:
        (output,) = llm.generate(prompt(text, image), params)
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("kind", ("qwen3-vl", "qwen3.5"))
def test_sections_that_are_not_given_are_those_of_transformers(
    directories: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    shutil.copytree(directories[kind], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rotary = config["text_config"]["rope_parameters"]
    del rotary["mrope_section"], rotary["mrope_interleaved"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    text, image = "<s>Look at <image> and say", picture(0, 60, 40)
    tokens, logits = expected(tmp_path, text, [image], 4)
    assert (logits - expected(directories[kind], text, [image], 4)[1]).abs().max() > 0.01
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=4)
    with engine(tmp_path) as llm:
        completion = llm.generate(prompt(text, image), params)[0].outputs[0]
    assert completion.token_ids == tokens and completion.logprobs is not None
    logprobs = torch.log_softmax(logits, dim=-1)
    for place, entries in enumerate(completion.logprobs):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(logprobs[place, token]), abs=1e-4)


def test_axes_of_frequencies_follow_from_sections() -> None:
    fields = Entries({"max_position_embeddings": 64}, {}, "config.json")
    one_after_the_other = {"rope_theta": 1e4, "rope_type": "mrope", "mrope_section": [2, 3, 3]}
    assert read_rotary_set(fields, one_after_the_other, None, 16).axes == (0, 0, 1, 1, 1, 2, 2, 2)
    in_turns = {"rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    assert read_rotary_set(fields, in_turns, None, 16).axes == (0, 1, 2, 0, 1, 2, 0, 0)
    # As transformers puts them in turns: the axis with more frequencies than the first goes on to the end.
    table = np.zeros(8, dtype=int)
    for axis, count in ((1, 2), (2, 2)):
        table[axis : 3 * count : 3] = axis
    assert read_rotary_set(fields, in_turns, None, 16).axes == tuple(table)
    assert read_rotary_set(fields, {"rope_theta": 1e4}, None, 16).axes == ()
    with pytest.raises(ModelError, match="three counts that add up to 8"):
        read_rotary_set(fields, {"rope_theta": 1e4, "mrope_section": [2, 3]}, None, 16)
