"""The frontend's part: images of a prompt become spans of placeholders,
and pixels when the engine core asks."""

from __future__ import annotations

import logging
import operator
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from minivllm.config import ImagesConfig
from minivllm.errors import ModelError, RequestError
from minivllm.messages import ImageItem
from minivllm.multimodal.facts import read_config, read_processor
from minivllm.multimodal.files.decoding import Measured, Picture, Pictures
from minivllm.multimodal.files.decoding_room import DecodingRoom
from minivllm.multimodal.files.measuring import measure
from minivllm.multimodal.items import PixelTensors
from minivllm.multimodal.spans.families import make_expansion
from minivllm.multimodal.spans.span import Options, Span

if TYPE_CHECKING:
    from minivllm.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LaidOut(NamedTuple):
    """Where the span of an image lies in a prompt. runs: from offset on; they differ from those of the span
    where a prompt has texts between its pieces."""

    offset: int
    length: int
    runs: list[tuple[int, int]]
    span: Span


class PromptImages:
    """One for each frontend; any thread may call it. Reading an image waits for a place in the
    ``DecodingRoom``, as resizing does: neither may run on an event loop.

    A picture is found by its digest as long as something refers to it: the requests that it belongs to.
    """

    def __init__(
        self, config: ImagesConfig, path: str, tokenizer: Tokenizer | None, is_joined: bool = False
    ) -> None:
        """path: of the model, or of the eye that is joined to it. Raises ModelError for an eye whose
        placeholder is another token of this model."""
        self.config = config
        self.mark = secrets.token_hex(16) if is_joined else None
        """Stands for an image in the text of a message: the model's chat template knows none. None: it does.
        No user can know it."""
        self._path = Path(path)
        self._tokenizer = tokenizer
        entries = read_config(self._path)
        self._expansion = make_expansion(config.family, entries, read_processor(self._path, entries), path)
        if is_joined and tokenizer is not None:
            _check_placeholder(entries.get("image_token"), config.placeholder, tokenizer)
        self._room = DecodingRoom()
        self._pictures = Pictures(self._room)
        self._kept: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """Pictures of unfinished requests, equal ones counted once."""
        return len(self._kept)

    @property
    def options(self) -> tuple[str, ...]:
        """Choices that a caller has for an image."""
        return self._expansion.options

    def read(self, images: Any, options: Any) -> list[Picture]:
        """The pictures of a prompt. images: one or a list, each bytes of a file or an image of PIL; options:
        see ``options``. Raises RequestError."""
        sources = list(images) if isinstance(images, (list, tuple)) else [images]
        if len(sources) > self.config.most_in_prompt:
            raise RequestError(
                f"The prompt has {len(sources)} images, but may have at most {self.config.most_in_prompt} "
                "(limit_mm_per_prompt)."
            )
        checked = self._check_options(options)
        names = ["The image" if len(sources) == 1 else f"Image {index}" for index in range(len(sources))]
        return [self.read_one(source, checked, name) for source, name in zip(sources, names)]

    def read_one(self, source: Any, options: Mapping[str, bool], name: str) -> Picture:
        """See ``Pictures.read``; a picture stays what it is.
        An equal one of an unfinished request takes its place."""
        picture = source if isinstance(source, Picture) else self._pictures.read(source, options, name)
        with self._lock:
            return self._kept.setdefault(picture.digest, picture)

    def measure_one(self, source: Any, options: Mapping[str, bool], name: str) -> Measured:
        """Like ``read_one``, but no pixels of a file are decoded: enough to ``lay_out`` its span."""
        is_file = isinstance(source, (bytes, bytearray))
        return measure(bytes(source), options, name) if is_file else self.read_one(source, options, name)

    def _check_options(self, options: Any) -> Mapping[str, bool]:
        known = self._expansion.options
        if not isinstance(options or {}, Mapping):
            raise RequestError(
                f"mm_processor_kwargs is of type {type(options).__name__}, but must be a dictionary."
            )
        for key, value in (options or {}).items():
            if key not in known:
                allowed = (
                    f"known are: {', '.join(known)}" if known else "images of this model have no choices"
                )
                raise RequestError(f"mm_processor_kwargs has {key!r}, but {allowed}.")
            if not isinstance(value, bool):
                raise RequestError(f"mm_processor_kwargs[{key!r}] is {value!r}, but must be true or false.")
        return dict(options or {})

    @property
    def placeholder_text(self) -> str:
        """The token that stands for an image, as text: in a plain prompt."""
        return self.mark or self._marker or ""

    @cached_property
    def _marker(self) -> str | None:
        return (
            None if self._tokenizer is None else self._tokenizer.backend.id_to_token(self.config.placeholder)
        )

    def written(self, text: str, pictures: Sequence[Measured] | None) -> str:
        """A prompt's text with what a family writes for each of its pictures, and a placeholder for each
        mark. pictures: None where nothing was chosen for any; then their sizes do not matter."""
        marker = self._marker
        if marker is None:
            return text
        if self.mark is not None:
            text = text.replace(self.mark, marker)
        before, *after = text.split(marker)
        if pictures is None:
            how: list[tuple[int, int, Options]] = [(1, 1, {})] * len(after)
        else:
            how = [(picture.width, picture.height, picture.options) for picture in pictures]
        if len(after) != len(how):
            return text  # refused when it is expanded
        written = [self._expansion.written(marker, *one) for one in how]
        return before + "".join(map(operator.add, written, after))

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[ImageItem]]:
        """The prompt with a span in the place of every placeholder. Raises RequestError as ``lay_out``."""
        expanded, laid = self.lay_out(token_ids, pictures)
        items = [
            ImageItem(
                digest=picture.digest,
                offset=one.offset,
                length=one.length,
                runs=one.runs,
                unit_embeds=one.span.unit_embeds,
                unit_shape=one.span.unit_shape,
                num_units=one.span.num_units,
                grid=one.span.grid,
                sees_itself=self._expansion.sees_itself,
                lines=one.span.lines,
            )
            for picture, one in zip(pictures, laid)
        ]
        return expanded, items

    def lay_out(
        self, token_ids: Sequence[int], pictures: Sequence[Measured]
    ) -> tuple[list[int], list[LaidOut]]:
        """The prompt with a span in the place of every placeholder, and where each lies.
        Raises RequestError if there are more or fewer of them than pictures, or if one is too large.

        A model with a joined eye reads texts as it does without: then a placeholder is a token like others.
        """
        if self.mark is not None and not pictures:
            return list(token_ids), []
        spans = [
            self._expansion.expand(picture.width, picture.height, picture.options, self._encode)
            for picture in pictures
        ]
        # The text of a prompt may have several placeholders for an image; other prompts have one.
        count = token_ids.count(self.config.placeholder)
        in_pieces = count > len(pictures) and count == sum(max(1, len(span.pieces)) for span in spans)
        if count != len(pictures) and not in_pieces:
            raise RequestError(
                f"The prompt has {count} placeholders for images (token {self.config.placeholder}, "
                f"{self._marker!r}), but {len(pictures)} images came with it: there must be one for each."
            )
        expanded: list[int] = []
        laid: list[LaidOut] = []
        waiting = iter(zip(pictures, spans, strict=True))
        pieces: list[tuple[int, int]] = []
        for token in token_ids:
            if token != self.config.placeholder:
                expanded.append(token)
                continue
            if not pieces:
                picture, span = next(waiting)
                _check_size(picture, span, self.config.most_embeds)
                pieces = list(span.pieces) if in_pieces and span.pieces else [(0, len(span.token_ids))]
                offset, runs = len(expanded), list[tuple[int, int]]()
            first, length = pieces.pop(0)
            place = len(expanded) - offset - first
            runs += [(place + run, count) for run, count in span.runs if first <= run < first + length]
            expanded += span.token_ids[first : first + length]
            if not pieces:
                laid.append(LaidOut(offset, len(expanded) - offset, runs, span))
        return expanded, laid

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("Images of this model need a tokenizer for the markers between their parts.")
        return self._tokenizer.encode(text, add_special_tokens=False)

    def pixels(self, digest: bytes) -> PixelTensors:
        """The answer to a question of the engine core."""
        with self._lock:
            picture = self._kept.get(digest)
        if picture is None:
            return PixelTensors(digest, error="Its image is no longer there: the request has ended.")
        try:
            values = self._process(picture)
        except Exception as error:  # of a library, about an image that was decoded before
            logger.exception("An image could not be resized.")
            return PixelTensors(digest, error=f"An image cannot be resized: {type(error).__name__}: {error}.")
        return PixelTensors(digest, tuple(values.shape), values.tobytes())

    def _process(self, picture: Picture) -> Any:
        """uint8 [units, channels, height, width]."""
        import numpy as np

        with self._lock:  # the processor is imported and read once
            processor = self._processor
        unscaled = {"do_rescale": False, "do_normalize": False}
        unscaled |= {**self._expansion.resizing, **picture.options}
        with self._room.taken(picture.width * picture.height):
            found = processor(picture.pixels(), return_tensors="np", **unscaled)
        values = np.asarray(found["pixel_values"])
        if "image_position_ids" in found:
            values = _put_in_place(values[0], found["image_position_ids"][0], processor.patch_size)
        elif values.ndim == 2:
            values = _put_together(values, found["image_grid_thw"][0], processor)
        return np.ascontiguousarray(values.reshape(-1, *values.shape[-3:]).astype(np.uint8))

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._path, backend="pil")


def _check_size(picture: Measured, span: Span, most_embeds: int) -> None:
    num_embeds = span.num_units * span.unit_embeds
    if num_embeds > most_embeds:
        raise RequestError(
            f"An image of {picture.width} × {picture.height} pixels has {num_embeds} embeddings, but the "
            f"engine holds at most {most_embeds}: make it smaller."
        )


def _check_placeholder(token: Any, placeholder: int, tokenizer: Tokenizer) -> None:
    """token: what the eye says that its placeholder is called, None if it does not say."""
    found = tokenizer.backend.id_to_token(placeholder)
    if token is not None and found != token:
        raise ModelError(
            f"The eye's placeholder is token {placeholder}, {token!r}, but this model's tokenizer has "
            f"{found!r} there: the eye was trained for another model."
        )


def _put_together(patches: Any, grid: Any, processor: Any) -> Any:
    """[channels, height, width] of what Qwen's processors cut an image into: [patches, channels, moments,
    height, width of a patch], square by square, with each patch repeated for every moment."""
    size, square = processor.patch_size, processor.merge_size
    rows, columns = int(grid[1]) // square, int(grid[2]) // square
    cut = patches.reshape(rows, columns, square, square, 3, processor.temporal_patch_size, size, size)
    image = cut[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6)
    return image.reshape(3, rows * square * size, columns * square * size)


def _put_in_place(patches: Any, places: Any, size: int) -> Any:
    """[channels, height, width] of what Gemma 4's processor cuts an image into: [patches, height, width and
    channels of a patch], line by line, with padding at the end. places: column and row of each patch."""
    columns, rows = (int(last) + 1 for last in places.max(0))
    cut = patches[: rows * columns].reshape(rows, columns, size, size, 3)
    return cut.transpose(4, 0, 2, 1, 3).reshape(3, rows * size, columns * size)
