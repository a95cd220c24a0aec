"""A step that was launched: the device may still be computing it,
and the host does not know its tokens yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minivllm.batch.paged_model import AttentionSeconds
from minivllm.batch.persistent_batch import PersistentBatch, WorkerRequest
from minivllm.messages import ModelRunnerOutput
from minivllm.sampling.sampling_state import SamplingState


class PendingStep:
    """Results of one step, complete once ``result`` was called.

    The next step may be launched before: it reads the tokens on the device. What the host keeps of them
    (outputs, penalties, bad words) follows with ``result``, in the order of the steps.
    """

    def __init__(
        self, batch: PersistentBatch, sampling_state: SamplingState, previous: PendingStep | None
    ) -> None:
        """previous: the step launched before, whose tokens the host has to learn first."""
        self.output = ModelRunnerOutput()
        self._batch = batch
        self._sampling_state = sampling_state
        self._previous = previous
        self._requests: list[WorkerRequest] = []
        self._slots = self._positions = np.empty(0, dtype=np.int64)
        self._num_drafts: list[int] | None = None
        self._wait: Callable[[], list[Any]] | None = None

    def expect(
        self,
        requests: list[WorkerRequest],
        slots: np.ndarray,
        positions: np.ndarray,
        wait: Callable[[], list[int]],
    ) -> None:
        """One token for each request, at these positions of these slots; ``wait`` returns them when they have
        arrived."""
        self._requests = requests
        self._slots = slots
        self._positions = positions
        self._wait = wait

    def tell_seconds(self, attention: AttentionSeconds) -> None:
        """What attention took, and should have taken, if anything was expected."""
        if attention.expected:
            self.output.expected_attention_seconds = attention.expected
            self.output.measured_attention_seconds = attention.measured

    def expect_unsure(
        self,
        requests: list[WorkerRequest],
        slots: np.ndarray,
        num_drafts: list[int],
        wait: Callable[[], list[list[int]]],
    ) -> None:
        """One token for each request, and as many more as drafts are accepted; ``wait`` returns their number
        and then the tokens, for each request."""
        self._requests = requests
        self._slots = slots
        self._num_drafts = num_drafts
        self._wait = wait

    def finish_previous(self) -> None:
        """Wait for the tokens of all steps before this one."""
        if self._previous is not None:
            self._previous.result()
            self._previous = None

    @torch.inference_mode()
    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens, and take note of them on the host. Calling it again returns the same."""
        self.finish_previous()
        if self._wait is None:
            return self.output
        token_ids = self._wait()
        self._wait = None
        if self._num_drafts is not None:
            self._learn_unsure([tokens[:count] for count, *tokens in token_ids], self._num_drafts)
            return self.output
        stays = self._batch.learn_pending(self._requests, self._slots, self._positions, token_ids)
        sampled = {
            request.data.request_id: [token_id] for request, token_id in zip(self._requests, token_ids)
        }
        self.output.sampled_token_ids = sampled
        self._sampling_state.append(self._slots[stays], np.asarray(token_ids)[stays])
        return self.output

    def _learn_unsure(self, token_ids: list[list[int]], num_drafts: list[int]) -> None:
        """Take note of what the verification of drafts has given."""
        stays = self._batch.learn_unsure(self._requests, self._slots, num_drafts, token_ids)
        for request, new in zip(self._requests, token_ids):
            request_id = request.data.request_id
            self.output.sampled_token_ids[request_id] = new
            if request_id in self.output.logprobs:
                self.output.logprobs[request_id] = self.output.logprobs[request_id][: len(new)]
        counts = [len(new) if is_here else 0 for new, is_here in zip(token_ids, stays)]
        seen = [token for new, count in zip(token_ids, counts) for token in new[:count]]
        self._sampling_state.append(np.repeat(self._slots, counts), np.asarray(seen, dtype=np.int64))
