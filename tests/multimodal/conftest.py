"""Tiny models that see, saved once for a session, and engines of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration

from minivllm import LLM
from minivllm.engine.core import EngineCore
from minivllm.multimodal.eyes.encoded_images import EncodedImages
from minivllm.simulation.ranks import virtual_llm
from tests.multimodal.models import (
    KINDS,
    OTHERS,
    WITH_EXPERTS,
    make_tokenizer,
    save,
    save_llava,
    text_config,
)

PLAIN_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] + ': ' + message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Knows contents that are texts only."""


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of model -> where it is saved."""
    return {kind: save(tmp_path_factory.mktemp(kind), kind) for kind in (*KINDS, *WITH_EXPERTS, *OTHERS)}


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of text, an eye without a language model, and both as one LLaVA model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("text", "eye", "both")}
    text = LlamaForCausalLM(text_config())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in text.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.15 * noise)
    text.save_pretrained(folders["text"])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(folders["text"])
    save_llava(folders["both"], "siglip")
    both = LlavaForConditionalGeneration.from_pretrained(folders["both"], dtype=torch.float32)
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(folders["both"])
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(folders["both"] / name, folders["eye"])
    for part in ("language_model", "lm_head"):
        setattr(both if part == "lm_head" else both.model, part, None)
    both.save_pretrained(folders["eye"])
    return folders


@contextmanager
def engine(directory: Path, **changes: Any) -> Iterator[LLM]:
    """An uncompiled engine in this process, several workers of which are threads; at its end nothing is left
    of any request."""
    settings: dict[str, Any] = {
        "model": str(directory),
        "device": "cpu",
        "dtype": "float32",
        "enforce_eager": True,
        "num_gpu_blocks_override": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_model_len": 512,
        **changes,
    }
    is_divided = {"tensor_parallel_size", "pipeline_parallel_size"} & changes.keys()
    with (virtual_llm if is_divided else LLM)(**settings) as llm:
        yield llm
        core = core_of(llm)
        while core.has_work():
            core.step()
        core.scheduler.check_integrity()
        if core.encodings is not None:
            assert core.encodings.num_held_pixels == 0
            assert {images.num_bytes for images in encoded_images(llm)} == {core.encodings.num_bytes}
            assert llm.llm_engine.images is not None and llm.llm_engine.images.num_kept == 0


def core_of(llm: LLM) -> EngineCore:
    return llm.llm_engine.client.core  # type: ignore[attr-defined,no-any-return]


def encoded_images(llm: LLM) -> list[EncodedImages]:
    """Of each worker that has an eye."""
    executor: Any = core_of(llm).executor
    workers = getattr(executor, "workers", None) or [executor.worker]
    return [worker._images for worker in workers if worker._images is not None]
