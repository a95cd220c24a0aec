"""The worker's adapters: in host memory by name, and in the slots of the stacks that the linear layers read.

Slot 0 is no adapter. The registry of the engine core decides what is in memory; the scheduler's admission
sees to it that the requests that run never use more adapters than there are slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.lora import CHUNK, LANES, MAX_TILES, AdapterTiles, chunks_of_rank, lane_width
from minivllm.checkpoints.checkpoint import rows_of_layers
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.config import LoRAConfig
from minivllm.linear.layer import Linear
from minivllm.lora.checkpoint import Adapter, LowRank, RowsOfLayers, load_adapter
from minivllm.messages import EngineRequest, LoRARequest
from minivllm.models.model import Model
from minivllm.specs.decoder import DecoderConfig


class AdapterManager:
    """Gives every linear layer of a model room for ``max_loras`` adapters, and fills it.

    To be made before the model's regions are built: the stacks are arguments of the compiled code, which
    never changes afterwards, whatever adapters come and go.
    """

    def __init__(self, model: Model, config: LoRAConfig, described: object = None) -> None:
        """described: the model's configuration. By a DecoderConfig, adapters may name modules as published
        checkpoints of its family do, which is how PEFT names them."""
        self._config = config
        self._dtype = model.dtype
        self._device = model.device
        self._num_chunks = 1 + config.max_loras * chunks_of_rank(config.max_lora_rank)
        self._linears = model.linears
        for _, linear in self._linears:
            linear.adapters = self._make_stacks(linear)
        self._expected = model.linear_shapes
        self._rows_of_layers: RowsOfLayers | None = None
        if isinstance(described, DecoderConfig):
            self._rows_of_layers = partial(rows_of_layers, described, self._expected)
        self._own = {f"{block}.{part}" for block, linear in self._linears for part in linear.sizes}
        self._adapters: dict[str, Adapter] = {}
        # Adapter in each slot from 1 on, least recently used first.
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(config.max_loras, 0, -1))
        # By slot: the chunks that its adapter has in the stacks of every layer.
        # The first chunk belongs to no adapter.
        self._chunks: dict[int, range] = {}

    @property
    def names_in_slots(self) -> list[str]:
        """Adapters on the device, least recently used first."""
        return list(self._slots)

    @property
    def max_rank(self) -> int:
        """The highest rank there is room for."""
        return self._config.max_lora_rank

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] in the whole model of every linear layer that an adapter may change,
        by its name there."""
        return dict(self._expected)

    def rank(self, name: str) -> int:
        """The highest rank that an adapter in memory has in any layer."""
        return self._adapters[name].rank

    def load(self, request: LoRARequest) -> str:
        """Read an adapter into host memory; its digest. Raises RequestError, and nothing changes."""
        adapter = load_adapter(
            request.path,
            self._expected,
            self._config.max_lora_rank,
            self._dtype,
            self._device.type == "cuda",
            self._rows_of_layers,
        )
        self.unload(request.name)
        own = {name: low_rank for name, low_rank in adapter.modules.items() if name in self._own}
        self._adapters[request.name] = replace(adapter, modules=own)  # the rank stays that of all stages
        return adapter.digest

    def unload(self, name: str) -> None:
        """Forget an adapter that no request uses."""
        self._adapters.pop(name, None)
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free_slots.append(slot)
            del self._chunks[slot]

    def activate(self, name: str, in_use: Iterable[str]) -> int:
        """The slot of an adapter, into which it is copied if it is not there yet.

        in_use: adapters that must keep their slots. Raises RuntimeError if those take all of them.
        """
        if name not in self._slots:
            self._slots[name] = slot = self._take_slot(set(in_use))
            self._place(slot, self._adapters[name])
        self._slots[name] = slot = self._slots.pop(name)  # to the end: the most recently used one
        return slot

    def _take_slot(self, in_use: set[str]) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        for name in self._slots:
            if name not in in_use:
                slot = self._slots.pop(name)
                del self._chunks[slot]
                return slot
        raise RuntimeError(
            f"All {self._config.max_loras} adapter slots are in use, which admission should prevent."
        )

    def _make_stacks(self, linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
        """a, b and columns of add_low_rank for this worker's shard,
        with room for the largest ranks in all slots."""
        width = lane_width(tuple(linear.sizes.values()), self._device)
        shape_of_a = (self._num_chunks, CHUNK, len(linear.sizes), linear.in_features)
        shape_of_b = (self._num_chunks, linear.out_features // width, CHUNK, width)
        a, b = (
            torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in (shape_of_a, shape_of_b)
        )
        columns = torch.zeros(self._config.max_loras + 1, 2, dtype=torch.int32, device=self._device)
        return a, b, columns

    def _place(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter to the first chunks that are free;
        close the gaps if what is free lies scattered."""
        size = chunks_of_rank(adapter.rank)
        start = 1
        for taken in sorted(self._chunks.values(), key=lambda chunks: chunks.start):
            if taken.start - start >= size:
                break
            start = taken.stop
        if start + size > self._num_chunks:
            start = 1
            for name, other in self._slots.items():
                if other != slot:
                    self._fill(other, self._adapters[name], start)
                    start = self._chunks[other].stop
        self._fill(slot, adapter, start)

    def _fill(self, slot: int, adapter: Adapter, first: int) -> None:
        """Copy an adapter into the chunks from ``first`` on,
        zeros where it changes nothing or has a lower rank."""
        self._chunks[slot] = chunks = range(first, first + chunks_of_rank(adapter.rank))
        for block, linear in self._linears:
            a, b, columns = linear.adapters
            low_ranks = [adapter.modules.get(f"{block}.{name}") for name in linear.sizes]
            rank = max((low_rank.a.shape[0] for low_rank in low_ranks if low_rank is not None), default=0)
            columns[slot, 0], columns[slot, 1] = first * CHUNK, first * CHUNK + rank
            a[chunks.start : chunks.stop] = 0
            b[chunks.start : chunks.stop] = 0
            width, start = b.shape[3], 0
            for part, ((name, size), low_rank) in enumerate(zip(linear.sizes.items(), low_ranks)):
                if low_rank is not None:
                    own, pieces = (
                        _own_shard(low_rank, linear, name),
                        slice(start // width, (start + size) // width),
                    )
                    for chunk, own_a, own_b in zip(chunks, own.a.split(CHUNK), own.b.T.split(CHUNK)):
                        a[chunk, : len(own_a), part].copy_(own_a, non_blocking=True)
                        if b.shape[1] == 1:  # all outputs in one piece, of which these are a part
                            b[chunk, 0, : len(own_a), start : start + size].copy_(own_b, non_blocking=True)
                        else:
                            own_b = own_b.unflatten(1, (-1, width)).transpose(0, 1)
                            b[chunk, pieces, : len(own_a)].copy_(own_b, non_blocking=True)
                start += size


class BatchAdapters:
    """Which adapter slot the request in each slot of the batch uses, and the rank of what lies there.

    lora_slots, ranks: int32 [max_num_seqs], 0 without adapter.
    """

    def __init__(self, manager: AdapterManager, max_num_seqs: int) -> None:
        self.lora_slots = np.zeros(max_num_seqs, dtype=np.int32)
        self.ranks = np.zeros(max_num_seqs, dtype=np.int32)
        self._max_chunks = chunks_of_rank(manager.max_rank)
        self._manager = manager
        self._names: dict[int, str] = {}

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """The request of a slot of the batch brings its adapter into memory, if it has one."""
        self.lora_slots[slot] = self.ranks[slot] = 0
        if request.lora is not None:
            name = request.lora.name
            self.lora_slots[slot] = self._manager.activate(name, self._names.values())
            self.ranks[slot] = self._manager.rank(name)
            self._names[slot] = name

    def remove(self, slot: int) -> None:
        """The request of the slot has left;
        its adapter stays where it is until another one needs the place."""
        self.lora_slots[slot] = self.ranks[slot] = 0
        self._names.pop(slot, None)

    def tiles(self, slots: np.ndarray, padded: int) -> AdapterTiles:
        """How the tokens of a step meet their adapters.
        slots [n]: each token's in the batch; padded: at least n."""
        own = np.zeros((2, padded), dtype=np.int32)
        own[0, : len(slots)], own[1, : len(slots)] = self.lora_slots[slots], self.ranks[slots]
        return adapter_tiles(own[0], own[1], self._max_chunks)

    def tile_specs(self, tokens: Size, device: torch.device) -> AdapterTiles:
        """``tiles`` as regions declare them."""
        specs: AdapterTiles = adapter_tile_specs(self._max_chunks, tokens, device)
        return specs


def _own_shard(low_rank: LowRank, linear: Linear, part: str) -> LowRank:
    """This worker's share: rows of B where the outputs are divided, columns of A where the inputs are."""
    return LowRank(low_rank.a[:, linear.inputs], low_rank.b[linear.outputs[part]])


# How the rows of a step meet their adapters in compiled loops: planned on the host, once for all layers.


def adapter_tiles(slots: np.ndarray, ranks: np.ndarray, max_chunks: int) -> AdapterTiles:
    """The tiles of a batch in the sizes that compiled code takes: fixed for one row, and otherwise 2 or more.

    slots int [T]: adapter of each row, 0 for none. ranks int [T]: rank of that adapter. max_chunks: what the
    highest rank there can be takes. More tiles than pay are not filled in: one more than MAX_TILES says so.
    """
    rows = len(slots)
    lanes = 1 if rows == 1 else LANES
    places = np.empty((rows, max_chunks), dtype=np.int32)
    planned = plan_tiles(slots, ranks, lanes, places)
    least = max_chunks if rows == 1 else 2
    size = MAX_TILES + 1 if planned is None else max(least, len(planned[0]))
    tiles = [np.zeros((size, lanes), dtype=np.int32), *np.zeros((2, size), dtype=np.int32)]
    for array, content in zip(tiles, planned or ()):
        array[: len(content)] = content
    return AdapterTiles(*map(torch.from_numpy, (*tiles, places)))


def adapter_tile_specs(max_chunks: int, tokens: Size, device: torch.device) -> Any:
    """The result of ``adapter_tiles`` for a step of ``tokens``, as regions declare it."""
    tiles = Size("adapter tiles", 2, single=max_chunks)
    lanes = Size("lanes", LANES, single=1, varies=False)
    shapes: tuple[tuple[int | Size, ...], ...] = ((tiles, lanes), (tiles,), (tiles,), (tokens, max_chunks))
    specs: Any = [TensorSpec(shape, torch.int32, device) for shape in shapes]
    return AdapterTiles(*specs)


def plan_tiles(
    slots: np.ndarray, ranks: np.ndarray, lanes: int, places: np.ndarray
) -> tuple[np.ndarray, ...] | None:
    """The tiles (rows, adapters and chunks of AdapterTiles) of a batch;
    None if there are more than MAX_TILES.

    slots int [T]: adapter of each row, 0 for none. ranks int [T]: rank of that adapter.
    places [T, chunks]: written.
    """
    places[:] = -1
    used = np.flatnonzero(slots)
    adapters, first, group, counts = np.unique(
        slots[used], return_index=True, return_inverse=True, return_counts=True
    )
    depths = -(-ranks[used[first]] // CHUNK)
    heights = -(-counts // lanes)
    total = int((depths * heights).sum())
    if total > MAX_TILES:
        return None
    rows = np.zeros((total, lanes), dtype=np.int32)
    tile_adapters, chunks = np.zeros((2, total), dtype=np.int32)
    start = 0
    for index, (adapter, depth, height) in enumerate(zip(adapters, depths, heights)):
        own = used[group == index]
        tiles = slice(start, start + depth * height)
        rows[tiles] = np.repeat(
            np.pad(own, (0, height * lanes - len(own)), mode="edge").reshape(height, lanes), depth, 0
        )
        tile_adapters[tiles] = adapter
        chunks[tiles] = np.tile(np.arange(depth), height)
        block, lane = np.divmod(np.arange(len(own)), lanes)
        tile = start + block[:, None] * depth + np.arange(depth)
        places[own, :depth] = tile * lanes + lane[:, None]
        start += depth * height
    return rows, tile_adapters, chunks
