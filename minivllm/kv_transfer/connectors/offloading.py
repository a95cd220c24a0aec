"""Host memory as a second tier of the prefix cache:
what the device forgets comes back instead of being recomputed.

Every block that becomes full is copied once. So a prompt whose blocks were evicted, and a request that was
preempted (V0's swap), find theirs there. (vLLM's OffloadingConnector.)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence

import msgspec
import torch
from torch import Tensor

from minivllm.config import KVTransferConfig
from minivllm.device.memory import lazily_zeroed
from minivllm.errors import ConfigError
from minivllm.kv_cache.manager import FullBlock
from minivllm.kv_transfer.connector import BlockStore, KVConnector, TransferContext, transfer_of
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, KVConnectorWorker, WorkerContext
from minivllm.kv_transfer.loads import Load
from minivllm.messages import BlockTransfer
from minivllm.specs.caches import LayerCache, StateTensors

DEFAULT_BYTES = 2**30


class OffloadingOptions(msgspec.Struct, forbid_unknown_fields=True):
    """cpu_bytes_to_use: most host memory that blocks take, with all workers together; it is taken when they
    come. Where layers keep states, half of it is for those."""

    cpu_bytes_to_use: int = DEFAULT_BYTES


def num_slots(context: TransferContext) -> tuple[int, int]:
    """Blocks and states that the host memory holds. Raises ConfigError if there is no room for one."""
    num_bytes, size, state = int(context.options.cpu_bytes_to_use), context.block_bytes, context.state_bytes
    if not state and num_bytes < size:
        raise ConfigError(
            f"cpu_bytes_to_use is {num_bytes}, but one block of {context.block_size} tokens takes {size}: "
            "give "
            "OffloadingConnector more."
        )
    if state and num_bytes // 2 < max(size, state):
        raise ConfigError(
            f"cpu_bytes_to_use is {num_bytes}, of which half is for states, but one state takes {state} and "
            "one block "
            f"of {context.block_size} tokens {size}: give OffloadingConnector more."
        )
    return (num_bytes // 2 // size, num_bytes // 2 // state) if state else (num_bytes // size, 0)


class _HostSlots:
    """Which block, or state, lies in which slot of host memory; the least recently used one gives way."""

    def __init__(self, count: int) -> None:
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._fresh = iter(range(count))
        self._freed = list[int]()

    def take(self, key: bytes, loading: Container[bytes]) -> int | None:
        """A slot for what is not there; None if all others are being loaded."""
        slot = self._freed.pop() if self._freed else next(self._fresh, None)
        if slot is None:
            oldest = next((other for other in self.slot_of if other not in loading), None)
            if oldest is None:
                return None
            slot = self.slot_of.pop(oldest)
        self.slot_of[key] = slot
        return slot

    def clear(self) -> None:
        self._freed += self.slot_of.values()
        self.slot_of.clear()


class OffloadingScheduler(BlockStore):
    """Knows the slots of blocks and states. What is being loaded keeps its own."""

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        self._blocks, self._states = map(_HostSlots, num_slots(context))
        self._loading: Counter[bytes] = Counter()

    def _own(self, key: bytes) -> OrderedDict[bytes, int]:
        """The slots of blocks or of states, where the key has its own."""
        return self._states.slot_of if key in self._states.slot_of else self._blocks.slot_of

    def holds(self, key: bytes) -> bool:
        return key in self._own(key)

    def where(self, keys: Sequence[bytes]) -> list[int]:
        for key in reversed(
            keys
        ):  # of one prompt the beginning is used most recently, so that it stays longest
            self._own(key).move_to_end(key)
        self._loading.update(keys)
        return [self._own(key)[key] for key in keys]

    def save(self, blocks: Sequence[FullBlock]) -> list[BlockTransfer]:
        saves = []
        for block in reversed(blocks):
            if self.holds(block.key):
                self._own(block.key).move_to_end(block.key)
                continue
            slot = (self._states if block.is_state else self._blocks).take(block.key, self._loading)
            if slot is not None:
                saves.append(transfer_of(block, [slot]))
        return saves

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        state = self.state_of(load)
        for key in [*load.keys, *([] if state is None else [state])]:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]

    def reset_cache(self) -> None:
        self._blocks.clear()
        self._states.clear()


class OffloadingWorker(KVConnectorWorker):
    """A piece of host memory for blocks, and one for states, cut into slots;
    pinned where a GPU copies from and to it."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._memory: dict[CacheBlocks, Tensor] = {}

    def register_kv_caches(self, caches: Sequence[LayerCache | StateTensors]) -> None:
        """A sleeping engine gives this memory back, too."""
        super().register_kv_caches(caches)
        self._memory = {
            blocks: self._allocate(count, blocks.block_bytes)
            for blocks, count in zip((self.blocks, self.states), num_slots(self.context.transfer))
            if blocks is not None
        }

    def _allocate(self, count: int, size: int) -> Tensor:
        if self.context.device.type == "cuda" or not size:
            return torch.empty(
                (count, size), dtype=torch.uint8, pin_memory=self.context.device.type == "cuda"
            )
        return lazily_zeroed((count, size), torch.uint8)

    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
        return self._memory[blocks][source]

    def save_block(self, key: bytes, target: int, blocks: CacheBlocks) -> Tensor | None:
        return self._memory[blocks][target]


class OffloadingConnector(KVConnector):
    """Keeps full blocks in host memory. kv_connector_extra_config: {"cpu_bytes_to_use": …}."""

    Options = OffloadingOptions
    moves_parts = moves_states = takes_new_weights = True
    scheduler_side = OffloadingScheduler
    worker_side = OffloadingWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        options = cls.options(config)
        if options.cpu_bytes_to_use < 1:
            raise ConfigError(f"cpu_bytes_to_use is {options.cpu_bytes_to_use}, but must be at least 1.")
        if config.kv_role != "kv_both":
            raise ConfigError(
                f"kv_role is {config.kv_role!r}, but OffloadingConnector keeps blocks for its own engine: "
                "'kv_both'."
            )
