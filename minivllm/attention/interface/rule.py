"""Which keys a query sees and how scores are changed, where the specs of the layers do not say it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kernels_triton_free.strips.visibility import ScoreChange, Visibility
from minivllm.errors import ConfigError
from minivllm.specs.attention import AttentionSpec


@dataclass(frozen=True)
class AttentionRule:
    """How an attention variant differs from what the specs of the layers say.

    visibility: which keys a query sees, in place of all those up to its own position within window and chunk;
    no key behind the query may be among them. score_change: a change of the scores before the softmax. Both
    are functions of int32 scalars of a kernel, which PyTorch compiles.
    """

    visibility: Visibility | None = None
    score_change: ScoreChange | None = None

    def options(self, spec: AttentionSpec) -> dict[str, Any]:
        """Keyword arguments that all kernels take, for layers of this spec."""
        return {
            "scale": spec.scale,
            "soft_cap": spec.soft_cap,
            "visibility": self.visibility,
            "score_change": self.score_change,
        }

    def check(self, specs: Sequence[AttentionSpec]) -> None:
        """Raises ConfigError for layers of which a rule would change what it cannot know."""
        if self.needs_positions and any(spec.looks_ahead for spec in specs):
            raise ConfigError(
                "attention_backend changes a rule of attention, but layers of this model let images see "
                "themselves, "
                "which such a rule cannot say. Leave attention_backend at its default for this model."
            )

    @property
    def needs_positions(self) -> bool:
        """Whether its functions want the positions of queries and keys."""
        return self.visibility is not None or self.score_change is not None

    @property
    def fingerprint(self) -> str:
        """What compiled code depends on besides its tensors:
        the modules of the functions, and the values they use."""
        parts: list[object] = []
        for function in (self.visibility, self.score_change):
            if function is not None:
                used = inspect.getclosurevars(function)
                values = sorted({**used.globals, **used.nonlocals}.items())
                code = function.__code__
                source = Path(code.co_filename)
                parts += source.read_bytes() if source.is_file() else code.co_code, code.co_name
                parts += [item for item in values if isinstance(item[1], (int, float, str, tuple, Tensor))]
        return hashlib.sha256(repr(parts).encode()).hexdigest() if parts else ""


CAUSAL = AttentionRule()
