"""Clients that people use, each as its own program in an environment of its own, against the same server.

What a program does is in ``client_programs``: chat, streams, a round trip with a tool, structured output,
both in one request, embeddings, each where the client has it; with chat completions and with responses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

PROGRAMS = Path(__file__).parent / "client_programs"
PACKAGES = {
    "litellm": "litellm[mcp]",
    "langchain_openai": "langchain-openai",
    "instructor": "instructor",
    "llm": "llm",
    "pydantic_ai": "pydantic-ai-slim[openai]",
    "openai_agents": "openai-agents",
}
TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function | tojson }} <tool_call></tool_call>{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def server(word_tokenizer: Path) -> Iterator[ServedCore]:
    scripts = Scripts(word_tokenizer)
    scripts.tokenizer._fast.chat_template = TEMPLATE
    with served(ScriptedCore(scripts, max_model_len=65536), scripts.tokenizer) as running:
        yield running


def python_with(package: str, directory: Path) -> Path:
    """A Python of its own that has the package and nothing of ours; skips the test where it cannot be had."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=120)
    python = directory / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    result = subprocess.run(install, capture_output=True, text=True, timeout=400)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(
            f"{package} cannot be installed, because no package index answers or has it: {last[:200]}"
        )
    return python


@pytest.mark.slow
@pytest.mark.parametrize("client", PACKAGES)
def test_a_client_does_all_it_can(server: ServedCore, tmp_path: Path, client: str) -> None:
    python = python_with(PACKAGES[client], tmp_path / "environment")
    here = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    here |= {"HOME": str(tmp_path), "OPENAI_API_KEY": "unused", "PYTHONPATH": str(PROGRAMS.parents[2])}
    result = subprocess.run(
        [str(python), "-m", f"tests.server.client_programs.with_{client}", server.url],
        env={**here, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # litellm would fetch its table of prices
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(client, ", ".join(result.stdout.splitlines()))
    assert result.returncode == 0, f"did {result.stdout.split()}, then:\n{result.stderr[-3000:]}"
