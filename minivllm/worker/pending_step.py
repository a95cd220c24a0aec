"""A step that was launched: the device may still be computing it,
and the host does not know its tokens yet."""

from __future__ import annotations

from collections.abc import Callable

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
        self._wait: Callable[[], list[int]] | None = None

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
        stays = self._batch.learn_pending(self._requests, self._slots, self._positions, token_ids)
        sampled = {
            request.data.request_id: [token_id] for request, token_id in zip(self._requests, token_ids)
        }
        self.output.sampled_token_ids = sampled
        self._sampling_state.append(self._slots[stays], np.asarray(token_ids)[stays])
        return self.output
