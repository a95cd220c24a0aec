"""Whether all ranks sample alike:
each leaves a digest of its tokens in the ring's memory, which takes no message.

Ranks that go on with different tokens would answer nonsense, or wait for one another for ever. What can make
them differ: a logits processor or a drafter that looks at the clock, memory that fails, an edit that forgets
a rank.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from minivllm.errors import EngineDeadError
from minivllm.executor.records.broadcast_ring import RingWriter


def token_digest(sampled: Mapping[str, Sequence[int]]) -> int:
    """32 bits of the tokens of a step, by request id."""
    return zlib.crc32(msgspec.msgpack.encode(sampled))


class Agreement:
    """Compares the output rank with all others, as far as these have come: they may be a step behind.

    num_local: the first so many ranks leave their digests in the ring, the others send them."""

    def __init__(self, ring: RingWriter, num_ranks: int, output_rank: int, num_local: int) -> None:
        self._ring = ring
        self._output_rank = output_rank
        self._num_local = num_local
        self._told: dict[tuple[int, int], int] = {}
        self._others = range(output_rank + 1, num_ranks)  # stages before the last one do not sample
        self._num_steps = 0
        self._waiting: deque[tuple[int, int, set[int]]] = deque()

    def take(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """What the output rank has sampled in its next step. Raises EngineDeadError as ``check`` does."""
        self._num_steps += 1
        if self._others:
            self._waiting.append((self._num_steps, token_digest(sampled), set(self._others)))
            self.check()

    def note(self, rank: int, step: int, digest: int) -> None:
        """What a rank of another node has sent. Raises EngineDeadError as ``check`` does."""
        if rank in self._others:
            self._told[rank, step] = digest
            self.check()

    def check(self) -> None:
        """Raises EngineDeadError that names the step and the rank, where one has sampled something else."""
        while self._waiting:
            step, expected, ranks = self._waiting[0]
            for rank in sorted(ranks):
                is_local = rank < self._num_local
                digest = self._ring.digest(rank, step) if is_local else self._told.pop((rank, step), None)
                if digest is None:
                    return
                if digest != expected:
                    raise EngineDeadError(
                        f"In step {step} of the engine the worker of rank {rank} sampled other tokens than "
                        "that of "
                        f"rank {self._output_rank}. All must sample alike: look for a logits processor that "
                        "does not "
                        "depend on its arguments alone, or for broken memory."
                    )
                ranks.remove(rank)
            self._waiting.popleft()
