"""A worker without a model: it knows only what SchedulerOutput tells it, and checks that as it goes.

Instead of keys and values a cache slot holds the hash of all tokens up to its position, so any block table
that would make attention read something else is found. The "model" is a function of the token prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from minivllm.kv_cache.group_manager import (
    ChunkedAttentionManager,
    FullAttentionManager,
    SingleGroupManager,
    SlidingWindowManager,
)
from minivllm.messages import (
    UNKNOWN,
    EngineRequest,
    FinishReason,
    ModelRunnerOutput,
    PositionLogprobs,
    SchedulerOutput,
)
from minivllm.sampling_params import SamplingParams

VOCAB_SIZE = 5


def next_token(token_ids: list[int]) -> int:
    """The model: a token that depends on the whole prefix."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % VOCAB_SIZE


def reference_generation(
    request: EngineRequest, max_model_len: int
) -> tuple[list[int], FinishReason, int | None]:
    """What a request must generate: one token after the other, alone. (tokens, finish reason, stop reason)"""
    params, output = request.sampling_params, []
    while True:
        output.append(next_token(request.prompt_token_ids + output))
        may_stop = len(output) >= params.min_tokens
        if may_stop and output[-1] in request.eos_token_ids and not params.ignore_eos:
            return output, FinishReason.STOP, None
        if may_stop and output[-1] in params.stop_token_ids:
            return output, FinishReason.STOP, output[-1]
        if len(output) == request.max_tokens or len(request.prompt_token_ids) + len(output) == max_model_len:
            return output, FinishReason.LENGTH, None


class Layers(NamedTuple):
    """A KV group as a worker knows it:
    which positions a token reads, by definition, and in blocks of which size."""

    block_size: int
    kind: Literal["full", "window", "chunk"] = "full"
    reach: int = 0

    def first_visible(self, position: int) -> int:
        if self.kind == "window":
            return min(other for other in range(position + 1) if position - other < self.reach)
        if self.kind == "chunk":
            return min(
                other for other in range(position + 1) if other // self.reach == position // self.reach
            )
        return 0

    def manager(self, num_blocks: int, longest_chunk: int) -> SingleGroupManager:
        if self.kind == "full":
            return FullAttentionManager(num_blocks, self.block_size)
        kind = SlidingWindowManager if self.kind == "window" else ChunkedAttentionManager
        return kind(num_blocks, self.block_size, self.reach, longest_chunk)


@dataclass
class KnownRequest:
    """One request as the worker sees it; ``tables``, one for each KV group, is None while it is preempted."""

    data: EngineRequest
    token_ids: list[int]
    num_computed_tokens: int
    tables: list[list[int]] | None
    entered_at: int = 0
    sampled: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    counts_by_itself: bool = False


class SimulatedWorker:
    """Executes steps. ``block_size`` and ``max_num_seqs`` are those of the engine, ``groups`` its KV groups:
    one of full attention unless they are given."""

    def __init__(self, block_size: int, max_num_seqs: int, groups: Sequence[Layers] = ()) -> None:
        self.groups = list(groups) or [Layers(block_size)]
        self.max_num_seqs = max_num_seqs
        self.requests: dict[str, KnownRequest] = {}
        self.finished: list[str] = []
        self.slots: list[dict[int, int]] = [{} for _ in self.groups]
        self.num_steps = 0
        self.num_copies = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        self._apply(step)
        self._copy_blocks(step)
        spans = {}
        written: list[dict[int, str]] = [{} for _ in self.groups]
        for request_id, count in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            drafts = step.draft_token_ids.get(request_id, [])
            if UNKNOWN in drafts and request.counts_by_itself:
                assert len(drafts) <= len(request.guesses), "only what was asked for is verified"
                drafts = request.guesses[: len(drafts)]
            token_ids = request.token_ids + drafts
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            assert count > 0 and end <= len(token_ids)
            assert not drafts or end == len(token_ids), (
                "drafts are verified together with the last known token"
            )
            spans[request_id] = (token_ids, start, end)
            for group, layers in enumerate(self.groups):
                assert request.tables is not None and end <= len(request.tables[group]) * layers.block_size
                for position in range(start, end):
                    slot = self._slot(request, group, position)
                    assert slot not in written[group], (
                        f"{request_id} and {written[group][slot]} write the same slot"
                    )
                    assert slot >= layers.block_size, "only padding writes to the null block"
                    written[group][slot] = request_id
                    self.slots[group][slot] = hash(tuple(token_ids[: position + 1]))
        results = ModelRunnerOutput()
        for group in range(len(self.groups)):
            self._check_sharing(group, written[group])
            for request_id, (token_ids, start, end) in spans.items():
                self._check_reads(group, request_id, token_ids, start, end)
        for request_id, (token_ids, start, end) in spans.items():
            self._sample(request_id, token_ids, start, end, results)
        for request_id, count in step.num_guesses.items():
            self._guess(self.requests[request_id], count)
        return results

    def _guess(self, request: KnownRequest, count: int) -> None:
        """Right guesses up to any place. From now on the request's computed tokens are counted here."""
        request.counts_by_itself = True
        request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids) - 1)
        tokens, right = list(request.token_ids), hash(tuple(request.token_ids)) % (count + 2)
        for place in range(count):
            token_id = next_token(tokens)
            tokens.append(token_id if place < right else (token_id + 1) % VOCAB_SIZE)
        request.guesses = tokens[len(request.token_ids) :]

    def _copy_blocks(self, step: SchedulerOutput) -> None:
        """All sources are read before any target is written."""
        copied = []
        for copy in step.block_copies:
            slots, size = self.slots[copy.group], self.groups[copy.group].block_size
            assert copy.source != copy.target and min(copy.source, copy.target) > 0
            copied.append([slots.get(copy.source * size + offset) for offset in range(size)])
            self.num_copies += 1
        for copy, contents in zip(step.block_copies, copied):
            slots, size = self.slots[copy.group], self.groups[copy.group].block_size
            tables = [
                (known.entered_at, known.tables[copy.group])
                for known in self.requests.values()
                if known.tables
            ]
            entered = [entered_at for entered_at, table in tables if copy.target in table]
            assert self.num_steps in entered, "a copy goes to a request that is admitted in this step"
            for offset, content in enumerate(contents):
                slots.pop(copy.target * size + offset, None)
                if content is not None:
                    slots[copy.target * size + offset] = content

    def _apply(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_request_ids:
            assert request_id not in self.finished, f"{request_id} finished twice"
            self.finished.append(request_id)
            self.requests.pop(request_id, None)
        for request_id in step.preempted_request_ids:
            assert self.requests[request_id].tables is not None
            self.requests[request_id].tables = None
        entered = [(new.request.request_id, new.num_computed_tokens) for new in step.new_requests]
        entered += [
            (entry.request_id, entry.num_computed_tokens) for entry in step.cached_requests if entry.resumed
        ]
        assert not (step.preempted_request_ids and entered), "a preemption admits nobody in the same step"
        for new in step.new_requests:
            data = new.request
            assert data.request_id not in self.requests and data.request_id not in self.finished
            tables = [list(block_ids) for block_ids in new.block_ids]
            self.requests[data.request_id] = KnownRequest(
                data, list(data.prompt_token_ids), new.num_computed_tokens, tables, self.num_steps
            )
        for difference in step.cached_requests:
            request = self.requests[difference.request_id]
            assert difference.request_id in step.num_scheduled_tokens
            if difference.resumed:
                assert request.tables is None
                request.tables = [list(block_ids) for block_ids in difference.new_block_ids]
                request.entered_at = self.num_steps
            else:
                assert request.tables is not None
                for table, block_ids in zip(request.tables, difference.new_block_ids, strict=True):
                    table += block_ids
            if difference.resumed or not request.counts_by_itself:
                request.num_computed_tokens = difference.num_computed_tokens
        for request_id, num_computed_tokens in entered:
            assert num_computed_tokens <= len(self.requests[request_id].token_ids) - 1
        assert sum(request.tables is not None for request in self.requests.values()) <= self.max_num_seqs

    def visible_blocks(self, request: KnownRequest, group: int) -> list[int]:
        """Blocks that the next token of a request reads; those before may be anybody's by now."""
        assert request.tables is not None
        layers = self.groups[group]
        return request.tables[group][layers.first_visible(request.num_computed_tokens) // layers.block_size :]

    def _slot(self, request: KnownRequest, group: int, position: int) -> int:
        assert request.tables is not None
        size = self.groups[group].block_size
        return request.tables[group][position // size] * size + position % size

    def _check_sharing(self, group: int, written: dict[int, str]) -> None:
        """A block is written by one request,
        and read only by it and by those that hit it in this very step."""
        writers: dict[int, set[str]] = {}
        for slot, request_id in written.items():
            writers.setdefault(slot // self.groups[group].block_size, set()).add(request_id)
        for block_id, ids in writers.items():
            assert len(ids) == 1, f"{sorted(ids)} write to block {block_id} in one step"
            for request_id, request in self.requests.items():
                if request_id in ids or request.tables is None:
                    continue
                if block_id in self.visible_blocks(request, group):
                    assert request.entered_at == self.num_steps, (
                        f"block {block_id} is written while {request_id} has it"
                    )

    def _check_reads(self, group: int, request_id: str, token_ids: list[int], start: int, end: int) -> None:
        for position in range(self.groups[group].first_visible(start), end):
            expected = hash(tuple(token_ids[: position + 1]))
            found = self.slots[group].get(self._slot(self.requests[request_id], group, position))
            assert found == expected, f"{request_id} reads something else at position {position}"

    def _sample(
        self, request_id: str, token_ids: list[int], start: int, end: int, results: ModelRunnerOutput
    ) -> None:
        request = self.requests[request_id]
        num_known = len(request.token_ids)
        num_prompt = len(request.data.prompt_token_ids)
        params = request.data.sampling_params
        first = max(start + 1, params.prompt_logprobs_start)
        if params.prompt_logprobs is not None and first < min(end + 1, num_prompt):
            results.prompt_logprobs[request_id] = [
                PositionLogprobs([token_ids[position]], [float(-position)], 1)
                for position in range(first, min(end + 1, num_prompt))
            ]
        request.num_computed_tokens = end
        if end < num_known:
            return
        sampled = []
        for position in range(num_known, end + 1):  # the drafts, then the bonus token
            sampled.append(next_token(token_ids[:position]))
            if position < end and token_ids[position] != sampled[-1]:
                break
        request.token_ids += sampled
        results.sampled_token_ids[request_id] = sampled
        if request.data.sampling_params.logprobs is not None:
            results.logprobs[request_id] = [PositionLogprobs([token_id], [-1.0], 1) for token_id in sampled]


def make_engine_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    eos_token_ids: list[int] | None = None,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    **params: object,
) -> EngineRequest:
    """A request with few words."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=0,
        arrival_time=arrival_time,
        eos_token_ids=eos_token_ids or [],
        priority=priority,
        cache_salt=cache_salt,
    )
