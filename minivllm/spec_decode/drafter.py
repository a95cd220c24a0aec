"""The interface of drafters, which guess the tokens that follow.
Wrong guesses cost time, never correctness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minivllm.attention import AttentionBackend
from minivllm.attention.registry import AttentionFactory
from minivllm.batch.paged_model import PagedModel, RunnerLimits
from minivllm.batch.persistent_batch import PersistentBatch, WorkerRequest
from minivllm.compilation.compiler import RegionCompiler
from minivllm.config import CudaGraphMode, SpeculativeConfig
from minivllm.device.policy import DevicePolicy
from minivllm.graphs.graph_capture import GraphBackend
from minivllm.models.model import HiddenTap, Model
from minivllm.sampling.sampling_state import SamplingState


@dataclass(frozen=True)
class DraftContext:
    """Arguments to make a drafter, once, when the engine starts.

    settings: speculative_config. target: the model whose tokens are guessed. batch: the requests that it
    serves. sampling_state: how their tokens are drawn. compiler: makes the regions in use at first.
    draft_model: the loaded model or head, for the methods that have one.
    """

    settings: SpeculativeConfig
    target: PagedModel
    batch: PersistentBatch
    sampling_state: SamplingState
    limits: RunnerLimits
    compiler: RegionCompiler
    policy: DevicePolicy
    make_attention: AttentionFactory
    draft_model: Model | None = None

    def paged(self, model: Model, *, token_offset: int = 0) -> PagedModel:
        """A model over the blocks of the first KV group, with caches of its own;
        token_offset: see StepInputBuilder."""
        return PagedModel(
            model,
            self.batch,
            self.limits,
            self.policy,
            self.make_attention,
            token_offset=token_offset,
            is_draft=True,
        )


class GuessingModel(Protocol):
    """A model that a drafter runs beside the target, by the regions of the same compiler.

    caches: of its own, if it has any: tuples of tensors [blocks, block_size, …], which nothing else holds.
    tap: what it wants of the target's hidden states. backends: by which it attends.
    """

    caches: list[Any]
    tap: HiddenTap | None

    @property
    def backends(self) -> Sequence[AttentionBackend]: ...

    def use_regions(self, compiler: RegionCompiler) -> None:
        """The target has changed to the regions of this compiler."""

    def allocate_caches(self) -> None:
        """Have caches again after they were cleared."""

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy blocks of the caches, and what is known of them;
        int64 [copies], all sources before any target."""

    def capture_graphs(self, mode: CudaGraphMode, backend: GraphBackend) -> None:
        """The target's steps were captured; so may be those of this model, in this mode and with the memory
        of the same backend."""


@dataclass(frozen=True)
class DraftTask:
    """One request that wants guesses.

    token_ids [n] int: prompt and output so far; a view, valid until the next step. max_tokens: guess at most
    so many, at least 1. slot: where the request lives in the persistent batch. cache_salt: the tenant;
    guesses may show what others were told only among those of the same one.
    """

    request_id: str
    slot: int
    token_ids: np.ndarray
    max_tokens: int
    cache_salt: str | None = None


@dataclass(frozen=True)
class Guesses:
    """What ``guess_ahead`` is asked for. count: of guesses, often 0. num_verified: drafts of the request in
    the step that has sampled its newest token, the accepted ones and the others."""

    request: WorkerRequest
    count: int
    num_verified: int


class Drafter(Protocol):
    """Guesses deterministically: the same tokens known, the same guesses.

    cost_per_token: time to guess one token, as a share of a step of the model with a single token. models:
    those that it guesses with; mostly none.
    """

    cost_per_token: float

    @property
    def models(self) -> Sequence[GuessingModel]:
        return ()

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        """Guesses by request id, 1 to max_tokens of them; requests it knows nothing for are left out."""

    def guess_ahead(self, guesses: Sequence[Guesses]) -> None:
        """Guess on the device what follows tokens that the host need not know, and put the guesses behind
        them in the batch. Every request comes in every step that samples a token for it. Called only of
        drafters that can do so."""
        return

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """The request left with this output; what was kept of it can go. cache_salt: see DraftTask."""
        return
