"""config.json and GGUF metadata are read as transformers reads them, and nonsense is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.checkpoints.gguf_names.config import llama3_parameters
from minivllm.checkpoints.hf_config import build_decoder_config, read_decoder_config
from minivllm.errors import ModelError
from minivllm.families.makers.registry import FAMILIES as SUPPORTED
from minivllm.models.rotary import rotary_frequencies
from minivllm.specs.attention import RotaryConfig
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import ClampedSwiglu, LatentSpec, MoeSpec
from tests.model_families import ATTENDING_FAMILIES
from tests.models.rotary_reference import llama3_factors

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 128,
}
CONFIG_CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "SmolLM3ForCausalLM": "SmolLM3Config",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Phi3ForCausalLM": "Phi3Config",
    "Olmo2ForCausalLM": "Olmo2Config",
    "Olmo3ForCausalLM": "Olmo3Config",
    "Glm4ForCausalLM": "Glm4Config",
    "GraniteForCausalLM": "GraniteConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
}


def build(architecture: str = "LlamaForCausalLM", **entries: Any) -> DecoderConfig:
    return build_decoder_config({"architectures": [architecture], **entries}, {}, "config.json")


def transformers_config(architecture: str, **entries: Any) -> Any:
    import transformers

    return getattr(transformers, CONFIG_CLASSES[architecture])(**json.loads(json.dumps(entries)))


def windows(config: DecoderConfig) -> tuple[int | None, ...]:
    return tuple(spec.window for spec in config.attention_specs)


def rotary(config: DecoderConfig) -> tuple[bool, ...]:
    """Which layers rotate."""
    return tuple(layer.mixer.rotary is not None for layer in config.layers)


def projections(
    architecture: str = "LlamaForCausalLM", **entries: Any
) -> tuple[bool, bool, bool, str | None]:
    """Of all layers: biases of q, k and v, of the output, of the MLP; and the norm of q and k."""
    (layer,) = set(build(architecture, **entries).layers)
    return layer.mixer.qkv_bias, layer.mixer.o_bias, layer.mlp.bias, layer.mixer.qk_norm


def inverse_frequencies(rotary: RotaryConfig) -> torch.Tensor:
    """Float64 frequencies straight from the papers' formulas, to compare with those of transformers."""
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.float64) / rotary.dim
    plain = rotary.theta**-exponents
    if rotary.type == "linear":
        return plain / rotary.factor
    if rotary.type == "llama3":
        divisors = llama3_factors(
            rotary.dim,
            rotary.theta,
            rotary.factor,
            rotary.low_freq_factor,
            rotary.high_freq_factor,
            rotary.original_max_position,
        )
        return plain / torch.tensor(divisors, dtype=torch.float64)
    if rotary.type == "yarn":

        def dimension(turns: float) -> float:
            length = rotary.original_max_position / (turns * 2 * math.pi)
            return rotary.dim * math.log(length) / (2 * math.log(rotary.theta))

        low, high = dimension(rotary.beta_fast), dimension(rotary.beta_slow)
        if rotary.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.dim - 1)
        high = high + 0.001 if low == high else high
        ramp = ((torch.arange(rotary.dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return plain / rotary.factor * ramp + plain * (1 - ramp)
    return plain


def assert_described_alike(ours: DecoderConfig, theirs: Any) -> None:
    """Everything that transformers' configuration says in one form or another."""
    mixer, mlp = ours.layers[0].mixer, ours.layers[0].mlp
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert mixer.heads == theirs.num_attention_heads
    each = getattr(theirs, "per_layer_config", None) or [theirs] * ours.num_layers
    head_dims = [
        getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        for own in (each[index] for index in range(ours.num_layers))
    ]
    head_dim = head_dims[0]
    if isinstance(mixer, LatentSpec):
        assert (mixer.query_rank, mixer.kv_rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
        assert (mixer.nope_dim, mixer.rope_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
        assert (mixer.value_dim, mixer.rope_dim) == (theirs.v_head_dim, head_dim)
    else:
        for index, layer in enumerate(ours.layers):
            own, heads = layer.mixer, getattr(each[index], "num_key_value_heads", None)
            assert (own.kv_heads, own.head_dim) == (heads, head_dims[index])
    has_own_size = isinstance(mlp, MoeSpec) and hasattr(theirs, "moe_intermediate_size")
    assert mlp.inner == (theirs.moe_intermediate_size if has_own_size else theirs.intermediate_size)
    assert ours.num_layers == theirs.num_hidden_layers
    if isinstance(mlp.activation, ClampedSwiglu):
        assert (mlp.activation.alpha, mlp.activation.limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    else:
        assert mlp.activation == (getattr(theirs, "hidden_act", None) or theirs.hidden_activation)
    linear = theirs.rope_parameters.get("rope_type") == "linear"  # which extends the context
    extension = theirs.rope_parameters["factor"] if linear else 1
    assert ours.max_position_embeddings == theirs.max_position_embeddings * extension
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    residual = getattr(theirs, "residual_multiplier", 1.0)  # the decoder divides the residual stream by it
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps / residual**2, rel=1e-12)
    assert ours.logits_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.bos_token_id == theirs.bos_token_id
    ends = theirs.eos_token_id
    assert ours.eos_token_ids == tuple(ends if isinstance(ends, list) else [] if ends is None else [ends])
    window, types = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None)
    rope = theirs.rope_parameters
    for index, layer in enumerate(ours.layers):
        is_windowed = (
            types[index] == "sliding_attention"
            if types
            else theirs.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe")
        )
        assert layer.mixer.attend.window == (window if is_windowed else None)
        own = rope[types[index]] if types and types[index] in rope else rope
        if layer.mixer.rotary is not None:
            table = ours.rotary[layer.mixer.rotary]
            assert (table.type, table.theta) == (own["rope_type"], own["rope_theta"])
            turned = int(head_dims[index] * own.get("partial_rotary_factor", 1.0))
            assert (table.turned or table.dim) == turned
    if theirs.model_type == "smollm3":
        assert rotary(ours) == tuple(bool(flag) for flag in theirs.no_rope_layers)
    else:
        assert all(rotary(ours))


@pytest.mark.parametrize("family", ATTENDING_FAMILIES)
def test_every_small_model_is_described_as_transformers_describes_it(tiny_model: Any, family: str) -> None:
    from transformers import AutoConfig

    path = tiny_model(family)
    ours, theirs = read_decoder_config(path), AutoConfig.from_pretrained(path)
    assert ours.architecture == theirs.architectures[0]
    assert ours.dtype == "float32"
    assert_described_alike(ours, theirs)


@pytest.mark.parametrize("architecture", list(CONFIG_CLASSES))
def test_entries_left_out_take_the_defaults_of_transformers(architecture: str) -> None:
    assert_described_alike(build(architecture), transformers_config(architecture))


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": None,
        "truncate": False,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
@pytest.mark.parametrize("spelling", ["version 4", "version 4 with type", "version 5"])
def test_rotary_parameters_mean_what_they_mean_to_transformers(rope: dict[str, Any], spelling: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    entries: dict[str, Any] = {**SMALL, "head_dim": 32, "max_position_embeddings": 512}
    if spelling == "version 5":
        entries["rope_parameters"] = {**rope, "rope_theta": 5000.0}
    else:
        scaling = dict(rope)
        if spelling == "version 4 with type":
            scaling["type"] = scaling.pop("rope_type")
        entries.update(rope_theta=5000.0, rope_scaling=None if rope["rope_type"] == "default" else scaling)
    theirs = LlamaRotaryEmbedding(transformers_config("LlamaForCausalLM", **entries))
    rotary = build(**entries).rotary[0]
    assert rotary.dim == 2 * theirs.inv_freq.numel()
    assert rotary.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(rotary).float(), theirs.inv_freq, rtol=2e-5, atol=0)


def test_partial_rotary_rotates_the_leading_part_of_each_head() -> None:
    assert build(**SMALL, partial_rotary_factor=0.5).rotary[0].dim == 8
    assert (
        build(**SMALL, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}).rotary[0].dim
        == 4
    )
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        build(**SMALL, partial_rotary_factor=0.2)


def test_windows_follow_the_family_rules() -> None:
    assert windows(build("MistralForCausalLM", **SMALL, sliding_window=None)) == (None,) * 4
    qwen = build("Qwen2ForCausalLM", **SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=3)
    assert windows(qwen) == (None, None, None, 9)
    kinds = ["sliding_attention", "full_attention"] * 2
    typed = build("Qwen3ForCausalLM", **SMALL, use_sliding_window=True, sliding_window=9, layer_types=kinds)
    assert windows(typed) == (9, None, 9, None)
    smollm3 = build(
        "SmolLM3ForCausalLM", **SMALL, use_sliding_window=True, sliding_window=9, no_rope_layer_interval=2
    )
    assert windows(smollm3) == (None, 9, None, 9)
    assert rotary(smollm3) == (True, False, True, False)
    with pytest.raises(ModelError, match="layer_types"):
        build("Qwen2ForCausalLM", **SMALL, layer_types=kinds)


def test_biases_and_head_norms_follow_the_family_rules() -> None:
    qwen2, qwen3, llama = (projections(f"{name}ForCausalLM", **SMALL) for name in ("Qwen2", "Qwen3", "Llama"))
    assert qwen2 == (True, False, False, None)
    assert qwen3 == (False, False, False, "per head")
    assert llama == (False, False, False, None)
    assert projections(**SMALL, attention_bias=True, mlp_bias=True) == (True, True, True, None)


def test_both_spellings_of_the_element_type_are_read() -> None:
    assert build(**SMALL, torch_dtype="bfloat16").dtype == "bfloat16"
    assert build(**SMALL, dtype="float16").dtype == "float16"
    assert build(**SMALL).dtype == "float32"


def test_end_ids_of_both_files_are_merged_in_order() -> None:
    entries = {"architectures": ["LlamaForCausalLM"], **SMALL}
    merged = build_decoder_config(
        {**entries, "eos_token_id": [5, 6]}, {"eos_token_id": [7, 5]}, "config.json"
    )
    assert merged.eos_token_ids == (5, 6, 7)
    assert build_decoder_config(entries, {"eos_token_id": 9}, "config.json").eos_token_ids == (9,)
    assert build_decoder_config({**entries, "eos_token_id": None}, {}, "config.json").eos_token_ids == ()


def test_an_unknown_architecture_is_refused_with_the_list_of_supported_ones() -> None:
    with pytest.raises(ModelError) as caught:
        build("GPT2LMHeadModel")
    assert "GPT2LMHeadModel" in str(caught.value)
    assert all(name in str(caught.value) for name in SUPPORTED)
    assert build_decoder_config({"model_type": "qwen3", **SMALL}, {}, "c").architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", 2**40),
        ("hidden_size", True),
        ("hidden_size", 63),
        ("num_hidden_layers", -1),
        ("num_attention_heads", None),
        ("num_key_value_heads", 3),
        ("head_dim", 0),
        ("vocab_size", 10**9),
        ("max_position_embeddings", 1.5),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0),
        ("rope_theta", -1.0),
        ("rope_theta", float("inf")),
        ("rope_scaling", [1]),
        ("hidden_act", "tanh"),
        ("dtype", "float8_e4m3fn"),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", ["<eos>"]),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_an_impossible_value_is_refused_with_file_and_field(field: str, value: Any) -> None:
    entries = {"architectures": ["LlamaForCausalLM"], **SMALL, field: value}
    with pytest.raises(ModelError) as caught:
        build_decoder_config(entries, {}, "somewhere/config.json")
    assert "somewhere/config.json" in str(caught.value)
    assert field in str(caught.value)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("Gemma3ForCausalLM", "layer_types", [SLIDING, FULL, SLIDING]),
        ("Gemma3ForCausalLM", "layer_types", [SLIDING, FULL, SLIDING, "linear_attention"]),
        ("Gemma2ForCausalLM", "layer_types", "sliding_attention"),
        ("Gemma2ForCausalLM", "sliding_window", -1),
        ("Gemma3ForCausalLM", "sliding_window", 0),
        ("Gemma3ForCausalLM", "sliding_window_pattern", 0),
        ("Gemma2ForCausalLM", "query_pre_attn_scalar", -256),
        ("Gemma2ForCausalLM", "attn_logit_softcapping", -50.0),
        ("Gemma2ForCausalLM", "final_logit_softcapping", float("nan")),
        ("Gemma3ForCausalLM", "hidden_activation", "relu2"),
        ("Gemma3ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma3ForCausalLM", "rope_local_base_freq", -1.0),
        ("Gemma3ForCausalLM", "rope_parameters", {"full_attention": 7}),
        ("Gemma3ForCausalLM", "intermediate_size", -96),
        ("Phi3ForCausalLM", "rope_parameters", {"rope_type": "longrope", "long_factor": [1.0] * 8}),
        ("Phi3ForCausalLM", "hidden_act", "swiglu"),
        ("Phi3ForCausalLM", "partial_rotary_factor", 1.5),
        ("Olmo2ForCausalLM", "num_key_value_heads", -2),
        ("Olmo3ForCausalLM", "layer_types", [FULL]),
        ("Glm4ForCausalLM", "attention_bias", "yes"),
        ("GraniteForCausalLM", "residual_multiplier", 0),
        ("GraniteForCausalLM", "logits_scaling", 0.0),
    ],
)
def test_a_configuration_that_lies_is_refused_with_file_and_field(
    architecture: str, field: str, value: Any
) -> None:
    with pytest.raises(ModelError) as caught:
        build(architecture, **{**SMALL, "head_dim": 16, field: value})
    assert str(caught.value).startswith("config.json: ") and field in str(caught.value)


GEMMA4 = {
    "vocab_size": 416,
    "vocab_size_per_layer_input": 416,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("use_bidirectional_attention", "all", "use_bidirectional_attention is 'all'"),
        ("per_layer_config", {"1": {"head_dim": 32}}, "per_layer_config is"),
        ("per_layer_config", {"3": {"head_dim": 32, "sliding_window": 3}}, "per_layer_config is"),
        ("per_layer_config", [1], "per_layer_config is"),
        ("num_kv_shared_layers", 4, "must leave a layer of sliding_attention to read from"),
        ("num_kv_shared_layers", 9, "num_kv_shared_layers is 9"),
        ("global_head_dim", 0, r"full_attention\.head_dim is 0"),
        ("global_head_dim", 33, "heads of an even size, not of 33"),
        ("num_global_key_value_heads", 3, "must divide num_attention_heads 4"),
        ("vocab_size_per_layer_input", 5, "must be vocab_size, which is 416"),
        ("enable_moe_block", True, "num_experts is None"),
        ("rope_parameters", {"full_attention": None}, "one set of values for each type of layer"),
        ("layer_types", [FULL], "layer_types is"),
    ],
)
def test_a_gemma_4_that_lies_is_refused_with_file_and_field(field: str, value: Any, named: str) -> None:
    assert build("Gemma4ForCausalLM", **GEMMA4).layers[3].attention.head_dim == 32
    with pytest.raises(ModelError, match=rf"^config\.json: .*{named}"):
        build("Gemma4ForCausalLM", **{**GEMMA4, field: value})


@pytest.mark.parametrize("length", [0, 7, 9])
def test_longrope_needs_a_factor_for_every_pair(length: int) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * length}
    with pytest.raises(ModelError, match=r"rope_parameters\.long_factor is .*must list 8 numbers"):
        build("Phi3ForCausalLM", **SMALL, rope_parameters=rope)


def test_longrope_means_what_it_means_to_transformers() -> None:
    """The divisors of the length asked for,
    and the factor of cosines and sines that follows from the lengths."""
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    rope = {
        "type": "su",
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    }
    entries = {
        **SMALL,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "pad_token_id": None,
    }
    theirs = Phi3RotaryEmbedding(
        transformers_config("Phi3ForCausalLM", **entries, rope_parameters={**rope, "type": "longrope"})
    )
    (ours,) = build("Phi3ForCausalLM", **entries, rope_scaling=rope).rotary
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    for length in (64, 65):
        theirs(torch.zeros(1), torch.arange(length)[None])
        frequencies = rotary_frequencies(ours, max_model_len=length).float()
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": ["linear"], "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"full_attention": {"rope_type": "default"}},
    ],
)
def test_unusable_rotary_parameters_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="rope_parameters"):
        build(**SMALL, rope_parameters=rope)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = [
    *SMALL,
    "architectures",
    "model_type",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "dtype",
    "torch_dtype",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "no_rope_layers",
    "no_rope_layer_interval",
    "eos_token_id",
    "bos_token_id",
    "original_max_position_embeddings",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "rope_local_base_freq",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(list(CONFIG_CLASSES)),
    st.dictionaries(st.sampled_from(FIELD_NAMES), json_values, max_size=3),
    st.dictionaries(st.sampled_from(["eos_token_id", "bos_token_id"]), json_values),
)
def test_any_values_give_a_description_or_a_sentence(
    architecture: str, replaced: dict[str, Any], generation: dict[str, Any]
) -> None:
    entries = {"architectures": [architecture], **SMALL, "eos_token_id": 1, "bos_token_id": 0, **replaced}
    try:
        config = build_decoder_config(entries, generation, "config.json")
    except ModelError:
        return
    for mixer in (layer.mixer for layer in config.layers):
        assert isinstance(mixer, LatentSpec) or mixer.heads % mixer.kv_heads == 0
        rotary = config.rotary[mixer.rotary or 0]
        assert rotary.dim % 2 == 0 and 0 < rotary.dim <= mixer.head_dim


def test_files_that_are_no_configuration_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_decoder_config(tmp_path)
    for content in ("{", "[]", "[" * 100_000, "\ud800".encode("utf-16", "surrogatepass")):
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / "config.json").write_bytes(data)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_decoder_config(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        read_decoder_config(tmp_path / "absent")


def test_overrides_replace_entries(tiny_model: Any) -> None:
    config = read_decoder_config(
        tiny_model("llama"), "auto", {"max_position_embeddings": 77, "rope_theta": 3.0}
    )
    assert config.max_position_embeddings == 77
    # the model's own rope_parameters win over a top-level rope_theta, as in transformers
    assert config.rotary[0].theta == 10000.0


def test_the_default_model_is_described_by_its_metadata(smollm2_path: Path) -> None:
    config = read_decoder_config(smollm2_path)
    assert config.architecture == "LlamaForCausalLM"
    (layer,) = set(config.layers)
    assert (config.num_layers, layer.mixer.heads, layer.mixer.kv_heads, layer.mixer.head_dim) == (
        30,
        9,
        3,
        64,
    )
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rotary == (RotaryConfig(theta=100000.0, dim=64, original_max_position=8192),)
    assert config.tie_word_embeddings and config.dtype == "bfloat16"
    assert config.bos_token_id == 1 and config.eos_token_ids == (
        2,
        4,
        0,
    )  # <|im_end|>, <reponame>, <|endoftext|>


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 2048)])
def test_llama3_scaling_is_recovered_from_stored_rotary_factors(factor: float, original: int) -> None:
    stored = torch.tensor(llama3_factors(128, 500000.0, factor, 1.0, 4.0, original)).float().tolist()
    found = llama3_parameters(stored, 500000.0, "file.gguf")
    assert found["rope_type"] == "llama3"
    assert (found["factor"], found["original_max_position_embeddings"]) == (factor, original)
    assert (found["low_freq_factor"], found["high_freq_factor"]) == (1.0, 4.0)


def test_rotary_factors_of_no_known_scaling_are_refused() -> None:
    assert llama3_parameters([1.0] * 32, 10000.0, "file.gguf") == {}
    for factors in ([1.0, 2.0, 3.0, 4.0], [float("nan")] * 4, [], [0.5, 0.5]):
        if factors:
            with pytest.raises(ModelError, match="rope_freqs"):
                llama3_parameters(factors, 10000.0, "file.gguf")


def test_ids_outside_the_vocabulary_are_left_out_with_a_warning_that_names_their_file(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = {"architectures": ["LlamaForCausalLM"], **SMALL, "bos_token_id": -1, "eos_token_id": [3, 128]}
    config = build_decoder_config(entries, {"eos_token_id": [5, 999]}, "somewhere/config.json")
    assert (config.bos_token_id, config.eos_token_ids) == (None, (3, 5))
    assert [record.getMessage().split(", but")[0] for record in caplog.records] == [
        "somewhere/config.json: bos_token_id names -1",
        "somewhere/config.json: eos_token_id names 128",
        "somewhere/generation_config.json: eos_token_id names 999",
    ]


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
    ],
)
def test_yarn_and_linear_scaling_extend_the_context(
    rope: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    from minivllm.transformers_models.describe.config import read_transformers_config

    entries = {**SMALL, "max_position_embeddings": 512, "rope_theta": 10000.0, "rope_scaling": rope}
    assert build("LlamaForCausalLM", **entries).max_position_embeddings == positions
    described = {**entries, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    if rope["rope_type"] != "llama3":
        assert read_transformers_config(tmp_path).max_position_embeddings == positions


def test_scaling_of_some_layers_does_not_extend_the_context() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert (
        build("Gemma3ForCausalLM", max_position_embeddings=512, rope_parameters=rope).max_position_embeddings
        == 512
    )


@pytest.mark.parametrize(
    ("rope", "doubt"),
    [
        ({"rope_type": "linear", "factor": 0.5}, "rope_parameters.factor is 0.5, below 1"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "is 8 times"),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2},
            "beta_fast is below beta_slow",
        ),
        ({"factor": 4.0}, "factor is not used by rope_type 'default'"),
    ],
)
def test_rotary_parameters_that_transformers_doubts_are_doubted(
    rope: dict[str, Any], doubt: str, caplog: pytest.LogCaptureFixture
) -> None:
    build("LlamaForCausalLM", max_position_embeddings=512, rope_scaling=rope)
    assert any(doubt in record.getMessage() for record in caplog.records)


def test_a_mistral_with_layer_types_has_the_windows_that_autoconfig_gives_it(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from minivllm.transformers_models.describe.config import read_transformers_config

    types = ["full_attention", "sliding_attention"]
    config = build("MistralForCausalLM", num_hidden_layers=2, layer_types=types, sliding_window=32)
    assert windows(config) == (None, 32)
    assert windows(build("MistralForCausalLM", num_hidden_layers=2, sliding_window=32)) == (32, 32)
    entries = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**entries, "layer_types": types, "sliding_window": 32}))
    assert (
        read_transformers_config(tmp_path).load().layer_types
        == AutoConfig.from_pretrained(tmp_path).layer_types
    )


@pytest.mark.parametrize(
    "activation", ["gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate", "gelu_python", "relu"]
)
def test_an_activation_computes_what_transformers_computes_by_that_name(activation: str) -> None:
    from transformers.activations import ACT2FN

    from kernels_triton_free.activation import gated_product

    (layer,) = set(build(hidden_act=activation).layers)
    x = torch.linspace(-8, 8, 4001)
    assert torch.allclose(
        gated_product(x, torch.ones(4001), layer.mlp.activation), ACT2FN[activation](x), atol=2e-6
    )


@pytest.mark.parametrize("dtype", ["auto", "float64", "torch.float64"])
def test_a_type_without_a_computation_of_its_own_is_computed_in_float32(dtype: str) -> None:
    assert build(dtype=dtype).dtype == "float32"
