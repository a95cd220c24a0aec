"""Files that go with the next message of a conversation: texts and images."""

from __future__ import annotations

import base64
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from minivllm.cli.terminal.typed import read_typed_file
from minivllm.multimodal.files.decoding import MAX_FILE_BYTES


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """num_tokens: of its text alone."""

    name: str
    text: str
    num_tokens: int

    def as_markdown(self) -> str:
        fence = "```"
        while fence in self.text:
            fence += "`"
        return f"{self.name}:\n{fence}\n{self.text.rstrip()}\n{fence}"


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """url: a data URL with the bytes of the file. num_tokens: of its span in the prompt."""

    name: str
    url: str
    num_tokens: int


def image_url(path: Path) -> str:
    """The data URL of an image file. Raises RequestError if it cannot be read or is too large."""
    content = read_typed_file(path, MAX_FILE_BYTES)
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
