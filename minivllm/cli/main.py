"""``minivllm``: runs a command, and turns whatever can happen to it into a sentence and an exit code.

The commands are imported inside, so that Ctrl-C is quiet from the first moment on.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import threading
from typing import NoReturn

from minivllm.errors import MinivllmError

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO}
"""Errors of a write to a full disk, over a limit, or to a closed stream."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        # A model's text may hold what the terminal's encoding lacks; a replacement beats a crash.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except MinivllmError as error:
        from minivllm.cli.terminal.terminal_text import printable

        _say(printable(str(error)))
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader left (for example `| head`): nothing more to say.
        _discard_output()
        code = 1
    except OSError as error:
        if error.filename is not None or error.errno not in _CANNOT_WRITE:
            raise
        _discard_output()
        _say(f"The output cannot be written: {error.strerror}.")
        code = 1
    sys.exit(code)


def _open_what_is_closed() -> None:
    """Closed standard streams become /dev/null:
    else the next file or socket that is opened would take their place.

    Standard input is then empty. Writing to standard output fails as it does for a closed one.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for the life of the process


def _discard_output() -> None:
    """Leave nothing that the interpreter would try to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f"minivllm: {sentence}", file=sys.stderr, flush=True)


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
