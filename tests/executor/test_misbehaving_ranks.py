"""Real workers of which one samples otherwise, hangs or raises:
the engine ends with a sentence that names the rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import EngineDeadError
from tests.executor.rank_processors import GOOD_STEPS
from tests.executor.small_engine import worker_processes
from tests.executor.test_tensor_parallel import arguments


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "Differs",
            rf"In step {GOOD_STEPS + 1} of the engine the worker of rank 1 sampled other tokens than that of",
        ),
        pytest.param(
            "Hangs",
            r"(?s)worker of rank 1 hangs: its step has taken 6 s, and .* It was here:.*time.sleep\(600\)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Raises",
            r"(?s)worker of rank 1 died of ValueError: the processor has a fever.*in fail",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_misbehaves_is_named(tiny_model: Callable[..., Path], kind: str, message: str) -> None:
    given = arguments(
        tiny_model("llama", num_hidden_layers=1),
        tensor_parallel_size=2,
        heartbeat_timeout=8,
        logits_processors=[f"tests.executor.rank_processors:{kind}"],
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(**given) as llm:
        workers = worker_processes()
        assert len(workers) == 2
        with pytest.raises(EngineDeadError, match=message):
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)
