"""Engine outputs become outputs for users: text, stop strings, logprobs, n completions, timings.

Stop strings live here and not in the engine core, which knows no text: a sequence that met one is finished
for the user at once, and its id is handed back so that the engine aborts it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from minivllm.messages import EngineOutput, FinishReason, PositionLogprobs
from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobMap,
    RequestMetrics,
    RequestOutput,
)
from minivllm.sampling_params import OutputKind
from minivllm.stop_conditions.stop_strings import StopMatcher
from minivllm.tokenizer.detokenizer import Detokenizer, TokenDecoder


@dataclass(slots=True)
class ProcessedOutputs:
    """One step: what to show, and which sequences the engine must abort because a stop string ended them."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    sequence_ids_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """Keeps the state of every unfinished request; a finished one is forgotten with its last output.

    Without a token decoder (a model without a tokenizer) texts stay empty and decoded tokens None.
    """

    def __init__(self, token_decoder: TokenDecoder | None) -> None:
        self._decoder = token_decoder
        self._sequences: dict[str, _Sequence] = {}
        self._requests: dict[str, RequestState] = {}

    def add_request(self, prepared: PreparedRequest) -> RequestState:
        request = RequestState(prepared, self._decoder)
        self._requests[prepared.internal_id] = request
        for sequence in request.sequences:
            self._sequences[sequence.sequence_id] = sequence
        return request

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def process_outputs(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        """Take in one step's engine outputs, and build what there is to show."""
        now = time.monotonic()
        processed = ProcessedOutputs()
        touched: dict[RequestState, None] = {}
        for output in outputs:
            request = self.take_in(output, now, processed.sequence_ids_to_abort)
            if request is not None:
                touched[request] = None
        processed.request_outputs = [request.make_output() for request in touched]
        return processed

    def take_in(
        self, output: EngineOutput, now: float, sequence_ids_to_abort: list[str]
    ) -> RequestState | None:
        """Take in what a step did for one sequence; the request if it has something to show now.

        Unknown ids (aborted meanwhile) are ignored. A sequence that a stop string ended is added to
        sequence_ids_to_abort.
        """
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return None
        request = sequence.request
        request.take_in(sequence, output, now)
        if sequence.finish_reason is not None:
            del self._sequences[output.request_id]
            if output.finish_reason is None:
                sequence_ids_to_abort.append(output.request_id)
            if request.finished:
                request.metrics.finished_time = now
                request.pictures = ()
                del self._requests[request.internal_id]
        return request if sequence.has_news and (request.finished or not request.is_final_only) else None

    def abort_requests(self, request_ids: Iterable[str]) -> tuple[list[RequestOutput], list[str]]:
        """End every unfinished request that carries one of these ids, the caller's or the internal one.

        Returns their last outputs, finish_reason "abort", with whatever text was held back; and the ids of
        the sequences the engine must abort. Ids that are not unfinished are ignored: aborting is idempotent.
        """
        wanted = set(request_ids)
        request_outputs: list[RequestOutput] = []
        sequence_ids: list[str] = []
        for request in list(self._requests.values()):
            if request.request_id in wanted or request.internal_id in wanted:
                sequence_ids += self.end(request, FinishReason.ABORT)
                request_outputs.append(request.make_output())
        return request_outputs, sequence_ids

    def end(self, request: RequestState, reason: FinishReason, error: str | None = None) -> list[str]:
        """End an unfinished request early, releasing text that was held back;
        the sequences the engine must abort."""
        unfinished = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        sequence_ids = self.discard(request)
        for sequence in unfinished:
            sequence.finish(reason, None)
        request.error = error
        request.metrics.finished_time = time.monotonic()
        return sequence_ids

    def discard(self, request: RequestState) -> list[str]:
        """Forget a request that has lost its reader. Returns the sequences that the engine must abort."""
        self._requests.pop(request.internal_id, None)
        request.pictures = ()
        sequence_ids = [sequence.sequence_id for sequence in request.sequences]
        return [
            sequence_id for sequence_id in sequence_ids if self._sequences.pop(sequence_id, None) is not None
        ]


class _Sequence:
    """One completion being generated."""

    def __init__(
        self,
        request: RequestState,
        index: int,
        sequence_id: str,
        decoder: TokenDecoder | None,
        stops: StopMatcher | None,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.sequence_id = sequence_id
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.has_news = False
        self._decoder = decoder
        self._detokenizer: Detokenizer | None = None
        if decoder is not None:
            self._detokenizer = Detokenizer(
                decoder.stream(params.skip_special_tokens),
                stops,
                min_tokens=params.min_tokens,
                include_stop_string=params.include_stop_str_in_output,
            )
        self._keeps_stop_text = params.include_stop_str_in_output
        self._is_delta = params.output_kind is OutputKind.DELTA
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobMap] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._has_logprobs = params.logprobs is not None or params.num_sequences > params.n

    def take_in(self, output: EngineOutput) -> int:
        """Add the new tokens up to a stop string; how many of them count."""
        new_ids = output.new_token_ids
        num_kept = len(new_ids)
        # The token that ended it (end of sequence or a stop id) counts as a token, but is not text.
        hides_last = output.finish_reason is FinishReason.STOP and not self._keeps_stop_text
        if self._detokenizer is not None:
            for position, token_id in enumerate(new_ids[:-1] if hides_last else new_ids):
                if self._detokenizer.push(token_id):
                    num_kept = position + 1
                    break
        self._token_ids.extend(new_ids[:num_kept])
        for position_logprobs in (output.logprobs or ())[:num_kept]:
            self._cumulative_logprob += position_logprobs.logprobs[0]
            if self._logprobs is not None:
                self._logprobs.append(logprob_map(position_logprobs, self._decoder))
        stop_match = self._detokenizer.stop_match if self._detokenizer is not None else None
        if stop_match is not None:
            self.finish(FinishReason.STOP, stop_match.reason)
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        if num_kept:
            self.has_news = True
        return num_kept

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End the sequence, once; text still held back is released, and a match in it counts."""
        self.request.num_unfinished -= 1
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.has_news = True
        if self._detokenizer is not None and self._detokenizer.stop_match is None:
            self._detokenizer.flush(is_cut=reason in (FinishReason.ABORT, FinishReason.ERROR))
            if self._detokenizer.stop_match is not None:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = self._detokenizer.stop_match.reason

    def make_output(self) -> CompletionOutput:
        """All so far, or in a delta stream what is new since the last call."""
        detokenizer = self._detokenizer
        token_ids, logprobs = self._token_ids, self._logprobs
        if self._is_delta:
            text = "" if detokenizer is None else detokenizer.take()
            self._token_ids = []
            self._logprobs = None if logprobs is None else []
        else:
            text = "" if detokenizer is None else detokenizer.text()
            if self.finish_reason is None:  # it goes on growing, and what was handed out must not
                token_ids, logprobs = list(token_ids), None if logprobs is None else list(logprobs)
        self.has_news = False
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob if self._has_logprobs else None,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """A prompt and its n sequences.

    Nothing is built before ``make_output`` is called: a reader that takes its time gets everything since the
    last call in one piece, and delays no other reader.
    """

    def __init__(self, prepared: PreparedRequest, decoder: TokenDecoder | None) -> None:
        params = prepared.params
        self.request_id = prepared.request_id
        self.internal_id = prepared.internal_id
        self.params = params
        self.is_final_only = params.output_kind is OutputKind.FINAL_ONLY
        self.error: str | None = None
        self._embedding: list[float] | None = None
        self.metrics = RequestMetrics(
            arrival_time=prepared.arrival_time,
            num_prompt_tokens=len(prepared.prompt_token_ids),
            num_sequences=params.num_sequences,
        )
        self._prompt = prepared.prompt
        self.pictures = prepared.pictures
        """Kept here until the end: so they are found when the engine asks for their pixels."""
        self._prompt_token_ids = prepared.prompt_token_ids
        self._decoder = decoder
        self._prompt_logprobs: list[PositionLogprobMap | None] | None = (
            None if params.prompt_logprobs is None else [None] * max(1, params.prompt_logprobs_start)
        )
        self.num_unfinished = params.num_sequences
        self._keeps_best = params.num_sequences > params.n
        self._finished_outputs: dict[int, CompletionOutput] = {}
        self.sequences = [
            _Sequence(self, index, engine_request.request_id, decoder, prepared.stops)
            for index, engine_request in enumerate(prepared.sequences)
        ]

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def take_in(self, sequence: _Sequence, output: EngineOutput, now: float) -> None:
        if output.events:
            self.metrics.record_events(output.events)
        if sequence.index == 0:
            # Of n sequences the first one meets the cache that earlier requests left;
            # the others also meet the first.
            self.metrics.num_cached_tokens = max(self.metrics.num_cached_tokens, output.num_cached_tokens)
            if self._prompt_logprobs is not None and output.prompt_logprobs is not None:
                self._prompt_logprobs.extend(
                    logprob_map(entry, self._decoder) for entry in output.prompt_logprobs
                )
        if output.error is not None:
            self.error = output.error
        if output.pooled is not None:
            self._embedding = output.pooled
        num_tokens = sequence.take_in(output)
        if num_tokens:
            self.metrics.record_tokens(num_tokens, now)

    def make_output(self) -> RequestOutput:
        """All so far, or in a delta stream what is new since the last call."""
        sequences = self.sequences
        if self.params.output_kind is OutputKind.DELTA:
            sequences = [sequence for sequence in sequences if sequence.has_news]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=self._best([self._completion(sequence) for sequence in sequences]),
            finished=self.finished,
            prompt_logprobs=self._take_prompt_logprobs(),
            num_cached_tokens=self.metrics.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            embedding=self._embedding,
        )

    def _best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """With best_of above n the n likeliest ones, best first; else all as they are."""
        if not self._keeps_best:
            return completions
        ranked = sorted(completions, key=lambda completion: -(completion.cumulative_logprob or 0.0))[
            : self.params.n
        ]
        return [replace(completion, index=index) for index, completion in enumerate(ranked)]

    def _completion(self, sequence: _Sequence) -> CompletionOutput:
        """A finished completion no longer changes, so it is made once."""
        output = self._finished_outputs.get(sequence.index)
        if output is None:
            output = sequence.make_output()
            if sequence.finish_reason is not None:
                self._finished_outputs[sequence.index] = output
        return output

    def _take_prompt_logprobs(self) -> list[PositionLogprobMap | None] | None:
        """All of them once they are complete; a delta stream gets them once."""
        prompt_logprobs = self._prompt_logprobs
        if prompt_logprobs is None or len(prompt_logprobs) < len(self._prompt_token_ids):
            return None
        if self.params.output_kind is OutputKind.DELTA:
            self._prompt_logprobs = None
        return prompt_logprobs


def logprob_map(position: PositionLogprobs, decoder: TokenDecoder | None) -> PositionLogprobMap:
    """The token that stands at the position first, then the likeliest ones in order of their rank,
    or named ones in order of their names."""
    entries: PositionLogprobMap = {}
    ranks = [position.rank, *(position.other_ranks or range(1, len(position.token_ids)))]
    for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks):
        if token_id not in entries:
            text = None if decoder is None else decoder.token_text(token_id)
            entries[token_id] = Logprob(logprob, rank, text)
    return entries
