"""Programs become regions at the seams that are real, and a runner computes what the program says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.compilation.package_keys import region_key
from minivllm.program.fuse import FusedPieces, Part, fuse
from minivllm.program.program import Piece, Seam, World
from minivllm.program.runner import Runner
from minivllm.program.seams import Agree, Attend, Combine, Pick, Share, Sum
from tests.program.toy_program import INPUTS, STREAM, Join, Ranks, Recorder, Shift, Times, by_hand, layers


def random_weights(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(4, 4, generator=generator) / 2 for _ in range(count)]


def attend(layer: int, q: Tensor, weights: Any = None) -> Tensor:
    return q + layer


def runs(part: Part) -> list[FusedPieces]:
    return [step for step in part.steps if isinstance(step, FusedPieces)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_fused_program_computes_what_its_pieces_say(count: int, ranks: int) -> None:
    weights, rows = random_weights(count), torch.tensor([2, 0, 2])
    plan, recorder = fuse(layers(weights), INPUTS, ranks=ranks), Recorder()
    assert plan.tail is not None
    body, tail = Runner(plan.body, recorder), Runner(plan.tail, recorder)
    stream, world = torch.randn(5, 4), World(attend, Ranks(0, ranks))
    hidden = {"stream": stream, **dict(zip(plan.body.results, body([stream], world)))}
    for picked in (rows, rows[:1]):  # as often as it is asked for
        given = {**hidden, "rows": picked}
        (logits,) = tail([given[name] for name in tail.inputs], world)
        torch.testing.assert_close(logits, by_hand(stream, weights, ranks, picked))


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ["first", "between", "between", "last"]),
        (2, ["first", "output", "queries", "output", "queries", "output", "head"]),
    ],
)
def test_a_seam_that_one_rank_does_not_need_cuts_nothing(ranks: int, names: list[str]) -> None:
    plan, recorder = fuse(layers(random_weights(3)), INPUTS, ranks=ranks), Recorder()
    for part in (plan.body, plan.tail):
        assert part is not None
        Runner(part, recorder)
    assert recorder.names == names


def test_equal_layers_have_equal_regions_and_a_changed_field_another_one() -> None:
    recorder = Recorder()
    Runner(fuse(layers(random_weights(4)), INPUTS).body, recorder)
    first, *between = (region_key(region) for region in recorder.regions)
    assert len(between) == 3 and len(set(between)) == 1 and first not in between
    other = Recorder()
    Runner(fuse(layers(random_weights(4), by=2.0), INPUTS).body, other)
    assert region_key(other.regions[0]) == first and region_key(other.regions[1]) != between[0]
    assert all(" at 0x" not in part for key in (first, *between) for part in key)


def test_a_region_gives_what_is_read_later_and_nothing_else() -> None:
    plan = fuse(layers(random_weights(2)), INPUTS)
    first, between = runs(plan.body)
    # The stream does not change before the first attention, so the first region does not give it.
    assert (first.reads, first.gives) == (("stream",), ("q",))
    assert (between.reads, set(between.gives)) == (("o", "stream"), {"q", "stream"})
    assert set(plan.body.results) == {"o", "stream"}


def test_a_program_ends_where_its_result_is_given_for_the_last_time() -> None:
    plan, weights = fuse(layers(random_weights(2)), INPUTS, results=("h",)), random_weights(2)
    assert plan.tail is not None
    recorder, stream, rows = Recorder(), torch.randn(5, 4), torch.tensor([4])
    hidden = Runner(plan.body, recorder)([stream], World(attend))
    (h,) = Runner(plan.tail, recorder)([*hidden, rows], World(attend))
    torch.testing.assert_close(h + 0.5, by_hand(stream, weights, 1, rows))
    assert recorder.names == ["first", "between", "hidden states"]


def test_weights_are_asked_for_again_when_they_were_replaced() -> None:
    held = {"weight": torch.eye(4)}
    program = [Piece(Times(), ("stream",), {"logits": STREAM}, lambda: (held["weight"],))]
    runner, x = Runner(fuse(program, INPUTS).body, Recorder()), torch.randn(2, 4)
    assert torch.equal(runner([x], World(attend))[0], x)
    held["weight"] = 3 * torch.eye(4)
    assert torch.equal(runner([x], World(attend))[0], x)
    runner.rebind()
    assert torch.equal(runner([x], World(attend))[0], 3 * x)


def test_the_inputs_of_layers_are_told_to_a_drafter_that_reads_them() -> None:
    weights, noted = random_weights(2), dict[int, Tensor]()
    plan, stream = fuse(layers(weights), INPUTS), torch.randn(5, 4)
    Runner(plan.body, Recorder())([stream], World(attend, note_input=noted.__setitem__))
    assert noted.keys() == {0, 1} and torch.equal(noted[0], stream)
    x = (stream @ weights[0]) @ weights[0] + 1
    torch.testing.assert_close(noted[1], 2 * (x + stream))


def test_ranks_agree_on_the_largest_or_the_sum_before_code_reads_it() -> None:
    class Others(Ranks):
        def exchange(self, x: Tensor) -> list[Tensor]:
            return [x, x + 1]

    @dataclass(frozen=True)
    class Divide:
        def __call__(self, x: Tensor, by: Tensor) -> Tensor:
            return x / by

    for largest, expected in ((True, 8 / 9), (False, 8 / 17)):
        program: list[Piece | Seam] = [
            Agree("by", STREAM, largest=largest, source="stream", code=Shift(0.0)),
            Piece(Divide(), ("stream", "by"), {"logits": STREAM}),
        ]
        x, world = torch.full((1, 4), 8.0), World(attend, Others(0, 2))
        (out,) = Runner(fuse(program, INPUTS, ranks=2).body, Recorder())([x], world)
        torch.testing.assert_close(out, torch.full((1, 4), expected))


def test_registers_hold_tuples_and_nothing() -> None:
    @dataclass(frozen=True)
    class Second:
        def __call__(self, pair: tuple[Tensor, Tensor], nothing: None) -> Tensor:
            assert nothing is None
            return pair[1]

    program = [Piece(Second(), ("pair", "nothing"), {"logits": STREAM})]
    runner = Runner(fuse(program, {"pair": (STREAM, STREAM), "nothing": None}).body, Recorder())
    a, b = torch.zeros(1, 4), torch.ones(1, 4)
    assert torch.equal(runner([a, b], World(attend))[0], b)


def test_an_engine_without_tokens_joins_only_the_experts() -> None:
    class Group:
        own = slice(0, 0)

        def gather(self, x: Tensor) -> Tensor:
            assert x.shape == (0, 4)
            return torch.ones(3, 4)

        def combine(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x[:0]

    seen: list[Tensor] = []
    program: list[Piece | Seam] = [
        Piece(Times(), ("stream",), {"q": STREAM}, lambda: (torch.eye(4),)),
        Attend(0, STREAM, lambda: None),
        Piece(Shift(1.0), ("o",), {"shared": STREAM}),
        Share("o", "tokens", STREAM),
        Piece(Times(), ("tokens",), {"x": STREAM}, lambda: (2 * torch.eye(4),)),
        Combine(STREAM, "shared"),
        Pick(),
        Piece(Join(), ("x", "stream"), {"logits": STREAM, "stream": STREAM}),
    ]
    recorder, group = Recorder(), Group()
    runner = Runner(fuse(program, INPUTS).body, recorder)
    assert recorder.names == ["first", "enter", "experts"]
    runner.join(torch.zeros(0, 4), World(attend, group=group))  # type: ignore[arg-type]
    assert len(seen) == 1 and torch.equal(seen[0], torch.full((3, 4), 2.0))


def test_a_sum_that_is_real_ends_a_region() -> None:
    program: list[Piece | Seam] = [
        Piece(Times(), ("stream",), {"stream": STREAM}, lambda: (torch.eye(4),)),
        Sum("stream", STREAM),
        Piece(Shift(1.0), ("stream",), {"logits": STREAM}),
    ]
    assert [len(run.pieces) for run in runs(fuse(program, INPUTS).body)] == [2]
    assert [len(run.pieces) for run in runs(fuse(program, INPUTS, ranks=2).body)] == [1, 1]
