"""Workloads: seeded, offline, the same for everyone, and a wrong one is refused with the forms there are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.requests.workloads import WorkloadCase, arrive, make_workload
from minivllm.bench.sides.drive import Progress, Task, drive
from minivllm.errors import ConfigError, RequestError

VOCAB = 500
EXAMPLES = [
    "fixed:3:10:4",
    "random:20:5:30",
    "nano-256",
    "shared-prefix:4:16:4:8",
    "system-prompt:3:16:4:8",
    "n-samples:2:3:10:4",
    "agents:2:3:20:10:4",
    "multi-turn:2:3:10:4",
    "long-among-decodes:3:200",
    "prefill-load:2:30:3:100:0.5",
    "bursts:2:3:0.5:5:9",
    "poisson:20:10:5:9",
]


def shape(tasks: list[Task]) -> list[tuple[int, int, float, int | None]]:
    return [(len(task.prompt), task.max_tokens, task.arrival, task.after) for task in tasks]


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_workload_follows_from_its_seed_and_repetitions_differ_in_contents_only(text: str) -> None:
    first = make_workload(text, VOCAB)
    assert first == make_workload(text, VOCAB)
    again = make_workload(text, VOCAB, repetition=1)
    assert shape(again) == shape(first)
    assert all(one.prompt != other.prompt for one, other in zip(first, again))
    assert all(0 <= token < VOCAB for task in first for token in task.prompt)
    assert [task.arrival for task in first if task.after is None] == sorted(
        t.arrival for t in first if t.after is None
    )


@pytest.mark.parametrize("text", ["random:20:5:30", "poisson:20:10:5:9", "bursts:2:3:0.5:5:9"])
def test_another_seed_gives_other_lengths(text: str) -> None:
    assert shape(make_workload(text, VOCAB, seed=1)) != shape(make_workload(text, VOCAB, seed=0))


def test_nano_256_is_what_its_name_says() -> None:
    tasks = make_workload("nano-256", VOCAB)
    lengths = [length for task in tasks for length in (len(task.prompt), task.max_tokens)]
    assert len(tasks) == 256 and min(lengths) >= 100 and max(lengths) <= 1024
    assert 520 < sum(lengths) / len(lengths) < 600, "uniform, so 562 on average"
    assert all(task.arrival == 0 for task in tasks)


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    tasks = make_workload("shared-prefix:4:16:4:8", VOCAB)
    assert len({tuple(task.prompt[:16]) for task in tasks}) == 1
    assert len({tuple(task.prompt[16:]) for task in tasks}) == 4
    assert all(len(task.prompt) == 20 and task.max_tokens == 8 for task in tasks)


def test_users_of_a_system_prompt_come_after_the_first_one_and_samples_have_one_prompt() -> None:
    tasks = make_workload("system-prompt:3:16:4:8", VOCAB)
    assert [task.after for task in tasks] == [None, 0, 0] and len(
        {tuple(task.prompt[:16]) for task in tasks}
    ) == 1
    assert len({tuple(task.prompt) for task in tasks}) == 3
    tasks = make_workload("n-samples:2:3:10:4", VOCAB)
    assert [tasks.index(task) for task in tasks] == [0, 0, 0, 3, 3, 3]


def test_agents_share_their_system_prompt_and_each_continues_its_history() -> None:
    tasks = make_workload("agents:2:3:20:10:4", VOCAB)
    assert [task.after for task in tasks] == [None, 0, 1, None, 3, 4]
    assert [len(task.prompt) for task in tasks[:3]] == [30, 44, 58]
    assert (
        len({tuple(task.prompt[:20]) for task in tasks})
        == 1
        < len({tuple(task.prompt[:30]) for task in tasks})
    )
    for earlier, later in pairwise(tasks[3:]):
        assert later.prompt[: len(earlier.prompt)] == earlier.prompt


def test_every_turn_continues_its_conversation() -> None:
    tasks = make_workload("multi-turn:2:3:10:4", VOCAB)
    assert [task.after for task in tasks] == [None, 0, 1, None, 3, 4]
    assert [len(task.prompt) for task in tasks[:3]] == [10, 24, 38]
    for earlier, later in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert tasks[later].prompt[: len(tasks[earlier].prompt)] == tasks[earlier].prompt


def test_a_long_prompt_comes_among_decodes() -> None:
    *short, long = make_workload("long-among-decodes:3:200", VOCAB)
    assert (len(long.prompt), long.arrival) == (200, 1.0)
    assert all(task.arrival == 0 and task.max_tokens == 128 for task in short)


def test_bursts_come_together_and_poisson_arrivals_at_their_rate() -> None:
    assert [task.arrival for task in make_workload("bursts:2:3:0.5:5:9", VOCAB)] == [0, 0, 0, 0.5, 0.5, 0.5]
    arrivals = [task.arrival for task in make_workload("poisson:2000:10:1:2", VOCAB)]
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.1)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04), "exponential: 1/e"


def test_a_rate_replaces_arrivals_but_turns_still_wait() -> None:
    workload = make_workload("multi-turn:3:2:5:2", VOCAB)
    timed = arrive(workload, "poisson:5")
    assert [task.after for task in timed] == [task.after for task in workload]
    starts = [task.arrival for task in timed if task.after is None]
    assert starts == sorted(set(starts)) and starts[0] == 0
    assert [task.prompt for task in timed] == [task.prompt for task in workload]
    timed = arrive(make_workload("fixed:2:3:4", VOCAB), "poisson:5")
    assert WorkloadCase("fixed:2:3:4", 2, rate=5).tasks(VOCAB, 0) == timed


@pytest.mark.parametrize(
    "text",
    ["", "fixed", "fixed:1:2", "fixed:0:1:1", "fixed:a:1:1", "random:2:9:5", "poisson:2:-1:1:2", "nano-257"],
)
def test_another_workload_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no workload|smaller number first"):
        make_workload(text, VOCAB)


def test_requests_come_from_a_file_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt_token_ids": [1, 2], "max_tokens": 3, "arrival": 2},
        {"prompt_token_ids": [4], "max_tokens": 1},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert make_workload(str(file), VOCAB) == [Task([4], 1, 0.0), Task([1, 2], 3, 2.0)]


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "[]",
        "{}",
        '{"prompt_token_ids": [], "max_tokens": 1}',
        '{"prompt_token_ids": [500], "max_tokens": 1}',
        '{"prompt_token_ids": [true], "max_tokens": 1}',
        '{"prompt_token_ids": [1], "max_tokens": 0}',
        '{"prompt_token_ids": [1], "max_tokens": 1, "arrival": -1}',
        '{"prompt_token_ids": [1], "max_tokens": 1, "arrival": NaN}',
        '{"prompt_token_ids": [1], "max_tokens": 1, "temperature": 1}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt_token_ids": [1], "max_tokens": 1}\n' + line)
    with pytest.raises(RequestError, match=r"Line 2 of the workload .* is not a request"):
        make_workload(str(file), VOCAB)


def test_an_empty_or_missing_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="holds no request"):
        make_workload(str(tmp_path / "empty.jsonl"), VOCAB)
    with pytest.raises(RequestError, match=r"Cannot read .*No such file"):
        make_workload(str(tmp_path / "missing.jsonl"), VOCAB)


class OneTokenPerStep:
    """An engine whose every step gives every request its next token."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"vocab_size": VOCAB}
        self.left: dict[int, int] = {}
        self.most_together = 0

    def reset(self) -> None:
        self.left = {}

    def add(self, index: int, task: Task) -> None:
        if len(task.prompt) > 9:
            raise ValueError("too long")
        self.left[index] = task.max_tokens
        self.most_together = max(self.most_together, len(self.left))

    def step(self) -> Iterable[Progress]:
        for index in list(self.left):
            self.left[index] -= 1
            finished = self.left[index] == 0
            if finished:
                del self.left[index]
            yield Progress(index, [index], [time.perf_counter()], finished)

    def counters(self) -> dict[str, float]:
        return {}


def test_requests_are_sent_when_they_are_due_and_each_gets_its_tokens() -> None:
    tasks = [Task([1], 3), Task([1], 2, arrival=0.05), Task([1], 1, arrival=0.01, after=1), Task([1] * 10, 5)]
    engine = OneTokenPerStep()
    records, seconds = drive(engine, tasks)
    assert [len(record.token_ids) for record in records] == [3, 2, 1, 0]
    assert [set(record.token_ids) for record in records[:3]] == [{0}, {1}, {2}]
    assert records[1].arrival == 0.05 and records[1].times[0] >= 0.05
    assert records[2].arrival >= records[1].times[-1] + 0.01 and records[2].times[0] >= records[2].arrival
    assert records[3].error == "ValueError: too long"
    assert all(record.times == sorted(record.times) and record.times[-1] <= seconds for record in records[:3])


def test_a_follower_of_a_refused_request_is_still_sent() -> None:
    records, _ = drive(OneTokenPerStep(), [Task([1] * 10, 5), Task([1], 2, after=0)])
    assert records[0].error is not None and len(records[1].token_ids) == 2
