"""Another ``Model``, related to the decoder by nothing but the protocol, generates through the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.paged_cache import write_kv
from minivllm.attention import find_attention
from minivllm.batch.paged_model import RunnerLimits
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, specs_of
from minivllm.config import SpeculativeConfig
from minivllm.device.policy import DevicePolicy
from minivllm.errors import ConfigError
from minivllm.linear.layer import Linear
from minivllm.messages import EngineRequest, NewRequestData, SchedulerOutput
from minivllm.models.decoder_config import AttentionSpec
from minivllm.models.model import (
    TOKENS,
    Attend,
    CacheSpec,
    Hidden,
    HiddenTap,
    LayerCache,
    Model,
    TokenInputs,
    token_specs,
)
from minivllm.sampling_params import SamplingParams
from minivllm.worker.model_runner import ModelRunner
from tests.attention.backends import uncompiled

CPU = torch.device("cpu")
VOCAB, WIDTH = 40, 48
Shape = tuple[int, int, int]
"""KV heads, query heads per KV head and head size of a layer; their product is WIDTH."""
EQUAL: tuple[Shape, ...] = ((2, 3, 8),) * 3
DIFFERENT: tuple[Shape, ...] = ((2, 3, 8), (3, 1, 16), (1, 6, 8))


class AttentionOnly:
    """A learned position is added to each token; three layers of attention follow: no norm, no rotation, no MLP."""

    vocab_size, feature_size = VOCAB, 0
    dtype = attention_dtype = torch.float32
    device = CPU
    weights_per_token = 1
    linears: Sequence[tuple[str, Linear]] = ()

    def __init__(self, shapes: tuple[Shape, ...] = EQUAL) -> None:
        self.tap: HiddenTap | None = None
        self.weights: dict[str, Tensor] = {}
        self.attention_specs = [AttentionSpec(None, 0.5, group) for _, group, _ in shapes]
        self.cache_specs = [CacheSpec(kv_heads, dim, torch.float32) for kv_heads, _, dim in shapes]
        self.project: list[Callable]

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self.weights = dict(weights)

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        self.weights = {name: change(tensor) for name, tensor in self.weights.items()}

    def take_weights(self, other: Any) -> None:
        self.weights = other.weights

    def build_regions(self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]) -> None:
        x = TensorSpec((TOKENS, WIDTH), torch.float32, CPU)
        self.project = [
            compile_region(
                Region("project", project, {"x": x, "weight": specs_of(weight), "tokens": tokens, "cache": cache})
            )
            for weight, cache in zip((self.weights[str(layer)] for layer in range(3)), caches)
        ]

    def forward(self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend) -> Hidden:
        x = self.weights["embedding"][token_ids] + self.weights["positions"][tokens.positions]
        for layer, cache in enumerate(caches):
            x = x + attend(layer, self.project[layer](x, self.weights[str(layer)], tokens, cache)).flatten(1)
        return (x,)

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        return self.hidden_states(hidden, rows, tokens) @ self.weights["embedding"].T

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        return hidden[0][rows]


def project(x: Tensor, weight: Tensor, tokens: TokenInputs, cache: LayerCache) -> Tensor:
    kv_heads, dim = cache.k.shape[2:]
    q, k, v = (x @ weight).split([WIDTH, kv_heads * dim, kv_heads * dim], dim=-1)
    write_kv(cache.k, cache.v, k.unflatten(1, (-1, dim)), v.unflatten(1, (-1, dim)), tokens.slot_mapping)
    return q.reshape(len(x), kv_heads, -1, dim).contiguous()


def random_weights(shapes: tuple[Shape, ...] = EQUAL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"embedding": (VOCAB, WIDTH), "positions": (64, WIDTH)}
    sizes |= {str(layer): (WIDTH, WIDTH + 2 * kv * dim) for layer, (kv, _, dim) in enumerate(shapes)}
    return {name: torch.randn(size, generator=generator) / 4 for name, size in sizes.items()}


def greedy_by_hand(weights: dict[str, Tensor], shapes: tuple[Shape, ...], text: list[int], count: int) -> list[int]:
    """The same without a cache, the whole text anew for every token."""
    for _ in range(count):
        x = weights["embedding"][text] + weights["positions"][: len(text)]
        for layer, (kv_heads, group, dim) in enumerate(shapes):
            q, k, v = (x @ weights[str(layer)]).split([WIDTH, kv_heads * dim, kv_heads * dim], dim=-1)
            q, k, v = (y.unflatten(1, (-1, dim)).transpose(0, 1) for y in (q, k, v))
            k, v = (y.repeat_interleave(group, 0) for y in (k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
            x = x + o.transpose(0, 1).flatten(1)
        text = [*text, int((x[-1] @ weights["embedding"].T).argmax())]
    return text[-count:]


@pytest.mark.parametrize("shapes", [EQUAL, DIFFERENT], ids=["equal layers", "layers of different shapes"])
@torch.inference_mode()
def test_a_model_that_is_no_decoder_generates_through_the_runner(shapes: tuple[Shape, ...]) -> None:
    weights = random_weights(shapes)
    model: Model = AttentionOnly(shapes)
    model.load_weights(weights.items())
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, block_size=4, num_blocks=17)
    policy = DevicePolicy.of(CPU)
    runner = ModelRunner(model, RegionCompiler(enabled=False), limits, policy, find_attention("sdpa"))
    model.build_regions(uncompiled, *declared(model, limits))  # which sees to it that arguments are the declared ones
    prompts = {"a": [3, 1, 4, 1, 5, 9, 2], "b": [6], "c": [5, 3, 5, 8]}
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
        for index, (name, prompt) in enumerate(prompts.items())
    ]
    counts = {name: len(prompt) for name, prompt in prompts.items()}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for step in range(10):
        output = runner.execute(SchedulerOutput(num_scheduled_tokens=counts, new_requests=[] if step else new))
        counts = dict.fromkeys(prompts, 1)
        for name, sampled in output.sampled_token_ids.items():
            tokens[name] += sampled
    assert tokens == {name: greedy_by_hand(weights, shapes, prompt, 10) for name, prompt in prompts.items()}


def declared(model: Model, limits: RunnerLimits) -> tuple[TokenInputs, list[LayerCache]]:
    """What the runner's steps are, as regions declare them."""
    caches = [spec.declare(limits.num_blocks, limits.block_size, model.device) for spec in model.cache_specs]
    return token_specs(model.device), caches


@torch.inference_mode()
def test_what_a_drafter_needs_beyond_the_protocol_is_refused_with_a_sentence() -> None:
    model = AttentionOnly()
    model.load_weights(random_weights().items())
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, block_size=4, num_blocks=17)
    runner = ModelRunner(model, RegionCompiler(enabled=False), limits, DevicePolicy.of(CPU), find_attention("sdpa"))
    with pytest.raises(ConfigError, match="AttentionOnly cannot leave out layers"):
        runner.speculate(SpeculativeConfig(method="early_exit", num_layers=1), None)
