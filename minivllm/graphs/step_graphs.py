"""Which steps replay a graph: buckets of sizes, one capture for each, and the dispatcher that picks one.

Steps of decodes alone replay one FULL graph, from token ids to logits. So do steps that verify drafts: a
graph of R rows has room for the most tokens of a verified row in each, R * (1 + k) of them, and its tiles say
which tokens a row really has. Steps with chunks of prompts replay PIECEWISE segments between the attention
calls, as long as they are not large: from a few hundred tokens on, launching is no longer what takes the
time. (vLLM V1's ``full_and_piecewise``.)
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from minivllm.batch.paged_model import PagedModel
from minivllm.batch.step_inputs import Row, StepInputs
from minivllm.config import CudaGraphMode
from minivllm.graphs.graph_capture import CudaGraphs, GraphBackend, GraphCapture
from minivllm.models.model import AttendWeights, Hidden
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import CacheSpec, StateSpec
from minivllm.specs.layers import StateMixerSpec

logger = logging.getLogger(__name__)

MAX_PIECEWISE_TOKENS = 512
PADDED_FREELY, MOST_PADDED = 64, 2
"""Tokens of a graph of rows with few tokens: padding to so many should take a GPU little, since it reads the
weights once for all of them; else at most so many for each token that a step has. Neither was measured."""


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


def verify_buckets(max_num_seqs: int, few_tokens: int, max_num_batched_tokens: int) -> list[int]:
    """Numbers of rows of FULL graphs in which each row has up to ``few_tokens``, as many as
    PIECEWISE graphs would take."""
    most = min(MAX_PIECEWISE_TOKENS, max_num_batched_tokens) // few_tokens if few_tokens > 1 else 0
    return decode_buckets(min(max_num_seqs, most)) if most else []


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
    """The graph a step replays, and the number of tokens it is padded to. num_short: see StepRows."""

    kind: Literal["full", "verify", "piecewise"]
    num_tokens: int
    num_short: int = 0


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
        self._few_tokens = model.captured_few if self.full_buckets else 0
        self.verify_buckets = verify_buckets(max_num_seqs, self._few_tokens, max_num_batched_tokens)
        piecewise = mode in ("piecewise", "full_and_piecewise")
        self.piecewise_buckets = token_buckets(max_num_batched_tokens) if piecewise else []
        self._captured: dict[GraphChoice, _Captured] = {}
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
        num_tokens, most, few = sum(counts), max(counts), self._few_tokens
        is_plain = most == 1 and not in_pieces
        if is_plain and (size := bucket_for(num_tokens, self.full_buckets)) is not None:
            return GraphChoice("full", size)
        size = bucket_for(len(counts), self.verify_buckets) if 1 < most <= few and not in_pieces else None
        if size is not None and size * few <= max(PADDED_FREELY, MOST_PADDED * num_tokens):
            return GraphChoice("verify", size * few, size)
        if (size := bucket_for(num_tokens, self.piecewise_buckets)) is not None:
            return GraphChoice("piecewise", size)
        return None

    def capture(self) -> None:
        """Capture all buckets, largest first, so that the smaller ones reuse the memory of the larger: steps
        of padding in the buffers of every later step, which touch only the null block."""
        few = self._few_tokens
        choices = [
            *(GraphChoice("piecewise", size) for size in reversed(self.piecewise_buckets)),
            *(GraphChoice("verify", size * few, size) for size in reversed(self.verify_buckets)),
            *(GraphChoice("full", size) for size in reversed(self.full_buckets)),
        ]
        with _no_garbage_collection():
            for choice in choices:
                self._captured[choice] = self._capture(choice)
        logger.info(
            "Captured graphs (%s): full for %s decodes and %s rows with drafts, piecewise for %s tokens, "
            "%.0f MiB.",
            self.mode,
            self.full_buckets or "no",
            self.verify_buckets or "no",
            self.piecewise_buckets or "no",
            self._backend.memory_used() / 2**20,
        )

    def build(self, rows: Sequence[Row], choice: GraphChoice) -> StepInputs:
        """The inputs of a step with these rows, padded to what its graph takes."""
        return self._model.build(rows, choice.num_tokens, choice.num_short)

    def forward(self, inputs: StepInputs, choice: GraphChoice) -> StepHidden:
        """Replay the graph that ``choose`` chose. Results are overwritten by the next replay, also that of
        other graphs of the same backend.

        inputs: padded to choice.num_tokens. Raises RuntimeError if they are not where they were at capture.
        """
        captured = self._captured[choice]
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

    def _capture(self, choice: GraphChoice) -> _Captured:
        inputs, capture = self.build([], choice), GraphCapture(self._backend)
        step = self._piecewise_step if choice.kind == "piecewise" else self._full_step
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
        return _Captured(capture, _addresses(inputs, choice.kind), hidden)

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
    attention = () if kind == "piecewise" else inputs.attention
    read = inputs.token_ids, inputs.tokens, inputs.slots, attention
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
