"""Images in the messages of a conversation: parts with data URLs, or with images of PIL."""

from __future__ import annotations

import base64
import binascii
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import RequestError
from minivllm.multimodal.files.decoding import MAX_FILE_BYTES, Measured
from minivllm.multimodal.prompt_images import PromptImages

IMAGE_PARTS = ("image_url", "image_pil")
_DETAILS: Mapping[str, bool | None] = {"auto": None, "low": False, "high": True}
"""What the first choice that an image has is set to: whether it is cut into tiles. Images of many families
have no choice. Some clients send "low" or "high" with every image, so it is ignored there, as vLLM does."""


def take_images(
    messages: Sequence[Any], images: PromptImages | None, no_images: str, *, measures: bool = False
) -> tuple[list[Any], list[Measured]]:
    """(messages, pictures): each part with an image has become ``{"type": "image"}``, as chat templates know
    it. For a model whose template knows none, the message's content has become a text with marks before it.

    images: None for a model that reads text only, and no_images says why. measures: files are not decoded, so
    what is returned for them are no pictures yet.
    Raises RequestError that names the part.
    """
    pictures: list[Measured] = []
    taken = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            taken.append(message)
            continue
        parts = []
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            name = f"messages.{index}.content.{number}"
            if isinstance(kind, str) and kind.startswith("video"):
                raise RequestError(
                    f"{name} is a video, which is not served: send some of its frames as images."
                )
            if kind not in IMAGE_PARTS:
                parts.append(part)
                continue
            if images is None:
                raise RequestError(f"{name} is an image: at most 0 images per request. {no_images}")
            if len(pictures) == images.config.most_in_prompt:
                raise RequestError(
                    f"{name} is one image too many: at most {len(pictures)} images per request "
                    "(limit_mm_per_prompt)."
                )
            pictures.append(_picture(part, kind, name, images, measures))
            parts.append({"type": "image"})
        is_image = [isinstance(part, Mapping) and part.get("type") == "image" for part in parts]
        if images is not None and images.mark is not None and any(is_image):
            name = f"messages.{index}.content"
            texts = [_text(part, name) for part, is_one in zip(parts, is_image) if not is_one]
            taken.append({**message, "content": images.mark * sum(is_image) + "\n".join(texts)})
        else:
            taken.append({**message, "content": parts})
    return taken, pictures


def _text(part: Any, name: str) -> str:
    """Of a part beside images. Raises RequestError."""
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise RequestError(f"{name} has a part {reprlib.repr(part)}, but beside images only texts are read.")
    return text


def _picture(part: Mapping[str, Any], kind: str, name: str, images: PromptImages, measures: bool) -> Measured:
    given = part.get(kind)
    if kind == "image_pil":
        return images.read_one(given, {}, name)
    url, detail = (given.get("url"), given.get("detail")) if isinstance(given, Mapping) else (given, None)
    if (detail or "auto") not in _DETAILS:
        raise RequestError(f"{name}: detail is {reprlib.repr(detail)}, but must be auto, low or high.")
    cuts = _DETAILS[detail or "auto"]
    options = {} if cuts is None or not images.options else {images.options[0]: cuts}
    read = images.measure_one if measures else images.read_one
    return read(read_data_url(url, name), options, name)


def read_data_url(url: Any, name: str) -> bytes:
    """The bytes of a data URL in base64. name: begins the sentence of errors. Raises RequestError."""
    if not isinstance(url, str):
        raise RequestError(f"{name} has no url: give one that begins with 'data:image/png;base64,'.")
    head, comma, body = url[:256].partition(",")
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise RequestError(
            f"{name}: remote images are off, since the server fetches nothing: send a data URL."
        )
    if scheme != "data" or not comma or not head.lower().endswith(";base64"):
        raise RequestError(
            f"{name}: the url begins with {reprlib.repr(url[:32])}, but must begin with "
            "'data:image/png;base64,' or "
            "the like."
        )
    body = url[len(head) + 1 :]
    if len(body) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise RequestError(
            f"{name} has about {len(body) * 3 // 4} bytes, but may have at most {MAX_FILE_BYTES}."
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name}: the url is no valid base64: {error}.") from None
