"""The tensors of a published EAGLE head:
under which names, of which shapes, and which of them may be left out.

Published files leave out ``model.``; EAGLE-3 calls its layer ``midlayer``. Here both are ``layers.0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minivllm.checkpoints.checkpoint import (
    FLOAT_TYPES,
    Shape,
    check_tensors,
    dummy_weight,
    expected_shapes,
    open_safetensors,
    safetensors_files,
)
from minivllm.errors import ModelError
from minivllm.spec_decode.eagle.config import NUM_FUSED_LAYERS, EagleConfig

_LAYER = "layers.0."
_MAP_TYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}


@dataclass(frozen=True)
class EagleTensors:
    """What a head is loaded from. shapes: by name. places: the file of each tensor and its name there; empty
    for random weights, which depend on ``seed``."""

    shapes: dict[str, Shape]
    places: dict[str, tuple[Path, str]]
    seed: int = 0

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, CPU tensor) of all of them, one at a time:
        floating point in ``dtype``, maps as they are stored."""
        for name, shape in self.shapes.items():
            if not self.places:
                yield name, dummy_weight(name, shape, dtype, self.seed)
                continue
            path, stored = self.places[name]
            with open_safetensors(path) as file:
                tensor: Tensor = file.get_tensor(stored)
            yield name, tensor if name in _MAP_TYPES else tensor.to(dtype)


def random_tensors(config: EagleConfig, seed: int) -> EagleTensors:
    """A head of random weights, which guesses among the first tokens of the vocabulary."""
    return EagleTensors(_required_shapes(config), {}, seed)


def find_tensors(directory: str | Path, config: EagleConfig) -> EagleTensors:
    """The tensors of the head in a directory; only the files' headers are read.

    Raises ModelError naming file and tensor for a missing or broken file, a missing,
    unexpected or misshapen tensor.
    """
    directory = Path(directory)
    files, listed = safetensors_files(directory)
    shapes: dict[str, Shape] = {}
    places: dict[str, tuple[Path, str]] = {}
    for path in files:
        with open_safetensors(path) as file:
            for stored in file.keys():  # noqa: SIM118 - it is no dictionary
                if listed.get(stored, path) != path:
                    continue
                name = stored.removeprefix("model.")
                if config.version == "eagle3" and name.startswith("midlayer."):
                    name = _LAYER + name.removeprefix("midlayer.")
                if name in places:
                    raise ModelError(f"{path}: tensor {stored!r} is also in {places[name][0]}.")
                view = file.get_slice(stored)
                allowed = _MAP_TYPES.get(name, FLOAT_TYPES)
                if view.get_dtype() not in allowed:
                    raise ModelError(
                        f"{path}: tensor {stored!r} is stored as {view.get_dtype()}, but must be one of "
                        f"{', '.join(allowed)}."
                    )
                shapes[name], places[name] = tuple(view.get_shape()), (path, stored)
    _check_version(shapes, config, directory)
    optional = {name: shape for name, shape in _optional_shapes(config).items() if name in shapes}
    expected = {**_required_shapes(config), **optional}
    check_tensors(shapes, expected, {name: path for name, (path, _) in places.items()}, directory)
    return EagleTensors(shapes, places)


def _check_version(shapes: dict[str, Shape], config: EagleConfig, directory: Path) -> None:
    is_eagle3 = any(name.startswith("midlayer.") or name == "d2t" for name in shapes)
    is_eagle3 = is_eagle3 or f"{_LAYER}hidden_norm.weight" in shapes
    if is_eagle3 != (config.version == "eagle3"):
        found, other = ("an EAGLE-3", "eagle3") if is_eagle3 else ("no EAGLE-3", "eagle")
        raise ModelError(f"{directory} holds the tensors of {found} head: use method {other!r}.")


def _required_shapes(config: EagleConfig) -> dict[str, Shape]:
    layer, hidden = config.layer, config.layer.hidden_size
    shapes = {
        name.removeprefix("model."): shape
        for name, shape in expected_shapes(layer).items()
        if name.startswith("model." + _LAYER)
    }
    if config.version == "eagle":
        del shapes[f"{_LAYER}input_layernorm.weight"]
        return {"fc.weight": (hidden, 2 * hidden), **shapes}
    shapes |= {
        f"{_LAYER}hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, NUM_FUSED_LAYERS * config.target_hidden_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.draft_vocab_size != layer.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    if hidden != config.target_hidden_size:
        shapes["embed_tokens.weight"] = (layer.vocab_size, hidden)
    return shapes


def _optional_shapes(config: EagleConfig) -> dict[str, Shape]:
    layer = config.layer
    shapes: dict[str, Shape] = {
        "fc.bias": (layer.hidden_size,),
        "embed_tokens.weight": (layer.vocab_size, layer.hidden_size),
    }
    if config.version == "eagle3":
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (layer.vocab_size,)}
    return shapes
