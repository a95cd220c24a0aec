"""Graphs on a CPU: the recorder replays what CUDA would over the same static buffers,
and tokens must not change."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.batch.step_inputs import Row
from minivllm.config import CudaGraphMode
from minivllm.device.buffers import StagingBuffer
from minivllm.graphs.graph_capture import CudaGraphs, GraphCapture
from minivllm.graphs.step_graphs import (
    GraphChoice,
    bucket_for,
    decode_buckets,
    token_buckets,
    verify_buckets,
)
from minivllm.worker.worker import run_on_null_block
from tests.attention.backends import CUDA_POLICY, choose_as_on_a_gpu
from tests.attention.random_batches import CPU
from tests.spec_decode.scripted_drafter import ScriptedDrafter, speculation_of
from tutorials.recorded_graphs import RecordedGraphs

MODES = [mode for mode in get_args(CudaGraphMode) if mode != "none"]


def test_a_replay_computes_anew_from_what_the_same_buffers_hold_now() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    with torch.inference_mode(), GraphCapture(RecordedGraphs()) as capture:
        y = torch.relu(x @ weight).sum(-1)
    for _ in range(3):
        x.copy_(torch.randn(3, 4))
        with torch.inference_mode():
            capture.replay()
        torch.testing.assert_close(y, torch.relu(x @ weight).sum(-1))


def test_a_tensor_that_was_replaced_is_not_seen_as_with_cuda() -> None:
    x = torch.ones(3)
    with torch.inference_mode(), GraphCapture(RecordedGraphs()) as capture:
        y = x * 2
    x = torch.full((3,), 5.0)
    capture.replay()
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_writes_in_place_are_replayed() -> None:
    cache, x = torch.zeros(6), torch.ones(2)
    with torch.inference_mode(), GraphCapture(RecordedGraphs()) as capture:
        cache[1:3].copy_(x * 3)
    cache.zero_()
    x.fill_(4)
    capture.replay()
    assert cache.tolist() == [0, 12, 12, 0, 0, 0]


@given(st.lists(st.integers(-5, 5), min_size=0, max_size=6))
def test_what_runs_between_segments_runs_anew_in_its_place(factors: list[int]) -> None:
    """A chain of captured and eager multiplications equals the plain chain,
    whatever the eager ones multiply by now."""
    now = list(factors)
    x, middle = torch.ones(2), [torch.zeros(2) for _ in factors]
    with torch.inference_mode(), GraphCapture(RecordedGraphs()) as capture:
        y = x + 1
        for index, out in enumerate(middle):

            def multiply(y: Tensor = y, out: Tensor = out, index: int = index) -> None:
                out.copy_(y * now[index])

            capture.run_between(multiply)
            y = out + 1
    assert capture.num_graphs == len(factors) + 1
    now[:] = [factor + 1 for factor in factors]
    x.fill_(3)
    capture.replay()
    expected = 4.0
    for factor in now:
        expected = expected * factor + 1
    assert y.tolist() == [expected, expected]


def test_a_segment_that_launches_nothing_is_no_graph() -> None:
    x, ran = torch.ones(2), []
    with torch.inference_mode(), GraphCapture(RecordedGraphs()) as capture:
        capture.run_between(lambda: ran.append("first"))
        y = x + 1
        capture.run_between(lambda: ran.append("last"))
    assert capture.num_graphs == 1
    x.fill_(4)
    capture.replay()
    assert ran == ["first", "last"] * 2 and y.tolist() == [5, 5]


def test_a_cuda_graph_that_is_empty_is_left_out_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch tells only by this warning; what else it warns of is passed on."""

    class Graph:
        says: tuple[str, ...] = ()

        def capture_begin(self, **arguments: Any) -> None: ...

        def capture_end(self) -> None:
            for text in self.says:
                warnings.warn(text, stacklevel=1)

        def replay(self) -> None: ...

    empty = (
        "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
        "device."
    )
    for name, stand_in in {"Stream": object, "CUDAGraph": Graph, "graph_pool_handle": object}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    backend = CudaGraphs()
    for says, is_empty, told in (((), False, []), ((empty,), True, []), ((empty, "other"), True, ["other"])):
        Graph.says = says
        backend.begin()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replay = backend.end()
        assert (replay is None) is is_empty
        assert [str(warning.message) for warning in caught] == told


@given(st.integers(1, 600), st.integers(1, 4096))
def test_buckets_hold_every_batch_and_waste_little(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    decodes, attention = decode_buckets(max_num_seqs), CUDA_POLICY.decode_batches(max_num_seqs)
    tokens = token_buckets(max_num_batched_tokens)
    for buckets, least in ((decodes, 1), (decode_buckets(max_num_seqs, 2), 2), (attention, 1), (tokens, 2)):
        assert buckets == sorted(set(buckets)) and buckets[0] == least
        assert buckets is tokens or buckets[-1] == max(least, max_num_seqs)
    assert tokens[-1] == max(2, min(512, max_num_batched_tokens))
    for size in range(1, max_num_seqs + 1):
        bucket = bucket_for(size, decodes)
        assert (
            bucket is not None
            and bucket < max(2 * size, size + 32)
            and bucket_for(bucket, attention) is not None
        )
    assert bucket_for(max_num_seqs + 1, decodes) is None


@given(st.integers(1, 600), st.integers(0, 9), st.integers(1, 4096))
def test_graphs_of_rows_with_drafts_hold_no_more_tokens_than_piecewise_ones(
    max_num_seqs: int, few_tokens: int, max_num_batched_tokens: int
) -> None:
    buckets = verify_buckets(max_num_seqs, few_tokens, max_num_batched_tokens)
    most = min(512, max_num_batched_tokens)
    assert all(rows * few_tokens <= most and rows <= max_num_seqs for rows in buckets)
    if few_tokens > 1 and few_tokens <= most:
        largest = buckets[-1]
        assert largest == max_num_seqs or (largest + 1) * few_tokens > most
        assert all(bucket_for(rows, buckets) is not None for rows in range(1, largest + 1))
    else:
        assert not buckets


@pytest.fixture
def with_graphs(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """An uncompiled engine with graphs that takes the choices of a GPU."""
    backend = choose_as_on_a_gpu(monkeypatch)

    def make(mode: str, family: str = "llama", **arguments: Any) -> LLM:
        llm = tiny_llm(tiny_model(family), attention_backend=backend, **arguments)
        runner = llm.llm_engine.client.core.executor.worker.runner
        with torch.inference_mode():
            runner.capture_graphs(mode, RecordedGraphs())
        return llm

    return make


def tiny_llm(model: Path, **arguments: Any) -> LLM:
    return LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        num_gpu_blocks_override=24,
        block_size=16,
        **arguments,
    )


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same_with_graphs_and_every_step_takes_the_graph_it_should(
    with_graphs: Callable[..., LLM], tiny_model: Callable[..., Path], mode: str
) -> None:
    choose = random.Random(0)
    prompts = [
        {"prompt_token_ids": [choose.randrange(3, 200) for _ in range(choose.randint(1, 40))]}
        for _ in range(7)
    ]
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=3 + index, ignore_eos=True)
        for index, temperature in zip(range(7), itertools.cycle((0.0, 0.8)))
    ]
    limits = {"max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    with tiny_llm(tiny_model("llama"), **limits) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    with with_graphs(mode, **limits) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
        replays = runner.graphs.num_replays
        assert {choice.kind for choice in replays} == (
            {"full"}
            if mode == "full_decode"
            else {"piecewise"}
            if mode == "piecewise"
            else {"full", "piecewise"}
        )
        assert all(
            choice.num_tokens in runner.graphs.full_buckets for choice in replays if choice.kind == "full"
        )
        num_layers = len(runner.paged_model.layers)
        for choice, captured in runner.graphs._captured.items():
            assert captured.capture.num_graphs == (num_layers if choice.kind == "piecewise" else 1)
        if mode != "full_decode":
            assert sum(replays.values()) == llm.get_metrics().num_steps


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss"])
def test_drafts_are_verified_in_one_graph_however_many_a_row_has(
    with_graphs: Callable[..., LLM], tiny_model: Callable[..., Path], family: str
) -> None:
    """Some guesses are wrong, and rows have from none of them to three."""
    choose = random.Random(1)
    prompts = [{"prompt_token_ids": [choose.randrange(3, 200) for _ in range(4 + 9 * i)]} for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    limits = {"max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    with tiny_llm(tiny_model(family), **limits) as plain:
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(prompts, params)]
    texts = [prompt["prompt_token_ids"] + answer for prompt, answer in zip(prompts, expected)]
    config = {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    with with_graphs("full_and_piecewise", family, speculative_config=config, **limits) as llm:
        drafter = ScriptedDrafter(texts, 0.3, 200)
        guess, lengths = drafter.propose, set[tuple[int, ...]]()

        def propose(tasks: Any) -> dict[str, list[int]]:
            all_guesses = {name: ids[: choose.randint(0, 3)] for name, ids in guess(tasks).items()}
            lengths.add(tuple(sorted(len(ids) for ids in all_guesses.values())))
            return {name: ids for name, ids in all_guesses.items() if ids}

        drafter.propose = propose  # type: ignore[method-assign]
        speculation_of(llm).drafter = drafter
        graphs = llm.llm_engine.client.core.executor.worker.runner.graphs
        assert graphs.verify_buckets[:3] == [1, 2, 4] and graphs.verify_buckets[-1] >= 5
        assert [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)] == expected
        assert llm.get_metrics().num_accepted_tokens > 20
    verified = {choice: count for choice, count in graphs.num_replays.items() if choice.kind == "verify"}
    assert sum(verified.values()) > 5 and len(verified) > 1 and any(len(set(each)) > 1 for each in lengths)
    for choice, captured in graphs._captured.items():
        if choice.kind == "verify":
            assert choice.num_tokens == 4 * choice.num_short and captured.capture.num_graphs == 1


def test_steps_that_a_graph_of_drafts_would_pad_too_much_take_another(
    with_graphs: Callable[..., LLM], tiny_model: Callable[..., Path]
) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    limits = {"max_model_len": 64, "max_num_seqs": 40, "max_num_batched_tokens": 256}
    with with_graphs("full_and_piecewise", speculative_config=config, **limits) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        choose = runner.graphs.choose
        assert choose([4, 4]) == GraphChoice("verify", 8, 2) and choose([1, 1]) == GraphChoice("full", 2)
        assert choose([4, 4, 4]) == GraphChoice("verify", 16, 4), "an empty row"
        assert choose([1] * 15 + [2]) == GraphChoice("verify", 64, 16), "few tokens are padded freely"
        assert choose([4] * 10 + [1] * 14) == GraphChoice("verify", 96, 24)
        for counts in ([1] * 23 + [2], [5, 4], [1] * runner.graphs.verify_buckets[-1] + [4]):
            chosen = choose(counts)
            assert chosen is not None and chosen.kind == "piecewise", counts
        assert choose([4, 4], in_pieces=True) == GraphChoice("piecewise", 8)
        with torch.inference_mode(), pytest.raises(ValueError, match="graph of 2 rows"):
            runner.paged_model.build([Row(None, 0, 5)], 8, 2)  # type: ignore[arg-type]


def test_layers_that_keep_a_state_verify_in_pieces(with_graphs: Callable[..., LLM]) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    with with_graphs("full_and_piecewise", "lfm2", speculative_config=config, **limits) as llm:
        assert llm.llm_engine.client.core.executor.worker.runner.graphs.verify_buckets == []


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_a_graph_of_single_tokens_is_not_replayed_where_accepted_drafts_must_get_into_a_state(
    with_graphs: Callable[..., LLM], tiny_model: Callable[..., Path], family: str
) -> None:
    """A drafter that guesses every other time: after each verification comes a step of one token."""
    prompts = [{"prompt_token_ids": list(range(3 + index, 12 + index))} for index in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    limits = {"max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    with tiny_llm(tiny_model(family), **limits) as plain:
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(prompts, params)]
    texts = [prompt["prompt_token_ids"] + answer for prompt, answer in zip(prompts, expected)]
    config = {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    with with_graphs("full_and_piecewise", family, speculative_config=config, **limits) as llm:
        drafter = ScriptedDrafter(texts, 0.0, 416)
        steps, guess = itertools.count(), drafter.propose
        drafter.propose = lambda tasks: guess(tasks) if next(steps) % 3 == 0 else {}  # type: ignore[method-assign]
        speculation_of(llm).drafter = drafter
        replays = llm.llm_engine.client.core.executor.worker.runner.graphs.num_replays
        assert [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)] == expected
        assert llm.get_metrics().num_accepted_tokens > 10
        assert replays[GraphChoice("full", 2)] > 0, "a third of the steps has neither drafts nor replays"
        assert replays[GraphChoice("piecewise", 2)] > 0, "a third of the steps replays"


def test_a_step_of_fewer_tokens_than_requests_bounds_what_is_warmed_up_and_captured(
    with_graphs: Callable[..., LLM], tiny_model: Callable[..., Path]
) -> None:
    prompts = [{"prompt_token_ids": list(range(3, 9 + index))} for index in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    limits = {"max_model_len": 64, "max_num_seqs": 150, "max_num_batched_tokens": 7}
    with tiny_llm(tiny_model("llama"), **limits) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    with with_graphs("full_and_piecewise", **limits) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        most = runner.limits.max_num_batched_tokens  # a few more than the engine schedules, for the warm-up
        assert max(runner.paged_model.decode_batches) == max(runner.graphs.full_buckets) == most < 20
        with torch.inference_mode():
            for batch in runner.paged_model.decode_batches:
                run_on_null_block(runner, [1] * batch)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
        assert {choice.kind for choice in runner.graphs.num_replays} == {"full", "piecewise"}


def test_lists_of_blocks_that_moved_are_refused(with_graphs: Callable[..., LLM]) -> None:
    with with_graphs("full_decode", max_model_len=64, max_num_seqs=4) as llm:
        tiles = llm.llm_engine.client.core.executor.worker.runner.paged_model.backends[0]._single
        tiles._buffer = StagingBuffer({name: array.shape for name, array in tiles._buffer.host.items()}, CPU)
        with pytest.raises(RuntimeError, match="moved since it was captured"):
            llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0.0, max_tokens=4))


def test_inputs_that_moved_are_refused(with_graphs: Callable[..., LLM]) -> None:
    with with_graphs("full_decode", max_model_len=64, max_num_seqs=4) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        builder = runner.paged_model._builder
        builder._token_ids = builder._token_ids.clone()
        with pytest.raises(RuntimeError, match="moved since it was captured"):
            llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0.0, max_tokens=4))
