"""From the size of an image to the tokens that stand for it:
what the processors of transformers write, as data.

A prompt has one placeholder for each image. Its span takes that place: placeholders, one for each embedding,
and the markers of the family between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from minivllm.errors import ModelError
from minivllm.messages import FeatureLines

Options = Mapping[str, bool]
"""What a caller may choose for an image; see ``Expansion.options``."""

Encode = Callable[[str], list[int]]
"""Token ids of a text in which special tokens count."""


class Span(NamedTuple):
    """token_ids: of the span. pieces: (first, count) of what takes the place of each placeholder, where the
    text of a prompt has several; see ``Expansion.written``. All others: see ImageItem."""

    token_ids: list[int]
    runs: list[tuple[int, int]]
    num_units: int
    unit_embeds: int
    unit_shape: tuple[int, int, int]
    grid: tuple[int, int] = (0, 0)
    lines: FeatureLines | None = None
    pieces: tuple[tuple[int, int], ...] = ()


class Expansion(Protocol):
    """What a family makes of an image."""

    @property
    def placeholder(self) -> int:
        """The token that stands for an image in a prompt."""

    @property
    def unit_embeds(self) -> int:
        """Embeddings of the largest unit."""

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Pixels of the largest unit, channels first."""

    @property
    def least_unit_shape(self) -> tuple[int, int, int]:
        """Pixels of the smallest unit."""

    @property
    def most_embeds(self) -> int:
        """Embeddings of the largest image."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the choices that a caller has. The first one: whether an image is cut into tiles."""

    @property
    def resizing(self) -> Mapping[str, Any]:
        """What the image processor is told besides them."""

    @property
    def sees_itself(self) -> bool:
        """Whether all placeholders of a run see each other."""

    def written(self, marker: str, width: int, height: int, options: Options) -> str:
        """What a prompt's text has in the place of a placeholder, ``marker``, so that the tokenizer reads it
        with its neighbours: text of the family's, with one placeholder or several for an image of this size
        [pixels]."""

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """The span of an image of this size [pixels].
        Raises RequestError for one that cannot be resized."""


class Plain:
    """What most families have: no choices, nothing written around an image, which is causal."""

    options: tuple[str, ...] = ()
    sees_itself = False
    resizing: Mapping[str, Any] = {}

    def written(self, marker: str, width: int, height: int, options: Options) -> str:
        """See Expansion."""
        return marker


def image_token(config: Mapping[str, Any]) -> int:
    """The token for an embedding, by the entries of config.json. Raises KeyError."""
    found = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(found, int):
        raise KeyError("image_token_id")
    return found


def markers(encode: Encode, first: str, second: str) -> tuple[int, int]:
    """Two special tokens. Raises ModelError if the tokenizer has no such ones."""
    found = encode(first), encode(second)
    if [len(ids) for ids in found] != [1, 1]:
        raise ModelError(f"The tokenizer lacks {first} or {second}, the markers of images.")
    return found[0][0], found[1][0]
