"""The five programs on the default model: requests, results, and computed tokens, counted.

The tree of a program's texts is the least that can be computed: every beginning counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM
from minivllm.bench.programs.requests import Asked, record, send_plainly, tree_size
from minivllm.lang import Outcome, Selected, run_offline
from minivllm.lang.engines import SteppedEngine
from minivllm.lang.examples.programs import INPUTS, Order
from tests.lang.recorded import counted

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "enforce_eager": True, "max_model_len": 2048}
SETTINGS |= {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 1024}
REQUESTS = {"answer": 2, "mood": 1, "essay": 1 + 3 + 1, "order": 2}
"""Of the agent they follow from its steps."""


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), **SETTINGS) as llm:
        yield llm


Called = tuple[Outcome[Any], list[Asked], int]
"""A program's outcome with an empty cache, its requests, and the tokens that were computed."""


@pytest.fixture(scope="module")
def calls(llm: LLM) -> dict[str, Called]:
    """Of every program."""
    found = {}
    for name, (program, argument) in INPUTS.items():
        llm.reset_prefix_cache()
        given = {"question": argument, "length": 32} if name == "answer" else argument
        given = {"topic": argument, "length": 40} if name == "essay" else given
        with counted(llm) as computed:
            [(recorder, outcome)] = asyncio.run(
                record(SteppedEngine(llm), [(program.using(temperature=0.0), given)])
            )
            found[name] = outcome, recorder.asked, computed()
    return found


@pytest.mark.parametrize("name", INPUTS)
def test_a_program_computes_the_tree_of_its_texts(calls: dict[str, Called], name: str) -> None:
    outcome, asked, computed = calls[name]
    assert len(asked) == REQUESTS.get(name, len(asked))
    least = tree_size(asked)
    # Branches and choices that begin together compute their few common tokens each.
    assert least <= computed <= (1.02 if name in ("mood", "order") else 1.25) * least, (computed, least)
    if name == "order":
        assert outcome.value == (Order("red lamps", 3), "yes")
    elif name == "mood":
        assert outcome.value == "kind"


def test_the_plan_of_an_essay_is_a_part_of_every_request(calls: dict[str, Called]) -> None:
    _, asked, _ = calls["essay"]
    plan, *parts, _ = asked
    assert len(parts) == 3 and all(part.token_ids[: len(plan.token_ids)] == plan.token_ids for part in parts)


def test_the_agents_requests_are_its_steps(calls: dict[str, Called]) -> None:
    """A choice among three texts, of which one has several tokens, and the arguments of each call."""
    outcome, asked, _ = calls["assist"]
    assert outcome.value, "it calls a tool at least once"
    steps = len(outcome.value)
    assert len(asked) in (3 * steps + steps, 3 * steps + steps + 3)
    chosen = outcome.state.details["tool"]
    assert isinstance(chosen, Selected) and list(chosen.scores) == ["add", "day_of", "stop"]


def test_programs_compute_at_most_six_tenths_of_what_their_requests_compute_without_the_language(
    calls: dict[str, Called], smollm2_path: Path
) -> None:
    ours = sum(computed for _, _, computed in calls.values())
    with LLM(str(smollm2_path), **SETTINGS, reuse_partial_blocks=False) as other, counted(other) as computed:
        asyncio.run(send_plainly(SteppedEngine(other), [asked for _, asked, _ in calls.values()]))
        plain = computed()
    assert ours <= 0.6 * plain, (ours, plain)


def test_a_batch_of_programs_gives_what_each_gives_alone(llm: LLM) -> None:
    program = INPUTS["answer"][0].using(temperature=0.0)
    questions = [{"question": text, "length": 8} for text in ("What is a cat?", "Who was Newton?")]
    together = run_offline(llm, program, questions)
    assert [one.value for one in together] == [run_offline(llm, program, [one])[0].value for one in questions]
    assert not llm.llm_engine.has_unfinished_requests()
