"""The token budget of a step: what the user says, else what the performance mode and the device ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import AsyncLLM
from minivllm.config import PERFORMANCE_MODES, EngineArgs
from minivllm.engine.resolve import DEFAULTS, resolve_token_budget


@given(
    st.sampled_from(list(DEFAULTS)),
    st.sampled_from([None, *PERFORMANCE_MODES]),
    st.integers(1, 4096),
    st.integers(1, 9999),
)
def test_a_budget_that_is_given_is_taken(device: str, mode: str | None, seqs: int, budget: int) -> None:
    args = EngineArgs(max_num_batched_tokens=budget, performance_mode=mode)
    assert resolve_token_budget(args, DEFAULTS[device], seqs) == budget


@given(st.sampled_from(list(DEFAULTS)), st.integers(1, 4096))
def test_interactive_steps_are_short_but_leave_room_for_prompts(device: str, seqs: int) -> None:
    defaults = DEFAULTS[device]
    throughput, interactive = (
        resolve_token_budget(EngineArgs(performance_mode=mode), defaults, seqs) for mode in PERFORMANCE_MODES
    )
    assert resolve_token_budget(EngineArgs(), defaults, seqs) == throughput
    assert interactive >= 2 * seqs
    assert interactive < throughput or 2 * seqs >= throughput


@pytest.mark.parametrize(("mode", "expected"), [(None, "interactivity"), ("throughput", "throughput")])
def test_streams_are_served_interactively_unless_told_otherwise(
    mode: str | None, expected: str, tiny_model: Callable[..., Path]
) -> None:
    async def budget() -> int:
        args = EngineArgs(
            model=str(tiny_model("llama")), device="cpu", enforce_eager=True, performance_mode=mode
        )
        async with AsyncLLM.from_args(args) as llm:
            return llm.client.config.scheduler.max_num_batched_tokens

    cpu = DEFAULTS["cpu"]
    wanted = resolve_token_budget(EngineArgs(performance_mode=expected), cpu, cpu.max_num_seqs)
    assert asyncio.run(budget()) == wanted
