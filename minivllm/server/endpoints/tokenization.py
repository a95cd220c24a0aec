"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from minivllm.server.answers.chat_messages import template_messages
from minivllm.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from minivllm.server.service.service import Service
from minivllm.server.wire.errors import ApiError

ASSUMED_CHARACTERS_PER_TOKEN = 64
"""Where the tokenizer has no bound of its own."""


def tokenize(service: Service, request: TokenizeRequest) -> TokenizeResponse:
    """Raises RequestError or ApiError 400."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt", code="invalid_value")
    tokenizer = service.engine.tokenizer
    if request.prompt is not None:
        limit = service.max_model_len * (tokenizer.max_characters_per_token or ASSUMED_CHARACTERS_PER_TOKEN)
        if len(request.prompt) > limit:
            message = (
                f"prompt has {len(request.prompt)} characters, but may have at most {limit}: no prompt holds more."
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        token_ids = tokenizer.encode(
            request.prompt, request.add_special_tokens, request.parse_special_tokens is not False
        )
    else:
        messages = template_messages(request.messages or [], service.chat_template)
        rendered = service.engine.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            parse_special_tokens=bool(request.parse_special_tokens),
        )
        token_ids = rendered["prompt_token_ids"]
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=service.max_model_len,
        tokens=token_ids,
        token_strs=tokenizer.convert_ids_to_tokens(token_ids) if request.return_token_strs else None,
    )


def detokenize(service: Service, request: DetokenizeRequest) -> DetokenizeResponse:
    """Raises RequestError or ApiError 400."""
    tokenizer = service.engine.tokenizer
    for index, token in enumerate(request.tokens):
        if token >= tokenizer.vocab_size:
            raise ApiError(
                400,
                f"tokens.{index} is {token}, but must be below {tokenizer.vocab_size}, the tokenizer's size.",
                param=f"tokens.{index}",
                code="invalid_value",
            )
    return DetokenizeResponse(prompt=tokenizer.decode(request.tokens, request.skip_special_tokens))
