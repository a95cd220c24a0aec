"""Sides run in turn: the same repetitions for all, each as often first as last, and started in both orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.cli.bench import rounds
from minivllm.cli.bench.cases import parse_case
from minivllm.cli.bench.drive import Record, Task
from minivllm.cli.bench.sides import Answer, SideSpec


class FakeSide:
    """Answers at once, and writes down who was started and who ran what."""

    started: list[str]
    ran: list[tuple[str, tuple[int, ...]]]

    def __init__(self, spec: SideSpec) -> None:
        self.name = spec.name
        self.facts: dict[str, Any] = {"vocab_size": 100}
        self.started.append(spec.name)

    def __enter__(self) -> FakeSide:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def run(self, tasks: Sequence[Task]) -> Answer:
        self.ran.append((self.name, tuple(tasks[0].prompt)))
        records = [Record(token_ids=[1] * task.max_tokens, times=[1.0] * task.max_tokens) for task in tasks]
        return Answer(float(len(self.ran)), records, 0, {})


@settings(max_examples=30)
@given(names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True), repeats=st.integers(1, 7))
def test_every_side_runs_everything_and_no_place_in_the_order_belongs_to_one(names: list[str], repeats: int) -> None:
    case = parse_case("prefill:7")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "Side", FakeSide)
        patch.setattr(rounds, "complete", lambda spec, *others: spec)
        FakeSide.started, FakeSide.ran = [], []
        specs = [SideSpec(name, "minivllm", {}) for name in names]
        outcome = rounds.measure_in_turn(specs, [case], model="m", dtype="auto", repeats=repeats)
    starts = 2 if len(names) > 1 and repeats > 1 else 1
    assert FakeSide.started == (names + names[::-1])[: starts * len(names)]
    speeds = {one.side: one.samples for one in outcome.measurements if one.metric == "speed"}
    assert {name: len(samples) for name, samples in speeds.items()} == dict.fromkeys(names, repeats)
    # Each repetition's prompt, and that of each warm-up, once for every side.
    warm_up = tuple(case.runs(100, -1)[0][0].prompt)
    prompts = [tuple(case.runs(100, repetition)[0][0].prompt) for repetition in range(repeats)]
    wanted = {(name, prompt): 1 for name in names for prompt in prompts} | {(name, warm_up): starts for name in names}
    assert Counter(FakeSide.ran) == wanted
    # Who came first, over the repetitions: nobody much more often than the side at the other end.
    measured = [name for name, prompt in FakeSide.ran if prompt != warm_up]
    first = Counter(measured[:: len(names)])
    assert abs(first[names[0]] - first[names[-1]]) <= (2 if len(names) > 1 else repeats)
