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


class PixelAnswers:
    """The answers of a frontend. Its threads are shared by all clients that it is given to."""

    def __init__(self, source: PixelSource) -> None:
        self.source = source
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="images")

    def each(self, digests: Iterable[bytes]) -> Iterator[PixelTensors]:
        """Of each image, in their order, made here."""
        return map(self.source, digests)

    async def from_threads(self, digests: Sequence[bytes]) -> AsyncIterator[PixelTensors]:
        """Of each image as soon as it is made, beside the event loop."""
        loop = asyncio.get_running_loop()
        for done in asyncio.as_completed(
            [loop.run_in_executor(self._pool, self.source, one) for one in digests]
        ):
            yield await done


NO_PIXELS = PixelAnswers(lambda digest: PixelTensors(digest, error="This frontend has no images."))
