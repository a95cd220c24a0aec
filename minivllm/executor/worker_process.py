"""What runs in the process of a worker:
it ends with the engine from its first moment on, and then imports the rest.

Started by ``minivllm.executor.multiproc``. The socket is the life line: its end tells the worker that the
engine has gone, and the engine that the worker has, however they went.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading

from minivllm.compilation.packaged.package_builds import close_in_children
from minivllm.executor.records.child_reports import FRONTEND_SIGNALS


def end_with(descriptor: int) -> None:
    """Wait until the other side has closed, and exit. What it has sent may still be unread."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    os._exit(0)


def begin(descriptor: int, *inherited: int) -> None:
    """What a process does first that ``start_process`` has started. descriptor: of its life line. inherited:
    others, which its own children must not have."""
    for one in (descriptor, *inherited):
        os.set_inheritable(one, False)
        close_in_children(one)
    # What they mean is for the frontend to decide. They were blocked so far, see start_process.
    for number in FRONTEND_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FRONTEND_SIGNALS)
    faulthandler.enable(all_threads=True)
    threading.Thread(target=end_with, args=(descriptor,), name="engine watch", daemon=True).start()


def main() -> None:
    """``python -m minivllm.executor.worker_process SOCKET MEMORY ARRIVED FREED READER READERS``: four
    inherited descriptors, and the worker's place at the ring."""
    descriptor, memory, arrived, freed, reader, readers = (int(argument) for argument in sys.argv[1:7])
    begin(descriptor, memory, arrived, freed)
    # Importing torch takes seconds.
    from minivllm.executor.records.broadcast_ring import RingReader
    from minivllm.executor.records.records import Channel, ToWorker
    from minivllm.executor.worker_loop import serve

    channel = Channel(socket.socket(fileno=descriptor), ToWorker)
    sys.exit(serve(channel, RingReader(memory, arrived, freed, reader, readers)))


if __name__ == "__main__":
    main()
