"""Adapters over time: loaded while others stream, evicted and read again, served in turn,
never sharing a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.config import LoRAConfig
from minivllm.errors import ConfigError, RequestError
from minivllm.lora.registry import PATIENCE, AdapterAdmission, AdapterRegistry
from minivllm.messages import EngineRequest
from minivllm.request import Request
from tests.lora.lora_adapters import TinyModel, merged_tokens, random_adapter
from tests.parity_reference import BLOCK_SIZE, assert_pool_unused, random_prompts, tiny_llm

MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def test_an_adapter_that_differs_between_nodes_is_refused_and_nobody_keeps_it() -> None:
    kept: list[str] = []
    digests = ["one", "one", "other"]

    def collective(method: str, *args: Any) -> list[Any]:
        if method == "unload_adapter":
            kept.remove(args[0])
            return [None] * 3
        kept.append(args[0].name)
        return digests

    registry = AdapterRegistry(LoRAConfig(max_loras=1, max_lora_rank=8, max_cpu_loras=1), collective)
    with pytest.raises(
        RequestError, match=r"'own' is not the same on all nodes: /own holds .* of rank 2 than"
    ):
        registry.add(LoRARequest("own", lora_path="/own"), ())
    assert not kept and not registry.requests()
    digests[2] = "one"
    assert registry.add(LoRARequest("own", lora_path="/own"), ()) == "one"
    assert kept == registry.names_in_memory() == ["own"]


def lora_llm(model: Path, max_loras: int = 2, **more: Any) -> LLM:
    return tiny_llm(model, enable_lora=True, max_loras=max_loras, max_lora_rank=8, **more)


def answer(llm: LLM, prompt: list[int], adapter: LoRARequest | None) -> tuple[list[int], int]:
    """Greedy tokens, and how many prompt tokens came from the prefix cache."""
    [output] = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False, lora_request=adapter)
    return output.outputs[0].token_ids, output.num_cached_tokens


def names_in_slots(llm: LLM) -> list[str]:
    return llm.llm_engine.client.core.executor.worker.adapters.names_in_slots  # type: ignore[attr-defined]


def names_in_memory(llm: LLM) -> list[str]:
    return llm.llm_engine.client.core.adapters.names_in_memory()  # type: ignore[attr-defined]


def test_the_prefix_cache_is_never_shared_between_adapters(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    one, two = (random_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("one", "two")))
    [prompt] = random_prompts((33,))
    with lora_llm(model) as llm:
        for adapter in (None, one, two):
            assert answer(llm, prompt, adapter) == (merged_tokens(model, adapter, prompt, MAX_TOKENS), 0)
        for adapter in (two, None, one):
            expected = merged_tokens(model, adapter, prompt, MAX_TOKENS)
            assert answer(llm, prompt, adapter) == (expected, 32 // BLOCK_SIZE * BLOCK_SIZE)


def test_an_adapter_of_the_same_name_with_other_contents_finds_nothing_in_the_cache(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    [prompt] = random_prompts((33,))
    old = random_adapter(tmp_path / "old" / "x", model, seed=1)
    new = random_adapter(tmp_path / "new" / "x", model, seed=2)
    with lora_llm(model) as llm:
        answer(llm, prompt, old)
        with pytest.raises(
            RequestError, match=r"The name 'x' is taken by the adapter in .*old/x, not .*new/x"
        ):
            answer(llm, prompt, new)
        assert llm.remove_lora("x")
        assert answer(llm, prompt, new) == (merged_tokens(model, new, prompt, MAX_TOKENS), 0)


def test_adapters_are_evicted_least_recently_used_first_and_read_again(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    adapters = [random_adapter(tmp_path / f"a{i}", model, seed=i) for i in range(5)]
    [prompt] = random_prompts((9,))
    with lora_llm(model, max_cpu_loras=3) as llm:
        for index in (0, 1, 2, 0, 3, 4, 1):
            assert answer(llm, prompt, adapters[index])[0] == merged_tokens(
                model, adapters[index], prompt, MAX_TOKENS
            )
        assert names_in_memory(llm) == ["a3", "a4", "a1"]
        assert names_in_slots(llm) == ["a4", "a1"]
        assert {adapter.name for adapter in llm.list_loras()} == {f"a{i}" for i in range(5)}


def test_adapters_of_other_ranks_take_places_that_lie_scattered(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """48 columns for three adapters: when the last one comes, 16 are free, but not side by side."""
    model = tiny_model("llama")
    ranks = (8, 16, 8, 16, 16)
    adapters = [random_adapter(tmp_path / f"r{i}", model, rank=rank, seed=i) for i, rank in enumerate(ranks)]
    [prompt] = random_prompts((12,))
    with tiny_llm(model, enable_lora=True, max_loras=3, max_lora_rank=16, max_cpu_loras=5) as llm:
        for index in (0, 1, 2, 1, 3, 1, 4, 1, 3):
            assert answer(llm, prompt, adapters[index])[0] == merged_tokens(
                model, adapters[index], prompt, MAX_TOKENS
            )
        assert names_in_slots(llm) == ["r4", "r1", "r3"]


@pytest.mark.parametrize("max_loras", [1, 2])
def test_more_adapters_than_slots_are_served_in_turn(
    tiny_model: TinyModel, tmp_path: Path, max_loras: int
) -> None:
    model = tiny_model("llama")
    adapters = [None, *(random_adapter(tmp_path / f"a{i}", model, seed=i) for i in range(5))]
    prompts = random_prompts(range(3, 15))
    asked = [adapters[index % len(adapters)] for index in range(len(prompts))]
    with lora_llm(model, max_loras) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False, lora_request=asked
        )
        for output, prompt, adapter in zip(outputs, prompts, asked):
            assert output.outputs[0].token_ids == merged_tokens(model, adapter, prompt, MAX_TOKENS), adapter
        assert_pool_unused(llm)


def test_an_adapter_is_loaded_and_removed_while_others_stream(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second = (
        random_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("first", "second"))
    )
    prompts = random_prompts((9, 12))
    long = SamplingParams(temperature=0.0, max_tokens=12)
    with lora_llm(model) as llm:
        engine = llm.llm_engine
        answers: dict[str, list[int]] = {}

        def step() -> None:
            answers.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})

        engine.add_request("streams", {"prompt_token_ids": prompts[0]}, long, lora=first)
        for _ in range(4):
            step()
        assert len(answers["streams"]) == 4
        llm.add_lora(second)
        engine.add_request("joins", {"prompt_token_ids": prompts[1]}, long, lora=second)
        step()
        with pytest.raises(RequestError, match="'second' is in use by unfinished requests"):
            llm.remove_lora("second")
        while engine.has_unfinished_requests():
            step()
        assert answers == {
            "streams": merged_tokens(model, first, prompts[0], 12),
            "joins": merged_tokens(model, second, prompts[1], 12),
        }
        assert llm.remove_lora("second") and not llm.remove_lora("second")
        assert llm.list_loras() == [first]


def test_aborted_requests_give_their_slots_back(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second = (
        random_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("first", "second"))
    )
    [prompt] = random_prompts((9,))
    with lora_llm(model, max_loras=1) as llm:
        engine = llm.llm_engine
        engine.add_request(
            "endless", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=100), lora=first
        )
        engine.add_request("waits", {"prompt_token_ids": prompt}, GREEDY, lora=second)
        engine.step()
        assert llm.get_metrics().num_waiting == 1
        engine.abort_request(["endless"])
        finished = []
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
        assert finished[0].outputs[0].token_ids == merged_tokens(model, second, prompt, MAX_TOKENS)


def test_what_cannot_be_served_is_refused_before_anything_runs(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    good = random_adapter(tmp_path / "good", model)
    prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
    with lora_llm(model) as llm:
        with pytest.raises(RequestError, match="rank 16, but max_lora_rank is 8"):
            llm.generate(
                prompts, GREEDY, lora_request=[good, random_adapter(tmp_path / "large", model, rank=16)]
            )
        for wrong, message in (
            ("name", "lora_request is 'name', but must be a LoRARequest or a list"),
            (LoRARequest("", lora_path=good.path), "lora_name is empty"),
            (LoRARequest("x", lora_path=7), "lora_path is 7, but must be a text"),  # type: ignore[arg-type]
            (LoRARequest("x", "/no/where"), "lora_int_id is '/no/where'"),  # type: ignore[arg-type]
            (LoRARequest("x", lora_path="/no/where"), "path is '/no/where', but must be a local directory"),
            ([good], "has 1 entries, but must have one for each of the 2 prompts"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate(prompts, GREEDY, lora_request=wrong)  # type: ignore[arg-type]
        assert names_in_slots(llm) == [] and llm.get_metrics().num_steps == 0
    with (
        tiny_llm(model) as llm,
        pytest.raises(RequestError, match=r"'good' needs an engine .* enable_lora=True"),
    ):
        llm.generate(prompts, GREEDY, lora_request=good)


def test_room_for_adapters_must_make_sense(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="max_cpu_loras is 1, but must be at least max_loras, which is 2"):
        lora_llm(tiny_model("llama"), max_loras=2, max_cpu_loras=1)
    with pytest.raises(ConfigError, match="max_lora_rank is 0, but must be at least 1"):
        tiny_llm(tiny_model("llama"), max_lora_rank=0)


def waiting_request(index: int, adapter: int | None) -> Request:
    lora = None if adapter is None else LoRARequest(f"a{adapter}", lora_path="/")
    return Request(
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            max_tokens=1,
            seed=0,
            arrival_time=0.0,
            lora=lora,
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=60), st.integers(1, 3), st.data()
)
def test_no_arrangement_exceeds_the_slots_or_starves_anyone(
    adapters: list[int | None], max_loras: int, data: st.DataObject
) -> None:
    """Requests run for a random number of steps while popular adapters keep arriving: the request that waited
    first gets in before more than PATIENCE requests with adapters, and those that run never use more than
    max_loras."""
    admission = AdapterAdmission(max_loras)
    waiting = [waiting_request(index, adapter) for index, adapter in enumerate(adapters)]
    originals = set(waiting)
    running: list[Request] = []
    overtaken = dict.fromkeys(waiting, 0)
    for step in range(2000):
        if not originals & set(waiting):
            break
        # Requests for adapters that run already never stop arriving.
        used = sorted({lora.name for request in running if (lora := request.engine_request.lora) is not None})
        waiting += [waiting_request(1000 + step, int(name[1:])) for name in used]
        admission.begin_step()
        for request in list(waiting):
            if len(running) < 8 and admission.may_run(request, running):
                for other in waiting[: waiting.index(request)]:
                    overtaken[other] = overtaken.get(other, 0) + (request.engine_request.lora is not None)
                waiting.remove(request)
                running.append(request)
        names = {request.engine_request.lora for request in running} - {None}
        assert len(names) <= max_loras
        if running:
            running.remove(data.draw(st.sampled_from(running), label="finishes") if step < 40 else running[0])
    assert not originals & set(waiting)
    assert max(overtaken[request] for request in originals) <= PATIENCE + 8
