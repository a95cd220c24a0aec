"""Tensors that llama.cpp stores otherwise than published checkpoints, put back as those have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.families.family import Family
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import GatedDeltaSpec, LatentSpec
from minivllm.weights.stored_weight import GroupedWeight, QuantizedWeight, RestoredWeight, StoredWeight

Shape = tuple[int, ...]


class GGUFLayout:
    """Of one model; names are those of ``hugging_face_name``.

    Vectors may lie in more dimensions than they have, or in fewer. A state's decay A is stored where
    checkpoints have log(-A). The weights that make keys and values of latents are split: keys transposed
    [heads, kv_rank, nope_dim], values [heads, value_dim, kv_rank]. Values of gated delta nets may be tiled,
    see Family.

    expected: shapes of all weights of the decoder.
    """

    def __init__(self, family: Family, config: DecoderConfig, expected: Mapping[str, Shape]) -> None:
        self._expected = expected
        self._waiting: dict[str, Tensor] = {}
        mixers = {f"model.layers.{index}": layer.mixer for index, layer in enumerate(config.layers)}
        self._latent = {
            f"{layer}.self_attn": spec for layer, spec in mixers.items() if isinstance(spec, LatentSpec)
        }
        self._tiled = {
            f"{layer}.linear_attn": spec
            for layer, spec in mixers.items()
            if isinstance(spec, GatedDeltaSpec) and family.gguf_tiles_values
        }

    def shapes(self, found: Mapping[str, Shape]) -> dict[str, Shape]:
        """Names and shapes of the tensors that ``restored`` makes of these.
        A tensor that does not fit is unchanged."""
        shapes = {name: self._shape(name, shape) for name, shape in found.items()}
        for block, spec in self._latent.items():
            keys, values, whole = (f"{block}.{part}_proj.weight" for part in ("k_b", "v_b", "kv_b"))
            fits_keys = shapes.get(keys) == (spec.heads, spec.kv_rank, spec.nope_dim)
            if (
                fits_keys
                and shapes.get(values) == (spec.heads, spec.value_dim, spec.kv_rank)
                and whole not in shapes
            ):
                del shapes[keys], shapes[values]
                shapes[whole] = self._expected[whole]
        return shapes

    def _shape(self, name: str, shape: Shape) -> Shape:
        wanted = self._expected.get(name, shape)
        is_vector = len(wanted) == 1 or 1 in wanted
        return wanted if is_vector and math.prod(wanted) == math.prod(shape) else shape

    def restored(self, name: str, weight: StoredWeight) -> Iterator[tuple[str, StoredWeight]]:
        """The tensors that the decoder gets for one of the file. Half of what makes keys and values waits for
        the other half. Raises ModelError where A is not below 0."""
        block, _, module = name.removesuffix(".weight").rpartition(".")
        if block in self._latent and module in ("k_b_proj", "v_b_proj"):
            assert isinstance(weight, Tensor)
            self._waiting[module] = weight.transpose(1, 2) if module == "k_b_proj" else weight
            if len(self._waiting) < 2:
                return
            name = f"{block}.kv_b_proj.weight"
            weight = torch.cat([self._waiting.pop("k_b_proj"), self._waiting.pop("v_b_proj")], dim=1).flatten(
                0, 1
            )
        if module == "A_log":
            assert isinstance(weight, Tensor)
            if not bool((weight < 0).all()):
                raise ModelError(
                    f"The tensor that {name!r} is made of must be below 0 everywhere; fetch the file again."
                )
            weight = (-weight).log()
        if isinstance(weight, Tensor):
            weight = weight.reshape(self._shape(name, tuple(weight.shape)))
        if block in self._tiled:
            weight = _untiled(self._tiled[block], module, weight)
        yield name, weight


def _untiled(spec: GatedDeltaSpec, module: str, weight: StoredWeight) -> StoredWeight:
    """With all values of a key together."""
    keys = 2 * spec.key_heads * spec.key_dim
    tiled = {
        "in_proj_qkv": (keys, spec.value_dim),
        "conv1d": (keys, spec.value_dim),
        "in_proj_z": (0, spec.value_dim),
    }
    tiled.update(
        dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), (0, 1)), out_proj=(0, spec.value_dim)
    )
    if module not in tiled:
        return weight
    start, size = tiled[module]
    heads = torch.arange(spec.heads).view(-1, spec.key_heads).T.flatten()
    values = start + (heads[:, None] * size + torch.arange(size)).flatten()
    order = torch.cat([torch.arange(start), values])
    if module == "out_proj":
        return _columns(weight, order, size)
    return weight.part(order, slice(None)) if isinstance(weight, QuantizedWeight) else weight[order]


def _columns(weight: StoredWeight, order: Tensor, run: int) -> StoredWeight:
    """Columns in another order, in which so many always stay side by side."""
    if isinstance(weight, GroupedWeight):
        size = math.gcd(run, weight.group_size)
        weight = weight.in_groups_of(size)
        groups = order[::size] // size
        return replace(
            weight,
            codes=weight.codes[:, order],
            scale=weight.scale[:, groups],
            offset=weight.offset[:, groups],
        )
    if isinstance(weight, QuantizedWeight):
        return RestoredWeight(weight.restore(torch.float32)[:, order])
    return weight[:, order]
