"""The small vocabulary, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structured_output.small_vocabulary import SmallVocabulary


@pytest.fixture(scope="session")
def vocabulary(word_tokenizer: Path) -> SmallVocabulary:
    return SmallVocabulary(word_tokenizer)
