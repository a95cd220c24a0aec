"""Rotary parameters as configurations spell them, with the meaning that transformers gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from minivllm.models.decoder_config import RotaryConfig, RotaryType
from minivllm.models.families.entries import MAX_POSITIONS, Entries

ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rotary(fields: Entries, head_dim: int) -> RotaryConfig:
    """Merge both spellings as transformers does: ``rope_scaling`` else ``rope_parameters``, gaps filled from above."""
    given = fields.entries.get("rope_scaling") or fields.entries.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise fields.refuse("rope_scaling", given, "must be an object or null")
    if any(isinstance(value, dict) for value in given.values()):
        raise fields.refuse(
            "rope_parameters", given, "must be one set of values: this family has no sets per layer type"
        )
    return read_rotary_set(fields, given, fields.get("rope_theta"), head_dim)


def read_rotary_set(fields: Entries, given: Mapping[str, Any], theta: Any, head_dim: int) -> RotaryConfig:
    """One set of rotary parameters. theta: used where the set names none."""
    max_positions = fields.max_positions
    rope = Entries(given, {"rope_theta": theta}, fields.source, "rope_parameters.")

    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROTARY_TYPES:
        raise rope.refuse("rope_type", rope_type, f"must be one of {', '.join(ROTARY_TYPES)}")
    theta = rope.number("rope_theta", 0.0, 1e15)

    partial = given.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial is None:
        partial = 1.0
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise rope.refuse("partial_rotary_factor", partial, "must be above 0 and at most 1")
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise rope.refuse(
            "partial_rotary_factor", partial, f"must leave an even number of the {head_dim} head elements"
        )

    values: dict[str, Any] = {"original_max_position": max_positions}
    if rope_type == "dynamic" and dim == 2:
        raise rope.refuse("rope_type", rope_type, "must not be dynamic when only two elements of a head are rotated")
    if rope_type in ("linear", "dynamic", "llama3"):
        values["factor"] = rope.number("factor", 0.0, 1e6)
    if rope_type in ("llama3", "yarn"):
        original = fields.optional_whole("original_max_position_embeddings", 1, MAX_POSITIONS)
        original = original or rope.optional_whole("original_max_position_embeddings", 1, MAX_POSITIONS)
        values["original_max_position"] = original or max_positions
    if rope_type == "llama3":
        values["low_freq_factor"] = rope.number("low_freq_factor", 0.0, 1e6)
        values["high_freq_factor"] = rope.number("high_freq_factor", 0.0, 1e6)
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            raise rope.refuse("high_freq_factor", values["high_freq_factor"], "must be above low_freq_factor")
    if rope_type == "yarn":
        values.update(_yarn(rope, max_positions / values["original_max_position"]))
        if theta == 1.0:
            raise rope.refuse("rope_theta", theta, "must not be 1 with yarn")
    return RotaryConfig(type=cast(RotaryType, rope_type), theta=theta, dim=dim, **values)


def _yarn(rope: Entries, implied_factor: float) -> dict[str, Any]:
    """YaRN's own values (Peng et al. 2023) with transformers' treatment of null and missing entries."""
    factor = implied_factor if rope.get("factor") is None else rope.number("factor", 0.0, 1e6)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = (
        rope.number(name, 0.0, 1e6) if rope.get(name) else None for name in ("mscale", "mscale_all_dim")
    )
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor", 0.0, 1e6)
    elif mscale is not None and mscale_all_dim is not None:
        attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    else:
        attention_factor = magnitude(1.0)
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": rope.number("beta_fast", 0.0, 1e6) if rope.get("beta_fast") else 32.0,
        "beta_slow": rope.number("beta_slow", 0.0, 1e6) if rope.get("beta_slow") else 1.0,
        "truncate": rope.flag("truncate") if "truncate" in rope.entries else True,
    }
