"""async_scheduling changes when things happen and nothing else:
every output is the one of a synchronous engine.

"thread": the worker has a thread of its own, as on a CPU. "launch": steps are launched on tokens that the
host does not know yet, as on a GPU, whose memory is not the host's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, EngineArgs, LoRARequest, SamplingParams
from minivllm.engine.resolve import resolve_async_scheduling
from minivllm.errors import ConfigError
from minivllm.processing.outputs import RequestOutput
from minivllm.sampling_params import RepetitionDetection, StructuredOutputs
from tests.parity_reference import (
    assert_pool_unused,
    random_prompts,
    reference_tokens,
    run,
    runner_of,
    tiny_llm,
    tokens_of,
)

TinyModel = Callable[..., Path]

MODES = ("thread", "launch")
MAX_TOKENS = 14


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **more})


def seeded(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": MAX_TOKENS, "ignore_eos": True, **more}
    )


MANY_IDS = list(range(10, 416, 9))
REQUESTS: dict[str, SamplingParams] = {
    "greedy": greedy(),
    "one token": greedy(max_tokens=1),
    "seeded": seeded(1),
    "top-p, top-k, min-p": seeded(2, top_p=0.8, top_k=30, min_p=0.01),
    "end of sequence": seeded(3, ignore_eos=False, logit_bias={1: 4.0}),
    "stop tokens": seeded(4, stop_token_ids=MANY_IDS),
    "min_tokens": seeded(5, stop_token_ids=MANY_IDS, min_tokens=6),
    "stop strings": seeded(6, stop=["a", "e", "t"]),
    "n": seeded(7, n=3, stop_token_ids=MANY_IDS),
    "logprobs": seeded(8, logprobs=3),
    "prompt_logprobs": greedy(prompt_logprobs=2, logprobs=0),
    "penalties": seeded(9, presence_penalty=0.9, frequency_penalty=0.7, repetition_penalty=1.4),
    "bad words": greedy(bad_words=["the", "a", " a b"], repetition_penalty=1.1),
    "allowed ids": seeded(10, allowed_token_ids=[20, 21, 22, 23]),
    "repetition": greedy(
        allowed_token_ids=[20, 21], repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=3)
    ),
    "choice": greedy(
        structured_outputs=StructuredOutputs(choice=["yes", "no, never", "maybe"]), ignore_eos=False
    ),
    "regex": seeded(11, structured_outputs=StructuredOutputs(regex="[a-c]{3,9}x"), ignore_eos=False),
}
PROMPTS = random_prompts(tuple(5 + 3 * index % 23 for index in range(len(REQUESTS))), seed=5)


@contextmanager
def engine(model: Path, mode: str | None, **settings: Any) -> Iterator[LLM]:
    """mode: see above; None is synchronous."""
    with tiny_llm(model, async_scheduling=mode is not None, **settings) as llm:
        if mode == "launch":
            executor = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]
            executor._thread.shutdown()
            executor._thread = None
            token_ids = runner_of(llm).batch.token_ids
            token_ids.device, token_ids._separate = token_ids.device.clone(), True
        yield llm


def described(output: RequestOutput) -> dict[str, Any]:
    """Everything that a user sees of an output, log-probabilities rounded, since batches differ."""

    def rounded(positions: Any) -> Any:
        if positions is None:
            return None
        return [
            None if entries is None else {token: round(entry.logprob, 3) for token, entry in entries.items()}
            for entries in positions
        ]

    return {
        "prompt_logprobs": rounded(output.prompt_logprobs),
        "completions": [
            (list(one.token_ids), one.text, one.finish_reason, one.stop_reason, rounded(one.logprobs))
            for one in output.outputs
        ],
    }


def outcomes(llm: LLM, **more: Any) -> dict[str, Any]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], list(REQUESTS.values()), use_tqdm=False, **more
    )
    assert_pool_unused(llm)
    return {name: described(output) for name, output in zip(REQUESTS, outputs)}


# Budgets that cut prompts into single tokens, into chunks, and not at all;
# the pool of 17 blocks is too small for all.
SETTINGS: dict[str, dict[str, Any]] = {
    "budget 1": {"max_num_batched_tokens": 1, "max_num_seqs": 3},
    "budget 7": {"max_num_batched_tokens": 7},
    "budget 64": {"max_num_batched_tokens": 64},
    "preemption": {"max_num_batched_tokens": 64, "max_model_len": 64, "num_gpu_blocks_override": 14},
    "priority": {
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "num_gpu_blocks_override": 14,
        "scheduling_policy": "priority",
    },
}


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    """The answers of a synchronous engine with room for all requests."""
    with engine(model, None) as llm:
        return outcomes(llm)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_output_is_the_same(model: Path, expected: dict[str, Any], setting: str, mode: str) -> None:
    more: dict[str, Any] = (
        {"priority": [index % 3 for index in range(len(PROMPTS))]} if setting == "priority" else {}
    )
    with engine(model, mode, **SETTINGS[setting]) as llm:
        found = outcomes(llm, **more)
        preempted = llm.get_metrics().num_preemptions
    for name in REQUESTS:
        assert found[name] == expected[name], name
    assert (preempted > 0) == (setting in ("preemption", "priority"))


def test_the_requests_end_in_every_way(expected: dict[str, Any]) -> None:
    ends = {(end, type(why)) for found in expected.values() for _, _, end, why, _ in found["completions"]}
    assert ends >= {("length", type(None)), ("stop", int), ("stop", str), ("stop", type(None))}


@pytest.mark.parametrize("family", ["qwen3", "llama-mqa"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_transformers(tiny_model: TinyModel, family: str, mode: str) -> None:
    model = tiny_model(family)
    prompts = random_prompts((1, 9, 33), seed=2)
    with engine(model, mode, max_num_batched_tokens=16) as llm:
        found = tokens_of(run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)))
    assert found == reference_tokens(model, prompts, MAX_TOKENS)


@pytest.mark.parametrize("mode", MODES)
def test_adapters_come_and_go(tiny_model: TinyModel, tmp_path: Path, mode: str) -> None:
    from safetensors.torch import save_file
    from torch import randn

    model = tiny_model("llama")
    adapters: list[LoRARequest | None] = [None]
    for index in range(3):
        directory = tmp_path / f"adapter-{index}"
        directory.mkdir()
        name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
        tensors = {}
        for layer in range(3):
            tensors[name.format(layer, "A")] = randn(4, 64)
            tensors[name.format(layer, "B")] = randn(64, 4)
        save_file(tensors, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
        )
        adapters.append(LoRARequest(f"adapter-{index}", lora_path=str(directory)))
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts((9, 5, 17, 3, 12, 7, 30, 4))]
    params = [seeded(seed, stop_token_ids=MANY_IDS[::2]) for seed in range(len(prompts))]
    answers = []
    for how in (None, mode):
        with engine(model, how, enable_lora=True, max_loras=1, max_num_seqs=3) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[*adapters, *adapters])  # type: ignore[arg-type]
            answers.append([described(output) for output in outputs])
            assert_pool_unused(llm)
    assert answers[0] == answers[1]
    assert len({str(answer) for answer in answers[0]}) == len(prompts)


@pytest.mark.parametrize("mode", MODES)
def test_vectors_are_the_same_between_texts(model: Path, mode: str) -> None:
    texts: list[Any] = ["The quick brown fox", "one two three four five six seven eight nine ten"]
    vectors = []
    for how in (None, mode):
        with engine(model, how, max_num_batched_tokens=4) as llm:
            vectors.append([output.embedding for output in llm.embed(texts, use_tqdm=False)])
            assert_pool_unused(llm)
    for one, other in zip(*vectors):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_aborting_at_any_step_harms_nobody(model: Path, mode: str) -> None:
    """The id of who was aborted is used again at once,
    while the step that computes its last token is in flight."""
    prompts = random_prompts((20, 11, 6), seed=9)
    params = [seeded(1, repetition_penalty=1.2), seeded(2), seeded(3, logprobs=1)]
    with engine(model, None) as llm:
        alone = tokens_of(run(llm, prompts, params))
    with engine(model, mode, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        engine_ = llm.llm_engine
        for phase in range(MAX_TOKENS + 3):
            for index in range(3):
                engine_.add_request(f"r{index}", {"prompt_token_ids": prompts[index]}, params[index])
            final: dict[str, list[int]] = {}
            for _ in range(phase):
                final |= final_tokens(engine_.step())
            victim, again = f"r{phase % 3}", (phase + 1) % 3
            engine_.abort_request([victim])
            engine_.add_request(victim, {"prompt_token_ids": prompts[again]}, params[again])
            while engine_.has_unfinished_requests():
                final |= final_tokens(engine_.step())
            expected = {f"r{index}": tokens for index, tokens in enumerate(alone)} | {victim: alone[again]}
            assert final == expected, phase
            assert_pool_unused(llm)


def final_tokens(outputs: list[RequestOutput]) -> dict[str, list[int]]:
    return {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_stop_wastes_at_most_one_token_of_its_request(model: Path, mode: str | None) -> None:
    prompts = random_prompts((6, 9, 12, 5), seed=4)
    stopping = [seeded(seed, stop_token_ids=MANY_IDS[::2], max_tokens=40) for seed in range(4)]
    with engine(model, mode, enable_prefix_caching=False) as llm:
        outputs = run(llm, prompts, stopping)
        needed = sum(len(p) + len(o.outputs[0].token_ids) - 1 for p, o in zip(prompts, outputs))
        num_stopped = sum(output.outputs[0].finish_reason == "stop" for output in outputs)
        assert num_stopped >= 2
        wasted = llm.get_metrics().num_computed_tokens - needed
        assert wasted == 0 if mode is None else 0 < wasted <= num_stopped
        # Where the length ends a request, that is known in advance.
        before = llm.get_metrics().num_computed_tokens
        run(llm, prompts, greedy())
        assert llm.get_metrics().num_computed_tokens - before == sum(len(p) + MAX_TOKENS - 1 for p in prompts)


@pytest.mark.parametrize("mode", MODES)
def test_the_model_as_a_whole_is_changed_between_steps_only(model: Path, mode: str) -> None:
    prompts = random_prompts((6, 9), seed=4)
    params = seeded(1, stop_token_ids=MANY_IDS)
    with engine(model, mode) as llm:
        before = [described(output) for output in run(llm, prompts, params)]
        checksums = llm.collective_rpc("weight_checksums")
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert [described(output) for output in run(llm, prompts, params)] == before
        llm.update_weights(str(model))
        assert llm.collective_rpc("weight_checksums") == checksums
        assert [described(output) for output in run(llm, prompts, params)] == before
        assert llm.reset_prefix_cache()


def test_a_profile_shows_the_worker_beside_the_core(model: Path, tmp_path: Path) -> None:
    with tiny_llm(model, async_scheduling=True, profile=str(tmp_path)) as llm:
        run(llm, random_prompts((5,)), greedy(max_tokens=4))
    [file] = tmp_path.iterdir()
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == "user_annotation"]
    threads = {event["name"]: event["tid"] for event in events}
    assert {threads[name] for name in ("step", "schedule", "wait", "output")} == {threads["step"]}
    assert {threads[name] for name in ("execute", "prepare", "attention", "sample")} == {threads["execute"]}
    assert threads["step"] != threads["execute"]


def test_an_engine_process_overlaps_too(model: Path) -> None:
    prompts = random_prompts((6, 9, 3), seed=4)
    params = [seeded(seed, stop_token_ids=MANY_IDS) for seed in range(3)]
    with engine(model, None) as llm:
        expected = [described(output) for output in run(llm, prompts, params)]
    with tiny_llm(model, async_scheduling=True, multiprocess=True) as llm:
        for _ in range(2):
            assert [described(output) for output in run(llm, prompts, params)] == expected
        llm.sleep()
        llm.wake_up()
        assert [described(output) for output in run(llm, prompts, params)] == expected


def test_it_is_on_where_a_gpu_would_idle_unless_drafts_need_the_last_token() -> None:
    drafts = {"method": "ngram"}
    assert resolve_async_scheduling(EngineArgs(), "cuda")
    assert not resolve_async_scheduling(EngineArgs(), "cpu")
    assert resolve_async_scheduling(EngineArgs(async_scheduling=True), "cpu")
    assert not resolve_async_scheduling(EngineArgs(async_scheduling=False), "cuda")
    assert not resolve_async_scheduling(EngineArgs(speculative_config=drafts), "cuda")
    EngineArgs(async_scheduling=False, speculative_config=drafts)
    with pytest.raises(ConfigError, match="from tokens that the host knows"):
        EngineArgs(async_scheduling=True, speculative_config=drafts)
    with pytest.raises(ConfigError, match="async_scheduling is 'yes', but must be True, False or None"):
        EngineArgs(async_scheduling="yes")  # type: ignore[arg-type]
