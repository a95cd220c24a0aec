"""How many nodes of a cluster an engine takes, and what is missing where there is no room."""

from __future__ import annotations

from collections.abc import Sequence


def choose_nodes(num_workers: int, room: Sequence[int], nnodes: int | None = None) -> int | None:
    """The fewest nodes, or nnodes, that can share the workers evenly; None if there are no such nodes. room:
    how many workers each node has room for, the caller's first, which always takes part."""
    for count in range(1, num_workers + 1) if nnodes is None else (nnodes,):
        share, rest = divmod(num_workers, count)
        if not rest and room[0] >= share and sum(other >= share for other in room[1:]) >= count - 1:
            return count
    return None


def describe_small(
    num_workers: int, room: Sequence[int], addresses: Sequence[str], resource: str, nnodes: int | None
) -> str:
    """Why no nodes can be chosen. addresses: of the nodes, in the order of room."""
    names = [f"{address} {count} {resource}" for address, count in zip(addresses, room)]
    names[0] += " (this node)"
    wanted = "" if nnodes is None else f" on {nnodes} nodes"
    return (
        f"The Ray cluster has no room for {num_workers} workers{wanted}: every worker takes one {resource}, "
        "every node "
        f"has as many workers, and this node is one of them. There are: {', '.join(names)}."
    )


def describe_busy(count: int, share: int, resource: str, total: float, free: float) -> str:
    """Why nodes that have been chosen cannot be had yet. share: of each of count nodes.
    total, free: in the cluster."""
    nodes = "this node" if count == 1 else f"each of {count} nodes, this one and others,"
    return (
        f"The engine needs {share} {resource} of {nodes} in the Ray cluster, but of its {total:g} {resource} "
        "in all "
        f"{free:g} are free: others have reserved them."
    )
