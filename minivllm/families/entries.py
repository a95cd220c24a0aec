"""Checked access to a configuration's entries:
what is there is used or refused in a sentence, never guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from minivllm.errors import ModelError
from minivllm.specs.layers import Activation

# Far above any published model, far below what would make an allocation absurd.
MAX_VOCAB_SIZE = 2**22
MAX_WIDTH = 2**20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_POSITIONS = 2**30
MAX_FACTOR = 1e6

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    # One function, written in several ways.
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "relu": "relu",
}
BiasRule = Literal["never", "always", "attention_bias"]


class Entries:
    """An entry, else the family's default, else a sentence. source: the file to name in it."""

    def __init__(
        self, entries: Mapping[str, Any], defaults: Mapping[str, Any], source: str, prefix: str = ""
    ) -> None:
        self.entries = entries
        self.defaults = defaults
        self.source = source
        self.prefix = prefix

    def get(self, name: str) -> Any:
        return self.entries[name] if name in self.entries else self.defaults.get(name)

    def refuse(self, name: str, value: Any, rule: str) -> ModelError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ModelError(f"{self.source}: {self.prefix}{name} is {shown}, but {rule}.")

    def whole(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, value, f"must be a whole number from {low} to {high}")
        return value

    def optional_whole(self, name: str, low: int, high: int) -> int | None:
        return None if self.get(name) is None else self.whole(name, low, high)

    def number(self, name: str, above: float = 0.0, at_most: float = MAX_FACTOR) -> float:
        value = self.get(name)
        # ``above < value`` is false for NaN too, and a huge integer compares without overflowing.
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= at_most:
            raise self.refuse(name, value, f"must be a number above {above:g} and at most {at_most:g}")
        return float(value)

    def optional_number(self, name: str, above: float = 0.0, at_most: float = MAX_FACTOR) -> float | None:
        return None if self.get(name) is None else self.number(name, above, at_most)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.refuse(name, value, "must be true or false")
        return value

    # What several families read in the same way.

    @property
    def num_layers(self) -> int:
        return self.whole("num_hidden_layers", 1, MAX_LAYERS)

    @property
    def max_positions(self) -> int:
        return self.whole("max_position_embeddings", 1, MAX_POSITIONS)

    @property
    def norm_eps(self) -> float:
        return self.number("rms_norm_eps", 0.0, 1.0)

    def heads(self) -> tuple[int, int, int]:
        """(query heads, KV heads, head_dim)."""
        hidden_size = self.whole("hidden_size", 1, MAX_WIDTH)
        heads = self.whole("num_attention_heads", 1, MAX_HEADS)
        kv_heads = self.optional_whole("num_key_value_heads", 1, MAX_HEADS) or heads
        if heads % kv_heads:
            raise self.refuse("num_key_value_heads", kv_heads, f"must divide num_attention_heads {heads}")
        head_dim = self.optional_whole("head_dim", 1, MAX_HEAD_DIM)
        if head_dim is None:
            if hidden_size % heads:
                raise self.refuse(
                    "hidden_size", hidden_size, f"must be a multiple of num_attention_heads {heads}"
                )
            head_dim = hidden_size // heads
        return heads, kv_heads, head_dim

    def activation(self, name: str) -> Activation:
        value = self.get(name)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.refuse(name, value, f"must be one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def bias(self, rule: BiasRule) -> bool:
        return rule == "always" or (rule == "attention_bias" and self.flag("attention_bias"))

    def layer_types(
        self, allowed: Sequence[str] = ("full_attention", "sliding_attention")
    ) -> list[str] | None:
        """The kind of each layer, if they are listed."""
        listed, count = self.entries.get("layer_types"), self.num_layers
        if listed is None:
            return None
        if not isinstance(listed, list) or len(listed) < count or not all(kind in allowed for kind in listed):
            rule = f"must list {' or '.join(allowed)} for each of the {count} layers"
            raise self.refuse("layer_types", listed, rule)
        return cast(list[str], listed[:count])

    def windows_by_type(self, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """The window in layers of sliding attention, None in the others."""
        if window is None and "sliding_attention" in types:
            raise self.refuse(
                "layer_types", types, "sliding_attention needs sliding_window, which is not set"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in types)


MAX_TAPS = 64
