"""Programs in batches, on an LLM and on an AsyncLLM:
a failure stays alone, and nothing is left in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, AsyncLLM, EngineArgs
from minivllm.bench.programs.requests import record, tree_size
from minivllm.errors import RequestError
from minivllm.lang import State, join, program, run_batch, run_offline, user
from minivllm.lang.engines import SteppedEngine
from minivllm.lang.examples.programs import essay
from tests.lang.recorded import ScriptedEngine, counted, refusal
from tests.lang.test_state import CHAT
from tests.parity_reference import assert_pool_unused, tiny_llm, tiny_settings


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with tiny_llm(model, max_model_len=1600, block_size=64, num_gpu_blocks_override=64) as llm:
        yield llm
        assert_pool_unused(llm)


@program(temperature=0.0, ignore_eos=True, max_tokens=12)
async def branches(s: State, number: int, fails: bool = False) -> str:
    s += user(f"Question {number}: which words come to mind?")
    await s.gen("first")

    async def go_on(part: State) -> str:
        if fails and part is parts[1]:
            raise ValueError(f"branch of {number}")
        text: str = await part.gen("second")
        return text

    parts = s.fork(3)
    for index, part in enumerate(parts):
        part += user(f"Part {index}")
    return " | ".join(await join(parts, go_on))


@pytest.mark.slow
def test_an_essay_computes_its_plan_once(llm: LLM) -> None:
    """At most 1.02 times the tree of its texts:
    branches that begin together compute their few common tokens each."""
    with counted(llm) as computed:
        call = (essay.using(temperature=0.0, ignore_eos=True), "the sea")
        [(recorder, _)] = asyncio.run(record(SteppedEngine(llm), [call]))
        asked = recorder.asked
        assert [len(one.sampled) for one in asked] == [100, 200, 200, 200, 50]
        assert tree_size(asked) <= computed() <= 1.02 * tree_size(asked)


def test_a_failing_program_fails_alone_and_its_branches_are_aborted(llm: LLM) -> None:
    inputs = [{"number": number, "fails": number == 2} for number in range(5)]
    outcomes = run_offline(llm, branches, inputs)
    assert [type(one.error) for one in outcomes] == [
        type(None),
        type(None),
        ValueError,
        type(None),
        type(None),
    ]
    assert str(outcomes[2].error) == "branch of 2" and outcomes[2]["first"] == outcomes[2].state["first"]
    alone = [run_offline(llm, branches, [one])[0].value for one in inputs]
    assert [one.value for one in outcomes] == alone
    assert not llm.llm_engine.has_unfinished_requests()


def test_branches_that_a_program_forgets_end_with_it(llm: LLM) -> None:
    forgotten: list[asyncio.Task[Any]] = []

    @program(max_tokens=100, ignore_eos=True)
    async def forgets(s: State) -> str:
        s += "a"
        [part] = s.fork(1)
        forgotten.append(asyncio.create_task(part.gen()))
        await s.gen("x", max_tokens=3)
        return "done"

    [outcome] = run_offline(llm, forgets, [()])
    assert outcome.value == "done" and forgotten[0].cancelled()
    while llm.llm_engine.client.stats().num_running:
        llm.llm_engine.step()


def test_at_most_so_many_programs_run_at_once_and_outcomes_keep_their_order() -> None:
    running, most = 0, 0

    @program
    async def counts(s: State, number: int, *, add: int = 0) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(number % 3):
            await asyncio.sleep(0)
        running -= 1
        return number + add

    engine = ScriptedEngine(CHAT)
    outcomes = asyncio.run(run_batch(engine, counts, list(range(20)), max_parallel=4))
    assert [one.value for one in outcomes] == list(range(20)) and most == 4
    kinds = asyncio.run(run_batch(engine, counts, [(1,), {"number": 2, "add": 5}, 3, "text"]))
    assert [one.value for one in kinds[:3]] == [1, 7, 3] and isinstance(kinds[3].error, TypeError)
    assert asyncio.run(run_batch(engine, counts, [])) == []


def test_one_program_is_a_part_of_another() -> None:
    @program
    async def part(s: State, word: str) -> str:
        s += user(word)
        text: str = await s.gen(word)
        return text

    @program
    async def whole(s: State) -> list[str]:
        return [await part(s, "one"), await part(s, "two")]

    engine = ScriptedEngine(CHAT, lambda prompt: f"{len(prompt)}")
    [outcome] = asyncio.run(run_batch(engine, whole, [()]))
    assert outcome.value == [outcome["one"], outcome["two"]] and outcome.text.count("<|im_start|>user") == 2


def test_what_cannot_run_is_refused_in_a_sentence(llm: LLM) -> None:
    engine = ScriptedEngine(CHAT)

    async def inside() -> None:
        run_offline(llm, branches, [1])

    async def direct() -> None:
        await branches(llm, 1)  # type: ignore[arg-type]

    for call, words in [
        (lambda: run_batch(engine, branches, [1], max_parallel=0), "max_parallel is 0"),
        (lambda: run_batch(engine, len, [1]), "that @program marks"),  # type: ignore[arg-type]
        (lambda: run_batch(llm, branches, [1]), "call run_offline"),  # type: ignore[arg-type]
        (lambda: run_batch(engine, branches, None), "inputs is of type NoneType"),  # type: ignore[arg-type]
        (lambda: run_batch(engine, branches, "ab"), "inputs is of type str"),
        (direct, "call run_offline"),
        (inside, "in an event loop"),
    ]:
        with pytest.raises(RequestError) as error:
            asyncio.run(call())
        assert words in str(error.value)
    with pytest.raises(RequestError, match="takes an LLM"):
        run_offline(engine, branches, [1])  # type: ignore[arg-type]


def test_a_text_beyond_the_context_is_refused_and_leaves_the_engine_as_it_was(llm: LLM) -> None:
    @program(max_tokens=2000)
    async def long(s: State) -> None:
        s += "a"
        await s.gen()

    [outcome] = run_offline(llm, long, [()])
    assert "max_model_len is 1600" in refusal(outcome.error)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_async_engine_gives_the_same_texts_and_aborts_what_a_failure_leaves(llm: LLM, model: Path) -> None:
    inputs = [{"number": number, "fails": number == 1} for number in range(3)]
    expected = [one.value for one in run_offline(llm, branches, inputs)]

    async def serve() -> list[Any]:
        args = EngineArgs.from_kwargs(**tiny_settings(model, max_model_len=1600, block_size=64))
        async with AsyncLLM.from_args(args) as engine:
            assert await branches(engine, 0) == expected[0]
            outcomes = await run_batch(engine, branches, inputs)
            assert engine.num_unfinished_requests == 0
            while (stats := await engine.stats()).num_running + stats.num_waiting:
                pass
            assert stats.kv_cache_usage == 0.0
            return [one.value for one in outcomes]

    assert asyncio.run(asyncio.wait_for(serve(), 200)) == expected
    assert expected[1] is None
