"""LLaVA-NeXT and LLaVA-OneVision: features of tiles become lines, as transformers packs them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor, ProcessorMixin
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import ModelError, RequestError
from minivllm.multimodal.eyes.llava_next import in_lines
from minivllm.multimodal.facts import read_config, read_processor
from minivllm.multimodal.spans.any_resolution import AnyResolution
from tests.multimodal.conftest import engine
from tests.multimodal.models import make_tokenizer, picture, reference, save_lines_of_tiles, text_config_of
from tests.multimodal.test_parity import check

KINDS = ("llava-next", "llava-onevision")
SIDES = st.integers(1, 400)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(width=SIDES, height=SIDES)
@example(width=1, height=190)
@example(width=16, height=16)
@example(width=48, height=47)
def test_lines_are_those_of_transformers(
    directories: dict[str, Path], kind: str, width: int, height: int
) -> None:
    directory = directories[kind]
    config = read_config(directory)
    expansion = AnyResolution(config, read_processor(directory, config))
    span = expansion.expand(width, height, {}, lambda text: [])
    assert span.lines is not None
    features = torch.randn(span.num_units, span.unit_embeds - 1, 8)
    newline = torch.randn(8)
    model = reference(directory)[0].model
    more = {"vision_feature_select_strategy": "default"} if kind == "llava-next" else {
        "vision_aspect_ratio": model.config.vision_aspect_ratio
    }  # fmt: skip
    (expected,), _ = model.pack_image_features(
        [features], torch.tensor([[height, width]]), image_newline=newline, **more
    )
    embeds = torch.cat([features, newline.expand(span.num_units, 1, -1)], dim=1)
    found = in_lines(embeds.flatten(0, 1), span.lines)
    assert len(found) == len(span.token_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@cache
def published(kind: str) -> tuple[AnyResolution, Any]:
    """(expansion, processor of transformers) with the sizes of llava-v1.6 or llava-onevision-qwen2."""
    tokenizer = make_tokenizer()
    if kind == "llava-next":
        images: Any = LlavaNextImageProcessorPil(size={"shortest_edge": 336}, crop_size=336)
        processor: Any = LlavaNextProcessor(images, tokenizer, 14, "default", num_additional_image_tokens=1)
        config = {"model_type": "llava_next", "vision_config": {"image_size": 336, "patch_size": 14}}
    else:
        images = LlavaOnevisionImageProcessorPil()
        with patch.object(ProcessorMixin, "check_argument_for_proper_class"):  # it has no part for videos
            processor = LlavaOnevisionProcessor(images, tokenizer, None, 27 * 27, "full")
        config = {"model_type": "llava_onevision", "vision_config": {"image_size": 384, "patch_size": 14}}
    return AnyResolution({**config, "image_token_index": 2}, images.to_dict()), processor


@pytest.mark.parametrize(("kind", "edge", "most"), [(KINDS[0], 336, 2928), (KINDS[1], 384, 27010)])
@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 6000), height=st.integers(1, 6000))
def test_lines_in_published_sizes(kind: str, edge: int, most: int, width: int, height: int) -> None:
    expansion, processor = published(kind)
    span = expansion.expand(width, height, {}, lambda text: [])
    expected = processor._get_number_of_features(height, width, edge, edge) - (kind == "llava-next")
    assert span.runs == [(0, expected)] and len(span.token_ids) == expected
    assert max(expected, span.num_units * span.unit_embeds) <= expansion.most_embeds == most


@pytest.mark.parametrize(
    ("kind", "text", "ties"),
    [
        ("llava-next", "llama", False),
        ("llava-next", "qwen2", False),
        ("llava-onevision", "qwen2", True),
    ],
)
def test_language_models(tmp_path: Path, kind: str, text: str, ties: bool) -> None:
    directory = save_lines_of_tiles(tmp_path, kind, text_config_of(text, tie_word_embeddings=ties))
    with engine(directory) as llm:
        check(llm, directory, "<s>a<image>b<image>c", [picture(0), picture(1, 16, 16)])
        check(llm, directory, "<s>Only words.", [])


@pytest.mark.parametrize("is_newer", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_of_checkpoints(
    directories: dict[str, Path], tmp_path: Path, kind: str, is_newer: bool
) -> None:
    """Published ones have the names of an older transformers, but for the encoder those that it saves now."""
    source = directories[kind]
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    renamed = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
        if is_newer:
            name = name.replace("language_model.model.", "language_model.")
            is_head = name.startswith("language_model.lm_head.")
            name = name.removeprefix("language_model.") if is_head else f"model.{name}"
        renamed[name] = tensor
    newline = "model.image_newline" if is_newer else "image_newline"
    norm = "model.language_model.norm.weight" if is_newer else "language_model.model.norm.weight"
    assert {newline, norm} < set(renamed)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    with engine(tmp_path) as llm:
        check(llm, source, "<s>Look at <image> and say", [picture(0)])


@pytest.mark.parametrize(
    ("kind", "file", "changes", "reason"),
    [
        ("llava-next", "config.json", {"vision_feature_select_strategy": "full"}, "strategy is 'full' with the"),
        ("llava-onevision", "config.json", {"vision_aspect_ratio": "anyres"}, "must be 'anyres_max_' and a num"),
        ("llava-next", "preprocessor_config.json", {"image_grid_pinpoints": [[12, 30]]}, "whole tiles of 12"),
        ("llava-next", "preprocessor_config.json", {"crop_size": {"height": 24, "width": 24}}, "image_size is 12"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(
    directories: dict[str, Path], tmp_path: Path, kind: str, file: str, changes: dict[str, Any], reason: str
) -> None:
    shutil.copytree(directories[kind], tmp_path, dirs_exist_ok=True)
    entries = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(entries | changes))
    with pytest.raises(ModelError, match=f"{reason}.*limit_mm_per_prompt"):
        resolve(EngineArgs(model=str(tmp_path), device="cpu"))
    resolve(EngineArgs(model=str(tmp_path), device="cpu", limit_mm_per_prompt={"image": 0}))


def test_a_video_is_refused(directories: dict[str, Path]) -> None:
    with engine(directories["llava-onevision"]) as llm:
        for part in (
            {"type": "video", "video": "film.mp4"},
            {"type": "video_url", "video_url": {"url": "a"}},
        ):
            with pytest.raises(
                RequestError, match=r"messages\.0\.content\.0 is a video.*send some of its frames"
            ):
                llm.chat([{"role": "user", "content": [part]}])
        with pytest.raises(RequestError, match="multi_modal_data"):
            llm.generate({"prompt": "<s>", "multi_modal_data": {"video": []}})
