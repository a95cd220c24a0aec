"""The decoder's regions are pure functions of tensors, and one after the other they are a plain transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from minivllm.compilation.regions import CompileRegion, Region
from minivllm.errors import ModelError
from minivllm.models.decoder import Decoder
from minivllm.models.decoder_config import DecoderConfig, RotaryConfig
from minivllm.models.model import LayerCache, TokenInputs, token_specs
from minivllm.models.reference import reference_forward
from tests.attention.backends import uncompiled

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_LENGTH = 4, 12, 32
PLAIN = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=MAX_LENGTH,
    rms_norm_eps=1e-5,
    rotary=RotaryConfig(dim=8, original_max_position=MAX_LENGTH),
    layer_rotary=(True,) * 4,
    layer_windows=(None,) * 4,
)
CONFIGS = {
    "plain": PLAIN,
    "some layers without rotary": replace(PLAIN, layer_rotary=(True, False, True, False)),
    "first layer without rotary": replace(PLAIN, layer_rotary=(False, True, True, True)),
    "part of each head rotates": replace(PLAIN, rotary=RotaryConfig(dim=4, original_max_position=MAX_LENGTH)),
    "norms of queries and keys": replace(PLAIN, qk_norm=True),
    "biases": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "tied head": replace(PLAIN, tie_word_embeddings=True),
    "windows": replace(PLAIN, layer_windows=(None, 5, 5, 2)),
    "one layer": replace(PLAIN, num_layers=1, layer_rotary=(True,), layer_windows=(None,)),
    "one head per kv head": replace(PLAIN, num_kv_heads=6),
    "gelu": replace(PLAIN, hidden_act="gelu"),
}


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the model under its Hugging Face name, float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    weights: dict[str, Tensor] = {}

    def add(name: str, *shape: int) -> None:
        values = torch.randn(*shape, generator=generator)
        weights[name] = values / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.3 * values

    add("model.embed_tokens.weight", config.vocab_size, hidden)
    add("model.norm.weight", hidden)
    if not config.tie_word_embeddings:
        add("lm_head.weight", config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        add(layer + "input_layernorm.weight", hidden)
        add(layer + "post_attention_layernorm.weight", hidden)
        for name, out, inputs, has_bias in (
            ("self_attn.q_proj", heads, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv_heads, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv_heads, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, heads, config.o_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            add(f"{layer}{name}.weight", out, inputs)
            if has_bias:
                add(f"{layer}{name}.bias", out)
        if config.qk_norm:
            add(layer + "self_attn.q_norm.weight", dim)
            add(layer + "self_attn.k_norm.weight", dim)
    return weights


def new_decoder(config: DecoderConfig, weights: dict[str, Tensor]) -> Decoder:
    decoder = Decoder(config, dtype=torch.float32, attention_dtype=torch.float32, device=CPU, max_model_len=MAX_LENGTH)
    decoder.load_weights((name, tensor.clone()) for name, tensor in weights.items())
    build_regions(decoder, uncompiled)
    return decoder


def build_regions(decoder: Decoder, compile_region: CompileRegion) -> None:
    """For steps without adapters."""
    caches = [spec.declare(NUM_BLOCKS, BLOCK_SIZE, CPU) for spec in decoder.cache_specs]
    decoder.build_regions(compile_region, token_specs(CPU), caches)


def new_caches(config: DecoderConfig) -> list[LayerCache]:
    shape = (NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]


def run_chunk(decoder: Decoder, caches: list[LayerCache], token_ids: list[int], start: int, table: list[int]) -> Tensor:
    """Logits of every token of a chunk that starts at position ``start`` of one request."""
    positions = torch.arange(start, start + len(token_ids), dtype=torch.int32)
    blocks = torch.tensor(table, dtype=torch.int32)
    slots = (blocks[(positions // BLOCK_SIZE).long()] * BLOCK_SIZE + positions % BLOCK_SIZE).int()
    length = -(-(start + len(token_ids)) // BLOCK_SIZE)

    def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        config = decoder.config
        return gathered_sdpa_attention(
            q, *caches[layer], blocks[:length], start, scale=config.softmax_scale, window=config.layer_windows[layer]
        )

    tokens = torch.tensor(token_ids, dtype=torch.int32)
    inputs = TokenInputs(positions, slots)
    hidden = decoder.forward(tokens, inputs, caches, attend)
    return decoder.logits(hidden, torch.arange(len(token_ids), dtype=torch.int32), inputs)


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 1, 7]], ids=["whole", "token by token", "chunks"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_first_between_and_last_equal_a_plain_transformer(name: str, chunks: list[int]) -> None:
    config = CONFIGS[name]
    weights = random_weights(config)
    decoder, caches = new_decoder(config, weights), new_caches(config)
    token_ids = torch.randint(0, 50, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_forward(config, {name: tensor.double() for name, tensor in weights.items()}, token_ids)
    logits, start = [], 0
    for count in chunks:
        logits.append(run_chunk(decoder, caches, token_ids[start : start + count], start, [7, 2, 9, 4]))
        start += count
    torch.testing.assert_close(torch.cat(logits).double(), expected, rtol=1e-4, atol=1e-4)


def region_calls(decoder: Decoder, caches: list[LayerCache]) -> list[tuple]:
    """(region, arguments) of the first, a between and the last region on made-up inputs."""
    generator = torch.Generator().manual_seed(2)
    config, tokens = decoder.config, 5
    o = torch.randn(tokens, config.num_kv_heads, config.query_group, config.head_dim, generator=generator)
    residual = torch.randn(tokens, config.hidden_size, generator=generator)
    inputs = TokenInputs(
        torch.tensor([3, 4, 5, 0, 0], dtype=torch.int32), torch.tensor([31, 8, 9, 44, 0], dtype=torch.int32)
    )
    ids = torch.tensor([4, 8, 15, 16, 23], dtype=torch.int32)
    layers = decoder.layers
    return [
        (decoder._first, (ids, inputs, decoder.cos_sin, caches[0], decoder.embedding, layers[0].before)),
        (
            decoder._between[0],
            (o, residual, inputs, decoder.cos_sin, caches[1], layers[0].after, layers[1].before),
        ),
        (
            decoder._last,
            (
                o,
                residual,
                torch.tensor([4, 1], dtype=torch.int32),
                None,
                layers[-1].after,
                decoder.final_norm,
                decoder.head.tensors,
            ),
        ),
    ]


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value or () for tensor in tensors_in(item)]


@pytest.mark.parametrize("name", ["plain", "norms of queries and keys", "biases"])
@torch.inference_mode()
def test_a_region_gives_the_same_for_the_same_inputs_and_writes_only_its_cache(name: str) -> None:
    config = CONFIGS[name]
    decoder, caches = new_decoder(config, random_weights(config)), new_caches(config)
    for index, (region, arguments) in enumerate(region_calls(decoder, caches)):
        own_cache = {id(tensor) for tensor in caches[index]} if index < 2 else set()
        everything = tensors_in(arguments) + tensors_in(caches)
        before = [tensor.clone() for tensor in everything]
        once = [tensor.clone() for tensor in tensors_in(region(*arguments))]
        for tensor, copy in zip(everything, before):
            assert id(tensor) in own_cache or torch.equal(tensor, copy), "only the cache given may change"
        changed = {int(slot) for cache in caches[index] for slot in cache.flatten(0, 1).abs().sum((1, 2)).nonzero()}
        assert changed == ({31, 8, 9, 44, 0} if index < 2 else set())
        again = tensors_in(region(*arguments))
        assert all(torch.equal(a, b) for a, b in zip(once, again))
        for cache in caches:
            cache.k.zero_()
            cache.v.zero_()


@torch.inference_mode()
def test_a_region_of_one_layer_serves_another_one_by_its_arguments_alone() -> None:
    decoder, caches = new_decoder(PLAIN, random_weights(PLAIN)), new_caches(PLAIN)
    region, arguments = region_calls(decoder, caches)[1]
    q, residual = region(*arguments[:-2], decoder.layers[1].after, decoder.layers[2].before)
    other_q, other_residual = decoder._between[2](*arguments[:-2], decoder.layers[1].after, decoder.layers[2].before)
    assert torch.equal(q, other_q) and torch.equal(residual, other_residual)
    assert q.is_contiguous() and q.shape == (5, 2, 3, 8)


def test_layers_that_compute_the_same_share_one_region() -> None:
    names: list[str] = []

    def count(region: Region) -> Callable:
        names.append(region.name)
        return region.function

    config = CONFIGS["some layers without rotary"]
    decoder = new_decoder(config, random_weights(config))
    build_regions(decoder, count)
    assert sorted(names) == ["between", "between", "first", "last"]
    assert decoder._between[0] is decoder._between[2] is not decoder._between[1]


def test_a_tensor_without_a_place_is_refused_by_its_name() -> None:
    decoder = Decoder(PLAIN, dtype=torch.float32, attention_dtype=torch.float32, device=CPU, max_model_len=8)
    with pytest.raises(ModelError, match=r"vision\.patch.*LlamaForCausalLM"):
        decoder.load_weights([("vision.patch.weight", torch.zeros(1))])
