"""Weights arrive by Hugging Face name, exactly those the configuration asks for,
or a sentence says why not."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.checkpoints.checkpoint import expected_shapes, iterate_weights
from minivllm.checkpoints.choose import read_model_facts
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.errors import ModelError
from minivllm.specs.decoder import DecoderConfig
from tests.gguf_models import write_gguf
from tests.model_families import FAMILIES

TinyModel = Callable[..., Path]


def load(
    path: Path, config: DecoderConfig | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return dict(iterate_weights(path, "auto", config or read_decoder_config(path), dtype, 0))


@pytest.fixture
def llama_copy(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A private copy of a small model that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def shard(directory: Path) -> list[Path]:
    """Replace model.safetensors by two shards and an index, as large models are published."""
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for file, part in zip(files, (names[: len(names) // 2], names[len(names) // 2 :])):
        save_file({name: weights[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (directory / "model.safetensors").unlink()
    return [directory / file for file in files]


# Names in the decoder -> names in the checkpoints of some families.
NORMS_BEHIND = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
STORED_NAMES = {
    "gemma4": {
        **NORMS_BEHIND,
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "output_scale": "layer_scalar",
    },
    "gemma": {**NORMS_BEHIND, "post_attention_layernorm": "pre_feedforward_layernorm"},
    "olmo": NORMS_BEHIND,
    "glm4-moe": {"shared_expert": "shared_experts"},
    "deepseek": {"shared_expert": "shared_experts"},
    "lfm2": {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "norm": "embedding_norm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
    },
}
FUSED = {
    "phi3": {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
    "glm4-moe": {},
    "glm4": {"gate_up_proj": ["gate_proj", "up_proj"]},
}


def _outside_mlp(found: re.Match[str]) -> str:
    part = found[1]
    return part if part == "experts" else "router.proj." if part == "gate." else f"router.{part}"


def as_stored(ours: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Our weights under the names, and in the pieces, of the family's checkpoints."""
    renamed = next((names for start, names in STORED_NAMES.items() if family.startswith(start)), {})
    stored = {
        ".".join(renamed.get(part, part) for part in name.split(".")): value for name, value in ours.items()
    }
    for whole, parts in next(
        (fused for start, fused in FUSED.items() if family.startswith(start)), {}
    ).items():
        for first in [name for name in stored if name.split(".")[-2] == parts[0]]:
            pieces = [stored.pop(first.replace(parts[0], part)) for part in parts]
            stored[first.replace(parts[0], whole)] = torch.cat(pieces)
    for first in [
        name for name in stored if ".experts.0." in name
    ]:  # transformers stacks them when it loads them
        own = [name for name in stored if re.sub(r"(experts)\.\d+", r"\1.0", name) == first]
        matrices = [stored.pop(first.replace("experts.0", f"experts.{expert}")) for expert in range(len(own))]
        stored[first.replace(".experts.0", ".experts").removesuffix(".weight")] = torch.stack(matrices)
    for gates in [name for name in stored if name.endswith(".experts.gate_proj")]:
        both = stored.pop(gates), stored.pop(gates.replace("gate_proj", "up_proj"))
        stored[gates.replace("gate_proj", "gate_up_proj")] = torch.cat(both, dim=1)
    if family.startswith("gpt-oss"):  # gates and ups in turn, [in, out]
        stored = {name.replace(".mlp.gate.", ".mlp.router."): value for name, value in stored.items()}
        for name in [name for name in stored if name.endswith(".experts.gate_proj.bias")]:
            both = stored.pop(name), stored.pop(name.replace("gate_proj", "up_proj"))
            stored[name.replace("gate_proj.bias", "gate_up_proj_bias")] = torch.stack(both, dim=-1).flatten(1)
            down = name.replace("gate_proj", "down_proj")
            stored[down.replace(".bias", "_bias")] = stored.pop(down)
        for name in [
            name for name in stored if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        ]:
            if "gate_up" in name:
                stored[name] = torch.stack(stored[name].chunk(2, dim=1), dim=2).flatten(1, 2)
            stored[name] = stored[name].transpose(1, 2).contiguous()
    for name in [name for name in stored if name.endswith(".conv.conv.weight")]:  # one filter per channel
        stored[name] = stored[name][:, None]
    if family.startswith("gemma4"):  # its router and experts lie outside the MLP
        stored = {
            re.sub(r"mlp\.(experts|scale|per_expert_scale|gate\.)", _outside_mlp, name): value
            for name, value in stored.items()
        }
        return {
            name.removesuffix(".weight") if "layer_scalar" in name else name: value
            for name, value in stored.items()
        }
    if family.startswith("gemma"):  # which multiplies by 1 + w
        stored = {
            name: value - 1 if name.endswith("norm.weight") else value for name, value in stored.items()
        }
    return stored


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_yields_exactly_the_weights_that_transformers_loads(
    family: str, tiny_model: TinyModel
) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model(family)
    theirs = AutoModelForCausalLM.from_pretrained(path).state_dict()
    config = read_decoder_config(path)
    ours = load(path, config)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == expected_shapes(config)
    ours = as_stored(ours, family)
    if config.tie_word_embeddings:
        assert torch.equal(theirs.pop("lm_head.weight"), ours["model.embed_tokens.weight"])
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        own = ours[name]
        if family in ("glm4", "glm4-quarter", "glm4-whole-heads") and name.split(".")[-2] in (
            "q_proj",
            "k_proj",
        ):  # rows in another order
            own, value = own.sort(0).values, value.sort(0).values
        torch.testing.assert_close(own, value, rtol=0, atol=1e-6 if family.startswith("gemma") else 0)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gemma3", ("Gemma3ForConditionalGeneration", "gemma3")),
        ("ministral3", ("Mistral3ForConditionalGeneration", "mistral3")),
        ("mistral", ("Mistral3ForConditionalGeneration", "mistral3")),
        ("llama", ("LlavaForConditionalGeneration", "llava")),
        ("mistral", ("LlavaNextForConditionalGeneration", "llava_next")),
        ("qwen2", ("LlavaNextForConditionalGeneration", "llava_next")),
        ("qwen2", ("LlavaOnevisionForConditionalGeneration", "llava_onevision")),
    ],
)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees_images_is_loaded(
    tiny_model: TinyModel, tmp_path: Path, prefix: str, family: str, names: tuple[str, str]
) -> None:
    source = tiny_model(family)
    stored = {
        name.replace("model.", prefix, 1): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    stored["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(3)
    stored["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)
    save_file(stored, tmp_path / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    outer = {"architectures": [names[0]], "model_type": names[1], "dtype": text.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "vision_config": {}, "text_config": text}))
    config = read_decoder_config(tmp_path)
    looks_ahead = family == "gemma3"  # only its images see themselves, which is the one difference
    assert all(layer.attention.attend.looks_ahead is looks_ahead for layer in config.layers)
    layers = tuple(
        replace(
            layer, mixer=replace(layer.attention, attend=layer.attention.attend._replace(looks_ahead=False))
        )
        for layer in config.layers
    )
    plain = replace(config, architecture=text["architectures"][0], layers=layers)
    assert plain == read_decoder_config(source)
    expected, found = load(source), load(tmp_path)
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in found)


def test_shards_and_one_file_give_the_same_weights(llama_copy: Path) -> None:
    whole = load(llama_copy)
    whole = {name: tensor.clone() for name, tensor in whole.items()}
    shard(llama_copy)
    sharded = load(llama_copy)
    assert set(sharded) == set(whole)
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_weights_are_converted_to_the_requested_type(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    exact, half = load(path), load(path, dtype=torch.bfloat16)
    assert all(torch.equal(half[name], exact[name].to(torch.bfloat16)) for name in exact)


def test_a_missing_shard_is_named(llama_copy: Path) -> None:
    shard(llama_copy)[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(llama_copy)


def test_an_index_may_not_point_outside_its_directory(llama_copy: Path) -> None:
    shard(llama_copy)
    index = llama_copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for place in ("../elsewhere.safetensors", "/etc/passwd", 3, "weights.bin"):
        content["weight_map"]["model.norm.weight"] = place
        index.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=r"index\.json"):
            load(llama_copy)


def test_an_index_that_disagrees_with_its_shards_is_refused(llama_copy: Path) -> None:
    first, second = shard(llama_copy)
    index = llama_copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = {name: file for name, file in content["weight_map"].items() if file == first.name}
    content["weight_map"][next(iter(names))] = second.name
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="does not hold it"):
        load(llama_copy)


def test_the_index_decides_where_two_shards_hold_a_tensor(llama_copy: Path) -> None:
    expected = {name: tensor.clone() for name, tensor in load(llama_copy).items()}
    first, second = shard(llama_copy)
    for path, other in ((first, second), (second, first)):
        stale = {name: torch.full_like(tensor, 7.0) for name, tensor in load_file(other).items()}
        save_file({**stale, **load_file(path)}, path)
    found = load(llama_copy)
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_tensor_that_neither_index_nor_model_knows_is_left_out_with_a_warning(
    llama_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = set(load(llama_copy))
    first, _ = shard(llama_copy)
    save_file({**load_file(first), "model.layers.0.draft.weight": torch.ones(3)}, first)
    assert set(load(llama_copy)) == expected
    assert "tensor 'model.layers.0.draft.weight' is left out" in caplog.text


def test_a_head_of_other_values_counts_although_the_configuration_ties_it(
    llama_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    config = llama_copy / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(llama_copy, dtype=torch.float32).state_dict()
    facts = read_model_facts(llama_copy)
    assert isinstance(facts, DecoderConfig) and not facts.tie_word_embeddings
    assert "lm_head.weight: that is used" in caplog.text
    assert torch.equal(load(llama_copy, facts)["lm_head.weight"], theirs["lm_head.weight"])
    rewrite(
        llama_copy, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()})
    )
    facts = read_model_facts(llama_copy)
    assert isinstance(facts, DecoderConfig) and facts.tie_word_embeddings


def test_transformers_models_with_a_tied_head_of_other_values_are_refused_with_the_remedy(
    llama_copy: Path,
) -> None:
    config = llama_copy / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    common: Any = {"model_impl": "transformers", "enforce_eager": True, "num_gpu_blocks_override": 16}
    with pytest.raises(ModelError, match=r"different values.*hf_overrides"):
        LLM(str(llama_copy), **common)
    with LLM(str(llama_copy), hf_overrides={"tie_word_embeddings": False}, **common) as llm:
        assert llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2))[0].finished


def test_truncated_files_are_refused_by_name(llama_copy: Path) -> None:
    path = llama_copy / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            load(llama_copy, read_decoder_config(llama_copy))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_mutated_header_is_read_or_refused_with_a_sentence(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    source = tiny_model("llama")
    data = bytearray((source / "model.safetensors").read_bytes())
    for position, value in changes:
        data[position] = value
    directory = tmp_path_factory.mktemp("mutated")
    (directory / "model.safetensors").write_bytes(bytes(data))
    try:
        weights = load(directory, read_decoder_config(source))
    except ModelError as error:
        assert str(directory) in str(error)
    else:
        assert set(weights) == set(expected_shapes(read_decoder_config(source)))


def test_a_huge_header_length_is_refused(llama_copy: Path) -> None:
    (llama_copy / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(llama_copy)


def test_missing_extra_and_misshapen_tensors_are_named(llama_copy: Path) -> None:
    config = read_decoder_config(llama_copy)
    rewrite(llama_copy, lambda weights: weights.update({"model.layers.0.extra.weight": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.extra\.weight"):
        load(llama_copy, config)
    rewrite(llama_copy, lambda weights: weights.__delitem__("model.layers.0.extra.weight"))
    with pytest.raises(ModelError, match=r"\.weight' has shape \[416, 64\].*\[999, 64\]"):
        load(llama_copy, replace(config, vocab_size=999))
    rewrite(llama_copy, lambda weights: weights.__delitem__("model.norm.weight"))
    with pytest.raises(ModelError, match=r"lacks tensor 'model\.norm\.weight'"):
        load(llama_copy, config)


def test_whole_number_weights_are_refused(llama_copy: Path) -> None:
    rewrite(
        llama_copy, lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    )
    with pytest.raises(ModelError, match="I8"):
        load(llama_copy)


def test_rotary_buffers_and_the_copy_of_a_tied_head_are_passed_over(llama_copy: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(llama_copy, lambda weights: weights.update(extra))
    weights = load(llama_copy, replace(read_decoder_config(llama_copy), tie_word_embeddings=True))
    assert "lm_head.weight" not in weights and not any("inv_freq" in name for name in weights)


def test_names_without_the_leading_model_are_understood(llama_copy: Path) -> None:
    whole = {name: tensor.clone() for name, tensor in load(llama_copy).items()}

    def strip(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    rewrite(llama_copy, strip)
    stripped = load(llama_copy)
    assert set(stripped) == set(whole) and all(torch.equal(stripped[name], whole[name]) for name in whole)


def test_pickled_weights_are_never_opened(llama_copy: Path) -> None:
    (llama_copy / "model.safetensors").rename(llama_copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle.*convert"):
        load(llama_copy)
    (llama_copy / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load(llama_copy)


def test_dummy_weights_depend_on_seed_and_name_only(tiny_model: TinyModel) -> None:
    config = read_decoder_config(tiny_model("qwen2"))

    def dummy(seed: int, config: DecoderConfig = config) -> dict[str, torch.Tensor]:
        return dict(iterate_weights("nowhere", "dummy", config, torch.float32, seed))

    first, again, other = dummy(0), dummy(0), dummy(1)
    fewer_layers = dummy(0, replace(config, layers=config.layers[:1]))
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == expected_shapes(config)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], fewer_layers[name]) for name in fewer_layers)
    for name in first:
        if name.endswith("norm.weight"):
            assert torch.equal(first[name], torch.ones_like(first[name]))
        else:
            assert not torch.equal(first[name], other[name])
    assert first["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)


# --- GGUF
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "llama"),
        ("llama-biases", "llama"),
        ("llama-head-dim", "llama"),
        ("smollm3", "smollm3"),
        ("qwen2", "qwen2"),
        ("qwen2-tied", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_a_converted_gguf_file_gives_back_the_original_model(
    family: str, architecture: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    overrides = {"no_rope_layer_interval": 4} if family == "smollm3" else {}
    source = tiny_model(family, **overrides)
    path = tmp_path / "model.gguf"
    write_gguf(source, path, architecture)
    wanted, config = read_decoder_config(source), read_decoder_config(path)
    assert config.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)
    assert with_eps(config, wanted.rms_norm_eps) == wanted
    original, converted = load(source), load(path)
    assert set(original) == set(converted)
    assert all(torch.equal(original[name], converted[name]) for name in original)


def with_mixers(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    layers = (replace(layer, mixer=replace(layer.mixer, **changes)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def with_eps(config: DecoderConfig, eps: float) -> DecoderConfig:
    """GGUF keeps epsilons as float32."""
    config = with_mixers(config, qk_norm_eps=eps)
    layers = (replace(layer, norms=replace(layer.norms, eps=eps, after_eps=eps)) for layer in config.layers)
    return replace(config, rms_norm_eps=eps, layers=tuple(layers))


def test_a_gguf_file_that_lacks_a_tensor_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path, "llama")
    with pytest.raises(ModelError, match=r"lacks tensor 'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        load(path, with_mixers(read_decoder_config(path), qk_norm="per head"))


@pytest.mark.slow
def test_the_default_model_is_read_as_transformers_reads_it(smollm2_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    theirs = model.state_dict()
    for name, tensor in load(smollm2_path).items():
        assert torch.equal(tensor, theirs[name])
