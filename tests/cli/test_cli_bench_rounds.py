"""Sides run in turn: the same repetitions for all, each as often first as last,
and started in both orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench.reports.figures import decode_speed
from minivllm.bench.reports.report import make_report, recorded_command, rows
from minivllm.bench.requests.workloads import parse_case
from minivllm.bench.rounds import rounds
from minivllm.bench.rounds.side_processes import SideSpec
from minivllm.bench.sides.drive import Answer, Record, Task


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

    def run(self, tasks: Sequence[Task], own_way: bool = False) -> Answer:
        self.ran.append((self.name, tuple(tasks[0].prompt)))
        records = [Record(token_ids=[1] * task.max_tokens, times=[1.0] * task.max_tokens) for task in tasks]
        return Answer(float(len(self.ran)), records, 0, {})


@settings(max_examples=30)
@given(
    names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True), repeats=st.integers(1, 7)
)
def test_every_side_runs_everything_and_no_place_in_the_order_belongs_to_one(
    names: list[str], repeats: int
) -> None:
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
    warm_up = tuple(case.tasks(100, -1)[0].prompt)
    prompts = [tuple(case.tasks(100, repetition)[0].prompt) for repetition in range(repeats)]
    wanted = {(name, prompt): 1 for name in names for prompt in prompts} | {
        (name, warm_up): starts for name in names
    }
    assert Counter(FakeSide.ran) == wanted
    # No side came first much more often, over the repetitions, than the side at the other end.
    measured = [name for name, prompt in FakeSide.ran if prompt != warm_up]
    first = Counter(measured[:: len(names)])
    assert abs(first[names[0]] - first[names[-1]]) <= (2 if len(names) > 1 else repeats)


@pytest.mark.parametrize(
    ("own_seconds", "calibration", "holds"), [(2.0, 1.0, True), (1.92, 0.96, True), (1.0, 0.5, False)]
)
def test_there_is_no_ratio_to_a_peer_that_its_own_way_makes_faster(
    own_seconds: float, calibration: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Peer(FakeSide):
        def __init__(self, spec: SideSpec) -> None:
            super().__init__(spec)
            if spec.engine == "vllm":
                self.facts["own_way"] = "LLM.generate"

        def run(self, tasks: Sequence[Task], own_way: bool = False) -> Answer:
            answer = super().run(tasks)
            return Answer(own_seconds if own_way else 2.0, answer.records, 0, {})

    FakeSide.started, FakeSide.ran = [], []
    monkeypatch.setattr(rounds, "Side", Peer)
    monkeypatch.setattr(rounds, "complete", lambda spec, *others: spec)
    specs = [SideSpec("minivllm", "minivllm", {}), SideSpec("vllm", "vllm", {})]
    case = parse_case("prefill:8")
    outcome = rounds.measure_in_turn(specs, [case], model="m", dtype="auto", repeats=3, calibrate=2)
    [comparison] = outcome.comparisons
    assert (comparison.calibration, comparison.holds) == (calibration, holds)
    [note] = outcome.notes
    assert (
        f"vllm, prefill 8: 2 s here, {own_seconds:.3g} s by LLM.generate: {calibration:.1%} of its own speed"
        in note
    )
    assert ("there is no ratio" in note) != holds
    report = make_report("model", {}, outcome.measurements, outcome.comparisons, outcome.notes)
    assert any("not calibrated" in row for row in rows(report)) != holds
    assert sum(name == "vllm" for name, _ in FakeSide.ran) == 2 + 3 + 2, "warm-ups, repetitions, calibrations"


@given(
    batch=st.integers(1, 5),
    steps=st.integers(1, 9),
    sixteenths=st.integers(1, 64),
    arrivals=st.lists(st.integers(0, 7), min_size=5, max_size=5),
    prefill=st.integers(0, 100),
)
def test_decode_speed_is_that_of_steps_in_which_everybody_decodes(
    batch: int, steps: int, sixteenths: int, arrivals: list[int], prefill: int
) -> None:
    """However long prompts took, and in any order of begins and ends:
    steps of ``step`` seconds, a token each."""
    step = sixteenths / 16
    first = [prefill + arrivals[index] * step for index in range(batch)]
    records = [Record(times=[begin + n * step for n in range(8 + steps)]) for begin in first]
    assert decode_speed(records) == [pytest.approx(batch / step, rel=1e-6)]
    assert decode_speed([Record(times=[1.0]), Record(times=[2.0])]) == []


def test_a_report_says_the_command_without_where_things_lie_on_one_machine() -> None:
    command = (
        "bench model --vs vllm --peer-python vllm=/some/python --peer-python=openvino=/other --json a --png=b"
    )
    kept = "bench model --vs vllm --peer-python vllm=PYTHON --peer-python=openvino=PYTHON"
    assert recorded_command(command.split()) == kept.split()
