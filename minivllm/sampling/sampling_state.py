"""State of the sampler for each slot:
parameters in persistent tensors, vocabulary-wide state only where needed.

Every number lives on the device, where rows gather it, and on the host, where "does any row need this stage?"
is answered without waiting for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.sampling.draw import apply_penalties
from minivllm.device.buffers import to_device
from minivllm.messages import EngineRequest
from minivllm.sampling.custom_processors import ProcessorStage
from minivllm.sampling.logits_processors import LogitsProcessor


class SlotColumn:
    """One number per slot, on host and device; on a CPU both are the same memory."""

    def __init__(self, num_slots: int, dtype: type[np.generic], device: torch.device) -> None:
        self.host = np.zeros(num_slots, dtype=dtype)
        memory = torch.from_numpy(self.host)
        self.device = memory if device.type == "cpu" else memory.to(device)
        self._is_shared = self.device is memory

    def __setitem__(self, slot: int, value: float) -> None:
        self.host[slot] = value
        if not self._is_shared:
            self.device[slot] = value


class LogitsStage(Protocol):
    """A stage that edits logits before temperature. The sampler runs its stages in order, on float32 rows."""

    def touches(self, slots: np.ndarray) -> np.ndarray:
        """slots [R] int -> bool [R]: which rows this stage would change. Answered on the host."""

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        """Edit logits [R, V] float32 in place; slots [R] is the slot of each row, touched or not."""


@dataclass
class _Constraint:
    """disallowed: bool [V], True outside allowed_token_ids; None without a list.
    allowed: the same list on the host.

    recent: the last tokens of prompt and output, as many as the longest bad word looks back.
    """

    allowed: frozenset[int] | None
    disallowed: Tensor | None
    bad_words: list[tuple[int, ...]]
    recent: deque[int]
    stop_ids: frozenset[int]
    min_tokens: int
    num_output_tokens: int
    bias_ids: list[int]
    bias_values: list[float]

    @property
    def is_void(self) -> bool:
        return not (self.bad_words or self.bias_ids or self.is_held_open) and self.allowed is None

    @property
    def is_held_open(self) -> bool:
        """True while the request may not end yet."""
        return self.num_output_tokens < self.min_tokens and bool(self.stop_ids)

    def forbidden_ids(self) -> set[int]:
        """Ids that may not come next. Where nothing of an allowed list would remain,
        the list has the last word."""
        forbidden = set(self.stop_ids) if self.is_held_open else set()
        recent = tuple(self.recent)
        for *prefix, last in self.bad_words:
            if not prefix or recent[-len(prefix) :] == tuple(prefix):
                forbidden.add(last)
        if self.allowed is not None and self.allowed <= forbidden:
            return set()
        return forbidden


class TokenConstraints:
    """allowed_token_ids, bad_words, min_tokens and logit_bias. Implements LogitsStage."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._is_active = np.zeros(num_slots, dtype=np.bool_)
        self._of_slot: dict[int, _Constraint] = {}

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """Take over the constraints of a request that enters with these outputs;
        ids out of range are dropped."""
        params = request.sampling_params
        allowed = disallowed = None
        if params.allowed_token_ids is not None:
            allowed = frozenset(_within(params.allowed_token_ids, self._vocab_size))
            is_disallowed = np.ones(self._vocab_size, dtype=np.bool_)
            is_disallowed[list(allowed)] = False
            disallowed = to_device(is_disallowed, self._device)
        bias = {token: v for token, v in (params.logit_bias or {}).items() if 0 <= token < self._vocab_size}
        bad_words = [
            tuple(word) for word in request.bad_words_token_ids if word and 0 <= word[-1] < self._vocab_size
        ]
        lookback = max((len(word) - 1 for word in bad_words), default=0)
        constraint = _Constraint(
            allowed=allowed,
            disallowed=disallowed,
            bad_words=bad_words,
            recent=deque(
                [*request.prompt_token_ids[-lookback:], *output_token_ids] if lookback else (), lookback
            ),
            stop_ids=frozenset(_within((*request.eos_token_ids, *params.stop_token_ids), self._vocab_size)),
            min_tokens=params.min_tokens,
            num_output_tokens=len(output_token_ids),
            bias_ids=list(bias),
            bias_values=list(bias.values()),
        )
        self._is_active[slot] = not constraint.is_void
        if not constraint.is_void:
            self._of_slot[slot] = constraint

    def remove(self, slot: int) -> None:
        """Free the slot's memory."""
        self._is_active[slot] = False
        self._of_slot.pop(slot, None)

    def append(self, slot: int, token_id: int) -> None:
        """Record a generated token; a constraint that has served its time is dropped."""
        constraint = self._of_slot.get(slot)
        if constraint is None:
            return
        constraint.recent.append(token_id)
        constraint.num_output_tokens += 1
        if constraint.is_void:
            self.remove(slot)

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return self._is_active[slots]

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        forbidden: list[tuple[int, int]] = []
        biased: list[tuple[int, int]] = []
        biases: list[float] = []
        for row in np.flatnonzero(self._is_active[slots]).tolist():
            constraint = self._of_slot[int(slots[row])]
            if constraint.disallowed is not None:
                logits[row].masked_fill_(constraint.disallowed, -torch.inf)
            forbidden += [(row, token) for token in constraint.forbidden_ids()]
            biased += [(row, token) for token in constraint.bias_ids]
            biases += constraint.bias_values
        if forbidden:
            rows, tokens = to_device(np.array(forbidden).T.copy(), logits.device)
            logits[rows, tokens] = logits.new_full((), -torch.inf)  # a number of Python's would be waited for
        if biased:
            rows, tokens = to_device(np.array(biased).T.copy(), logits.device)
            logits[rows, tokens] += to_device(np.array(biases, dtype=np.float32), logits.device)


class _Occurring:
    """The tokens of a prompt and its output, each once.

    count: of different tokens. token_ids int64, output_counts int32 [count and more]: how often each was
    generated.
    """

    def __init__(self, prompt: list[int], output: list[int], device: torch.device) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys((*prompt, *output)))}
        self.count = len(self._places)
        room = max(2 * self.count, 64)
        token_ids, counts = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int32)
        token_ids[: self.count] = list(self._places)
        np.add.at(counts, np.array([self._places[token] for token in output], dtype=np.int64), 1)
        self.token_ids = to_device(token_ids, device)
        self.output_counts = to_device(counts, device)

    def append(self, token_id: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token_id, self.count)
        if place == self.count:
            self.count += 1
            if place == len(self.token_ids):
                self.token_ids = torch.cat([self.token_ids, torch.zeros_like(self.token_ids)])
                self.output_counts = torch.cat([self.output_counts, torch.zeros_like(self.output_counts)])
            self.token_ids[place].fill_(token_id)
        self.output_counts[place] += 1


class Penalties:
    """presence, frequency and repetition penalties. Implements LogitsStage.

    Each slot that uses any of them lists the tokens of its prompt and its output, each once, and how often
    each was generated: a row has far fewer of them than the vocabulary.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.presence = SlotColumn(num_slots, np.float32, device)
        self.frequency = SlotColumn(num_slots, np.float32, device)
        self.repetition = SlotColumn(num_slots, np.float32, device)
        self._is_active = np.zeros(num_slots, dtype=np.bool_)
        self._occurring: dict[int, _Occurring] = {}

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """Count the tokens of a request that enters with these outputs;
        ids outside the vocabulary do not count."""
        params = request.sampling_params
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._is_active[slot] = penalties != (0.0, 0.0, 1.0)
        if not self._is_active[slot]:
            return
        self.presence[slot], self.frequency[slot], self.repetition[slot] = penalties
        prompt = _within(request.prompt_token_ids, self._vocab_size)
        output = _within(output_token_ids, self._vocab_size)
        self._occurring[slot] = _Occurring(prompt, output, self._device)

    def remove(self, slot: int) -> None:
        """Free the slot's memory."""
        self._is_active[slot] = False
        self._occurring.pop(slot, None)

    def append(self, slot: int, token_id: int) -> None:
        """Count a generated token."""
        if self._is_active[slot] and 0 <= token_id < self._vocab_size:
            self._occurring[slot].append(token_id)

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return self._is_active[slots]

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        rows = np.flatnonzero(self._is_active[slots])
        if len(rows) == 0:
            return
        occurring = [self._occurring[slot] for slot in slots[rows].tolist()]
        counts = [one.count for one in occurring]
        places = np.stack([np.repeat(rows, counts), np.repeat(slots[rows], counts)])
        row_index, slot_index = to_device(places, logits.device)
        token_ids = torch.cat([one.token_ids[: one.count] for one in occurring])
        logits[row_index, token_ids] = apply_penalties(
            logits[row_index, token_ids],
            torch.cat([one.output_counts[: one.count] for one in occurring]),
            self.presence.device[slot_index],
            self.frequency.device[slot_index],
            self.repetition.device[slot_index],
        )


class SamplingState:
    """The sampling parameters of every slot, and the stages that need memory of their own.

    edits: stages before temperature, in order. draw_edits: stages after it, which greedy rows do without.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        """vocab_size: width of the logits."""
        device = torch.device(device)
        self.vocab_size = vocab_size
        self.device = device
        self.temperature = SlotColumn(num_slots, np.float32, device)
        self.top_p = SlotColumn(num_slots, np.float32, device)
        self.top_k = SlotColumn(num_slots, np.int64, device)
        self.min_p = SlotColumn(num_slots, np.float32, device)
        self.seed = SlotColumn(num_slots, np.int64, device)
        self.num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        """Alternatives to report per token, on the host only; -1: no log-probabilities at all."""
        self.logprob_token_ids: dict[int, list[int]] = {}
        """Slot -> the ids to report in place of the likeliest ones, for the slots that name some."""
        self.wants_prompt_logprobs = np.zeros(num_slots, dtype=np.bool_)
        self.is_edited = np.zeros(num_slots, dtype=np.bool_)
        """A stage may touch the slot's rows. For any other slot the generated tokens are not needed."""
        self.is_plain = np.zeros(num_slots, dtype=np.bool_)
        """The likeliest token is all that the slot's request wants,
        and no stage but draw_edits touches its rows."""
        self.constraints = TokenConstraints(num_slots, vocab_size, device)
        self.penalties = Penalties(num_slots, vocab_size, device)
        self.edits: tuple[LogitsStage, ...] = (self.constraints, self.penalties)
        self.draw_edits: tuple[LogitsStage, ...] = ()
        self._processors: list[ProcessorStage] = []

    def add_processor(self, processor: LogitsProcessor) -> None:
        """Give a custom processor its turn, for requests that come from here on;
        several of them in this order."""
        stage = ProcessorStage(processor, len(self.num_logprobs))
        self._processors.append(stage)
        if processor.is_argmax_invariant():
            self.draw_edits += (stage,)
        else:
            self.edits = (*self.edits[:-1], stage, self.penalties)

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """A request enters a free slot; after a preemption it brings the tokens it generated before."""
        params = request.sampling_params
        # The smallest normal float32 keeps a positive temperature from becoming a division by zero.
        smallest = float(np.finfo(np.float32).tiny)
        self.temperature[slot] = max(params.temperature, smallest) if params.temperature > 0 else 0.0
        self.top_p[slot] = params.top_p
        self.top_k[slot] = max(0, min(params.top_k, self.vocab_size))
        self.min_p[slot] = params.min_p
        self.seed[slot] = (request.seed + 2**63) % 2**64 - 2**63
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        if params.logprob_token_ids is not None:
            self.logprob_token_ids[slot] = params.logprob_token_ids
        self.wants_prompt_logprobs[slot] = params.prompt_logprobs is not None
        self.constraints.add(slot, request, output_token_ids)
        self.penalties.add(slot, request, output_token_ids)
        for processor in self._processors:
            processor.add(slot, request, output_token_ids)
        own = np.array([slot])
        is_touched = any(
            stage.touches(own)[0] for stage in self.edits
        )  # what is not touched now never will be
        self.is_edited[slot] = is_touched or any(stage.touches(own)[0] for stage in self.draw_edits)
        self.is_plain[slot] = not (params.temperature > 0 or params.logprobs is not None or is_touched)

    def remove(self, slot: int) -> None:
        """The request left; removing an empty slot does nothing."""
        self.num_logprobs[slot] = -1
        self.logprob_token_ids.pop(slot, None)
        self.wants_prompt_logprobs[slot] = self.is_edited[slot] = self.is_plain[slot] = False
        self.constraints.remove(slot)
        self.penalties.remove(slot)
        for processor in self._processors:
            processor.remove(slot)

    def append(self, slots: np.ndarray | list[int], token_ids: np.ndarray | list[int]) -> None:
        """Record generated tokens, one per entry;
        a slot may occur several times, in the order of its tokens."""
        slots, token_ids = np.asarray(slots, dtype=np.int64), np.asarray(token_ids, dtype=np.int64)
        is_edited = self.is_edited[slots]
        if not is_edited.any():
            return
        for slot, token_id in zip(slots[is_edited].tolist(), token_ids[is_edited].tolist()):
            self.constraints.append(slot, token_id)
            self.penalties.append(slot, token_id)
            for processor in self._processors:
                processor.append(slot, token_id)


def _within(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token for token in token_ids if 0 <= token < vocab_size]
