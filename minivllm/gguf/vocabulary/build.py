"""Build the tokenizer that a GGUF file's vocabulary describes.

Two kinds exist: pairs that ``tokenizer.ggml.merges`` lists are merged, within the pieces that
``tokenizer.ggml.pre`` names; or pairs whose union has a score are merged, as SentencePiece does.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minivllm.errors import ModelError
from minivllm.gguf.end_of_generation import CONTROL, end_of_generation
from minivllm.gguf.gguf_file import GGUFFile
from minivllm.gguf.vocabulary.split_rules import SPLIT_RULES, SplitRule

logger = logging.getLogger(__name__)

# token types of GGUF
UNKNOWN, USER_DEFINED, BYTE = 2, 4, 6

WORD_BOUNDARY = "▁"  # SentencePiece's visible space


@dataclass(frozen=True)
class BuiltVocabulary:
    """Text processing from a GGUF file: the tokenizer, its special tokens and its chat template.

    special_tokens: bos_token, eos_token, unk_token and pad_token, where there is such a token.
    """

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def build_vocabulary(path: Path) -> BuiltVocabulary:
    """The tokenizer, special tokens and chat template of a GGUF file;
    ModelError when they are missing or unknown."""
    with GGUFFile(path) as file:
        metadata = file.metadata
    model = metadata.get("tokenizer.ggml.model")
    builders: dict[str, Callable[[_Vocabulary], Tokenizer]] = {
        "gpt2": _merged_by_rank,
        "gemma4": _merged_by_rank,
        "llama": _merged_by_score,
    }
    if not isinstance(model, str) or model not in builders:
        raise ModelError(
            f"{path} holds a tokenizer of the kind {model!r}, but supported are: {', '.join(builders)}."
        )
    if model == "gpt2" and "tokenizer.ggml.pre" not in metadata:
        logger.warning(
            "%s names no rule by which text is split (tokenizer.ggml.pre): 'default' is used, and the model "
            "may have "
            "been taught another one. Convert it anew.",
            path,
        )
    vocabulary = _Vocabulary(metadata, path)
    backend = builders[model](vocabulary)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{ours}_token": vocabulary.token(f"{theirs}_token_id") for ours, theirs in roles.items()}
    special = {name: token for name, token in named.items() if token is not None}
    _add_special_tokens(backend, vocabulary, special.values())
    _add_begin_and_end(backend, vocabulary, special, model == "llama" or vocabulary.split_rule().adds_bos)
    template = metadata.get("tokenizer.chat_template")
    return BuiltVocabulary(backend, special, template if isinstance(template, str) else None)


class _Vocabulary:
    """The checked tokenizer entries of a GGUF file."""

    def __init__(self, metadata: dict[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        listed: list[str] = self._list("tokens", str)
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(listed)]
        if not self.tokens:
            raise ModelError(f"{path} holds no tokens (tokenizer.ggml.tokens).")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ModelError(f"{path}: tokenizer.ggml.tokens lists a token twice.")
        self.types: list[int] = list(self._list("token_type", int)) or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{path}: tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length.")
        for index in end_of_generation(metadata):
            if isinstance(index, int) and 0 <= index < len(self.types):
                self.types[index] = CONTROL

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise ModelError(f"{self.path}: tokenizer.ggml.{name} is not a list of {kind.__name__} values.")
        return value

    def merges(self) -> list[tuple[str, str]]:
        """``"left right"`` lines as pairs whose halves and whole are tokens."""
        pairs = []
        for line in self._list("merges", str):
            space = line.find(" ", 1)
            left, right = line[:space], line[space + 1 :]
            if space < 0 or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise ModelError(
                    f"{self.path}: the merge {line!r} uses a token that is not in the vocabulary."
                )
            pairs.append((left, right))
        if not pairs and self._rule_name() != "kimi-k2":  # whose tokens are found as a whole or byte by byte
            raise ModelError(f"{self.path} holds no merges (tokenizer.ggml.merges).")
        return pairs

    def scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise ModelError(
                f"{self.path}: tokenizer.ggml.scores and tokenizer.ggml.tokens differ in length."
            )
        return scores

    def token(self, name: str) -> str | None:
        """The token that ``tokenizer.ggml.<name>`` names;
        None, with a warning, for an id outside the vocabulary."""
        index = self.metadata.get(f"tokenizer.ggml.{name}")
        if index is None:
            return None
        if not isinstance(index, int):
            raise ModelError(
                f"{self.path}: tokenizer.ggml.{name} is {index!r}, but must be the id of a token."
            )
        if 0 <= index < len(self.tokens):
            return self.tokens[index]
        logger.warning(
            "%s: tokenizer.ggml.%s is %d, but there are %d tokens: it is left out.",
            self.path,
            name,
            index,
            len(self.tokens),
        )
        return None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def _rule_name(self) -> Any:
        if self.metadata["tokenizer.ggml.model"] == "gemma4":
            return "gemma4"
        return self.metadata.get("tokenizer.ggml.pre", "default")

    def split_rule(self) -> SplitRule:
        name = self._rule_name()
        if not isinstance(name, str) or name not in SPLIT_RULES:
            raise ModelError(
                f"{self.path} splits text by the rule {name!r}, but supported are: {', '.join(SPLIT_RULES)}."
            )
        return SPLIT_RULES[name]


def _merged_by_rank(vocabulary: _Vocabulary) -> Tokenizer:
    rule = vocabulary.split_rule()
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=vocabulary.merges(),
            fuse_unk=False,
            ignore_merges=rule.ignores_merges,
            byte_fallback=not rule.is_byte_level,
        )
    )
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns
    ]
    if rule.is_byte_level:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        backend.normalizer = normalizers.Replace(" ", WORD_BOUNDARY)
        backend.decoder = _decoder_of_visible_spaces()
    if rule.joins_line_ends:
        runs = [token for token in vocabulary.tokens if token.startswith("\n\n") and not token.strip("\n")]
        backend.add_tokens([AddedToken(run, normalized=False) for run in runs])
    if rule.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return backend


def _decoder_of_visible_spaces(*further: Any) -> Any:
    return decoders.Sequence(
        [decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse(), *further]
    )


def _merged_by_score(vocabulary: _Vocabulary) -> Tokenizer:
    add_prefix = vocabulary.flag("add_space_prefix", True)
    unknown = next(
        (token for token, kind in zip(vocabulary.tokens, vocabulary.types) if kind == UNKNOWN), None
    )
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
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(WORD_BOUNDARY), spaces]) if add_prefix else spaces
    )
    strip = [decoders.Strip(content=" ", left=1)] if add_prefix else []
    backend.decoder = _decoder_of_visible_spaces(*strip)
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
    """Control tokens, and those with a role of their own, are matched whole and hidden when decoding;
    user-defined ones are matched whole and shown."""

    def added(wanted: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types)
            if kind == wanted
        ]

    backend.add_tokens(added(USER_DEFINED, special=False))
    backend.add_special_tokens(added(CONTROL, special=True) + added(UNKNOWN, special=True))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])


def _add_begin_and_end(
    backend: Tokenizer, vocabulary: _Vocabulary, special: Mapping[str, str], begin_by_default: bool
) -> None:
    begin, end = special.get("bos_token"), special.get("eos_token")
    before = [begin] if begin is not None and vocabulary.flag("add_bos_token", begin_by_default) else []
    after = [end] if end is not None and vocabulary.flag("add_eos_token", False) else []
    if before or after:
        pieces = [*before, "$A", *after]
        numbered = [(token, vocabulary.ids[token]) for token in (*before, *after)]
        template = processors.TemplateProcessing(single=pieces, special_tokens=numbered)
        current = backend.post_processor
        backend.post_processor = template if current is None else processors.Sequence([current, template])
