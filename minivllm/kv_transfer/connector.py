"""A connector: a place besides the KV cache where keys and values are kept (vLLM V1's KV connector).

It has two sides. The scheduler's side knows which blocks can be loaded, and decides in each step which ones
travel. The worker's side moves them. A block is named by its hash, which covers all tokens up to its end, the
cache salt and the contents of the adapter. So equal names mean equal contents.

Two things are simpler than in vLLM. A load always ends before its request is scheduled, so its failure is
known before anything is computed from it; there are no hooks around single layers, and no CUDA graph has to
make way. And a load fills blocks of the prefix cache, not of a request: the request is admitted later, like
any whose beginning is cached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from minivllm.config import KVTransferConfig
from minivllm.errors import ConfigError, RequestError
from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.kv_cache.blocks.hashing import state_name
from minivllm.kv_cache.manager import FullBlock
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.loads import Load
from minivllm.messages import BlockIds, BlockTransfer, KVConnectorMetadata
from minivllm.plugins.points import CONNECTORS
from minivllm.request import Request

if TYPE_CHECKING:
    from minivllm.kv_transfer.inbox import KVConnectorOutput

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class TransferContext:
    """Arguments to make both sides. options: of the connector's type. groups: the KV groups with their pools;
    blocks of all of them hold equally many tokens, so one hash names one block in each.

    num_ranks: workers, each of which moves its own part of every block. block_bytes: of a block over all
    layers that attend and all ranks, whose parts may differ; state_bytes: of a state, 0 where no layer keeps
    one. rank: of this worker; the scheduler's side has none and takes 0.
    """

    config: KVTransferConfig
    options: Any
    groups: Sequence[GroupSpec]
    block_bytes: int
    state_bytes: int = 0
    num_ranks: int = 1
    rank: int = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.groups[0].block_size


class KVConnectorScheduler:
    """The scheduler's side. As it stands it holds nothing, which is the default connector:
    no step costs anything.

    tier: its name among the metrics. block_bytes: of one block over all layers and ranks. num_ranks: workers
    that report each transfer. num_saved_blocks: since the start.
    """

    is_connected = False
    num_ranks = 1
    tier = ""
    block_bytes = 0
    num_saved_blocks = 0

    @property
    def is_asking(self) -> bool:
        """True if a caller was told None, and the answer is on its way."""
        return False

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when such an answer is there."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to be had beyond the ``num_computed_tokens`` found in the prefix cache, whole blocks; None:
        not known yet, ask again in the next step. Changes nothing that is held, and never waits.

        What lies beyond the last whole block of ``num_tokens - 1`` tokens is not taken:
        one must run to give logits.
        """
        return 0

    def update_state_after_alloc(self, request: Request, load: Load) -> None:
        """A load begins with the next metadata: ``load.keys`` into ``load.block_ids``."""

    def build_connector_meta(self, full_blocks: Sequence[FullBlock]) -> KVConnectorMetadata | None:
        """Called once at the end of every schedule.
        full_blocks: hold what they should when that step is computed."""
        return None

    def merge(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """A worker's report, in terms of the scheduler's transfers."""
        return output

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        """A load has ended, with as many of its blocks as they should be, from the first one on."""

    @property
    def tiers(self) -> Sequence[KVConnectorScheduler]:
        """Those that are counted by themselves."""
        return [self]

    def sources(self, load: Load) -> list[tuple[int, int]]:
        """(index of a tier, blocks it has of the load), in the order of the blocks."""
        return [(0, len(load.keys))]

    def request_finished(self, request: Request, block_ids: BlockIds) -> bool:
        """A request ends, whatever the reason.
        True: its blocks are still read, so they are held until its id is among ``finished_sending``."""
        return False

    def reset_cache(self) -> None:
        """Forget what is held in this process; nothing is under way."""

    def new_weights(self, fingerprint: str) -> None:
        """The model has other weights: nothing of the old ones is found from now on. Nothing is under way."""
        self.reset_cache()

    def shutdown(self) -> None:
        """The engine ends."""


class BlockStore(KVConnectorScheduler, ABC):
    """The scheduler's side of a connector that keeps blocks by their hashes.
    A subclass says what it ``holds``.

    A hit is an unbroken run of blocks, each with the layers of all KV groups that attend. Windows would do
    with the last ones; but a block that is full has all of its groups at that moment, and a prompt that ends
    earlier needs other ones. Where layers keep states, it ends where the store has the state too, which is
    kept under a name of its own.
    """

    is_connected = True

    def __init__(self, context: TransferContext) -> None:
        self.context = context
        self.tier = context.config.kv_connector
        self.block_bytes = context.block_bytes
        self.num_ranks = context.num_ranks
        self._loads: list[BlockTransfer] = []

    @abstractmethod
    def holds(self, key: bytes) -> bool:
        """True if the block of this hash, or the state of this name, can be loaded."""

    def where(self, keys: Sequence[bytes]) -> list[int]:
        """Where they are, for the worker's side; called when a load begins."""
        return []

    def save(self, blocks: Sequence[FullBlock]) -> list[BlockTransfer]:
        """Which of the blocks that became full, or of the snapshots, are saved; all of them, unless a
        subclass knows better. One call has only blocks, or only snapshots."""
        return [transfer_of(block) for block in blocks]

    def new_weights(self, fingerprint: str) -> None:
        self.context = with_fingerprint(self.context, fingerprint)
        super().new_weights(fingerprint)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        if not self.context.config.loads:
            return 0
        size, count = self.context.block_size, 0
        for key in request.block_hashes[num_computed_tokens // size : (request.num_tokens - 1) // size]:
            if not self.holds(key):
                break
            count += 1
        if self.context.state_bytes:
            start = num_computed_tokens // size
            while count and not self.holds(state_name(request.block_hashes[start + count - 1])):
                count -= 1
        return count * size

    def state_of(self, load: Load) -> bytes | None:
        """Name of the state that a load brings; None if it brings none."""
        for group, blocks in zip(self.context.groups, load.blocks):
            if group.kind == "state" and blocks[-1].block_id != NULL_BLOCK_ID:
                return state_name(load.keys[-1])
        return None

    def failed(self, load: Load, num_valid_blocks: int) -> list[bytes]:
        """Keys that a load did not get: that of the first failed block, and if no block came, also that of
        the state, which was asked for first."""
        state = None if num_valid_blocks else self.state_of(load)
        return load.keys[num_valid_blocks : num_valid_blocks + 1] + ([] if state is None else [state])

    def update_state_after_alloc(self, request: Request, load: Load) -> None:
        keys, block_ids, state = load.keys, load.block_ids, self.state_of(load)
        if state is not None:
            # It comes first: without it, the blocks are of no use.
            keys = [state, *keys]
            kinds = [group.kind for group in self.context.groups]
            block_ids = tuple(
                [own[-1], *[NULL_BLOCK_ID] * len(own)] if kind == "state" else [NULL_BLOCK_ID, *own]
                for kind, own in zip(kinds, block_ids)
            )
        self._loads.append(
            BlockTransfer(
                keys=keys, block_ids=block_ids, where=self.where(keys), transfer_id=load.transfer_id
            )
        )

    def build_connector_meta(self, full_blocks: Sequence[FullBlock]) -> KVConnectorMetadata | None:
        saves, snapshots = [], []
        if full_blocks and self.context.config.saves:
            saves = self.save([block for block in full_blocks if not block.is_state])
            snapshots = self.save([block for block in full_blocks if block.is_state])
        self.num_saved_blocks += len(saves)
        if not saves and not snapshots and not self._loads:
            return None
        loads, self._loads = self._loads, []
        return KVConnectorMetadata(loads=loads, saves=saves, snapshots=snapshots)


def transfer_of(block: FullBlock, targets: Sequence[int] = ()) -> BlockTransfer:
    """A single block, to be saved. targets: see BlockTransfer.where."""
    return BlockTransfer(
        keys=[block.key], block_ids=tuple([one] for one in block.block_ids), where=list(targets)
    )


class KVConnector:
    """Base class of connectors: a subclass names both sides and the type of the options.

    scheduler_side: TransferContext -> KVConnectorScheduler. worker_side: WorkerContext -> KVConnectorWorker.
    Options: entries of kv_connector_extra_config. outlives_engine: another process can load the saved blocks.
    moves_parts: several workers go with it, each with its own part of a block; they must not take one
    another's. moves_states: what it keeps may be blocks or states, which have another size.
    takes_new_weights: both sides have a ``new_weights`` that keeps what was saved from being found with other
    weights.
    """

    Options: type[msgspec.Struct] = msgspec.defstruct("Options", [], forbid_unknown_fields=True)
    outlives_engine = False
    moves_parts = False
    moves_states = False
    takes_new_weights = False
    scheduler_side: Callable[[TransferContext], KVConnectorScheduler]
    worker_side: Callable[[Any], Any]

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        """Raise ConfigError for settings that this connector cannot work with."""
        cls.options(config)

    @classmethod
    def check_ranks(cls, config: KVTransferConfig, num_ranks: int) -> None:
        """Raise ConfigError for more workers than this connector can serve."""
        if num_ranks > 1 and not cls.moves_parts:
            raise ConfigError(
                f"{config.kv_connector} moves the blocks of a single worker, but there are {num_ranks}: use "
                "one worker."
            )

    @classmethod
    def check_states(cls, config: KVTransferConfig) -> None:
        """Raise ConfigError if this connector cannot serve a model whose layers keep states."""
        if not cls.moves_states:
            raise ConfigError(
                f"{config.kv_connector} moves blocks of keys and values, but layers of this model keep a "
                "state, and "
                "without it those would be of no use: use another connector, such as OffloadingConnector."
            )

    @classmethod
    def check_new_weights(cls, config: KVTransferConfig) -> None:
        """Raise RequestError if this connector belongs to the weights that the engine was started with."""
        if not cls.takes_new_weights:
            raise RequestError(
                f"New weights do not go with {config.kv_connector}, whose blocks are known as those of the "
                "weights "
                "that the engine was started with: start another engine."
            )

    @classmethod
    def needs_fingerprint(cls, config: KVTransferConfig) -> bool:
        """True if saved blocks must be kept apart from those of other models,
        by KVTransferConfig.fingerprint."""
        return cls.outlives_engine

    @classmethod
    def options(cls, config: KVTransferConfig) -> Any:
        """kv_connector_extra_config in the connector's own type. Raises ConfigError."""
        try:
            return msgspec.convert(config.kv_connector_extra_config, cls.Options)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.Options.__struct_fields__) or "nothing"
            raise ConfigError(
                f"kv_transfer_config['kv_connector_extra_config'] does not fit {config.kv_connector}: "
                f"{error}. It may "
                f"hold: {known}."
            ) from None


def load_connector(config: KVTransferConfig) -> type[KVConnector]:
    """The connector of this name, its settings checked. Raises ConfigError."""
    found = CONNECTORS.load(config.kv_connector)
    if not isinstance(found, type) or not issubclass(found, KVConnector):
        raise ConfigError(
            f"kv_transfer_config['kv_connector'] {config.kv_connector!r} must be a subclass of "
            "minivllm.KVConnector "
            "(the class)."
        )
    found.check(config)
    return found


def make_context(
    config: KVTransferConfig,
    groups: Sequence[GroupSpec],
    block_bytes: Sequence[int],
    num_ranks: int = 1,
    rank: int = 0,
) -> TransferContext:
    """See TransferContext. block_bytes: of each group, over all ranks.
    Raises ConfigError for KV groups whose blocks cannot travel together."""
    if len({group.block_size for group in groups}) > 1:
        kinds = ", ".join(f"{group.name} in blocks of {group.block_size}" for group in groups)
        raise ConfigError(
            f"kv_transfer_config needs keys and values in blocks of one size, but this model keeps {kinds}: "
            "leave it "
            "out for this model."
        )
    of_states = sum(size for group, size in zip(groups, block_bytes) if group.kind == "state")
    return TransferContext(
        config=config,
        options=load_connector(config).options(config),
        groups=groups,
        block_bytes=sum(block_bytes) - of_states,
        state_bytes=of_states,
        num_ranks=num_ranks,
        rank=rank,
    )


def with_fingerprint(context: TransferContext, fingerprint: str) -> TransferContext:
    """The same with other weights."""
    return replace(context, config=replace(context.config, fingerprint=fingerprint))


def side_context(context: TransferContext, config: KVTransferConfig) -> TransferContext:
    """The same for one of several connectors."""
    return replace(context, config=config, options=load_connector(config).options(config))


def make_scheduler_side(
    config: KVTransferConfig | None,
    groups: Sequence[GroupSpec],
    block_bytes: Sequence[int],
    num_ranks: int = 1,
) -> KVConnectorScheduler:
    """The connector that the settings name, or the one that holds nothing.
    block_bytes: of each group, over all ranks. Raises ConfigError."""
    if config is None:
        return KVConnectorScheduler()
    side = load_connector(config).scheduler_side(make_context(config, groups, block_bytes, num_ranks))
    side.num_ranks = num_ranks
    return side
