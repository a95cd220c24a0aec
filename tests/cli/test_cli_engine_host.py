"""The model of a chat, switched in place; and what a chat sees of a real engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.engine import engine_start
from minivllm.cli.engine.engine_start import EngineHost, ProgressHandler
from minivllm.cli.trace.command import folded, heat_strip
from minivllm.config import EngineArgs
from minivllm.errors import ModelError
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.steps import TraceStep
from tests.cli.scripted_engine import ScriptedEngine, create_scripted_engine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(model, were all earlier engines closed by then) of every engine that was asked for."""
    engines: list[ScriptedEngine] = []
    seen: list[tuple[str, bool]] = []

    def create(args: EngineArgs) -> ScriptedEngine:
        seen.append((args.model, all(engine.closed for engine in engines)))
        if args.model == "broken":
            raise RuntimeError("no memory")
        engines.append(create_scripted_engine(args))
        return engines[-1]

    def fetch(args: EngineArgs) -> None:
        if args.model == "unknown":
            raise ModelError("There is no model 'unknown'.")

    monkeypatch.setattr(engine_start, "create_engine", create)
    monkeypatch.setattr(engine_start, "fetch_model", fetch)
    return seen


def host(log: ProgressHandler | None = None) -> EngineHost:
    log = log or ProgressHandler(verbose=False)
    return EngineHost(
        EngineArgs(model="first", tokenizer="its-own"), log, lambda engine: SamplingParams(max_tokens=None)
    )


def test_the_old_model_is_freed_before_the_new_one_is_loaded(started: list[tuple[str, bool]]) -> None:
    with host() as running:
        session = ChatSession(running.engine, "first", running.params(), host=running)
        session.ask("hello", lambda text: None, lambda: False)
        session.switch_model("second")
        assert started == [("first", True), ("second", True)]
        assert (session.model, session.engine) == ("second", running.engine)
        assert session.ask("more", lambda text: None, lambda: False).text == "MORE"
        assert len(session.messages) == 4
    assert running._engine is None


def test_a_name_that_is_no_model_does_not_touch_the_old_one(started: list[tuple[str, bool]]) -> None:
    with host() as running:
        before = running.engine
        with pytest.raises(ModelError, match="no model 'unknown'"):
            running.switch("unknown")
        assert running.engine is before
    assert started == [("first", True)]


def test_a_model_that_does_not_start_gives_way_to_the_old_one_again(started: list[tuple[str, bool]]) -> None:
    with host() as running:
        session = ChatSession(running.engine, "first", running.params(), host=running)
        with pytest.raises(ModelError, match="broken could not be started: no memory"):
            session.switch_model("broken")
        assert [model for model, _ in started] == ["first", "broken", "first"]
        assert session.model == "first"
        assert session.ask("on", lambda text: None, lambda: False).text == "ON"


def test_a_chat_sees_the_steps_of_a_real_engine_and_its_share_of_the_bandwidth(
    tiny_model: Callable[..., Path], word_tokenizer: Path
) -> None:
    args = EngineArgs(
        model=str(tiny_model("llama")),
        tokenizer=str(word_tokenizer),
        enforce_eager=True,
        max_num_batched_tokens=16,
        max_model_len=128,
        max_num_seqs=4,
    )
    with LLMEngine.from_args(args) as engine:
        session = ChatSession(engine, "tiny", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        for num_cached in (0, 16):
            session.clear()
            generation = session.ask("w1 w2 w3 w4 " * 9, lambda text: None, lambda: False)
            steps = session.insight.steps(generation)
            assert generation.num_cached_tokens >= num_cached
            left = generation.num_prompt_tokens - generation.num_cached_tokens
            chunks = [16] * (left // 16) + ([left % 16] if left % 16 else [])
            assert [step.num_scheduled_tokens["R1"] for step in steps] == chunks + [1] * 11
            assert [bool(step.decoding) for step in steps] == [False] * len(chunks) + [True] * 11
            assert generation.bandwidth_share is not None and generation.bandwidth_share > 0
        assert "% of bandwidth bound" in generation.statistics_line(128)


def test_long_runs_of_decoding_are_folded_and_the_strip_fits_the_window() -> None:
    steps = [
        TraceStep(number, {"R1": 40 if number == 0 else 1}, frozenset(["R1"] if number else []), [], [])
        for number in range(60)
    ]
    short = folded(steps)
    assert [step.step for step in short] == [0, 1, 2, 3, 4, 5, 6, 59]
    assert "…" in heat_strip(short, 1).plain
    whole = heat_strip(steps, 1, columns=60).plain
    assert max(map(len, whole.split("\n"))) <= 60
    numbers = [word for line in whole.split("\n") if line.startswith("step") for word in line.split()[1:]]
    assert numbers == [str(number) for number in range(60)]


def test_progress_names_how_many_regions_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    from minivllm.compilation.packaged.package_builds import PackageBuilds

    with caplog.at_level(logging.INFO, logger="minivllm"):
        builds = PackageBuilds(settle=lambda: None)
        for name in ("first", "between", "last"):
            builds.start(name, lambda: None)
        builds.wait()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "Compiling 3 regions: 0 done …"
    assert [message.rpartition(": ")[2] for message in messages[1:]] == ["1 of 3.", "2 of 3.", "3 of 3."]
