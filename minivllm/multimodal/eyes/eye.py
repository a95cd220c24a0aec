"""An image encoder and what joins it to the language model:
modules of transformers, with a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.checkpoints.checkpoint import open_safetensors, safetensors_files
from minivllm.config import EngineConfig, ImagesConfig
from minivllm.errors import ModelError
from minivllm.multimodal.eyes.gemma3 import gemma3_parts
from minivllm.multimodal.eyes.gemma4 import gemma4_parts
from minivllm.multimodal.eyes.idefics3 import idefics3_parts
from minivllm.multimodal.eyes.internvl import internvl_parts
from minivllm.multimodal.eyes.llava import llava_parts
from minivllm.multimodal.eyes.llava_next import llava_next_parts
from minivllm.multimodal.eyes.pixtral import pixtral_parts
from minivllm.multimodal.eyes.qwen import qwen_parts
from minivllm.multimodal.facts import read_config, read_processor
from minivllm.plugins.plugin import import_object
from minivllm.plugins.points import MODEL_IMPLEMENTATIONS

Parts = dict[str, nn.Module]
"""Modules by the beginning of their names in a checkpoint, "model." left out; "" for one without a name."""

Encode = Callable[[Tensor], Tensor]
"""Normalised pixels [units, channels, height, width] -> embeddings [units, embeds, levels · hidden]: what
takes the place of the language model's embeddings, then the deeper levels."""


@dataclass(frozen=True)
class Normalization:
    """``(x * scale - mean) / std``, for each channel, in float32."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, processor: Mapping[str, Any]) -> Normalization:
        """As the entries of a processor's file say."""
        scale = float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0
        if not processor.get("do_normalize", True):
            return cls(scale, (0.0,), (1.0,))
        return cls(scale, tuple(processor["image_mean"]), tuple(processor["image_std"]))

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [units, channels, height, width] -> float32, same shape."""
        mean, std = (
            torch.tensor(values, device=pixels.device)[:, None, None] for values in (self.mean, self.std)
        )
        return (pixels.float() * self.scale - mean) / std


class Eye:
    """Encodes units of images. parts: its modules; encode: what they compute together."""

    def __init__(
        self,
        parts: Parts,
        encode: Encode,
        normalization: Normalization,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts = parts
        self._encode = encode
        self._normalization = normalization
        self.dtype = dtype
        self.device = device

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """uint8 [units, channels, height, width], on any device -> [units, embeds,
        levels · hidden] of the model's dtype."""
        return self._encode(self._normalization(pixels.to(self.device)).to(self.dtype))

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight by ``change(weight)``; see Model."""
        for module in self.parts.values():
            for _, tensor in _tensors(module):
                tensor.data = change(tensor.data)

    def take_weights(self, other: Eye) -> None:
        """Take over the weights of an eye that was loaded in the same way."""
        for name, module in self.parts.items():
            for (_, tensor), (_, theirs) in zip(_tensors(module), _tensors(other.parts[name]), strict=True):
                tensor.data = theirs.data


_FAMILIES = {
    "llava": llava_parts,
    "llava_next": llava_next_parts,
    "llava_onevision": llava_next_parts,
    "idefics3": idefics3_parts,
    "smolvlm": idefics3_parts,
    "gemma3": gemma3_parts,
    "gemma4": gemma4_parts,
    "mistral3": pixtral_parts,
    "internvl": internvl_parts,
    "qwen2_vl": qwen_parts,
    "qwen2_5_vl": qwen_parts,
    "qwen3_vl": qwen_parts,
    "qwen3_vl_moe": qwen_parts,
    "qwen3_5": qwen_parts,
    "qwen3_5_moe": qwen_parts,
}


def load_eye(config: EngineConfig, images: ImagesConfig, device: torch.device) -> Eye:
    """The eye of a model, with its weights. Raises ModelError where they are not all there."""
    from transformers import AutoConfig

    path, dtype = Path(config.images_path), getattr(torch, config.dtype)
    described = AutoConfig.from_pretrained(path)
    described._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(config.seed)
            if images.family in _FAMILIES:
                parts, encode = _FAMILIES[images.family](described)
            else:
                load = import_object("the image encoder", MODEL_IMPLEMENTATIONS[config.model_impl].eye)
                parts, encode = load(path, described, config.load_format != "dummy")
    finally:
        torch.set_default_dtype(before)
    for module in parts.values():
        # Of the dtype that they are made in: what frequencies are made of stays in float32.
        module.eval().requires_grad_(False).to(device)
    if images.family in _FAMILIES and (config.load_format != "dummy" or config.eye_path is not None):
        _load(path, parts, config.eye_path is not None)
    eye = Eye(parts, encode, Normalization.of(read_processor(path, read_config(path))), dtype, device)
    if images.family not in _FAMILIES:
        _check_features(eye, images)
    return eye


def _check_features(eye: Eye, images: ImagesConfig) -> None:
    """Raises ModelError where a tile has more or fewer features than placeholders."""
    found = eye.encode(torch.zeros(1, *images.unit_shape, dtype=torch.uint8)).shape
    if found[1] != images.unit_embeds:
        raise ModelError(
            f"The image encoder of {images.family!r} gives {found[1]} features of a tile, but its processor "
            f'writes {images.unit_embeds} placeholders: start with limit_mm_per_prompt={{"image": 0}}.'
        )


def _load(directory: Path, parts: Parts, is_joined: bool) -> None:
    """Copy the tensors of a checkpoint into the modules. Raises ModelError."""
    targets = {
        f"{part}.{_plain(name)}".removeprefix("."): tensor
        for part, module in parts.items()
        for name, tensor in _tensors(module)
    }
    missing = set(targets)
    for path in safetensors_files(directory)[0]:
        with open_safetensors(path) as file:
            for stored in file.keys():  # noqa: SIM118 (a safetensors file is no dictionary)
                name = _plain(stored.removeprefix("model."))
                target = targets.get(name)
                if target is None:
                    continue
                value = file.get_tensor(stored)
                if value.shape != target.shape:
                    raise ModelError(
                        f"{path}: tensor {stored!r} is {list(value.shape)}, but the image encoder that "
                        "config.json "
                        f"describes has {list(target.shape)} there."
                    )
                target.copy_(value)
                missing.discard(name)
    if missing:
        advice = (
            "leave eye out"
            if is_joined
            else 'start with limit_mm_per_prompt={"image": 0} to serve it without images'
        )
        raise ModelError(
            f"{directory} lacks {len(missing)} tensors of its image encoder, {min(missing)!r} among them: "
            f"{advice}."
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What checkpoints hold of a module, by name."""
    yield from module.named_parameters()
    persistent = module.state_dict().keys()
    yield from ((name, tensor) for name, tensor in module.named_buffers() if name in persistent)


def _plain(name: str) -> str:
    """A name without the module that only some versions of transformers put around an encoder."""
    return name.replace("vision_tower.vision_model.", "vision_tower.")
