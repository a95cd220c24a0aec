"""The one hook for observers of the engine: named spans of its code, with their times.

    with span("schedule"):
        ...

Listeners are a trace of named ranges, the bench, and a chat that shows its steps. Without a listener,
a span is one test and one shared object that does nothing. A span stands around the call, never in place of
what is called, so it stays where it is when compiled code takes over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Concatenate, ParamSpec, TypeVar

Listener = Callable[[str, object], Callable[[], None] | None]
"""Called with the name and the subject of a span that begins; what it returns, if anything, is called at its
end. Spans of other threads come in those threads."""

Owner = TypeVar("Owner")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Silent:
    """A span without listeners."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Heard:
    """One span and those who hear it."""

    __slots__ = ("_ends", "_listeners", "_name", "_subject")

    def __init__(self, name: str, subject: object, listeners: list[Listener]) -> None:
        self._name = name
        self._subject = subject
        self._listeners = listeners
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        for listener in self._listeners:
            end = listener(self._name, self._subject)
            if end is not None:
                self._ends.append(end)

    def __exit__(self, *_: object) -> None:
        for end in reversed(self._ends):
            end()


_SILENT = _Silent()
_listening: tuple[tuple[Listener, Collection[str] | None], ...] = ()


def span(name: str, subject: object = None) -> AbstractContextManager[None]:
    """Name the work inside ``with``. subject: the object that it is about, for listeners."""
    if not _listening:
        return _SILENT
    listeners = [listener for listener, names in _listening if names is None or name in names]
    return _Heard(name, subject, listeners) if listeners else _SILENT


def spanned(
    name: str,
) -> Callable[
    [Callable[Concatenate[Owner, Parameters], Result]], Callable[Concatenate[Owner, Parameters], Result]
]:
    """Decorator of a method: every call of it is a span, and its object the subject."""

    def decorate(
        method: Callable[Concatenate[Owner, Parameters], Result],
    ) -> Callable[Concatenate[Owner, Parameters], Result]:
        @functools.wraps(method)
        def in_span(owner: Owner, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if not _listening:
                return method(owner, *args, **kwargs)
            with span(name, owner):
                return method(owner, *args, **kwargs)

        return in_span

    return decorate


@contextmanager
def listen(listener: Listener, names: Collection[str] | None = None) -> Iterator[None]:
    """Let ``listener`` hear the spans that begin meanwhile in this process.
    names: only these; None for all."""
    global _listening
    entry = (listener, names)
    _listening = (*_listening, entry)
    try:
        yield
    finally:
        _listening = tuple(other for other in _listening if other is not entry)


def torch_range(name: str, subject: object = None) -> Callable[[], None]:
    """A listener: every span is a named range of PyTorch's profiler."""
    from torch.profiler import record_function

    named = record_function(name)
    named.__enter__()
    return lambda: named.__exit__(None, None, None)
