"""From a step's decisions to the arrays the model reads: tokens, positions, cache slots and query tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import TileLists
from kernels_triton_free.lora import RowAdapters
from minivllm.lora.manager import BatchAdapters
from minivllm.models.decoder import TokenInputs
from minivllm.worker.device_buffers import StagingBuffer, rounded_capacity, to_device
from minivllm.worker.persistent_batch import PersistentBatch, WorkerRequest

MIN_TILES = 256
"""Room for tiles of prompts on a CPU: as much as the default budget of 2048 tokens takes."""


@dataclass(frozen=True)
class Row:
    """One request's part of a step: ``count`` tokens from position ``start``, the last of them being ``drafts``."""

    request: WorkerRequest
    start: int
    count: int
    drafts: Sequence[int] = ()


@dataclass(frozen=True)
class DecodeTiles:
    """Rows with one token each: the first ``rows`` tokens of the step, padded to ``padded`` tiles."""

    rows: int
    padded: int
    lists: dict[int | None, TileLists]
    q_position: Tensor
    kv_position: Tensor


@dataclass(frozen=True)
class PrefillTiles:
    """Rows with several tokens, cut into tiles of ``tile_size`` queries.

    tile_tokens [tiles * tile_size]: token of the step behind each query. token_places [n]: where each of the n tokens
    of these rows went, in the order of the step. step_pages: see gathered_flex_attention; None where pages are read in
    place.
    """

    tile_size: int
    tile_tokens: Tensor
    token_places: Tensor
    lists: dict[int | None, TileLists]
    q_position: Tensor
    kv_position: Tensor
    step_pages: Tensor | None


@dataclass(frozen=True)
class StepInputs:
    """One step on the device. Token-sized tensors are padded to as many rows as compiled regions need at least.

    rows: in the order of their tokens: those with a single token (``decode``), those with few (``verify``: one tile
    each, where drafts are verified), the others (``prefill``). lists of tiles are keyed by sliding window.
    """

    rows: list[Row]
    num_tokens: int
    token_ids: Tensor
    tokens: TokenInputs
    decode: DecodeTiles | None
    verify: PrefillTiles | None
    prefill: PrefillTiles | None


class StepInputBuilder:
    """Builds StepInputs in persistent buffers.

    gathers_pages: tiles of several queries read a copy of the step's pages (CPU) instead of the cache in place (CUDA).
    Decode lists are then as wide as the cache has pages, which FlexAttention's CPU template asserts; else as wide as a
    request can have, and without full pages. adapters: which one the request in each slot of the batch uses, kept up to
    date by its owner; None without adapters. verify_size: rows of 2 to this many tokens are one tile
    each, which reads the cache in place as decode does; 0: there are no such tiles. decode_batches: numbers of tiles
    that rows with a single token are padded to, ascending; empty: any number from 2. token_offset: the token ids are
    those so much further in the sequence than the positions (1 for an EAGLE head).
    """

    def __init__(
        self,
        batch: PersistentBatch,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_pages: int,
        tile_size: int,
        windows: list[int | None],
        gathers_pages: bool,
        device: torch.device,
        adapters: BatchAdapters | None = None,
        verify_size: int = 0,
        decode_batches: Sequence[int] = (),
        token_offset: int = 0,
    ) -> None:
        self._token_offset = token_offset
        self._batch, self._windows, self._tile_size, self._device = batch, windows, tile_size, device
        self._gathers_pages, self.verify_size = gathers_pages, verify_size
        self._adapters, self._decode_batches = adapters, decode_batches
        max_blocks = batch.block_table.host.shape[1]
        width = num_pages if self._gathers_pages else max_blocks + 1
        tokens = rounded_capacity(max_num_batched_tokens)
        sequences = rounded_capacity(max_num_seqs)
        tiles = rounded_capacity(min(tokens, sequences + -(-tokens // tile_size)) + 2)
        if device.type == "cpu":  # where they cost nothing: engines of different budgets share their compiled code
            tiles = max(tiles, MIN_TILES)
        fields: dict[str, tuple[int, ...]] = {
            "token_index": (tokens,),
            "positions": (tokens,),
            "slot_mapping": (tokens,),
            "decode_position": (sequences, 1),
            "tile_position": (tiles, tile_size),
            "tile_tokens": (tiles * tile_size,),
            "token_places": (tokens,),
        }
        if adapters is not None:
            fields["lora_slots"] = (tokens,)
        if verify_size:
            fields |= {
                "verify_position": (sequences, verify_size),
                "verify_tokens": (sequences * verify_size,),
                "verify_places": (sequences * verify_size,),
            }
        for kind in ("decode", "verify") if verify_size else ("decode",):
            for index in range(len(windows)):
                fields |= {
                    f"{kind}_partial_count.{index}": (sequences, 1, 1),
                    f"{kind}_full_count.{index}": (sequences, 1, 1),
                    f"{kind}_partial.{index}": (sequences, 1, 1, width),
                    f"{kind}_full.{index}": (sequences, 1, 1, width),
                }
        self._buffer = StagingBuffer(fields, device)
        self._max_decodes = max(2, max_num_seqs)
        self._step_kv_position = np.zeros(batch.kv_position.host.size, dtype=np.int32)
        self._step_kv_position_tensor = torch.from_numpy(self._step_kv_position)
        self._token_ids = torch.zeros(tokens, dtype=torch.int32, device=device)

    def build(self, rows: list[Row], padded: int = 2) -> StepInputs:
        """Returns views of the persistent buffers, valid until the next call.

        rows: in the order of StepInputs. padded: the number of tokens to pad to, at least; if all rows have a single
        token, their tiles follow it, so that their number depends on nothing else. No rows and some padding make a step
        of decodes that touches nothing but the null page.
        """
        self._buffer.begin()
        host = self._buffer.host
        page = self._batch.page_size
        table = self._batch.block_table.host
        num_decode = 0
        while num_decode < len(rows) and rows[num_decode].count == 1:
            num_decode += 1
        num_short = num_decode
        while num_short < len(rows) and rows[num_short].count <= self.verify_size:
            num_short += 1
        slots = np.fromiter((row.request.slot for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
        total = int(counts.sum())
        padded = max(total, padded)

        row_of_token = np.repeat(np.arange(len(rows)), counts)
        first_token = np.cumsum(counts) - counts
        positions = np.arange(total) - first_token[row_of_token] + starts[row_of_token]
        token_slots = slots[row_of_token]
        host["positions"][:total] = positions
        width = self._batch.token_ids.host.shape[1]
        host["token_index"][:total] = token_slots * width + positions + self._token_offset
        host["slot_mapping"][:total] = table[token_slots, positions // page] * page + positions % page
        for name in ("positions", "token_index", "slot_mapping"):
            host[name][total:padded] = 0

        if self._adapters is not None:
            host["lora_slots"][:total] = self._adapters.lora_slots[token_slots]
            host["lora_slots"][total:padded] = 0
        decode = None
        if num_decode or not rows:
            tiles = min(padded, self._max_decodes) if num_decode == len(rows) else num_decode
            tiles = self._padded_tiles(tiles, min(padded, 2))
            decode = self._decode_tiles(slots[:num_decode], starts[:num_decode], tiles)
        verify = None
        if num_short > num_decode:
            short = slice(num_decode, num_short)
            verify = self._verify_tiles(slots[short], starts[short], counts[short], num_decode)
        prefill = self._prefill_tiles(rows[num_short:], int(first_token[num_short])) if num_short < len(rows) else None
        self._buffer.commit()
        self._batch.flush()
        device = self._buffer.device
        token_ids = self._token_ids[:padded]
        torch.index_select(self._batch.token_ids.device.view(-1), 0, device["token_index"][:padded], out=token_ids)
        adapters = None
        if self._adapters is not None:
            pieces = self._adapters.tiles(token_slots, padded) if self._device.type == "cpu" else None
            adapters = RowAdapters(device["lora_slots"][:padded], pieces)
        inputs = TokenInputs(device["positions"][:padded], device["slot_mapping"][:padded], adapters)
        return StepInputs(rows, total, token_ids, inputs, decode, verify, prefill)

    def _padded_tiles(self, rows: int, least: int) -> int:
        return next((batch for batch in self._decode_batches if batch >= rows), max(rows, least))

    def _decode_tiles(self, slots: np.ndarray, positions: np.ndarray, padded: int) -> DecodeTiles:
        rows = len(slots)
        host, device = self._buffer.host, self._buffer.device
        host["decode_position"][:rows, 0] = positions
        host["decode_position"][rows:padded] = -1
        lists = self._in_place_lists("decode", slots, positions, positions, padded)
        return DecodeTiles(rows, padded, lists, device["decode_position"], self._batch.kv_position.device.view(-1))

    def _verify_tiles(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, first_token: int
    ) -> PrefillTiles:
        rows, padded, size = len(slots), max(len(slots), 2), self.verify_size
        host, device = self._buffer.host, self._buffer.device
        offsets = np.arange(size)
        is_query = offsets < counts[:, None]
        tokens = first_token + np.cumsum(counts) - counts
        tile_tokens = host["verify_tokens"].reshape(-1, size)
        tile_tokens[:rows] = np.where(is_query, tokens[:, None] + offsets, 0)
        tile_tokens[rows:padded] = 0
        host["verify_position"][:rows] = np.where(is_query, starts[:, None] + offsets, -1)
        host["verify_position"][rows:padded] = -1
        places = np.flatnonzero(is_query)
        host["verify_places"][: len(places)] = places
        return PrefillTiles(
            size,
            device["verify_tokens"][: padded * size],
            device["verify_places"][: len(places)],
            self._in_place_lists("verify", slots, starts, starts + counts - 1, padded),
            device["verify_position"],
            self._batch.kv_position.device.view(-1),
            step_pages=None,
        )

    def _in_place_lists(
        self, kind: str, slots: np.ndarray, first: np.ndarray, last: np.ndarray, padded: int
    ) -> dict[int | None, TileLists]:
        """Pages, in the cache itself, of tiles with one row each: queries at positions first to last [rows]."""
        rows, page = len(slots), self._batch.page_size
        host, device = self._buffer.host, self._buffer.device
        table = self._batch.block_table.host
        last_page = last // page
        lists: dict[int | None, TileLists] = {}
        for index, window in enumerate(self._windows):
            partial_count = host[f"{kind}_partial_count.{index}"][:, 0, 0]
            full_count = host[f"{kind}_full_count.{index}"][:, 0, 0]
            partial = host[f"{kind}_partial.{index}"][:, 0, 0]
            full = host[f"{kind}_full.{index}"][:, 0, 0]
            partial_count[rows:padded] = full_count[rows:padded] = 0
            if self._gathers_pages and (window is None or int(last.max(initial=0)) < window):
                full_pages = (first + 1) // page
                width = int(full_pages.max(initial=0))
                full[:rows, :width] = table[slots, :width]
                full_count[:rows] = full_pages
                partial_count[:rows] = last_page + 1 - full_pages
                for place in range(int(partial_count[:rows].max(initial=0))):
                    partial[:rows, place] = table[slots, np.minimum(full_pages + place, last_page)]
            else:
                full_count[:rows] = 0
                first_page = np.zeros_like(last_page) if window is None else np.maximum(first - window + 1, 0) // page
                for row in range(rows):
                    pages = table[slots[row], first_page[row] : last_page[row] + 1]
                    partial[row, : len(pages)] = pages
                    partial_count[row] = len(pages)
            cut = slice(0, padded)
            lists[window] = TileLists(
                device[f"{kind}_partial_count.{index}"][cut],
                device[f"{kind}_partial.{index}"][cut],
                device[f"{kind}_full_count.{index}"][cut] if self._gathers_pages else None,
                device[f"{kind}_full.{index}"][cut] if self._gathers_pages else None,
            )
        return lists

    def _prefill_tiles(self, rows: list[Row], first_token: int) -> PrefillTiles:
        size, page = self._tile_size, self._batch.page_size
        host, device = self._buffer.host, self._buffer.device
        table = self._batch.block_table.host
        spans: list[tuple[int, int, int]] = []  # first position, last position, slot of each tile
        place, token = 0, first_token
        places, tile_tokens, tile_position = host["token_places"], host["tile_tokens"], host["tile_position"]
        tile_position.fill(-1)
        tile_tokens.fill(0)
        offset = 0
        for row in rows:
            tokens = np.arange(row.count)
            places[offset : offset + row.count] = place + tokens
            tile_tokens[place : place + row.count] = token + tokens
            tile_position.reshape(-1)[place : place + row.count] = row.start + tokens
            for start in range(row.start, row.start + row.count, size):
                spans.append((start, min(start + size, row.start + row.count) - 1, row.request.slot))
            place += -(-row.count // size) * size
            offset += row.count
            token += row.count
        tiles = max(len(spans), 2)

        step_pages = None
        kv_position = self._batch.kv_position.device.view(-1)
        to_step: np.ndarray | None = None
        if self._gathers_pages:
            last_blocks = [(row.start + row.count - 1) // page + 1 for row in rows]
            needed = np.unique(np.concatenate([table[row.request.slot, :n] for row, n in zip(rows, last_blocks)]))
            if len(needed) < 2:
                needed = np.append(needed, 0).astype(np.int32)
            to_step = np.zeros(len(self._batch.page_index), dtype=np.int32)
            to_step[needed] = np.arange(len(needed), dtype=np.int32)
            self._step_kv_position[: len(needed) * page] = self._batch.kv_position.host[needed].reshape(-1)
            kv_position = self._step_kv_position_tensor
            step_pages = torch.from_numpy(needed)
        width = len(needed) if self._gathers_pages else table.shape[1] + 1

        lists: dict[int | None, TileLists] = {}
        for window in self._windows:
            counts = np.zeros((2, tiles), dtype=np.int32)
            pages = np.zeros((2, tiles, width), dtype=np.int32)
            for tile, (first, last, slot) in enumerate(spans):
                begin = 0 if window is None else max(0, first - window + 1) // page
                # A page is full if its last slot is visible to the first query and its first slot to the last one.
                full_begin = 0 if window is None else -(-max(0, last - window + 1) // page)
                end, full_end = last // page + 1, (first + 1) // page
                full_begin, full_end = min(full_begin, end), max(full_end, min(full_begin, end))
                own = table[slot, :end] if to_step is None else to_step[table[slot, :end]]
                full = own[full_begin:full_end]
                partial = np.concatenate([own[begin:full_begin], own[full_end:end]])
                counts[:, tile] = len(partial), len(full)
                pages[0, tile, : len(partial)] = partial
                pages[1, tile, : len(full)] = full
            sent = [to_device(array, self._device) for array in (counts, pages)]
            lists[window] = TileLists(
                sent[0][0].view(tiles, 1, 1),
                sent[1][0].view(tiles, 1, 1, width),
                sent[0][1].view(tiles, 1, 1),
                sent[1][1].view(tiles, 1, 1, width),
            )
        return PrefillTiles(
            size,
            device["tile_tokens"][: tiles * size],
            device["token_places"][:offset],
            lists,
            device["tile_position"],
            kv_position,
            step_pages,
        )
