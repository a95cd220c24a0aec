"""A model small enough for every chapter: random weights, made on the spot, the same on every machine."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import Size
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.models.decoder import Decoder
from minivllm.models.model import token_specs
from minivllm.program.fuse import Plan
from minivllm.program.printed import Line, sections
from minivllm.simulation.program_plan import planned_programs

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
"""The entries of config.json, as published models have them."""

_folders: list[tempfile.TemporaryDirectory[str]] = []


def model_folder(entries: dict[str, Any]) -> Path:
    """A directory that holds a config.json and nothing else: load it with ``load_format="dummy"``."""
    folder = tempfile.TemporaryDirectory(prefix="minivllm-tutorial-")
    _folders.append(folder)  # it lives as long as the process
    path = Path(folder.name)
    (path / "config.json").write_text(json.dumps(entries))
    return path


@cache
def small_model() -> Path:
    """The directory of the model that most chapters use."""
    return model_folder(SHAPE)


def engine_arguments(**arguments: Any) -> dict[str, Any]:
    """Arguments of ``LLM`` for the small model on any machine; ``arguments`` are added to them."""
    given = {
        "load_format": "dummy",
        "device": "cpu",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": 16,
    }
    return {"model": str(small_model()), "num_gpu_blocks_override": 256, **given, **arguments}


@cache
def small_decoder(**overrides: Any) -> Decoder:
    """The same model without an engine around it, ready to compute uncompiled."""
    config = read_decoder_config(small_model(), "dummy", overrides)
    float32 = torch.float32
    decoder = Decoder(
        config, dtype=float32, attention_dtype=float32, device=torch.device("cpu"), max_model_len=2048
    )
    decoder.load_weights(iterate_weights(small_model(), "dummy", config, float32))
    build_regions(decoder, RegionCompiler(enabled=False))
    return decoder


def build_regions(decoder: Decoder, compiler: RegionCompiler) -> None:
    """For caches of any number of blocks of 16 tokens."""
    caches = [spec.declare(Size("blocks", 64), 16, decoder.device) for spec in decoder.cache_specs]
    decoder.build_regions(compiler, token_specs(decoder.device), caches)


def plans(layers: int, ranks: int = 1, stages: int = 1) -> list[Plan]:
    """The fused program of the small model with so many layers, for rank 0 of each stage, without weights."""
    folder = model_folder({**SHAPE, "num_hidden_layers": layers})
    args = EngineArgs(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
    )
    return planned_programs(*resolve(args))


def printed(plan: Plan) -> list[Line]:
    """The pieces and seams of a plan, of equal neighbouring layers those of one, as ``minivllm env`` does."""
    return [line for section in sections(plan) for line in section.lines]
