"""Whatever workers divide of a model, and however its weights are stored:
the tokens are those of one worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.messages import LoRARequest
from minivllm.simulation.ranks import virtual_llm
from tests.end_to_end.test_compressed_tensors import (
    PER_TOKEN,
    all_but_the_head,
    compressed_copy,
    group,
    weights,
)
from tests.end_to_end.test_packed_checkpoints import float8_copy, quantised_copy
from tests.executor.small_engine import small_engine
from tests.gguf_families import write_expert_gguf
from tests.gguf_models import write_gguf
from tests.quantization.test_mxfp4 import gpt_oss_copies

TinyModel = Callable[..., Path]

LAYERS = {"num_hidden_layers": 2}
# Three units of whatever is divided.
EXPERTS = {
    **LAYERS,
    "num_key_value_heads": 3,
    "num_attention_heads": 6,
    "head_dim": 16,
    "moe_intermediate_size": 80,
}
LATENTS = {
    **LAYERS,
    "num_key_value_heads": 4,
    "num_attention_heads": 4,
    "moe_intermediate_size": 80,
    "n_shared_experts": 1,
}
MAMBA = {
    **LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, windows": ("mixtral", {**EXPERTS, "intermediate_size": 96}),
    "qwen3-moe": ("qwen3-moe", EXPERTS),
    "qwen2-moe, a gated shared MLP": ("qwen2-moe", {**EXPERTS, "shared_expert_intermediate_size": 72}),
    "gpt-oss, biased experts, sinks, windows": ("gpt-oss", {**EXPERTS, "intermediate_size": 80}),
    "glm4-moe, groups, two shared": ("glm4-moe-groups", {**EXPERTS, "first_k_dense_replace": 1}),
    "olmo2, norms of all heads": (
        "olmo2-biases",
        {**LAYERS, "num_key_value_heads": 3, "num_attention_heads": 6},
    ),
    "olmo2, one KV head for all": ("olmo2-tied", {**LAYERS, "num_attention_heads": 6}),
    "olmo3, windows": ("olmo3", {**LAYERS, "num_key_value_heads": 3, "num_attention_heads": 6}),
    "gates behind attention": ("qwen3.5", {**EXPERTS, "layer_types": ["full_attention"] * 2}),
    "gated delta nets, experts": (
        "qwen3-next-biases",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "shared_expert_intermediate_size": 72,
        },
    ),
    "short convolutions": (
        "lfm2-biases",
        {
            **LAYERS,
            "num_key_value_heads": 3,
            "num_attention_heads": 6,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "mamba2, one group, experts": ("granite-hybrid-moe", {**MAMBA, "intermediate_size": 80}),
    "mamba2, groups of heads": (
        "granite-hybrid-biases",
        {**MAMBA, "mamba_n_heads": 12, "mamba_n_groups": 3, "num_key_value_heads": 3},
    ),
    "heads of two sizes, keys of other layers, embeddings for layers": (
        "gemma4-small",
        {"num_key_value_heads": 3, "num_attention_heads": 6},
    ),
    "experts beside an MLP": (
        "gemma4-experts",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_global_key_value_heads": 3,
            "moe_intermediate_size": 80,
        },
    ),
    "latents": ("deepseek-v2-groups", {**LATENTS, "n_group": 4}),
    "latents, corrected scores": ("deepseek-v3-halves", LATENTS),
}
WIDE = {"hidden_size": 96, "intermediate_size": 96, "vocab_size": 416}
PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5, 6, 7], list(range(30, 75)), list(range(90, 97)))]


def arguments(model: Path, **more: Any) -> dict[str, Any]:
    return small_engine(model, **{"num_gpu_blocks_override": 30, "max_num_seqs": 4, **more})


def answers(llm: LLM, num_tokens: int = 8) -> list[Any]:
    """Tokens, and the logprobs of the first request."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=3)
    outputs = llm.generate(PROMPTS, params)
    [first, *_] = (output.outputs[0].logprobs for output in outputs)
    close = [{token: one.logprob for token, one in position.items()} for position in first or []]
    return [[output.outputs[0].token_ids for output in outputs], close]


def assert_divided(one: dict[str, Any], sizes: tuple[int, ...] = (2, 3), **more: Any) -> None:
    """Workers give the tokens of one. more: engine arguments of the several."""
    with LLM(**one) as llm:
        expected, close = answers(llm)
    for size in sizes:
        with virtual_llm(**one, tensor_parallel_size=size, **more) as llm:
            got, others = answers(llm)
        assert got == expected, size
        for position, other in zip(others, close, strict=True):
            assert position == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_workers_give_the_tokens_of_one(tiny_model: TinyModel, name: str) -> None:
    family, overrides = MODELS[name]
    assert_divided(arguments(tiny_model(family, **WIDE | overrides)))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_that_are_rounded_are_divided_as_well(tiny_model: TinyModel, quantization: str) -> None:
    """Scales are those of whole experts, in float32 all sums but for their order."""
    wide = {**EXPERTS, "head_dim": 32, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
    model = tiny_model("qwen2-moe", **WIDE | wide)
    assert_divided(arguments(model, quantization=quantization), sizes=(3,))


PACKED: dict[str, Callable[[Path, Path], Path]] = {
    "awq": lambda source, target: quantised_copy(source, target, "awq", {})[0],
    "gptq": lambda source, target: quantised_copy(source, target, "gptq", {"bits": 8})[0],
    "gptq by activation": lambda source, target: quantised_copy(source, target, "gptq", {"desc_act": True})[
        0
    ],
    "fp8 in blocks": lambda source, target: float8_copy(source, target, "block")[0],
    "fp8 in rows": lambda source, target: float8_copy(source, target, "row")[0],
    "compressed-tensors, groups of 4 bits": lambda source, target: compressed(
        source, target, weights(symmetric=False)
    ),
    "compressed-tensors, rows of 4 bits": lambda source, target: compressed(
        source, target, weights(4, "channel")
    ),
    "compressed-tensors, rows of 8 bits": lambda source, target: compressed(
        source, target, weights(8, "channel")
    ),
}


def compressed(source: Path, target: Path, settings: dict[str, Any], inputs: Any = None) -> Path:
    form = "int-quantized" if settings["num_bits"] == 8 else "pack-quantized"
    return compressed_copy(
        source, target, [group(form, settings, inputs=inputs)], ["lm_head"], all_but_the_head
    )[0]


HEADS = {**LAYERS, "num_key_value_heads": 3, "num_attention_heads": 6, "head_dim": 16}


@pytest.mark.parametrize("name", PACKED)
def test_a_part_of_a_quantised_weight_is_what_it_is_in_the_whole(
    tiny_model: TinyModel, tmp_path: Path, name: str
) -> None:
    """Two or four query heads, 32 or 64 inputs, are whole groups;
    64 of 96 inputs are a part of a whole row."""
    source = tiny_model("qwen3", **WIDE | HEADS)
    assert_divided(arguments(PACKED[name](source, tmp_path)), sizes=(3,))


@pytest.mark.parametrize(
    ("types", "quantization"),
    [
        ({"proj": "Q4_0", "embed": "Q8_0"}, "int4"),
        ({"v_proj": "Q8_0", "down_proj": "Q6_K", "proj": "Q4_K", "embed": "Q5_K"}, "int4"),
        ({"proj": "Q2_K", "embed": "Q8_0"}, "int4"),
        ({"proj": "Q8_0", "embed": "Q4_K"}, "int8"),
        ({"proj": "IQ4_XS", "embed": "Q6_K"}, None),
    ],
)
def test_a_part_of_a_block_of_a_gguf_file_as_well(
    tiny_model: TinyModel, tmp_path: Path, types: dict[str, str], quantization: str | None
) -> None:
    """Blocks of 256 values are divided: their groups are of 16 or 32."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 2, "num_attention_heads": 4}
    source = tiny_model("llama-tied", **LAYERS | sizes)
    write_gguf(source, tmp_path / "model.gguf", "llama", types)
    one = arguments(tmp_path / "model.gguf", tokenizer=str(source), quantization=quantization)
    assert_divided(one, sizes=(2,))


def test_mxfp4_experts_are_divided(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("gpt-oss", **WIDE | EXPERTS | {"intermediate_size": 96})
    path, _ = gpt_oss_copies(source, tmp_path)
    assert_divided(arguments(path), sizes=(3,))
    assert_divided(arguments(path), sizes=(2,), enable_expert_parallel=True)


@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss"])
def test_experts_of_a_gguf_file_are_divided(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    sizes = {
        **EXPERTS,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "intermediate_size": 96,
    }
    source = tiny_model(family, **WIDE | sizes, mlp_only_layers=[])
    write_expert_gguf(source, tmp_path / "model.gguf", "Q4_0")
    one = arguments(tmp_path / "model.gguf", tokenizer=str(source), quantization="int8")
    assert_divided(one, sizes=(3,))
    assert_divided(one, sizes=(2,), enable_expert_parallel=True)


def rounding(tiny_model: TinyModel, target: Path, family: str, **overrides: Any) -> Path:
    """A checkpoint that rounds weights by row, and inputs by token, to int8."""
    source = tiny_model(family, **WIDE | HEADS | overrides)
    return compressed(source, target, weights(8, "channel"), inputs=PER_TOKEN)


@pytest.mark.parametrize("family", ["qwen3", "llama-biases", "gemma3"])
def test_workers_round_the_inputs_that_they_divide_by_the_largest_of_all(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    """64 + 32 inputs, or 32 + 32 + 32. In another order of sums, an input may become the next number."""
    layer_types = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    one = arguments(rounding(tiny_model, tmp_path, family, **layer_types))
    with LLM(**one) as llm:
        expected, close = answers(llm)
    for size in (2, 3):
        with virtual_llm(**one, tensor_parallel_size=size) as llm:
            got, others = answers(llm)
        assert got == expected, size
        for position, other in zip(others, close, strict=True):
            assert position == pytest.approx(other, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"dtype": "bfloat16"}, {"pipeline_parallel_size": 2}, {"enforce_eager": False}]
)
def test_inputs_are_rounded_alike_in_processes(
    tiny_model: TinyModel, tmp_path: Path, more: dict[str, Any]
) -> None:
    """In the very bits of threads, if nothing is compiled."""
    one = arguments(rounding(tiny_model, tmp_path, "qwen3"), tensor_parallel_size=2) | more
    with virtual_llm(**one | {"enforce_eager": True}) as llm:
        expected = answers(llm)
    with LLM(**one) as llm:
        got = answers(llm)
        assert llm.llm_engine.client.call("num_recompilations") == 0
    assert got[0] == expected[0] and (got == expected or not one["enforce_eager"])


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2-moe", {"moe_intermediate_size": 96}),
        ("qwen3.5", {"layer_types": ["full_attention"] * 2}),
        ("qwen3", {}),
    ],
)
def test_inputs_on_whose_scale_nobody_agrees_are_refused(
    tiny_model: TinyModel, tmp_path: Path, family: str, more: dict[str, Any]
) -> None:
    path = rounding(tiny_model, tmp_path, family, **more)
    implementation = {} if more else {"model_impl": "transformers"}
    with pytest.raises(ConfigError, match="rounds the inputs of its layers to int8"):
        LLM(**arguments(path, tensor_parallel_size=2, **implementation))


@pytest.mark.parametrize("name", ["short convolutions", "mamba2, groups of heads", "latents"])
def test_adapters_are_divided_as_the_layers_that_they_change(
    tiny_model: TinyModel, tmp_path: Path, name: str
) -> None:
    """One adapter of all linear layers, for the first request and the last."""
    family, overrides = MODELS[name]
    one = arguments(tiny_model(family, **WIDE | overrides), enable_lora=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens(llm: LLM, adapter: LoRARequest | None) -> list[Any]:
        adapters = None if adapter is None else [adapter, None, adapter]
        return [
            output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, lora_request=adapters)
        ]

    with LLM(**one) as llm:
        decoder = llm.llm_engine.client.core.executor.worker._model  # type: ignore[attr-defined]
        shapes = {
            f"{block}.{part}": linear.whole_shape(part)
            for block, linear in decoder.linears
            for part in linear.sizes
        }
        adapter = random_adapter(tmp_path, shapes)
        expected = tokens(llm, adapter)
        assert expected != tokens(llm, None)
    with virtual_llm(**one, tensor_parallel_size=2) as llm:
        assert tokens(llm, adapter) == expected


def random_adapter(directory: Path, shapes: dict[str, tuple[int, int]]) -> LoRARequest:
    """Of rank 8. shapes: [out, in] of the layers it changes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = (
            torch.randn(8, inputs, generator=generator) / inputs**0.5
        )
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.3 * torch.randn(outputs, 8, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in shapes})
    entries = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(entries))
    return LoRARequest("own", lora_path=str(directory))


DEALT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe, dense layers between": ("qwen3-moe", {**EXPERTS, "num_experts": 7, "mlp_only_layers": [1]}),
    "qwen2-moe, a gated shared MLP": ("qwen2-moe", {**EXPERTS, "shared_expert_intermediate_size": 72}),
    "gpt-oss, biases": ("gpt-oss", {**EXPERTS, "intermediate_size": 40, "num_local_experts": 5}),
    "glm4-moe, groups": (
        "glm4-moe-groups",
        {**EXPERTS, "moe_intermediate_size": 24, "n_shared_experts": 4, "first_k_dense_replace": 0},
    ),
    "gemma4, beside an MLP": (
        "gemma4-experts",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 3},
    ),
}


@pytest.mark.parametrize("name", DEALT)
def test_experts_are_dealt_out_to_workers(tiny_model: TinyModel, name: str) -> None:
    """Whole experts, whatever their width; some tokens have no expert at a worker, some all of theirs."""
    family, overrides = DEALT[name]
    one = arguments(tiny_model(family, **WIDE | overrides))
    assert_divided(one, enable_expert_parallel=True)


@pytest.mark.slow
def test_processes_give_the_very_bits_of_threads(tiny_model: TinyModel) -> None:
    overrides = {**EXPERTS, "shared_expert_intermediate_size": 72}
    one = arguments(tiny_model("qwen2-moe", **WIDE | overrides), dtype="bfloat16", tensor_parallel_size=2)
    one["enable_expert_parallel"] = True
    with virtual_llm(**one) as llm:
        expected = answers(llm)
    with LLM(**one) as llm:
        assert answers(llm) == expected
        first, second = llm.llm_engine.client.call("collective_rpc", "memory_bytes", [])
        assert first["weights"] != second["weights"]  # 2 + 1 KV heads


@pytest.mark.parametrize(
    ("family", "overrides", "more", "message"),
    [
        ("llama", {}, {}, "the layers of LlamaForCausalLM have none"),
        ("mixtral", {}, {"tensor_parallel_size": 1}, "tensor_parallel_size and data_parallel_size are 1"),
        (
            "mixtral",
            {"num_local_experts": 2, **EXPERTS},
            {"tensor_parallel_size": 3},
            "has 2 experts: use that many",
        ),
        ("qwen2-moe", {"shared_expert_intermediate_size": 32}, {}, "a shared MLP of 32 values"),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused(
    tiny_model: TinyModel, family: str, overrides: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **more}
    with pytest.raises(ConfigError, match=message):
        LLM(**arguments(tiny_model(family, **overrides), **settings))


COMPILED: dict[str, dict[str, Any]] = {
    "olmo2, norms of all heads": {},
    "gpt-oss, biased experts, sinks, windows": {"enable_expert_parallel": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_workers_give_the_tokens_of_one_that_is_not(tiny_model: TinyModel, name: str) -> None:
    family, overrides = MODELS[name]
    one = arguments(tiny_model(family, **WIDE | overrides))
    with LLM(**one) as llm:
        expected, _ = answers(llm)
    with LLM(**one | {"enforce_eager": False, "tensor_parallel_size": 2}, **COMPILED[name]) as llm:
        assert answers(llm)[0] == expected
        assert llm.llm_engine.client.call("num_recompilations") == 0
