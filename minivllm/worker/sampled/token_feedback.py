"""How the stages of a pipeline that do not sample learn which tokens the last one has sampled.

The last stage tells the tokens of every step. The others take in those of a step not before a later step
computes one of them: until then they go on with the tokens of other requests.
"""

from __future__ import annotations

from collections import deque
from itertools import compress

import msgspec

from minivllm.batch.persistent_batch import PersistentBatch, WorkerRequest
from minivllm.batch.step_inputs import StepInputs
from minivllm.distributed.link import NUM_PLACES
from minivllm.distributed.stage import Stage
from minivllm.messages import ModelRunnerOutput, SchedulerOutput

MAX_UNKNOWN = NUM_PLACES - 1
"""Steps whose tokens are not taken in, at most: the last stage never waits for room to tell its own."""


class TokenFeedback:
    """One worker's end. Both sides skip steps in which nothing is sampled."""

    def __init__(self, batch: PersistentBatch, stage: Stage) -> None:
        self._batch = batch
        self._stage = stage
        self._decoder = msgspec.msgpack.Decoder(dict[str, list[int]])
        self._unknown: deque[dict[str, WorkerRequest]] = deque()
        self._awaited: dict[str, tuple[WorkerRequest, int]] = {}
        self._num_expected = self._num_learned = 0

    def tell(self, sampled_token_ids: dict[str, list[int]]) -> None:
        """The last stage has sampled these tokens, by request id."""
        if sampled_token_ids:
            record = msgspec.msgpack.encode(sampled_token_ids)
            for link in self._stage.tokens:
                link.send(record)

    def learn_for(self, step: SchedulerOutput) -> None:
        """Wait for the tokens that the requests of this step have been waiting for."""
        for request_id in step.num_scheduled_tokens:
            request, number = self._awaited.get(request_id, (None, 0))
            if request is self._batch.requests[request_id]:
                self.learn(number)

    def expect(self, inputs: StepInputs) -> UnknownTokens:
        """This step is on its way to the stage that samples."""
        sampled_rows = compress(inputs.rows, inputs.is_sampled())
        sampled = {row.request.data.request_id: row.request for row in sampled_rows}
        for row in inputs.rows:
            row.request.num_computed_tokens = row.start + row.count
        if sampled:
            if len(self._unknown) == MAX_UNKNOWN:
                self._learn_oldest()
            self._unknown.append(sampled)
            self._num_expected += 1
            self._awaited.update((name, (request, self._num_expected)) for name, request in sampled.items())
        return UnknownTokens(self, self._num_expected)

    def learn(self, count: int) -> None:
        """Wait for the tokens of the first ``count`` steps."""
        while self._num_learned < count:
            self._learn_oldest()

    def _learn_oldest(self) -> None:
        sampled = self._decoder.decode(self._stage.tokens[0].receive())
        requests = self._unknown.popleft()
        self._num_learned += 1
        for request_id, token_ids in sampled.items():
            request = requests[request_id]
            self._batch.append_tokens(request, token_ids)
            # Rejected drafts were computed for nothing.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            if self._awaited[request_id][1] == self._num_learned:
                del self._awaited[request_id]


class UnknownTokens:
    """A step of a stage that does not sample."""

    def __init__(self, feedback: TokenFeedback, count: int) -> None:
        self._feedback = feedback
        self._count = count

    def result(self) -> ModelRunnerOutput:
        """Wait until its tokens are known here too."""
        self._feedback.learn(self._count)
        return ModelRunnerOutput()
