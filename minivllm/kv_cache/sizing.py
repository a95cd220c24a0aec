"""How much memory the pool of each KV group gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minivllm.kv_cache.specs import SLOTS_PER_REQUEST, GroupSpec, max_blocks, total_bytes

LOCAL_SHARE = 0.5
"""Memory of the pools of windows and chunks, as a share of that of the first pool: their requests are mostly
shorter than max_model_len, so that windows alone would otherwise limit how many of them run."""
RETENTION = 2
"""Windows and chunks that a pool holds at most, for each request that can run:
its own, and one that waits in the prefix cache for the next turn."""
MIN_LOCAL_BLOCK = 16
"""Tokens in a block of a short window, at least:
attention reads blocks one by one, and smaller ones cost it time."""


def local_block_size(block_size: int, reach: int | None) -> int:
    """Tokens per block of layers that reach so far:
    block_size, halved until a block is no longer than the reach.

    A request holds two blocks at least as soon as it outgrows one,
    and most of longer ones would be out of reach.
    """
    while reach is not None and block_size > max(reach, MIN_LOCAL_BLOCK):
        block_size //= 2
    return block_size


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """What pools are sized for. longest_chunk: see GroupSpec.max_blocks."""

    max_num_seqs: int
    max_model_len: int
    longest_chunk: int


def size_pools(specs: Sequence[GroupSpec], first_blocks: int, limits: PoolLimits) -> list[GroupSpec]:
    """The specs with ``num_blocks``, where the first one gets ``first_blocks``, the null block included.

    The others get what goes with it: room for as many requests of max_model_len as the first pool holds, or
    LOCAL_SHARE of its memory if that is more, but no more than RETENTION times what max_num_seqs requests can
    hold.
    """
    first, *others = specs
    sized = [replace(first, num_blocks=first_blocks)]
    weight = sum(_steady_blocks(spec) * spec.block_bytes for spec in others)
    num_tokens = (first_blocks - 1) * first.block_size
    num_longest = min(num_tokens / limits.max_model_len, limits.max_num_seqs)
    for spec in others:
        steady = _steady_blocks(spec)
        one_step = 0 if spec.kind == "state" else -(-limits.longest_chunk // spec.block_size) + 1
        needed = -int(-num_longest * steady // 1) + one_step
        share = int(LOCAL_SHARE * first_blocks * first.block_bytes * steady / weight)
        count = min(max(needed, share), RETENTION * limits.max_num_seqs * steady + one_step)
        count = min(
            count, -(-num_tokens // spec.block_size)
        )  # behind every block here is one of the first pool
        alone = spec.max_blocks(limits.max_model_len, limits.longest_chunk)
        sized.append(replace(spec, num_blocks=1 + max(count, alone)))
    return sized


def fit_pools(specs: Sequence[GroupSpec], num_bytes: int, limits: PoolLimits) -> list[GroupSpec]:
    """As ``size_pools``, as large as ``num_bytes`` allow. The first pool gets less than a request of
    max_model_len needs where there is no memory for it."""
    if len(specs) == 1:
        return size_pools(specs, num_bytes // specs[0].block_bytes, limits)
    low, high = 1, 1 + num_bytes // specs[0].block_bytes
    while high - low > 1:
        middle = (low + high) // 2
        if total_bytes(size_pools(specs, middle, limits)) <= num_bytes:
            low = middle
        else:
            high = middle
    return size_pools(specs, low, limits)


def enough_blocks(spec: GroupSpec, limits: PoolLimits) -> int:
    """Blocks of the first pool, the null block included,
    beyond which max_num_seqs requests have no use for more."""
    all_tokens = limits.max_num_seqs * -(-limits.max_model_len // spec.block_size)
    if spec.reach is None:
        return 1 + all_tokens
    one_step = -(-limits.longest_chunk // spec.block_size) + 1
    return 1 + min(all_tokens, RETENTION * limits.max_num_seqs * _steady_blocks(spec) + one_step)


def _steady_blocks(spec: GroupSpec) -> int:
    """Blocks that a request holds which computes token by token, and is longer than the reach."""
    if spec.kind == "state":
        return SLOTS_PER_REQUEST
    assert spec.reach is not None, "only the first group may be one of full attention"
    return max_blocks(spec.reach + spec.block_size, spec.block_size, spec.reach, 1)


def coarse(count: int) -> int:
    """The first five bits of a number, zeros behind them. On a GPU the size of the cache is a constant of
    compiled code, and the memory that is free is never quite the same: a coarse size lets the next start use
    the code of the last one, for 2 % of the blocks on average and 6 % at most."""
    dropped = max(0, count.bit_length() - 5)
    return count >> dropped << dropped
