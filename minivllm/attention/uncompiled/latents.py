"""Attention over latents: blocks are gathered and multiplied in batches, since FlexAttention would round keys
of 576 values up to 1,024 on a GPU, and copy a cache that is keys and values at once on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.latent_attention import latent_attention
from minivllm.attention.interface.backend import AttentionContext, StepRows
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import LayerCache

GATHERED_TOKENS = 1024
"""Tokens of each tile that are gathered at a time."""


class LatentTiles(NamedTuple):
    """Tiles of as many queries each: the tokens of the step from ``begin`` up to ``end``.

    block_table int32 [tiles, width]: as far as the longest context among them goes, with the null block
    behind the end of shorter ones. q_position int32 [tiles, QT].
    """

    begin: int
    end: int
    block_table: Tensor
    q_position: Tensor


class GatheredLatents:
    """See ``kernels_triton_free.latent_attention``. All rows with a single token are tiles of one call,
    neighbouring rows with as many drafts are too; prompt chunks are cut into tiles of their own, each with a
    context no longer than it needs. The widths are known on the host, so nothing waits for the device."""

    decode_batches: Sequence[int] = ()
    settles = True

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        # Rows of the products of a tile: enough for a large product, few enough for the scores to stay small.
        self._tile_size = max(1, (2048 if context.policy.on_cpu else 16384) // context.query_group)

    def prepare(self, rows: StepRows) -> tuple[LatentTiles, ...]:
        tiles: list[LatentTiles] = []
        row = token = 0
        counts = rows.counts.tolist()
        for count, equal in groupby(counts):
            number = len(list(equal))
            own = slice(row, row + number)
            if count <= max(1, self._context.few_tokens):
                tiles.append(self._tiles(rows.slots[own], rows.starts[own], count, token, rows.shift))
                token += number * count
            else:
                for one in range(row, row + number):
                    for done in range(0, count, self._tile_size):
                        size = min(self._tile_size, count - done)
                        tiles.append(
                            self._tiles(
                                rows.slots[one : one + 1], rows.starts[one : one + 1] + done, size, token
                            )
                        )
                        token += size
            row += number
        return tuple(tiles)

    def _tiles(
        self, slots: np.ndarray, first: np.ndarray, size: int, token: int, shift: Tensor | None = None
    ) -> LatentTiles:
        """One tile of ``size`` queries for each request:
        int64 [tiles] batch slots, and positions of first queries. shift: see StepRows."""
        tables, device = self._context.tables, self._context.device
        num_blocks = (first + size - 1) // tables.block_size + 1
        width = int(num_blocks.max())
        table = tables.block_table.host[slots, :width]
        table[np.arange(width) >= num_blocks[:, None]] = 0
        position = (first[:, None] + np.arange(size)).astype(np.int32)
        end, q_position = token + len(slots) * size, to_device(position, device)
        if shift is not None:
            q_position = (q_position - shift[token:end].view(-1, size)).int()
        return LatentTiles(token, end, to_device(table, device), q_position)

    def attend(
        self,
        metadata: tuple[LatentTiles, ...],
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert spec.value_dim is not None
        o = torch.zeros(*q.shape[:-1], spec.value_dim, dtype=q.dtype, device=q.device)
        for begin, end, block_table, q_position in metadata:
            o[begin:end] = latent_attention(
                q[begin:end].view(*q_position.shape, *q.shape[2:]),
                cache.k,
                block_table,
                q_position,
                value_dim=spec.value_dim,
                scale=spec.scale,
                blocks_at_once=-(-GATHERED_TOKENS // self._context.tables.block_size),
            ).view(end - begin, 1, *q.shape[2:-1], spec.value_dim)
        return o
