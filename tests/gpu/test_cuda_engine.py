"""The whole engine on a CUDA device:
compiled and uncompiled agree, nothing recompiles, tables are mirrored exactly."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here"),
]
pytest.importorskip("msgspec", reason="the engine needs msgspec, which is not installed")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def config_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is only a configuration: its weights are drawn."""
    directory = tmp_path_factory.mktemp("dummy-llama")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def make_llm(directory: Path, **arguments: Any) -> Any:
    from minivllm import LLM

    torch._dynamo.reset()
    defaults = {
        "load_format": "dummy",
        "device": "cuda",
        "max_model_len": 512,
        "num_gpu_blocks_override": 200,
    }
    return LLM(str(directory), **{**defaults, **arguments})


def random_prompts(count: int) -> list[dict[str, list[int]]]:
    choose = random.Random(0)
    return [
        {"prompt_token_ids": [choose.randrange(2, 512) for _ in range(choose.randint(1, 150))]}
        for _ in range(count)
    ]


def greedy(llm: Any, prompts: list[dict[str, list[int]]], **params: Any) -> list[list[int]]:
    from minivllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **params)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, settings, use_tqdm=False)]


def test_compiled_equals_uncompiled_in_float32(config_directory: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(9)
    with make_llm(config_directory, dtype="float32", enforce_eager=True) as llm:
        expected = greedy(llm, prompts)
    with make_llm(config_directory, dtype="float32") as llm:
        assert greedy(llm, prompts) == expected
    with make_llm(
        config_directory, dtype="float32", max_num_batched_tokens=40, num_gpu_blocks_override=9
    ) as llm:
        assert greedy(llm, prompts) == expected, "chunked and preempted"


@pytest.mark.parametrize("mode", ["none", "piecewise", "full_decode", "full_and_piecewise"])
def test_every_graph_mode_gives_the_tokens_of_uncompiled(config_directory: Path, mode: str) -> None:
    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(9)
    with make_llm(config_directory, dtype="float32", enforce_eager=True) as llm:
        expected = greedy(llm, prompts)
    limits = {"max_num_seqs": 9, "max_num_batched_tokens": 200}
    with make_llm(config_directory, dtype="float32", cudagraph_mode=mode, **limits) as llm:
        assert greedy(llm, prompts) == expected
        graphs = llm.llm_engine.client.core.executor.worker.runner.graphs
        kinds = set() if graphs is None else {choice.kind for choice in graphs.num_replays}
        assert kinds == {name for name in ("full", "piecewise") if name in mode}
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0


def test_attention_that_cannot_be_captured_runs_between_graphs(config_directory: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(5)
    with make_llm(config_directory, dtype="float32", enforce_eager=True) as llm:
        expected = greedy(llm, prompts)
    with make_llm(config_directory, dtype="float32", max_num_seqs=8, attention_backend="sdpa") as llm:
        assert greedy(llm, prompts) == expected
        graphs = llm.llm_engine.client.core.executor.worker.runner.graphs
        assert {choice.kind for choice in graphs.num_replays} == {"piecewise"}


def test_graphs_are_captured_anew_after_a_sleep(config_directory: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(5)
    with make_llm(config_directory, dtype="float32", max_num_seqs=8) as llm:
        expected = greedy(llm, prompts)
        llm.sleep(1)
        llm.wake_up()
        assert greedy(llm, prompts) == expected


def test_compiled_bfloat16_stays_close_to_uncompiled(config_directory: Path) -> None:
    """Rounding may turn a near tie, after which texts differ: most first tokens must be the same."""
    prompts = random_prompts(16)
    with make_llm(config_directory, dtype="bfloat16", enforce_eager=True) as llm:
        expected = [tokens[0] for tokens in greedy(llm, prompts)]
    with make_llm(config_directory, dtype="bfloat16") as llm:
        got = [tokens[0] for tokens in greedy(llm, prompts)]
    assert sum(a == b for a, b in zip(got, expected)) >= 13


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(config_directory: Path) -> None:
    from minivllm import SamplingParams

    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(6)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True)
    with make_llm(config_directory, dtype="float32", enable_prefix_caching=False) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert together == alone


def test_async_scheduling_changes_no_token(config_directory: Path) -> None:
    from minivllm import SamplingParams

    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(12)
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "stop_token_ids": list(range(5, 512, 16))}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8, "top_k": 40},
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "logprobs": 2},
    ]
    params = [SamplingParams(**common, **kinds[index % 4]) for index in range(len(prompts))]
    found = []
    for is_async in (False, True):
        for pages in (200, 12):
            with make_llm(
                config_directory,
                dtype="float32",
                async_scheduling=is_async,
                num_gpu_blocks_override=pages,
                max_num_batched_tokens=64,
            ) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append(
                    [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]
                )
    assert all(one == found[0] for one in found)


def drafting(method: str, model: Path, is_async: bool) -> dict[str, Any]:
    """Settings with which a drafter guesses in every step."""
    speculation = {
        "method": method,
        "model": str(model),
        "num_speculative_tokens": 3,
        "verification_cost": 0.0,
    }
    return {
        "max_num_seqs": 9,
        "max_num_batched_tokens": 200,
        "async_scheduling": is_async,
        "speculative_config": speculation,
    }


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("version", ["eagle", "eagle3"])
def test_a_head_that_guesses_changes_no_token(
    config_directory: Path, tmp_path: Path, version: str, is_async: bool
) -> None:
    torch.set_float32_matmul_precision("highest")
    names = (
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": 128}
        if version == "eagle3"
        else {}
    )
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1, **names}))
    prompts = random_prompts(9)
    with make_llm(config_directory, dtype="float32", enforce_eager=True) as llm:
        expected = greedy(llm, prompts)
    settings = drafting(version, tmp_path, is_async)
    with make_llm(config_directory, dtype="float32", **settings) as llm:
        assert greedy(llm, prompts) == expected
        assert llm.get_metrics().num_draft_tokens > 0
        graphs = llm.llm_engine.client.core.executor.worker.runner.graphs
        assert "verify" in {choice.kind for choice in graphs.num_replays}
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_draft_model_replays_graphs_too(config_directory: Path, tmp_path: Path, is_async: bool) -> None:
    torch.set_float32_matmul_precision("highest")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    prompts = random_prompts(9)
    with make_llm(config_directory, dtype="float32", enforce_eager=True) as llm:
        expected = greedy(llm, prompts)
    settings = drafting("draft_model", tmp_path, is_async)
    with make_llm(config_directory, dtype="float32", **settings) as llm:
        assert greedy(llm, prompts) == expected
        runner = llm.llm_engine.client.core.executor.worker.runner
        for graphs, kinds in ((runner.graphs, {"verify"}), (runner.guessing_models[0].graphs, {"full"})):
            assert {choice.kind for choice in graphs.num_replays} >= kinds
        llm.sleep(1)
        llm.wake_up()
        assert greedy(llm, prompts) == expected
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0


@pytest.mark.parametrize("method", [{"method": "ngram"}, {"method": "early_exit", "num_layers": 1}], ids=str)
def test_speculation_changes_no_token(config_directory: Path, method: dict[str, Any]) -> None:
    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(9)
    with make_llm(config_directory, dtype="float32", enforce_eager=True) as llm:
        expected = greedy(llm, prompts)
    speculative = {**method, "num_speculative_tokens": 3}
    with make_llm(config_directory, dtype="float32", max_num_seqs=16, speculative_config=speculative) as llm:
        assert greedy(llm, prompts) == expected
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_compiled_equals_uncompiled_over_pages_of_fewer_bits(
    config_directory: Path, kv_cache_dtype: str
) -> None:
    """Both round keys and values; sums in another order may round one of them the other way and turn a near
    tie."""
    if kv_cache_dtype == "fp8_e4m3" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert e4m3")
    torch.set_float32_matmul_precision("highest")
    prompts = random_prompts(16)
    arguments = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 16}
    with make_llm(config_directory, enforce_eager=True, **arguments) as llm:
        expected = [tokens[0] for tokens in greedy(llm, prompts)]
    with make_llm(config_directory, **arguments) as llm:
        got = [tokens[0] for tokens in greedy(llm, prompts)]
        assert {
            cache.k.element_size()
            for cache in llm.llm_engine.client.core.executor.worker.runner.paged_model.caches
        } == {2 if kv_cache_dtype == "bfloat16" else 1}
    assert sum(a == b for a, b in zip(got, expected)) >= 14


def test_nothing_compiles_after_warm_up(config_directory: Path) -> None:
    from minivllm import SamplingParams

    choose = random.Random(1)
    with make_llm(config_directory, dtype="bfloat16", max_num_seqs=32, max_num_batched_tokens=256) as llm:
        engine, core = llm.llm_engine, llm.llm_engine.client.core
        steps = started = 0
        while steps < 300:
            if not engine.has_unfinished_requests() or (started < 200 and choose.random() < 0.4):
                length = choose.choice([1, 2, 63, 64, 65, choose.randint(1, 300)])
                ids = [choose.randrange(2, 512) for _ in range(length)]
                params = SamplingParams(temperature=0.0, max_tokens=choose.randint(1, 30), ignore_eos=True)
                engine.add_request(None, {"prompt_token_ids": ids}, params)
                started += 1
            engine.step()
            steps += 1
        assert core.executor.num_recompilations() == 0


WITHOUT_WAITING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7, "seed": 1},
    "truncated": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2},
    "constraints": {
        "temperature": 0.0,
        "logit_bias": {5: 3.0},
        "min_tokens": 30,
        "allowed_token_ids": [5, 6, 7, 8],
    },
}


@pytest.mark.parametrize(
    "kinds", [*([name] for name in WITHOUT_WAITING), ["greedy", "truncated"]], ids="-".join
)
def test_the_host_waits_for_nothing_but_tokens_on_their_way_back(
    config_directory: Path, kinds: list[str]
) -> None:
    """PyTorch raises where a call would wait for the device;
    events, with which tokens come back, are not asked."""
    from minivllm import SamplingParams

    with make_llm(config_directory, dtype="bfloat16", max_num_seqs=8) as llm:
        engine = llm.llm_engine
        for prompt, kind in zip(random_prompts(6), itertools.cycle(kinds)):
            engine.add_request(
                None, prompt, SamplingParams(max_tokens=40, ignore_eos=True, **WITHOUT_WAITING[kind])
            )
        for _ in range(5):
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.has_unfinished_requests()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 48])
def test_compiled_draws_are_those_of_a_cpu(rows: int, dtype: torch.dtype) -> None:
    """But for those where a logarithm or an exponential is rounded the other way."""
    from kernels_triton_free.sampling.bisection import sortable
    from kernels_triton_free.sampling.draw import draw, draw_truncated
    from minivllm.compilation.compiler import RegionCompiler
    from minivllm.compilation.regions import Size, TensorSpec
    from minivllm.sampling.sampler import _compiled_draws

    vocab_size, device = 5003, torch.device("cuda")
    compiler = RegionCompiler(enabled=True, single_rows=True)
    compiled = _compiled_draws(compiler, TensorSpec((Size("rows", 5, single=1), vocab_size), dtype, device))
    generator = torch.Generator().manual_seed(rows)
    same = []
    for round_ in range(20 if rows == 1 else 2):
        logits = (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)
        temperature = torch.rand(rows, generator=generator) + 0.3
        seeds, positions = torch.arange(rows) * 2**40 + round_, torch.arange(rows) + 7
        temperature[3::5] = 0.0
        columns = [temperature, torch.full((rows,), 0.01), seeds, positions]
        truncating = [torch.arange(rows) % 3 * 20, torch.rand(rows, generator=generator).clamp(0.1)]
        on_device = [column.to(device) for column in (*columns, *truncating)]
        free, cut = (
            function(logits.to(device), *on_device[:count]) for function, count in zip(compiled, (4, 6))
        )
        expected = draw_truncated(sortable(logits), *columns, *truncating, dtype=dtype)
        same += [free.cpu() == draw(logits, *columns), cut.cpu() == expected]
    assert torch.cat(same).float().mean() > 0.97


def test_a_place_written_twice_before_a_flush_holds_the_last_value() -> None:
    from minivllm.device.buffers import MirroredTable

    choose = np.random.default_rng(0)
    table = MirroredTable(64, 512, torch.device("cuda"))
    for _ in range(50):
        for _ in range(40):
            length = int(choose.integers(1, 200))
            start = int(choose.integers(0, 512 - length))
            table.write(int(choose.integers(0, 8)), start, choose.integers(0, 10**6, length).astype(np.int32))
        table.flush()
        assert np.array_equal(table.device.cpu().numpy(), table.host)


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this PyTorch has no NCCL")
def test_collectives_are_captured(tmp_path: Path) -> None:
    """Of a group of one, which is all that a single GPU can have: NCCL's kernels are in the graph."""
    from minivllm.distributed.nccl import NcclCommunicator
    from minivllm.graphs.graph_capture import CudaGraphs, GraphCapture

    communicator = NcclCommunicator(0, 1, str(tmp_path / "ranks"))
    try:
        x, backend = torch.ones(700, 576, device="cuda"), CudaGraphs()
        with torch.inference_mode(), torch.cuda.stream(backend.stream), GraphCapture(backend) as capture:
            total = communicator.all_reduce(2 * x)
        for value in (3.0, 5.0):
            x.fill_(value)
            capture.replay()
            assert (total == 2 * value).all()
    finally:
        communicator.close()
