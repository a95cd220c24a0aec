"""Garbage collections, which are left out while much is imported or loaded that stays."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import, or load a model, without garbage collections, which look through hundreds of thousands of
    objects that all stay: they take an eighth of the time torch needs, and a tenth of what SmolLM2-135M needs
    up to its first token. What is there at the end is left out of later ones too, if torch was imported."""
    had_torch, was_enabled = "torch" in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not had_torch:
            gc.freeze()
        if was_enabled:
            gc.enable()
