"""LMCache's server as a tier of the prefix cache, for engines on one host or several (vLLM's LMCacheConnector).

The server, ``lmcache_server HOST PORT``, runs in an environment of its own: nothing of LMCache is imported here. Blocks
are named by their hashes and by the fingerprint of all else that decides what they hold, so engines that would not
understand one another never meet. The server has no way to say what comes and goes, so it is asked.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import msgspec
from torch import Tensor

from minivllm.config import KVTransferConfig
from minivllm.errors import ConfigError
from minivllm.kv_transfer.connector import BlockStore, KVConnector, TransferContext
from minivllm.kv_transfer.connectors.queued_saves import QueuedSaves
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, WorkerContext
from minivllm.kv_transfer.lmcache.client import BATCH, SEAL_BYTES, Client, Command, Names, received
from minivllm.kv_transfer.lookup.gate import read_key
from minivllm.kv_transfer.lookup.pipe import Address
from minivllm.kv_transfer.remote_loads import Load
from minivllm.request import Request

logger = logging.getLogger(__name__)

LOOKUP_SECONDS = 0.5
"""How long the scheduler waits for the server at most, once in RETRY_SECONDS."""
KNOWN_SECONDS = 1.0
"""For how long an answer holds: other engines save meanwhile, and a server may end."""
MAX_KNOWN_BLOCKS = 2**17


class LMCacheOptions(msgspec.Struct, forbid_unknown_fields=True):
    """url: of the server, lm://host:port. timeout: seconds that a block may take; then the rest is recomputed.
    key_file: a secret of 32 bytes or more that only the user can read, the same for all engines; needed off this
    host."""

    url: str
    timeout: Annotated[float, msgspec.Meta(gt=0, le=600)] = 5.0
    key_file: str = ""


def address_of(options: LMCacheOptions) -> Address:
    """Raises ConfigError."""
    try:
        if options.url.startswith("lm://"):
            return Address.parse(f"tcp{options.url[2:]}")
    except ConfigError:
        pass
    raise ConfigError(f"{options.url!r} is no address of an LMCache server: write lm://host:port.")


class LMCacheScheduler(BlockStore):
    """Asks the server for a prompt's blocks, all of them at once, and remembers the answers for a moment."""

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        address = address_of(context.options)
        self._client = Client(address, LOOKUP_SECONDS)
        self._known: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._use_names()
        if not address.is_local:
            logger.warning("Keys and values go to %s as they are: use a network that you trust.", context.options.url)

    def _use_names(self) -> None:
        self._names = [Names(self.context, rank) for rank in range(self.num_ranks)]

    def new_weights(self, fingerprint: str) -> None:
        super().new_weights(fingerprint)
        self._use_names()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        if self.context.config.loads:
            size = self.context.block_size
            self._ask(request.block_hashes[num_computed_tokens // size : (request.num_tokens - 1) // size])
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def holds(self, key: bytes) -> bool:
        return self._known.get(key, (0.0, False))[1]

    def _ask(self, keys: Sequence[bytes]) -> None:
        """Know of these blocks, up to the first ones that are missing, whether all ranks' parts are there."""
        now, batch = time.monotonic(), max(1, BATCH // self.num_ranks)
        old = [key for key in keys if now - self._known.get(key, (-KNOWN_SECONDS, False))[0] >= KNOWN_SECONDS]
        for start in range(0, len(old), batch):
            asked = old[start : start + batch]
            requests = [names.request(Command.EXIST, key) for key in asked for names in self._names]
            try:
                found = self._client.exist(requests)
            except (OSError, ValueError):
                found = [False] * len(requests)
            for index, key in enumerate(asked):
                is_there = all(found[index * self.num_ranks : (index + 1) * self.num_ranks])
                self._remember(key, now, is_there)
            if not all(found):
                break

    def _remember(self, key: bytes, now: float, is_there: bool) -> None:
        self._known[key] = now, is_there
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN_BLOCKS:
            self._known.popitem(last=False)

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        for key in load.keys[num_valid_blocks : num_valid_blocks + 1]:
            self._remember(key, time.monotonic(), False)

    def reset_cache(self) -> None:
        self._known.clear()

    def shutdown(self) -> None:
        self._client.close()


class LMCacheWorker(QueuedSaves):
    """Loads over one connection, and saves over another one."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        options = context.transfer.options
        self._loading, self._saving = (Client(address_of(options), options.timeout) for _ in range(2))
        self._names = Names(context.transfer, context.transfer.rank)
        self._bad: set[bytes] = set()

    def new_weights(self, fingerprint: str) -> None:
        super().new_weights(fingerprint)
        self._names = Names(self.context.transfer, self.context.transfer.rank)

    def load_block(self, key: bytes, place: int, blocks: CacheBlocks) -> Tensor | None:
        data = received(blocks.block_bytes, self.context.device.type == "cuda")
        try:
            if not self._loading.get(self._names.request(Command.GET, key), data):
                return None
        except (OSError, ValueError):  # the client has said so
            return None
        contents = data[SEAL_BYTES:]
        if not hmac.compare_digest(self._names.seal(key, contents), data[:SEAL_BYTES].numpy().tobytes()):
            if key not in self._bad:
                self._bad.add(key)
                logger.warning("A block from the LMCache server is ignored: it is damaged, or of another key_file.")
            return None
        return contents

    def write_block(self, transfer: TransferContext, key: bytes, contents: Tensor, blocks: CacheBlocks) -> None:
        names = Names(transfer, transfer.rank)
        request = names.request(Command.PUT, key, SEAL_BYTES + contents.numel())
        self._saving.put(request, names.seal(key, contents), contents)
        self._bad.discard(key)

    def shutdown(self) -> None:
        super().shutdown()
        self._loading.close()
        self._saving.close()


class LMCacheConnector(KVConnector):
    """kv_connector_extra_config: {"url": "lm://host:port", …}; see LMCacheOptions."""

    Options = LMCacheOptions
    outlives_engine = moves_parts = takes_new_weights = True
    scheduler_side = LMCacheScheduler
    worker_side = LMCacheWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        options = cls.options(config)
        has_key = bool(read_key(options.key_file))
        if not address_of(options).is_local and not has_key:
            raise ConfigError(
                f"{options.url} is not on this host: give LMCacheConnector a 'key_file', the same for all engines, so "
                "that nobody else can send keys and values."
            )
