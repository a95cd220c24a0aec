"""The families that are supported: how their published configurations and weights differ from one another.

One decoder, made of specs, runs all of them. A family is a row of this table, never a subclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minivllm.errors import ConfigError, ModelError
from minivllm.families.family import Family
from minivllm.families.makers import (
    deepseek,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    llava,
    olmo,
    phi,
    qwen,
)
from minivllm.plugins.plugin import Plugins

_MODULES = (llama, qwen, llava, gemma, gemma4, phi, olmo, glm, granite, gpt_oss, deepseek, lfm2)
PLUGINS = Plugins(
    "family", {family.architecture: family for module in _MODULES for family in module.FAMILIES}
)
FAMILIES: Mapping[str, Family] = PLUGINS.known


def register_family(family: Family) -> None:
    """Add a row to the table from outside, before a model of the family is loaded: config.json finds it by
    its architecture, which is an identifier. Tutorial 14 adds one.

    The same architecture again replaces what was registered. Raises ConfigError for one of this table.
    """
    if not isinstance(family, Family):
        raise ConfigError(f"The family {family!r} must be a minivllm.Family.")
    PLUGINS.register(family.architecture, family)


def load_family(name: str) -> Family:
    """The row that the engine argument ``family`` names:
    an architecture, or "package.module:FAMILY", which is registered. Raises ConfigError."""
    family = PLUGINS.load(name)
    if FAMILIES.get(getattr(family, "architecture", "")) is not family:
        register_family(family)
    return family


def is_in_table(architectures: Sequence[str], model_type: str | None) -> bool:
    """Whether ``find_family`` finds a row."""
    if architectures:
        return any(name in FAMILIES for name in architectures)
    return any(family.model_type == model_type for family in FAMILIES.values())


def find_family(architectures: Sequence[str], model_type: str | None, source: str) -> Family:
    """The family that config.json names: by ``architectures`` when it has any, else by ``model_type``.

    Raises ModelError that lists the supported architectures; ``source`` is the file to name in it.
    """
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    if not architectures:
        for family in FAMILIES.values():
            if family.model_type == model_type:
                return family
    given = ", ".join(architectures) or (f"model_type {model_type!r}" if model_type else "none")
    raise ModelError(
        f"{source} names the architecture {given}, but supported are: {', '.join(FAMILIES)}; "
        "family='package.module:FAMILY' names your own."
    )


def find_gguf_family(gguf_architecture: str, source: str) -> Family:
    """The family behind ``general.architecture`` of a GGUF file; ModelError lists the supported names."""
    for family in FAMILIES.values():
        if family.gguf_architecture == gguf_architecture:
            return family
    known = ", ".join(family.gguf_architecture for family in FAMILIES.values() if family.gguf_architecture)
    raise ModelError(
        f"{source} holds a model of the GGUF architecture {gguf_architecture!r}, but supported are: {known}."
    )
