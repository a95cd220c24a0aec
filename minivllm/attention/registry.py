"""Attention backends by name: see ``plugins.ATTENTION`` and ``minivllm.register_attention``."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.attention.flex import rule_attention
from minivllm.attention.interface.backend import AttentionBackend, AttentionContext
from minivllm.attention.shared_tiles import shared_attention
from minivllm.attention.uncompiled.sdpa import SdpaAttention
from minivllm.errors import ConfigError
from minivllm.plugins.points import ATTENTION

AttentionFactory = Callable[[AttentionContext], AttentionBackend]
"""Makes a backend; a class of one is a factory. It is called again when compiled code takes over from
uncompiled, and for every draft model."""


def reads_strips(factory: AttentionFactory) -> bool:
    """Whether its backends read a cache in strips.
    Others may look into the cache themselves, and get a plain one."""
    return factory in (rule_attention, shared_attention, SdpaAttention)


def find_attention(name: str) -> AttentionFactory:
    """The factory that ``attention_backend`` names. Raises ConfigError that lists the names."""
    factory: AttentionFactory = ATTENTION.load(name)
    if not callable(factory):
        raise ConfigError(
            f"attention_backend is {name!r}, which must be a function or a class, but is {factory!r}."
        )
    return factory
