"""The synchronous client of an engine process: what ``LLM(..., multiprocess=True)`` uses."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import zmq

from minivllm.engine import wire
from minivllm.engine_process.connection import EngineConnection
from minivllm.messages import EngineOutput, EngineRequest, SchedulerStats

TICK_SECONDS = 1.0
"""How often a waiting client asks for a sign of life."""


class ProcessClient:
    """Like InProcessClient, for a core that steps by itself. Every method raises EngineDeadError once it is dead."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        ready = connection.ready
        self.config, self.num_blocks = ready.config, ready.num_blocks
        self.model_vocab_size, self.eos_token_ids = ready.model_vocab_size, ready.eos_token_ids
        self._unfinished: set[str] = set()
        self._buffered: deque[list[EngineOutput]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(connection.pull, zmq.POLLIN)
        self._poller.register(connection.life_fd, zmq.POLLIN)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._connection.process.pid

    def add_request(self, request: EngineRequest) -> None:
        self._connection.add_request(request)
        self._unfinished.add(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        self._unfinished.difference_update(request_ids)
        self._connection.abort(request_ids)

    def get_outputs(self) -> list[EngineOutput]:
        """Wait for the next step's outputs; an empty list if no request is unfinished."""
        while self._unfinished and not self._buffered:
            self._receive()
        outputs = self._buffered.popleft() if self._buffered else []
        self._unfinished.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def stats(self) -> SchedulerStats:
        return msgspec.convert(self.call("stats"), SchedulerStats)

    def reset_prefix_cache(self) -> bool:
        return bool(self.call("reset_prefix_cache"))

    def call(self, method: str, *args: Any) -> Any:
        """Call one of Administration's methods. Raises RequestError if it refuses."""
        call_id = self._connection.call(method, args)
        while True:
            result = self._receive()
            if result is not None and result.call_id == call_id:
                if result.error is not None:
                    raise result.error.exception()
                return result.value

    def close(self) -> None:
        self._connection.close()

    def _receive(self) -> wire.Result | None:
        """Wait for one message. Outputs are buffered, a Result is returned."""
        connection = self._connection
        if connection.dead_error is not None:
            raise connection.dead_error
        num_silent_ticks = 0
        while not (events := dict(self._poller.poll(round(TICK_SECONDS * 1000)))):
            # Through the busy loop and back: a core that hangs in a step does not answer.
            if num_silent_ticks == 0:
                connection.call("heartbeat", ())
            num_silent_ticks += 1
            if num_silent_ticks * TICK_SECONDS >= connection.args.heartbeat_timeout:
                raise connection.hung()
        if connection.pull not in events:
            raise connection.death()
        message = connection.decode(connection.pull.recv())
        if isinstance(message, wire.Died):
            raise connection.died(message)
        if isinstance(message, wire.Outputs):
            self._buffered.append(message.outputs)
        return message if isinstance(message, wire.Result) else None
