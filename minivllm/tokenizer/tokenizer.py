"""The tokenizer: text to token ids and back, special ids, chat template; from a directory or a GGUF file."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as TokenizersBackend

from minivllm.errors import ModelError, RequestError
from minivllm.gguf.gguf_file import find_gguf
from minivllm.hub.fetch import resolve_model
from minivllm.tokenizer.chat_messages import ending_with, with_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from minivllm.tokenizer.gguf_tokenizer import GGUFTokenizer

_SECRET_DIGITS = 24
_NUMBER_DIGITS = 6


class SpecialTexts:
    """Special tokens in what a user wrote are text:
    a message that says ``<|im_end|>`` must not end its own turn.

    A chat template writes special tokens around the messages and returns one text, in which the template's
    own ones and a user's look alike. So the strings of a conversation go through the template with a secret
    number in place of every special token; what still looks like one afterwards is the template's. The text
    is then encoded by a twin of the tokenizer that knows special tokens under secret names only.
    """

    def __init__(self, backend: TokenizersBackend) -> None:
        self._backend = backend
        added = sorted(backend.get_added_tokens_decoder().items())
        self._added = [entry for _, entry in added]
        self._special = [(token_id, entry) for token_id, entry in added if entry.special and entry.content]
        contents = [entry.content for _, entry in self._special]
        longest_first = sorted(contents, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {content[:end] for content in contents for end in range(1, len(content))}
        self._longest = max(map(len, contents), default=0)

    def encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``, in which special tokens are text."""
        twin, _, original = self._twin
        ids = twin.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [original.get(token_id, token_id) for token_id in ids]

    def encode_template(self, text: str, hidden: HiddenTexts, add_special_tokens: bool) -> list[int]:
        """Token ids of what a template wrote:
        special tokens count, except those that ``hidden`` took out before."""
        aliases = self._twin[1]
        text = hidden.restored(self._pattern.sub(lambda found: aliases[found[0]], text))
        return self.encode_plain(text, add_special_tokens)

    @cached_property
    def _twin(self) -> tuple[TokenizersBackend, dict[str, str], dict[int | None, int]]:
        """The twin, which shares the model and its vocabulary, the secret name of every special token, and
        the token for the twin's id of that name."""
        backend, secret = self._backend, secrets.token_hex(16)
        twin = TokenizersBackend(backend.model)
        for name in ("normalizer", "pre_tokenizer", "post_processor"):
            if (part := getattr(backend, name)) is not None:
                setattr(twin, name, part)
        twin.add_tokens(self._added)  # in the order of their ids, which stay the same
        aliases = {one.content: f"\ue000{secret}{token_id}\ue001" for token_id, one in self._special}
        twin.add_tokens(
            [
                AddedToken(
                    alias, lstrip=one.lstrip, rstrip=one.rstrip, single_word=one.single_word, normalized=False
                )
                for alias, (_, one) in zip(aliases.values(), self._special)
            ]
        )
        twin.encode_special_tokens = True
        return (
            twin,
            aliases,
            {
                twin.token_to_id(alias): token_id
                for alias, (token_id, _) in zip(aliases.values(), self._special)
            },
        )

    def replace(self, text: str, number_of: Callable[[str], str]) -> str:
        """``text`` with every special token replaced, and the beginning of one at its end,
        which other text may end."""
        text = self._pattern.sub(lambda found: number_of(found[0]), text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return text[:-length] + number_of(text[-length:])
        return text


class HiddenTexts:
    """The texts that a conversation hides from its template, under a new secret,
    which template errors may show."""

    def __init__(self, special: SpecialTexts) -> None:
        self._special = special
        self._secret = _secret()
        self._numbers: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        return not self._numbers

    def _number(self, text: str) -> str:
        """The secret number that stands for a text."""
        return self._numbers.setdefault(text, f"{self._secret}{len(self._numbers):0{_NUMBER_DIGITS}}")

    def hide(self, value: Any) -> Any:
        """A copy of ``value``, which is JSON-like, whose strings have no special tokens."""
        if isinstance(value, str):
            return self._special.replace(value, self._number)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(inner) for inner in value]
        return value

    def restored(self, text: str) -> str:
        """``text``, which the template made, with everything hidden in its place again."""
        texts = list(self._numbers)
        pattern = rf"{self._secret}([0-9]{{{_NUMBER_DIGITS}}})"
        return re.sub(pattern, lambda found: texts[int(found[1])], text)


# One text is encoded at a time, in the calling thread; a pool of threads beside it would only wait.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_COMPOSED_CHARACTERS = 4
"""So many characters at most become one in Unicode's form NFC."""


class Tokenizer:
    """A thin wrapper around a fast tokenizer; immutable after loading and safe to share.

    backend: the ``tokenizers.Tokenizer`` below it (for incremental decoding). vocab_size: number of ids,
    added tokens included. special_ids: ids that decode to nothing when special tokens are skipped.
    """

    def __init__(self, fast: PreTrainedTokenizerFast | GGUFTokenizer, source: str) -> None:
        self._fast = fast
        self.source = source
        self.backend: TokenizersBackend = fast.backend_tokenizer
        self.vocab_size = len(fast)
        self.bos_token_id: int | None = fast.bos_token_id
        self.eos_token_id: int | None = fast.eos_token_id
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._special_texts = SpecialTexts(self.backend)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._fast.chat_template)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The Jinja text of the chat template (some models have several, by name)."""
        return self._fast.chat_template

    @cached_property
    def max_characters_per_token(self) -> int | None:
        """No token stands for more characters than this; None where that cannot be told."""
        return max_characters_per_token(self.backend)

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of ``text``; RequestError when it is not valid Unicode (lone surrogates).

        add_special_tokens: put around the text what the tokenizer puts around texts. parse_special_tokens: a
        special token that stands in the text is that token, not its letters.
        """
        try:
            if not parse_special_tokens:
                return self._special_texts.encode_plain(text, add_special_tokens)
            # As a batch of one: only batches let go of the interpreter lock,
            # which 4 MB of text hold for 9 s otherwise.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"The text cannot be encoded: {error}. Send valid Unicode text.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, byte for byte as the tokenizer defines it; incomplete characters become U+FFFD."""
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary entry of each id, None for an id the tokenizer does not have."""
        return [self.backend.id_to_token(token) for token in ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation as the model was taught to read it.

        messages: ``{"role": ..., "content": ...}`` each. add_generation_prompt: end with the opening of the
        assistant's turn. kwargs: further template variables. Raises RequestError when the model has no
        template, or when the template refuses the messages.
        """
        return self.encode_chat(messages, add_generation_prompt, tools, **kwargs)[1]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        parse_special_tokens: bool = False,
        add_special_tokens: bool = False,
        max_characters: int | None = None,
        chat_template: str | None = None,
        edit: Callable[[str], str] = str,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        """(text, token ids) of a conversation; parameters and errors as ``render_chat``.

        parse_special_tokens: special tokens in messages, tools and kwargs count as such; otherwise they are
        text, and only the template's own ones count. add_special_tokens: put around the text what the
        tokenizer puts around texts, for templates that do not. max_characters: no ids are made of a longer
        text. edit: changes what the template has written.
        """
        hidden = HiddenTexts(self._special_texts)
        if not parse_special_tokens:
            messages, tools, kwargs = hidden.hide(list(messages)), hidden.hide(tools), hidden.hide(kwargs)
        rendered = self.render_chat(
            messages, add_generation_prompt, tools, chat_template=chat_template, **kwargs
        )
        rendered = edit(rendered)
        text = hidden.restored(rendered)
        if max_characters is not None and len(text) > max_characters:
            return text, []
        return text, self.encode_rendered(rendered, hidden, add_special_tokens)

    def hidden_texts(self) -> HiddenTexts:
        """For one conversation: hides special tokens in its messages, with the same result each time."""
        return HiddenTexts(self._special_texts)

    def encode_rendered(
        self, rendered: str, hidden: HiddenTexts, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of what ``render_chat`` wrote about messages that ``hidden`` has hidden,
        or of a part of it.

        Special tokens count, except those that were hidden. add_special_tokens: as in ``encode``.
        """
        if hidden.is_empty:
            return self.encode(rendered, add_special_tokens)
        return self._special_texts.encode_template(rendered, hidden, add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation with the template, as text with its special tokens.

        continue_final_message: end within the last message, which the model then goes on with. chat_template:
        takes the place of the model's. kwargs: further template variables. Raises RequestError.
        """
        if not self.has_chat_template and chat_template is None:
            raise RequestError(f"The model {self.source} has no chat template; send a plain prompt instead.")
        given, end = list(messages), ""
        if self._needs_parts if chat_template is None else self._reads_parts_only(chat_template):
            given = list(map(with_parts, given))
        if continue_final_message:
            end = _secret()
            given[-1] = ending_with(given[-1], end)
        given_tools = None if tools is None else [dict(tool) for tool in tools]
        text = self._rendered(given, chat_template, add_generation_prompt, tools=given_tools, **kwargs)
        if end and end not in text:
            raise RequestError(
                "continue_final_message is True, but the chat template leaves the last message out."
            )
        return text.rpartition(end)[0] if end else text

    @cached_property
    def _needs_parts(self) -> bool:
        return self._reads_parts_only(None)

    def _reads_parts_only(self, chat_template: str | None) -> bool:
        """Whether a template loses a content that is a text, but writes one that is a list of parts.
        None is the model's. Many templates of models that see do, without a word."""

        def writes(content: Any) -> bool:
            try:
                return mark in self._rendered([{"role": "user", "content": content}], chat_template, False)
            except RequestError:
                return False

        mark = _secret()
        return not writes(mark) and writes([{"type": "text", "text": mark}])

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None,
        add_generation_prompt: bool,
        tools: list[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        import jinja2

        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"The chat template refused the messages: {error}.") from error
        return str(text)


def _secret() -> str:
    """Digits pass through every filter of a template unchanged."""
    return "".join(secrets.choice("123456789") for _ in range(_SECRET_DIGITS))


def max_characters_per_token(backend: TokenizersBackend) -> int | None:
    """No token stands for more characters of a text than this;
    None for a tokenizer that may drop some or fuse many.

    Byte-pair encoding down to bytes keeps every character,
    so a token has no more of them than its entry's letters.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder().values()
    state = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer is not None else {}
    steps = state.get("pretokenizers", [state])
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    falls_back = (
        isinstance(backend.model, models.BPE) and backend.model.byte_fallback and "<0xFF>" in vocabulary
    )
    drops = any(step.get("behavior") == "Removed" or "White" in step.get("type", "") for step in steps)
    strips = any(entry.lstrip or entry.rstrip for entry in added)
    if not isinstance(backend.model, models.BPE) or drops or strips or not (is_byte_level or falls_back):
        return None
    factor = 1
    state = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else {}
    for step in state.get("normalizers", [state] if state else []):
        if step["type"] == "NFC":
            factor = MAX_COMPOSED_CHARACTERS
        elif step["type"] != "Prepend" and (step["type"], step.get("pattern")) != (
            "Replace",
            {"String": " "},
        ):
            return None
    return factor * max(map(len, vocabulary))


def load_tokenizer(model: str | Path, load_format: str = "auto", revision: str | None = None) -> Tokenizer:
    """Load a model's tokenizer; no code from the model is ever run.

    model: a local directory or GGUF file, or a name that ``resolve_model`` can fetch (without its weights).
    Raises ModelError when there is none or it is not supported.
    """
    path = resolve_model(model, revision, weights=False)
    gguf_path = find_gguf(path, load_format if load_format == "gguf" else "auto")
    if gguf_path is not None:
        from minivllm.tokenizer.gguf_tokenizer import load_gguf_tokenizer

        return Tokenizer(load_gguf_tokenizer(gguf_path), str(gguf_path))
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        fast = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise anything from KeyError to a bare Exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path} holds no tokenizer that can be loaded: {reason}") from error
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise ModelError(f"{path} holds a slow tokenizer only; a tokenizer.json is needed.")
    if not fast.chat_template:
        fast.chat_template = _template_of_processor(path / "chat_template.json")
    return Tokenizer(fast, str(path))


def _template_of_processor(path: Path) -> str | None:
    """Models that see may bring their template with the image processor. Raises ModelError."""
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text("utf-8"))["chat_template"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} holds no chat template that can be read: {error!r}.") from error
    if not isinstance(template, str):
        raise ModelError(f"{path}: chat_template is of type {type(template).__name__}, but must be a text.")
    return template
