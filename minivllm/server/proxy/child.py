"""The command line, in a process that ends with the one that started it:
``python -m … FD DIRECTORY ARGUMENTS``.

FD: a pipe that only the parent holds open, so that its end says that the parent has gone, even by kill -9.
DIRECTORY: the parent's, for sockets, which is then removed.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading


def _end_with(descriptor: int, directory: str) -> None:
    os.read(descriptor, 1)
    shutil.rmtree(directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    parent, directory = int(sys.argv.pop(1)), sys.argv.pop(1)
    threading.Thread(target=_end_with, args=(parent, directory), name="parent", daemon=True).start()
    runpy.run_module("minivllm.cli.main", run_name="__main__", alter_sys=True)
