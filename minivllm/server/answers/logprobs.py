"""Log-probabilities in the forms of the two completion endpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minivllm.processing.outputs import Logprob, PositionLogprobMap
from minivllm.server.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from minivllm.server.protocol.completions import CompletionLogprobs
from minivllm.tokenizer.detokenizer import TokenDecoder

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def chat_logprobs(positions: Sequence[PositionLogprobMap], num_top: int, decoder: TokenDecoder | None) -> msgspec.Raw:
    content: list[TokenLogprob] = []
    for position in positions:
        token_id, chosen = next(iter(position.items()))
        top = [_entry(other, value, decoder) for other, value in position.items() if value.rank <= num_top]
        top.sort(key=lambda entry: -entry["logprob"])
        content.append(TokenLogprob(**_entry(token_id, chosen, decoder), top_logprobs=top))
    return _written(ChoiceLogprobs(content=content, refusal=None))


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobMap | None],
    text_offset: int,
    decoder: TokenDecoder | None,
) -> msgspec.Raw:
    """text_offset: characters before the first of these tokens. None stands where there are none (the first token)."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token_id, position in zip(token_ids, positions):
        text = _text(token_id, None if position is None else position[token_id], decoder)
        result["tokens"].append(text)
        result["token_logprobs"].append(None if position is None else _finite(position[token_id].logprob))
        result["top_logprobs"].append(None if position is None else _by_text(position, decoder))
        result["text_offset"].append(text_offset)
        text_offset += len(text)
    return _written(result)


def _written(logprobs: Mapping[str, Any]) -> msgspec.Raw:
    """Log-probabilities as JSON, written entry by entry: in one piece, those of a long answer hold up every thread."""
    fields = (
        msgspec.json.encode(name)
        + b":"
        + (b"[" + b",".join(map(msgspec.json.encode, value)) + b"]" if isinstance(value, list) else b"null")
        for name, value in logprobs.items()
    )
    return msgspec.Raw(b"{" + b",".join(fields) + b"}")


def _by_text(position: PositionLogprobMap, decoder: TokenDecoder | None) -> dict[str, float]:
    """The alternatives by their text; of two tokens with the same text the likelier one stays."""
    entries: dict[str, float] = {}
    for token_id, value in position.items():
        text = _text(token_id, value, decoder)
        entries[text] = max(entries.get(text, LOWEST), _finite(value.logprob))
    return entries


def _entry(token_id: int, value: Logprob, decoder: TokenDecoder | None) -> TopLogprob:
    text = _text(token_id, value, decoder)
    data = text.encode()
    if decoder is not None and decoder.is_byte_level:
        data = decoder.load_token_bytes(token_id, False)
    return TopLogprob(token=text, logprob=_finite(value.logprob), bytes=list(data))


def _text(token_id: int, value: Logprob | None, decoder: TokenDecoder | None) -> str:
    if value is not None and value.decoded_token is not None:
        return value.decoded_token
    return f"token_id:{token_id}" if decoder is None else decoder.token_text(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
