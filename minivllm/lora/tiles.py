"""How the rows of a step meet their adapters in compiled loops: planned on the host, once for all layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels_triton_free.lora import CHUNK, LANES, MAX_TILES, AdapterTiles
from minivllm.compilation.regions import Size, TensorSpec


def adapter_tiles(slots: np.ndarray, ranks: np.ndarray, max_chunks: int) -> AdapterTiles:
    """The tiles of a batch in the sizes that compiled code takes: fixed for one row, and otherwise 2 or more.

    slots int [T]: adapter of each row, 0 for none. ranks int [T]: rank of that adapter. max_chunks: what the highest
    rank there can be takes. More tiles than pay are not filled in: one more than MAX_TILES says so.
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
    """What ``adapter_tiles`` makes for a step of ``tokens``, as regions declare it."""
    tiles = Size("adapter tiles", 2, single=max_chunks)
    lanes = Size("lanes", LANES, single=1, varies=False)
    shapes: tuple[tuple[int | Size, ...], ...] = ((tiles, lanes), (tiles,), (tiles,), (tokens, max_chunks))
    specs: Any = [TensorSpec(shape, torch.int32, device) for shape in shapes]
    return AdapterTiles(*specs)


def plan_tiles(slots: np.ndarray, ranks: np.ndarray, lanes: int, places: np.ndarray) -> tuple[np.ndarray, ...] | None:
    """The tiles (rows, adapters and chunks of AdapterTiles) of a batch; None if there are more than MAX_TILES.

    slots int [T]: adapter of each row, 0 for none. ranks int [T]: rank of that adapter. places [T, chunks]: written.
    """
    places[:] = -1
    used = np.flatnonzero(slots)
    adapters, first, group, counts = np.unique(slots[used], return_index=True, return_inverse=True, return_counts=True)
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
