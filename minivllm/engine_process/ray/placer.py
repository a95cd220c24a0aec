"""The process that talks to Ray for one engine: it reserves nodes, and starts what runs on them.

The engine itself stays out of Ray, which ends the processes that are connected to it with its own, says no
reason, and changes their signal handlers. All that is started here belongs to this process, so Ray ends it
with this process, which ends with the engine: also if that is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from typing import Any

import msgspec

from minivllm.engine_process.ray.choice import choose_nodes, describe_busy, describe_small
from minivllm.engine_process.ray.messages import Launch, Left, Place, Placed, ToPlacer
from minivllm.errors import ConfigError
from minivllm.executor.records.child_reports import ErrorInfo, LogSender
from minivllm.executor.records.records import Channel, Died
from minivllm.executor.worker_process import begin

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How often to look whether there is room."""


def connect() -> list[dict[str, Any]]:
    """Join the cluster that runs on this host; its living nodes, this one first. Raises ConfigError."""
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}, that of a Ray client, but an engine must run on a node of the "
            "cluster: start "
            "it there, and leave RAY_ADDRESS out."
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ConfigError(
            f"distributed_executor_backend is 'ray', but this host is in no Ray cluster (at {address!r}): "
            "start "
            "one with `ray start --head`, and on every other host `ray start --address=HOST:6379`. Ray "
            f"says: {error}"
        ) from None
    return living_nodes()


def living_nodes() -> list[dict[str, Any]]:
    import ray

    own = ray.get_runtime_context().get_node_id()
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != own)


def reserve(place: Place, nodes: list[dict[str, Any]]) -> tuple[Any, int]:
    """A placement group with a bundle for each node, the first one here, and how many.
    Raises ConfigError if there is no room in time."""
    import ray
    from ray.util import placement_group

    deadline, told, group, count = time.monotonic() + place.seconds, "", None, 0
    while True:
        if group is None:
            room = [int(node["Resources"].get(place.resource, 0)) for node in nodes]
            chosen = choose_nodes(place.num_workers, room, place.nnodes)
            if chosen is not None:
                count, share = chosen, place.num_workers // chosen
                here = [{"ray.io/node-id": nodes[0]["NodeID"]}]
                group = placement_group(
                    [{place.resource: share}] * count,
                    strategy="STRICT_SPREAD",
                    bundle_label_selector=[*here, *[{}] * (count - 1)],
                )
        if group is not None:
            if group.wait(POLL_SECONDS):
                return group, count
            counts = ray.cluster_resources(), ray.available_resources()
            total, free = (found.get(place.resource, 0.0) for found in counts)
            missing = describe_busy(count, place.num_workers // count, place.resource, total, free)
        else:
            addresses = [node["NodeManagerAddress"] for node in nodes]
            missing = describe_small(place.num_workers, room, addresses, place.resource, place.nnodes)
            time.sleep(POLL_SECONDS)
            nodes = living_nodes()
        if time.monotonic() > deadline:
            raise ConfigError(f"{missing} This has not changed in {place.seconds:g} s.")
        if missing != told:
            logger.warning("%s Waiting …", missing)
            told = missing


def launch(group: Any, count: int, resource: str, share: int, starts: list[bytes]) -> dict[Any, str]:
    """Start the agents: what Ray calls each of them -> the name of its node."""
    import ray
    from ray.util import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from minivllm.engine_process.ray.agent import run_node

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    places = placement_group_table(group)["bundles_to_node_id"]
    wanted = {"num_cpus": share} if resource == "CPU" else {"num_cpus": 0, "num_gpus": share}
    task, running = ray.remote(run_node), {}
    for number, start in enumerate(starts, 1):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        name = f"node {number} ({addresses.get(places[number], 'gone')})"
        options = task.options(name=f"minivllm {name}", max_retries=0, scheduling_strategy=where, **wanted)
        running[options.remote(start)] = name
        logger.info("Ray starts %s.", name)
    return running


def serve(channel: Channel) -> None:
    """Until the engine ends."""
    place: Place | None = channel.receive_one()
    if place is None:
        return
    nodes = connect()
    group, count = reserve(place, nodes)
    channel.send(Placed(count, nodes[0]["NodeManagerAddress"]))
    order: Launch | None = channel.receive_one()
    if order is None:
        return
    import ray

    running = launch(group, count, place.resource, place.num_workers // count, order.starts)
    while running:
        [ended], _ = ray.wait(list(running))
        name = running.pop(ended)
        try:
            told = ray.get(ended)
            error = msgspec.msgpack.decode(told, type=ErrorInfo) if told else None
        except Exception as problem:
            error = ErrorInfo.of(problem)
        channel.send(Left(name, error))
    channel.receive()


def main() -> None:
    """``python -m minivllm.engine_process.ray.placer SOCKET``."""
    descriptor = int(sys.argv[1])
    begin(descriptor)
    channel = Channel(socket.socket(fileno=descriptor), ToPlacer)
    package = logging.getLogger("minivllm")
    package.addHandler(LogSender(channel.send))
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        serve(channel)
    except Exception as error:
        with contextlib.suppress(OSError):  # the engine has gone as well
            channel.send(Died(ErrorInfo.of(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
