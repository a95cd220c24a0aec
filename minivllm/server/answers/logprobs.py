"""Log-probabilities in the forms of the two completion endpoints."""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minivllm.processing.outputs import Logprob, PositionLogprobMap
from minivllm.server.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from minivllm.server.protocol.completions import CompletionLogprobs, PromptLogprob
from minivllm.tokenizer.detokenizer import TokenDecoder

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True)
class TokenNames:
    """How tokens are called in an answer.

    A token whose bytes are no text by themselves, such as a part of a character, is called by them, as OpenAI
    does: ``\\xe6\\xbc``. decoder: None for a model without a tokenizer. by_id: every token is called
    ``token_id:ID``.
    """

    decoder: TokenDecoder | None
    by_id: bool = False

    def name(self, token_id: int, text: str | None = None, *, prefix: str = "") -> str:
        """text: the token's, if it is known already. prefix: stands before bytes."""
        if self.by_id or self.decoder is None:
            return f"token_id:{token_id}"
        text = self.decoder.token_text(token_id) if text is None else text
        if "\ufffd" in text:
            data = self.data(token_id)
            if data != text.encode():
                return prefix + "".join(f"\\x{byte:02x}" for byte in data)
        return text

    def data(self, token_id: int) -> bytes:
        """The token's bytes, none for a model without a tokenizer."""
        return b"" if self.decoder is None else self.decoder.bytes_of(token_id)


class TextOffsets:
    """Where the tokens of a choice begin in its text [characters], in the order in which they come.

    Parts of a character all begin where it does. Special tokens that the text leaves out take no room.
    """

    def __init__(self, decoder: TokenDecoder | None, *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._is_first = True

    def add(self, token_id: int) -> int:
        """The offset of the next token of the completion."""
        return self._add(token_id, self._skip_special_tokens)

    def add_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """The offsets of an echoed prompt's tokens.
        text: the prompt, which lacks what the tokenizer put around it."""
        offsets = []
        for token_id in token_ids:
            is_in_text = self._decoder is not None and text.startswith(
                self._decoder.token_text(token_id), self._length
            )
            offsets.append(self._add(token_id, not is_in_text))
        self._utf8.reset()
        self._length = len(text)
        self._is_first = True
        return offsets

    def _add(self, token_id: int, skips_special: bool) -> int:
        offset, decoder = self._length, self._decoder
        if decoder is not None and decoder.token(token_id, skips_special) is not None:
            data = decoder.bytes_of(token_id)
            if self._is_first and data.startswith(b" ") and not decoder.decode([token_id]).startswith(" "):
                data = data[1:]  # some decoders drop the space that a text begins with
            self._is_first = False
            self._length += len(self._utf8.decode(data))
        return offset


def chat_logprobs(positions: Sequence[PositionLogprobMap], num_top: int, names: TokenNames) -> msgspec.Raw:
    return _written(ChoiceLogprobs(content=token_logprobs(positions, num_top, names), refusal=None))


def token_logprobs(
    positions: Sequence[PositionLogprobMap], num_top: int, names: TokenNames
) -> list[TokenLogprob]:
    """One entry per token, with the num_top likeliest ones at its place."""
    content: list[TokenLogprob] = []
    for position in positions:
        token_id, chosen = next(iter(position.items()))
        top = [_entry(other, value, names) for other, value in position.items() if value.rank <= num_top]
        top.sort(key=lambda entry: -entry["logprob"])
        content.append(TokenLogprob(**_entry(token_id, chosen, names), top_logprobs=top))
    return content


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobMap | None],
    text_offset: Sequence[int],
    names: TokenNames,
) -> msgspec.Raw:
    """One entry per token. A position is None where there are none (the first token of an echoed prompt)."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(text_offset))
    for token_id, position in zip(token_ids, positions):
        known = None if position is None else position[token_id].decoded_token
        result["tokens"].append(names.name(token_id, known, prefix="bytes:"))
        result["token_logprobs"].append(None if position is None else _finite(position[token_id].logprob))
        result["top_logprobs"].append(None if position is None else _by_name(position, names))
    return _written(result)


def prompt_logprobs(positions: Sequence[PositionLogprobMap | None]) -> list[dict[str, PromptLogprob] | None]:
    """One entry per token of the prompt, by token ids as vLLM has them; None for the first."""
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(
                logprob=_finite(value.logprob), rank=value.rank, decoded_token=value.decoded_token
            )
            for token_id, value in position.items()
        }
        for position in positions
    ]


def _written(logprobs: Mapping[str, Any]) -> msgspec.Raw:
    """Log-probabilities as JSON, written entry by entry:
    in one piece, those of a long answer hold up every thread."""
    fields = (
        msgspec.json.encode(name)
        + b":"
        + (b"[" + b",".join(map(msgspec.json.encode, value)) + b"]" if isinstance(value, list) else b"null")
        for name, value in logprobs.items()
    )
    return msgspec.Raw(b"{" + b",".join(fields) + b"}")


def _by_name(position: PositionLogprobMap, names: TokenNames) -> dict[str, float]:
    """The token that stands here and the alternatives.
    Of two with the same text the later one is called by its id."""
    entries: dict[str, float] = {}
    for token_id, value in position.items():
        name = names.name(token_id, value.decoded_token, prefix="bytes:")
        entries[f"token_id:{token_id}" if name in entries else name] = _finite(value.logprob)
    return entries


def _entry(token_id: int, value: Logprob, names: TokenNames) -> TopLogprob:
    name = names.name(token_id, value.decoded_token)
    return TopLogprob(token=name, logprob=_finite(value.logprob), bytes=list(names.data(token_id)))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
