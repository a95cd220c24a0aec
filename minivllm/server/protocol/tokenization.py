"""``/tokenize``, ``/detokenize``, ``/version``, ``/health``: small bodies and answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from minivllm.server.protocol.chat import MAX_MESSAGES, Message
from minivllm.server.wire.fields import Body, TokenId


class TokenizeRequest(Body):
    """Exactly one of prompt (a text) and messages (a conversation, by the chat template).

    add_special_tokens: what the tokenizer puts around a text; a chat template writes its own. parse_special_tokens:
    special tokens in the text count as such; left out, they do in a prompt and do not in messages, as when generating.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    parse_special_tokens: bool | None = None
    return_token_strs: bool = False


class TokenizeResponse(TypedDict):
    """token_strs: the vocabulary's entries, null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


class DetokenizeResponse(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


class Health(TypedDict):
    status: Literal["ok"]
