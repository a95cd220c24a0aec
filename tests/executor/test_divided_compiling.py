"""Workers that compile in the background change over to compiled code together,
however long each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import Region
from minivllm.compilation.row_counts import RowCounts
from minivllm.engine import background_builds
from minivllm.simulation.ranks import virtual_llm
from minivllm.worker.worker import Worker
from tests.executor.test_tensor_parallel import UNEVEN, answers, arguments


class SlowCompiler(RegionCompiler):
    """Hands out regions as they are.
    Its one build, where it needs any, is over when asked for ``rounds`` times."""

    num_regions = 1

    def __init__(self, rounds: int) -> None:
        super().__init__(enabled=True)
        self.rounds, self.num_questions, self.changed_over_after = rounds, -1, -1

    def __call__(self, region: Region) -> Callable:
        return region.function

    rows = RowCounts()

    @property
    def is_complete(self) -> bool:
        return self.rounds == 0

    def build_in_background(self) -> bool:
        return True

    def num_built(self) -> int:
        self.num_questions += 1  # the first one is asked before anything is built
        return int(self.num_questions >= self.rounds)

    @property
    def is_building(self) -> bool:
        return self.num_questions < self.rounds

    def freeze(self) -> None:
        self.changed_over_after = self.num_questions


@pytest.mark.parametrize("rounds", [(0, 5, 3), (4, 4, 9), (0, 0, 0)], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 3},
        {"pipeline_parallel_size": 3},
        {"pipeline_parallel_size": 3, "async_scheduling": True},
    ],
    ids=["parts", "stages", "async stages"],
)
def test_ranks_change_over_at_the_same_step(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, Any],
    rounds: tuple[int, ...],
) -> None:
    model = tiny_model("llama-biases", **{**UNEVEN, "num_hidden_layers": 3})
    with LLM(**arguments(model)) as llm:
        expected = answers(llm)

    def make(worker: Worker) -> RegionCompiler:
        communicator = worker._others.communicator
        return SlowCompiler(rounds[worker._stage.number if communicator is None else communicator.rank])

    monkeypatch.setattr(Worker, "_make_compiler", make)
    monkeypatch.setattr(background_builds, "POLL_SECONDS", 0.0)
    settings: dict[str, Any] = {
        "attention_backend": "sdpa",
        "compile_in_background": True,
        "enforce_eager": False,
    }
    with virtual_llm(**arguments(model, **layout, **settings)) as llm:  # whose requests take every slot
        compilers: list[Any] = [
            worker._compiler
            for worker in llm.llm_engine.client.core.executor.workers  # type: ignore[attr-defined]
        ]
        assert {compiler.changed_over_after for compiler in compilers} == ({-1} if any(rounds) else {0})
        assert answers(llm) == expected
        # Asked with every step, until all were done.
        assert {compiler.changed_over_after for compiler in compilers} == {max(rounds)}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # builds at the lowest priority
def test_processes_of_stages_serve_while_they_compile_and_change_over_to_that(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm)
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    settings: dict[str, Any] = {"compile_in_background": True, "enforce_eager": False}
    with LLM(**arguments(model, pipeline_parallel_size=2, **settings)) as llm:
        builds = llm.llm_engine.client.core._builds  # type: ignore[attr-defined]
        assert not builds.are_done
        while not builds.are_done:
            assert answers(llm) == expected
        assert answers(llm) == expected
        assert llm.llm_engine.client.call("num_recompilations") == 0
