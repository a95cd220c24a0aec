"""A quantised engine computes what transformers computes, in float32, with the same values dequantised."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels_triton_free.quantized_linear import INT4_MAX_ROWS, INT8_MAX_ROWS, can_multiply_int4
from minivllm import LLM
from minivllm.compilation.package_keys import region_key
from minivllm.errors import ConfigError
from minivllm.linear.methods.groups import SpreadGroups
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.program.fuse import FusedPieces
from minivllm.weights.stored_weight import round_to_groups, round_to_int8_rows
from tests.gguf_models import stored_blocks, write_gguf
from tests.parity_reference import engine_logits, random_prompts, reference_logits, tiny_llm

pytestmark = pytest.mark.skipif(
    not can_multiply_int4(), reason="this CPU has no 4-bit operator whose order of weights is known"
)
TinyModel = Callable[..., Path]
Values = Callable[[str, Tensor], Tensor]

# Prompts of so many tokens are one step each:
# on both sides of the row counts from which weights are restored.
LENGTHS = sorted({1, 2, *(limit + extra for limit in (INT8_MAX_ROWS, INT4_MAX_ROWS) for extra in (-1, 0, 1))})
RELATIVE = 2e-4


def is_product(name: str) -> bool:
    return name.endswith("_proj.weight") or name in ("lm_head.weight", "model.embed_tokens.weight")


def with_values(source: Path, target: Path, values: Values, tied: bool) -> Path:
    """A copy of the model whose linear layers hold the values that quantising leaves."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if is_product(name) and (tied or name != "model.embed_tokens.weight"):
            weights[name] = values(name, weight).float().contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def rounded_to_int8(name: str, weight: Tensor) -> Tensor:
    values, scale = round_to_int8_rows(weight, torch.float32)
    return values * scale


def rounded_to_int4(name: str, weight: Tensor) -> Tensor:
    if not name.endswith("_proj.weight"):
        return rounded_to_int8(name, weight)
    return round_to_groups(weight, 32, torch.float32).restore(torch.float32)


def assert_logits_equal(
    llm: LLM, reference: Path, lengths: list[int] = LENGTHS, relative: float = RELATIVE, max_tokens: int = 6
) -> None:
    """At every position of prompts of many lengths and of their completions,
    which are computed token by token."""
    for prompt in random_prompts(lengths):
        completion, logits = engine_logits(llm, prompt, max_tokens=max_tokens)
        expected = reference_logits(reference, prompt + completion[:-1])
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("family", ["llama-tied", "llama-biases", "qwen3"])
@pytest.mark.parametrize(("quantization", "values"), [("int8", rounded_to_int8), ("int4", rounded_to_int4)])
def test_rounded_weights_give_the_logits_of_transformers_with_the_rounded_values(
    tiny_model: TinyModel, tmp_path: Path, family: str, quantization: str, values: Values
) -> None:
    source = tiny_model(family)
    reference = with_values(source, tmp_path / "reference", values, tied="tied" in family)
    with tiny_llm(source, quantization=quantization) as llm:
        assert_logits_equal(llm, reference)


@pytest.mark.parametrize(("quantization", "values"), [("int8", rounded_to_int8), ("int4", rounded_to_int4)])
def test_rounded_experts_give_the_logits_of_transformers_with_the_rounded_values(
    tiny_model: TinyModel, tmp_path: Path, quantization: str, values: Values
) -> None:
    """The router and the gate of the shared expert are never rounded."""
    source = tiny_model("qwen2-moe", shared_expert_intermediate_size=64)
    reference = with_values(source, tmp_path / "reference", values, tied=False)
    with tiny_llm(source, quantization=quantization, max_num_batched_tokens=48) as llm:
        assert_logits_equal(llm, reference, lengths=[1, 33, 64])


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_compiled_experts_as_well(tiny_model: TinyModel, tmp_path: Path, quantization: str) -> None:
    source = tiny_model("qwen2-moe", shared_expert_intermediate_size=64)
    values = rounded_to_int8 if quantization == "int8" else rounded_to_int4
    reference = with_values(source, tmp_path / "reference", values, tied=False)
    with tiny_llm(source, quantization=quantization, enforce_eager=False) as llm:
        assert_logits_equal(llm, reference, lengths=[1, 33, 64])
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_groups_that_are_spread_are_compiled_as_well(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama-tied", hidden_size=256, intermediate_size=256)
    types = {"proj": "Q2_K", "embed": "Q5_K"}
    write_gguf(source, tmp_path / "model.gguf", "llama", types)
    reference = with_values(source, tmp_path / "reference", stored_in(types), tied=True)
    with tiny_llm(
        tmp_path / "model.gguf", quantization="int4", tokenizer=str(source), enforce_eager=False
    ) as llm:
        assert isinstance(decoder_of(llm).layers[0].linears[0].method, SpreadGroups)
        assert_logits_equal(llm, reference, lengths=[1, 2, INT4_MAX_ROWS + 1])


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_compiled_as_well_without_compiling_again(
    tiny_model: TinyModel, tmp_path: Path, quantization: str
) -> None:
    source = tiny_model("llama-tied")
    values = rounded_to_int8 if quantization == "int8" else rounded_to_int4
    reference = with_values(source, tmp_path / "reference", values, tied=True)
    with tiny_llm(source, quantization=quantization, enforce_eager=False) as llm:
        assert_logits_equal(llm, reference)
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


def stored_in(types: dict[str, str]) -> Values:
    """What the gguf package reads back of a matrix written in a type."""

    def values(name: str, weight: Tensor) -> Tensor:
        type_name = next((kind for part, kind in types.items() if part in name), "F32")
        number = gguf.GGMLQuantizationType[type_name]
        stored = gguf.quants.dequantize(stored_blocks(name, weight.numpy(), type_name), number)
        return torch.from_numpy(stored.copy())

    return values


@pytest.mark.parametrize(
    "types",
    [
        pytest.param({"proj": "Q4_0", "embed": "Q8_0"}, id="Q4_0"),
        pytest.param({"proj": "Q4_1", "embed": "Q8_0"}, id="Q4_1"),
        pytest.param({"proj": "Q5_0", "embed": "Q4_1"}, id="Q5_0"),
        pytest.param({"proj": "Q5_1", "embed": "Q5_1"}, id="Q5_1"),
        pytest.param({"proj": "Q8_0", "embed": "Q8_0"}, id="Q8_0"),
        pytest.param(
            {"layers.1.self_attn.v_proj": "Q8_0", "proj": "Q4_1", "embed": "Q8_0"}, id="types differ"
        ),
    ],
)
def test_a_gguf_file_is_multiplied_in_its_own_blocks(
    tiny_model: TinyModel, tmp_path: Path, types: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny_model("llama-tied")
    write_gguf(source, tmp_path / "model.gguf", "llama", types)
    reference = with_values(source, tmp_path / "reference", stored_in(types), tied=True)
    with (
        caplog.at_level("INFO"),
        tiny_llm(tmp_path / "model.gguf", quantization="int4", tokenizer=str(source)) as llm,
    ):
        assert_logits_equal(llm, reference, lengths=[1, 2, INT4_MAX_ROWS + 1])
    for type_name in set(types.values()):
        assert f"of type {type_name} keep their blocks" in caplog.text


@pytest.mark.parametrize("type_name", ["Q5_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_types_that_the_gguf_package_only_reads_are_multiplied_too(
    tiny_model: TinyModel,
    tmp_path: Path,
    type_name: str,
    quantization: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Random blocks in place of the weights: transformers computes with what the package reads of them."""
    source = tiny_model("llama-tied", hidden_size=256, intermediate_size=256)
    types = {"proj": type_name, "embed": type_name}
    write_gguf(source, tmp_path / "model.gguf", "llama", types)
    reference = with_values(source, tmp_path / "reference", stored_in(types), tied=True)
    with (
        caplog.at_level("INFO"),
        tiny_llm(tmp_path / "model.gguf", quantization=quantization, tokenizer=str(source)) as llm,
    ):
        assert_logits_equal(llm, reference, lengths=[1, 2, INT4_MAX_ROWS + 1])
    assert (f"of type {type_name} keep their blocks" in caplog.text) is (quantization is not None)


def test_matrices_of_one_product_may_have_blocks_of_different_sizes(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("llama-tied", hidden_size=256, intermediate_size=256)
    types = {"v_proj": "Q4_1", "down_proj": "Q6_K", "proj": "Q2_K", "embed": "Q5_K"}
    write_gguf(source, tmp_path / "model.gguf", "llama", types)
    reference = with_values(source, tmp_path / "reference", stored_in(types), tied=True)
    with tiny_llm(tmp_path / "model.gguf", quantization="int4", tokenizer=str(source)) as llm:
        assert_logits_equal(llm, reference, lengths=[5])
        qkv, _, _, down = decoder_of(llm).layers[0].linears
        assert isinstance(qkv.method, SpreadGroups) and (qkv.method.size, qkv.method.wide) == (16, 32)
        assert isinstance(qkv.method.method, Int4Linear) and qkv.method.method.bits == 4
        assert not isinstance(down.method, SpreadGroups | Int4Linear)


def test_int8_keeps_blocks_of_8_bits_and_rounds_the_others(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, types = tiny_model("llama-tied"), {"proj": "Q4_1", "embed": "Q8_0"}
    write_gguf(source, tmp_path / "model.gguf", "llama", types)
    stored = stored_in(types)

    def values(name: str, weight: Tensor) -> Tensor:
        return rounded_to_int8(name, stored(name, weight)) if "proj" in name else stored(name, weight)

    reference = with_values(source, tmp_path / "reference", values, tied=True)
    with tiny_llm(tmp_path / "model.gguf", quantization="int8", tokenizer=str(source)) as llm:
        assert_logits_equal(llm, reference, lengths=[2, INT8_MAX_ROWS + 1])


def test_layers_of_the_same_methods_share_a_region_and_others_do_not(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("llama-tied", num_hidden_layers=5)
    types = {"layers.2.mlp.down_proj": "F32", "proj": "Q4_1", "embed": "Q8_0"}
    write_gguf(source, tmp_path / "model.gguf", "llama", {**types, "layers.2.mlp.down_proj": "Q8_0"})
    with tiny_llm(tmp_path / "model.gguf", quantization="int4", tokenizer=str(source)) as llm:
        decoder = decoder_of(llm)
        plan = decoder.plan(*decoder._declared)
        runs = [step for step in plan.body.steps if isinstance(step, FusedPieces) and step.name == "between"]
        keys = [region_key(run.region()) for run in runs]
        assert keys[0] == keys[1] == keys[3] != keys[2]


def decoder_of(llm: LLM) -> Any:
    return llm.llm_engine.client.core.executor.worker._model  # type: ignore[attr-defined]


def test_a_quantised_tied_head_is_the_embedding_too(tiny_model: TinyModel) -> None:
    for quantization in ("int8", "int4"):
        with tiny_llm(tiny_model("llama-tied"), quantization=quantization) as llm:
            assert decoder_of(llm).embedding is decoder_of(llm).head.tensors


def test_a_shape_that_int4_cannot_have_is_refused_with_the_layer_and_the_remedy(
    tiny_model: TinyModel,
) -> None:
    source = tiny_model("llama", intermediate_size=72)
    with pytest.raises(ConfigError, match=r"multiple of 32 inputs, but down_proj has 72: use int8"):
        tiny_llm(source, quantization="int4")
    with tiny_llm(source, quantization="int8") as llm:
        assert len(engine_logits(llm, random_prompts((5,))[0], max_tokens=2)[0]) == 2


def test_what_a_cpu_cannot_multiply_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"'fp8' needs a GPU.*use int8 or int4"):
        tiny_llm(tiny_model("llama"), quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization is 'int2', but must be one of int8, int4, fp8"):
        tiny_llm(tiny_model("llama"), quantization="int2")


@pytest.mark.slow
def test_the_default_model_multiplied_in_its_own_blocks_equals_transformers(smollm2_path: Path) -> None:
    """float32, so that nothing is rounded: the greedy tokens and logits of the dequantised file."""
    prompt = random_prompts((INT4_MAX_ROWS + 10,), vocab_size=40_000)[0]
    settings: dict[str, Any] = {"quantization": "int4", "max_model_len": 128, "max_num_seqs": 4}
    with LLM(str(smollm2_path), dtype="float32", num_gpu_blocks_override=16, **settings) as llm:
        completion, logits = engine_logits(llm, prompt, max_tokens=4)
    expected = reference_logits(smollm2_path.parent, prompt + completion[:-1], smollm2_path.name)
    assert (logits - expected).abs().max() <= RELATIVE * expected.abs().max()
    assert completion == expected[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4", None])
def test_the_default_model_in_bfloat16_differs_by_bfloat16_rounding(
    smollm2_path: Path, quantization: str | None
) -> None:
    """Scales and zeros rounded to bfloat16 move the logits no further than weights rounded to bfloat16
    may."""
    prompt = random_prompts((INT4_MAX_ROWS + 10,), vocab_size=40_000)[0]
    settings: dict[str, Any] = {"quantization": quantization, "max_model_len": 128, "max_num_seqs": 4}
    with LLM(str(smollm2_path), dtype="bfloat16", num_gpu_blocks_override=16, **settings) as llm:
        completion, logits = engine_logits(llm, prompt, max_tokens=6)
    expected = reference_logits(smollm2_path.parent, prompt + completion[:-1], smollm2_path.name)
    error = (logits.float() - expected).pow(2).mean(-1).sqrt() / expected.std(-1)
    assert error.median() < 0.1
