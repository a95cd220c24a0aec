"""Workers that divide a model of transformers, by the plan that comes with it, give the tokens of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.compilation.regions import Region
from minivllm.errors import ConfigError
from minivllm.messages import LoRARequest
from minivllm.simulation.ranks import communicators, virtual_llm
from minivllm.transformers_models.describe.config import read_transformers_config
from minivllm.transformers_models.describe.names import iterate_parameters
from minivllm.transformers_models.model import TransformersModel
from tests.executor.test_divided_models import (
    PACKED,
    PROMPTS,
    answers,
    arguments,
    assert_divided,
    random_adapter,
)
from tests.transformers_models.families import save_model
from tests.transformers_models.test_regions import checked, cut_model, step

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")

# Three KV heads, three units of whatever else is divided, the last ones smaller.
UNEVEN = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "vocab_size": 416,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
}
WHOLE_HEADS = {name: value for name, value in UNEVEN.items() if name != "head_dim"}
MODELS: dict[str, dict[str, Any]] = {
    "llama-biases": UNEVEN,
    "llama-tied": {**UNEVEN, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3": UNEVEN,
    "gemma3": {**UNEVEN, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2-biases": WHOLE_HEADS,
    "mistral-window": UNEVEN,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
LATENTS = {
    **EXPERTS,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CUT: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "phi3": {"sliding_window": 8},
    "olmo2": {"attention_bias": True},
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "starcoder2": {"use_bias": True},
    "deepseek_v3": LATENTS,
    "gpt_neox": {},
    "exaone4": {"sliding_window": 8},
}


def divided(
    directory: Path, size: int, load: bool = True, dtype: torch.dtype = torch.float32
) -> list[TransformersModel]:
    """The parts of all workers, each to be run in a thread of its own."""
    return together(size, parts_of(directory, size, load, dtype))


def parts_of(
    directory: Path, size: int, load: bool, dtype: torch.dtype = torch.float32
) -> Callable[[int], TransformersModel]:
    """What makes the part of a worker, in a thread of its own."""
    ranks = communicators(size)
    config = read_transformers_config(directory)

    def part(rank: int) -> TransformersModel:
        model = TransformersModel(
            config,
            dtype=dtype,
            attention_dtype=torch.float32,
            device=CPU,
            max_model_len=64,
            communicator=ranks[rank] if size > 1 else None,
        )
        if load:
            model.load_weights(iterate_parameters(directory, model.names, None))
        return model

    return part


def together(size: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return [future.result(60) for future in [threads.submit(function, rank) for rank in range(size)]]


def results(models: list[TransformersModel], count: int) -> list[list[Tensor]]:
    """Logits and hidden states of every worker."""
    return together(len(models), lambda rank: step(models[rank], count)[-2:])


def test_threads_that_build_a_model_leave_the_default_dtype_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers sets it for the whole process while it builds a model."""
    from transformers import LlamaForCausalLM

    build = LlamaForCausalLM.__init__

    def slowly(self: Any, config: Any) -> None:
        build(self, config)
        time.sleep(0.05)  # the others begin before it ends

    monkeypatch.setattr(LlamaForCausalLM, "__init__", slowly)
    directory = save_model(tmp_path, "llama", UNEVEN)
    divided(directory, 2, load=False, dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("family", MODELS)
def test_workers_give_the_tokens_of_one(tiny_model: TinyModel, family: str) -> None:
    one = arguments(tiny_model(family, **MODELS[family]), model_impl="transformers")
    with LLM(**one) as llm:
        expected, close = answers(llm)
    for size in (2, 3) if "tied" not in family else (2, 4):
        with virtual_llm(**one, tensor_parallel_size=size) as llm:
            got, others = answers(llm)
        assert got == expected, size
        for position, other in zip(others, close, strict=True):
            assert position == pytest.approx(other, abs=1e-3)


CASES = [
    pytest.param(
        family, size, marks=() if (family, size) in (("olmo2", 2), ("qwen3_moe", 2)) else pytest.mark.slow
    )
    for family in CUT
    for size in (2, 3)
]


@pytest.mark.parametrize(("family", "size"), CASES)
def test_parts_are_cut_where_workers_exchange_and_compute_the_whole(
    family: str, size: int, tmp_path: Path
) -> None:
    """As transformers' layers, and as regions, which are given what they declare."""
    directory = save_model(tmp_path, family, {**UNEVEN, **CUT[family]})
    expected = {count: results(divided(directory, 1), count)[0] for count in (9, 1)}
    models = divided(directory, size)
    for cuts in (False, True):
        if cuts:
            asked: list[list[Region]] = []
            for model in models:  # tracing is for one thread at a time
                regions: list[Region] = []

                def compile_region(region: Region, regions: list[Region] = regions) -> Callable:
                    regions.append(region)
                    return checked(region)

                cut_model(model, compile_region)
                assert model._traced is not None
                asked.append(regions)
            assert len({len(regions) for regions in asked}) == 1
            assert repr([region.inputs for region in asked[0]]) != repr(
                [region.inputs for region in asked[-1]]
            )
        for count, (logits, hidden) in expected.items():
            for own_logits, own_hidden in results(models, count):
                torch.testing.assert_close(own_logits, logits, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(own_hidden, hidden, atol=1e-4, rtol=1e-4)


def test_two_layers_in_one_are_divided_each_by_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Phi3Config

    packed = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}
    monkeypatch.setattr(Phi3Config, "base_model_tp_plan", {**(Phi3Config.base_model_tp_plan or {}), **packed})
    directory = save_model(tmp_path, "phi3", UNEVEN)
    [[expected, _]] = results(divided(directory, 1), 9)
    for logits, _ in results(divided(directory, 3), 9):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_heads_and_caches_are_divided_in_whole_groups(tmp_path: Path) -> None:
    """Also where the plan gathers queries and keys, since their norms see all of them."""
    for family in ("llama", "olmo2"):
        parts = divided(save_model(tmp_path / family, family, UNEVEN), 2, load=False)
        assert [[layer.query_shape for layer in part.layers] for part in parts] == [
            [(2, 2, 16)] * 2,
            [(1, 2, 16)] * 2,
        ]
        assert [part.cache_specs[0].kv_heads for part in parts] == [2, 1]


def test_rounded_weights_are_divided(tiny_model: TinyModel) -> None:
    one = arguments(tiny_model("qwen3", **UNEVEN), model_impl="transformers", quantization="int8")
    with LLM(**one) as llm:
        expected, close = answers(llm)
    with virtual_llm(**one, tensor_parallel_size=3) as llm:
        got, others = answers(llm)
    assert got == expected
    for position, other in zip(others, close, strict=True):
        assert position == pytest.approx(other, abs=1e-3)


def test_four_bits_are_divided_in_whole_groups_or_not_at_all(tiny_model: TinyModel) -> None:
    one = arguments(tiny_model("qwen3", **{**UNEVEN, "intermediate_size": 96}), model_impl="transformers")
    with LLM(**one, quantization="int4") as llm:
        expected, _ = answers(llm)
    with virtual_llm(**one, quantization="int4", tensor_parallel_size=3) as llm:
        assert answers(llm)[0] == expected
    single = {**UNEVEN, "intermediate_size": 96, "num_attention_heads": 3}
    one = arguments(tiny_model("qwen3", **single), model_impl="transformers")
    with pytest.raises(ConfigError, match="would be divided where 32 share a scale: use int8"):
        virtual_llm(**one, quantization="int4", tensor_parallel_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_stored_formats_are_divided_as_they_are(tiny_model: TinyModel, tmp_path: Path, name: str) -> None:
    source = tiny_model("qwen3", **{**UNEVEN, "intermediate_size": 96})
    assert_divided(arguments(PACKED[name](source, tmp_path), model_impl="transformers"), sizes=(3,))


def test_adapters_are_divided_as_the_layers_are(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Of linear layers whose outputs are put together again, too."""
    one = arguments(
        tiny_model("olmo2-biases", **MODELS["olmo2-biases"]), model_impl="transformers", enable_lora=True
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens(llm: LLM, adapter: LoRARequest | None) -> list[Any]:
        adapters = None if adapter is None else [adapter, None, adapter]
        return [
            output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, lora_request=adapters)
        ]

    with LLM(**one) as llm:
        [shapes] = llm.llm_engine.client.call("collective_rpc", "adapter_shapes", [])
        adapter = random_adapter(tmp_path, shapes)
        expected = tokens(llm, adapter)
        assert expected != tokens(llm, None)
    with virtual_llm(**one, tensor_parallel_size=2) as llm:
        assert tokens(llm, adapter) == expected


@pytest.mark.slow
def test_processes_give_the_very_bits_of_threads(tiny_model: TinyModel) -> None:
    model = tiny_model("olmo2-biases", **MODELS["olmo2-biases"])
    one = arguments(model, model_impl="transformers", dtype="bfloat16", tensor_parallel_size=2)
    with virtual_llm(**one) as llm:
        expected = answers(llm)
    with LLM(**one) as llm:
        assert answers(llm) == expected
        first, second = llm.llm_engine.client.call("collective_rpc", "memory_bytes", [])
        assert first["weights"] != second["weights"]  # 2 + 1 KV heads
        llm.llm_engine.client.call("sleep", 2)
        llm.llm_engine.client.call("wake_up")
        llm.llm_engine.client.call("update_weights", str(model))
        assert answers(llm) == expected


@pytest.mark.slow
def test_compiled_workers_give_the_tokens_of_one_that_is_not(tiny_model: TinyModel) -> None:
    one = arguments(tiny_model("gemma3", **MODELS["gemma3"]), model_impl="transformers")
    with LLM(**one) as llm:
        expected, _ = answers(llm)
    with LLM(**one | {"enforce_eager": False, "tensor_parallel_size": 2}) as llm:
        assert answers(llm)[0] == expected
        assert llm.llm_engine.client.call("num_recompilations") == 0


PLAN = "layers.*."
WRONG_PLANS = {
    "a product that is added up by nobody": {"mlp.down_proj": None},
    "values that nobody has": {"mlp.up_proj": None},
    "queries of all heads beside keys of some": {"self_attn.q_proj": None},
    "a way of its own": {"self_attn.o_proj": "diagonal"},
    "a norm": {"input_layernorm": "colwise"},
    "an output that stays in parts": {"mlp.down_proj": "colwise"},
    "no layer": {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    },
}


@pytest.mark.parametrize("wrong", WRONG_PLANS)
def test_a_wrong_plan_is_refused_before_weights_are_read(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    plan = dict(LlamaConfig.base_model_tp_plan or {})
    for name, style in WRONG_PLANS[wrong].items():
        plan.pop(PLAN + name, None)
        if style is not None:
            plan[PLAN + name] = style
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    directory, refused = save_model(tmp_path, "llama", UNEVEN), []

    def refusal(rank: int) -> None:
        with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but") as error:
            part(rank)
        refused.append(str(error.value))

    part = parts_of(directory, 2, load=False)
    together(2, refusal)
    assert len(set(refused)) == 1, "all workers, for the same reason, or some would wait for the others"


def test_heads_that_a_module_takes_for_granted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def takes_for_granted(self: Any, hidden_states: Tensor, **given: Any) -> Any:
        self.q_proj(hidden_states).view(
            *hidden_states.shape[:2], self.config.num_attention_heads, self.head_dim
        )
        return forward(self, hidden_states, **given)

    monkeypatch.setattr(LlamaAttention, "forward", takes_for_granted)
    with pytest.raises(ConfigError, match="cannot be computed in parts"):
        divided(save_model(tmp_path, "llama", UNEVEN), 2, load=False)


NO_PLAN = "transformers has no plan for dividing it"
NO_LAYER = "transformers' plan for dividing it names no layer"


@pytest.mark.parametrize(
    ("plan", "message"), [(None, NO_PLAN), ({}, NO_PLAN), ({"embed_tokens": "embedding_rowwise"}, NO_LAYER)]
)
def test_a_model_without_a_plan_for_its_layers_is_refused(
    tmp_path: Path, plan: dict[str, str] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    with pytest.raises(ConfigError, match=message):
        divided(save_model(tmp_path, "llama", UNEVEN), 2, load=False)


@pytest.mark.parametrize(
    ("family", "overrides", "size", "message"),
    [
        (
            "gpt_oss",
            {"num_local_experts": 4},
            2,
            f"{NO_PLAN}|{NO_LAYER}",
        ),  # the plan depends on transformers' version
        (
            "llama",
            {**UNEVEN, "num_key_value_heads": 2},
            3,
            "has 2 KV heads, which more workers can only share evenly",
        ),
        ("llama", {**UNEVEN, "intermediate_size": 64}, 3, "has 64 values, in units of 32: use 2 or less"),
        (
            "llama",
            {**UNEVEN, "vocab_size": 100},
            3,
            "the vocabulary has 100 values, in units of 64: use 2 or less",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, family: str, overrides: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        divided(save_model(tmp_path, family, overrides), size, load=False)
