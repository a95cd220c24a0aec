"""The proxy's view of a request's body:
the approximate length of the prompt, its beginning, the body for prefill."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec

from minivllm.server.bodies.errors import unsupported

PROMPT_FIELDS = {
    "/v1/chat/completions": ("messages", "tools"),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("input", "instructions", "tools"),
}
"""Path -> fields that make the prompt."""
LIMIT_FIELD = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
NOT_FOR_PREFILL = frozenset(
    {
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "best_of",
        "echo",
        "logprobs",
        "top_logprobs",
        "response_format",
        "structured_outputs",
        "text",
    }
)
"""Fields for the answer alone, which would make a single token cost more, or be refused."""
BYTES_PER_TOKEN = 4
"""Of text, about: the proxy has no tokenizer."""
IMAGE_TOKENS = 1024
"""Of an image, about: the proxy knows neither its size nor the model."""
PREFIX_BYTES = 1024


class Prompt:
    """One request to a generating path. num_tokens: about.
    prefix: its beginning, for finding the same server again."""

    def __init__(self, path: str, body: bytes) -> None:
        """Raises ApiError 400 for what clients may not say.
        A body that is no JSON object is left to the servers."""
        self._path = path
        try:
            self._fields = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError:
            self._fields = {}
        if "kv_transfer_params" in self._fields:
            raise unsupported("kv_transfer_params", "is not for clients: leave it out.")
        parts: list[Any] = [_with_digests(self._fields.get(name)) for name in PROMPT_FIELDS[path]]
        self.num_tokens = (
            max(map(_length, parts[0])) if _are_several(path, parts[0]) else sum(map(_length, parts))
        )
        self.prefix = msgspec.json.encode(parts)[:PREFIX_BYTES]
        self.is_stream = self._fields.get("stream") is True

    def for_prefill(self) -> bytes:
        """The same prompt, of whose answer one token is wanted."""
        fields = {name: value for name, value in self._fields.items() if name not in NOT_FOR_PREFILL}
        return msgspec.json.encode({**fields, LIMIT_FIELD[self._path]: 1})


def _are_several(path: str, prompt: Any) -> bool:
    return (
        path == "/v1/completions"
        and isinstance(prompt, list)
        and bool(prompt)
        and not isinstance(prompt[0], int)
    )


class _ImageDigest(msgspec.Struct, frozen=True):
    """Stands for the data URL of an image."""

    sha256: str


def _with_digests(value: Any) -> Any:
    """A prompt whose images are digests: their bytes are no text, and would be all that a prefix holds."""
    if isinstance(value, list):
        return [_with_digests(one) for one in value] if value and not isinstance(value[0], int) else value
    if not isinstance(value, dict):
        return value
    changed = {name: _with_digests(one) for name, one in value.items()}
    image = value.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(url, str):
        changed["image_url"] = _ImageDigest(sha256(url.encode(errors="replace")).hexdigest())
    return changed


def _length(value: Any) -> int:
    """Tokens of a prompt, or of its parts, about."""
    if isinstance(value, _ImageDigest):
        return IMAGE_TOKENS
    if isinstance(value, str):
        return len(value) // BYTES_PER_TOKEN
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    if isinstance(value, list):
        return len(value) if value and isinstance(value[0], int) else sum(map(_length, value))
    return 0
