"""The work of each engine, and the blocks that its prefix cache should hold.

The frontend sends every request and sees every token, so all of it is counted here and no engine is asked.
Counts that engines report are late: between two reports a burst of requests would all go to the engine that
was idle in the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from minivllm.messages import EngineOutput
from minivllm.request import Request


class CachedBlocks:
    """Hashes of the blocks that an engine was sent, the most recently used ones.
    capacity: blocks of its KV cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_found(self, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks of a sequence are there."""
        return next((number for number, one in enumerate(hashes) if one not in self._hashes), len(hashes))

    def add(self, hashes: Sequence[bytes]) -> None:
        """Use the blocks of a sequence. Its end is forgotten before its beginning, as engines do it."""
        for one in reversed(hashes):
            self._hashes[one] = None
            self._hashes.move_to_end(one)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


class EngineLoad:
    """The unfinished requests of one engine, and what of their prompts it need not compute.

    index: its number, from 0. block_size: tokens of a hashed block. is_up: it takes requests.
    num_prompt_tokens: prompt tokens to compute for requests that have no answer yet. num_blocks: blocks of
    the known tokens of all requests; one that two requests share counts twice, for each of them is attended
    to.
    """

    def __init__(self, index: int, block_size: int, capacity: int) -> None:
        self.index = index
        self.block_size = block_size
        self.is_up = True
        self.requests: dict[str, Request] = {}
        self.num_prompt_tokens = self.num_blocks = 0
        self.cached = CachedBlocks(capacity)
        self._prompts: dict[str, int] = {}

    def prompt_tokens_left(self, request: Request) -> int:
        """Prompt tokens that this engine would compute for a request. The last one is always computed."""
        most = (request.num_prompt_tokens - 1) // self.block_size
        return request.num_prompt_tokens - self.block_size * self.cached.num_found(
            request.block_hashes[:most]
        )

    def add(self, request: Request) -> None:
        """The engine is sent this request."""
        self._prompts[request.request_id] = left = self.prompt_tokens_left(request)
        self.requests[request.request_id] = request
        self.num_prompt_tokens += left
        self.num_blocks += self._blocks_of(request)
        self.cached.add(request.block_hashes)

    def take_in(self, output: EngineOutput) -> None:
        """Take in the output of a step for an unfinished request."""
        request = self.requests[output.request_id]
        if output.new_token_ids:
            self.num_prompt_tokens -= self._prompts.pop(output.request_id, 0)
            self.num_blocks -= self._blocks_of(request)
            for token_id in output.new_token_ids:
                request.append_output_token(token_id)
            self.num_blocks += self._blocks_of(request)

    def remove(self, request_id: str) -> Request:
        """A request has ended, however it did."""
        request = self.requests.pop(request_id)
        self.num_prompt_tokens -= self._prompts.pop(request_id, 0)
        self.num_blocks -= self._blocks_of(request)
        return request

    def _blocks_of(self, request: Request) -> int:
        return -(-request.num_tokens // self.block_size)
