"""Calls to all engines: one answer from many, and the calls to repeat for an engine that starts again.

All engines are in the same state: a call that some could refuse and others could obey is refused here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import structs

from minivllm.data_parallel.router import Router
from minivllm.errors import RequestError
from minivllm.messages import KVTransferStats, PoolStats, SchedulerStats

_ENDS = {"wake_up": "sleep", "resume": "pause", "stop_profile": "start_profile"}
CHANGING = frozenset(("add_lora", "remove_lora", "update_weights", *_ENDS, *_ENDS.values()))
"""Calls after which an engine is in another state. They run one after another."""
EMPTYING = frozenset(("reset_prefix_cache", "sleep", "update_weights"))
"""Calls after which the prefix caches are empty."""

STARTED_AGAIN = frozenset(("sleep", "wake_up", "update_weights"))
"""Where some engines obeyed and others refused, only a start leads back to one state."""


def check_call(router: Router, method: str, args: Sequence[Any]) -> None:
    """Raise RequestError for what engines with unfinished requests refuse, as long as any has some."""
    if method in ("sleep", "update_weights") and router.num_unfinished:
        raise RequestError(
            f"{method} needs idle engines, but {router.num_unfinished} requests are unfinished: wait for "
            "them, or "
            "abort them."
        )
    if method == "remove_lora" and args and args[0] in router.adapters_in_use():
        raise RequestError(
            f"The adapter {args[0]!r} is in use by unfinished requests: let them end, or abort them."
        )


class StandingOrders:
    """Calls whose effect lasts (adapters, weights, sleep, …).
    An engine that starts again gets the same calls."""

    def __init__(self) -> None:
        self.adapters: dict[str, tuple[Any, ...]] = {}
        self._orders: dict[str, tuple[Any, ...]] = {}

    def note(self, method: str, args: tuple[Any, ...]) -> None:
        """The engines have done this."""
        if method == "add_lora":
            self.adapters[args[0]] = args
        elif method == "remove_lora":
            self.adapters.pop(args[0], None)
        elif method in _ENDS:
            self._orders.pop(_ENDS[method], None)
        elif method in CHANGING:
            self._orders[method] = args

    def __iter__(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Calls in an order in which a fresh engine obeys them."""
        for method in ("update_weights", "add_lora", "start_profile", "sleep", "pause"):
            if method == "add_lora":
                yield from ((method, args) for args in self.adapters.values())
            elif method in self._orders:
                yield method, self._orders[method]


def combine(method: str, results: Sequence[Any]) -> Any:
    """One answer from those of the engines, at least one, in the order of their numbers."""
    return _COMBINE.get(method, _first)(results)


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _joined(results: Sequence[list[Any]]) -> list[Any]:
    return [one for result in results for one in result]


def _adapters(results: Sequence[list[Any]]) -> list[Any]:
    """Each name once; requests may have named an adapter to one engine only."""
    return list({one[0]: one for one in _joined(results)}.values())


def _stats(results: Sequence[Any]) -> dict[str, Any]:
    stats = [msgspec.convert(result, SchedulerStats) for result in results]
    built: dict[str, Any] = msgspec.to_builtins(sum_stats(stats))
    return built


_COMBINE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "stats": _stats,
    "list_loras": _adapters,
    "remove_lora": any,
    "reset_prefix_cache": all,
    "is_sleeping": any,
    "num_recompilations": sum,
    "stop_profile": _joined,
    "collective_rpc": _joined,
}


_NOT_SUMMED = {
    "kv_cache_usage",
    "kv_cache_pools",
    "num_accepted_tokens_per_position",
    "kv_transfer",
    "worker_resident_bytes",
}


def sum_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Counts of several engines together; shares are means, for their caches are of one size."""
    fields: dict[str, Any] = {}
    for name in SchedulerStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name not in _NOT_SUMMED:
            fields[name] = sum(values)
    positions = [one.num_accepted_tokens_per_position for one in stats]
    longest = max(map(len, positions))
    return SchedulerStats(
        kv_cache_usage=sum(one.kv_cache_usage for one in stats) / len(stats),
        kv_cache_pools=[
            PoolStats(
                name=pools[0].name,
                num_blocks=sum(pool.num_blocks for pool in pools),
                usage=sum(pool.usage for pool in pools) / len(pools),
            )
            for pools in zip(*(one.kv_cache_pools for one in stats))
        ],
        num_accepted_tokens_per_position=[
            sum(counts[place] for counts in positions if place < len(counts)) for place in range(longest)
        ],
        kv_transfer=list(map(_sum_tiers, zip(*(one.kv_transfer for one in stats)))),
        worker_resident_bytes=_joined([one.worker_resident_bytes for one in stats]),
        **fields,
    )


def _sum_tiers(tiers: Sequence[KVTransferStats]) -> KVTransferStats:
    """One tier of all engines."""
    counts = [name for name, value in structs.asdict(tiers[0]).items() if isinstance(value, (int, float))]
    summed = {name: sum(getattr(tier, name) for tier in tiers) for name in counts if name != "block_bytes"}
    within = [
        (bounds[0][0], sum(count for _, count in bounds)) for bounds in zip(*(t.loads_within for t in tiers))
    ]
    return structs.replace(tiers[0], loads_within=within, **summed)
