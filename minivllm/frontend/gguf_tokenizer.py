"""Build a fast tokenizer from the vocabulary that a GGUF file carries.

Two models exist in the supported families: ``gpt2`` (byte-level BPE with merges, split by a regular expression that
``tokenizer.ggml.pre`` names) and ``llama`` (SentencePiece BPE, whose merges follow from the token scores).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError
from minivllm.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

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


def build_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, special tokens and chat template of a GGUF file; ModelError when they are missing or unknown."""
    from transformers import PreTrainedTokenizerFast

    with GGUFFile(path) as file:
        metadata = file.metadata
    builders: dict[str, Callable[[_Vocabulary], Tokenizer]] = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in builders:
        raise ModelError(f"{path} holds a tokenizer of the kind {model!r}, but supported are: {', '.join(builders)}.")
    vocabulary = _Vocabulary(metadata, path)
    backend = builders[model](vocabulary)
    _add_special_tokens(backend, vocabulary)
    _add_begin_and_end(backend, vocabulary, begin_by_default=_begins_by_default(vocabulary, model))
    named = {
        "bos_token": vocabulary.token("bos_token_id"),
        "eos_token": vocabulary.token("eos_token_id"),
        "unk_token": vocabulary.token("unknown_token_id"),
        "pad_token": vocabulary.token("padding_token_id"),
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: token for name, token in named.items() if token is not None}
    )
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        fast.chat_template = template
    return fast


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
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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
    from tokenizers import Tokenizer, decoders, models, normalizers

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


def _add_special_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are matched whole and hidden when decoding; user-defined ones are matched whole and shown."""
    from tokenizers import AddedToken

    def added(wanted: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types)
            if kind == wanted and token
        ]

    backend.add_tokens(added(USER_DEFINED, special=False))
    backend.add_special_tokens(added(CONTROL, special=True) + added(UNKNOWN, special=True))


def _begins_by_default(vocabulary: _Vocabulary, model: str) -> bool:
    return model == "llama" or _pre_tokenizer(vocabulary) == "llama3"


def _add_begin_and_end(backend: Tokenizer, vocabulary: _Vocabulary, begin_by_default: bool) -> None:
    from tokenizers import processors

    begin, end = vocabulary.token("bos_token_id"), vocabulary.token("eos_token_id")
    pieces = ["$A"]
    special: list[tuple[str, int]] = []
    if begin is not None and vocabulary.flag("add_bos_token", begin_by_default):
        pieces.insert(0, begin)
        special.append((begin, vocabulary.ids[begin]))
    if end is not None and vocabulary.flag("add_eos_token", False):
        pieces.append(end)
        special.append((end, vocabulary.ids[end]))
    if special:
        template = processors.TemplateProcessing(single=pieces, special_tokens=special)
        current = backend.post_processor
        backend.post_processor = template if current is None else processors.Sequence([current, template])
