"""Logits processors that misbehave on one rank: to be plugged into workers in processes of their own."""

from __future__ import annotations

import sys
import time
from typing import Any

from torch import Tensor

from minivllm import BatchUpdate, LogitsProcessor

GOOD_STEPS = 5


class Differs(LogitsProcessor):
    """From a certain step on, rank 1 says token 9."""

    def __init__(self, vocab_size: int, device: Any) -> None:
        self.is_victim = sys.argv[-2] == "1"
        self.num_steps = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate | None) -> None:
        """It treats all requests alike."""

    def apply(self, logits: Tensor) -> Tensor:
        self.num_steps += 1
        if self.is_victim and self.num_steps > GOOD_STEPS:
            self.fail(logits)
        return logits

    def fail(self, logits: Tensor) -> None:
        logits[:, 9] = 1e9


class Hangs(Differs):
    """Then it does not come back."""

    def fail(self, logits: Tensor) -> None:
        time.sleep(600)


class Raises(Differs):
    """Then it raises."""

    def fail(self, logits: Tensor) -> None:
        raise ValueError("the processor has a fever")
