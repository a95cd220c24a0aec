"""The worker's side of a connector:
blocks leave the KV cache in the order of steps, and come back beside them.

A save is launched after the step that fills the block, and before the next step, which may write into it. So
the block may be freed meanwhile. A snapshot is what the last steps have left in its slot, so its save is
launched before the next one. A load runs in a thread of its own. It begins when all earlier steps are
computed, since one of them may still write into blocks whose owner has left, and its blocks belong to it
until it has ended.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.connector import TransferContext, with_fingerprint
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.messages import BlockTransfer, KVConnectorMetadata
from minivllm.profiling.spans import spanned
from minivllm.specs.caches import LayerCache, StateTensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Arguments to make a worker's side. report: called from any thread, wakes the engine core."""

    transfer: TransferContext
    device: torch.device
    report: Callable[[KVConnectorOutput], None]


class CacheBlocks:
    """Whole blocks of a KV cache as flat bytes, K and V of one layer after the other; or whole states, whose
    slots are their blocks, one tensor of a layer after the other.

    layout: (name, dtype, shape) of each piece.
    block_bytes: of a block, or a state, over all layers that have one.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache | StateTensors],
        groups: Sequence[GroupSpec],
        of_states: bool = False,
    ) -> None:
        self._groups = [place for place, group in enumerate(groups) if (group.kind == "state") == of_states]
        self._pieces: list[tuple[Any, int, slice]] = []
        self._is_host = True
        self.layout: list[tuple[str, str, list[int]]] = []
        self.block_bytes = 0
        group_of = {layer: place for place in self._groups for layer in groups[place].layers}
        for layer, place in sorted(group_of.items()):
            cache = caches[layer]
            tensors = (cache.k, cache.v) if isinstance(cache, LayerCache) else cache
            names = "kv" if isinstance(cache, LayerCache) else map(str, range(len(tensors)))
            for name, tensor in zip(names, tensors):
                num_bytes = prod(tensor.shape[1:]) * tensor.element_size()
                # Uint8 [blocks, bytes]. In host memory numpy copies:
                # a copy by torch costs more than these few bytes.
                whole = tensor.view(len(tensor), -1).view(torch.uint8)
                self._is_host = tensor.device.type == "cpu"
                own = slice(self.block_bytes, self.block_bytes + num_bytes)
                self._pieces.append((whole.numpy() if self._is_host else whole, place, own))
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.layout.append((f"{layer}.{name}", dtype, list(tensor.shape[1:])))
                self.block_bytes += num_bytes

    def has(self, block_ids: Sequence[int]) -> bool:
        """True if one of these blocks, one for each KV group, is in one of the groups that are moved here."""
        return any(block_ids[place] != NULL_BLOCK_ID for place in self._groups)

    def read(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Copy a block into ``data``, uint8 [block_bytes], when what was launched so far is computed."""
        target = self._host_view(data)
        for cache, group, place in self._pieces:
            _copy(target[place], cache[block_ids[group]])

    def write(self, block_ids: Sequence[int], data: Tensor) -> None:
        """The way back; groups in which the block is the null block get nothing."""
        source = self._host_view(data)
        for cache, group, place in self._pieces:
            if block_ids[group] != NULL_BLOCK_ID:
                _copy(cache[block_ids[group]], source[place])

    def _host_view(self, data: Tensor) -> Any:
        return data.numpy() if self._is_host else data


def _copy(target: Any, source: Any) -> None:
    """uint8 [bytes], both tensors or both arrays."""
    if isinstance(target, Tensor):
        target.copy_(source, non_blocking=True)
    else:
        target[:] = source


class ConnectorWorker(ABC):
    """The interface that the worker calls, from one thread, in the order of steps."""

    @abstractmethod
    def register_kv_caches(self, caches: Sequence[LayerCache | StateTensors]) -> None:
        """The caches of all layers from now on; none while the engine sleeps. No load is under way."""

    @abstractmethod
    def save_snapshots(self, metadata: KVConnectorMetadata) -> None:
        """Launch the saves of states, before the step is launched and any of its loads begins:
        both may write into their slots."""

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Begin the loads of a step, before it is launched."""

    @abstractmethod
    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        """Launch the saves of a step, after it:
        no later step can write into their blocks before they are read."""

    @abstractmethod
    def new_weights(self, fingerprint: str) -> None:
        """The model has other weights, so blocks have other contents. No load is under way."""

    @abstractmethod
    def shutdown(self) -> None:
        """Finish what is under way."""


class KVConnectorWorker(ConnectorWorker):
    """Moves whole blocks, and whole states. A subclass says what ``load_block`` and ``save_block`` do.

    blocks: of the layers that attend; None while the KV cache has no memory.
    states: of those that keep one; None if there are none.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.blocks: CacheBlocks | None = None
        self.states: CacheBlocks | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-loads")
        self._stream: Any = torch.cuda.Stream(context.device) if context.device.type == "cuda" else None

    # -- what a subclass says ----------------------------------------------------------------------

    @abstractmethod
    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
        """What a block holds, uint8 [blocks.block_bytes] in host memory; None if it is missing or not what it
        should be. Called by the loads' thread. source: as the scheduler's side numbers it, or -1. blocks:
        ``self.blocks``, or ``self.states`` if the key names a state."""

    @abstractmethod
    def save_block(self, key: bytes, target: int, blocks: CacheBlocks) -> Tensor | None:
        """Memory for a block that is saved, uint8 [blocks.block_bytes] on the host;
        None if it need not be."""

    def loaded(self, keys: Sequence[bytes]) -> None:
        """These blocks of a load were good. Called by the loads' thread."""

    def saved(self, data: list[tuple[bytes, Tensor]], wait: Callable[[], None], blocks: CacheBlocks) -> None:
        """The blocks' contents are in the memory that save_block gave, once ``wait`` has returned."""

    # -- what the worker calls ---------------------------------------------------------------------

    def register_kv_caches(self, caches: Sequence[LayerCache | StateTensors]) -> None:
        groups = self.context.transfer.groups
        self.blocks = CacheBlocks(caches, groups) if caches else None
        has_states = bool(caches) and any(group.kind == "state" for group in groups)
        self.states = CacheBlocks(caches, groups, of_states=True) if has_states else None

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        for load in metadata.loads:
            self._thread.submit(self._load, load, self._fence())

    def save_snapshots(self, metadata: KVConnectorMetadata) -> None:
        if metadata.snapshots and self.states is not None:
            self._save(metadata.snapshots, self.states)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        if metadata.saves and self.blocks is not None:
            self._save(metadata.saves, self.blocks)

    @spanned("save_kv")
    def _save(self, saves: Sequence[BlockTransfer], blocks: CacheBlocks) -> None:
        kept = []
        for save in saves:
            for index, key in enumerate(save.keys):
                data = self.save_block(key, save.where[index] if save.where else -1, blocks)
                if data is not None:
                    blocks.read([own[index] for own in save.block_ids], data)
                    kept.append((key, data))
        if kept:
            self.saved(kept, self._fence(), blocks)

    def new_weights(self, fingerprint: str) -> None:
        self.context = replace(self.context, transfer=with_fingerprint(self.context.transfer, fingerprint))

    def shutdown(self) -> None:
        self._thread.shutdown()

    def _fence(self) -> Callable[[], None]:
        """Waits, when it is called, for what the device was given before."""
        if self._stream is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.context.device))
        return event.synchronize

    @spanned("load_kv")
    @torch.inference_mode()
    def _load(self, load: BlockTransfer, wait: Callable[[], None]) -> None:
        num_valid, good = 0, []
        try:
            wait()
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for index, key in enumerate(load.keys):
                    block_ids = [own[index] for own in load.block_ids]
                    is_state = self.states is not None and self.states.has(block_ids)
                    blocks = self.states if is_state else self.blocks
                    if blocks is None:
                        break
                    data = self.load_block(key, load.where[index] if load.where else -1, blocks)
                    if data is None or data.numel() != blocks.block_bytes:
                        break
                    blocks.write(block_ids, data)
                    good.append(key)
                    num_valid += not is_state
            if self._stream is not None:
                self._stream.synchronize()
            self.loaded(good)
        except Exception:  # whatever it is, the request must not wait for ever
            logger.exception("Loading %d blocks failed.", len(load.keys))
            num_valid = 0
        rank = self.context.transfer.rank
        self.context.report(KVConnectorOutput(rank=rank, finished_recving={load.transfer_id: num_valid}))
