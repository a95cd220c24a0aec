"""What is made of the answers of several engines, and what an engine that starts again is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from minivllm.data_parallel.calls import StandingOrders, combine, sum_stats
from minivllm.messages import KVTransferStats, PoolStats, SchedulerStats


def filled(kind: type, step: int) -> dict[str, Any]:
    """A number of its own for every field that counts."""
    hints = msgspec.structs.fields(kind)
    return {
        field.name: step * (place + 1) + place
        for place, field in enumerate(hints)
        if field.type in (int, float)
    }


def stats_of(step: int, positions: list[int]) -> SchedulerStats:
    tier = KVTransferStats(**{**filled(KVTransferStats, step), "tier": "host", "block_bytes": 100})
    tier = msgspec.structs.replace(tier, loads_within=[(0.1, step), (1.0, 2 * step)])
    return SchedulerStats(
        **{**filled(SchedulerStats, step), "kv_cache_usage": step / 10},
        kv_cache_pools=[PoolStats(name="full attention", num_blocks=7, usage=step / 10)],
        num_accepted_tokens_per_position=positions,
        kv_transfer=[tier],
        worker_resident_bytes=[step, 7],
    )


def test_every_count_of_all_engines_is_summed_and_shares_are_means() -> None:
    ones = [stats_of(1, [5, 3]), stats_of(3, [2, 1, 1])]
    together = sum_stats(ones)
    for name in filled(SchedulerStats, 1):
        if name != "kv_cache_usage":
            assert getattr(together, name) == sum(getattr(one, name) for one in ones), name
    assert together.kv_cache_usage == pytest.approx(0.2)
    [pool] = together.kv_cache_pools
    assert (pool.name, pool.num_blocks, pool.usage) == ("full attention", 14, pytest.approx(0.2))
    assert together.num_accepted_tokens_per_position == [7, 4, 1]
    assert together.worker_resident_bytes == [1, 7, 3, 7]
    [tier] = together.kv_transfer
    for name in filled(KVTransferStats, 1):
        if name != "block_bytes":
            assert getattr(tier, name) == sum(getattr(one.kv_transfer[0], name) for one in ones), name
    assert (tier.tier, tier.block_bytes, tier.loads_within) == ("host", 100, [(0.1, 4), (1.0, 8)])
    assert (
        msgspec.convert(combine("stats", [msgspec.to_builtins(one) for one in ones]), SchedulerStats)
        == together
    )
    assert sum_stats([ones[0]]) == ones[0]


@pytest.mark.parametrize(
    ("method", "answers", "together"),
    [
        (
            "list_loras",
            [[["a", "/a"], ["b", "/b"]], [["b", "/b"], ["c", "/c"]]],
            [["a", "/a"], ["b", "/b"], ["c", "/c"]],
        ),
        ("remove_lora", [False, True], True),
        ("reset_prefix_cache", [True, False], False),
        ("is_sleeping", [False, True], True),
        ("num_recompilations", [1, 2], 3),
        ("stop_profile", [["x"], ["y"]], ["x", "y"]),
        ("collective_rpc", [[1], [2]], [1, 2]),
        ("sleep", [None, None], None),
    ],
)
def test_answers_become_one(method: str, answers: list[Any], together: Any) -> None:
    assert combine(method, answers) == together


def test_standing_orders_are_what_still_holds_in_an_order_that_works() -> None:
    orders = StandingOrders()
    for method, *args in (
        ("sleep", 1),
        ("pause",),
        ("add_lora", "a", "/a"),
        ("add_lora", "b", "/b"),
        ("wake_up",),
        ("update_weights", "/old"),
        ("update_weights", "/new"),
        ("remove_lora", "a"),
        ("start_profile", "/p"),
        ("sleep", 2),
        ("stats",),
    ):
        orders.note(method, tuple(args))
    assert list(orders) == [
        ("update_weights", ("/new",)),
        ("add_lora", ("b", "/b")),
        ("start_profile", ("/p",)),
        ("sleep", (2,)),
        ("pause", ()),
    ]
    for method in ("resume", "wake_up", "stop_profile"):
        orders.note(method, ())
    assert [method for method, _ in orders] == ["update_weights", "add_lora"]
