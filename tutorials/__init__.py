"""Twenty-six chapters that take a serving engine apart. ``python -m tutorials`` lists them."""

from __future__ import annotations

import sys
from types import TracebackType

_print_traceback = sys.excepthook


def _print_all_but_interrupts(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Ctrl-C ends a chapter without a traceback, also while it still imports torch."""
    if not issubclass(kind, KeyboardInterrupt):
        _print_traceback(kind, error, traceback)


sys.excepthook = _print_all_but_interrupts
