"""Persistent batches of made-up requests over a small pool of blocks,
as the scheduler could have left them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from minivllm.batch.persistent_batch import PersistentBatch, WorkerRequest
from minivllm.batch.step_inputs import Row
from minivllm.kv_cache.specs import one_group
from minivllm.messages import EngineRequest, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams

CPU = torch.device("cpu")


def new_request(
    name: str, prompt: list[int], block_ids: list[int], num_computed_tokens: int, **sampling: int | float
) -> NewRequestData:
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**sampling),  # type: ignore[arg-type]
        max_tokens=16,
        seed=0,
        arrival_time=0.0,
    )
    return NewRequestData(request=request, block_ids=(block_ids,), num_computed_tokens=num_computed_tokens)


@dataclass(frozen=True)
class BatchShape:
    """Sizes of the persistent buffers."""

    max_num_seqs: int = 6
    max_num_batched_tokens: int = 48
    max_model_len: int = 64
    block_size: int = 8
    num_blocks: int = 60


def random_runs(rng: random.Random, start: int, end: int) -> list[tuple[int, int]]:
    """Runs that see themselves with positions from ``start`` up to ``end``; the first may begin earlier."""
    runs, position = [], max(0, start - rng.randint(0, 5))
    while position < end and rng.random() < 0.7:
        begin = position + rng.randint(0, 6)
        position = min(end, begin + rng.randint(1, 12))
        if position > max(begin, start):
            runs.append((begin, position))
    return runs


def random_rows(rng: random.Random, shape: BatchShape, batch: PersistentBatch) -> list[Row]:
    """Enter random requests into an empty ``batch`` and pick a step for them.

    Contexts are random, and about half of the requests share the blocks of a prefix with the one before. Half
    of the steps have runs that see themselves.
    """
    blocks = rng.sample(range(1, shape.num_blocks), shape.num_blocks - 1)
    budget, planned = shape.max_num_batched_tokens, []
    requests: list[NewRequestData] = []
    previous: list[int] = []
    for index in range(rng.randint(1, shape.max_num_seqs)):
        if budget == 0:
            break
        count = (
            1 if rng.random() < 0.5 else rng.randint(1, min(budget, rng.choice([4, 12, shape.max_model_len])))
        )
        start = rng.choice([0, rng.randint(0, shape.max_model_len - count), shape.max_model_len - count])
        needed = -(-(start + count) // shape.block_size)
        shared = 0
        if rng.random() < 0.5:
            shared = rng.randint(0, min(len(previous), start // shape.block_size))
        if needed - shared > len(blocks):
            break
        own = previous[:shared] + [blocks.pop() for _ in range(needed - shared)]
        length = rng.randint(start + count, shape.max_model_len)
        prompt = [rng.randrange(1000) for _ in range(length)]
        requests.append(new_request(f"r{index}", prompt, own, start))
        planned.append((f"r{index}", start, count))
        previous, budget = own, budget - count
    batch.apply(SchedulerOutput(new_requests=requests))
    has_runs = rng.random() < 0.5
    return [
        Row(
            batch.requests[name],
            start,
            count,
            runs=random_runs(rng, start, start + count) if has_runs else (),
        )
        for name, start, count in planned
    ]


def block_ids(batch: PersistentBatch, request: WorkerRequest) -> list[int]:
    """The blocks of a request that has a batch slot."""
    tables = batch.groups[0]
    owned: list[int] = tables.block_table.host[request.slot, : tables.num_held[request.slot]].tolist()
    return owned


def new_batch(shape: BatchShape) -> PersistentBatch:
    group = one_group(1, shape.block_size, num_blocks=shape.num_blocks)
    return PersistentBatch(shape.max_num_seqs, shape.max_model_len, [group], CPU)


def finish_all(batch: PersistentBatch) -> None:
    """Every request leaves."""
    batch.apply(SchedulerOutput(finished_request_ids=list(batch.requests)))
