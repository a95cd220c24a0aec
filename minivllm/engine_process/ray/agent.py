"""What Ray runs on every node of an engine but the first."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from dataclasses import replace

import msgspec

from minivllm.engine_process.ray.messages import NodeStart
from minivllm.executor.records.child_reports import ErrorInfo
from minivllm.startup.openmp import choose_wait_policy


def run_node(start: bytes) -> bytes:
    """Run the workers of a node until the first one ends. start: a ``NodeStart``.

    What comes back is the error that ended it, an ``ErrorInfo``, or nothing. Bytes and the name of this
    function are all that Ray carries, so it has nothing of ours to pickle.
    """
    try:
        _run(msgspec.msgpack.decode(start, type=NodeStart))
    except Exception as error:
        return msgspec.msgpack.encode(ErrorInfo.of(error))
    return b""


def _end_with(process: int) -> None:
    """Wait until a process of this host has ended, and exit:
    Ray lets what runs here go on without its raylet."""
    poll = select.poll()
    poll.register(os.pidfd_open(process), select.POLLIN)
    poll.poll()
    os._exit(1)


def _run(start: NodeStart) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), name="raylet watch", daemon=True).start()
    with contextlib.suppress(
        OSError
    ):  # relative paths mean the caller's, where this node has the same directory
        os.chdir(start.directory)
    # Ray has set it to the number of CPUs that were reserved, one for each worker.
    os.environ.pop("OMP_NUM_THREADS", None)
    if start.threads is not None:
        os.environ["OMP_NUM_THREADS"] = start.threads
    choose_wait_policy()
    from minivllm.engine.resolve import resolve
    from minivllm.executor.nodes.agent import NodeAgent
    from minivllm.executor.nodes.messages import settings_of

    config = replace(resolve(start.args)[0], nodes=start.node)
    NodeAgent(config, settings_of(config), secret=start.secret).run()
