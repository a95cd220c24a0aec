"""The extension point of attention: a backend prepares what it wants to know of a step, and then attends,
layer by layer.

The worker knows nothing of tiles, lists or gathering. It says which rows a step has, keeps what ``prepare``
returns, and hands it to ``attend`` with each layer's cache, spec and queries. So a backend may pack the
queries of requests that share a prefix into one tile, keep another kind of cache, or be made of one backend
for each KV group, and neither the runner nor the step builder changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from minivllm.compilation.regions import CompileRegion
from minivllm.device.buffers import MirroredTable
from minivllm.device.policy import DevicePolicy
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import CacheSpec, LayerCache


class StepRows(NamedTuple):
    """The rows of a step, ``in_step_order``; their tokens lie one after the other.

    slots, starts, counts: int64 [rows]: batch slot of the request, position of its first token in this step,
    number of its tokens. num_single, num_few: rows with a single token and with few. num_padded: tokens of
    the step, padding included. A step without rows holds padding only, ``num_padded`` tokens that attention
    treats as rows with a single token: such steps capture graphs. num_short: in steps that replay a graph of
    rows with few tokens, how many such rows it has, padding included, each with room for ``few_tokens`` of
    the ``num_padded`` tokens; then all rows count as few. Otherwise 0.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    num_single: int
    num_few: int
    num_padded: int
    ahead: np.ndarray | None = None
    """int64 [tokens, without padding]: the last position that each sees in layers that look ahead, see
    ``look_ahead``. None: no token sees a later one."""
    unsure: np.ndarray | None = None
    """int64 [rows]: by how much the first token may lie before ``starts``. None: nowhere."""
    shift: Tensor | None = None
    """int64 [tokens, without padding] on the device: by how much each lies before that; given with
    ``unsure``, to backends that settle."""
    num_short: int = 0

    @property
    def positions(self) -> np.ndarray:
        """Of all tokens but padding, int64 [tokens]."""
        before = np.cumsum(self.counts) - self.counts
        return np.arange(int(self.counts.sum())) + np.repeat(self.starts - before, self.counts)

    def cut(self, begin: int, end: int) -> StepRows:
        """Some of the rows, to be looked at alone."""
        part, ahead, unsure, shift = slice(begin, end), self.ahead, self.unsure, self.shift
        if ahead is not None or unsure is not None:
            first = int(self.counts[:begin].sum())
            tokens = slice(first, first + int(self.counts[part].sum()))
            ahead = None if ahead is None else ahead[tokens]
            shift = None if shift is None else shift[tokens]
            unsure = None if unsure is None else unsure[part]
        return self._replace(
            slots=self.slots[part],
            starts=self.starts[part],
            counts=self.counts[part],
            ahead=ahead,
            unsure=unsure,
            shift=shift,
        )


class BlockTables(Protocol):
    """Where the tokens of requests lie in the KV cache: the persistent batch, or one KV group of it.

    block_table int32 [batch slots, max blocks of a request]: physical blocks in order; block 0 is the null
    block. kv_position int32 [blocks, rounded up; block_size]: position in its sequence of what each cache
    slot holds. A block that is shared through the prefix cache holds the same positions for all requests.
    """

    block_size: int
    block_table: MirroredTable
    kv_position: MirroredTable
    num_entered: int
    """Requests that have got a batch slot so far. Until the next one comes, blocks are only appended to the
    rows of the block table."""


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What a backend is made from. It serves layers that share block tables.

    specs: the different specs of these layers. kv_heads, query_group, head_dim: shape of the queries
    [tokens, kv_heads, query_group, head_dim]. dtype: of the weights. query_dtype: of queries and of
    attention's output. cache_dtype: of keys and values. tables: of the KV group that these layers belong to.
    num_blocks: of its pool, the null block included. in_strips: whether keys and values are stored so
    (``kernels_triton_free.strips``). max_num_seqs, max_num_batched_tokens: of a step, at most. few_tokens:
    see ``in_step_order``.
    compile_region: turns a function of tensors into what is called in its place. compiles: whether that is
    compiled code. policy: the choices for this device.
    """

    specs: tuple[AttentionSpec, ...]
    kv_heads: int
    query_group: int
    head_dim: int
    dtype: torch.dtype
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    tables: BlockTables
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    few_tokens: int
    compile_region: CompileRegion
    compiles: bool
    policy: DevicePolicy
    device: torch.device
    in_strips: bool = False
    launches_ahead: int = 1
    """Steps that may be prepared before the device begins the first of them."""
    shares_kernels: bool = False
    """Other layers of the model do not see all earlier keys. Kernels then take both bounds, also where the
    first one is 0 everywhere, so that one serves all layers."""

    @property
    def has_low(self) -> bool:
        """Whether kernels take both bounds, or only the last key that a query sees."""
        return self.shares_kernels or any(reach.is_limited for reach in self.reaches)

    @property
    def cache_spec(self) -> CacheSpec:
        """Of each layer."""
        return CacheSpec(self.kv_heads, self.head_dim, self.cache_dtype, in_strips=self.in_strips)

    @cached_property
    def reaches(self) -> list[Reach]:
        """The different ones of the specs."""
        return list(dict.fromkeys(spec.reach for spec in self.specs))


class AttentionBackend(Protocol):
    """Attends to the paged cache. Made by a factory from an AttentionContext;
    see ``minivllm.register_attention``.

    A backend with an attribute ``settles`` that is true takes rows of few tokens whose positions only the
    device knows (``StepRows.shift``). Otherwise a step with such rows waits until the host knows them. One
    with an attribute ``captures_few`` that is true lets graphs capture rows of few tokens
    (``StepRows.num_short``); its tensors then lie at the same addresses whenever their number is the same.
    """

    @property
    def decode_batches(self) -> Sequence[int]:
        """Numbers of single-token rows of which each needs a step of its own in the warm-up;
        none if one mixed step compiles everything."""

    def prepare(self, rows: StepRows) -> Any:
        """What ``attend`` needs to know of a step: a tensor, or a tuple of such things.

        Valid until the next call. The block tables are up to date on the device. Of a step with nothing but
        single tokens, a graph may be captured: its tensors must lie in buffers of the backend, at the same
        addresses whenever rows.num_padded is the same.
        """

    def attend(
        self, metadata: Any, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q [tokens, kv_heads, query_group, head_dim] -> o of the same shape and dtype, but with
        spec.value_dim in the place of head_dim where keys hold the values.

        metadata: of this step. cache: of one layer, and the keys and values of this step are in it already.
        sinks: float32 [query heads], if spec.has_sinks. Rows of o behind the step's tokens must be finite.
        """


@runtime_checkable
class MeasuredBackend(AttentionBackend, Protocol):
    """A backend that chooses by what its ways to attend cost on this machine."""

    def calibrate(self) -> None:
        """Measure them, once everything is compiled; until then it assumes something."""

    def expected_seconds(self, metadata: Any) -> Mapping[Reach, float]:
        """What a layer of each reach should take in a step; empty if no costs were measured."""


@runtime_checkable
class SharingBackend(AttentionBackend, Protocol):
    """A backend in which rows may read a prefix together, by code that no graph has captured."""

    def shares_prefixes(self, rows: StepRows) -> bool:
        """Whether some of these rows, each of a single token, do so in this step."""
