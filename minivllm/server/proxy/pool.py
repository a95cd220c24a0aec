"""Servers of one kind, and which of them gets a request."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

REST_SECONDS = 5.0
"""A server that failed gets nothing for so long, as long as the request can do without it."""
SLACK = 2
"""Requests that a server may have more than the least busy one,
for the sake of a prefix that it may have cached."""


class Backend:
    """url: without a path. load: requests that it works on for this proxy.
    has_failed: lately, and it has not answered since."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.load = 0
        self.has_failed = False
        self._rests_until = 0.0

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def rest(self, seconds: float = REST_SECONDS) -> None:
        """It has failed."""
        self.has_failed = True
        self._rests_until = time.monotonic() + seconds

    def works(self) -> None:
        """It has answered."""
        self.has_failed = False
        self._rests_until = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """For as long as it works on a request."""
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1


class Pool:
    """Prompts that begin alike go to the same server, unless it is busier than another one.

    The server is the one whose hash with the prefix is the largest (rendezvous hashing), so that one server
    more or less moves only its own share.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.backends = [Backend(url) for url in urls]

    def pick(self, prefix: bytes, tried: Sequence[Backend] = (), *, may_rest: bool = True) -> Backend | None:
        """A server that was not tried; None if there is none.

        may_rest: take one that is resting if all others are as well.
        """
        left = [one for one in self.backends if one not in tried]
        awake = [one for one in left if not one.is_resting]
        left = awake or (left if may_rest else [])
        if not left:
            return None
        least = min(one.load for one in left)
        near = [one for one in left if one.load <= least + SLACK]
        return max(near, key=lambda one: hashlib.sha256(one.url.encode() + b"\0" + prefix).digest())
