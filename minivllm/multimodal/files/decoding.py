"""Pictures: files of images that are read by their header first, and decoded only within limits.

An image of a prompt is whatever the sender likes to send. So its format is told from its first bytes, its
size from its header, and nothing is decoded that is too large. PIL is imported with the first picture.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from struct import pack
from threading import Lock
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError
from minivllm.multimodal.files.decoding_room import DecodingRoom

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FILE_BYTES = 20 * 2**20
MAX_PIXELS = 2**25
MAX_SIDE = 16384
MAX_RATIO = 200
"""Of the longer side to the shorter one."""
FORMATS = ("PNG", "JPEG", "WEBP")
"""Readers of other formats have had holes."""
MEMO_ENTRIES = 4096


@dataclass(frozen=True, eq=False)
class Measured:
    """What the span of an image follows from: its header, if nothing else was read.

    width, height: after the rotation that its EXIF data ask for. options: see Expansion.
    """

    width: int
    height: int
    options: Mapping[str, bool]


@dataclass(frozen=True, eq=False)
class Picture(Measured):
    """An image that a request brings. source: bytes of a file, or an image of PIL. digest: of its pixels and
    options, 32 bytes.

    Compared by identity: a store keeps pictures as long as their requests do.
    """

    source: bytes | Image
    digest: bytes

    def pixels(self) -> Image:
        """Decode it: RGB, rotated."""
        return _rgb(open_file(self.source) if isinstance(self.source, bytes) else self.source)


class Pictures:
    """Makes pictures, and remembers the digests of files that it has seen. room: where they are decoded."""

    def __init__(self, room: DecodingRoom | None = None) -> None:
        self._room = room or DecodingRoom()
        self._memo: OrderedDict[bytes, tuple[int, int, bytes]] = OrderedDict()
        self._lock = Lock()

    def read(self, source: Any, options: Mapping[str, bool], name: str = "The image") -> Picture:
        """A picture of bytes of a file, or of an image of PIL. name: begins the sentence of errors. Raises
        RequestError for what is not an image, or too large."""
        if isinstance(source, (bytes, bytearray)):
            return self._read_file(bytes(source), options, name)
        from PIL.Image import Image

        if not isinstance(source, Image):
            raise RequestError(
                f"{name} is of type {type(source).__name__}, but must be an image of PIL, or the bytes of a "
                f"{', '.join(FORMATS)} file."
            )
        _check_size(source.width, source.height, name)
        width, height, digest = self._facts(source, options, name)
        return Picture(width, height, options, source, digest)

    def _read_file(self, data: bytes, options: Mapping[str, bool], name: str) -> Picture:
        key = hashlib.sha256(hashlib.sha256(data).digest() + _canonical(options)).digest()
        with self._lock:
            known = self._memo.get(key)
        if known is None:
            known = self._facts(open_file(data, name), options, name)
            with self._lock:
                self._memo[key] = known
                if len(self._memo) > MEMO_ENTRIES:
                    self._memo.popitem(last=False)
        width, height, digest = known
        return Picture(width, height, options, data, digest)

    def _facts(self, image: Image, options: Mapping[str, bool], name: str) -> tuple[int, int, bytes]:
        """Decode an image: its width and height as it is shown, and its digest."""
        with self._room.taken(image.width * image.height):
            decoded = _decoded(image, name)
            return decoded.width, decoded.height, _digest(decoded, options)


def open_file(data: bytes, name: str = "The image") -> Image:
    """The image of a file, of which only the header is read. name: begins the sentence of errors. Raises
    RequestError for what is not an image, or too large."""
    from PIL import Image, UnidentifiedImageError

    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"{name} has {len(data)} bytes, but may have at most {MAX_FILE_BYTES}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large images: they are refused below
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise RequestError(
                f"{name} is no file of the formats {', '.join(FORMATS)}: send one of these."
            ) from None
        except Image.DecompressionBombError:
            raise RequestError(f"{name} has far too many pixels: it may have at most {MAX_PIXELS}.") from None
        except Exception as error:  # a broken header may raise anything
            raise RequestError(f"{name} cannot be read: {type(error).__name__}: {error}.") from None
    _check_size(image.width, image.height, name)
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1:
        raise RequestError(f"{name} is animated ({num_frames} frames), but must be a single image.")
    return image


def _check_size(width: int, height: int, name: str) -> None:
    size = f"{name} has {width} × {height} pixels"
    if min(width, height) < 1 or max(width, height) > MAX_SIDE:
        raise RequestError(f"{size}, but a side may have 1 to {MAX_SIDE}.")
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"{size}, together {width * height}, but may have at most {MAX_PIXELS}: make it smaller."
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RequestError(f"{size}, but one side may be at most {MAX_RATIO} times as long as the other.")


def _decoded(image: Image, name: str) -> Image:
    try:
        return _rgb(image)
    except Exception as error:  # a broken file may raise anything
        raise RequestError(f"{name} cannot be decoded: {type(error).__name__}: {error}.") from None


def _rgb(image: Image) -> Image:
    """RGB, rotated as EXIF data say, over white where it is transparent."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(image) or image
    except Exception:  # EXIF data are an extra: without them the image is taken as it lies
        image.load()
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = (
            image.point(lambda value: value * (1 / 256)).convert("L")
            if image.mode != "F"
            else image.convert("L")
        )
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(background, image)
    return image.convert("RGB")


def _canonical(options: Mapping[str, bool]) -> bytes:
    return json.dumps(dict(options), sort_keys=True).encode()


def _digest(image: Image, options: Mapping[str, bool]) -> bytes:
    """SHA-256 of what the encoder gets to see: the pixels in RGB, their size, and the options.
    Every part is preceded by its length."""
    digest = hashlib.sha256()
    for part in (b"image 1", pack("<QQ", *image.size), image.tobytes(), _canonical(options)):
        digest.update(pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()
