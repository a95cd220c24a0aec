"""Spans are what the processors of transformers write, for images of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import RequestError
from minivllm.multimodal.eyes.llava_next import in_lines
from minivllm.multimodal.facts import read_config, read_processor
from minivllm.multimodal.prompt_images import PromptImages
from minivllm.multimodal.spans.families import make_expansion
from minivllm.multimodal.spans.whole import Grid
from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.multimodal.models import KINDS, OTHERS, picture, reference

SIZES = st.tuples(st.integers(1, 300), st.integers(1, 300)).filter(lambda size: max(size) <= 190 * min(size))


@pytest.mark.parametrize("kind", (*KINDS, *OTHERS))
@settings(max_examples=100, deadline=None)
@given(size=SIZES)
@example(size=(300, 2))
@example(size=(16, 16))
@example(size=(17, 16))
def test_spans_and_pixels_of_any_size(directories: dict[str, Path], kind: str, size: tuple[int, int]) -> None:
    directory = directories[kind]
    config, tokenizer = read_config(directory), load_tokenizer(directory)
    expansion = make_expansion(
        str(config["model_type"]), config, read_processor(directory, config), str(directory)
    )
    image = Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8))
    _, processor = reference(directory)
    for choice in [{}, *[{name: value} for name in expansion.options for value in (False, True)]]:
        try:
            span = expansion.expand(
                *size, choice, lambda text: tokenizer.encode(text, add_special_tokens=False)
            )
        except RequestError:
            with pytest.raises(ValueError):
                processor(images=[image], text="<image>", return_tensors="np")
            continue
        inputs = processor(
            images=[image], text="<image>", return_tensors="np", add_special_tokens=False, **choice
        )
        written = tokenizer.encode(expansion.written("<image>", *size, choice), add_special_tokens=False)
        pieces = iter(span.pieces or [(0, len(span.token_ids))])
        whole: list[int] = []
        for token in written:
            first, count = next(pieces) if token == expansion.placeholder else (0, 0)
            whole += span.token_ids[first : first + count] if count else [token]
        assert not list(pieces) and whole == inputs["input_ids"][0].tolist()
        pixels = np.asarray(inputs["pixel_values"])
        moments = 2 if "image_grid_thw" in inputs else 1  # of a patch, in models that see videos
        if "image_position_ids" in inputs:  # patches are padded
            pixels = pixels[inputs["image_position_ids"][..., 0] >= 0]
        assert pixels.size == moments * span.num_units * np.prod(span.unit_shape)
        assert span.num_units * span.unit_embeds <= expansion.most_embeds
        assert span.unit_embeds <= expansion.unit_embeds
        placeholders = [place for first, count in span.runs for place in range(first, first + count)]
        token = config.get("image_token_id", config.get("image_token_index"))
        assert placeholders == [place for place, one in enumerate(span.token_ids) if one == token]
        num_embeds = span.num_units * span.unit_embeds
        if span.lines is not None:
            num_embeds = len(in_lines(torch.zeros(num_embeds, 1), span.lines))
        assert len(placeholders) == num_embeds


TEXTS = st.lists(st.sampled_from(["word", "\n", "\n\n", " ", "<image>"]), min_size=1, max_size=12).map(
    "".join
)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text="user\n<image>\n\nWhat")
def test_newlines_around_an_image_are_one_token_with_their_neighbours(
    directories: dict[str, Path], text: str
) -> None:
    directory = directories["gemma3"]
    config, _ = resolve(EngineArgs(model=str(directory), device="cpu"))
    assert config.images is not None
    tokenizer = load_tokenizer(directory)
    ours = PromptImages(config.images, str(directory), tokenizer)
    images = [picture(seed) for seed in range(text.count("<image>"))]
    pictures = [ours.read_one(image, {}, "an image") for image in images]
    token_ids = tokenizer.encode(ours.written(text, pictures), add_special_tokens=False)
    _, processor = reference(directory)
    inputs = processor(images=images or None, text=text, add_special_tokens=False)
    assert ours.expand(token_ids, pictures)[0] == list(inputs["input_ids"][0])


@pytest.mark.parametrize(
    ("least", "most"), [(56 * 56, 28 * 28 * 1280), (56 * 56, 28 * 28 * 36), (3136, 4704)]
)
@given(st.integers(1, 4000), st.floats(1, 200))
def test_a_narrow_image_has_no_more_embeddings_than_there_is_room_for(
    least: int, most: int, side: int, ratio: float
) -> None:
    """Each of its sides is a square of patches at least, whatever its area would be resized to."""
    expansion = Grid({"image_token_id": 5}, {"min_pixels": least, "max_pixels": most})
    longer = min(16384, int(side * ratio))
    for width, height in ((side, longer), (longer, side)):
        rows, columns = expansion.grid(width, height)
        assert rows * columns <= expansion.most_embeds
