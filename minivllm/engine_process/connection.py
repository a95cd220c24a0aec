"""Starts an engine process, talks to it, learns of its death, and leaves nothing behind.

The frontend binds ROUTER (requests out) and PULL (outputs in) on ``ipc://`` sockets of mode 0600 in a private
directory; the engine connects DEALER and PUSH. Two pipes watch the ends: each closes by itself when the
process that holds it ends, even by kill -9.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import zmq

from minivllm.config import EngineArgs
from minivllm.distributed.lockstep import EngineSeat
from minivllm.engine_process.protocol import frames
from minivllm.engine_process.protocol.pixels import WantPixels
from minivllm.errors import EngineDeadError
from minivllm.executor.records.child_reports import FRONTEND_SIGNALS, describe_exit
from minivllm.executor.records.private_directories import PrivateDirectory
from minivllm.messages import EngineRequest

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, *["-O"] * sys.flags.optimize, "-P", "-m", "minivllm.engine_process.process")
FINAL_MESSAGE_SECONDS = 1.0
"""How long to wait for the message in which an ending engine says why, and for its process to end."""
DIED_STATUS = 1
"""Exit status of an engine that sent such a message."""
STACKS_SECONDS = 0.1
"""What the fault handler of a hung engine gets to write down where it hangs."""


class EngineConnection:
    """One engine process and the sockets to it. Not thread-safe.

    Raises what the engine raised if it cannot start: ConfigError, ModelError, or EngineDeadError with a
    traceback. command: what to run instead of this package's engine; it gets two file descriptors as further
    arguments. environment: variables of the process besides those of this one. number: among engines that
    share a machine. seat: among engines that share experts. wait: return when the engine serves; otherwise
    ``wait_until_ready`` must be called before anything else.
    """

    ready: frames.Ready

    def __init__(
        self,
        args: EngineArgs,
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        number: int = 0,
        seat: EngineSeat | None = None,
        wait: bool = True,
    ) -> None:
        self.args = args.for_another_process()
        self.dead_error: EngineDeadError | None = None
        self._identity = secrets.token_bytes(16)
        self._codec = frames.Codec()
        self._num_calls = 0
        directory = PrivateDirectory()
        self._directory = directory.path
        self._context = zmq.Context()
        self._router = self._bind(zmq.ROUTER, frames.REQUESTS_SOCKET)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.pull = self._bind(zmq.PULL, frames.OUTPUTS_SOCKET)
        start_read, self._start_write = os.pipe()
        self.life_fd, life_write = os.pipe()
        # Ctrl-C goes to the whole process group. The new process begins with it blocked, until it can ignore
        # it; this one hears of it again when it is settled who cleans up.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FRONTEND_SIGNALS)
        try:
            try:
                self.process = subprocess.Popen(
                    [*command, str(start_read), str(life_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
                    pass_fds=(start_read, life_write, *(() if seat is None else seat.descriptors)),
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                        **environment,
                    },
                )
            finally:
                os.close(start_read)
                os.close(life_write)
            self._cleanup = weakref.finalize(
                self,
                _clean_up,
                self.process,
                [self._start_write, self.life_fd],
                [self._router, self.pull],
                self._context,
                directory,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            self._send_start(seat, number)
        except BaseException:
            self.close()
            raise
        if wait:
            self.wait_until_ready()

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # Nothing is dropped: what is under way is bounded by admission here and by the requests there.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        path = self._directory / name
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)
        return socket

    def _send_start(self, seat: EngineSeat | None, number: int) -> None:
        start = frames.Start(
            args=self.args,
            directory=str(self._directory),
            identity=self._identity,
            log_level=logging.getLogger("minivllm").getEffectiveLevel(),
            seat=seat,
            number=number,
        )
        data = self._codec.encode(start)
        try:
            with os.fdopen(self._start_write, "wb", closefd=False) as pipe:
                pipe.write(struct.pack("<I", len(data)) + data)
        except BrokenPipeError:
            raise self.death() from None

    def wait_until_ready(self) -> None:
        """Return when the engine serves.
        If it cannot start, raise what it raised; nothing is left of it then."""
        try:
            self.ready = self._receive_ready()
        except BaseException:
            self.close()
            raise

    def _receive_ready(self) -> frames.Ready:
        poller = zmq.Poller()
        for source in (self._router, self.pull, self.life_fd):
            poller.register(source, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self.pull in events:
                message = self.decode(self.pull.recv())
                if isinstance(message, frames.Died):
                    self.dead_error = EngineDeadError(str(message.error.exception()))
                    raise message.error.exception()
            elif self._router in events:
                identity, frame = self._router.recv_multipart()[:2]
                if identity == self._identity:
                    ready: frames.Ready = self._codec.decode(frame, frames.Ready)
                    return ready
                logger.warning("A message of an unknown peer was refused.")
            elif events:
                raise self.death()

    # -- messages ----------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        self.send(frames.Add(request))

    def abort(self, request_ids: list[str]) -> None:
        self.send(frames.Abort(request_ids))

    def call(self, method: str, args: Sequence[object]) -> int:
        """Send a call; the id its Result will carry."""
        self._num_calls += 1
        self.send(frames.Call(self._num_calls, method, list(args)))
        return self._num_calls

    def send(self, message: frames.ToEngine) -> None:
        if self.dead_error is not None:
            raise self.dead_error
        frame = self._codec.encode(message)
        try:
            self._router.send_multipart([self._identity, frame], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            raise self.death() from None

    def decode(self, frame: bytes) -> frames.Outputs | frames.Result | frames.Died | WantPixels | None:
        """A message of the engine. Log lines go to their logger, malformed frames are refused:
        both give None."""
        try:
            message: frames.ToFrontend = self._codec.decode(frame, frames.ToFrontend)
        except frames.MalformedFrame as error:
            logger.warning("A malformed frame was refused: %s", error)
            return None
        if isinstance(message, frames.Log):
            message.handle()
            return None
        return message

    # -- the end -----------------------------------------------------------------------------------

    def died(self, message: frames.Died) -> EngineDeadError:
        """Note that the engine said why it dies; the error for all who wait."""
        if self.dead_error is None:
            error = message.error.exception()
            self.dead_error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        return self.dead_error

    def death(self) -> EngineDeadError:
        """The engine process has ended: find out why. Blocks for FINAL_MESSAGE_SECONDS at most."""
        status = self.exit_status()
        deadline = time.monotonic() + FINAL_MESSAGE_SECONDS * (status == DIED_STATUS)
        while self.dead_error is None and self.pull.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            message = self.decode(self.pull.recv())
            if isinstance(message, frames.Died):
                self.died(message)
        return self.ended(status)

    def exit_status(self) -> int | None:
        """Status of an engine process that is about to end;
        None if it does not end within FINAL_MESSAGE_SECONDS."""
        try:
            return self.process.wait(FINAL_MESSAGE_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def ended(self, status: int | None) -> EngineDeadError:
        """The error for all who wait, unless the engine gave a reason itself."""
        return self.dead_error or self._dead(describe_exit("engine process", status))

    def hung(self) -> EngineDeadError:
        """The engine did not answer in time: kill it, and say where it hung."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)  # its fault handler writes the stacks of all threads
            time.sleep(STACKS_SECONDS)
            self.process.kill()
        return self._dead(
            f"The engine core has not answered for {self.args.heartbeat_timeout:g} s and was killed; "
            "heartbeat_timeout sets how long a step may take."
        )

    def _dead(self, what: str) -> EngineDeadError:
        traces = self._directory / frames.TRACES_FILE
        stacks = traces.read_text(errors="replace").strip() if traces.is_file() else ""
        self.dead_error = EngineDeadError(what + (f"\n\nIts threads:\n{stacks}" if stacks else ""))
        return self.dead_error

    def close(self) -> None:
        """End the engine process, and remove sockets and directory. Closing twice is fine."""
        if self.dead_error is None:
            self.dead_error = EngineDeadError("The engine is closed: make a new one.")
        self._cleanup()


def _clean_up(
    process: subprocess.Popen[bytes],
    fds: list[int],
    sockets: list[zmq.Socket[bytes]],
    context: zmq.Context[zmq.Socket[bytes]],
    directory: PrivateDirectory,
) -> None:
    for fd in fds:
        os.close(fd)  # the engine's sign to end
    try:
        process.wait(frames.GRACE_SECONDS + 1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for socket in sockets:
        socket.close(linger=0)
    context.term()
    directory.remove()


def _has_fileno(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
