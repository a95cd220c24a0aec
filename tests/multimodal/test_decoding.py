"""Files of images that mean harm, or are broken, are refused in a sentence before they cost anything."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin, WebPImagePlugin

from minivllm.errors import RequestError
from minivllm.multimodal.files.decoding import MAX_FILE_BYTES, Pictures
from minivllm.multimodal.files.measuring import measure
from tests.multimodal.conftest import engine
from tests.multimodal.models import picture, prompt


def stored(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    """Of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header claims this size, and which holds a few bytes."""

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png_of_size(16000, 16000), "it may have at most 33554432"),
        (png_of_size(8000, 8000), "together 64000000, but may have at most 33554432"),
        (png_of_size(20000, 10), "a side may have 1 to 16384"),
        (png_of_size(2010, 10), "200 times as long"),
        (b"", "is no file of the formats PNG, JPEG, WEBP"),
        (b"GIF89a" + bytes(100), "is no file of the formats"),
        (b"\x89PNG\r\n\x1a\n" + bytes(10), "image"),
        (stored(picture(0, 200, 200))[:-300], "cannot be decoded"),
        (bytes(MAX_FILE_BYTES + 1), "may have at most 20971520"),
        ("image.png", "must be an image of PIL, or the bytes of a"),
        (stored(picture(0), "WEBP", save_all=True, append_images=[picture(1)]), "animated (2 frames)"),
        (stored(picture(0), "GIF"), "is no file of the formats"),
    ],
)
def test_what_is_refused(data: Any, reason: str) -> None:
    with pytest.raises(RequestError, match="The image") as caught:
        Pictures().read(data, {})
    assert reason in str(caught.value)


def test_modes_become_what_a_person_sees() -> None:
    pictures = Pictures()
    plain = picture(0)
    digest = pictures.read(plain, {}).digest
    opaque = plain.copy()
    opaque.putalpha(255)
    assert pictures.read(opaque, {}).digest == digest
    assert pictures.read(stored(plain, "WEBP", lossless=True), {}).digest == digest
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert pictures.read(clear, {}).digest == pictures.read(Image.new("RGB", (8, 8), "white"), {}).digest
    gray = Image.fromarray(np.full((8, 8), 40000, np.uint16))
    assert np.asarray(pictures.read(gray, {}).pixels())[0, 0].tolist() == [156, 156, 156]
    one_entry = Image.new("P", (8, 8))
    one_entry.putpalette([10, 20, 30])
    assert np.asarray(pictures.read(stored(one_entry), {}).pixels())[0, 0].tolist() == [10, 20, 30]
    assert pictures.read(Image.new("CMYK", (8, 8)), {}).pixels().mode == "RGB"


def test_rotation_by_exif_counts_and_broken_exif_does_not() -> None:
    pictures, image = Pictures(), picture(0, 40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = pictures.read(stored(image, exif=exif), {})
    assert (turned.width, turned.height) == (30, 40)
    assert turned.digest == pictures.read(image.transpose(Image.Transpose.ROTATE_270), {}).digest
    broken = pictures.read(stored(image, exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 40), {})
    assert broken.digest == pictures.read(image, {}).digest


def turned(data: bytes, orientation: int, where: str) -> bytes:
    """The PNG file, whose metadata say so, before its pixels or after them, or as XMP."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="{orientation}"/></x:xmpmeta>'
    name, content = b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")
    if where == "xmp after":
        name, content = b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp.encode()
    place = 33 if where == "before" else len(data) - 12
    assert data[12:16] == b"IHDR" and data[-8:-4] == b"IEND"
    return data[:place] + chunk(name, content) + data[place:]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_measured_as_they_are_decoded(orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = picture(0, 40, 30)
    files = {kind: stored(image, kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")}
    files |= {where: turned(stored(image), orientation, where) for where in ("before", "after", "xmp after")}
    sizes = {
        kind: (read.width, read.height)
        for kind, data in files.items()
        for read in [Pictures().read(data, {})]
    }
    assert set(sizes.values()) == {(30, 40) if orientation >= 5 else (40, 30)}

    def load(image: Image.Image) -> None:
        raise AssertionError("pixels are decoded")

    for plugin in (ImageFile.ImageFile, PngImagePlugin.PngImageFile, WebPImagePlugin.WebPImageFile):
        monkeypatch.setattr(plugin, "load", load)
    for kind, data in files.items():
        measured = measure(data, {})
        assert (measured.width, measured.height) == sizes[kind], kind


def test_what_cannot_be_measured() -> None:
    with pytest.raises(RequestError, match="The image is no file of the formats"):
        measure(b"hello", {})
    with pytest.raises(RequestError, match="Image 3 has 8000 × 8000 pixels"):
        measure(png_of_size(8000, 8000), {}, "Image 3")
    with pytest.raises(RequestError, match="may have at most 20971520"):
        measure(bytes(MAX_FILE_BYTES + 1), {})
    for end in (20, 40, 60, -1):  # broken files have a size, or are refused
        data = turned(stored(picture(0)), 6, "before")[:end]
        try:
            measured = measure(data, {})
        except RequestError:
            continue
        assert {measured.width, measured.height} == {40, 30}


def test_prompts_and_images_must_go_together(directories: dict[str, Path]) -> None:
    image = picture(0)
    with engine(directories["clip"]) as llm:
        for given, reason in [
            (
                prompt("<s>none", image),
                "The prompt has 0 placeholders for images (token 2, '<image>'), but 1 images came with it",
            ),
            (
                {"prompt": "<s><image>"},
                "The prompt has 1 placeholders for images (token 2, '<image>'), but 0 images",
            ),
            (prompt("<s>" + "<image>" * 9, *[image] * 9), "has 9 images, but may have at most 8"),
            ({"prompt": "<s>", "multi_modal_data": {"video": image}}, "must be a dictionary such as"),
            ({"prompt": "<s>", "multi_modal_data": [image]}, "must be a dictionary such as"),
            (
                prompt("<s><image>", image, mm_processor_kwargs={"size": 3}),
                "images of this model have no choices",
            ),
            (prompt("<s>" + "<image>" * 8 + "x" * 320, *[image] * 8), "max_model_len is 512"),
        ]:
            with pytest.raises(RequestError) as caught:
                llm.generate(given)
            assert reason in str(caught.value)
            del caught  # its frames keep pictures
    with engine(directories["smolvlm"]) as llm, pytest.raises(RequestError, match="must be true or false"):
        llm.generate(prompt("<s><image>", image, mm_processor_kwargs={"do_image_splitting": 1}))
