"""Stages of a model of transformers, by the plan that comes with it, give the tokens of one worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.simulation.ranks import virtual_llm
from tests.executor.test_divided_models import PROMPTS, answers, arguments, random_adapter
from tests.transformers_models.families import save_model
from tests.transformers_models.test_divided import EXPERTS, UNEVEN, WHOLE_HEADS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TinyModel = Callable[..., Path]
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied": UNEVEN,
    "gemma3": {**UNEVEN, "num_hidden_layers": 3, "layer_types": WINDOWS},
    "qwen3-moe": {**UNEVEN, **EXPERTS},
    "olmo2-biases": WHOLE_HEADS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_the_tokens_of_one_worker(tiny_model: TinyModel, family: str) -> None:
    overrides = {"num_hidden_layers": 3, **FAMILIES[family]}
    one = arguments(tiny_model(family, **overrides), model_impl="transformers")
    layouts: list[dict[str, Any]] = [{"pipeline_parallel_size": 2}]
    if family == "gemma3":
        layouts += [{"pipeline_parallel_size": 3, "async_scheduling": True}]
    if family == "llama-tied":
        layouts += [{"pipeline_parallel_size": 2, "tensor_parallel_size": 2}]
    with LLM(**one) as llm:
        expected, close = answers(llm)
    for layout in layouts:
        with virtual_llm(**one, **layout) as llm:
            got, others = answers(llm)
        assert got == expected, layout
        for position, other in zip(others, close, strict=True):
            assert position == pytest.approx(other, abs=1e-3)


@pytest.mark.slow
def test_stages_in_processes_have_their_own_layers_only(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama-tied", **{**UNEVEN, "num_hidden_layers": 3})
    one = arguments(model, model_impl="transformers", enable_lora=True)

    def adapted(llm: LLM) -> list[Any]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, lora_request=adapter)]

    with LLM(**one) as llm:
        [shapes] = llm.collective_rpc("adapter_shapes")
        adapter = random_adapter(tmp_path, shapes)
        expected = answers(llm)[0], adapted(llm)
        [whole] = llm.collective_rpc("memory_bytes")
    with LLM(**one, pipeline_parallel_size=2) as llm:
        assert (answers(llm)[0], adapted(llm)) == expected
        parts = llm.collective_rpc("memory_bytes")
        assert sum(part["kv_cache"] for part in parts) == whole["kv_cache"]
        assert all(0 < part["weights"] < 0.8 * whole["weights"] for part in parts)
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(str(model))
        assert answers(llm)[0] == expected[0]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", "transformers has no plan for that"),
        ("gpt_neox", "its plan names more than an embedding, a list of layers and what follows them"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, family: str, message: str) -> None:
    directory = save_model(tmp_path, family, {})
    with pytest.raises(ConfigError, match=message):
        virtual_llm(
            **arguments(directory, model_impl="transformers", load_format="dummy", pipeline_parallel_size=2)
        )
