"""The families that are supported: how their published configurations and weights differ from one another.

One decoder, made of specs, runs all of them. A family is a row of this table, never a subclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from minivllm.errors import ModelError
from minivllm.models.families import gemma, glm, granite, llama, olmo, phi, qwen
from minivllm.models.families.family import Family

_ALL = (
    *llama.FAMILIES,
    *qwen.FAMILIES,
    *gemma.FAMILIES,
    *phi.FAMILIES,
    *olmo.FAMILIES,
    *glm.FAMILIES,
    *granite.FAMILIES,
)
_FAMILIES = {family.architecture: family for family in _ALL}
FAMILIES: Mapping[str, Family] = MappingProxyType(_FAMILIES)


def register_family(family: Family) -> None:
    """Add a row to the table from outside, before a model of the family is loaded. Raises ValueError for a known one.

    Tutorial 14 adds one.
    """
    if family.architecture in _FAMILIES:
        raise ValueError(f"The architecture {family.architecture} is in the table already.")
    _FAMILIES[family.architecture] = family


def find_family(architectures: Sequence[str], model_type: str | None, source: str) -> Family:
    """The family that config.json names: by ``architectures`` when it has any, else by ``model_type``.

    Raises ModelError that lists the supported architectures; ``source`` is the file to name in it.
    """
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    if not architectures:
        for family in _FAMILIES.values():
            if family.model_type == model_type:
                return family
    given = ", ".join(architectures) or (f"model_type {model_type!r}" if model_type else "none")
    raise ModelError(f"{source} names the architecture {given}, but supported are: {', '.join(FAMILIES)}.")


def find_gguf_family(gguf_architecture: str, source: str) -> Family:
    """The family behind ``general.architecture`` of a GGUF file; ModelError lists the supported names."""
    for family in _FAMILIES.values():
        if family.gguf_architecture == gguf_architecture:
            return family
    known = ", ".join(family.gguf_architecture for family in _FAMILIES.values() if family.gguf_architecture)
    raise ModelError(
        f"{source} holds a model of the GGUF architecture {gguf_architecture!r}, but supported are: {known}."
    )
