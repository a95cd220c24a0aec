"""Sleeping, waking up, new weights, profiles: calls that concern the model as a whole."""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.errors import ModelError, RequestError
from minivllm.frontend.async_llm import AsyncLLM

PROMPTS = ["The quick brown fox", "one two three"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def engine_args(model: Path, **more: Any) -> dict[str, Any]:
    few: dict[str, Any] = {
        "num_gpu_blocks_override": 17,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "block_size": 16,
    }
    return {"model": str(model), "dtype": "float32", "enforce_eager": True, **few, **more}


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]


def memory(llm: LLM) -> dict[str, int]:
    (sizes,) = llm.collective_rpc("memory_bytes")
    assert 0 <= sizes["kv_cache_touched"] <= sizes["kv_cache"]
    return {name: sizes[name] for name in ("weights", "kv_cache")}


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def other_weights(model: Path, tmp_path: Path) -> Path:
    """The same architecture with its layers in another order."""
    tensors = load_file(model / "model.safetensors")
    swapped = {
        name.replace(".0.", ".x.").replace(".2.", ".0.").replace(".x.", ".2."): t
        for name, t in tensors.items()
    }
    directory = tmp_path / "other"
    directory.mkdir()
    save_file(swapped, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_and_wake_up_everything_is_as_before(model: Path, level: int) -> None:
    with LLM(**engine_args(model)) as llm:
        expected, awake, checksums = texts(llm), memory(llm), llm.collective_rpc("weight_checksums")
        for _ in range(2):
            llm.sleep(level)
            assert memory(llm) == {"weights": awake["weights"] if level == 1 else 0, "kv_cache": 0}
            with pytest.raises(RequestError, match="asleep: wake it up"):
                llm.generate(PROMPTS, GREEDY)
            with pytest.raises(RequestError, match="awake"):
                llm.sleep(level)
            llm.wake_up()
            llm.wake_up()
            assert (memory(llm), llm.collective_rpc("weight_checksums")) == (awake, checksums)
            assert llm.get_metrics().prefix_cache_hit_tokens == 0
            assert texts(llm) == expected


def test_nothing_that_sleep_frees_is_held_by_anything_else(model: Path) -> None:
    with LLM(**engine_args(model)) as llm:
        texts(llm)
        worker = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
        weights = [weakref.ref(tensor) for tensor in worker._weights()]
        caches = [weakref.ref(tensor) for cache in worker.runner.paged_model.caches for tensor in cache[:2]]
        llm.sleep(1)
        assert not any(tensor() is not None for tensor in caches)
        llm.wake_up()
        llm.sleep(2)
        assert not any(tensor() is not None for tensor in weights)


def test_sleeping_process_gives_its_memory_back(model: Path) -> None:
    wide = {"hidden_size": 512, "vocab_size": 30_000}  # 120 MB of weights
    with LLM(**engine_args(model, load_format="dummy", hf_overrides=wide), multiprocess=True) as llm:
        process = psutil.Process(llm.llm_engine.client.pid)  # type: ignore[attr-defined]
        before, weights = process.memory_info().rss, memory(llm)["weights"]
        llm.sleep(2)
        assert weights > 100e6
        assert before - process.memory_info().rss > 0.9 * weights
        llm.wake_up()
        assert memory(llm)["weights"] == weights


@pytest.mark.slow
def test_compiled_regions_survive_a_sleep(model: Path) -> None:
    with LLM(**engine_args(model, enforce_eager=False, compile_in_background=False)) as llm:
        expected = texts(llm)
        llm.sleep(2)
        llm.wake_up()
        assert texts(llm) == expected
        assert llm.llm_engine.client.call("num_recompilations") == 0


def test_new_weights_take_the_place_of_the_old_ones(model: Path, other_weights: Path) -> None:
    reference = other_weights / "config.json"
    reference.write_text((model / "config.json").read_text())
    with LLM(**engine_args(other_weights), tokenizer=str(model)) as llm:
        expected = texts(llm)
    with LLM(**engine_args(model)) as llm:
        before = texts(llm)
        llm.update_weights(str(other_weights))
        assert texts(llm) == expected != before
        llm.sleep(2)
        llm.wake_up()
        assert texts(llm) == expected
        llm.update_weights(str(model))
        assert texts(llm) == before


def test_weights_that_do_not_fit_change_nothing(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(**engine_args(model)) as llm:
        expected = texts(llm)
        for directory, text in ((tmp_path, r"model\.norm\.weight"), (tmp_path / "nowhere", "does not exist")):
            with pytest.raises(ModelError, match=text):
                llm.update_weights(str(directory))
        assert texts(llm) == expected


def test_weights_that_break_while_they_are_read_change_nothing(model: Path, tmp_path: Path) -> None:
    """The header is sound, so the old weights have gone when the new ones turn out to be quantised
    otherwise."""
    with LLM(**engine_args(model)) as llm:
        expected = texts(llm)
        worker = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
        methods = iter(["other methods"])
        taken = worker._model._methods
        worker._model._methods = lambda: next(methods, None) or taken()
        with pytest.raises(ModelError, match="quantised otherwise"):
            llm.update_weights(str(model))
        assert texts(llm) == expected


def test_weights_that_cannot_be_read_again_leave_the_engine_asleep(model: Path, tmp_path: Path) -> None:
    with LLM(**engine_args(model)) as llm:
        expected = texts(llm)
        llm.sleep(2)
        hidden = model.with_name("hidden")
        os.rename(model, hidden)
        try:
            with pytest.raises(ModelError, match="does not exist"):
                llm.wake_up()
            with pytest.raises(RequestError, match="asleep"):
                llm.generate(PROMPTS, GREEDY)
        finally:
            os.rename(hidden, model)
        llm.wake_up()
        assert texts(llm) == expected


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("sleep", 3), "sleep level is 3"),
        (("sleep", "deeply"), "sleep cannot be called so: Expected `int`, got `str`"),
        (("update_weights", 7), "Expected `str`"),
        (("stop_profile",), "No profile is being recorded"),
        (("start_profile", "/proc/no"), "cannot go to '/proc/no'"),
        (
            ("collective_rpc", "execute", []),
            "'execute' cannot be called on the workers; known are: .*memory_bytes",
        ),
        (("collective_rpc", "__init__", []), "cannot be called on the workers"),
        (
            ("collective_rpc", "memory_bytes", [1]),
            "memory_bytes cannot be called so: too many positional arguments",
        ),
    ],
)
def test_calls_with_wrong_arguments_are_refused_in_a_sentence(
    quiet_llm: LLM, call: tuple[Any, ...], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        quiet_llm.llm_engine.client.call(*call)


@pytest.fixture(scope="module")
def quiet_llm(tiny_model: Callable[..., Path]) -> LLM:
    return LLM(**engine_args(tiny_model("llama")))


def test_profile_is_a_trace_of_what_ran_in_between(quiet_llm: LLM, tmp_path: Path) -> None:
    quiet_llm.start_profile(str(tmp_path / "traces"))
    with pytest.raises(RequestError, match="already"):
        quiet_llm.start_profile(str(tmp_path))
    quiet_llm.generate(PROMPTS, GREEDY)
    (path,) = quiet_llm.stop_profile()
    names = {event.get("name") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert "aten::embedding" in names or "aten::index" in names
    assert {"execute", "first", "attention", "last"} <= names, "the spans are in it"


def test_async_engine_sleeps_only_when_idle_and_refuses_requests_meanwhile(
    model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with AsyncLLM.from_args(EngineArgs(**engine_args(model))) as llm:

            async def text() -> Any:
                async for output in llm.generate("The quick brown fox", GREEDY):
                    last = output
                return last.error or last.outputs[0].text

            expected = await text()
            running = llm.generate("one", SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(running)
            for action in (llm.sleep(2), llm.update_weights(str(model))):
                with pytest.raises(RequestError, match="needs an idle engine, but 1 requests are unfinished"):
                    await action
            await running.aclose()
            await llm.sleep(2)
            assert await llm.is_sleeping()
            assert await llm.collective_rpc("memory_bytes") == [
                {"weights": 0, "kv_cache": 0, "kv_cache_touched": 0}
            ]
            assert "asleep" in await text()
            await llm.wake_up()
            assert await text() == expected
            await llm.start_profile(str(tmp_path))
            await text()
            assert all(Path(path).is_file() for path in await llm.stop_profile())

    asyncio.run(main())
