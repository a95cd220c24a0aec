"""Rotary parameters as configurations spell them, with the meaning that transformers gives them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from minivllm.families.entries import MAX_POSITIONS, Entries
from minivllm.specs.attention import RotaryConfig, RotaryType

logger = logging.getLogger(__name__)

ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
MAX_THETA = 1e15


def usable_positions(max_positions: int, tables: Sequence[RotaryConfig]) -> int:
    """Tokens that a text may have: YaRN and linear scaling extend the context by their factor.

    The table that reaches least far decides, so that a table of some layers alone does not extend it.
    """
    return max(max_positions, min((_reach(max_positions, table) for table in tables), default=0))


def _reach(max_positions: int, table: RotaryConfig) -> int:
    return (
        round(table.original_max_position * table.factor)
        if table.type in ("linear", "yarn")
        else max_positions
    )


def read_rotary(fields: Entries, head_dim: int) -> RotaryConfig:
    """Merge both spellings as transformers does:
    ``rope_scaling`` else ``rope_parameters``, gaps filled from above."""
    given = fields.entries.get("rope_scaling") or fields.entries.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise fields.refuse("rope_scaling", given, "must be an object or null")
    if any(isinstance(value, dict) for value in given.values()):
        raise fields.refuse(
            "rope_parameters", given, "must be one set of values: this family has no sets per layer type"
        )
    return read_rotary_set(fields, given, fields.get("rope_theta"), head_dim)


def read_rotary_by_type(fields: Entries, kind: str, theta_entry: str, head_dim: int) -> RotaryConfig:
    """Of the layers of one type, in a family that has a set for each: ``rope_parameters`` by type, or, as
    transformers 4 wrote it, ``rope_scaling`` for full attention. theta_entry: where the base stands
    otherwise."""
    given = fields.entries.get("rope_parameters") or {}
    if not isinstance(given, dict) or not all(isinstance(value, dict | None) for value in given.values()):
        raise fields.refuse("rope_parameters", given, "must hold one set of values for each type of layer")
    scaling = fields.entries.get("rope_scaling") if kind == "full_attention" else None
    if scaling is not None and not isinstance(scaling, dict):
        raise fields.refuse("rope_scaling", scaling, "must be an object or null")
    own = {**(given.get(kind) or {}), **(scaling or {})}
    theta = None if "rope_theta" in own else fields.number(theta_entry, 0.0, MAX_THETA)
    return read_rotary_set(fields, own, theta, head_dim)


def read_rotary_set(fields: Entries, given: Mapping[str, Any], theta: Any, head_dim: int) -> RotaryConfig:
    """One set of rotary parameters. theta: used where the set names none."""
    max_positions = fields.max_positions
    rope = Entries(given, {"rope_theta": theta}, fields.source, "rope_parameters.")

    rope_type = given.get("rope_type", given.get("type", "default"))
    rope_type = "default" if rope_type == "mrope" else rope_type  # as its sections say
    if rope_type not in ROTARY_TYPES:
        raise rope.refuse("rope_type", rope_type, f"must be one of {', '.join(ROTARY_TYPES)}")
    theta = rope.number("rope_theta", 0.0, MAX_THETA)

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
    if rope_type == "proportional":
        if head_dim % 2:
            raise rope.refuse("rope_type", rope_type, f"needs heads of an even size, not of {head_dim}")
        values["turned"], dim = dim, head_dim
        values["factor"] = 1.0 if rope.get("factor") is None else rope.number("factor", 0.0, 1e6)
    if rope_type == "dynamic" and dim == 2:
        raise rope.refuse(
            "rope_type", rope_type, "must not be dynamic when only two elements of a head are rotated"
        )
    if rope_type in ("linear", "dynamic", "llama3"):
        values["factor"] = rope.number("factor", 0.0, 1e6)
    if rope_type in ("llama3", "yarn", "longrope"):
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
    if rope_type == "longrope":
        values.update(_longrope(rope, dim, max_positions, values["original_max_position"]))
    values["axes"] = _axes(rope, dim)
    _warn_of_doubts(rope, rope_type, values, max_positions)
    return RotaryConfig(type=cast(RotaryType, rope_type), theta=theta, dim=dim, **values)


def _axes(rope: Entries, dim: int) -> tuple[int, ...]:
    """Which position turns each frequency (see RotaryConfig), by ``mrope_section``: how many belong to time,
    row and column. These lie one after the other (Qwen2-VL), or in turns, as long as an axis has some
    (Qwen3-VL)."""
    sections = rope.get("mrope_section")
    if sections is None:
        return ()
    half, in_turns = dim // 2, rope.get("mrope_interleaved")
    are_counts = isinstance(sections, list) and all(type(count) is int and count >= 0 for count in sections)
    if not are_counts or len(sections) != 3 or (sum(sections) != half and not in_turns):
        raise rope.refuse("mrope_section", sections, f"must list three counts that add up to {half}")
    if not in_turns:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(
        number % 3 if number % 3 and number < 3 * sections[number % 3] else 0 for number in range(half)
    )


_YARN = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_USED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
    "yarn": _YARN,
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"),
}
"""Entries that each type reads, besides those that all types may have."""
_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _warn_of_doubts(rope: Entries, rope_type: str, values: Mapping[str, Any], max_positions: int) -> None:
    """Warn of what transformers warns of: such parameters are used as they stand, but hardly meant so."""
    factor, original = values.get("factor"), values["original_max_position"]
    used = {*_SHARED, *_USED[rope_type]}
    stray = sorted({name for names in _USED.values() for name in names} & rope.entries.keys() - used)
    doubts = [
        f"{name} is not used by rope_type {rope_type!r}" for name in stray if rope.get(name) is not None
    ]
    if factor is not None and factor < 1:
        doubts.append(f"factor is {factor:g}, below 1, which shortens the context")
    if rope_type == "yarn" and max_positions != original and factor != max_positions / original:
        doubts.append(
            f"factor is {factor:g}, but max_position_embeddings {max_positions} is "
            f"{max_positions / original:g} times "
            f"original_max_position_embeddings; the factor decides"
        )
    if rope_type == "yarn" and values["beta_fast"] < values["beta_slow"]:
        doubts.append("beta_fast is below beta_slow")
    if rope_type == "llama3" and original >= max_positions:
        doubts.append(f"original_max_position_embeddings is {original}, not below max_position_embeddings")
    for doubt in doubts:
        logger.warning("%s: %s%s.", rope.source, rope.prefix, doubt)


def _longrope(rope: Entries, dim: int, max_positions: int, original: int) -> dict[str, Any]:
    """LongRoPE's divisors of each frequency (Ding et al.
    2024), for texts up to the original context and for longer."""
    values: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        given = rope.get(name)
        is_list = isinstance(given, list) and len(given) == dim // 2
        if not is_list or not all(isinstance(x, int | float) and 0 < x < math.inf for x in given):
            raise rope.refuse(
                name, given, f"must list {dim // 2} numbers above 0, one for each pair of elements"
            )
        values[f"{name}s"] = tuple(float(x) for x in given)
    factor = rope.optional_number("factor") or max_positions / original
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None and factor > 1 and original == 1:
        raise rope.refuse("attention_factor", None, "must be set where original_max_position_embeddings is 1")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {**values, "attention_factor": attention_factor}


def score_magnitude(fields: Entries, rotary: RotaryConfig) -> float:
    """Factor of queries, and of keys, that is no part of cosines and sines in DeepSeek's models: that of
    ``mscale_all_dim``. It grows with the context's extension."""
    given = fields.entries.get("rope_scaling") or fields.entries.get("rope_parameters") or {}
    rope = Entries(given, {}, fields.source, "rope_parameters.")
    if rotary.type == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return _magnitude(rotary.factor, rope.number("mscale_all_dim", 0.0, 1e6))


def _magnitude(factor: float, weight: float) -> float:
    """YaRN's temperature of attention, for a context that is longer by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(rope: Entries, implied_factor: float) -> dict[str, Any]:
    """YaRN's own values (Peng et al. 2023) with transformers' treatment of null and missing entries."""
    factor = implied_factor if rope.get("factor") is None else rope.number("factor", 0.0, 1e6)

    mscale, mscale_all_dim = (
        rope.number(name, 0.0, 1e6) if rope.get(name) else None for name in ("mscale", "mscale_all_dim")
    )
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor", 0.0, 1e6)
    elif mscale is not None and mscale_all_dim is not None:
        attention_factor = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    else:
        attention_factor = _magnitude(factor, 1.0)
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": rope.number("beta_fast", 0.0, 1e6) if rope.get("beta_fast") else 32.0,
        "beta_slow": rope.number("beta_slow", 0.0, 1e6) if rope.get("beta_slow") else 1.0,
        "truncate": rope.flag("truncate") if "truncate" in rope.entries else True,
    }
