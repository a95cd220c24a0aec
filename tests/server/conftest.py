"""One scripted server for most tests, and official clients for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serving import ScriptedCore, Scripts, ServedCore, served


@pytest.fixture(scope="session")
def scripts(word_tokenizer: Path) -> Scripts:
    return Scripts(word_tokenizer)


@pytest.fixture(scope="module")
def server(scripts: Scripts) -> Iterator[ServedCore]:
    with served(ScriptedCore(scripts), scripts.tokenizer, served_model_names=("scripted", "other")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServedCore) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made
