"""Special tokens in what a user wrote are text: a message that says ``<|im_end|>`` must not end its own turn.

A chat template writes special tokens around the messages and returns one text, in which the template's own ones and a
user's look alike. So the strings of a conversation go through the template with a secret number in place of every
special token; what still looks like one afterwards is the template's. The text is then encoded by a twin of the
tokenizer that knows special tokens under secret names only.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizersBackend

_SECRET_DIGITS = 24
_NUMBER_DIGITS = 6


class SpecialTexts:
    """The special tokens of one tokenizer, and a twin of it for which their texts are ordinary."""

    def __init__(self, backend: TokenizersBackend) -> None:
        self._backend = backend
        added = sorted(backend.get_added_tokens_decoder().items())
        self._added = [entry for _, entry in added]
        self._special = [(token_id, entry) for token_id, entry in added if entry.special and entry.content]
        self.contents = [entry.content for _, entry in self._special]
        longest_first = sorted(self.contents, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {content[:end] for content in self.contents for end in range(1, len(content))}
        self._longest = max(map(len, self.contents), default=0)

    def encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``, in which special tokens are text."""
        twin, _ = self._twin
        return self._ids(twin, text, add_special_tokens)

    def encode_template(self, text: str, hidden: HiddenTexts) -> list[int]:
        """Token ids of what a template wrote: special tokens count, except those that ``hidden`` took out before."""
        twin, aliases = self._twin
        return self._ids(twin, hidden.restored(self._pattern.sub(lambda found: aliases[found[0]], text)), False)

    def _ids(self, twin: TokenizersBackend, text: str, add_special_tokens: bool) -> list[int]:
        original = {twin.token_to_id(alias): token_id for alias, token_id in self._id_of_alias.items()}
        ids = twin.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [original.get(token_id, token_id) for token_id in ids]

    @cached_property
    def _id_of_alias(self) -> dict[str, int]:
        secret = secrets.token_hex(16)
        return {f"\ue000{secret}{token_id}\ue001": token_id for token_id, _ in self._special}

    @cached_property
    def _twin(self) -> tuple[TokenizersBackend, dict[str, str]]:
        """The twin, which shares the model and its vocabulary, and the secret name of every special token."""
        backend = self._backend
        twin = TokenizersBackend(backend.model)
        for name in ("normalizer", "pre_tokenizer", "post_processor"):
            if (part := getattr(backend, name)) is not None:
                setattr(twin, name, part)
        twin.add_tokens(self._added)  # in the order of their ids, which stay the same
        twin.add_tokens(
            [
                AddedToken(
                    alias,
                    lstrip=entry.lstrip,
                    rstrip=entry.rstrip,
                    single_word=entry.single_word,
                    normalized=False,
                    special=False,
                )
                for alias, (_, entry) in zip(self._id_of_alias, self._special)
            ]
        )
        twin.encode_special_tokens = True
        return twin, dict(zip(self.contents, self._id_of_alias))

    def replace(self, text: str, number_of: Mapping[str, str]) -> str:
        """``text`` with every special token replaced, and the beginning of one at its end, which other text may end."""
        text = self._pattern.sub(lambda found: number_of[found[0]], text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return text[:-length] + number_of[text[-length:]]
        return text


class HiddenTexts:
    """What one conversation hides from its template. A secret of its own: an error of the template may show it."""

    def __init__(self, special: SpecialTexts) -> None:
        self._special = special
        self._secret = "".join(secrets.choice("123456789") for _ in range(_SECRET_DIGITS))
        self._texts: list[str] = []
        self._numbers = _Numbers(self._secret, self._texts)

    @property
    def is_empty(self) -> bool:
        return not self._texts

    def hide(self, value: Any) -> Any:
        """A copy of ``value``, which is JSON-like, whose strings have no special tokens."""
        if isinstance(value, str):
            return self._special.replace(value, self._numbers)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(inner) for inner in value]
        return value

    def restored(self, text: str) -> str:
        """``text``, which the template made, with everything hidden in its place again."""
        if not self._texts:
            return text
        pattern = rf"{self._secret}([0-9]{{{_NUMBER_DIGITS}}})"
        return re.sub(pattern, lambda found: self._texts[int(found[1])], text)


class _Numbers(dict[str, str]):
    """Text -> the secret number that stands for it. Digits pass through every filter of a template unchanged."""

    def __init__(self, secret: str, texts: list[str]) -> None:
        super().__init__()
        self._secret, self._texts = secret, texts

    def __missing__(self, text: str) -> str:
        self[text] = number = f"{self._secret}{len(self._texts):0{_NUMBER_DIGITS}}"
        self._texts.append(text)
        return number
