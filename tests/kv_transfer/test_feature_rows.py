"""Every connector with the rows of features that contain every pair: answers are those of the plain engine.

An engine answers, forgets, and answers again with what the connector kept; or a producer answers, and a
consumer takes its blocks. Other requests come beside those that count and are aborted at any step, on both
sides. Blocks are evicted at random from the devices and from what the connector keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minivllm import LLM, RequestOutput, SamplingParams
from tests.end_to_end.test_feature_pairs import (
    ROWS,
    Engines,
    Reference,
    Row,
    adapter,
    draft_models,
    engine_settings,
    engines,
    logprob_values,
    reference,
    shown,
)
from tests.kv_transfer.lookup_pair import consumer, producer, through_nixl, unix, wait_until
from tests.kv_transfer.test_connectors import storage
from tests.kv_transfer.test_lmcache import Server, lmcache, server
from tests.kv_transfer.test_lookup_buffer import quick_retries
from tests.kv_transfer.test_multi_connector import host, several

__all__ = ["adapter", "draft_models", "engines", "quick_retries", "reference", "server"]

TinyModel = Callable[..., Path]
BLOCK_BYTES = 6144
FILLERS = 8
"""Other prompts, of seven blocks each: what the largest pool here holds and more."""


@dataclass(frozen=True)
class Kept:
    """Where an engine's blocks go. configurations: of a directory and LMCache's address, that of a producer
    and that of a consumer, or of one engine. package: without it the connector is not tried."""

    name: str
    configurations: Callable[[Path, str], list[dict[str, Any]]]
    package: str | None = None


def pair(path: Path) -> list[dict[str, Any]]:
    return [producer(unix(path), buffer_bytes=60 * BLOCK_BYTES), consumer(unix(path))]


CONNECTORS = [
    Kept("host memory", lambda path, url: [host(160)]),
    Kept("directory", lambda path, url: [storage(path)]),
    Kept("pipes", lambda path, url: pair(path)),
    Kept("LMCache", lambda path, url: [lmcache(url)]),
    Kept("several", lambda path, url: [several(host(12), storage(path))]),
    Kept("NIXL", lambda path, url: through_nixl(*pair(path)), package="nixl"),
]
QUICK = [row for row in ROWS if all(feature.name not in ("process", "stages") for feature in row)]
DAILY = [(row, CONNECTORS[number % 5]) for number, row in enumerate(QUICK)]
OTHERS = [(row, kept) for row in ROWS for kept in CONNECTORS if (row, kept) not in DAILY]


def case_id(value: Any) -> str:
    return value.name if isinstance(value, Kept) else "+".join(feature.name for feature in value)


def hit_tokens(llm: LLM) -> int:
    return sum(tier.hit_tokens for tier in llm.get_metrics().kv_transfer)


def lives(engines: Engines, llm: LLM, row: Row, random: Random) -> list[RequestOutput]:
    """The requests of a row, in any order, among others that are aborted at any time."""
    prompts, asked = engines.requests(llm, row)
    engine, finished = llm.llm_engine, dict[str, RequestOutput]()
    adapters, priorities = asked.get("lora_request", [None] * 4), asked.get("priority", [0] * 4)

    def steps(count: int) -> None:
        for _ in range(count):
            if engine.has_unfinished_requests():
                finished.update((one.request_id, one) for one in engine.step() if one.finished)

    for place in random.sample(range(len(prompts)), len(prompts)):
        options = {"lora": adapters[place], "priority": priorities[place]}
        engine.add_request(str(place), prompts[place], asked["sampling_params"], **options)
        steps(random.randint(0, 3))
        other = {"prompt_token_ids": random.choices(range(3, 200), k=40)}
        doomed = random.choice([prompts[place], other]), SamplingParams(temperature=0.0, max_tokens=16)
        engine.add_request(f"aborted {place}", *doomed, **options)
        steps(random.randint(0, 6))
        engine.abort_request([f"aborted {place}"])
    while engine.has_unfinished_requests():
        steps(1)
    return [finished[str(place)] for place in range(len(prompts))]


def evict(llm: LLM, random: Random) -> None:
    """Other prompts take the blocks of the device, and places among what the connector keeps."""
    prompts = [{"prompt_token_ids": random.choices(range(3, 200), k=56)} for _ in range(FILLERS)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)


def check(engines: Engines, reference: Reference, row: Row, configurations: Sequence[dict[str, Any]]) -> None:
    expected, random = reference.answer(row), Random(len(row))
    is_computed = expected[0].prompt_logprobs is not None  # they require the whole prompt to be computed

    def is_right(outputs: Sequence[RequestOutput]) -> None:
        assert shown(list(outputs)) == shown(expected)
        assert logprob_values(list(outputs)) == pytest.approx(logprob_values(expected), abs=1e-4)

    settings = {**engine_settings(row), "enable_prefix_caching": True}
    with ExitStack() as stack:
        llms = [
            stack.enter_context(engines.make({**settings, "kv_transfer_config": config}))
            for config in configurations
        ]
        for llm in (llms[0], llms[-1]):
            if any(feature.is_seen_before for feature in row):
                lives(engines, llm, row, random)
            is_right(lives(engines, llm, row, random))
            if len(llms) == 1:
                evict(llm, random)

        def has_hit() -> bool:  # what is on its way is not there yet
            evict(llms[-1], random)
            is_right(lives(engines, llms[-1], row, random))
            return hit_tokens(llms[-1]) > 0

        wait_until(lambda: has_hit() or is_computed)
        for llm in llms:
            llm.llm_engine.client.call("check_integrity")


@pytest.mark.parametrize(("row", "kept"), DAILY, ids=case_id)
def test_rows_of_features_give_the_answer_of_the_plain_engine(
    row: Row, kept: Kept, engines: Engines, reference: Reference, tmp_path: Path, server: Server
) -> None:
    check(engines, reference, row, kept.configurations(tmp_path, server.url))


@pytest.mark.slow
@pytest.mark.parametrize(("row", "kept"), OTHERS, ids=case_id)
def test_every_other_row_with_every_connector(
    row: Row, kept: Kept, engines: Engines, reference: Reference, tmp_path: Path, server: Server
) -> None:
    if kept.package is not None and find_spec(kept.package) is None:
        pytest.skip(f"pip install 'minivllm[{kept.package}]' brings it.")
    check(engines, reference, row, kept.configurations(tmp_path, server.url))
