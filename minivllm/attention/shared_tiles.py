"""Query tiles of several rows, which read the prefix that they share once: decoding on a GPU.

It has not run on one yet, so an engine does it only where ``attention_backend`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import Readers, TileLists, shared_flex_attention
from minivllm.attention.costs.sharing import MOST_TILES, Sharing
from minivllm.attention.flex import FlexAttention, FlexMetadata, rule_attention
from minivllm.attention.interface.backend import AttentionBackend, AttentionContext, StepRows
from minivllm.attention.interface.rule import CAUSAL, AttentionRule
from minivllm.attention.lists.key_groups import KeyGroups
from minivllm.attention.lists.row_groups import RowGroups, blocks_of_tiles
from minivllm.attention.lists.tile_lists import CutTiles
from minivllm.attention.tiles import QueryTiles, Seen, Tiles, TilesRead
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache

BATCHES = tuple(2**power for power in range(MOST_TILES.bit_length()))
"""Numbers of tiles that have a kernel of their own: the fewer they are, the finer each list is split."""
TILE_ROWS = 64
"""Queries times query heads of a KV head: as many as one product of a GPU takes."""


class SharedTiles(QueryTiles):
    """Tiles of rows with a single token or few, for layers that see everything.

    A tile lists the blocks that some of its rows share, and then the other blocks of each. All are masked:
    a query reads a block if it lies between the first and the last query that do.
    """

    settles = False

    def __init__(self, context: AttentionContext, rule: AttentionRule) -> None:
        size = tile_size(context)
        self._groups: RowGroups | None = None
        self._readers: Readers | None = None
        super().__init__(
            context,
            rule,
            "shared attention",
            size,
            MOST_TILES,
            fixed_lists=True,
            tells_full=False,
            batches=BATCHES,
            width=context.num_blocks + 1,
        )

    def _kernel(self) -> Callable:
        return shared_flex_attention

    def _kernel_options(self, dtype: torch.dtype) -> Mapping[str, int]:
        """TILE_ROWS of 128 dimensions spill the registers of the 2 warps that Inductor takes."""
        return {**super()._kernel_options(dtype), "num_warps": 8}

    def _inputs(self, spec: AttentionSpec, batch: int | None) -> dict[str, Any]:
        inputs = super()._inputs(spec, batch)
        sinks = inputs.pop("sinks", None)
        context = self._context
        keeps_packages = context.policy.keeps_packages
        blocks = Size("blocks", min(64, context.num_blocks)) if keeps_packages else context.num_blocks
        readers: Any = TensorSpec((blocks,), torch.int32, context.device)
        inputs["readers"] = Readers(readers, readers)
        return inputs if sinks is None else inputs | {"sinks": sinks}

    def prepare_groups(self, rows: StepRows, groups: RowGroups) -> tuple[Tiles, np.ndarray]:
        """Tiles of the rows of these groups, and their tokens in the step, int64 [n]."""
        own, begin = groups.rows, np.cumsum(rows.counts) - rows.counts
        slots, starts, counts = rows.slots[own], rows.starts[own], rows.counts[own]
        picked = StepRows(slots, starts, counts, 0, len(own), int(counts.sum()))
        place = np.cumsum(counts) - counts
        tokens = np.arange(picked.num_padded) + np.repeat(begin[own] - place, counts)
        self._groups = groups
        _, tiles = groups.in_tiles(counts, self.size)
        batch = next(batch for batch in BATCHES if batch >= tiles.sum())
        return self.prepare(picked, 0, batch), tokens

    def try_kernels(self, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None) -> None:
        """Call all kernels once, on a query that sees nothing: the first call compiles. q [1, kv_heads, G,
        D]."""
        one, empty = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._groups = RowGroups(one, one, empty.astype(np.int32), empty, empty, num_shared=one)
        nothing = StepRows(one, one - 1, one + 1, 1, 0, 1)
        for batch in BATCHES:
            self.attend(self.prepare(nothing, 0, batch), cache, spec, q, sinks)

    def _bundles(self, groups: KeyGroups | None, counts: np.ndarray) -> np.ndarray | None:
        assert self._groups is not None
        return self._groups.group

    def _read(
        self, rows: StepRows, cut: CutTiles, seen: Seen, count: int, groups: KeyGroups | None
    ) -> TilesRead:
        context, tables = self._context, self._context.tables
        assert self._groups is not None
        ends = (rows.starts + rows.counts - 1) // tables.block_size + 1
        table = tables.block_table.host[rows.slots]
        read = blocks_of_tiles(table, ends, rows.counts, self._groups, self.size, context.num_blocks)
        lists: dict[Reach, TileLists] = {}
        for reach in seen:
            counts, blocks = (self._buffer.host[name][:, 0, 0] for name in self._list_names[reach])
            counts[:] = 0
            for tile, listed in enumerate(read.lists):
                counts[tile] = len(listed) + reach.has_sinks
                blocks[tile, : len(listed)] = listed
                blocks[tile, len(listed)] = 0  # the null block, where there are sinks
            sent = [self._buffer.device[name][:count] for name in self._list_names[reach]]
            lists[reach] = TileLists(sent[0], sent[1], None, None)
        self._readers = Readers(to_device(read.first, context.device), to_device(read.last, context.device))
        return TilesRead(lists, seen, tables.kv_position.device.view(-1), None)

    def _arguments(self, tiles: Tiles, cache: LayerCache, reach: Reach) -> tuple[Any, ...]:
        return (*super()._arguments(tiles, cache, reach), self._readers)


def tile_size(context: AttentionContext) -> int:
    """Queries of a tile; of one alone nothing can be shared."""
    return TILE_ROWS // context.query_group


class SharedMetadata(NamedTuple):
    """One step in which rows are read together. plain: the other rows, and these as if they read nothing.
    tiles, tokens: of these rows, int64 [n]."""

    plain: FlexMetadata
    tiles: Tiles
    tokens: Tensor


class SharedFlexAttention(FlexAttention):
    """FlexAttention in which rows with a single token or few read a prefix that they share together: by
    ``SharedTiles``, in groups that ``Sharing`` chooses."""

    always = False
    """Also where it should take longer than each row for itself."""

    def __init__(self, context: AttentionContext, rule: AttentionRule = CAUSAL) -> None:
        super().__init__(context, rule)
        self.settles = False  # tiles of several rows are made for positions that the host knows
        self.captures_few = False  # their number is not that of the rows
        self._device = context.device
        self._shared = SharedTiles(context, rule)
        self._sharing = Sharing(context, self._shared.size, always=self.always)
        self._untried = set(context.specs) if context.compiles else set()

    def shares_prefixes(self, rows: StepRows) -> bool:
        """See SharingBackend."""
        return self._sharing.choose(rows) is not None

    def prepare(self, rows: StepRows) -> Any:
        groups = self._sharing.choose(rows)
        if groups is None:
            return super().prepare(rows)
        tiles, tokens = self._shared.prepare_groups(rows, groups)
        # Queries before the first position see nothing, and their tiles read nothing.
        starts, ahead = rows.starts.copy(), rows.ahead
        starts[groups.rows] = -rows.counts[groups.rows]
        if ahead is not None:
            ahead = ahead.copy()
            ahead[tokens] = -1
        plain = super().prepare(rows._replace(starts=starts, ahead=ahead))
        return SharedMetadata(plain, tiles, to_device(tokens, self._device))

    def attend(
        self, metadata: Any, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        if not isinstance(metadata, SharedMetadata):
            if spec in self._untried:  # in the warm-up
                self._untried.remove(spec)
                self._shared.try_kernels(cache, spec, q[:1], sinks)
            return super().attend(metadata, cache, spec, q, sinks)
        o = super().attend(metadata.plain, cache, spec, q, sinks)
        o[metadata.tokens] = self._shared.attend(metadata.tiles, cache, spec, q[metadata.tokens], sinks)
        return o


def shared_attention(context: AttentionContext) -> AttentionBackend:
    """``rule_attention``, but on a GPU with SharedFlexAttention for layers that see everything."""
    is_limited = any(reach.is_limited for reach in context.reaches)
    has_latents = any(spec.value_dim is not None for spec in context.specs)
    if context.policy.on_cpu or not context.compiles or is_limited or has_latents or tile_size(context) < 2:
        return rule_attention(context)
    return SharedFlexAttention(context)
