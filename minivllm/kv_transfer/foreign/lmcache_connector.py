"""LMCache's server as a tier of the prefix cache,
for engines on one host or several (vLLM's LMCacheConnector).

The server, ``lmcache_server HOST PORT``, runs in an environment of its own: nothing of LMCache is imported
here. Blocks are named by their hashes and by the fingerprint of all else that decides what they hold, so
engines that would not understand one another never meet. The server has no way to say what comes and goes, so
it is asked.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from typing import Annotated

import msgspec
from torch import Tensor

from minivllm.config import KVTransferConfig
from minivllm.distributed.key_file import read_key
from minivllm.errors import ConfigError
from minivllm.kv_cache.blocks.hashing import state_name
from minivllm.kv_transfer.connector import BlockStore, KVConnector, TransferContext
from minivllm.kv_transfer.connectors.queued_saves import QueuedSaves
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, WorkerContext
from minivllm.kv_transfer.foreign.lmcache_client import BATCH, SEAL_BYTES, Client, Command, Names, received
from minivllm.kv_transfer.loads import Load
from minivllm.kv_transfer.lookup.pipe import Address
from minivllm.messages import BlockIds
from minivllm.request import Request

logger = logging.getLogger(__name__)

LOOKUP_SECONDS = 0.5
"""How long requests wait for the server's answer at most, once in RETRY_SECONDS."""
KNOWN_SECONDS = 1.0
"""For how long an answer holds: other engines save meanwhile, and a server may end."""
MAX_KNOWN_BLOCKS = 2**17

Answers = dict[bytes, bool]
"""Block or state -> whether the server has it."""


class LMCacheOptions(msgspec.Struct, forbid_unknown_fields=True):
    """url: of the server, lm://host:port. timeout: seconds that a block may take; then the rest is
    recomputed. key_file: a secret of 32 bytes or more that only the user can read, the same for all engines;
    needed off this host."""

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
    """Has a thread ask the server for a prompt's blocks, all of them at once,
    and remembers the answers for a moment.

    A request that waits for an answer waits beside the queue, so a server that hangs delays no step.
    """

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        address = address_of(context.options)
        self._client = Client(address, LOOKUP_SECONDS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-lookups")
        self._wake: Callable[[], None] = lambda: None
        self._lookups: dict[str, Future[Answers]] = {}
        self._known: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._use_names()
        if not address.is_local:
            logger.warning(
                "Keys and values go to %s as they are: use a network that you trust.", context.options.url
            )

    def _use_names(self) -> None:
        self._names = [Names(self.context, rank) for rank in range(self.num_ranks)]

    def new_weights(self, fingerprint: str) -> None:
        super().new_weights(fingerprint)
        self._use_names()

    @property
    def is_asking(self) -> bool:
        return not all(lookup.done() for lookup in self._lookups.values())

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        if not self.context.config.loads:
            return 0
        size, lookup = self.context.block_size, self._lookups.get(request.request_id)
        keys = request.block_hashes[num_computed_tokens // size : (request.num_tokens - 1) // size]
        if lookup is None and self._is_news(keys):
            lookup = self._thread.submit(self._look_up, self._names, keys)
            self._lookups[request.request_id] = lookup
            lookup.add_done_callback(lambda _: self._wake())
        if lookup is not None:
            if not lookup.done():
                return None
            del self._lookups[request.request_id]
            for key, is_there in lookup.result().items():
                self._remember(key, is_there)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def holds(self, key: bytes) -> bool:
        return self._known.get(key, (0.0, False))[1]

    def _is_news(self, keys: Sequence[bytes]) -> bool:
        """True if an answer that is needed here is missing, or old."""

        def is_old(key: bytes) -> bool:
            return key not in self._known or time.monotonic() - self._known[key][0] >= KNOWN_SECONDS

        found = list(takewhile(self.holds, keys))
        if any(map(is_old, keys[: len(found) + 1])):
            return True
        states = [state_name(key) for key in reversed(found)] if self.context.state_bytes else []
        missing = list(takewhile(lambda name: not self.holds(name), states))
        return any(map(is_old, states[: len(missing) + 1]))

    def _look_up(self, names: Sequence[Names], keys: Sequence[bytes]) -> Answers:
        """Ask whether all ranks' parts are there: of these blocks, up to the first missing ones, and of the
        states after them, from the last one back to the first ones that are there. Called by the look-ups'
        thread."""
        answers: Answers = {}
        batch = max(1, BATCH // len(names))

        def ask(some: Sequence[bytes]) -> list[bool]:
            requests = [name.request(Command.EXIST, key) for key in some for name in names]
            try:
                found = self._client.exist(requests)
            except (OSError, ValueError):
                found = [False] * len(requests)
            whole = [all(found[index : index + len(names)]) for index in range(0, len(found), len(names))]
            answers.update(zip(some, whole))
            return whole

        for start in range(0, len(keys), batch):
            if not all(ask(keys[start : start + batch])):
                break
        if self.context.state_bytes:
            states = [state_name(key) for key in takewhile(lambda key: answers.get(key, False), keys)][::-1]
            for start in range(0, len(states), batch):
                if any(ask(states[start : start + batch])):
                    break
        return answers

    def _remember(self, key: bytes, is_there: bool) -> None:
        self._known[key] = time.monotonic(), is_there
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN_BLOCKS:
            self._known.popitem(last=False)

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        for key in self.failed(load, num_valid_blocks):
            self._remember(key, False)

    def request_finished(self, request: Request, block_ids: BlockIds) -> bool:
        self._lookups.pop(request.request_id, None)
        return False

    def reset_cache(self) -> None:
        self._known.clear()
        self._lookups.clear()

    def shutdown(self) -> None:
        self._client.close()
        self._thread.shutdown(cancel_futures=True)
        self._client.close()  # what a look-up has opened meanwhile


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

    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
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
                logger.warning(
                    "A block from the LMCache server is ignored: it is damaged, or of another key_file."
                )
            return None
        return contents

    def write_block(
        self, transfer: TransferContext, key: bytes, contents: Tensor, blocks: CacheBlocks
    ) -> None:
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
    outlives_engine = moves_parts = moves_states = takes_new_weights = True
    scheduler_side = LMCacheScheduler
    worker_side = LMCacheWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        options = cls.options(config)
        has_key = bool(read_key(options.key_file))
        if not address_of(options).is_local and not has_key:
            raise ConfigError(
                f"{options.url} is not on this host: give LMCacheConnector a 'key_file', the same for all "
                "engines, so "
                "that nobody else can send keys and values."
            )
