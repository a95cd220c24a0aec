"""Persistent batches of made-up requests over a small pool of pages, as the scheduler could have left them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from minivllm.messages import NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.persistent_batch import PersistentBatch
from minivllm.worker.step_inputs import Row

CPU = torch.device("cpu")


def new_request(
    name: str, prompt: list[int], block_ids: list[int], num_computed_tokens: int, **sampling: int | float
) -> NewRequestData:
    return NewRequestData(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=0,
        eos_token_ids=[],
        bad_words_token_ids=[],
        block_ids=(block_ids,),
        num_computed_tokens=num_computed_tokens,
    )


@dataclass(frozen=True)
class BatchShape:
    """Sizes of the persistent buffers."""

    max_num_seqs: int = 6
    max_num_batched_tokens: int = 48
    max_model_len: int = 64
    page_size: int = 8
    num_pages: int = 60


def random_rows(rng: random.Random, shape: BatchShape, batch: PersistentBatch) -> list[Row]:
    """Enter random requests into an empty ``batch`` and pick a step for them, single-token rows first.

    Contexts are random, and about half of the requests share the pages of a prefix with the one before.
    """
    pages = rng.sample(range(1, shape.num_pages), shape.num_pages - 1)
    budget, planned = shape.max_num_batched_tokens, []
    requests: list[NewRequestData] = []
    previous: list[int] = []
    for index in range(rng.randint(1, shape.max_num_seqs)):
        if budget == 0:
            break
        count = 1 if rng.random() < 0.5 else rng.randint(1, min(budget, rng.choice([4, 12, shape.max_model_len])))
        start = rng.choice([0, rng.randint(0, shape.max_model_len - count), shape.max_model_len - count])
        needed = -(-(start + count) // shape.page_size)
        shared = 0
        if rng.random() < 0.5:
            shared = rng.randint(0, min(len(previous), start // shape.page_size))
        if needed - shared > len(pages):
            break
        own = previous[:shared] + [pages.pop() for _ in range(needed - shared)]
        length = rng.randint(start + count, shape.max_model_len)
        prompt = [rng.randrange(1000) for _ in range(length)]
        requests.append(new_request(f"r{index}", prompt, own, start))
        planned.append((f"r{index}", start, count))
        previous, budget = own, budget - count
    batch.apply(SchedulerOutput(new_requests=requests))
    rows = [Row(batch.requests[name], start, count) for name, start, count in planned]
    return [row for row in rows if row.count == 1] + [row for row in rows if row.count > 1]


def new_batch(shape: BatchShape) -> PersistentBatch:
    return PersistentBatch(shape.max_num_seqs, shape.max_model_len, shape.page_size, shape.num_pages, CPU)


def finish_all(batch: PersistentBatch) -> None:
    """Every request leaves."""
    batch.apply(SchedulerOutput(finished_request_ids=list(batch.requests)))
