"""Two engines and what lies between them: settings, waiting for announcements, producers that misbehave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minivllm import LLM
from minivllm.kv_cache.blocks.hashing import extend_block_hashes
from minivllm.kv_transfer.lookup.gate import Gate
from minivllm.kv_transfer.lookup.lookup_buffer import LookupBuffer
from minivllm.kv_transfer.lookup.lookup_connector import LookupBufferScheduler
from minivllm.kv_transfer.lookup.lookup_server import LookupServer
from minivllm.kv_transfer.lookup.pipe import Address, DropSelect, Pipe
from minivllm.request import Request
from tests.parity_reference import BLOCK_SIZE
from tests.scheduler.simulated_worker import make_engine_request


def producer(address: str, **extra: Any) -> dict[str, Any]:
    return _config("kv_producer", {"address": address, **extra})


def consumer(*peers: str, **extra: Any) -> dict[str, Any]:
    return _config("kv_consumer", {"peers": list(peers), "timeout": 2.0, **extra})


def through_nixl(*configurations: dict[str, Any]) -> list[dict[str, Any]]:
    """The same for NixlConnector, which takes the same settings."""
    return [{**config, "kv_connector": "NixlConnector"} for config in configurations]


def _config(role: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "LookupBufferConnector", "kv_role": role, "kv_connector_extra_config": extra}


def unix(path: Path, name: str = "kv") -> str:
    return f"unix://{path}/{name}"


def block_keys(prompt: Sequence[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    request = Request(make_engine_request("r", list(prompt)))
    extend_block_hashes(request, block_size)
    return request.block_hashes


def scheduler_side(llm: LLM) -> LookupBufferScheduler:
    side = llm.llm_engine.client.core._connector  # type: ignore[attr-defined]
    assert isinstance(side, LookupBufferScheduler)
    return side


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.005)


def wait_for_blocks(llm: LLM, keys: Sequence[bytes], are_there: bool = True) -> None:
    """Until a consumer has heard of all of them, or of none."""
    wait_until(lambda: all(scheduler_side(llm).holds(key) == are_there for key in keys))


class BadProducer(LookupServer):
    """A producer that has proved itself, announces the blocks of prompts, and answers in a way of its own."""

    def __init__(
        self,
        llm: LLM,
        address: str,
        prompts: Sequence[list[int]],
        answer: Callable[[Pipe, list[bytes], int], None],
    ) -> None:
        context = scheduler_side(llm).context
        self.block_bytes = sum(group.block_bytes for group in context.groups)
        keys = list(dict.fromkeys(key for prompt in prompts for key in block_keys(prompt)))
        buffer, zeros = (
            LookupBuffer(self.block_bytes * len(keys)),
            torch.zeros(self.block_bytes, dtype=torch.uint8),
        )
        buffer.insert([(key, zeros) for key in keys], lambda: None, self.block_bytes)
        self._behave = answer
        super().__init__(Address.parse(address), Gate.of(context, 0), buffer)

    def _answer(self, pipe: Pipe) -> None:
        while True:
            self._behave(pipe, pipe.receive_message(DropSelect, float("inf")).keys, self.block_bytes)
