"""A second tier of the prefix cache for traces:
everything that becomes full is saved, and comes back after a while."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.config import KVTransferConfig
from minivllm.kv_cache.manager import FullBlock
from minivllm.kv_cache.specs import one_group
from minivllm.kv_transfer.connector import BlockStore, TransferContext
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.loads import Load
from minivllm.messages import KVConnectorMetadata
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler


class SimulatedTier(BlockStore):
    """Both sides of a connector without a worker.
    load_steps: from the step of a load to that in which it is there."""

    def __init__(self, block_size: int, load_steps: int) -> None:
        config = KVTransferConfig(kv_connector="simulated")
        groups = [one_group(1, block_size, 1)]
        super().__init__(TransferContext(config=config, options=None, groups=groups, block_bytes=1))
        self._load_steps = load_steps
        self._saved: set[bytes] = set()
        self._begun: list[Load] = []
        self._due: list[tuple[int, Load]] = []

    def holds(self, key: bytes) -> bool:
        return key in self._saved

    def update_state_after_alloc(self, request: Request, load: Load) -> None:
        super().update_state_after_alloc(request, load)
        self._begun.append(load)

    def build_connector_meta(self, full_blocks: Sequence[FullBlock]) -> KVConnectorMetadata | None:
        metadata = super().build_connector_meta(full_blocks)
        self._saved.update(block.key for block in full_blocks)
        return metadata

    def bring(self, scheduler: Scheduler, step: int) -> None:
        """Before a step is planned: what began in the one before is noted, and what is due is there."""
        self._due += [(step - 1 + self._load_steps, load) for load in self._begun]
        self._begun = []
        arrived = [load for due, load in self._due if due <= step]
        self._due = [(due, load) for due, load in self._due if due > step]
        for load in arrived:
            scheduler.update_connector_output(
                KVConnectorOutput(finished_recving={load.transfer_id: len(load.keys)})
            )
