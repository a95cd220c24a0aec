"""How texts go on: an exact index of the tokens that follow a known beginning,
and of the blocks that hold them.

Hashes find whole blocks. Inside the block in which two texts part, the tokens themselves are compared: no
token is lost to the size of blocks, and nothing can collide. That block is copied when the later request is
admitted, and the copy goes on with another text. (PagedAttention's copy-on-write, at admission instead of at
the first write.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

from minivllm.kv_cache.blocks.hashing import TOKEN_BYTES, token_bytes

MIN_COPIED_TOKENS = 8
"""Fewer are computed again: a copy moves a whole block, with a call for each tensor of each layer."""
MAX_COMPARED = 8
"""The newest pieces after the same beginning are compared: so many comparisons cost about 10 µs."""


class Piece:
    """The tokens in one block.

    data: the token ids as bytes of uint32 [1 … block_size], from the block's first place on: comparing
    beginnings of bytes is one call. num_usable: so many tokens are computed by earlier steps than the one
    that is being planned, so a copy may read them.
    """

    __slots__ = ("data", "num_usable")

    def __init__(self) -> None:
        self.data = b""
        self.num_usable = 0

    def usable(self) -> list[int]:
        """The tokens that a copy may read."""
        return array("I", self.data[: self.num_usable * TOKEN_BYTES]).tolist()


class Continuations:
    """Pieces of one pool, by the name of the block before them.

    A *tail* is a block that is not full. Tails are most_tails at most, so that they do not push whole blocks
    out of the prefix cache, and each is among the pieces that are compared. Full blocks keep their piece
    until they are reused: an older one is not compared, but tells people what is cached. Methods that return
    block ids name the blocks that have lost their piece, since newer ones took their places or hold the same
    tokens.

    min_tokens: a shorter common beginning is not worth a copy.
    """

    def __init__(self, most_tails: int) -> None:
        self.most_tails = most_tails
        self.min_tokens = MIN_COPIED_TOKENS
        self._pieces: dict[bytes, dict[int, Piece]] = {}
        self._parents: dict[int, bytes] = {}
        self._tails: dict[int, None] = {}
        self._planned: dict[int, None] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._parents

    def __len__(self) -> int:
        """Blocks that have a piece."""
        return len(self._parents)

    def is_planned(self, block_id: int) -> bool:
        """Whether the step that is being planned computes tokens of this block: others may read them in the
        same step, but a copy would come too early."""
        return block_id in self._planned

    def put(
        self, parent: bytes, block_id: int, token_ids: Sequence[int], *, is_tail: bool, is_planned: bool
    ) -> list[int]:
        """A block holds these tokens, or the block that had a piece holds more.

        parent: name of the block before it. is_planned: the step that is being planned computes them, so they
        count from ``settle`` on. A block that adds nothing to another one gets no piece, nor one with too few
        tokens.
        """
        if is_planned:
            self._planned[block_id] = None
        if len(token_ids) < self.min_tokens:
            return []
        data = token_bytes(token_ids)
        pieces = self._pieces.setdefault(parent, {})
        piece = pieces.pop(block_id, None)
        if piece is None:
            for other, known in _newest(pieces):
                if known.data.startswith(data):
                    pieces[other] = pieces.pop(other)
                    return []
            piece = Piece()
            self._parents[block_id] = parent
        piece.data = data
        pieces[block_id] = piece
        self._tails.pop(block_id, None)
        if is_tail:
            self._tails[block_id] = None
        lost = []
        if len(pieces) > MAX_COMPARED:
            displaced = next(islice(reversed(pieces), MAX_COMPARED, None))
            lost += [displaced] if displaced in self._tails else []
        if len(self._tails) - len(lost) > self.most_tails:
            lost.append(next(iter(self._tails)))
        for oldest in lost:
            self.forget(oldest)
        return lost if is_planned else lost + self._settle(block_id)

    def settle(self) -> list[int]:
        """The planned step is sent: what it computes may be copied by the next one."""
        noted = [block_id for block_id in self._planned if block_id in self._parents]
        lost = [other for block_id in noted for other in self._settle(block_id)]
        self._planned.clear()
        return lost

    def _settle(self, block_id: int) -> list[int]:
        """Make a piece usable, and forget those that hold nothing else."""
        parent = self._parents.get(block_id)
        if parent is None:
            return []
        pieces = self._pieces[parent]
        data = pieces[block_id].data
        pieces[block_id].num_usable = len(data) // TOKEN_BYTES
        if len(pieces) == 1:
            return []
        lost = [
            other for other, known in _newest(pieces) if other != block_id and data.startswith(known.data)
        ]
        for other in lost:
            self.forget(other)
        return lost

    def best(
        self, parent: bytes, token_ids: Sequence[int], *, with_planned: bool = False
    ) -> tuple[int, int] | None:
        """The block after ``parent`` that begins like these tokens for longest: (its id, tokens in common);
        None below min_tokens. with_planned: as if the planned step had been sent."""
        pieces = self._pieces.get(parent)
        if pieces is None or len(token_ids) < self.min_tokens:
            return None
        data = token_bytes(token_ids)
        found, most = -1, self.min_tokens - 1
        for block_id, piece in _newest(pieces):
            num_known = len(piece.data) // TOKEN_BYTES if with_planned else piece.num_usable
            if min(num_known, len(token_ids)) > most and piece.data.startswith(
                data[: (most + 1) * TOKEN_BYTES]
            ):
                found, most = block_id, min(num_known, _num_common(piece.data, data))
        if found < 0:
            return None
        pieces[found] = pieces.pop(found)  # what is read is kept longest
        if found in self._tails:
            self._tails[found] = self._tails.pop(found)
        return found, most

    def forget(self, block_id: int) -> None:
        """A block is reused, or the tokens in it were never computed."""
        parent = self._parents.pop(block_id, None)
        if parent is None:
            return
        pieces = self._pieces[parent]
        del pieces[block_id]
        if not pieces:
            del self._pieces[parent]
        self._tails.pop(block_id, None)

    def hand_over(self, block_id: int, heir: int) -> None:
        """A full block is reused, and another one holds the same tokens after the same beginning."""
        parent = self._parents.get(block_id)
        if parent is None or heir in self._parents:
            self.forget(block_id)
            return
        pieces = self._pieces[parent]
        pieces[block_id].num_usable = (
            0 if heir in self._planned else len(pieces[block_id].data) // TOKEN_BYTES
        )
        self._pieces[parent] = {heir if one == block_id else one: piece for one, piece in pieces.items()}
        self._parents[heir] = self._parents.pop(block_id)
        self._tails.pop(block_id, None)

    def clear(self) -> None:
        """Forget all pieces."""
        self._pieces.clear()
        self._parents.clear()
        self._tails.clear()
        self._planned.clear()

    def usable(self) -> list[tuple[bytes, int, list[int]]]:
        """(parent, block id, tokens) of all pieces, as far as a copy may read them.
        For tests and for people."""
        return [
            (parent, block_id, piece.usable())
            for parent, pieces in self._pieces.items()
            for block_id, piece in pieces.items()
        ]

    def parents(self, at_most: int) -> list[bytes]:
        """Names that some piece follows, the newest ``at_most``."""
        return list(islice(reversed(self._pieces), at_most))

    def after(self, parent: bytes) -> list[tuple[int, list[int]]]:
        """(block id, tokens) of the pieces that follow a name, as far as a copy may read them;
        those that have some."""
        pieces = self._pieces.get(parent, {})
        return [(one, piece.usable()) for one, piece in pieces.items() if piece.num_usable]

    def contradiction(self) -> str:
        """What is wrong with the index between steps; empty if nothing is."""
        listed = {block_id: parent for parent, pieces in self._pieces.items() for block_id in pieces}
        if listed != self._parents or not self._tails.keys() <= listed.keys():
            return "The index of continuations disagrees with itself."
        if len(self._tails) > self.most_tails:
            return (
                f"The index of continuations keeps {len(self._tails)} tails, but {self.most_tails} are the "
                "most."
            )
        compared = {block_id for pieces in self._pieces.values() for block_id, _ in _newest(pieces)}
        if not self._tails.keys() <= compared or not all(self._pieces.values()):
            return (
                "The index of continuations keeps a tail that it never compares, or a beginning without a "
                "piece."
            )
        return ""


def _newest(pieces: dict[int, Piece]) -> list[tuple[int, Piece]]:
    """(block id, piece) of those that are compared, the newest first."""
    return list(islice(reversed(pieces.items()), MAX_COMPARED))


def _num_common(first: bytes, second: bytes) -> int:
    """Tokens of the common beginning, by bisection."""
    low, high = 0, min(len(first), len(second)) // TOKEN_BYTES + 1  # low tokens agree, high tokens do not
    while high - low > 1:
        middle = (low + high) // 2
        if first.startswith(second[: middle * TOKEN_BYTES]):
            low = middle
        else:
            high = middle
    return low
