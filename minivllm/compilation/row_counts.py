"""Numbers of rows: which of them have code of their own, what steps are padded to,
and which code a call gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class RowCounts(NamedTuple):
    """What the compiled code of a model takes.
    Without compilation any number of rows is as good as another."""

    fewest: int = 1
    """Rows that every call needs; 2 where one row has no code, since a dynamic size starts at 2."""
    few: int = 0
    """Steps of 2 to so many rows are padded to it, since it has faster code; 0: no region has such code."""

    def of_step(self, num_tokens: int) -> int:
        """Tokens that a step of so many tokens is padded to."""
        return max(num_tokens, self.few if num_tokens > 1 else self.fewest)

    def of_pick(self, count: int, num_tokens: int) -> int:
        """Rows that ``count`` picked tokens are padded to, in a step padded to ``num_tokens``.

        A pick of one row has no code but in a step of one.
        """
        return max(count, num_tokens if num_tokens == self.few else min(num_tokens, 2))


class CodeByRows:
    """The code of a region for one row, for a few rows, and for any number from 2 on; called, it chooses."""

    def __init__(
        self, several: Callable, single: Callable, few: Callable | None, counts: Sequence[int | None]
    ) -> None:
        """few: None if there is no such code. counts: for each argument the first dimension that code for a
        few rows takes, None where it takes any."""
        self._several = several
        self._single = single
        self._few = few
        self._counts = tuple(counts)
        self._num_few = next(filter(None, self._counts), 0)

    def __call__(self, *args: Any) -> Any:
        rows = args[0].shape[0]
        if rows == 1:
            return self._single(*args)
        if rows == self._num_few and self._few is not None and _fit(args, self._counts):
            return self._few(*args)
        return self._several(*args)

    def bound(self, *last: Any) -> CodeByRows:
        """The same with its last arguments."""
        free = len(self._counts) - len(last)
        few = self._few if self._few is not None and _fit(last, self._counts[free:]) else None
        return CodeByRows(
            bound(self._several, *last),
            bound(self._single, *last),
            None if few is None else bound(few, *last),
            self._counts[:free],
        )


def bound(code: Callable, *last: Any) -> Callable:
    """Compiled code with its last arguments, such as weights. Packages flatten them once, here."""
    bind: Callable[..., Callable] | None = getattr(code, "bound", None)
    return (lambda *args: code(*args, *last)) if bind is None else bind(*last)


def _fit(args: Sequence[Any], counts: Sequence[int | None]) -> bool:
    """Whether arguments have the first dimensions that code for a few rows takes."""
    return all(count is None or arg.shape[0] == count for arg, count in zip(args, counts))
