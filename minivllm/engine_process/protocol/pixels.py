"""Pixels of images, which an engine core asks of its frontend when it lacks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from minivllm.multimodal.items import PixelTensors

PixelSource = Callable[[bytes], PixelTensors]
"""The pixels of an image by its digest, or why there are none; from any thread."""
NUM_THREADS = 2
"""That decode and resize images at the same time."""


class WantPixels(msgspec.Struct, frozen=True, tag="want pixels"):
    """Engine -> frontend: it lacks the pixels of these images. A PixelTensors for each of them answers."""

    digests: list[bytes]


class AnswersQuestions:
    """What clients have in common whose engine sees."""

    _source: PixelSource | None = None
    _pool: ThreadPoolExecutor | None = None

    def serve_pixels(self, source: PixelSource) -> None:
        """Answer with this from now on."""
        self._source = source
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="images")

    def answers(self, digests: Iterable[bytes]) -> Iterator[PixelTensors]:
        """Of each image, in their order, made here."""
        for digest in digests:
            yield self._answer(digest)

    async def answers_from_threads(self, digests: Sequence[bytes]) -> AsyncIterator[PixelTensors]:
        """Of each image as soon as it is made, beside the event loop."""
        loop = asyncio.get_running_loop()
        for done in asyncio.as_completed(
            [loop.run_in_executor(self._pool, self._answer, one) for one in digests]
        ):
            yield await done

    def _answer(self, digest: bytes) -> PixelTensors:
        if self._source is None:
            return PixelTensors(digest, error="This frontend has no images.")
        return self._source(digest)
