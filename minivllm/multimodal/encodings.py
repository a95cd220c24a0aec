"""Which images are encoded, which will be in this step, and which pixels are missing: the scheduler's view.

Embeddings are a reference for the KV cache, not a part of it. They are kept from the first unit to the last
chunk that reads them, and after that as long as nothing else needs their room: the oldest go first. Planned
is as good as done, since workers run steps in order.

    text [image 1: unit unit unit] text [image 2: unit unit] text
    computed up to here ^     ^ the chunk ends here: the third unit is not encoded yet
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from minivllm.config import ImagesConfig
from minivllm.messages import ImageItem, UnitsToEncode
from minivllm.multimodal.items import PixelTensors, place_of, units_before
from minivllm.request import Request

ANSWER_SECONDS = 30.0
"""That the frontend may take for the pixels of an image, from the last answer to an earlier question on."""


@dataclass(slots=True)
class _Encoding:
    """An image that has room in the workers' cache."""

    item: ImageItem
    num_embeds: int
    """That have room. Those of an image that becomes lines take another one when all are encoded."""
    first_unit: int
    """Units before it are not encoded: the prefix cache had their tokens."""
    num_units: int
    """The number after the last planned one."""
    users: set[tuple[str, int]] = field(default_factory=set)
    """(request id, number of the image in its prompt) of running requests that are yet to read it."""


class Encodings:
    """One for each scheduler. The cache is counted in embeddings, of which all have the same size."""

    def __init__(self, config: ImagesConfig) -> None:
        self.ask: Callable[[list[bytes]], None] = lambda digests: None
        """Asks the frontend for the pixels of these images; ``take_pixels`` gets the answers."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds."""
        self._config = config
        self._capacity = config.encoder_cache_bytes // config.bytes_per_embed
        self._most_bytes = config.pixel_bytes
        self._cache: OrderedDict[bytes, _Encoding] = OrderedDict()
        self._num_embeds = 0
        self._readers: dict[str, Request] = {}
        self._budget = config.max_num_batched_embeds
        self._planned: list[UnitsToEncode] = []
        self._forgotten: list[bytes] = []
        self._pixels: dict[bytes, PixelTensors] = {}
        self._asked: dict[bytes, ImageItem] = {}
        self._waits_since: dict[bytes, float] = {}
        """When each question was asked, or an earlier one answered if that was later; the oldest first."""
        self._abandoned: set[bytes] = set()
        self._wanted: dict[bytes, ImageItem] = {}
        self._urgent: set[bytes] = set()
        self._first_missing: dict[str, bytes] = {}
        self.num_encoded_units = 0
        """Since the start."""
        self.num_questions = 0
        """Images whose pixels were asked for, since the start."""

    # -- pixels ------------------------------------------------------------------------------------

    def want(self, request: Request, num_cached: int) -> None:
        """Ask for the pixels that a request lacks. num_cached: tokens of it that the prefix cache has."""
        for item in request.images:
            if item.end > num_cached and not self._is_encoded(item, units_before(item, num_cached)):
                self._want(item)
                self._first_missing.setdefault(request.request_id, item.digest)
        self._ask_now()

    def _is_encoded(self, item: ImageItem, first: int) -> bool:
        """Whether all units from number ``first`` on are."""
        entry = self._cache.get(item.digest)
        return entry is not None and entry.first_unit <= first and entry.num_units == item.num_units

    def _want(self, item: ImageItem, is_urgent: bool = False) -> None:
        self._abandoned.discard(item.digest)
        if item.digest not in self._pixels and item.digest not in self._asked:
            self._wanted.setdefault(item.digest, item)
            if is_urgent:
                self._urgent.add(item.digest)

    def _ask_now(self) -> None:
        """Ask for what is missing, in that order: for as much as may be held, and always for one if none is.

        Images that a running request lacks are asked for at once:
        others may hold all the room until it has ended.
        """
        if not self._wanted:
            return
        num_bytes = sum(len(pixels.data) for pixels in self._pixels.values())
        num_bytes += sum(item.num_units * item.unit_bytes for item in self._asked.values())
        questions, is_full = [], False
        for digest, item in self._wanted.items():
            size = item.num_units * item.unit_bytes
            is_full = is_full or (num_bytes > 0 and num_bytes + size > self._most_bytes)
            if not is_full or digest in self._urgent:
                num_bytes += size
                questions.append(digest)
        now = self.clock()
        for digest in questions:
            self._asked[digest] = self._wanted.pop(digest)
            self._waits_since[digest] = now
        self._urgent.clear()
        self.num_questions += len(questions)
        if questions:
            self.ask(questions)

    def take_pixels(self, pixels: PixelTensors) -> str | None:
        """An answer. Unasked pixels are dropped. Returns why the image cannot be had, if it cannot."""
        item = self._asked.pop(pixels.digest, None)
        if item is not None:
            self._let_later_ones_wait(pixels.digest)
        is_wanted = item is not None and pixels.digest not in self._abandoned
        self._abandoned.discard(pixels.digest)
        error = None
        if item is not None and is_wanted:
            expected = (item.num_units, *item.unit_shape)
            if pixels.error is not None:
                error = pixels.error
            elif pixels.shape != expected or len(pixels.data) != item.num_units * item.unit_bytes:
                error = f"The pixels of an image came as {list(pixels.shape)}, but must be {list(expected)}."
            else:
                self._pixels[pixels.digest] = pixels
        self._ask_now()
        return error

    def _let_later_ones_wait(self, answered: bytes) -> None:
        """The frontend answers in the order of the questions: those after this one had to wait for it, and
        have the whole time again."""
        is_later, now = False, self.clock()
        for digest in self._waits_since:
            is_later = is_later or digest == answered
            if is_later:
                self._waits_since[digest] = now
        del self._waits_since[answered]

    @property
    def seconds_left(self) -> float | None:
        """Until ``take_unanswered`` may return a question; None if there are no open questions."""
        since = next(iter(self._waits_since.values()), None)
        return None if since is None else max(0.0, since + ANSWER_SECONDS - self.clock())

    def take_unanswered(self) -> list[bytes]:
        """Images whose pixels did not come within ANSWER_SECONDS. Their questions are withdrawn: answers that
        still come are dropped."""
        latest = self.clock() - ANSWER_SECONDS
        digests = [digest for digest, _ in takewhile(lambda one: one[1] <= latest, self._waits_since.items())]
        for digest in digests:
            del self._asked[digest]
            del self._waits_since[digest]
            self._abandoned.discard(digest)
        if digests:
            self._ask_now()
        return digests

    @property
    def is_missing(self) -> bool:
        """Whether pixels that a request waits for are asked for, or are yet to be."""
        return bool(self._asked or self._wanted)

    def begin_step(self) -> None:
        """See AdmissionPolicy."""

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether the pixels of the first image that a waiting request needs are there; see AdmissionPolicy.
        It need not wait for those of later images: they may have no room before the first one is encoded."""
        digest = self._first_missing.get(request.request_id)
        return digest is None or (digest not in self._asked and digest not in self._wanted)

    # -- a step ------------------------------------------------------------------------------------

    def cut_chunk(self, request: Request, start: int, count: int) -> int:
        """How many of the ``count`` tokens from ``start`` a step can compute, with what it encodes before;
        0 for none.

        Plans the units that these tokens need, and makes the request a user of their images.
        """
        self._readers[request.request_id] = request
        for number, item in enumerate(request.images):
            if item.end <= start:
                continue
            count = item.whole_runs(start + count) - start
            if count <= 0:
                return 0
            if place_of(item, 0) >= start + count:
                break
            reader = (request.request_id, number)
            num_encoded = self._encode(item, reader, start, start + count)
            limit = place_of(item, num_encoded)
            if num_encoded < item.num_embeds and limit < start + count:
                return max(0, limit - start)
        return count

    def _encode(self, item: ImageItem, reader: tuple[str, int], start: int, end: int) -> int:
        """Plan the units that positions ``start`` to ``end`` read, as many as the step may encode; embeddings
        that there will be, counted from the image's first one, which need not be among them."""
        entry, needed = self._cache.get(item.digest), units_before(item, start)
        if not self._is_encoded(item, needed):
            if item.digest not in self._pixels:
                self._want(item, is_urgent=True)
            elif entry is None and self._make_room(size := max(item.num_embeds, item.num_kept)):
                entry = self._cache[item.digest] = _Encoding(item, size, needed, needed)
                self._num_embeds += size
            elif entry is not None and entry.first_unit > needed:
                entry.first_unit = entry.num_units = needed  # once more, with those before
        if entry is None:
            return 0
        self._cache.move_to_end(item.digest)
        entry.users.add(reader)
        if entry.first_unit > needed:
            return 0
        first, size = entry.num_units, item.unit_embeds
        while (
            item.digest in self._pixels
            and entry.num_units < item.num_units
            and self._budget >= size
            and place_of(item, entry.num_units * size) < end
        ):
            entry.num_units += 1
            self._budget -= size
        if entry.num_units > first:
            self._plan(entry, first)
        return entry.num_units * size

    def _plan(self, entry: _Encoding, first: int) -> None:
        item, last = entry.item, entry.num_units
        pixels, size, is_whole = self._pixels[item.digest], item.unit_bytes, last == item.num_units
        self._planned.append(
            UnitsToEncode(
                digest=item.digest,
                first=first,
                num_embeds=entry.num_embeds,
                shape=(last - first, *pixels.shape[1:]),
                pixels=bytes(memoryview(pixels.data)[first * size : last * size]),
                lines=item.lines if is_whole else None,
            )
        )
        self.num_encoded_units += last - first
        if is_whole:
            del self._pixels[item.digest]
            self._num_embeds += item.num_kept - entry.num_embeds
            entry.num_embeds = item.num_kept

    def _make_room(self, num_embeds: int) -> bool:
        """Forget images without users, the oldest first, until there is room for so many embeddings."""
        unused = [(digest, entry) for digest, entry in self._cache.items() if not entry.users]
        if self._num_embeds - sum(entry.num_embeds for _, entry in unused) + num_embeds > self._capacity:
            return False
        for digest, _ in unused:
            if self._num_embeds + num_embeds <= self._capacity:
                break
            self._forget(digest)
        return True

    def _forget(self, digest: bytes) -> None:
        self._num_embeds -= self._cache.pop(digest).num_embeds
        self._forgotten.append(digest)
        # An image can be forgotten in the step that was to encode it: a preempted request has left it.
        self._planned = [units for units in self._planned if units.digest != digest]

    def release(self, request: Request) -> None:
        """A request has left, or is preempted, or could not be admitted."""
        self._readers.pop(request.request_id, None)
        for number, item in enumerate(request.images):
            entry = self._cache.get(item.digest)
            if entry is not None:
                entry.users.discard((request.request_id, number))

    def finish(self, request: Request, others: Iterable[Request]) -> None:
        """A request has ended: pixels that none of the others needs are dropped, and no longer asked for."""
        self.release(request)
        self._first_missing.pop(request.request_id, None)
        needed = {item.digest for other in others for item in other.images}
        for digest in {item.digest for item in request.images} - needed:
            self._wanted.pop(digest, None)
            self._pixels.pop(digest, None)
            if digest in self._asked:
                self._abandoned.add(digest)
        self._ask_now()

    def take_step(self, num_scheduled_tokens: Mapping[str, int]) -> tuple[list[bytes], list[UnitsToEncode]]:
        """What the step that is sent forgets and then encodes.

        num_scheduled_tokens: of its requests, which are no longer users of images that they pass with these.
        """
        for request_id, request in list(self._readers.items()):
            num_computed = request.num_computed_tokens + num_scheduled_tokens.get(request_id, 0)
            for number, item in enumerate(request.images):
                if item.end <= num_computed and item.digest in self._cache:
                    self._cache[item.digest].users.discard((request_id, number))
            if request.images[-1].end <= num_computed:
                del self._readers[request_id]
        step = self._forgotten, self._planned
        self._forgotten = []
        self._planned = []
        self._budget = self._config.max_num_batched_embeds
        self._ask_now()
        return step

    def clear(self) -> None:
        """Forget all embeddings: the encoder has other weights, or no memory.
        No request may be unfinished."""
        for digest in list(self._cache):
            self._forget(digest)

    # -- a look inside -----------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Of all embeddings that have room."""
        return self._num_embeds * self._config.bytes_per_embed

    @property
    def num_held_pixels(self) -> int:
        """Images whose pixels are held, or under way."""
        return len(self._pixels) + len(self._asked)

    def check_integrity(self, running: set[str]) -> None:
        """Raises RuntimeError if counts contradict one another between two steps.
        running: ids of the requests."""
        users = {request_id for entry in self._cache.values() for request_id, _ in entry.users}
        if not users <= running:
            raise RuntimeError(f"Requests use encoded images, but do not run: {sorted(users - running)}.")
        held = sum(entry.num_embeds for entry in self._cache.values())
        if not held == self._num_embeds <= self._capacity:
            raise RuntimeError(
                f"The cache of encoded images holds {held} embeddings, but counts {self._num_embeds}, and "
                "has room for "
                f"{self._capacity}."
            )
