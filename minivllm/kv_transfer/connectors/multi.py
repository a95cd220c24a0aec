"""Several connectors at once: what one lacks may lie in the next. (vLLM's MultiConnector.)

A hit begins with the blocks of the first connector that has some, goes on where they end with those of the
first one that has more, and so on. So the fastest tier is named first. Saves go to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from minivllm.config import KVTransferConfig
from minivllm.errors import ConfigError
from minivllm.kv_cache.manager import FullBlock
from minivllm.kv_transfer.connector import (
    KVConnector,
    KVConnectorScheduler,
    TransferContext,
    load_connector,
    side_context,
)
from minivllm.kv_transfer.connectors.worker_side import ConnectorWorker, WorkerContext
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.loads import Load
from minivllm.messages import BlockIds, BlockTransfer, KVConnectorMetadata
from minivllm.request import Request
from minivllm.specs.caches import LayerCache, StateTensors


class MultiOptions(msgspec.Struct, forbid_unknown_fields=True):
    """connectors: a kv_transfer_config for each, the fastest first;
    roles are those of the whole unless they are given."""

    connectors: list[dict[str, Any]]


def configs_of(config: KVTransferConfig) -> list[KVTransferConfig]:
    """The settings of each connector. Raises ConfigError."""
    name = "kv_connector_extra_config['connectors']"
    found = []
    for values in MultiConnector.options(config).connectors:
        if "kv_load_failure_policy" in values:
            raise ConfigError(
                f"{name} has a kv_load_failure_policy, which is one for all: put it beside 'MultiConnector'."
            )
        own = KVTransferConfig.from_dict({"kv_role": config.kv_role, **values})
        if load_connector(own) is MultiConnector:
            raise ConfigError(f"{name} has a MultiConnector: name its connectors in the one list.")
        found.append(replace(own, fingerprint=config.fingerprint, settings=config.settings))
    if not found:
        raise ConfigError(f"{name} is empty, but must have a kv_transfer_config for each connector.")
    return found


class _Composed:
    """A load in pieces, one connector's after another's.

    pieces: (which connector, its part of the load). valid: rank -> piece -> how many of its blocks are good.
    """

    def __init__(self, pieces: list[tuple[int, Load]]) -> None:
        self.pieces = pieces
        self.valid: dict[int, dict[int, int]] = {}

    def num_valid(self, rank: int) -> int | None:
        """Good blocks from the first one on; None while a piece is missing."""
        valid, total = self.valid[rank], 0
        if len(valid) < len(self.pieces):
            return None
        for index, (_, load) in enumerate(self.pieces):
            total += valid[index]
            if valid[index] < len(load.keys):
                break
        return total


class MultiScheduler(KVConnectorScheduler):
    """The scheduler's sides of all, as one.
    To their workers' sides a piece of a load is a load of its own."""

    is_connected = True

    def __init__(self, context: TransferContext) -> None:
        self._block_size = context.block_size
        self._num_ranks = context.num_ranks
        self._sides = self._make_sides(context)
        self._found: list[tuple[int, int]] | None = None
        self._composed: dict[str, _Composed] = {}
        self._sending: dict[str, tuple[set[int], dict[int, set[int]]]] = {}

    def _make_sides(self, context: TransferContext) -> list[KVConnectorScheduler]:
        sides: list[KVConnectorScheduler] = []
        for config in configs_of(context.config):
            side = load_connector(config).scheduler_side(side_context(context, config))
            number = 1 + sum(other.tier.split(" ")[0] == side.tier for other in sides)
            side.tier += f" {number}" if number > 1 else ""
            sides.append(side)
        return sides

    @property
    def tiers(self) -> Sequence[KVConnectorScheduler]:
        return self._sides

    def sources(self, load: Load) -> list[tuple[int, int]]:
        return [(side, len(piece.keys)) for side, piece in self._composed[load.transfer_id].pieces]

    @property
    def is_asking(self) -> bool:
        return any(side.is_asking for side in self._sides)

    def wake_with(self, wake: Callable[[], None]) -> None:
        for side in self._sides:
            side.wake_with(wake)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        self._found = found = self._compose(request, num_computed_tokens)
        return None if found is None else sum(count for _, count in found) * self._block_size

    def _compose(self, request: Request, num_computed_tokens: int) -> list[tuple[int, int]] | None:
        """(connector, blocks to be had from it) of the longest unbroken run; None if one cannot say yet."""
        found: list[tuple[int, int]] = []
        position, index = num_computed_tokens, 0
        while index < len(self._sides) and position < request.num_tokens - 1:
            num_tokens = self._sides[index].get_num_new_matched_tokens(request, position)
            if num_tokens is None:
                return None
            count, index = num_tokens // self._block_size, index + 1
            if count:
                found.append((index - 1, count))
                position, index = position + count * self._block_size, 0
        return found

    def update_state_after_alloc(self, request: Request, load: Load) -> None:
        found = self._found or [(0, 0)]  # of the same request, which was asked about just before
        pieces, start = [], 0
        for place, (index, count) in enumerate(found):
            end = len(load.keys) if place == len(found) - 1 else min(start + count, len(load.keys))
            blocks = tuple(own[start:end] for own in load.blocks)
            piece = Load(f"{load.transfer_id}.{place}", request, load.keys[start:end], load.hits, blocks)
            self._sides[index].update_state_after_alloc(request, piece)
            pieces.append((index, piece))
            start = end
        self._composed[load.transfer_id] = _Composed(pieces)

    def build_connector_meta(self, full_blocks: Sequence[FullBlock]) -> KVConnectorMetadata | None:
        whole = KVConnectorMetadata()
        for index, side in enumerate(self._sides):
            own = side.build_connector_meta(full_blocks)
            if own is not None:
                whole.loads.extend(msgspec.structs.replace(load, part=index) for load in own.loads)
                whole.saves.extend(msgspec.structs.replace(save, part=index) for save in own.saves)
                whole.snapshots.extend(msgspec.structs.replace(save, part=index) for save in own.snapshots)
        return whole if whole.loads or whole.saves or whole.snapshots else None

    def merge(self, output: KVConnectorOutput) -> KVConnectorOutput:
        received, sent = {}, []
        for name, num_valid in output.finished_recving.items():
            transfer_id, _, place = name.rpartition(".")
            composed = self._composed.get(transfer_id)
            if composed is None:
                continue
            composed.valid.setdefault(output.rank, {}).setdefault(int(place), num_valid)
            total = composed.num_valid(output.rank)
            if total is not None:
                received[transfer_id] = total
        for request_id in output.finished_sending:
            if request_id not in self._sending:
                continue
            senders, done = self._sending[request_id]
            done.setdefault(output.rank, set()).add(output.part)
            if done[output.rank] >= senders:
                sent.append(request_id)
            if len(done) == self._num_ranks and all(own >= senders for own in done.values()):
                del self._sending[request_id]
        return KVConnectorOutput(rank=output.rank, finished_recving=received, finished_sending=sent)

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        composed = self._composed.pop(load.transfer_id)
        for place, (index, piece) in enumerate(composed.pieces):
            num_valid = min(own[place] for own in composed.valid.values())
            self._sides[index].update_connector_output(piece, num_valid)

    def request_finished(self, request: Request, block_ids: BlockIds) -> bool:
        senders = {
            index for index, side in enumerate(self._sides) if side.request_finished(request, block_ids)
        }
        if senders:
            self._sending[request.request_id] = senders, {}
        return bool(senders)

    def reset_cache(self) -> None:
        for side in self._sides:
            side.reset_cache()

    def new_weights(self, fingerprint: str) -> None:
        for side in self._sides:
            side.new_weights(fingerprint)

    def shutdown(self) -> None:
        for side in self._sides:
            side.shutdown()


class MultiWorker(ConnectorWorker):
    """The workers' sides of all. part: which of them a transfer belongs to."""

    def __init__(self, context: WorkerContext) -> None:
        self._sides: list[ConnectorWorker] = []
        for index, config in enumerate(configs_of(context.transfer.config)):
            own = WorkerContext(
                transfer=side_context(context.transfer, config),
                device=context.device,
                report=partial(_report, context.report, index),
            )
            self._sides.append(load_connector(config).worker_side(own))

    def register_kv_caches(self, caches: Sequence[LayerCache | StateTensors]) -> None:
        for side in self._sides:
            side.register_kv_caches(caches)

    def save_snapshots(self, metadata: KVConnectorMetadata) -> None:
        for index, side in enumerate(self._sides):
            side.save_snapshots(part_of(metadata, index))

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        for index, side in enumerate(self._sides):
            side.start_load_kv(part_of(metadata, index))

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        for index, side in enumerate(self._sides):
            side.wait_for_save(part_of(metadata, index))

    def new_weights(self, fingerprint: str) -> None:
        for side in self._sides:
            side.new_weights(fingerprint)

    def shutdown(self) -> None:
        for side in self._sides:
            side.shutdown()


def _report(report: Callable[[KVConnectorOutput], None], part: int, output: KVConnectorOutput) -> None:
    report(msgspec.structs.replace(output, part=part))


def part_of(metadata: KVConnectorMetadata, part: int) -> KVConnectorMetadata:
    """The transfers of one of the connectors."""

    def own(transfers: list[BlockTransfer]) -> list[BlockTransfer]:
        return [transfer for transfer in transfers if transfer.part == part]

    return KVConnectorMetadata(
        loads=own(metadata.loads), saves=own(metadata.saves), snapshots=own(metadata.snapshots)
    )


class MultiConnector(KVConnector):
    """Has several connectors. kv_connector_extra_config: {"connectors": [kv_transfer_config, …]}."""

    Options = MultiOptions
    scheduler_side = MultiScheduler
    worker_side = MultiWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        configs_of(config)

    @classmethod
    def check_ranks(cls, config: KVTransferConfig, num_ranks: int) -> None:
        for own in configs_of(config):
            load_connector(own).check_ranks(own, num_ranks)

    @classmethod
    def check_states(cls, config: KVTransferConfig) -> None:
        for own in configs_of(config):
            load_connector(own).check_states(own)

    @classmethod
    def check_new_weights(cls, config: KVTransferConfig) -> None:
        for own in configs_of(config):
            load_connector(own).check_new_weights(own)

    @classmethod
    def needs_fingerprint(cls, config: KVTransferConfig) -> bool:
        return any(load_connector(own).needs_fingerprint(own) for own in configs_of(config))
