"""MTP heads (multi-token prediction), which are part of a model's checkpoint: their shape and their tensors.

Such a head is one more decoder layer of the model's kind, and guesses as an EAGLE head does. The model's
family says under which names its tensors are stored (``Family.head_names``). Embedding and language model
head are the model's; copies that some checkpoints hold are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minivllm.checkpoints.checkpoint import (
    Shape,
    dummy_weight,
    expected_shapes,
    iterate_head_weights,
)
from minivllm.errors import ModelError
from minivllm.families.makers.registry import FAMILIES
from minivllm.gguf.gguf_file import find_gguf
from minivllm.spec_decode.eagle.config import EagleConfig
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import StateMixerSpec
from minivllm.weights.stored_weight import StoredWeight


def mtp_config(target: DecoderConfig) -> EagleConfig:
    """The head of a model: its layer is like the last of the model's layers that attends. Raises ModelError
    if checkpoints of the family hold no head."""
    if not FAMILIES[target.architecture].head_names:
        raise ModelError(
            f"Checkpoints of {target.architecture} hold no MTP head: choose another method, such as ngram."
        )
    attending = [layer for layer in target.layers if not isinstance(layer.mixer, StateMixerSpec)]
    return EagleConfig(
        version="mtp",
        layer=replace(target, layers=(attending[-1],)),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
    )


@dataclass(frozen=True)
class MtpTensors:
    """What an MTP head is loaded from. shapes: by name in the head. directory: of the model; None for random
    weights, which depend on ``seed``."""

    shapes: dict[str, Shape]
    target: DecoderConfig
    directory: Path | None
    seed: int = 0

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, StoredWeight]]:
        """(name, CPU tensor) of all of them, one at a time. Raises ModelError, before the first, for a
        missing or misshapen tensor."""
        if self.directory is None:
            named: Iterator[tuple[str, StoredWeight]] = (
                (name, dummy_weight(name, shape, dtype, self.seed)) for name, shape in self.shapes.items()
            )
        else:
            named = iterate_head_weights(self.directory, self.target, self.shapes, dtype)
        return ((name.removeprefix("model."), tensor) for name, tensor in named)


def mtp_tensors(path: str | Path, target: DecoderConfig, load_format: str, seed: int) -> MtpTensors:
    """The tensors of the head in a model's checkpoint. Raises ModelError for a GGUF file."""
    config = mtp_config(target)
    hidden = target.hidden_size
    shapes = {
        **expected_shapes(config.layer),
        "model.fc.weight": (hidden, 2 * hidden),
        "model.layers.0.enorm.weight": (hidden,),
        "model.layers.0.hnorm.weight": (hidden,),
    }
    for shared in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes.pop(shared, None)
    if load_format == "dummy":
        return MtpTensors(shapes, target, None, seed)
    if find_gguf(path, load_format) is not None:
        raise ModelError(
            f"{path} is a GGUF file, but MTP heads are read from safetensors files: give a model directory, "
            "or choose another method, such as ngram."
        )
    return MtpTensors(shapes, target, Path(path))


def check_mtp(path: str | Path, target: DecoderConfig, load_format: str) -> None:
    """Raises ModelError unless the checkpoint of a model holds a head for it. Names and shapes are checked;
    only the first tensor is read."""
    next(mtp_tensors(path, target, load_format, 0).read(torch.float32))
