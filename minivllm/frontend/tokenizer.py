"""The tokenizer: text to token ids and back, special ids, chat template; from a directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError, RequestError
from minivllm.models.fetch import resolve_model
from minivllm.models.gguf_file import find_gguf

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """A thin wrapper around a fast tokenizer of transformers; immutable after loading and safe to share.

    backend: the ``tokenizers.Tokenizer`` below it (for incremental decoding). vocab_size: number of ids, added tokens
    included. special_ids: ids that decode to nothing when special tokens are skipped.
    """

    def __init__(self, fast: PreTrainedTokenizerFast, source: str) -> None:
        self._fast = fast
        self.source = source
        self.backend: tokenizers.Tokenizer = fast.backend_tokenizer
        self.vocab_size = len(fast)
        self.bos_token_id: int | None = fast.bos_token_id
        self.eos_token_id: int | None = fast.eos_token_id
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._fast.chat_template)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The Jinja text of the chat template (some models have several, by name)."""
        return self._fast.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; RequestError when it is not valid Unicode (lone surrogates)."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"The text cannot be encoded: {error}. Send valid Unicode text.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, byte for byte as the tokenizer defines it; incomplete characters become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary entry behind each id, None for an id the tokenizer does not have."""
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
        assistant's turn. kwargs: further template variables. Raises RequestError when the model has no template, or
        when the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, tools, **kwargs), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text that ``apply_chat_template`` encodes; the template brings its own special tokens."""
        if not self.has_chat_template:
            raise RequestError(f"The model {self.source} has no chat template; send a plain prompt instead.")
        import jinja2

        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"The model's chat template refused the messages: {error}.") from error
        return str(text)


def load_tokenizer(model: str | Path, load_format: str = "auto", revision: str | None = None) -> Tokenizer:
    """Load a model's tokenizer; no code from the model is ever run.

    model: a local directory or GGUF file, or a name that ``resolve_model`` can fetch (without its weights).
    Raises ModelError when there is none or it is not supported.
    """
    path = resolve_model(model, revision, weights=False)
    gguf_path = find_gguf(path, load_format if load_format == "gguf" else "auto")
    if gguf_path is not None:
        from minivllm.frontend.gguf_tokenizer import build_gguf_tokenizer

        return Tokenizer(build_gguf_tokenizer(gguf_path), str(gguf_path))
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        fast = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise anything from KeyError to a bare Exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path} holds no tokenizer that can be loaded: {reason}") from error
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise ModelError(f"{path} holds a slow tokenizer only; a tokenizer.json is needed.")
    return Tokenizer(fast, str(path))
