"""The decoder's regions are pure functions of tensors,
and one after the other they are a plain transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from kernels_triton_free.strips.visibility import Bounds
from minivllm.checkpoints.checkpoint import expected_shapes
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.package_keys import region_key
from minivllm.compilation.regions import CompileRegion, Region
from minivllm.errors import ModelError
from minivllm.models.decoder import Decoder
from minivllm.models.model import TokenInputs, token_specs
from minivllm.models.reference import reference_forward
from minivllm.specs.attention import AttentionSpec, RotaryConfig
from minivllm.specs.caches import LayerCache
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import LayerSpec, MlpSpec, NormSpec, PositionScaling, SelfAttentionSpec
from tests.attention.backends import uncompiled

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_LENGTH = 4, 12, 32
FULL = AttentionSpec(None, 8**-0.5)
LAYER = LayerSpec(
    mixer=SelfAttentionSpec(heads=6, kv_heads=2, head_dim=8, attend=FULL),
    mlp=MlpSpec(inner=40),
    norms=NormSpec(eps=1e-5),
)
TABLE = RotaryConfig(dim=8, original_max_position=MAX_LENGTH)
PLAIN = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=24,
    max_position_embeddings=MAX_LENGTH,
    rms_norm_eps=1e-5,
    layers=(LAYER,) * 4,
    rotary=(TABLE,),
)


def mixers(**changes: Any) -> DecoderConfig:
    """PLAIN with every layer's mixer changed: a list has one value for each layer."""
    given = [{name: v[i] if isinstance(v, list) else v for name, v in changes.items()} for i in range(4)]
    return replace(PLAIN, layers=tuple(replace(LAYER, mixer=replace(LAYER.mixer, **own)) for own in given))


def with_layers(**changes: Any) -> DecoderConfig:
    return replace(PLAIN, layers=(replace(LAYER, **changes),) * 4)


CONFIGS = {
    "plain": PLAIN,
    "some layers without rotary": mixers(rotary=[0, None, 0, None]),
    "first layer without rotary": mixers(rotary=[None, 0, 0, 0]),
    "part of each head rotates": replace(PLAIN, rotary=(replace(TABLE, dim=4),)),
    "two rotary tables": replace(mixers(rotary=[0, 1, 1, 0]), rotary=(TABLE, replace(TABLE, theta=100.0))),
    "tables of two widths": replace(mixers(rotary=[0, 1, 1, 0]), rotary=(TABLE, replace(TABLE, dim=4))),
    "norms of queries and keys": mixers(qk_norm="per head"),
    "norms over all heads": mixers(qk_norm="whole width"),
    "norms after": with_layers(norms=NormSpec(eps=1e-5, place="after", after_eps=0.1)),
    "norms before and after": with_layers(norms=NormSpec(eps=1e-5, place="both", after_eps=0.1)),
    "biases": with_layers(
        mixer=replace(LAYER.mixer, qkv_bias=True, o_bias=True), mlp=MlpSpec(inner=40, bias=True)
    ),
    "tied head": replace(PLAIN, tie_word_embeddings=True),
    "windows": mixers(
        attend=[FULL, FULL._replace(window=5), FULL._replace(window=5), FULL._replace(window=2)]
    ),
    "another scale": mixers(attend=FULL._replace(scale=0.9)),
    "queries scaled by position": mixers(query_scaling=PositionScaling(beta=0.5, interval=3)),
    "heads of two shapes": mixers(heads=[6, 4, 4, 6], kv_heads=[2, 2, 1, 2], head_dim=[8, 8, 16, 8]),
    "scaled embedding and capped logits": replace(PLAIN, embedding_scale=4.9, logits_soft_cap=2.0),
    "one layer": replace(PLAIN, layers=(LAYER,)),
    "one head per kv head": mixers(kv_heads=6),
    "gelu": with_layers(mlp=MlpSpec(inner=40, activation="gelu")),
    "one narrow MLP": replace(PLAIN, layers=(LAYER, replace(LAYER, mlp=MlpSpec(inner=12)), LAYER, LAYER)),
}


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the model under its name, float32."""
    generator = torch.Generator().manual_seed(seed)

    def values(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(*shape, generator=generator)
        return noise / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.3 * noise

    return {name: values(shape) for name, shape in expected_shapes(config).items()}


def new_decoder(config: DecoderConfig, weights: dict[str, Tensor]) -> Decoder:
    decoder = Decoder(
        config, dtype=torch.float32, attention_dtype=torch.float32, device=CPU, max_model_len=MAX_LENGTH
    )
    decoder.load_weights((name, tensor.clone()) for name, tensor in weights.items())
    build_regions(decoder, uncompiled)
    return decoder


def build_regions(decoder: Decoder, compile_region: CompileRegion) -> None:
    """For steps without adapters."""
    caches = [spec.declare(NUM_BLOCKS, BLOCK_SIZE, CPU) for spec in decoder.cache_specs]
    decoder.build_regions(compile_region, token_specs(CPU), caches)


def new_caches(config: DecoderConfig) -> list[LayerCache]:
    shapes = [(NUM_BLOCKS, BLOCK_SIZE, layer.mixer.kv_heads, layer.mixer.head_dim) for layer in config.layers]
    return [LayerCache(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]


def run_chunk(
    decoder: Decoder, caches: list[LayerCache], token_ids: list[int], start: int, table: list[int]
) -> Tensor:
    """Logits of every token of a chunk that starts at position ``start`` of one request."""
    positions = torch.arange(start, start + len(token_ids), dtype=torch.int32)
    blocks = torch.tensor(table, dtype=torch.int32)
    slots = (blocks[(positions // BLOCK_SIZE).long()] * BLOCK_SIZE + positions % BLOCK_SIZE).int()
    length = -(-(start + len(token_ids)) // BLOCK_SIZE)

    def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        spec = decoder.attention_specs[layer]
        low = torch.clamp(positions - (spec.window or BLOCK_SIZE * len(table)) + 1, min=0)
        bounds = Bounds(positions, low)
        return gathered_sdpa_attention(
            q, *caches[layer][:2], blocks[:length], start, bounds=bounds, scale=spec.scale
        )

    tokens = torch.tensor(token_ids, dtype=torch.int32)
    inputs, placed = TokenInputs(positions), [cache.at(slots) for cache in caches]
    hidden = decoder.forward(tokens, inputs, placed, attend)
    return decoder.logits(hidden, torch.arange(len(token_ids), dtype=torch.int32), inputs)


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 1, 7]], ids=["whole", "token by token", "chunks"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_first_between_and_last_equal_a_plain_transformer(name: str, chunks: list[int]) -> None:
    config = CONFIGS[name]
    weights = random_weights(config)
    decoder, caches = new_decoder(config, weights), new_caches(config)
    token_ids = torch.randint(0, 50, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_forward(
        config, {name: tensor.double() for name, tensor in weights.items()}, token_ids
    )
    logits, start = [], 0
    for count in chunks:
        logits.append(run_chunk(decoder, caches, token_ids[start : start + count], start, [7, 2, 9, 4]))
        start += count
    torch.testing.assert_close(torch.cat(logits).double(), expected, rtol=1e-4, atol=1e-4)


Calls = list[tuple[Region, tuple[Tensor, ...]]]


def region_calls(decoder: Decoder, caches: list[LayerCache]) -> Calls:
    """Every region of a step with what it was called with: the first, those between, the last."""
    calls: Calls = []

    def note(region: Region) -> Callable:
        def run(*tensors: Tensor) -> Any:
            calls.append(
                (
                    region,
                    tuple(tensor.clone() if tensor.dtype == torch.int32 else tensor for tensor in tensors),
                )
            )
            return region.function(*tensors)

        return run

    build_regions(decoder, note)
    run_chunk(decoder, caches, [4, 8, 15, 16, 23], 3, [7, 2, 9, 4])
    return calls


def results_of(region: Region, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    out = region.function(*tensors)
    return [out] if isinstance(out, Tensor) else list(out)


@pytest.mark.parametrize("name", ["plain", "norms of queries and keys", "biases"])
@torch.inference_mode()
def test_a_region_gives_the_same_for_the_same_inputs_and_writes_only_its_cache(name: str) -> None:
    config = CONFIGS[name]
    decoder, caches = new_decoder(config, random_weights(config)), new_caches(config)
    calls = region_calls(decoder, caches)
    assert [region.name for region, _ in calls] == ["first", "between", "between", "between", "last"]
    for index, (region, tensors) in enumerate(calls):
        for cache in caches:
            cache.k.zero_()
            cache.v.zero_()
        own = {id(tensor) for tensor in caches[index][:2]} if index < len(caches) else set()
        everything = [*tensors, *(tensor for cache in caches for tensor in cache[:2])]
        before = [tensor.clone() for tensor in everything]
        once = [tensor.clone() for tensor in results_of(region, tensors)]
        for tensor, copy in zip(everything, before):
            assert id(tensor) in own or torch.equal(tensor, copy), "only the cache given may change"
        changed = {
            int(slot)
            for tensor in caches[min(index, 3)][:2]
            for slot in tensor.flatten(0, 1).abs().sum((1, 2)).nonzero()
        }
        assert changed == ({31, 8, 9, 10, 11} if index < len(caches) else set())
        assert all(torch.equal(a, b) for a, b in zip(once, results_of(region, tensors), strict=True))


@torch.inference_mode()
def test_a_region_of_one_layer_serves_another_one_by_its_arguments_alone() -> None:
    decoder, caches = new_decoder(PLAIN, random_weights(PLAIN)), new_caches(PLAIN)
    _, first, second, *_ = region_calls(decoder, caches)
    assert region_key(first[0]) == region_key(second[0])
    swapped = zip(results_of(first[0], second[1]), results_of(*second), strict=True)
    assert all(torch.equal(one, other) for one, other in swapped)
    [q] = [out for out in results_of(*first) if out.dim() == 4]
    assert q.is_contiguous() and q.shape == (5, 2, 3, 8)


@pytest.mark.parametrize(
    ("name", "kinds"),
    {
        "plain": "aaa",
        "some layers without rotary": "aba",
        "windows": "aaa",
        "two rotary tables": "aaa",
        "tables of two widths": "aab",
        "heads of two shapes": "abc",
        "one narrow MLP": "aba",
    }.items(),
)
def test_layers_that_compute_the_same_share_one_region(name: str, kinds: str) -> None:
    """kinds: the layers with equal letters share the region after their attention."""
    asked: list[Region] = []

    class Counting(RegionCompiler):
        made = 0

        def __call__(self, region: Region) -> Callable:
            asked.append(region)
            return super().__call__(region)

        def _make(self, region: Region) -> Callable:
            self.made += 1
            return region.function

    config, compiler = CONFIGS[name], Counting(enabled=True)
    decoder = new_decoder(config, random_weights(config))
    asked.clear()
    build_regions(decoder, compiler)
    assert [region.name for region in asked] == ["first", *["between"] * len(kinds), "last"]
    keys = [region_key(region) for region in asked[1:-1]]
    assert [keys.index(key) for key in keys] == [kinds.index(kind) for kind in kinds]
    assert compiler.made == 2 + len(set(kinds))


def test_every_part_of_a_spec_tells_compiled_code_apart() -> None:
    """Packages on disk are found by these constants: what is computed differently must not look the same."""
    seen: dict[str, str] = {}
    for name, config in CONFIGS.items():
        decoder, regions = new_decoder(config, random_weights(config)), []

        def note(region: Region, regions: list[Region] = regions) -> Callable:
            regions.append(region)
            return region.function

        build_regions(decoder, note)
        described = repr([(region.name, region.constants, region.inputs) for region in regions])
        assert " at 0x" not in described
        if name not in (
            "windows",
            "another scale",
            "two rotary tables",
            "tied head",
        ):  # not in regions, or inputs
            assert described not in seen, (name, seen.get(described))
            seen[described] = name


@pytest.mark.parametrize(
    "name",
    [
        "norms before and after",
        pytest.param("norms over all heads", marks=pytest.mark.slow),
        pytest.param("queries scaled by position", marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_what_a_spec_adds_is_traced_without_a_break(name: str) -> None:
    """As one graph, of eager operators: what they are compiled to is judged where a whole model is."""
    config = replace(CONFIGS[name], embedding_scale=4.9, logits_scale=0.5, logits_soft_cap=2.0)
    decoder, caches = new_decoder(config, random_weights(config)), new_caches(config)
    for region, tensors in region_calls(decoder, caches):
        found = torch.compile(region.function, backend="aot_eager", fullgraph=True)(*tensors)
        for own, wanted in zip(
            [found] if isinstance(found, Tensor) else found, results_of(region, tensors), strict=True
        ):
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)


def test_a_tensor_without_a_place_is_refused_by_its_name() -> None:
    decoder = Decoder(PLAIN, dtype=torch.float32, attention_dtype=torch.float32, device=CPU, max_model_len=8)
    with pytest.raises(ModelError, match=r"vision\.patch.*LlamaForCausalLM"):
        decoder.load_weights([("vision.patch.weight", torch.zeros(1))])
