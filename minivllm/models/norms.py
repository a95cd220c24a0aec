"""Norms of the residual stream, by the names that specs have for them. ``make_norm`` makes all of them.

A new one is a code and a line in ``_NORMS``, or a call of ``register_norm``; ``NormSpec.kind`` names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels_triton_free.norm import rms_norm
from minivllm.errors import ConfigError
from minivllm.program.program import Code


@dataclass(frozen=True)
class RmsNorm:
    """Root-mean-square normalisation."""

    eps: float

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.eps)


@dataclass(frozen=True)
class AddNorm:
    """What a sublayer gave joins the residual stream: (what the next one reads, the stream)."""

    norm: Code

    def __call__(self, x: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream = stream + x
        return self.norm(stream, weight), stream


_NORMS: dict[str, Callable[[float], Code]] = {"rms": RmsNorm}


def register_norm(kind: str, make: Callable[[float], Code]) -> None:
    """Let ``NormSpec.kind`` take one more name, in this process.

    make: eps -> a code: an instance of a frozen dataclass, called with x [tokens, hidden] and weight
    [hidden], that returns a tensor like x. Raises ConfigError for a name that is taken.
    """
    if kind in _NORMS:
        raise ConfigError(f"There is a norm {kind!r} already: choose another name.")
    _NORMS[kind] = make


def make_norm(kind: str, eps: float) -> Code:
    """The code of a norm: (x [tokens, hidden], weight [hidden]) -> a tensor like x.
    Raises ConfigError for an unknown kind."""
    if kind not in _NORMS:
        raise ConfigError(f"There is no norm {kind!r}, but there are {', '.join(_NORMS)}.")
    return _NORMS[kind](eps)
