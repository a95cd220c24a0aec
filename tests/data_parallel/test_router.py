"""Who gets a request: the counts against a model that knows no increments,
and what the policies make of them."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import EngineArgs, LoRARequest, RoutingPolicy, SamplingParams, register_routing
from minivllm.data_parallel.loads import CachedBlocks, EngineLoad
from minivllm.data_parallel.policy import PrefixAffinity, RoundRobin
from minivllm.data_parallel.router import Router
from minivllm.errors import ConfigError
from minivllm.messages import EngineOutput, EngineRequest, FinishReason
from minivllm.plugins.points import ROUTING
from minivllm.request import Request

BLOCK = 4


def request(name: str, prompt: list[int], **more: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=50, prompt_logprobs=more.pop("prompt_logprobs", None))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        max_tokens=50,
        seed=0,
        arrival_time=0.0,
        **more,
    )


def output(name: str, tokens: list[int], finished: bool = False) -> EngineOutput:
    reason = FinishReason.LENGTH if finished else None
    return EngineOutput(request_id=name, new_token_ids=tokens, finish_reason=reason)


def prefix_router(num_engines: int = 2, num_tokens: int = 4000) -> Router:
    return Router(PrefixAffinity(), num_engines, BLOCK, num_tokens)


class Model:
    """What the router should count, from the whole story of every request. cached: by engine, sequences of
    blocks that it computed, each as (salt, adapter, tokens)."""

    def __init__(self, num_engines: int) -> None:
        self.owner: dict[str, int] = {}
        self.sent: dict[str, EngineRequest] = {}
        self.left: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.cached: list[set[Any]] = [set() for _ in range(num_engines)]
        self.up = set(range(num_engines))

    def blocks(self, one: EngineRequest, count: int) -> list[Any]:
        """The first ``count`` tokens in whole blocks, each named by all that comes before it."""
        tokens = [*one.prompt_token_ids, *self.answers.get(one.request_id, ())][:count]
        lora = None if one.lora is None else one.lora.name
        return [(one.cache_salt, lora, *tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def would_compute(self, one: EngineRequest, engine: int) -> int:
        length = len(one.prompt_token_ids)
        hits = 0
        if one.sampling_params.prompt_logprobs is None:
            for block in self.blocks(one, length - 1):
                if block not in self.cached[engine]:
                    break
                hits += 1
        return length - hits * BLOCK

    def add(self, one: EngineRequest, engine: int) -> None:
        self.left[one.request_id] = self.would_compute(one, engine)
        self.owner[one.request_id], self.sent[one.request_id] = engine, one
        self.answers[one.request_id] = []
        self.remember(one, len(one.prompt_token_ids))

    def remember(self, one: EngineRequest, count: int) -> None:
        if one.sampling_params.prompt_logprobs is None:
            self.cached[self.owner[one.request_id]] |= set(self.blocks(one, count))

    def end(self, name: str) -> None:
        one = self.sent.pop(name)
        self.remember(one, len(one.prompt_token_ids) + len(self.answers[name]) - 1)
        for table in (self.owner, self.left, self.answers):
            del table[name]

    def check(self, router: Router) -> None:
        assert router.num_unfinished == len(self.owner)
        for engine in router.engines:
            own = [name for name, owner in self.owner.items() if owner == engine.index]
            lengths = [len(self.sent[name].prompt_token_ids) + len(self.answers[name]) for name in own]
            assert list(engine.requests) == own and engine.is_up == (engine.index in self.up)
            assert engine.num_blocks == sum(ceil(length / BLOCK) for length in lengths)
            assert engine.num_prompt_tokens == sum(self.left[name] for name in own if not self.answers[name])

    def score(self, one: EngineRequest, engine: int) -> float:
        own = [name for name, owner in self.owner.items() if owner == engine]
        lengths = [len(self.sent[name].prompt_token_ids) + len(self.answers[name]) for name in own]
        waiting = sum(self.left[name] for name in own if not self.answers[name])
        return (
            waiting + self.would_compute(one, engine) + sum(64 + ceil(length / BLOCK) for length in lengths)
        )


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            PROMPTS,
            st.sampled_from([None, None, "salt"]),
            st.sampled_from([None, None, LoRARequest("a", lora_path="/a"), LoRARequest("b", lora_path="/b")]),
            st.sampled_from([None, None, None, 2]),
        ),
        st.tuples(
            st.just("output"), st.integers(0, 50), st.lists(st.integers(0, 1), max_size=6), st.booleans()
        ),
        st.tuples(st.just("abort"), st.lists(st.integers(0, 50), max_size=3)),
        st.tuples(st.just("lose"), st.integers(0, 2)),
        st.tuples(st.just("return"), st.integers(0, 2)),
    ),
    max_size=60,
)


@settings(max_examples=80)
@given(steps=STEPS, num_engines=st.integers(1, 3))
def test_counts_equal_those_of_a_model_after_every_step(steps: list[Any], num_engines: int) -> None:
    """And every request goes to one of the engines with the lowest score of the model."""
    router, model = prefix_router(num_engines), Model(num_engines)
    for number, (kind, *values) in enumerate(steps):
        if kind == "add":
            prompt, salt, lora, logprobs = values
            one = request(f"r{number}", prompt, cache_salt=salt, lora=lora, prompt_logprobs=logprobs)
            scores = {engine: model.score(one, engine) for engine in model.up}
            chosen = router.add(one)
            assert scores[chosen] == min(scores.values())
            model.add(one, chosen)
        elif kind == "output":
            name = f"r{values[0]}"
            router.take_in([output(name, values[1], values[2])])
            if name in model.owner:
                model.answers[name] += values[1]
                if values[2]:
                    model.end(name)
        elif kind == "abort":
            names = [f"r{one}" for one in dict.fromkeys(values[0])]
            known = {name: model.owner[name] for name in names if name in model.owner}
            found = router.remove(names)
            assert {name: engine for engine, owned in found.items() for name in owned} == known
            for name in known:
                model.end(name)
        elif kind == "lose" and values[0] in model.up and len(model.up) > 1:
            lost = [name for name, owner in model.owner.items() if owner == values[0]]
            assert router.lose(values[0]) == lost
            for name in lost:
                model.end(name)
            model.up.remove(values[0])
            model.cached[values[0]].clear()
        elif kind == "return" and values[0] < num_engines:
            router.engines[values[0]].is_up = True
            model.up.add(values[0])
        model.check(router)
    for name in list(model.owner):
        router.take_in([output(name, [], finished=True)])
    assert [(one.num_blocks, one.num_prompt_tokens, one.requests) for one in router.engines] == [
        (0, 0, {})
    ] * len(router.engines)


@settings(max_examples=100)
@given(
    sequences=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True), max_size=20),
    capacity=st.integers(1, 6),
)
def test_the_least_recently_used_blocks_are_forgotten_ends_first(
    sequences: list[list[int]], capacity: int
) -> None:
    cached, order = CachedBlocks(capacity), list[int]()
    for sequence in sequences:
        cached.add([bytes([one]) for one in sequence])
        order = [one for one in order if one not in sequence] + sequence[::-1]
        order = order[-capacity:]
        assert len(cached) == len(order)
        for one in range(6):
            assert cached.num_found([bytes([one])]) == (one in order)


@given(num_engines=st.integers(1, 5), count=st.integers(0, 60), length=st.integers(1, 40))
def test_equal_requests_spread_evenly(num_engines: int, count: int, length: int) -> None:
    for policy in (PrefixAffinity(), RoundRobin()):
        router = Router(policy, num_engines, BLOCK, 10**6)
        counts = Counter(router.add(request(f"r{n}", [n] * length)) for n in range(count))
        assert max(counts.values(), default=0) - min(counts[index] for index in range(num_engines)) <= 1


def test_turns_of_a_conversation_go_to_the_engine_that_has_it() -> None:
    """Also with the answer in the history, and while other conversations keep both engines busy."""
    router = prefix_router()
    history = {name: [number] * 40 for number, name in enumerate("abcdef")}
    homes: dict[str, set[int]] = {name: set() for name in history}
    for turn in range(4):
        for name, tokens in history.items():
            homes[name].add(router.add(request(f"{name}{turn}", tokens)))
        for name, tokens in history.items():
            router.take_in([output(f"{name}{turn}", answer := [7, 8, 9, turn] * 3, finished=True)])
            history[name] = tokens + answer + [turn] * 5
    assert all(len(engines) == 1 for engines in homes.values())
    assert Counter(next(iter(engines)) for engines in homes.values()) == {0: 3, 1: 3}


def test_a_prefix_that_everybody_has_does_not_gather_everybody_in_one_place() -> None:
    router = prefix_router()
    shared = list(range(40))
    counts = Counter(router.add(request(f"r{number}", [*shared, number])) for number in range(50))
    assert counts == {0: 25, 1: 25}


def test_salts_and_adapters_have_prefixes_of_their_own() -> None:
    router = prefix_router()
    router.add(request("a", [1] * 40, cache_salt="x"))
    [home] = router.remove(["a"])
    for others in ({}, {"cache_salt": "y"}, {"lora": LoRARequest("x", lora_path="/x")}):
        one = router.add(request("b", [1] * 40, **others))
        assert router.engines[one].num_prompt_tokens == 40
        router.remove(["b"])
    one = router.add(request("b", [1] * 40, cache_salt="x"))
    assert one == home and router.engines[one].num_prompt_tokens == 4


def test_without_a_prefix_cache_nothing_counts_as_found() -> None:
    router = Router(PrefixAffinity(), 2, BLOCK, 4000, hashes_blocks=False)
    for number in range(3):
        home = router.add(request(f"r{number}", [1] * 40))
        assert router.engines[home].num_prompt_tokens == 40
        router.take_in([output(f"r{number}", [5], finished=True)])


def test_a_dead_engine_is_passed_over_in_turn() -> None:
    router = Router(RoundRobin(), 3, BLOCK, 4000)
    router.lose(1)
    assert [router.add(request(f"r{number}", [1])) for number in range(5)] == [0, 2, 0, 2, 0]
    router.engines[1].is_up = True
    assert [router.add(request(f"s{number}", [1])) for number in range(3)] == [1, 2, 0]


class Last(RoutingPolicy):
    """Always the last engine."""

    def choose(self, request: Request, engines: Any) -> EngineLoad:
        last: EngineLoad = engines[-1]
        return last


def test_a_policy_of_ones_own_is_named_or_registered() -> None:
    register_routing("last", Last)
    for name in ("last", f"{__name__}:Last"):
        args = EngineArgs(data_parallel_size=2, data_parallel_policy=name)
        assert ROUTING.load(args.data_parallel_policy) is Last
        # The engine processes do not route, so they need not know it.
        assert args.for_another_process().data_parallel_policy == "prefix"
    with pytest.raises(
        ConfigError, match="data_parallel_policy is 'nearest', but must be one of prefix, round_robin"
    ):
        EngineArgs(data_parallel_policy="nearest")
    with pytest.raises(ConfigError, match="data_parallel_size is 0, but must be at least 1"):
        EngineArgs(data_parallel_size=0)
