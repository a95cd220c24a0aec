"""The tokenizer of a GGUF file under the names of transformers' fast tokenizers,
kept on disk for the next start."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from minivllm.gguf import end_of_generation
from minivllm.gguf.gguf_file import SETTLED_NANOSECONDS
from minivllm.gguf.vocabulary import build, split_rules
from minivllm.hub.home import home_directory

_SOURCES = [Path(str(module.__file__)) for module in (build, split_rules, end_of_generation)]


class GGUFTokenizer:
    """The tokenizer, special tokens and chat template of a GGUF file,
    with the names of transformers' fast tokenizers.

    special_tokens: bos_token, eos_token, unk_token and pad_token, where there is such a token.
    """

    def __init__(
        self, backend: Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
        self.bos_token_id: int | None = ids.get("bos_token")
        self.eos_token_id: int | None = ids.get("eos_token")

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str:
        """The text of a conversation; raises as ``render_chat`` does."""
        from minivllm.tokenizer.chat_template import render_chat

        return render_chat(
            chat_template or self.chat_template or "",
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **variables},
        )


def load_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """As ``build_gguf_tokenizer``, which takes half a second;
    what it built is kept on disk for the next start."""
    cached = cache_path(path)
    found = None if cached is None else _read_cached(cached)
    if found is None:
        found = build_gguf_tokenizer(path)
        if cached is not None:
            _write_cached(cached, found)
    return found


def cache_path(path: Path) -> Path | None:
    """Where the tokenizer of this file is kept:
    named by the file's identity and by all that builds a tokenizer.

    None for a file so young that its next version could look the same.
    """
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < SETTLED_NANOSECONDS:
        return None
    parts = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino, version("tokenizers"))
    sources = b"".join(path.read_bytes() for path in (Path(__file__), *_SOURCES))
    digest = hashlib.sha256(repr(parts).encode() + sources).hexdigest()
    return home_directory() / "tokenizers" / f"{digest[:32]}.json"


def _read_cached(cached: Path) -> GGUFTokenizer | None:
    """None if it is not there, or not what was written."""
    try:
        digest, _, text = cached.read_text(encoding="utf-8").partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            return None
        entries = json.loads(text)
        return GGUFTokenizer(Tokenizer.from_str(entries["backend"]), entries["special"], entries["template"])
    except (OSError, ValueError):
        return None


def _write_cached(cached: Path, tokenizer: GGUFTokenizer) -> None:
    entries = {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "special": dict(tokenizer.special_tokens),
        "template": tokenizer.chat_template,
    }
    text = json.dumps(entries)
    with contextlib.suppress(OSError):  # the next start builds it again
        cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=cached.parent, encoding="utf-8", delete=False) as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        os.replace(file.name, cached)


def build_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """The tokenizer, special tokens and chat template of a GGUF file;
    ModelError when they are missing or unknown."""
    built = build.build_vocabulary(path)
    return GGUFTokenizer(built.backend, built.special_tokens, built.chat_template)
