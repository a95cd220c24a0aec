"""Attention of one step over the paged cache: compiled FlexAttention, or gather and SDPA where nothing compiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.attention import (
    chunks_of_tiles,
    chunks_of_tokens,
    gathered_flex_attention,
    gathered_sdpa_attention,
    pack_tiles,
    paged_flex_attention,
    unpack_tiles,
)
from minivllm.models.decoder import CompileRegion, LayerCache
from minivllm.worker.persistent_batch import PersistentBatch
from minivllm.worker.step_inputs import DecodeTiles, PrefillTiles, StepInputs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions


class AttentionBackend(ABC):
    """Reads the step's inputs and one layer's cache, returns what the queries attend to."""

    @abstractmethod
    def attend(self, inputs: StepInputs, cache: LayerCache, window: int | None, q: Tensor) -> Tensor:
        """q [tokens, kv_heads, G, D] -> o of the same shape and dtype; rows past inputs.num_tokens are finite.

        The keys and values of this step are in the cache already. window: sliding window of the layer, if any.
        """


class FlexAttentionBackend(AttentionBackend):
    """Compiled FlexAttention over query tiles. Per window one graph for decode, one for tiles of several queries, and,
    if drafts are to be verified, one for short tiles that read the cache in place as decode does.

    compute_dtype: in which tiles of several queries are computed on a CPU (there, decode reads the cache in place and
    in its own dtype: converting would cost more than it saves).
    decode_batches: sizes that decode comes in, each with a kernel of its own; none if one kernel serves them all.
    decode_options: size -> FlexAttention's options for that kernel.
    """

    def __init__(
        self,
        compile_region: CompileRegion,
        windows: list[int | None],
        scale: float,
        compute_dtype: torch.dtype,
        device: torch.device,
        verifies: bool = False,
        decode_batches: Sequence[int] = (),
        decode_options: Callable[[int], Mapping[str, int]] = lambda batch: {},
    ) -> None:
        self._compute_dtype = compute_dtype
        # Without it the CPU template picks a flash-decoding variant that does not compile without full pages.
        options = cast("FlexKernelOptions", {"PARTITION_SIZE": 1}) if device.type == "cpu" else None
        self._decode: dict[tuple[int | None, int | None], Callable] = {}
        self._has_fixed_batches = bool(decode_batches)
        self._verify: dict[int | None, Callable] = {}
        self._prefill: dict[int | None, Callable] = {}
        self._chunks: tuple[PrefillTiles, Tensor, Tensor] | None = None
        for window in windows:
            in_place = partial(paged_flex_attention, scale=scale, window=window, kernel_options=options)
            widths = (3,) if device.type == "cpu" else ()
            constants = (scale, window, options)
            for batch in decode_batches:
                own = cast("FlexKernelOptions", {**(options or {}), **decode_options(batch)}) or None
                self._decode[window, batch] = compile_region(
                    f"decode attention of {batch}",
                    partial(paged_flex_attention, scale=scale, window=window, kernel_options=own),
                    rows=(),
                    constants=(scale, window, own),
                )
            if not decode_batches:
                self._decode[window, None] = compile_region(
                    "decode attention", in_place, rows=(0, 3), widths=widths, caches=(1, 2), constants=constants
                )
            if verifies:
                self._verify[window] = compile_region(
                    "verify attention", in_place, rows=(0, 3), widths=widths, caches=(1, 2), constants=constants
                )
            if device.type == "cpu":
                gathered = partial(gathered_flex_attention, scale=scale, window=window, kernel_options=options)
                self._prefill[window] = compile_region(
                    "prefill attention", gathered, rows=(0, 3, 4), widths=(4,), caches=(1, 2), constants=constants
                )
            else:
                self._prefill[window] = compile_region("prefill attention", in_place, rows=(0, 3), constants=constants)

    def attend(self, inputs: StepInputs, cache: LayerCache, window: int | None, q: Tensor) -> Tensor:
        decode, verify, prefill = inputs.decode, inputs.verify, inputs.prefill
        if decode is not None and verify is None and prefill is None and decode.padded >= len(q):
            return self._attend_decode(decode, cache, window, q)
        o = torch.empty_like(q)
        end = 0
        if decode is not None:
            end = decode.rows
            o[:end] = self._attend_decode(decode, cache, window, q)[:end]
        if verify is not None:
            start, end = end, end + len(verify.token_places)
            o[start:end] = self._attend_verify(verify, cache, window, q)
        if prefill is not None:
            o[end : inputs.num_tokens] = self._attend_prefill(prefill, cache, window, q)
        # Padding tokens write to the null page, which must stay finite: 0 * NaN is NaN where a kernel only masks it.
        o[inputs.num_tokens :] = 0
        return o

    def _attend_decode(self, tiles: DecodeTiles, cache: LayerCache, window: int | None, q: Tensor) -> Tensor:
        decode = self._decode[window, tiles.padded if self._has_fixed_batches else None]
        rows = min(len(q), tiles.padded)
        q = q[:rows] if rows == tiles.padded else F.pad(q, (0, 0, 0, 0, 0, 0, 0, tiles.padded - rows))
        return decode(q, cache.k, cache.v, tiles.lists[window], tiles.q_position, tiles.kv_position)[:rows]

    def _attend_verify(self, tiles: PrefillTiles, cache: LayerCache, window: int | None, q: Tensor) -> Tensor:
        packed = pack_tiles(q, tiles.tile_tokens, tiles.tile_size)
        out = self._verify[window](packed, cache.k, cache.v, tiles.lists[window], tiles.q_position, tiles.kv_position)
        return unpack_tiles(out, tiles.token_places, tiles.tile_size)

    def _attend_prefill(self, tiles: PrefillTiles, cache: LayerCache, window: int | None, q: Tensor) -> Tensor:
        to_tiles, to_tokens = self._chunks_of(tiles, q.shape[1])
        packed = pack_tiles(q.to(self._compute_dtype), tiles.tile_tokens, tiles.tile_size, to_tiles)
        pages = () if tiles.step_pages is None else (tiles.step_pages,)
        out = self._prefill[window](
            packed, cache.k, cache.v, *pages, tiles.lists[window], tiles.q_position, tiles.kv_position
        )
        return unpack_tiles(out, tiles.token_places, tiles.tile_size, to_tokens)

    def _chunks_of(self, tiles: PrefillTiles, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Ways into the tiles and out of them, which the first layer of a step works out for all."""
        if self._chunks is None or self._chunks[0] is not tiles:
            to_tiles = chunks_of_tiles(tiles.tile_tokens, tiles.tile_size, kv_heads)
            self._chunks = tiles, to_tiles, chunks_of_tokens(tiles.token_places, tiles.tile_size, kv_heads)
        return self._chunks[1:]


class GatherSdpaBackend(AttentionBackend):
    """Request by request: gather its pages, run SDPA. The reference, and what runs without a compiler."""

    def __init__(self, batch: PersistentBatch, scale: float) -> None:
        self._batch, self._scale = batch, scale

    def attend(self, inputs: StepInputs, cache: LayerCache, window: int | None, q: Tensor) -> Tensor:
        o = torch.zeros_like(q)
        token = 0
        for row in inputs.rows:
            pages = -(-(row.start + row.count) // self._batch.page_size)
            o[token : token + row.count] = gathered_sdpa_attention(
                q[token : token + row.count],
                cache.k,
                cache.v,
                self._batch.block_table.device[row.request.slot, :pages],
                row.start,
                scale=self._scale,
                window=window,
            )
            token += row.count
        return o
