"""Another ``Model``, related to the decoder by nothing but the protocol, generates through the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels_triton_free.attention
import minivllm.attention.tiles
from kernels_triton_free.paged_cache import write_kv
from minivllm.attention import FlexAttention, find_attention
from minivllm.batch.paged_model import RunnerLimits
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, specs_of
from minivllm.config import SpeculativeConfig
from minivllm.device.policy import DevicePolicy
from minivllm.errors import ConfigError
from minivllm.kv_cache.specs import one_group
from minivllm.linear.layer import Linear
from minivllm.messages import EngineRequest, NewRequestData, SchedulerOutput
from minivllm.models.model import Attend, Hidden, HiddenTap, Model, TokenInputs, token_specs
from minivllm.sampling_params import SamplingParams
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import TOKENS, CacheSpec, LayerCache
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.worker import run_on_null_block
from tests.attention.backends import CUDA_POLICY, listed_attention, uncompiled
from tutorials.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")
VOCAB, WIDTH = 40, 48
Shape = tuple[int, int, int]
"""KV heads, query heads per KV head and head size of a layer; their product is WIDTH."""
EQUAL: tuple[Shape, ...] = ((2, 3, 8),) * 3
DIFFERENT: tuple[Shape, ...] = ((2, 3, 8), (3, 1, 16), (1, 6, 8))
PLAIN: tuple[dict[str, Any], ...] = ({}, {}, {})
VARIED: tuple[dict[str, Any], ...] = (
    {"window": 3, "has_sinks": True},
    {"chunk": 5, "soft_cap": 0.5},
    {"has_sinks": True},
)
"""What the specs of the layers say beyond the scale."""


class AttentionOnly:
    """A learned position is added to each token; three layers of attention follow: no norm, no rotation, no
    MLP. A layer with sinks takes them from the embedding."""

    vocab_size, feature_size = VOCAB, 0
    dtype = attention_dtype = torch.float32
    device = CPU
    weights_per_token = position_axes = 1
    linears: Sequence[tuple[str, Linear]] = ()

    def __init__(self, shapes: tuple[Shape, ...] = EQUAL, says: tuple[dict[str, Any], ...] = PLAIN) -> None:
        self.tap: HiddenTap | None = None
        self.weights: dict[str, Tensor] = {}
        self.attention_specs = [
            AttentionSpec(**{"window": None, "scale": 0.5, "query_group": group} | own)
            for (_, group, _), own in zip(shapes, says)
        ]
        self.cache_specs = [CacheSpec(kv_heads, dim, torch.float32) for kv_heads, _, dim in shapes]
        self.project: list[Callable]

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self.weights = dict(weights)

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        self.weights = {name: change(tensor) for name, tensor in self.weights.items()}

    def take_weights(self, other: Any) -> None:
        self.weights = other.weights

    def build_regions(
        self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        x = TensorSpec((TOKENS, WIDTH), torch.float32, CPU)
        self.project = [
            compile_region(
                Region(
                    "project", project, {"x": x, "weight": specs_of(weight), "tokens": tokens, "cache": cache}
                )
            )
            for weight, cache in zip((self.weights[str(layer)] for layer in range(3)), caches)
        ]

    def forward(
        self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend
    ) -> Hidden:
        x = self.weights["embedding"][token_ids] + self.weights["positions"][tokens.positions]
        for layer, (cache, spec) in enumerate(zip(caches, self.attention_specs)):
            q = self.project[layer](x, self.weights[str(layer)], tokens, cache)
            sinks = sinks_of(self.weights, layer, q.shape[1] * q.shape[2]) if spec.has_sinks else None
            x = x + attend(layer, q, sinks).flatten(1)
        return (x,)

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        return self.hidden_states(hidden, rows, tokens) @ self.weights["embedding"].T

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        return hidden[0][rows]


def project(x: Tensor, weight: Tensor, tokens: TokenInputs, cache: LayerCache) -> Tensor:
    kv_heads, dim = cache.k.shape[2:]
    q, k, v = (x @ weight).split([WIDTH, kv_heads * dim, kv_heads * dim], dim=-1)
    write_kv(cache.k, cache.v, k.unflatten(1, (-1, dim)), v.unflatten(1, (-1, dim)), cache.slots)
    return q.reshape(len(x), kv_heads, -1, dim).contiguous()


def sinks_of(weights: dict[str, Tensor], layer: int, heads: int) -> Tensor:
    return 8 * weights["embedding"][layer, :heads]


def random_weights(shapes: tuple[Shape, ...] = EQUAL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"embedding": (VOCAB, WIDTH), "positions": (64, WIDTH)}
    sizes |= {str(layer): (WIDTH, WIDTH + 2 * kv * dim) for layer, (kv, _, dim) in enumerate(shapes)}
    return {name: torch.randn(size, generator=generator) / 4 for name, size in sizes.items()}


def greedy_by_hand(model: AttentionOnly, text: list[int], count: int) -> list[int]:
    """The same without a cache, the whole text anew for every token."""
    weights = model.weights
    for _ in range(count):
        x = weights["embedding"][text] + weights["positions"][: len(text)]
        for layer, (spec, cache) in enumerate(zip(model.attention_specs, model.cache_specs)):
            group, kv_heads, dim = spec.query_group, cache.kv_heads, cache.head_dim
            q, k, v = (x @ weights[str(layer)]).split([WIDTH, kv_heads * dim, kv_heads * dim], dim=-1)
            q, k, v = (y.unflatten(1, (-1, dim)).transpose(0, 1) for y in (q, k, v))
            k, v = (y.repeat_interleave(group, 0) for y in (k, v))
            scores = q @ k.transpose(1, 2) * 0.5
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            distance = torch.arange(len(text))[:, None] - torch.arange(len(text))
            visible = (distance >= 0) & (distance < (spec.window or len(text)))
            if spec.chunk is not None:
                chunk = torch.arange(len(text)) // spec.chunk
                visible &= chunk[:, None] == chunk
            sinks = sinks_of(weights, layer, len(q)) if spec.has_sinks else torch.full((len(q),), -torch.inf)
            scores = scores.masked_fill(~visible, -torch.inf)
            scores = torch.cat([sinks[:, None, None].expand(-1, len(text), 1), scores], dim=-1)
            x = x + (scores.softmax(-1)[..., 1:] @ v).transpose(0, 1).flatten(1)
        text = [*text, int((x[-1] @ weights["embedding"].T).argmax())]
    return text[-count:]


PROMPTS = {"a": [3, 1, 4, 1, 5, 9, 2], "b": [6], "c": [5, 3, 5, 8]}
LIMITS = RunnerLimits(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, groups=(one_group(3, 4, num_blocks=17),)
)


@pytest.mark.parametrize("shapes", [EQUAL, DIFFERENT], ids=["equal layers", "layers of different shapes"])
@torch.inference_mode()
def test_a_model_that_is_no_decoder_generates_through_the_runner(shapes: tuple[Shape, ...]) -> None:
    weights = random_weights(shapes)
    model = AttentionOnly(shapes)
    model.load_weights(weights.items())
    policy = DevicePolicy.of(CPU)
    runner = ModelRunner(model, RegionCompiler(enabled=False), LIMITS, policy, find_attention("sdpa"))
    model.build_regions(
        uncompiled, *declared(model, LIMITS)
    )  # which sees to it that arguments are the declared ones
    check_generates(runner, model)


@pytest.mark.parametrize("mode", ["none", "full_decode", "full_and_piecewise"])
@pytest.mark.parametrize("shapes", [EQUAL, DIFFERENT], ids=["equal layers", "layers of different shapes"])
@torch.inference_mode()
def test_all_that_specs_say_with_the_choices_of_a_gpu_and_its_graphs(
    shapes: tuple[Shape, ...], mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up has written into the null block before, whose last slot stands for the sinks."""
    for module in (kernels_triton_free.attention, minivllm.attention.tiles):
        monkeypatch.setattr(module, "paged_flex_attention", listed_attention)
    model = AttentionOnly(shapes, VARIED)
    model.load_weights(random_weights(shapes).items())
    runner = ModelRunner(model, RegionCompiler(enabled=False), LIMITS, CUDA_POLICY, FlexAttention)
    run_on_null_block(runner, [9, 4, 1])
    assert all(bool(cache.k[0, 0].any()) and not cache.v[0, 1:].any() for cache in runner.paged_model.caches)
    if mode != "none":
        runner.capture_graphs(mode, RecordedGraphs())
    check_generates(runner, model)
    assert mode == "none" or (runner.graphs is not None and sum(runner.graphs.num_replays.values()) > 8)


@pytest.mark.parametrize("piece", ["window", "chunk", "soft_cap", "has_sinks"])
def test_the_tokens_above_would_be_others_if_a_piece_were_left_out(piece: str) -> None:
    models = [
        AttentionOnly(EQUAL, VARIED),
        AttentionOnly(EQUAL, tuple({n: own[n] for n in own if n != piece} for own in VARIED)),
    ]
    for model in models:
        model.load_weights(random_weights().items())
    expected, others = (
        [greedy_by_hand(model, prompt, 10) for prompt in PROMPTS.values()] for model in models
    )
    assert expected != others


def test_sinks_must_be_given_where_the_spec_has_them_and_only_there() -> None:
    model = AttentionOnly(EQUAL, VARIED)
    model.load_weights(random_weights().items())
    runner = ModelRunner(
        model, RegionCompiler(enabled=False), LIMITS, DevicePolicy.of(CPU), find_attention("sdpa")
    )
    inputs = runner.paged_model.build([], 2)
    q = torch.zeros(2, 2, 3, 8)
    for layer, sinks in ((0, None), (1, torch.zeros(6))):
        with pytest.raises(TypeError, match=f"Layer {layer} must give its sinks if, and only if"):
            runner.paged_model.attend(inputs)(layer, q, sinks)


def check_generates(runner: ModelRunner, model: AttentionOnly) -> None:
    """Ten tokens of three requests in one batch are those that come out by hand."""
    new = [
        NewRequestData(
            request=EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(temperature=0.0),
                max_tokens=10,
                seed=0,
                arrival_time=0.0,
            ),
            block_ids=(list(range(1 + 5 * index, 6 + 5 * index)),),
            num_computed_tokens=0,
        )
        for index, (name, prompt) in enumerate(PROMPTS.items())
    ]
    counts = {name: len(prompt) for name, prompt in PROMPTS.items()}
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for step in range(10):
        output = runner.execute(
            SchedulerOutput(num_scheduled_tokens=counts, new_requests=[] if step else new)
        )
        counts = dict.fromkeys(PROMPTS, 1)
        for name, sampled in output.sampled_token_ids.items():
            tokens[name] += sampled
    assert tokens == {name: greedy_by_hand(model, prompt, 10) for name, prompt in PROMPTS.items()}


def declared(model: Model, limits: RunnerLimits) -> tuple[TokenInputs, list[LayerCache]]:
    """What the runner's steps are, as regions declare them."""
    caches = [
        spec.declare(limits.groups[0].num_blocks, limits.groups[0].block_size, model.device)
        for spec in model.cache_specs
    ]
    return token_specs(model.device), caches


@torch.inference_mode()
def test_what_a_drafter_needs_beyond_the_protocol_is_refused_with_a_sentence() -> None:
    model = AttentionOnly()
    model.load_weights(random_weights().items())
    runner = ModelRunner(
        model, RegionCompiler(enabled=False), LIMITS, DevicePolicy.of(CPU), find_attention("sdpa")
    )
    with pytest.raises(ConfigError, match="AttentionOnly cannot leave out layers"):
        runner.speculate(SpeculativeConfig(method="early_exit", num_layers=1), None)
