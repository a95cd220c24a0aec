"""The worker's memory of the requests it serves:
each owns a stable batch slot, and a step sends only what changed.

Nothing is condensed or swapped when requests come and go, and nothing is rebuilt from scratch. (The
persistent batch of vLLM V1; stable slots after its second model runner.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minivllm.batch.image_positions import shift_after
from minivllm.batch.states.state_tables import StateTables
from minivllm.batch.true_lengths import TrueLengths
from minivllm.device.buffers import MirroredTable, rounded_capacity
from minivllm.kv_cache.specs import GroupSpec
from minivllm.messages import BlockIds, EngineRequest, SchedulerOutput


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """What the worker keeps of one request, also while it is preempted and owns no slot.

    num_pending_tokens: sampled tokens behind output_token_ids whose values only the device knows yet.
    num_unsure_tokens: those of them that are not there if drafts in flight were rejected. num_tokens: of the
    prompt, the outputs and the pending ones; counted along, since every step asks it of every row.
    is_guessed_for: a drafter that guesses on the device has computed all tokens but the newest.
    """

    data: EngineRequest
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 0
    num_unsure_tokens: int = 0
    is_guessed_for: bool = False
    slot: int = -1
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = (
            len(self.data.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens
        )


class GroupTables:
    """Where the tokens of each slot lie in the pool of one KV group.

    num_blocks: of the pool, the null block included. block_table int32 [batch slots, ceil(max_model_len /
    block_size)]: physical blocks in order. Those that a window has left behind still stand there, or the null
    block where they were never had, and nothing reads them. num_held int32 [batch slots]: how many places of
    the table are filled. num_entered: requests that have got a slot so far. kv_position int32 [num_blocks,
    rounded up; block_size]: position in its sequence of what each cache slot holds. A block shared through
    the prefix cache has the same logical index in every request, so one array serves them all.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, group: GroupSpec, device: torch.device) -> None:
        self.block_size = group.block_size
        self.num_blocks = group.num_blocks
        self.block_table = MirroredTable(max_num_seqs, -(-max_model_len // self.block_size), device)
        self.kv_position = MirroredTable(rounded_capacity(self.num_blocks), self.block_size, device)
        self.num_held = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_entered = 0
        self._block_index = np.zeros(self.num_blocks, dtype=np.int32)
        self._offsets = np.arange(self.block_size, dtype=np.int32)

    def enter(self, slot: int, block_ids: list[int]) -> None:
        """A request comes with these blocks."""
        self.num_entered += 1
        self._append(slot, 0, block_ids)

    def extend(self, slot: int, block_ids: list[int]) -> None:
        """More blocks behind those that the request has."""
        self._append(slot, int(self.num_held[slot]), block_ids)

    def _append(self, slot: int, start: int, block_ids: list[int]) -> None:
        self.num_held[slot] = start + len(block_ids)
        if not block_ids:
            return
        self.block_table.write(slot, start, block_ids)
        for index, block in enumerate(block_ids, start):
            if self._block_index[block] != index or index == 0:
                self._block_index[block] = index
                self.kv_position.write(block, 0, self._offsets + index * self.block_size)

    def cache_slots(self, slots: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """block * block_size + offset of positions int [n] of slots (int [n], or one).

        All of the null block goes into its first slot: V stays zero in its last one, which stands for sinks.
        """
        blocks = self.block_table.host[slots, positions // self.block_size].astype(np.int64)
        return np.where(blocks, blocks * self.block_size + positions % self.block_size, 0)

    def cache_slots_on_device(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The same as ``cache_slots`` for int64 [n] on the device, where the tables must be up to date."""
        blocks = self.block_table.device[slots, positions // self.block_size].long()
        return torch.where(blocks > 0, blocks * self.block_size + positions % self.block_size, 0)

    def flush(self) -> None:
        """Send all differences to the device."""
        self.block_table.flush()
        self.kv_position.flush()


class PersistentBatch:
    """Requests, their batch slots, and the device-resident tables indexed by batch slot.

    token_ids int32 [batch slots, max_model_len + 1]: prompt, answer and drafts. The last column is spare:
    positions end at max_model_len - 1, and an EAGLE head reads one token further. tables: of each KV group.
    groups, states: those with the blocks of layers that attend, and with the states of those that keep one,
    which come behind them. shifts int32 [batch slots]: see ``shift_after``. true_lengths: None unless steps
    are launched before drafts of the last one are verified.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, groups: Sequence[GroupSpec], device: torch.device
    ) -> None:
        self.max_model_len = max_model_len
        self.requests: dict[str, WorkerRequest] = {}
        self.token_ids = MirroredTable(max_num_seqs, max_model_len + 1, device)
        self.tables: list[GroupTables | StateTables] = [
            StateTables(max_num_seqs, group)
            if group.kind == "state"
            else GroupTables(max_num_seqs, max_model_len, group, device)
            for group in groups
        ]
        self.groups = [tables for tables in self.tables if isinstance(tables, GroupTables)]
        self.states = [tables for tables in self.tables if isinstance(tables, StateTables)]
        self.shifts = np.zeros(max_num_seqs, dtype=np.int32)
        self.true_lengths: TrueLengths | None = None
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def apply(self, step: SchedulerOutput) -> tuple[list[int], list[WorkerRequest]]:
        """Follow the scheduler's differences. Returns (slots that became free, requests that got a slot)."""
        freed = [slot for request_id in step.finished_request_ids if (slot := self._release(request_id)) >= 0]
        for request_id in step.finished_request_ids:
            self.requests.pop(request_id, None)
        freed += [
            slot for request_id in step.preempted_request_ids if (slot := self._release(request_id)) >= 0
        ]
        entered = []
        for new in step.new_requests:
            request = WorkerRequest(new.request, new.num_computed_tokens)
            self.requests[new.request.request_id] = request
            self._enter(request, new.block_ids)
            entered.append(request)
        for difference in step.cached_requests:
            request = self.requests[difference.request_id]
            if self.true_lengths is None or difference.resumed:
                request.num_computed_tokens = difference.num_computed_tokens
            # Else the worker counts by itself: of drafts it may know more than the scheduler knew.
            if difference.resumed:
                self._enter(request, difference.new_block_ids)
                entered.append(request)
            else:
                for tables, block_ids in zip(self.tables, difference.new_block_ids):
                    tables.extend(request.slot, block_ids)
        return freed, entered

    def append_tokens(self, request: WorkerRequest, token_ids: list[int]) -> None:
        """Record sampled tokens, also of a request that has left its slot."""
        if request.slot >= 0:
            self.token_ids.write(request.slot, request.num_tokens, token_ids)
        request.output_token_ids += token_ids
        request.num_tokens += len(token_ids)
        if self.true_lengths is not None and request.slot >= 0:
            self.true_lengths.lengths[request.slot] = request.num_tokens

    def append_pending(
        self, requests: list[WorkerRequest], slots: np.ndarray, positions: np.ndarray, token_ids: Tensor
    ) -> None:
        """Let the next step read one sampled token per request, token_ids [len(requests)] int64 on the
        device, behind those of each slot: at ``num_tokens``, which positions repeat. The host learns them
        later."""
        self.token_ids.put(slots, positions, token_ids)
        for request in requests:
            request.num_pending_tokens += 1
            request.num_tokens += 1

    def learn_pending(
        self, requests: list[WorkerRequest], slots: np.ndarray, positions: np.ndarray, token_ids: list[int]
    ) -> np.ndarray:
        """Record what ``append_pending`` was given. Returns bool [len(requests)], False for those that have
        left the slot meanwhile, finished or preempted: it may be another request's."""
        stays = np.fromiter([request.slot for request in requests], np.int64, len(requests)) == slots
        for request, token_id in zip(requests, token_ids):
            request.output_token_ids.append(token_id)
            request.num_pending_tokens -= 1
        self.token_ids.host[slots[stays], positions[stays]] = np.asarray(token_ids)[stays]
        return stays

    def append_unsure(self, requests: list[WorkerRequest], num_drafts: list[int]) -> None:
        """Count what ``TrueLengths.append`` was given: one token for each request, and as many of the drafts
        as are accepted."""
        for request, count in zip(requests, num_drafts):
            request.num_pending_tokens += 1 + count
            request.num_unsure_tokens += count
            request.num_tokens += 1 + count

    def learn_unsure(
        self,
        requests: list[WorkerRequest],
        slots: np.ndarray,
        num_drafts: list[int],
        token_ids: list[list[int]],
    ) -> np.ndarray:
        """Record what ``append_unsure`` has counted. Returns bool [len(requests)], see ``learn_pending``."""
        stays = np.fromiter([request.slot for request in requests], np.int64, len(requests)) == slots
        for request, is_here, count, new in zip(requests, stays, num_drafts, token_ids):
            if is_here:
                start = len(request.data.prompt_token_ids) + len(request.output_token_ids)
                self.token_ids.host[request.slot, start : start + len(new)] = new
            request.output_token_ids += new
            request.num_pending_tokens -= 1 + count
            request.num_unsure_tokens -= count
            request.num_tokens -= 1 + count - len(new)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return stays

    def write_drafts(self, request: WorkerRequest, token_ids: list[int]) -> None:
        """Put guesses behind the known tokens, to be read by the next step;
        sampled tokens will take their places."""
        self.token_ids.write(request.slot, request.num_tokens, token_ids)

    def flush(self) -> None:
        """Send all differences to the device."""
        self.token_ids.flush()
        for tables in self.groups:
            tables.flush()

    def _enter(self, request: WorkerRequest, block_ids: BlockIds) -> None:
        slot = request.slot = self._free_slots.pop()
        prompt = request.data.prompt_token_ids
        request.is_guessed_for = False
        self.shifts[slot] = shift_after(request.data.images)
        self.token_ids.write(slot, 0, prompt)
        if request.output_token_ids:
            self.token_ids.write(slot, len(prompt), request.output_token_ids)
        for tables, own in zip(self.tables, block_ids):
            tables.enter(slot, own)
        for states in self.states:
            states.num_tokens[slot] = request.num_computed_tokens

    def _release(self, request_id: str) -> int:
        request = self.requests.get(request_id)
        if request is None or request.slot < 0:
            return -1
        slot, request.slot = request.slot, -1
        self._free_slots.append(slot)
        return slot
