"""``minivllm``: runs a command, and turns whatever can happen to it into a sentence and an exit code.

The commands are imported inside, so that Ctrl-C is quiet from the first moment on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from minivllm.errors import MinivllmError


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        # A model's text may hold what the terminal's encoding lacks; a replacement beats a crash.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except MinivllmError as error:
        from minivllm.cli.terminal.terminal_text import printable

        print(f"minivllm: {printable(str(error))}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader left (for example `| head`): nothing more to say, and nothing for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    from minivllm.cli.commands import app

    try:
        app(args=arguments, prog_name="minivllm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def command() -> NoReturn:
    """``main`` as a process of its own, which ends at once: taking torch apart piece by piece takes 0.4 s."""
    try:
        main()
    except SystemExit as end:
        code = end.code
    if "torch" not in sys.modules:
        sys.exit(code)
    # What the interpreter does first at its end: wait for threads, then call what was registered.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    command()
