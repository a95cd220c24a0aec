"""Custom logits processors: what they have to be, and where the engine finds them.

A processor is a class of the user's. The engine makes one object of it and tells it, before every step, which
requests came, left or changed places; then the processor edits the logits of all of them at once. (vLLM V1's
protocol.)

    class Forbid(LogitsProcessor):
        def __init__(self, vocab_size, device):
            self.tokens = {}                                      # row -> token

        def is_argmax_invariant(self):
            return False                                          # it can forbid the likeliest token

        def update_state(self, update):
            update.apply_to(self.tokens, lambda added: (added.params.extra_args or {}).get("forbid"))

        def apply(self, logits):
            for row, token in self.tokens.items():
                if row < len(logits):
                    logits[row, token] = -float("inf")
            return logits

``LLM(logits_processors=[Forbid])``,
or ``"package.module:Forbid"`` where the engine runs in a process of its own.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm.errors import ConfigError
from minivllm.plugins.plugin import import_object
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

State = TypeVar("State")


@dataclass(frozen=True)
class AddedRequest:
    """A request that takes a row, new or back from preemption.

    output_token_ids: what it has generated so far, kept up to date by the engine:
    read it in ``apply``, leave it be.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch changed; to be followed in the order removed, added, moved.

    batch_size: requests in the batch afterwards. removed: rows that became empty. added: requests in empty
    rows, or after the last one. moved: pairs of rows that change places, one after the other; one of them may
    be empty.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[tuple[int, int]]

    def apply_to(self, rows: dict[int, State], make: Callable[[AddedRequest], State | None]) -> None:
        """Bring a dictionary of one's own, row -> state, up to date.
        make: the state of a request that was added; None keeps nothing of it."""
        for row in self.removed:
            rows.pop(row, None)
        for added in self.added:
            state = make(added)
            if state is not None:
                rows[added.row] = state
        for one, other in self.moved:
            states = {other: rows.pop(one, None), one: rows.pop(other, None)}
            rows.update({row: state for row, state in states.items() if state is not None})


class LogitsProcessor(ABC):
    """Edits logits before tokens are drawn from them. One object serves all requests of an engine.

    ``apply`` has to follow from the requests and their output so far alone: it is called for the guesses of
    speculative decoding as well, so perhaps more than once for one position, and for some in vain.
    """

    @abstractmethod
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """vocab_size: columns of the logits. device: where they are."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError, with a sentence,
        for a request whose ``extra_args`` this processor cannot serve."""
        return

    @classmethod
    def concerns(cls, params: SamplingParams) -> bool:
        """False for requests that it will leave as they are: they are never added, and cost nothing."""
        return True

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the likeliest token always stays the likeliest one:
        greedy requests then do without ``apply``.

        It also says when it is this processor's turn: False puts it after bad words and logit bias and before
        penalties and temperature, True after temperature and before min-p, top-k and top-p.
        """

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Follow a change of the batch. Not called where nothing changed."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, V] float32 -> the same shape; they may be edited in place.

        Row i belongs to the request of row i. Requests in rows from R on are not sampled this time.
        """


def load_logits_processors(entries: Sequence[Any]) -> tuple[type[LogitsProcessor], ...]:
    """The classes of logits_processors, each a class or "package.module:Class".

    Raises ConfigError that says what is missing.
    """
    return tuple(_checked(entry) for entry in entries)


def _checked(entry: Any) -> type[LogitsProcessor]:
    found = import_object("A logits processor", entry) if isinstance(entry, str) else entry
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(
            f"The logits processor {entry!r} must be a subclass of minivllm.LogitsProcessor (the class, not "
            "an object)."
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"The logits processor {entry!r} lacks {missing}: see minivllm.LogitsProcessor.")
    return found
