"""Host memory as a second tier of the prefix cache: what the device forgets comes back instead of being recomputed.

Every block that becomes full is copied once. So a prompt whose blocks were evicted, and a request that was preempted
(V0's swap), find theirs there. (vLLM's OffloadingConnector.)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from minivllm.config import KVTransferConfig
from minivllm.device.memory import lazily_zeroed
from minivllm.errors import ConfigError
from minivllm.kv_cache.manager import FullBlock
from minivllm.kv_transfer.connector import BlockStore, KVConnector, TransferContext, transfer_of
from minivllm.kv_transfer.connectors.worker_side import KVConnectorWorker, WorkerContext
from minivllm.kv_transfer.remote_loads import Load
from minivllm.messages import BlockTransfer
from minivllm.models.model import LayerCache, StateTensors

DEFAULT_BYTES = 2**30


class OffloadingOptions(msgspec.Struct, forbid_unknown_fields=True):
    """cpu_bytes_to_use: most host memory that blocks take, with all workers together; it is taken when they come."""

    cpu_bytes_to_use: int = DEFAULT_BYTES


def num_places(context: TransferContext) -> int:
    """Blocks that the host memory holds. Raises ConfigError if there is no room for one."""
    count = int(context.options.cpu_bytes_to_use) // context.block_bytes
    if count < 1:
        raise ConfigError(
            f"cpu_bytes_to_use is {context.options.cpu_bytes_to_use}, but one block of {context.block_size} tokens "
            f"takes {context.block_bytes}: give OffloadingConnector more."
        )
    return count


class OffloadingScheduler(BlockStore):
    """Which block lies in which place; the least recently used one gives way, unless it is being loaded."""

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_places(context) - 1, -1, -1))
        self._loading: Counter[bytes] = Counter()

    def holds(self, key: bytes) -> bool:
        return key in self._place_of

    def places(self, keys: Sequence[bytes]) -> list[int]:
        for key in reversed(keys):  # of one prompt the beginning is used most recently, so that it stays longest
            self._place_of.move_to_end(key)
        self._loading.update(keys)
        return [self._place_of[key] for key in keys]

    def save(self, blocks: Sequence[FullBlock]) -> list[BlockTransfer]:
        saves = []
        for block in reversed(blocks):
            if block.key in self._place_of:
                self._place_of.move_to_end(block.key)
                continue
            place = self._take_place()
            if place is not None:
                self._place_of[block.key] = place
                saves.append(transfer_of(block, [place]))
        return saves

    def _take_place(self) -> int | None:
        """A free place, or that of the block that was not used for longest; None if all are being loaded."""
        if self._free:
            return self._free.pop()
        for key in self._place_of:
            if key not in self._loading:
                return self._place_of.pop(key)
        return None

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        for key in load.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]

    def reset_cache(self) -> None:
        self._free += self._place_of.values()
        self._place_of.clear()


class OffloadingWorker(KVConnectorWorker):
    """One piece of host memory, cut into blocks; pinned where a GPU copies from and to it."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def register_kv_caches(self, caches: Sequence[LayerCache | StateTensors]) -> None:
        """A sleeping engine gives this memory back, too."""
        super().register_kv_caches(caches)
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self.blocks is not None:
            shape = (num_places(self.context.transfer), self.blocks.block_bytes)
            is_cuda = self.context.device.type == "cuda"
            self._memory = (
                torch.empty(shape, dtype=torch.uint8, pin_memory=True) if is_cuda else lazily_zeroed(shape, torch.uint8)
            )

    def load_block(self, key: bytes, place: int) -> Tensor | None:
        return self._own(place)

    def save_block(self, key: bytes, place: int) -> Tensor | None:
        return self._own(place)

    def _own(self, place: int) -> Tensor | None:
        return None if self.blocks is None else self._memory[place]


class OffloadingConnector(KVConnector):
    """Keeps full blocks in host memory. kv_connector_extra_config: {"cpu_bytes_to_use": …}."""

    Options = OffloadingOptions
    moves_parts = takes_new_weights = True
    scheduler_side = OffloadingScheduler
    worker_side = OffloadingWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        options = cls.options(config)
        if options.cpu_bytes_to_use < 1:
            raise ConfigError(f"cpu_bytes_to_use is {options.cpu_bytes_to_use}, but must be at least 1.")
        if config.kv_role != "kv_both":
            raise ConfigError(
                f"kv_role is {config.kv_role!r}, but OffloadingConnector keeps blocks for its own engine: 'kv_both'."
            )
