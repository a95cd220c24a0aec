"""The worker processes of one host: how they are started, what they are told through, and how they end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minivllm.compilation.packaged.package_builds import close_in_children, forget_descriptor
from minivllm.config import EngineConfig
from minivllm.device.cores import share_of_cores
from minivllm.device.gpus import gpu_of_worker, workers_share_gpus
from minivllm.distributed.lockstep import EngineSeat
from minivllm.distributed.secure_sockets import Network
from minivllm.distributed.shared_links import SharedLinks
from minivllm.errors import EngineDeadError
from minivllm.executor.records.broadcast_ring import RingWriter
from minivllm.executor.records.child_reports import FRONTEND_SIGNALS, describe_exit
from minivllm.executor.records.records import Channel, Start


def python_module(name: str) -> tuple[str, ...]:
    """The command that runs a module as a process of its own."""
    return (sys.executable, *["-O"] * sys.flags.optimize, "-P", "-m", name)


WORKER_COMMAND = python_module("minivllm.executor.worker_process")


class LocalWorkers:
    """The processes of this host's ranks, the ring that all of them read, and a channel to each,
    in order of rank.

    received: the type of what comes from them. network: how they reach other nodes, if there are some.
    more_readers: of the ring, besides the workers. seat: of this engine among those that share experts.
    Raises EngineDeadError if a worker ends before it is told what to do.
    """

    def __init__(
        self,
        config: EngineConfig,
        received: Any,
        command: Sequence[str] = WORKER_COMMAND,
        network: Network | None = None,
        more_readers: int = 0,
        seat: EngineSeat | None = None,
    ) -> None:
        self.ranks = config.local_ranks
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Channel] = []
        self.ring = RingWriter(len(self.ranks) + more_readers)
        start = Start(
            config=config,
            rank=0,
            size=config.num_workers,
            log_level=logging.getLogger("minivllm").getEffectiveLevel(),
            network=network,
            seat=seat,
        )
        inherited = [] if seat is None else seat.descriptors
        if config.device == "cuda":
            by_file = not workers_share_gpus(len(self.ranks))
        else:
            by_file = not config.custom_all_reduce
        shared = SharedLinks(config.tensor_parallel_size, config.pipeline_parallel_size, by_file, self.ranks)
        try:
            for rank in self.ranks:
                own = {
                    "segment": shared.segment(rank),
                    "rendezvous": shared.rendezvous(rank),
                    "links": shared.links(rank),
                    "shared": [*shared.descriptors(rank), *inherited],
                }
                self._start(msgspec.structs.replace(start, rank=rank, **own), received, command)
        except BaseException:
            self.close()
            raise
        finally:
            shared.close()

    def _start(self, start: Start, received: Any, command: Sequence[str]) -> None:
        reader = start.rank - self.ranks.start
        gpu = gpu_of_worker(reader, len(self.ranks)) if start.config.device == "cuda" else {}
        process, channel = start_process(
            command,
            received,
            environment_of_children(len(self.ranks)) | gpu,
            self.ring.descriptors_of(reader),
            [reader, len(self.ring.arrived)],
            start.shared,
        )
        self.processes.append(process)
        self.channels.append(channel)
        try:
            channel.send(start)
        except OSError:
            name = f"worker of rank {start.rank}"
            raise EngineDeadError(describe_exit(name, process.wait())) from None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """End the processes at once, and release what was shared with them. The last call."""
        self.kill()
        for channel in self.channels:
            forget_descriptor(channel.fileno())
            channel.close()
        self.ring.close()


def start_process(
    command: Sequence[str],
    received: Any,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
    arguments: Sequence[int] = (),
    more_descriptors: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start a process that begins with ``worker_process.begin``, and a channel to it,
    whose end is its life line.

    Its arguments are its end of the channel, descriptors that it inherits, and other numbers. received: the
    type of what comes from it. more_descriptors: are inherited, too.
    """
    own, theirs = socket.socketpair()
    channel = Channel(own, received)
    close_in_children(channel.fileno())
    # Ctrl-C goes to the whole process group: a process begins with it blocked, until it can ignore it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FRONTEND_SIGNALS)
    try:
        process = subprocess.Popen(
            [*command, *map(str, (theirs.fileno(), *descriptors, *arguments))],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the command's own output is on 1
            pass_fds=(theirs.fileno(), *descriptors, *more_descriptors),
            env=environment,
        )
    except BaseException:
        forget_descriptor(channel.fileno())
        channel.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return process, channel


def environment_of_children(num_workers: int = 1) -> dict[str, str]:
    """This process's, with the places modules come from, and a worker's share of the cores."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, **share_of_cores(num_workers)}
