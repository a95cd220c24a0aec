"""A worker process without a model: answers the calls of an executor, and has faults on demand.

``python -m tests.executor.mock_worker FAULT SOCKET MEMORY ARRIVED FREED READER READERS``. Every step gives
each scheduled request the token 7. FAULT is "none", or "PLACE:RANK", where that rank raises: start,
load_model, step; or hang (in every step, and the others wait), differ (digests of other tokens), or config
(ConfigError at load_model).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import msgspec

from minivllm.errors import ConfigError
from minivllm.executor.records.agreement import token_digest
from minivllm.executor.records.broadcast_ring import RingReader
from minivllm.executor.records.child_reports import ErrorInfo
from minivllm.executor.records.records import (
    Answer,
    Call,
    Channel,
    Died,
    Listening,
    Log,
    Masks,
    Output,
    Peers,
    Sampled,
    Start,
    Step,
    Stop,
    ToWorker,
    ToWorkers,
    Whereabouts,
)
from minivllm.kv_cache.specs import one_group
from minivllm.messages import ModelRunnerOutput


def answer(call: Call, rank: int, fault: str) -> Answer:
    if call.method == "load_model" and fault == "load_model":
        raise KeyError("lm_head")
    if call.method == "load_model" and fault == "config":
        return Answer(error=ErrorInfo.of(ConfigError("the weights are no good.")))
    if call.method == "size_cache":
        return Answer([one_group(2, 16, 1024, 10 + rank)])
    if call.method == "weight_checksums":
        return Answer([float(rank)])
    return Answer(os.getpid() if call.method == "num_recompilations" else None)


def watch(channel: Channel, fault: str) -> None:
    while channel.receive() is not None:
        channel.send(Whereabouts(num_exchanges=8 if fault == "hang" else 9, stack=f"a mock that has {fault}"))
    os._exit(0)


def serve(ring: RingReader, channel: Channel, start: Start, fault: str) -> None:
    rank = start.rank
    decoder, num_steps = msgspec.msgpack.Decoder(ToWorkers), 0
    while not isinstance(record := decoder.decode(ring.read()), Stop):
        if isinstance(record, Call):
            channel.send(answer(record, rank, fault))
            continue
        assert isinstance(record, Step)
        if fault == "step":
            raise ValueError("the model has a fever")
        if fault in ("hang", "wait"):
            time.sleep(600)
        token = 7
        if record.has_masks:
            masks = decoder.decode(ring.read())
            assert isinstance(masks, Masks)
            token = masks.masks.words
        num_steps += 1
        tokens = {request_id: [token] for request_id in record.step.num_scheduled_tokens}
        digest = token_digest({"a": [8]} if fault == "differ" and num_steps == 5 else tokens)
        ring.note(num_steps, digest)
        if start.config.local_ranks.start > 0:
            channel.send(Sampled(num_steps, digest))
        if rank == 0:
            channel.send(Output(ModelRunnerOutput(sampled_token_ids=tokens)))


def main() -> None:
    fault, victim = [*sys.argv[1].split(":"), "-1"][:2]
    descriptor, memory, arrived, freed, reader, readers = map(int, sys.argv[2:8])
    channel = Channel(socket.socket(fileno=descriptor), ToWorker)
    try:
        start: Start = channel.receive_one()
        rank = start.rank
        assert rank == start.config.local_ranks[reader]
        if rank != int(victim):
            fault = "wait" if fault == "hang" else "none"
        if fault == "start":
            raise OSError("no such device")
        if start.network is not None:
            channel.send(Listening(f"mock:{rank}"))
            peers = channel.receive_one()
            assert peers == Peers({other: f"mock:{other}" for other in range(start.size)})
        channel.send(Log("minivllm.mock", 30, f"hello from {rank}"))
        threading.Thread(target=watch, args=(channel, fault), daemon=True).start()
        serve(RingReader(memory, arrived, freed, reader, readers), channel, start, fault)
    except BaseException as error:
        channel.send(Died(ErrorInfo.of(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
