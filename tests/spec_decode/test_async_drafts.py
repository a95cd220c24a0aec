"""Steps with drafts that are scheduled before the last ones are verified: every output is the one of a
synchronous engine without drafts, and no step waits for the device.

"thread" and "launch": see tests/engine/test_async_scheduling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels_triton_free.attention
import minivllm.attention.tiles
from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.attention import FlexAttention
from minivllm.batch.step_inputs import StepInputBuilder
from minivllm.device.policy import DevicePolicy
from minivllm.engine.resolve import resolve_async_scheduling
from minivllm.errors import ConfigError
from minivllm.sampling.logits_processors import BatchUpdate, LogitsProcessor
from minivllm.simulation.ranks import virtual_llm
from minivllm.spec_decode.paged_draft import CachedDraft
from minivllm.worker.sampled.pending_step import PendingStep
from tests.attention.backends import CUDA_POLICY, listed_attention
from tests.engine.test_async_scheduling import (
    MANY_IDS,
    MAX_TOKENS,
    MODES,
    REQUESTS,
    SETTINGS,
    described,
    final_tokens,
    greedy,
    seeded,
)
from tests.kv_transfer.test_connectors import OFFLOAD, lives
from tests.lora.lora_adapters import random_adapter
from tests.parity_reference import (
    assert_pool_unused,
    random_prompts,
    reference_tokens,
    run,
    runner_of,
    tiny_llm,
    tiny_settings,
    tokens_of,
)
from tests.spec_decode.drafting_cases import always_drafts
from tests.spec_decode.eagle_heads import crafted_model, knowing_head, random_head
from tests.spec_decode.mtp_heads import with_random_head
from tutorials.recorded_graphs import RecordedGraphs

TinyModel = Callable[..., Path]

COUNT = 3
DRAFTERS = ("eagle", "eagle3", "draft_model", "knowing", "mtp")
PROMPTS = random_prompts(tuple(5 + 3 * index % 23 for index in range(len(REQUESTS))), seed=5)


@pytest.fixture(scope="module")
def setups(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Drafter -> (model, speculative_config)."""
    directory = tmp_path_factory.mktemp("drafters")
    llama = tiny_model("llama")
    # A head that guesses right most of the time: its model's next token follows from the last two.
    known = crafted_model(directory / "known", tiny_model("mistral", sliding_window=2))
    other = tiny_model("qwen2-window", num_hidden_layers=2, hidden_size=32, num_key_value_heads=4)
    with_mtp = with_random_head(directory / "mtp", tiny_model("deepseek-v3"))
    heads = {version: random_head(directory / version, version) for version in ("eagle", "eagle3")}
    knowing = knowing_head(directory / "knowing", "eagle3", known)

    def config(method: str, **more: Any) -> dict[str, Any]:
        return {"method": method, "num_speculative_tokens": COUNT, "verification_cost": 0.0, **more}

    return {
        "eagle": (llama, config("eagle", model=str(heads["eagle"]))),
        "eagle3": (llama, config("eagle3", model=str(heads["eagle3"]))),
        "draft_model": (llama, config("draft_model", model=str(other))),
        "itself": (llama, config("draft_model", model=str(llama))),
        "knowing": (known, config("eagle3", model=str(knowing))),
        "mtp": (with_mtp, config("mtp")),
    }


@contextmanager
def engine(model: Path, config: dict[str, Any] | None, mode: str | None, **settings: Any) -> Iterator[LLM]:
    with tiny_llm(model, async_scheduling=mode is not None, speculative_config=config, **settings) as llm:
        if mode == "launch":
            executor = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]
            executor._thread.shutdown()
            executor._thread = None
            batch = runner_of(llm).batch
            for table in (batch.token_ids, *(group.block_table for group in batch.groups)):
                table.device, table._separate = table.device.clone(), True
        yield llm


_EXPECTED: dict[Path, dict[str, Any]] = {}


def expected_of(model: Path) -> dict[str, Any]:
    """The answers of a synchronous engine without drafts, with room for all requests."""
    if model not in _EXPECTED:
        with engine(model, None, None) as llm:
            _EXPECTED[model] = outcomes(llm)
    return _EXPECTED[model]


def outcomes(llm: LLM, **more: Any) -> dict[str, Any]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], list(REQUESTS.values()), use_tqdm=False, **more
    )
    assert_pool_unused(llm)
    return {name: described(output) for name, output in zip(REQUESTS, outputs)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_output_is_the_same(
    setups: dict[str, tuple[Path, Any]], drafter: str, setting: str, mode: str
) -> None:
    model, config = setups[drafter]
    expected = expected_of(model)
    more = {"priority": [index % 3 for index in range(len(PROMPTS))]} if setting == "priority" else {}
    with engine(model, config, mode, **SETTINGS[setting]) as llm:
        for _ in range(2):  # the second time from the prefix cache
            found = outcomes(llm, **more)
            for name in REQUESTS:
                assert found[name] == expected[name], name
        metrics = llm.get_metrics()
    assert (metrics.num_preemptions > 0) == (setting in ("preemption", "priority"))
    assert (metrics.num_drafts > 0) == (setting != "budget 1")


@contextmanager
def spoiled_guesses(llm: LLM, error_rate: float = 0.3) -> Iterator[None]:
    """Some guesses of a drafter that knows what comes are wrong, so that any number of them is accepted."""
    (draft,) = runner_of(llm).guessing_models
    assert isinstance(draft, CachedDraft)
    sampler, generator = draft._sampler, torch.Generator().manual_seed(1)

    def sample(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        sampled = sampler(logits, *args, **options)
        is_wrong = torch.rand(len(sampled.token_ids), generator=generator) < error_rate
        return type(sampled)(sampled.token_ids ^ is_wrong.long(), sampled.logprobs)

    draft._sampler = sample  # type: ignore[assignment]
    yield
    draft._sampler = sampler


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", ["budget 7", "budget 64", "preemption"])
@pytest.mark.parametrize("drafter", ["knowing", "itself"])
def test_every_output_is_the_same_however_many_drafts_are_accepted(
    setups: dict[str, tuple[Path, Any]], drafter: str, setting: str, mode: str
) -> None:
    model, config = setups[drafter]
    with engine(model, config, mode, **SETTINGS[setting]) as llm, spoiled_guesses(llm):
        found = outcomes(llm)
        accepted = llm.get_metrics().num_accepted_tokens_per_position
        num_drafts = llm.get_metrics().num_drafts
    for name in REQUESTS:
        assert found[name] == expected_of(model)[name], name
    # There are more drafts where a grammar leaves no choice.
    assert num_drafts > accepted[0] > accepted[1] > accepted[2] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", ["knowing", "itself", "eagle", "draft_model", "mtp"])
def test_as_many_guesses_are_right_as_where_every_result_is_awaited(
    setups: dict[str, tuple[Path, Any]], drafter: str, mode: str
) -> None:
    """Also in a second turn, whose beginning another request has left in the cache."""
    model, config = setups[drafter]
    prompts, counted, answers = random_prompts((5, 9, 20, 33), seed=3), [], []
    for how in (None, mode):
        with engine(model, config, how) as llm:
            if how is None:
                always_drafts(llm, COUNT)
            first = run(llm, prompts, greedy(max_tokens=40))
            turns = [prompt + list(o.outputs[0].token_ids) + [7, 8] for prompt, o in zip(prompts, first)]
            second = run(llm, turns, greedy(max_tokens=20))
            metrics = llm.get_metrics()
            counted.append((metrics.num_accepted_tokens_per_position, metrics.num_steps))
            answers.append(tokens_of(first) + tokens_of(second))
    assert answers[0] == answers[1]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
def test_greedy_tokens_are_those_of_transformers(
    setups: dict[str, tuple[Path, Any]], drafter: str, mode: str
) -> None:
    model, config = setups[drafter]
    prompts = random_prompts((1, 9, 33), seed=2)
    with engine(model, config, mode, max_num_batched_tokens=16) as llm:
        found = tokens_of(run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)))
    assert found == reference_tokens(model, prompts, MAX_TOKENS)


@pytest.mark.parametrize("mode", MODES)
def test_aborting_at_any_step_harms_nobody(setups: dict[str, tuple[Path, Any]], mode: str) -> None:
    """The id of who was aborted is used again at once, while steps that compute its drafts are in flight."""
    model, config = setups["knowing"]
    prompts = random_prompts((20, 11, 6), seed=9)
    params = [seeded(1, repetition_penalty=1.2), seeded(2), seeded(3, logprobs=1)]
    with engine(model, None, None) as llm:
        alone = tokens_of(run(llm, prompts, params))
    small = {"max_num_batched_tokens": 16, "enable_prefix_caching": False}
    with engine(model, config, mode, **small) as llm, spoiled_guesses(llm):
        engine_ = llm.llm_engine
        for phase in range(MAX_TOKENS):
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
            assert final == {f"r{i}": tokens for i, tokens in enumerate(alone)} | {victim: alone[again]}, (
                phase
            )
            assert_pool_unused(llm)


class _Waits(TorchDispatchMode):
    """Refuses what waits for the device: reading a number, and results whose size depends on numbers."""

    names = "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        assert name not in self.names, function
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "as many as are true"
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    is_over = False

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            assert is_over, f"{method} brings a tensor to the host."
            return method(*args, **more)

        return call

    with monkeypatch.context() as patch, _Waits():
        for name in ("tolist", "item", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, refusing(getattr(torch.Tensor, name)))
        yield
        is_over = True


@pytest.mark.parametrize("drafter", ["knowing", "eagle", "draft_model"])
def test_no_step_waits_for_the_device_or_for_the_step_before(
    setups: dict[str, tuple[Path, Any]], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows with masks and penalties wait for their tokens, the others do not wait with them."""
    with nothing_waits(monkeypatch):
        for wait in (bool, torch.Tensor.tolist, lambda one: torch.zeros(1)[one > 0]):
            with pytest.raises(AssertionError):
                wait(torch.ones(1))
    model, config = setups[drafter]
    names = ["greedy", "seeded", "stop strings", "penalties", "regex"]
    prompts, launched, learned = [PROMPTS[list(REQUESTS).index(name)] for name in names], [0], [0]
    with engine(model, config, "launch") as llm:
        worker = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
        launch, result = worker.launch, PendingStep.result

        def watched(step: Any, masks: Any = None) -> Any:
            before = learned[0]
            launched[0] += 1
            with nothing_waits(monkeypatch):
                pending = launch(step, masks)
            assert learned[0] == before, "A launch asks for the result of the step before."
            return pending

        def learn(self: PendingStep) -> Any:
            learned[0] += 1
            return result(self)

        worker.launch = watched
        monkeypatch.setattr(PendingStep, "result", learn)
        outputs = run(llm, prompts, [REQUESTS[name] for name in names])
        assert_pool_unused(llm)
    for name, output in zip(names, outputs):
        assert described(output) == expected_of(model)[name]
    assert launched[0] > 10


class Nudge(LogitsProcessor):
    """Prefers a token that depends on the last one."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._outputs: list[list[int]] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate) -> None:
        kept = dict(enumerate(self._outputs))
        for row in update.removed:
            kept.pop(row, None)
        kept |= {added.row: added.output_token_ids for added in update.added}
        for one, other in update.moved:
            kept[one], kept[other] = kept[other], kept[one]
        self._outputs = [kept.get(row, []) for row in range(max(kept, default=-1) + 1)]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, output in enumerate(self._outputs[: len(logits)]):
            logits[row, 20 + sum(output) % 50] += 2.0
        return logits


@pytest.mark.parametrize("mode", MODES)
def test_custom_processors_see_every_token_before(setups: dict[str, tuple[Path, Any]], mode: str) -> None:
    """What they ask for only the workers know, so all rows of the step wait."""
    model, config = setups["itself"]
    processors = {"logits_processors": [f"{__name__}:Nudge"]}
    prompts = random_prompts((5, 9, 20), seed=3)
    answers = []
    for how in (None, mode):
        with engine(model, config if how else None, how, **processors) as llm:
            answers.append(tokens_of(run(llm, prompts, [greedy(), seeded(4), greedy(logprobs=1)])))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("graphs", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("drafter", ["knowing", "eagle", "draft_model"])
def test_lists_of_blocks_hold_wherever_the_drafts_end(
    setups: dict[str, tuple[Path, Any]], drafter: str, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: attention reads lists of blocks, and graphs are replayed."""
    model, config = setups[drafter]
    expected, moved = expected_of(model), [0]
    for module in (kernels_triton_free.attention, minivllm.attention.tiles):
        monkeypatch.setattr(module, "paged_flex_attention", listed_attention)
    monkeypatch.setattr(DevicePolicy, "of", lambda device: CUDA_POLICY)
    settle = StepInputBuilder._settle

    def counted(self: StepInputBuilder, *args: np.ndarray) -> torch.Tensor:
        shift = settle(self, *args)
        moved[0] += int((shift > 0).any())
        return shift

    monkeypatch.setattr(StepInputBuilder, "_settle", counted)
    backend = f"{FlexAttention.__module__}:{FlexAttention.__name__}"
    with engine(model, config, "launch", attention_backend=backend) as llm, spoiled_guesses(llm):
        runner = runner_of(llm)
        if graphs != "none":
            with torch.inference_mode():
                runner.capture_graphs(graphs, RecordedGraphs(), graphs)
        found = outcomes(llm)
        if graphs != "none":
            assert runner.graphs is not None and runner.graphs.num_replays.total() > 10
            assert {choice.kind for choice in runner.graphs.num_replays} >= {"verify"}
            of_drafts = getattr(runner.guessing_models[0], "graphs", None)
            assert (of_drafts is not None) is (drafter == "draft_model")
            if of_drafts is not None:
                assert {choice.kind for choice in of_drafts.num_replays} >= {"full", "verify"}
    for name in REQUESTS:
        assert found[name] == expected[name], name
    assert moved[0] > 10


@pytest.mark.parametrize("more", [{"tensor_parallel_size": 2}, {"multiprocess": True}], ids=str)
def test_workers_elsewhere_give_the_same(setups: dict[str, tuple[Path, Any]], more: dict[str, Any]) -> None:
    drafter = "draft_model"
    model, config = setups[drafter]
    prompts = random_prompts((5, 9, 20), seed=3)
    params = [greedy(), seeded(4, stop_token_ids=MANY_IDS), seeded(5, logprobs=1)]
    with engine(model, None, None) as llm:
        expected = tokens_of(run(llm, prompts, params))
    settings = tiny_settings(model, async_scheduling=True, speculative_config=config, **more)
    with (virtual_llm if "tensor_parallel_size" in more else LLM)(**settings) as llm:
        assert tokens_of(run(llm, prompts, params)) == expected
        assert llm.get_metrics().num_drafts > 5


@pytest.mark.parametrize("drafter", ["eagle3", "itself"])
def test_blocks_travel_and_adapters_come_and_go(
    setups: dict[str, tuple[Path, Any]], tmp_path: Path, drafter: str
) -> None:
    """Requests arrive, are aborted and are preempted while blocks are kept in host memory."""
    model, config = setups[drafter]
    adapter = random_adapter(tmp_path / "adapter", model, rank=8)
    shared: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 72, "enable_lora": True, "max_loras": 1}
    with engine(model, None, None, **shared) as llm:
        expected = lives(llm, adapter, 0, 0)
    shared |= {"num_gpu_blocks_override": 1 + 12, "max_num_batched_tokens": 9, "kv_transfer_config": OFFLOAD}
    with engine(model, config, "launch", **shared) as llm, spoiled_guesses(llm):
        answers = lives(llm, adapter, 1, num_aborts=4)
        assert llm.get_metrics().num_drafts > 10
    assert len(answers) >= len(expected) - 4
    assert answers == {name: expected[name] for name in answers}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["knowing", "draft_model"])
def test_the_warm_up_has_compiled_everything(setups: dict[str, tuple[Path, Any]], drafter: str) -> None:
    model, config = setups[drafter]
    prompts = random_prompts((5, 9, 20), seed=3)
    params = [greedy(), seeded(4, stop_token_ids=MANY_IDS), seeded(5, logprobs=1)]
    with engine(model, None, None) as llm:
        expected = tokens_of(run(llm, prompts, params))
    with engine(model, config, "launch", enforce_eager=False) as llm, spoiled_guesses(llm):
        assert tokens_of(run(llm, prompts, params)) == expected
        assert llm.get_metrics().num_drafts > 5
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


def test_what_cannot_be_scheduled_ahead_is_refused(
    tiny_model: TinyModel, setups: dict[str, tuple[Path, Any]]
) -> None:
    for method in ("ngram", "suffix", "early_exit"):
        with pytest.raises(ConfigError, match=rf"'{method}' guesses .* from tokens that the host knows"):
            EngineArgs(async_scheduling=True, speculative_config={"method": method})
    with pytest.raises(ConfigError, match="does not go with pipeline_parallel_size 2"):
        EngineArgs(async_scheduling=True, speculative_config=setups["eagle"][1], pipeline_parallel_size=2)
    states = tiny_model("lfm2")
    config = {"method": "draft_model", "model": str(setups["itself"][0])}
    with pytest.raises(ConfigError, match=r"layers of .* keep a state"):
        tiny_llm(states, async_scheduling=True, speculative_config=config)
    args = EngineArgs(speculative_config=setups["eagle"][1])
    assert not resolve_async_scheduling(args, "cpu")
    assert not resolve_async_scheduling(args, "cuda")
