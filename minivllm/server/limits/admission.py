"""Admission: a bounded queue, counted in completions and in prompt tokens,
that refuses at once when it is full."""

from __future__ import annotations

import math
import time
from collections import deque

from minivllm.server.bodies.errors import ApiError, shutting_down

RATE_WINDOW = 10.0
"""Seconds over which finished requests are counted to guess when a place is free."""
MAX_RETRY_AFTER = 30


class Ticket:
    """One admitted HTTP request. Leaving it as a context gives its places back.

    request_ids: what runs in the engine under this ticket.
    """

    def __init__(self, admission: Admission, num_completions: int) -> None:
        self._admission = admission
        self.num_completions = num_completions
        self.num_queued_prompt_tokens = 0
        self.request_ids: list[str] = []

    def add_prompt_tokens(self, num_tokens: int) -> None:
        """Count the prompts, now that their lengths are known. Raises ApiError 429 if the queue is full."""
        admission = self._admission
        if not admission.has_room(num_tokens):
            waiting, limit = admission.num_queued_prompt_tokens, admission.max_queued_prompt_tokens
            raise admission.full(f"prompts of {waiting} tokens are waiting, the limit is {limit}")
        self.remove_prompt_tokens(-num_tokens)

    def remove_prompt_tokens(self, num_tokens: int) -> None:
        """One of several prompts no longer waits."""
        self._admission.num_queued_prompt_tokens -= num_tokens
        self.num_queued_prompt_tokens -= num_tokens

    def started(self) -> None:
        """The first token is there: the prompts no longer wait."""
        self.remove_prompt_tokens(self.num_queued_prompt_tokens)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._admission.leave(self)


class Admission:
    """Counts on the server's event loop; no lock, no waiting.

    max_running: completions that the engine runs at a time. max_queued: completions that may wait besides.
    max_queued_prompt_tokens: prompt tokens without a first token;
    a prompt longer than that gets in when it is alone.
    """

    def __init__(self, max_running: int, max_queued: int, max_queued_prompt_tokens: int) -> None:
        self.capacity = max_running + max_queued
        self._max_running = max_running
        self.max_queued_prompt_tokens = max_queued_prompt_tokens
        self.tickets: set[Ticket] = set()
        self.num_completions = 0
        self.num_queued_prompt_tokens = 0
        self.is_draining = False
        self._finish_times: deque[float] = deque(maxlen=1024)

    def enter(self, num_completions: int) -> Ticket:
        """Take places for one HTTP request (n × its prompts).

        Raises ApiError: 400 for more than there could ever be, 429 when the queue is full,
        503 while shutting down.
        """
        if self.is_draining:
            raise shutting_down()
        if num_completions > self.capacity:
            raise ApiError(
                400,
                f"The request asks for {num_completions} completions (n times the number of prompts), but "
                "this server "
                f"takes at most {self.capacity} at a time: send them in several requests.",
                param="n",
                code="too_many_completions",
            )
        if self.num_completions + num_completions > self.capacity:
            raise self.full(f"{self.num_completions} of {self.capacity} completions are running or waiting")
        ticket = Ticket(self, num_completions)
        self.tickets.add(ticket)
        self.num_completions += num_completions
        return ticket

    def has_room(self, num_tokens: int) -> bool:
        """True if a prompt of so many tokens may wait now."""
        waiting = self.num_queued_prompt_tokens
        return waiting == 0 or waiting + num_tokens <= self.max_queued_prompt_tokens

    def leave(self, ticket: Ticket) -> None:
        if ticket in self.tickets:
            self.tickets.remove(ticket)
            ticket.started()
            self.num_completions -= ticket.num_completions
            self._finish_times.append(time.monotonic())

    def retry_after(self) -> int:
        """Seconds until a place should be free, by how fast requests finished lately; 1 if none did."""
        now = time.monotonic()
        recent = sum(1 for finished in self._finish_times if now - finished < RATE_WINDOW)
        waiting = max(0, self.num_completions - self._max_running)
        if recent == 0:
            return 1
        return min(MAX_RETRY_AFTER, max(1, math.ceil(waiting * RATE_WINDOW / recent)))

    def full(self, why: str) -> ApiError:
        """429, with the time after which there should be a place."""
        seconds = self.retry_after()
        return ApiError(
            429,
            f"The server is full: {why}. Try again in {seconds} s.",
            type="rate_limit_error",
            code="queue_full",
            headers={"retry-after": str(seconds)},
        )
