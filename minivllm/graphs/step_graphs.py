"""Which steps replay a graph: buckets of sizes, one capture for each, and the dispatcher that picks one.

Steps of decodes alone replay one FULL graph, from token ids to logits. Steps with chunks of prompts replay
PIECEWISE segments between the attention calls, as long as they are not large: from a few hundred tokens on,
launching is no longer what takes the time. (vLLM V1's ``full_and_piecewise``.)
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from minivllm.batch.paged_model import PagedModel
from minivllm.batch.step_inputs import StepInputs
from minivllm.config import CudaGraphMode
from minivllm.graphs.graph_capture import CudaGraphs, GraphBackend, GraphCapture
from minivllm.models.model import AttendWeights, Hidden
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import CacheSpec, StateSpec
from minivllm.specs.layers import StateMixerSpec

logger = logging.getLogger(__name__)

MAX_PIECEWISE_TOKENS = 512


def decode_buckets(max_num_seqs: int, least: int = 1) -> list[int]:
    """Batch sizes of FULL graphs: small powers of two, then steps of eight, then of 32;
    max_num_seqs is always one.

    least: the fewest rows that regions take.
    """
    sizes = {1, 2, 4, 8, *range(16, 65, 8), *range(96, max_num_seqs, 32)}
    return sorted({size for size in sizes if least <= size < max_num_seqs} | {max(least, max_num_seqs)})


def token_buckets(max_num_batched_tokens: int) -> list[int]:
    """Token counts of PIECEWISE graphs: finer where a step is short."""
    sizes = [2, 4, 8, *range(16, 64, 16), *range(64, 257, 32), *range(320, MAX_PIECEWISE_TOKENS + 1, 64)]
    largest = min(MAX_PIECEWISE_TOKENS, max_num_batched_tokens)
    return sorted({size for size in sizes if size < largest} | {max(2, largest)})


def bucket_for(size: int, buckets: list[int]) -> int | None:
    """The smallest bucket that holds size, None if none does."""
    return next((bucket for bucket in buckets if bucket >= size), None)


@dataclass(frozen=True)
class StepHidden:
    """The result of Model.forward, and the logits [tokens,
    vocab] of all tokens where a FULL graph went on."""

    hidden: Hidden
    logits: Tensor | None = None


@dataclass(frozen=True)
class GraphChoice:
    """The graph a step replays, and the number of tokens it is padded to."""

    kind: Literal["full", "piecewise"]
    num_tokens: int


@dataclass
class _Captured:
    capture: GraphCapture
    addresses: list[int]
    hidden: StepHidden


class StepGraphs:
    """Captures the steps of every bucket, and replays the one that fits."""

    def __init__(
        self,
        mode: CudaGraphMode,
        model: PagedModel,
        backend: GraphBackend,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        has_logits: bool = True,
    ) -> None:
        """has_logits: False in a stage of a pipeline before the last one."""
        self.mode = mode
        self._has_logits = has_logits
        self._model = model
        self._backend = backend
        self.full_buckets = (
            decode_buckets(max_num_seqs, model.rows.fewest)
            if mode in ("full_decode", "full_and_piecewise")
            else []
        )
        piecewise = mode in ("piecewise", "full_and_piecewise")
        self.piecewise_buckets = token_buckets(max_num_batched_tokens) if piecewise else []
        self._full: dict[int, _Captured] = {}
        self._piecewise: dict[int, _Captured] = {}
        self._inputs: StepInputs | None = None
        own = model.model
        widths = [_output_width(cache, spec) for cache, spec in model.layers]
        # Attention between segments writes where the next segment reads, whatever the shape of a layer.
        size = max(self.piecewise_buckets, default=0) * max(widths)
        self._o = torch.zeros(size, dtype=own.attention_dtype, device=own.device)
        self.num_replays: Counter[GraphChoice] = Counter()

    def choose(self, counts: list[int], *, in_pieces: bool = False) -> GraphChoice | None:
        """The graph for a step with that many tokens of each request;
        None where calling the regions is as good. in_pieces: see ``PagedModel.runs_in_pieces``."""
        num_tokens = sum(counts)
        is_plain = max(counts) == 1 and not in_pieces
        if is_plain and (size := bucket_for(num_tokens, self.full_buckets)) is not None:
            return GraphChoice("full", size)
        if (size := bucket_for(num_tokens, self.piecewise_buckets)) is not None:
            return GraphChoice("piecewise", size)
        return None

    def capture(self, make_inputs: Callable[[int], StepInputs]) -> None:
        """Capture all buckets, largest first, so that the smaller ones reuse the memory of the larger.

        make_inputs(n): a step of n decodes in the buffers of every later step,
        which touches only the null block.
        """
        with _no_garbage_collection():
            for size in reversed(self.piecewise_buckets):
                self._piecewise[size] = self._capture("piecewise", make_inputs(size), self._piecewise_step)
            for size in reversed(self.full_buckets):
                self._full[size] = self._capture("full", make_inputs(size), self._full_step)
        logger.info(
            "Captured graphs (%s): full for %s decodes, piecewise for %s tokens, %.0f MiB.",
            self.mode,
            self.full_buckets or "no",
            self.piecewise_buckets or "no",
            self._backend.memory_used() / 2**20,
        )

    def forward(self, inputs: StepInputs, choice: GraphChoice) -> StepHidden:
        """Replay the graph that ``choose`` chose. Results are overwritten by the next replay.

        inputs: padded to choice.num_tokens. Raises RuntimeError if they are not where they were at capture.
        """
        captured = (self._full if choice.kind == "full" else self._piecewise)[choice.num_tokens]
        if _addresses(inputs, choice.kind) != captured.addresses:
            raise RuntimeError(
                f"The inputs of a {choice.kind} graph for {choice.num_tokens} tokens moved since it was "
                "captured."
            )
        self.num_replays[choice] += 1
        self._inputs = inputs
        captured.capture.replay()
        self._inputs = None
        return captured.hidden

    def _capture(
        self, kind: str, inputs: StepInputs, step: Callable[[StepInputs, GraphCapture], StepHidden]
    ) -> _Captured:
        capture = GraphCapture(self._backend)
        if isinstance(self._backend, CudaGraphs):
            # A first run outside the graph lets libraries allocate what they want to keep.
            torch.cuda.synchronize()
            with torch.cuda.stream(self._backend.stream):
                step(inputs, _NoCapture(self._backend))
                torch.cuda.synchronize()
                with capture:
                    hidden = step(inputs, capture)
            torch.cuda.synchronize()
        else:
            with capture:
                hidden = step(inputs, capture)
        return _Captured(capture, _addresses(inputs, kind), hidden)

    def _full_step(self, inputs: StepInputs, capture: GraphCapture) -> StepHidden:
        hidden = self._model.forward(inputs)
        if not self._has_logits:
            return StepHidden(hidden)
        rows = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=inputs.token_ids.device)
        return StepHidden(hidden, self._model.model.logits(hidden, rows, inputs.tokens))

    def _piecewise_step(self, inputs: StepInputs, capture: GraphCapture) -> StepHidden:
        self._inputs = inputs
        specs = self._model.model.attention_specs

        def attend(layer: int, q: Tensor, weights: AttendWeights = None) -> Tensor:
            spec = specs[layer]
            if isinstance(spec, StateMixerSpec):
                shape: tuple[int, ...] = len(q), spec.widths[1]
            else:
                shape = *q.shape[:-1], spec.value_dim or q.shape[-1]
            o = self._o[: prod(shape)].view(shape)

            def run() -> None:
                assert self._inputs is not None
                o.copy_(self._model.attend(self._inputs)(layer, q, weights))

            capture.run_between(run)
            return o

        model = self._model
        return StepHidden(model.forward(inputs, attend=attend))


def _output_width(cache: CacheSpec | StateSpec, spec: AttentionSpec | StateMixerSpec) -> int:
    """Values per token that attention, or the update of a state, gives."""
    if isinstance(spec, StateMixerSpec):
        return spec.widths[1]
    assert isinstance(cache, CacheSpec)
    return cache.kv_heads * spec.query_group * cache.head_dim


class _NoCapture(GraphCapture):
    """Runs everything as it comes."""

    def run_between(self, function: Callable[[], None]) -> None:
        function()


def _addresses(inputs: StepInputs, kind: str) -> list[int]:
    """Of all that a graph reads. Features of images would be more than there were at capture."""
    read = inputs.token_ids, inputs.tokens, inputs.slots, inputs.attention if kind == "full" else ()
    return [tensor.data_ptr() for tensor in _tensors(read)] + [len(inputs.token_ids)]


def _tensors(metadata: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries; what is none of these is passed over."""
    if isinstance(metadata, Tensor):
        yield metadata
    elif isinstance(metadata, tuple | list):
        for item in metadata:
            yield from _tensors(item)
    elif isinstance(metadata, dict):
        yield from _tensors(tuple(metadata.values()))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection during a capture could free tensors of other captures, which CUDA forbids there."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
