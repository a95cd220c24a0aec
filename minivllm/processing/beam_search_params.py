"""How to search for the likeliest sequences instead of sampling them."""

from typing import Literal

import msgspec

from minivllm.errors import RequestError
from minivllm.sampling_params import MAX_INTEGER, MAX_LOGPROBS, check_integer


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to search. Raises RequestError naming the field and its range.

    beam_width: beams that are kept in every round. n: sequences to return, best first (None: all beam_width).
    max_tokens: tokens of the longest sequence.
    length_penalty: a score is the sum of logprobs divided by length ** length_penalty; above 0 favours long
    sequences. early_stopping: True ends the search once beam_width sequences have ended; False goes on while
    a live beam could
        still beat the worst of them at its present length;
        "never" while it could at its best possible length.
    ignore_eos: only max_tokens ends a sequence.
    """

    beam_width: int
    max_tokens: int = 16
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("beam_width", 1, MAX_LOGPROBS // 2),
            ("max_tokens", 1, MAX_INTEGER),
            ("n", 1, self.beam_width),
        ):
            value = getattr(self, name)
            if name == "n" and value is None:
                continue
            check_integer(name, value, low, high)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -10 <= penalty <= 10:
            raise RequestError(f"length_penalty is {penalty!r}, but must be a number from -10 to 10.")
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            raise RequestError(
                f"early_stopping is {self.early_stopping!r}, but must be True, False or 'never'."
            )
