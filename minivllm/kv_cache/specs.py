"""What a KV group is.

Layers that keep a token equally long form a group. Full attention keeps all tokens; a sliding window forgets
those that fell out of it; chunked local attention forgets the chunks before the current one; layers with a
state keep one of fixed size for a request, in a slot: their blocks are slots. Each group has a pool of blocks
of
its own, so that a block of one kind never waits for memory in the shape of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full attention", "sliding window", "chunked attention", "state"]


SLOTS_PER_REQUEST = 2
"""Slots of states that a request holds at most: the one it writes, and the one it came from."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Layers whose keys and values live and die together.

    reach: sliding window or chunk [tokens], None for others. layers: their places in the model. block_size
    [tokens]: states can be found again where a block would end. block_bytes: one block, or slot, over all
    these layers. num_blocks: of the pool, the null block included; 0 before memory is shared out.
    """

    kind: GroupKind
    reach: int | None = None
    layers: tuple[int, ...]
    block_size: int
    block_bytes: int
    num_blocks: int = 0

    @property
    def name(self) -> str:
        """ "full attention", "sliding window of 1024"."""
        return self.kind if self.reach is None else f"{self.kind} of {self.reach}"

    def max_blocks(self, num_tokens: int, longest_chunk: int) -> int:
        """Most blocks that a request of ``num_tokens`` tokens holds at once.

        longest_chunk: tokens of one request that a step writes at most.
        """
        if self.kind == "state":
            return SLOTS_PER_REQUEST
        return max_blocks(num_tokens, self.block_size, self.reach, longest_chunk)


def one_group(num_layers: int, block_size: int, block_bytes: int = 0, num_blocks: int = 0) -> GroupSpec:
    """All layers keep everything, whatever they read of it."""
    layers = tuple(range(num_layers))
    return GroupSpec(
        kind="full attention",
        layers=layers,
        block_size=block_size,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
    )


def max_blocks(num_tokens: int, block_size: int, reach: int | None, longest_chunk: int) -> int:
    """See GroupSpec.max_blocks."""
    all_blocks = -(-num_tokens // block_size)
    if reach is None:
        return all_blocks
    # What the first token of a chunk sees besides itself, and the chunk:
    # so many positions in a row, from any place on.
    span = reach - 1 + longest_chunk
    return min(all_blocks, (span + block_size - 2) // block_size + 1)


def total_bytes(specs: Sequence[GroupSpec]) -> int:
    """Memory of all pools."""
    return sum(spec.num_blocks * spec.block_bytes for spec in specs)
