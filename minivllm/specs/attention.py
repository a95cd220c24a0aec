"""How a layer attends, and the rotary tables that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

RotaryType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding, after Su et al. 2021 and its context-extension variants.

    dim: how many leading elements of each head are rotated (less than head_dim: partial rotary).
    factor: context extension of linear, dynamic, llama3 and yarn. original_max_position: context before
    extension. low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, truncate: yarn.
    attention_factor: cos and sin are multiplied by it (yarn, already resolved from mscale and mscale_all_dim;
    longrope). short_factors, long_factors: what longrope divides each frequency by, in contexts up to
    original_max_position and in longer ones. turned: of proportional, how many elements of each head turn,
    with the frequencies of a head of ``dim`` elements that all turn (Gemma 4). axes: which of a token's three
    positions (time, row, column) turns each frequency, dim / 2 of them, in models that rotate images in space
    (M-RoPE: Wang et al. 2024); empty: all have one position.
    """

    type: RotaryType = "default"
    theta: float = 10000.0
    dim: int
    factor: float = 1.0
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    turned: int = 0
    axes: tuple[int, ...] = ()


class Reach(NamedTuple):
    """What decides which blocks a layer's queries read; the fields are those of AttentionSpec."""

    window: int | None = None
    chunk: int | None = None
    has_sinks: bool = False
    looks_ahead: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether some queries do not see all earlier keys."""
        return self.window is not None or self.chunk is not None


class AttentionSpec(NamedTuple):
    """How one layer attends.

    window: sliding window in tokens, the query's own included, None for full attention. scale: factor of the
    scores. query_group: query heads per KV head (the layer's cache says how many KV heads there are, and of
    which size). chunk: a query sees only keys of its own chunk of so many positions (Llama 4), None for all.
    soft_cap: scaled scores s become cap * tanh(s / cap) (Gemma 2). has_sinks: a learned logit of each query
    head joins the softmax's denominator and has no value (gpt-oss); ``attend`` is given it. value_dim: keys
    hold their values, which are so many leading elements, and no V is kept (latent attention); o has that
    size then. looks_ahead: tokens of an image that sees itself see all of it (Gemma 3).
    """

    window: int | None
    scale: float
    query_group: int = 1
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    looks_ahead: bool = False

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.chunk, self.has_sinks, self.looks_ahead)

    @property
    def computation(self) -> AttentionSpec:
        """Without what only decides which keys are seen: that is data, and not compiled."""
        return self._replace(window=None, chunk=None, looks_ahead=False)
