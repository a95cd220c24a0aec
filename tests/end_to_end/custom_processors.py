"""Logits processors as a user would write them; engines in a process of their own import them from here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minivllm import BatchUpdate, LogitsProcessor, SamplingParams


class Forbid(LogitsProcessor):
    """Requests with extra_args {"forbid": token id} never say that token."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._tokens: dict[int, int] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        token = (params.extra_args or {}).get("forbid", 0)
        if not isinstance(token, int):
            raise ValueError(f"forbid is {token!r}, but must be a token id.")

    @classmethod
    def concerns(cls, params: SamplingParams) -> bool:
        return "forbid" in (params.extra_args or {})

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate) -> None:
        update.apply_to(self._tokens, lambda added: (added.params.extra_args or {})["forbid"])

    def apply(self, logits: Tensor) -> Tensor:
        for row in range(len(logits)):
            logits[row, self._tokens[row]] = -torch.inf
        return logits


class NoRepeats(LogitsProcessor):
    """Requests with extra_args {"no_repeats": True} say every token once at most; hears of all requests."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._outputs: dict[int, object] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate) -> None:
        def output_of(added: object) -> object:
            return added.output_token_ids if (added.params.extra_args or {}).get("no_repeats") else None  # type: ignore[attr-defined]

        update.apply_to(self._outputs, output_of)

    def apply(self, logits: Tensor) -> Tensor:
        said = torch.zeros(logits.shape, dtype=torch.bool)
        for row, output in self._outputs.items():
            if row < len(logits):
                said[row, list(output)] = True  # type: ignore[call-overload]
        return logits.masked_fill(said, -torch.inf)  # a new tensor


class OwnMinP(LogitsProcessor):
    """What SamplingParams.min_p does, written as a processor: extra_args {"own_min_p": share}."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._log_shares: dict[int, float] = {}

    @classmethod
    def concerns(cls, params: SamplingParams) -> bool:
        return "own_min_p" in (params.extra_args or {})

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, update: BatchUpdate) -> None:
        update.apply_to(
            self._log_shares, lambda added: math.log((added.params.extra_args or {})["own_min_p"])
        )

    def apply(self, logits: Tensor) -> Tensor:
        shares = torch.tensor([[self._log_shares[row]] for row in range(len(logits))])
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + shares, -torch.inf)


class WrongShape(Forbid):
    """Returns something else than the logits."""

    def apply(self, logits: Tensor) -> Tensor:
        return logits[:, :3]


class Unfinished(LogitsProcessor):
    """Lacks most of the protocol."""

    def is_argmax_invariant(self) -> bool:
        return True
