"""Lower bounds of a step (bytes read, operations), and the measured limits of the machine.

Speeds are compared with these: the roofline (Williams et al. 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from minivllm.batch.layer_caches import block_bytes
from minivllm.linear.layer import Linear
from minivllm.models.decoder import Decoder
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import LatentSpec, MixerSpec, StateMixerSpec

PROBES = 9
WARM_UP_PROBES = 3


@dataclass(frozen=True)
class Machine:
    """Measured limits. copy: bytes read plus bytes written per second. read: bytes read per second by a sum.

    flops: per second of a product of square matrices.
    """

    copy: float
    read: float
    flops: float

    @property
    def bandwidth(self) -> float:
        """The bound of decoding: the faster of the two, so that a slow probe makes no share exceed it."""
        return max(self.copy, self.read)


def seconds_per_call(function: Callable[[], Any], device: torch.device, calls: int = PROBES) -> list[float]:
    """Time of each call, the device's queue emptied before and after;
    the first few are not counted [seconds]."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for call in range(-WARM_UP_PROBES, calls):
        wait()
        started = time.perf_counter()
        function()
        wait()
        if call >= 0:
            seconds.append(time.perf_counter() - started)
    return seconds


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Of a plain copy of ``size`` bytes, the best of several."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * size / min(seconds_per_call(lambda: target.copy_(source), device))


def read_bandwidth(device: torch.device, size: int, calls: int = PROBES) -> float:
    """Of adding up ``size`` bytes of float32, the best of several."""
    # Ones, not zeros: untouched zero pages of a CPU's memory are all one and the same page.
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / min(seconds_per_call(source.sum, device, calls))


def matmul_peak(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Floating point operations per second of a product of ``width`` by ``width`` matrices,
    the best of several."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(width, width, device=device, generator=generator).to(dtype) for _ in range(2))
    return 2 * width**3 / min(seconds_per_call(lambda: a @ b, device))


def measure_machine(device: torch.device, dtype: torch.dtype, size: int, width: int) -> Machine:
    """All limits. size: bytes that are copied and read. width: of the matrices."""
    with torch.inference_mode():
        return Machine(
            copy_bandwidth(device, size), read_bandwidth(device, size), matmul_peak(device, dtype, width)
        )


def tensor_bytes(tensors: Any) -> int:
    """Bytes of all tensors in a nested structure, each once; packed weights at the size of their elements."""
    unique = {id(tensor): tensor for tensor in tree_iter(tensors) if isinstance(tensor, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def weight_bytes(decoder: Decoder, rows: int = 1) -> int:
    """Bytes of weights that a step of so many rows reads:
    all weights but the embedding, of which a few rows are read.

    A weight that is kept in several forms counts in the form that the step's code reads.
    """
    stored = [*(one for layer in decoder.layers for one in layer.stored), decoder.head]
    if decoder.per_layer is not None:
        stored.append(decoder.per_layer.projection)
    read = [
        one.method.read_by(rows, one.tensors) if isinstance(one, Linear) else one.tensors for one in stored
    ]
    return tensor_bytes([read, [layer.vectors for layer in decoder.layers], decoder.final_norm])


def kv_bytes_per_token(decoder: Decoder) -> int:
    """K and V of one token over all layers [bytes]."""
    return block_bytes(decoder, 1)


def kv_tokens_read(config: DecoderConfig, context: float) -> float:
    """Tokens of KV that one decoding request reads per layer, on average over layers: windows cut them."""
    windows = [spec.window for spec in config.attention_specs if isinstance(spec, AttentionSpec)]
    seen = [context if window is None else min(context, window) for window in windows]
    return sum(seen) / len(seen)


def prefill_flops(config: DecoderConfig, tokens: int) -> float:
    """Operations to compute a prompt and the logits of its last token:
    two per weight and token, and attention.

    After the attention of the last layer only the last token is still needed.
    """
    hidden, flops = config.hidden_size, 2.0 * config.hidden_size * config.vocab_size
    if config.per_layer is not None:
        flops += 2.0 * tokens * hidden * config.num_layers * config.per_layer.width
    for index, layer in enumerate(config.layers):
        mixer, is_last = layer.mixer, index == config.num_layers - 1
        before, after, per_key = _mixer_weights(mixer, hidden)
        after += 3 * hidden * layer.mlp.active_inner
        after += 2 * hidden * layer.per_layer.width if layer.per_layer is not None else 0
        flops += 2.0 * tokens * before + 2.0 * (1 if is_last else tokens) * after
        if isinstance(
            mixer, StateMixerSpec
        ):  # the update of a state is linear in tokens, and small beside these
            continue
        reach = tokens if mixer.attend.window is None else min(mixer.attend.window, tokens)
        # Query i sees min(i, reach) keys; each costs a product with K and one with V.
        keys = reach * (reach + 1) / 2 + (tokens - reach) * reach
        flops += 2.0 * per_key * keys
    return flops


def _mixer_weights(spec: MixerSpec, hidden: int) -> tuple[int, int, int]:
    """Weights that are multiplied with each token before the cut and after it,
    and values that a query is multiplied with for each key."""
    if isinstance(spec, StateMixerSpec):
        return hidden * spec.widths[0], hidden * spec.widths[1], 0
    if isinstance(spec, LatentSpec):
        query, rank = spec.heads * (spec.nope_dim + spec.rope_dim), spec.query_rank
        queries = hidden * query if rank is None else (hidden + query) * rank
        ahead = queries + hidden * spec.head_dim + spec.heads * spec.nope_dim * spec.kv_rank
        behind = spec.heads * spec.value_dim * (spec.kv_rank + hidden)
        return ahead, behind, spec.heads * (spec.head_dim + spec.kv_rank)
    size = spec.heads * spec.head_dim
    return (
        hidden * (size + (len(spec.projected) - 1) * spec.kv_heads * spec.head_dim),
        (1 + spec.output_gate) * size * hidden,
        2 * size,
    )
