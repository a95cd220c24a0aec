"""A connector whose blocks are hashes of what should be in them,
and whose transport does whatever a test wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

from minivllm.config import KVTransferConfig
from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.kv_cache.manager import FullBlock
from minivllm.kv_cache.specs import GroupSpec, one_group
from minivllm.kv_transfer.connector import BlockStore, KVConnectorScheduler, TransferContext
from minivllm.kv_transfer.connectors.multi import MultiScheduler, part_of
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.loads import Load
from minivllm.messages import BlockIds, BlockTransfer, SchedulerOutput
from minivllm.request import Request
from tests.scheduler.simulated_worker import SimulatedWorker

GARBAGE = -1
Contents = tuple[list[int | None], ...]
"""What the cache slots of a block hold, in every KV group."""


class SimulatedStore(BlockStore):
    """Scheduler's side. Names stay known when contents were lost, until a load fails. sends_every: which of
    the requests that end are still read afterwards. lacks: a third of all blocks is never saved here: 0, 1 or
    2."""

    def __init__(
        self, block_size: int, sends_every: int = 0, groups: Sequence[GroupSpec] = (), num_ranks: int = 1
    ) -> None:
        config, groups = KVTransferConfig(kv_connector="simulated"), groups or [one_group(1, block_size, 1)]
        super().__init__(
            TransferContext(config=config, options=None, groups=groups, block_bytes=1, num_ranks=num_ranks)
        )
        self.names: set[bytes] = set()
        self.lacks: int | None = None
        self.is_shy = False
        self._sends_every, self._num_finished = sends_every, 0
        self.sent: list[tuple[str, BlockIds]] = []

    def holds(self, key: bytes) -> bool:
        return key in self.names

    def save(self, blocks: Sequence[FullBlock]) -> list[BlockTransfer]:
        return super().save([block for block in blocks if block.key[0] % 3 != self.lacks])

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        return None if self.is_shy else super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        self.names.difference_update(load.keys[num_valid_blocks:])

    def request_finished(self, request: Request, block_ids: BlockIds) -> bool:
        self._num_finished += 1
        if not self._sends_every or self._num_finished % self._sends_every or not block_ids[0]:
            return False
        self.sent.append((request.request_id, block_ids))
        return True

    def reset_cache(self) -> None:
        self.names.clear()


@dataclass
class Transport:
    """Worker's side: what is stored, what is on its way, and what was reported before. valid: of each load,
    what the ranks that are done have reported; done_sending: of each send, how many ranks are done."""

    worker: SimulatedWorker
    store: SimulatedStore
    stored: dict[bytes, Contents] = field(default_factory=dict)
    loads: list[BlockTransfer] = field(default_factory=list)
    sends: list[tuple[str, BlockIds, Contents]] = field(default_factory=list)
    reports: list[KVConnectorOutput] = field(default_factory=list)
    valid: dict[str, list[int]] = field(default_factory=dict)
    done_sending: Counter[str] = field(default_factory=Counter)
    num_whole: int = 0

    def follow(self, step: SchedulerOutput) -> None:
        """After the worker has executed a step."""
        metadata = step.kv_connector_metadata
        for save in metadata.saves if metadata else ():
            for index, key in enumerate(save.keys):
                contents = tuple(self._read(group, ids[index]) for group, ids in enumerate(save.block_ids))
                assert all(None not in own and GARBAGE not in own for own in contents), (
                    "saved before it was computed"
                )
                assert self.stored.setdefault(key, contents) == contents, "one hash, two contents"
                self.store.names.add(key)
        self.loads += metadata.loads if metadata else ()

    def start_sends(self) -> None:
        for request_id, block_ids in self.store.sent:
            contents = tuple(
                [slot for one in ids for slot in self._read(g, one)] for g, ids in enumerate(block_ids)
            )
            self.sends.append((request_id, block_ids, contents))
        self.store.sent = []

    def scribble(self) -> None:
        """Loads under way may write whatever they like into their blocks, at any time."""
        for load in self.loads:
            for group, ids in enumerate(load.block_ids):
                for block_id in ids:
                    self._write(group, block_id, None)

    def carry(self, choice: int, num_good: int) -> KVConnectorOutput:
        """One rank ends a load: its first blocks arrive, the next ones are broken, and what was lost from the
        store is lost. The blocks hold what they should as far as they do with all ranks, and not before the
        last one is done."""
        load = self.loads[choice % len(self.loads)]
        own = [key in self.stored for key in load.keys[:num_good]] + [False]
        valid = self.valid.setdefault(load.transfer_id, [])
        rank = self._next_rank(load.transfer_id)
        valid.append(own.index(False))
        if len(valid) == self.store.num_ranks:
            self.loads.remove(load)
            for group, ids in enumerate(load.block_ids):
                for index, block_id in enumerate(ids):
                    is_good = index < min(valid)
                    self._write(group, block_id, self.stored[load.keys[index]][group] if is_good else None)
            self.num_whole += min(valid) == len(load.keys)
        self.reports.append(KVConnectorOutput(rank=rank, finished_recving={load.transfer_id: valid[-1]}))
        return self.reports[-1]

    def lose(self, seed: int) -> None:
        """Half of what is stored."""
        for key in Random(seed).sample(sorted(self.stored), len(self.stored) // 2):
            del self.stored[key]

    def _next_rank(self, transfer_id: str) -> int:
        """One that has not reported yet."""
        done = {report.rank for report in self.reports if transfer_id in report.finished_recving}
        return next(rank for rank in range(self.store.num_ranks) if rank not in done)

    def end_send(self, choice: int) -> KVConnectorOutput:
        """A rank is done with the blocks of a request that ended, which must be as they were."""
        request_id, block_ids, contents = self.sends[choice % len(self.sends)]
        rank = self.done_sending[request_id]
        self.done_sending[request_id] += 1
        if self.done_sending[request_id] == self.store.num_ranks:
            del self.sends[choice % len(self.sends)]
        now = tuple([slot for one in ids for slot in self._read(g, one)] for g, ids in enumerate(block_ids))
        assert now == contents, "somebody wrote into blocks that are still read"
        self.reports.append(KVConnectorOutput(rank=rank, finished_sending=[request_id]))
        return self.reports[-1]

    def _read(self, group: int, block_id: int) -> list[int | None]:
        size = self.worker.groups[group].block_size
        return [self.worker.slots[group].get(block_id * size + place) for place in range(size)]

    def _write(self, group: int, block_id: int, contents: list[int | None] | None) -> None:
        size = self.worker.groups[group].block_size
        for place in range(size if block_id != NULL_BLOCK_ID else 0):
            value = GARBAGE if contents is None else contents[place]
            assert value is not None
            self.worker.slots[group][block_id * size + place] = value


class SimulatedMulti(MultiScheduler):
    """Two stores, each of which lacks another third of the blocks, as one connector."""

    def __init__(self, block_size: int, sends_every: int = 0, num_ranks: int = 1) -> None:
        self.stores = [
            SimulatedStore(block_size, sends_every and sends_every + n, (), num_ranks) for n in range(2)
        ]
        for index, store in enumerate(self.stores):
            store.lacks = index
        super().__init__(self.stores[0].context)
        self.num_ranks = num_ranks

    def _make_sides(self, context: TransferContext) -> list[KVConnectorScheduler]:
        return list(self.stores)

    @property
    def is_shy(self) -> bool:
        return any(store.is_shy for store in self.stores)

    @is_shy.setter
    def is_shy(self, value: bool) -> None:
        self.stores[-1].is_shy = value

    @property
    def sent(self) -> list[tuple[str, BlockIds]]:
        return [sent for store in self.stores for sent in store.sent]


class MultiTransport:
    """What carries for both, with the methods of one."""

    def __init__(self, worker: SimulatedWorker, store: SimulatedMulti) -> None:
        self.own = [Transport(worker, own) for own in store.stores]
        self.reports: list[KVConnectorOutput] = []
        self.num_composed = 0

    @property
    def loads(self) -> list[BlockTransfer]:
        return [load for own in self.own for load in own.loads]

    @property
    def sends(self) -> list[tuple[str, BlockIds, Contents]]:
        return [send for own in self.own for send in own.sends]

    @property
    def num_whole(self) -> int:
        return sum(own.num_whole for own in self.own)

    def follow(self, step: SchedulerOutput) -> None:
        metadata = step.kv_connector_metadata
        if metadata is not None:
            self.num_composed += sum(load.transfer_id.endswith(".1") for load in metadata.loads)
            for index, own in enumerate(self.own):
                own.follow(msgspec.structs.replace(step, kv_connector_metadata=part_of(metadata, index)))

    def start_sends(self) -> None:
        for own in self.own:
            own.start_sends()

    def scribble(self) -> None:
        for own in self.own:
            own.scribble()

    def lose(self, seed: int) -> None:
        self.own[seed % 2].lose(seed)

    def carry(self, choice: int, num_good: int) -> KVConnectorOutput:
        index = choice % 2 if self.own[choice % 2].loads else 1 - choice % 2
        return self._report(index, self.own[index].carry(choice // 2, num_good))

    def end_send(self, choice: int) -> KVConnectorOutput:
        index = choice % 2 if self.own[choice % 2].sends else 1 - choice % 2
        return self._report(index, self.own[index].end_send(choice // 2))

    def _report(self, index: int, report: KVConnectorOutput) -> KVConnectorOutput:
        self.reports.append(msgspec.structs.replace(report, part=index))
        return self.reports[-1]
