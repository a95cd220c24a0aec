"""The prefix cache as a radix tree, for people: what is cached, who uses it, and what parts where.

The index of continuations is the tree already (the name of a block -> the blocks that follow it), so nothing
is kept for this view. It is walked on request, for a bounded number of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from minivllm.kv_cache.blocks.block_pool import BlockPool
from minivllm.kv_cache.blocks.free_queue import KVCacheBlock
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import PrefixNode, PrefixTree

MOST_BLOCKS = 4096
"""That are walked, and beginnings that are looked at: a few milliseconds."""
MOST_TOKEN_IDS = 64
"""Of one node that are told; it may stand for many more tokens."""

_PLAIN = b""
"""The name of the beginning of requests that have neither a cache salt nor an adapter."""


@dataclass
class _Edge:
    """Tokens that follow one another without a branch.
    blocks: those that end in them, equal ones included."""

    token_ids: list[int]
    """The first ones."""
    num_tokens: int
    users: int
    last_used: float
    is_plain: bool
    num_pieces: int
    """Blocks of the index that end in them."""
    blocks: list[KVCacheBlock] = field(default_factory=list)
    children: list[_Edge] = field(default_factory=list)
    name: bytes | None = None
    """Of the full block that ends here, under which the blocks after it are kept."""


def prefix_tree(manager: KVCacheManager, block_bytes: Sequence[int], limit: int) -> PrefixTree:
    """At most ``limit`` nodes, those near the roots first.

    It shows the first group that keeps whole prefixes, or the first one. It is empty where blocks are not
    copied, since nothing knows then which block follows which. block_bytes: of one block of each group, over
    all its layers and all workers.
    """
    if not manager.copies_blocks:
        return PrefixTree(nodes=[], num_blocks_left_out=0)
    whole = [place for place, group in enumerate(manager.groups) if isinstance(group, FullAttentionManager)]
    place = whole[0] if whole else 0
    return _tree(manager.pools[place], block_bytes[place], limit)


def _tree(pool: BlockPool, block_bytes: int, limit: int) -> PrefixTree:
    roots = _grow(pool)
    for edge in _all_edges(roots):
        _join_runs(edge)
        edge.children.sort(key=_importance)
    roots.sort(key=_importance)
    shown = {id(edge) for edge in islice(_all_edges(roots), limit)}
    nodes, now, open_edges = [], pool.clock(), [(edge, 0) for edge in reversed(roots)]
    num_pieces = 0
    while open_edges:
        edge, depth = open_edges.pop()
        if id(edge) not in shown:
            continue
        num_pieces += edge.num_pieces
        nodes.append(
            PrefixNode(
                depth=depth,
                num_tokens=edge.num_tokens,
                token_ids=edge.token_ids if edge.is_plain else [],
                is_plain=edge.is_plain,
                num_blocks=len(edge.blocks),
                num_bytes=len(edge.blocks) * block_bytes,
                users=edge.users,
                age=0.0 if edge.users else max(0.0, now - edge.last_used),
            )
        )
        open_edges += [(child, depth + 1) for child in reversed(edge.children)]
    return PrefixTree(nodes=nodes, num_blocks_left_out=len(pool.continuations) - num_pieces)


def _importance(edge: _Edge) -> tuple[int, float, int]:
    """Most users first, then what was used last, then what is longest."""
    return -edge.users, -edge.last_used, -edge.num_tokens


def _all_edges(roots: Sequence[_Edge]) -> Iterator[_Edge]:
    """Level by level."""
    waiting = deque(roots)
    while waiting:
        edge = waiting.popleft()
        yield edge
        waiting += edge.children


def _grow(pool: BlockPool) -> list[_Edge]:
    """The roots of the tree, with an edge for every block or part of one."""
    index = pool.continuations
    roots: list[_Edge] = []
    waiting: deque[tuple[bytes, bool, list[_Edge]]] = deque([(_PLAIN, True, roots)])
    for parent in index.parents(MOST_BLOCKS):
        if parent != _PLAIN and not any(block.block_id in index for block in pool.blocks_under(parent)):
            waiting.append((parent, False, roots))
    room = MOST_BLOCKS
    while waiting and room > 0:
        parent, is_plain, edges = waiting.popleft()
        pieces = [(pool.blocks[block_id], token_ids) for block_id, token_ids in index.after(parent)]
        room -= len(pieces)
        for edge in _branch(pool, pieces, is_plain):
            edges.append(edge)
            waiting += [
                (part.name, is_plain, part.children) for part in _all_edges([edge]) if part.name is not None
            ]
    return roots


def _branch(pool: BlockPool, pieces: Sequence[tuple[KVCacheBlock, list[int]]], is_plain: bool) -> list[_Edge]:
    """Edges for blocks that follow the same beginning: equal beginnings of them become one edge."""
    by_first: dict[int, list[tuple[KVCacheBlock, list[int]]]] = {}
    for block, token_ids in pieces:
        by_first.setdefault(token_ids[0], []).append((block, token_ids))
    edges = []
    for group in by_first.values():
        shortest = min((token_ids for _, token_ids in group), key=len)
        length = next(
            (
                place
                for place in range(len(shortest))
                if len({token_ids[place] for _, token_ids in group}) > 1
            ),
            len(shortest),
        )
        ending = [block for block, token_ids in group if len(token_ids) == length]
        going_on = [(block, token_ids[length:]) for block, token_ids in group if len(token_ids) > length]
        twins = (twin for block in ending for twin in pool.blocks_under(block.block_hash) or [block])
        blocks = list(dict.fromkeys(twins))
        children = _branch(pool, going_on, is_plain)
        edges.append(
            _Edge(
                token_ids=shortest[: min(length, MOST_TOKEN_IDS)],
                num_tokens=length,
                users=sum(block.ref_count for block in blocks) + sum(child.users for child in children),
                last_used=max(
                    [*(block.last_used for block in blocks), *(child.last_used for child in children)]
                ),
                is_plain=is_plain,
                num_pieces=len(ending),
                blocks=blocks,
                children=children,
                name=next((block.block_hash for block in ending if block.block_hash is not None), None),
            )
        )
    return edges


def _join_runs(edge: _Edge) -> None:
    """One edge for a run that does not branch and has the same users from its beginning to its end."""
    while len(edge.children) == 1 and edge.children[0].users == edge.users:
        [child] = edge.children
        edge.token_ids += child.token_ids[: MOST_TOKEN_IDS - len(edge.token_ids)]
        edge.num_tokens += child.num_tokens
        edge.last_used = max(edge.last_used, child.last_used)
        edge.num_pieces += child.num_pieces
        edge.blocks += child.blocks
        edge.children = child.children
