"""How large an image is, by the header of its file: for who only counts tokens."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.multimodal.files.decoding import Measured, open_file

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112
"""The tag of EXIF data."""
_ON_ITS_SIDE = (5, 6, 7, 8)
"""Its values for an image that is stored with rows and columns exchanged."""
_PIXELS_OF_PNG = (b"IDAT", b"acTL", b"fcTL", b"fdAT")


def measure(data: bytes, options: Mapping[str, bool], name: str = "The image") -> Measured:
    """The size of an image of a file as ``Pictures.read`` finds it, which decodes it. name: begins the
    sentence of errors. Raises RequestError as that does, but for pixels that turn out to be broken."""
    image = open_file(data, name)
    width, height = image.size
    return (
        Measured(height, width, options)
        if _lies_on_its_side(image, data)
        else Measured(width, height, options)
    )


def _lies_on_its_side(image: Image, data: bytes) -> bool:
    from PIL import Image as images

    try:
        if image.format == "PNG":  # its metadata may come after the pixels, so that PIL would decode these
            image = images.open(io.BytesIO(_without_pixels(data)), formats=("PNG",))
        return images.Image.getexif(image).get(_ORIENTATION) in _ON_ITS_SIDE
    except Exception:  # broken EXIF data may raise anything; without them an image is taken as it lies
        return False


def _without_pixels(data: bytes) -> bytes:
    """The chunks of a PNG file but for those that hold its pixels."""
    kept, place = [data[:8]], 8
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        if kind not in _PIXELS_OF_PNG:
            kept.append(data[place:end])
        place = end
    return b"".join(kept)
