"""One scripted server for most tests, one with a real engine for the others,
and official clients for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from minivllm import EngineArgs
from minivllm.frontend.async_llm import AsyncLLM
from tests.lora.lora_adapters import random_adapter
from tests.server.serving import RealServer, ScriptedCore, Scripts, ServedCore, serve_in_thread, served


@pytest.fixture(scope="session")
def scripts(word_tokenizer: Path) -> Scripts:
    return Scripts(word_tokenizer)


@pytest.fixture(scope="module")
def server(scripts: Scripts) -> Iterator[ServedCore]:
    with served(
        ScriptedCore(scripts), scripts.tokenizer, served_model_names=("scripted", "other")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServedCore) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


TOOL_TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


@pytest.fixture(scope="session")
def real_server(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    """A tiny model in float32 that knows tools and guesses ahead, called "tiny",
    with room for two adapters."""
    model, directory = tmp_path_factory.mktemp("served") / "model", tmp_path_factory.mktemp("adapters")
    shutil.copytree(tiny_model("llama"), model)
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    names = ("first", "second", "third")
    adapters = [random_adapter(directory / name, model, seed=seed) for seed, name in enumerate(names)]
    args = EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        num_gpu_blocks_override=80,
        enable_lora=True,
        max_loras=2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    settings = {
        "served_model_names": ("tiny",),
        "lora_adapters": (adapters[0],),
        "lora_directory": directory,
    }
    with serve_in_thread(lambda: AsyncLLM.from_args(args), **settings) as served:
        yield RealServer(served, model, directory, adapters)


@pytest.fixture
def real_client(real_server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made
