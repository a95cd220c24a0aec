"""Models that keep latents: what a token costs, what is refused,
and what other backends and formats make of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM
from minivllm.batch.layer_caches import allocate_caches, block_bytes, kv_groups
from minivllm.checkpoints.hf_config import build_decoder_config
from minivllm.errors import ConfigError, ModelError
from minivllm.graphs.mode import graph_mode_of_draft, resolve_graph_mode
from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.int8 import Int8Linear
from minivllm.models.decoder import Decoder
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import LatentSpec
from tests.parity_reference import (
    BLOCK_SIZE,
    engine_logits,
    greedy,
    random_prompts,
    reference_logits,
    reference_tokens,
    runner_of,
    tiny_llm,
)
from tutorials.recorded_graphs import RecordedGraphs

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "max_position_embeddings": 163840,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}


def build(entries: dict[str, Any]) -> DecoderConfig:
    return build_decoder_config(entries, {}, "config.json")


def unloaded(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    return Decoder(config, dtype=dtype, attention_dtype=dtype, device=CPU, max_model_len=64)


@pytest.mark.parametrize(
    ("entries", "layers"),
    [pytest.param(V3, 61, marks=pytest.mark.slow), (V2_LITE, 27)],
    ids=["V3", "V2-Lite"],
)
def test_a_token_costs_576_values_a_layer_as_the_papers_say(entries: dict[str, Any], layers: int) -> None:
    """kv_lora_rank 512 and qk_rope_head_dim 64, once: no V, nothing per head."""
    model = unloaded(build(entries), torch.bfloat16)
    [group] = kv_groups(model, 64, 4096)
    assert block_bytes(model, 64) == group.block_bytes == layers * 576 * 64 * 2
    assert group.kind == "full attention" and len(group.layers) == layers
    caches = allocate_caches(model, 3, 64)
    assert sum(tensor.nbytes for cache in caches for tensor in cache[:2]) == 3 * group.block_bytes


def test_published_configurations_become_what_the_papers_say() -> None:
    config = build(V3)
    assert [hasattr(layer.mlp, "routing") for layer in config.layers] == [False] * 3 + [True] * 58
    mixer = config.layers[0].mixer
    assert isinstance(mixer, LatentSpec)
    magnitude = 0.1 * torch.log(torch.tensor(40.0)).item() + 1
    assert mixer.scale == pytest.approx(192**-0.5 * magnitude**2)
    assert config.rotary[0].attention_factor == 1.0
    assert (mixer.query_rank, mixer.kv_rank, mixer.head_dim) == (1536, 512, 576)
    lite = build(V2_LITE).layers[1].mixer
    assert isinstance(lite, LatentSpec) and lite.query_rank is None and lite.scale == 192**-0.5


@pytest.mark.parametrize(
    ("family", "field", "value", "rule"),
    [
        (V3, "qk_rope_head_dim", 63, "must be even"),
        (V3, "qk_rope_head_dim", -64, "must be a whole number"),
        (V3, "kv_lora_rank", 0, "must be a whole number"),
        (V3, "q_lora_rank", -1, "must be a whole number"),
        (V3, "v_head_dim", None, "must be a whole number"),
        (V3, "qk_nope_head_dim", 2.5, "must be a whole number"),
        (V3, "num_key_value_heads", 8, "must be num_attention_heads 128"),
        (V3, "partial_rotary_factor", 0.5, "must be 1"),
        (V3, "moe_layer_freq", 2, "must be 1"),
        (V3, "topk_method", "greedy", "must be 'noaux_tc'"),
        (V3, "scoring_func", "softmax", "must be 'sigmoid'"),
        (V3, "n_group", 7, "must divide the 256 experts"),
        (V3, "topk_group", 9, "must name some of the 8 groups"),
        (V3, "rope_interleave", "yes", "must be true or false"),
        (V3, "num_experts_per_tok", 257, "there are only 256 experts"),
        (V2_LITE, "topk_method", "best", "must be 'greedy' or 'group_limited_greedy'"),
        (V2_LITE, "topk_method", "group_limited_greedy", "n_group"),
        (V2_LITE, "scoring_func", "sigmoid", "must be 'softmax'"),
        (V2_LITE, "norm_topk_prob", True, "must be False"),
        (V2_LITE, "num_experts_per_tok", None, "must be a whole number"),
        (V2_LITE, "first_k_dense_replace", -1, "must be a whole number"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(
    family: dict[str, Any], field: str, value: Any, rule: str
) -> None:
    with pytest.raises(ModelError) as error:
        build({**family, field: value})
    message = str(error.value)
    assert rule in message and (field in message or field == "topk_method") and message.count("\n") == 0


def test_one_mscale_is_refused_where_it_is_no_number() -> None:
    with pytest.raises(ModelError, match="mscale_all_dim"):
        build({**V3, "rope_scaling": {**V3["rope_scaling"], "mscale_all_dim": -2.0}})


def test_graphs_leave_attention_over_latents_outside() -> None:
    config = build(V3)
    assert resolve_graph_mode(None, "cuda", False, config) == "piecewise"
    assert resolve_graph_mode(None, "cuda", True, config) == "none"
    assert resolve_graph_mode("none", "cuda", False, config) == "none"
    with pytest.raises(ConfigError, match=r"'full_decode'.*cannot be captured"):
        resolve_graph_mode("full_decode", "cuda", False, config)
    plain = build({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})
    assert resolve_graph_mode(None, "cuda", False, plain) == "full_and_piecewise"
    for mode, of_latents in {
        "none": "none",
        "piecewise": "piecewise",
        "full_decode": "none",
        "full_and_piecewise": "piecewise",
    }.items():  # a draft model takes no more graphs than the target, nor than it can
        assert graph_mode_of_draft(mode, plain) == mode  # type: ignore[arg-type]
        assert graph_mode_of_draft(mode, config) == of_latents  # type: ignore[arg-type]
    assert resolve_graph_mode(None, "cuda", False, plain, attention="sdpa") == "piecewise"
    assert resolve_graph_mode(None, "cuda", False, plain, attention="mine:Backend") == "piecewise"
    assert resolve_graph_mode("full_decode", "cuda", False, plain, attention="mine:Backend") == "full_decode"
    assert resolve_graph_mode(None, "cuda", False, plain, has_staged_images=True) == "none"
    with pytest.raises(ConfigError, match="attention_backend='sdpa' cannot be captured"):
        resolve_graph_mode("full_decode", "cuda", False, plain, attention="sdpa")
    with pytest.raises(ConfigError, match="stages of a pipeline capture no graphs of a model that sees"):
        resolve_graph_mode("piecewise", "cuda", False, plain, has_staged_images=True)


def test_graphs_of_what_lies_between_give_the_same_tokens(tiny_model: TinyModel) -> None:
    directory, prompts = (
        tiny_model("deepseek-v2-groups", first_k_dense_replace=3),
        random_prompts((1, 20, 33)),
    )
    with tiny_llm(directory, max_num_batched_tokens=16) as llm:
        runner = runner_of(llm)
        with torch.inference_mode():
            runner.capture_graphs("piecewise", RecordedGraphs())
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)
        assert (
            runner.graphs is not None
            and sum(runner.graphs.num_replays.values()) == llm.get_metrics().num_steps
        )


def spoil_free_blocks(llm: LLM) -> None:
    """From now on all free blocks are NaN in every step, and zero when a request gets them."""
    runner, [pool] = runner_of(llm), llm.llm_engine.client.core.scheduler.kv_cache_manager.pools  # type: ignore[attr-defined]
    launch = runner.launch

    def spoil_and_launch(*args: Any) -> Any:
        free = torch.zeros(pool.num_blocks, dtype=torch.bool)
        free[[block.block_id for block in pool.free_queue]] = True
        for cache in runner.paged_model.caches:
            cache.k[~free & cache.k.isnan().all(-1).flatten(1).all(-1)] = 0
            cache.k[free] = torch.nan
            assert cache.v.numel() == 0 and not cache.k[NULL_BLOCK_ID].isnan().any()
        return launch(*args)

    runner.launch = spoil_and_launch  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "sdpa", "max_num_batched_tokens": 9},
        {
            "max_num_batched_tokens": 9,
            "max_model_len": 72,
            "num_gpu_blocks_override": 1 + 9,
            "enable_prefix_caching": False,
        },
        {"speculative_config": {"method": "early_exit", "num_layers": 2, "verification_cost": 0.0}},
        {"kv_cache_dtype": "float16", "dtype": "float32"},
    ],
    ids=["the reference backend", "a tiny pool", "first layers draft", "half a cache"],
)
def test_blocks_that_nobody_holds_are_never_read(tiny_model: TinyModel, settings: dict[str, Any]) -> None:
    directory = tiny_model("deepseek-v2-groups")
    prompts = random_prompts((41, 3, 17))
    with tiny_llm(directory, **settings) as llm:
        if "speculative_config" not in settings:  # a draft's step is another
            spoil_free_blocks(llm)
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)


def test_the_pool_takes_the_memory_of_latents(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("deepseek-v3"), num_gpu_blocks_override=20) as llm:
        [group] = runner_of(llm).limits.groups
        assert group.block_bytes == 3 * (16 + 8) * 4 * BLOCK_SIZE
        worker: Any = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
        assert worker.memory_bytes()["kv_cache"] == group.num_blocks * group.block_bytes


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_projections_are_quantised_and_what_is_absorbed_is_not(
    tiny_model: TinyModel, quantization: str
) -> None:
    # Without experts, of which a rounded router chooses others.
    directory = tiny_model("deepseek-v3", q_lora_rank=32, v_head_dim=16, first_k_dense_replace=3)
    [prompt] = random_prompts((33,))
    with tiny_llm(directory, quantization=quantization, dtype="bfloat16") as llm:
        decoder = runner_of(llm).paged_model.model
        assert isinstance(decoder, Decoder)
        layer = decoder.layers[1]
        kind = Int8Linear if quantization == "int8" else Int4Linear
        assert all(isinstance(linear.method, kind) for linear in layer.mixer.linears)
        assert layer.vectors["kv_b_proj"].dtype == torch.bfloat16
        completion, logits = engine_logits(llm, prompt, max_tokens=2)
    expected = reference_logits(directory, prompt + completion[:-1])
    limit = 0.05 if quantization == "int8" else 0.4
    assert ((logits.float() - expected).norm() / expected.norm()) < limit


def test_layers_that_draft_are_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = tiny_model("deepseek-v3")
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    own = [name for name in tensors if name.startswith("model.layers.2.")]
    more = {name.replace(".2.", ".3.", 1): tensors[name].clone() for name in own}
    save_file(
        {**tensors, **more, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors"
    )
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, "num_nextn_predict_layers": 1}))
    prompts = random_prompts((9,))
    with tiny_llm(tmp_path) as llm:
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)
