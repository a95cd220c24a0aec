"""Build a fast tokenizer from the vocabulary that a GGUF file carries.

Two models exist in the supported families: ``gpt2`` (byte-level BPE with merges, split by a regular expression that
``tokenizer.ggml.pre`` names) and ``llama`` (SentencePiece BPE, whose merges follow from the token scores).
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minivllm.errors import ModelError
from minivllm.gguf.gguf_file import SETTLED_NANOSECONDS, GGUFFile
from minivllm.hub.fetch import model_cache

# token types of GGUF
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

# tokenizer.ggml.pre -> how text is split before merging
PRE_TOKENIZERS = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama-v3": "llama3",
    "llama3": "llama3",
    "smaug-bpe": "llama3",
    "qwen2": "qwen2",
}
WORD_BOUNDARY = "▁"  # SentencePiece's visible space


class GGUFTokenizer:
    """The tokenizer, special tokens and chat template of a GGUF file, with the names of transformers' fast tokenizers.

    special_tokens: bos_token, eos_token, unk_token and pad_token, where there is such a token.
    """

    def __init__(self, backend: Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer, self.special_tokens, self.chat_template = backend, special_tokens, chat_template
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
    """As ``build_gguf_tokenizer``, which takes half a second; what it built is kept on disk for the next start."""
    cached = cache_path(path)
    found = None if cached is None else _read_cached(cached)
    if found is None:
        found = build_gguf_tokenizer(path)
        if cached is not None:
            _write_cached(cached, found)
    return found


def cache_path(path: Path) -> Path | None:
    """Where the tokenizer of this file is kept: named by the file's identity and by all that builds a tokenizer.

    None for a file so young that its next version could look the same.
    """
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < SETTLED_NANOSECONDS:
        return None
    parts = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino, version("tokenizers"))
    digest = hashlib.sha256(repr(parts).encode() + Path(__file__).read_bytes()).hexdigest()
    return model_cache().parent / "tokenizers" / f"{digest[:32]}.json"


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
    """The tokenizer, special tokens and chat template of a GGUF file; ModelError when they are missing or unknown."""
    with GGUFFile(path) as file:
        metadata = file.metadata
    builders: dict[str, Callable[[_Vocabulary], Tokenizer]] = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in builders:
        raise ModelError(f"{path} holds a tokenizer of the kind {model!r}, but supported are: {', '.join(builders)}.")
    vocabulary = _Vocabulary(metadata, path)
    backend = builders[model](vocabulary)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{ours}_token": vocabulary.token(f"{theirs}_token_id") for ours, theirs in roles.items()}
    special = {name: token for name, token in named.items() if token is not None}
    _add_special_tokens(backend, vocabulary, special.values())
    begins_by_default = model == "llama" or _pre_tokenizer(vocabulary) == "llama3"
    _add_begin_and_end(backend, vocabulary, begins_by_default)
    template = metadata.get("tokenizer.chat_template")
    return GGUFTokenizer(backend, special, template if isinstance(template, str) else None)


class _Vocabulary:
    """The checked tokenizer entries of a GGUF file."""

    def __init__(self, metadata: dict[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise ModelError(f"{path} holds no tokens (tokenizer.ggml.tokens).")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ModelError(f"{path}: tokenizer.ggml.tokens lists a token twice.")
        self.types: list[int] = self._list("token_type", int) or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{path}: tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length.")

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise ModelError(f"{self.path}: tokenizer.ggml.{name} is not a list of {kind.__name__} values.")
        return value

    def merges(self) -> list[tuple[str, str]]:
        """``"left right"`` lines as pairs whose halves and whole are tokens."""
        pairs = []
        for line in self._list("merges", str):
            left, _, right = line.partition(" ")
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise ModelError(f"{self.path}: the merge {line!r} uses a token that is not in the vocabulary.")
            pairs.append((left, right))
        if not pairs:
            raise ModelError(f"{self.path} holds no merges (tokenizer.ggml.merges).")
        return pairs

    def scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise ModelError(f"{self.path}: tokenizer.ggml.scores and tokenizer.ggml.tokens differ in length.")
        return scores

    def token(self, name: str) -> str | None:
        """The token behind ``tokenizer.ggml.<name>``; None when the entry is missing."""
        index = self.metadata.get(f"tokenizer.ggml.{name}")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise ModelError(
                f"{self.path}: tokenizer.ggml.{name} is {index!r}, but there are {len(self.tokens)} tokens."
            )
        return self.tokens[index]

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))


def _pre_tokenizer(vocabulary: _Vocabulary) -> str:
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{vocabulary.path} splits text by the rule {name!r}, but supported are: {', '.join(PRE_TOKENIZERS)}."
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    split = _pre_tokenizer(vocabulary)
    add_prefix_space = vocabulary.flag("add_space_prefix", False)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), fuse_unk=False, ignore_merges=split == "llama3")
    )
    if split in ("llama3", "qwen2"):
        pattern = LLAMA3_PATTERN if split == "llama3" else QWEN2_PATTERN
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
            ]
        )
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if split == "smollm" else byte_level
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    add_prefix = vocabulary.flag("add_space_prefix", True)
    unknown = next((token for token, kind in zip(vocabulary.tokens, vocabulary.types) if kind == UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges_from_scores(vocabulary.tokens, vocabulary.types, vocabulary.scores()),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", WORD_BOUNDARY)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_BOUNDARY), spaces]) if add_prefix else spaces
    steps: list[Any] = [decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores highest: list every such pair, best union first.

    Special, byte and unknown tokens take no part in merging.
    """
    mergeable = {
        token: score
        for token, kind, score in zip(tokens, types, scores)
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
    }
    rank = {token: index for index, token in enumerate(tokens)}
    pairs = [
        (-score, rank[whole[:cut]], rank[whole[cut:]], whole[:cut], whole[cut:])
        for whole, score in mergeable.items()
        for cut in range(1, len(whole))
        if whole[:cut] in mergeable and whole[cut:] in mergeable
    ]
    return [(left, right) for _, _, _, left, right in sorted(pairs)]


def _add_special_tokens(backend: Tokenizer, vocabulary: _Vocabulary, named: Iterable[str]) -> None:
    """Control tokens, and those with a role of their own, are matched whole and hidden when decoding; user-defined ones
    are matched whole and shown."""

    def added(wanted: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types)
            if kind == wanted and token
        ]

    backend.add_tokens(added(USER_DEFINED, special=False))
    backend.add_special_tokens(added(CONTROL, special=True) + added(UNKNOWN, special=True))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])


def _add_begin_and_end(backend: Tokenizer, vocabulary: _Vocabulary, begin_by_default: bool) -> None:
    begin, end = vocabulary.token("bos_token_id"), vocabulary.token("eos_token_id")
    before = [begin] if begin is not None and vocabulary.flag("add_bos_token", begin_by_default) else []
    behind = [end] if end is not None and vocabulary.flag("add_eos_token", False) else []
    if before or behind:
        pieces = [*before, "$A", *behind]
        special = [(token, vocabulary.ids[token]) for token in (*before, *behind)]
        template = processors.TemplateProcessing(single=pieces, special_tokens=special)
        current = backend.post_processor
        backend.post_processor = template if current is None else processors.Sequence([current, template])
