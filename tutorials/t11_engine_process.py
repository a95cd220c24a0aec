"""11 · The engine process: text work and model work do not wait for each other; messages, abort, failure.

Turning tokens into text, parsing JSON, serving sockets: all of it is Python, and while it runs in the
engine's process no step is scheduled. So the engine core lives in a process of its own. What crosses is
small, typed and boring, on purpose.
"""

# %% [markdown]
# ## Messages
# The frontend binds two sockets: ROUTER, to send, and PULL, to receive. The engine connects DEALER and PUSH.
# A frame is one msgpack message of a type that both know, and nothing else can be decoded: no pickle, which
# would run whatever it is sent.

# %%
from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import msgspec

from minivllm.config import EngineArgs
from minivllm.engine_process.client import make_client
from minivllm.engine_process.connection import EngineConnection
from minivllm.engine_process.process_clients import ProcessClient
from minivllm.engine_process.protocol import frames
from minivllm.engine_process.protocol.clients import EngineClient
from minivllm.errors import EngineDeadError
from minivllm.messages import EngineOutput, EngineRequest, FinishReason
from minivllm.sampling_params import SamplingParams
from tutorials.lesson import Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)


def request(name: str, prompt_len: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[(3 * i + 11) % 512 for i in range(prompt_len)],
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=0,
        arrival_time=time.monotonic(),
    )


lesson.heading("What a message weighs")
codec = frames.Codec()
encoded = {
    "a request of 10 tokens": codec.encode(frames.Add(request("R1", 10, 8))),
    "a request of 1,000 tokens": codec.encode(frames.Add(request("R1", 1000, 8))),
    "a new token": codec.encode(frames.Outputs([EngineOutput(request_id="R1", new_token_ids=[317])])),
    "an abort": codec.encode(frames.Abort(["R1"])),
}
lesson.bars("t11_messages", "Messages", {name: len(frame) for name, frame in encoded.items()}, "bytes")
decoded = codec.decode(encoded["a request of 10 tokens"], frames.ToEngine)
lesson.check(
    isinstance(decoded, frames.Add) and decoded.request.request_id == "R1", "what was encoded comes back"
)
refused = []
for frame in (
    b"",
    b"\x80\x04\x95",
    os.urandom(64),
    msgspec.msgpack.encode({"type": "run", "code": "import os"}),
):
    try:
        codec.decode(frame, frames.ToEngine)
    except frames.MalformedFrame:
        refused.append(frame)
lesson.predict(
    "frames refused of 4 that are no messages", 4, "empty, a pickle's first bytes, noise, an unknown type"
)
lesson.measure("frames refused of 4 that are no messages", len(refused))

# %% [markdown]
# ## The same core, near and far
# ``EngineClient`` is what frontends know. Behind it is either the core itself, or sockets to it. The answers
# must be the same. The socket files are readable for their owner only, since a program that can write there
# can use the model.


# %%
def answer(client: EngineClient, name: str, max_tokens: int) -> list[int]:
    client.add_request(request(name, 12, max_tokens))
    token_ids: list[int] = []
    while client.has_unfinished_requests():
        for output in client.get_outputs():
            token_ids += output.new_token_ids
    return token_ids


lesson.heading("An engine in another process")
near = make_client(EngineArgs(**engine_arguments()))
connection = EngineConnection(EngineArgs(**engine_arguments(multiprocess=True)))
far = ProcessClient(connection)
lesson.say(f"  frontend: process {os.getpid()}, engine: process {connection.process.pid}")
lesson.check(answer(near, "R1", 24) == answer(far, "R1", 24), "24 tokens are the same from both")
sockets = list(Path(connection._directory).glob("[ro]*"))
modes = {oct(stat.S_IMODE(path.stat().st_mode)) for path in sockets}
lesson.predict("modes of the socket files", {"0o600"}, "read and write for the owner, nothing for others")
lesson.measure("modes of the socket files", modes)

# %% [markdown]
# ## The surprise: it steps without being asked
# An engine in this process steps when its owner calls ``get_outputs``. The other one has a loop of its own:
# it takes what is in its queue, steps, and puts results into the next queue, while we do whatever we like. So
# submit a request to both, and then do *not* ask for its tokens.

# %%
lesson.heading("Submit, and look away")
before = (near.stats().num_steps, far.stats().num_steps)
lesson.predict(
    "steps without asking (near, far)", (0, 40), "near: nothing calls step; far: a loop of its own"
)
for client in (near, far):
    client.add_request(request("R2", 12, 40))
deadline = time.monotonic() + 30
while far.stats().num_steps < before[1] + 40 and time.monotonic() < deadline:
    time.sleep(0.01)
lesson.measure(
    "steps without asking (near, far)", tuple(c.stats().num_steps - b for c, b in zip((near, far), before))
)
waiting = 0
while far.has_unfinished_requests():
    waiting += sum(len(output.new_token_ids) for output in far.get_outputs())
lesson.check(waiting == 40, "all 40 tokens were waiting in the socket")

# %% [markdown]
# ## Abort
# When a user goes away, the request must go too, at once, and with its blocks. Aborts are idempotent: for a
# request that has finished meanwhile, nothing happens.

# %%
lesson.heading("Abort")
before_steps = far.stats().num_steps
far.add_request(request("R3", 12, 480))
got = len(far.get_outputs()[0].new_token_ids)
far.abort(["R3", "R3", "nobody"])
lesson.predict(
    "after the abort: (running, blocks in use)",
    (0, 0.0),
    "the request is gone, its blocks are free or cached",
)
stats = far.stats()
lesson.measure("after the abort: (running, blocks in use)", (stats.num_running, stats.kv_cache_usage))
lesson.check(
    stats.num_steps - before_steps < 480, f"it stopped after {stats.num_steps - before_steps} of 480 steps"
)
far.call("check_integrity")

# %% [markdown]
# ## One bad request
# A request that can never be served (here its prompt is longer than the model's context) gets an answer that
# says so. The one beside it does not notice.

# %%
lesson.heading("A bad request beside a good one")
lesson.predict(
    "ends",
    {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH},
    "an error for one, an answer for the other",
)
far.add_request(request("bad", 5000, 8))
far.add_request(request("good", 12, 8))
ends: dict[str, FinishReason] = {}
while far.has_unfinished_requests():
    for output in far.get_outputs():
        if output.finish_reason is not None:
            ends[output.request_id] = output.finish_reason
        if output.error is not None:
            lesson.say(f"  {output.request_id}: {output.error}")
lesson.measure("ends", dict(sorted(ends.items())))

# %% [markdown]
# ## Death
# The worst case: the engine is killed while a caller waits. Two pipes tell each side of the other's end, even
# after kill -9: the kernel closes them. Every caller that waits gets an error that says what happened, none
# waits forever, and nothing is left behind.

# %%
lesson.heading("kill -9")
directory = Path(connection._directory)
far.add_request(request("R4", 12, 480))
os.kill(connection.process.pid, signal.SIGKILL)
message = ""
try:
    while True:
        far.get_outputs()
except EngineDeadError as error:
    message = str(error)
lesson.say(f"  the call that waited: {message}")
lesson.check("killed by SIGKILL" in message, "the error names the signal")
far.close()
near.close()
lesson.predict("left behind", (False, -9), "no socket files, and a child that was waited for")
lesson.measure("left behind", (directory.exists(), connection.process.poll()))

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "And the other way round: end the frontend's side. Does the engine end, with what status, and how is it "
    "told?"
)
def frontend_ends() -> str:
    connection = EngineConnection(EngineArgs(**engine_arguments(multiprocess=True)))
    ProcessClient(connection).add_request(request("R5", 12, 480))
    connection.close()
    assert connection.process.poll() == 0
    return (
        "status 0: closing the pipe that it reads from is the sign; kill -9 of this process would close it "
        "as well"
    )


@lesson.exercise(
    "What does a model that does not exist look like through a process? Not a timeout, and not a foreign "
    "traceback."
)
def no_such_model() -> str:
    from minivllm.errors import ModelError

    try:
        EngineConnection(EngineArgs(model="/no/such/model", multiprocess=True))
    except ModelError as error:
        return f"a ModelError, as in this process: {error}"
    raise AssertionError("it should not load")


lesson.passed(
    "frames that are no messages are refused",
    "the process answers as the core does, and steps without being asked",
    "an abort frees everything, a bad request harms no other, a death reaches every caller that waits",
)
