"""The engine core in a process of its own: input thread -> queue -> busy loop -> queue -> output thread.

The sockets are read and written, and messages decoded and encoded, by threads that run while the model
computes; the busy loop itself only takes finished ``Request``s from a queue. (vLLM V1's EngineCoreProc.)

Started by ``minivllm.engine_process.connection``; ``main`` is what runs in the child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import shutil
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import zmq

from minivllm.device.freed_memory import return_freed_memory
from minivllm.engine.administration import Administration
from minivllm.engine.background_builds import POLL_SECONDS
from minivllm.engine.core import EngineCore
from minivllm.engine_process.protocol import frames
from minivllm.engine_process.protocol.pixels import WantPixels
from minivllm.errors import MinivllmError, RequestError
from minivllm.executor.records.child_reports import FRONTEND_SIGNALS, LogSender, printable
from minivllm.messages import EngineOutput, EngineRequest, FinishReason
from minivllm.multimodal.items import PixelTensors
from minivllm.request import Request

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""Without work, until the memory that the work took goes back."""
FLUSH_MILLISECONDS = 2000
"""How long the last messages may take to leave a process that ends."""

InputItem = Request | frames.Abort | frames.Call | MinivllmError | None
"""None: stop. An error: a worker died."""


class EngineProcess:
    """Serves one frontend until it goes."""

    def __init__(self, start: frames.Start) -> None:
        self._start = start
        self._inputs: SimpleQueue[InputItem] = SimpleQueue()
        self._outputs: SimpleQueue[frames.ToFrontend | None] = SimpleQueue()
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, start.identity)
        self._push = self._context.socket(zmq.PUSH)
        for socket, name in ((self._dealer, frames.REQUESTS_SOCKET), (self._push, frames.OUTPUTS_SOCKET)):
            # Requests are bounded by the frontend's admission, outputs by the requests:
            # nothing may be dropped here.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(f"ipc://{start.directory}/{name}")
        self._core: EngineCore | None = None
        self._paused = self._has_worked = False
        self._status = 0

    def frontend_has_gone(self) -> None:
        """End after the running step. From any thread."""
        self._inputs.put(None)

    def run(self) -> int:
        """Load, serve, end; the exit status: 0 if the frontend has gone, 1 if the engine died and said so."""
        output_thread = threading.Thread(target=self._send_outputs, name="outputs", daemon=True)
        output_thread.start()
        input_thread = threading.Thread(target=self._receive, name="inputs", daemon=True)
        with _log_to(self._outputs, self._start.log_level):
            try:
                self._load()
                input_thread.start()
                self._run_busy_loop(self.core)
                self.core.settle(for_good=True)
                self.core.shutdown()
            except BaseException as error:
                if not isinstance(error, MinivllmError):
                    logger.error("The engine core died of %s.", type(error).__name__)
                self._outputs.put(frames.Died(frames.ErrorInfo.of(error)))
                self._status = 1
        self._outputs.put(None)
        output_thread.join()
        if not input_thread.is_alive():
            self._dealer.close(linger=0)
        self._context.term()  # the input thread closes its socket when it learns of this
        return self._status

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("The engine core is not loaded yet.")
        return self._core

    def _load(self) -> None:
        from minivllm.engine_process.client import load_core

        self._core, facts = load_core(self._start.args, self._start.seat, self._start.number)
        self._core.executor.when_dead(self._inputs.put)
        # A message that aborts no request wakes the loop, which checks in every step what other threads did.
        self._core.ask_for_pixels(lambda digests: self._outputs.put(WantPixels(digests)))
        self._core.listen(lambda: self._inputs.put(frames.Abort([])))
        # What exists now lives as long as the process.
        # Collections that the loop triggers should not walk through it.
        gc.collect()
        gc.freeze()
        ready = frames.Ready(
            config=self._core.config,
            model_vocab_size=facts.vocab_size,
            eos_token_ids=tuple(facts.eos_token_ids),
            kv_groups=list(self._core.executor.kv_groups),
        )
        self._dealer.send(frames.Codec().encode(ready))

    # -- busy loop ---------------------------------------------------------------------------------

    def _run_busy_loop(self, core: EngineCore) -> None:
        """Until the frontend has gone: take in what came, then run a step.
        Waits only while there is nothing to do."""
        while self._take_in(core):
            if not self._paused or core.is_behind:
                outputs = core.step(may_schedule=not self._paused)
                if outputs:
                    self._outputs.put(frames.Outputs(outputs))

    def _take_in(self, core: EngineCore) -> bool:
        """Empty the input queue; False if it is time to stop."""
        block = not (core.is_behind if self._paused else core.has_work())
        while True:
            timeout = IDLE_SECONDS if self._has_worked else None
            if core.is_building:
                timeout = POLL_SECONDS
            seconds_left = core.pixel_seconds_left if block else None
            if seconds_left is not None:
                timeout = seconds_left if timeout is None else min(timeout, seconds_left)
            try:
                item = self._inputs.get(block=block, timeout=timeout)
            except Empty:
                if not block:
                    return True
                if core.pixel_seconds_left == 0:
                    core.end_unanswered()
                    return True
                if core.is_building:
                    core.poll_builds()
                    continue
                self._has_worked = False
                return_freed_memory()
                continue
            if item is None:
                return False
            if isinstance(item, MinivllmError):
                raise item
            self._handle(core, item)
            block = False

    def _handle(self, core: EngineCore, item: Request | frames.Abort | frames.Call | PixelTensors) -> None:
        self._has_worked = True
        if isinstance(item, Request):
            try:
                core.admit_request(item)
            except RequestError as error:
                self._refuse(item.request_id, str(error))
        elif isinstance(item, frames.Abort):
            core.abort_requests(item.request_ids)
        elif isinstance(item, PixelTensors):
            core.take_pixels(item)
        else:
            try:
                result = frames.Result(item.call_id, self._call(core, item))
            except MinivllmError as error:
                result = frames.Result(item.call_id, error=frames.ErrorInfo.of(error))
            self._outputs.put(result)

    def _call(self, core: EngineCore, call: frames.Call) -> object:
        if call.method == "heartbeat":
            return None  # that it went through the loop is the answer
        if call.method in ("pause", "resume"):
            self._paused = call.method == "pause"
            return None
        return Administration(core).call(call.method, call.args)

    # -- threads -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Input thread: frames become requests, tokens and block hashes and all,
        before the loop sees them."""
        codec = frames.Codec()
        while True:
            try:
                frame = self._dealer.recv()
            except zmq.ContextTerminated:
                self._dealer.close(linger=0)
                return
            try:
                message = codec.decode(frame, frames.ToEngine)
            except frames.MalformedFrame as error:
                logger.warning("A malformed frame was refused: %s", error)
                request_id = codec.request_id_of(frame)
                if request_id is not None:
                    self._refuse(request_id, f"The request is malformed: {error}.")
                continue
            if isinstance(message, frames.Add):
                request = self._make_request(message.request)
                if request is not None:
                    self._inputs.put(request)
            else:
                self._inputs.put(message)

    def _make_request(self, engine_request: EngineRequest) -> Request | None:
        """None if it cannot be served, whatever the reason: other requests are not affected."""
        try:
            return self.core.make_request(engine_request)
        except RequestError as error:
            self._refuse(engine_request.request_id, str(error))
        except Exception as error:
            logger.exception("Request %s was refused.", engine_request.request_id)
            self._refuse(engine_request.request_id, f"The request cannot be served ({type(error).__name__}).")
        return None

    def _refuse(self, request_id: str, reason: str) -> None:
        output = EngineOutput(
            request_id=request_id, finish_reason=FinishReason.ERROR, error=printable(reason)
        )
        self._outputs.put(frames.Outputs([output]))

    def _send_outputs(self) -> None:
        """Output thread: encode and send until None comes."""
        codec = frames.Codec()
        while (message := self._outputs.get()) is not None:
            try:
                frame = codec.encode(message)
            except Exception as error:
                if isinstance(message, frames.Result):
                    problem = RequestError(f"The result cannot be sent: {error}.")
                    frame = codec.encode(frames.Result(message.call_id, error=frames.ErrorInfo.of(problem)))
                else:
                    frame = codec.encode(frames.Died(frames.ErrorInfo.of(error)))
                    self._status = 1
                    self._inputs.put(None)
            self._push.send(frame)
        # After an orderly end there is no reader.
        self._push.close(linger=0 if self._status == 0 else FLUSH_MILLISECONDS)


@contextlib.contextmanager
def _log_to(outputs: SimpleQueue[frames.ToFrontend | None], level: int) -> Iterator[None]:
    """Lines of minivllm's log go to the frontend, whose handlers decide what becomes of them."""
    package = logging.getLogger("minivllm")
    handler = LogSender(outputs.put)
    package.addHandler(handler)
    package.setLevel(level)
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(handler)


def main() -> None:
    """``python -m minivllm.engine_process.process START LIFE``: two inherited file descriptors.

    START: a pipe with the length and the bytes of a ``frames.Start``, which the frontend then holds open: its
    end means that the frontend has gone, however it went. LIFE: a pipe that only this process holds open, so
    that the frontend learns in the same way.
    """
    start_fd, life_fd = (int(argument) for argument in sys.argv[1:3])
    for fd in (start_fd, life_fd):
        os.set_inheritable(fd, False)
    # They were blocked so far, see EngineConnection. Without a frontend the engine ends anyway.
    for number in FRONTEND_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FRONTEND_SIGNALS)
    start_pipe = os.fdopen(start_fd, "rb")
    header = start_pipe.read(4)
    if not header:
        sys.exit(0)  # the frontend has gone before it said what to start
    (length,) = struct.unpack("<I", header)
    start = frames.Codec().decode(start_pipe.read(length), frames.Start)
    directory = Path(start.directory)
    traces = (directory / frames.TRACES_FILE).open("w")
    faulthandler.enable(traces, all_threads=True)
    faulthandler.register(signal.SIGUSR1, traces, all_threads=True)

    engine = EngineProcess(start)
    ended = threading.Event()

    def watch_frontend() -> None:
        start_pipe.read()
        engine.frontend_has_gone()
        ended.wait(frames.GRACE_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    watcher = threading.Thread(target=watch_frontend, name="frontend watch", daemon=True)
    watcher.start()
    status = engine.run()
    ended.set()
    if status == 0:
        watcher.join()  # it removes the directory, and exits
    sys.exit(status)


if __name__ == "__main__":
    main()
