"""Any two features together give what they should: every pair, generated from the list of features.

A few dozen rows of several features each contain every pair (a covering array); pairs that were not at work
together in any row, and the pairs of a row that fails, run by themselves. Slow tests run each pair by itself.

Some features change the answer (a structure, an adapter, penalties, …), others must not (guessing ahead,
chunks, preemption, …). Both of a pair are switched on, and the answer is compared with that of an engine
which has only the former ones, token for token, and its log-probabilities within rounding. A feature that was
not at work in its case proves nothing, so each brings evidence, which is checked too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, LoRARequest, RequestOutput, SamplingParams
from minivllm.errors import ConfigError, RequestError
from minivllm.messages import SchedulerStats
from minivllm.simulation.ranks import virtual_llm
from tests.lora.lora_adapters import random_adapter
from tests.parity_reference import BLOCK_SIZE, random_prompts, tiny_settings
from tests.spec_decode.eagle_heads import random_head

TinyModel = Callable[..., Path]

MAX_TOKENS = 16
_WORDS = random_prompts((7, 9, 6), seed=21)
# Repeated beginnings give lookups something to find;
# all are longer than the small budget, none ends with a block.
PROMPTS = [_WORDS[0] * 3, _WORDS[1] * 2, _WORDS[2] * 2 + _WORDS[0], _WORDS[0] * 2 + _WORDS[1]]
PRIORITIES = [3, 0, 2, 1]
STOP_REGEX = r"(?s).{12,}[a-z]\W"
ADAPTED = [True, False, True, False]


@dataclass(frozen=True)
class Run:
    """What an engine made of the requests. before, after: its counters."""

    outputs: list[RequestOutput]
    before: SchedulerStats
    after: SchedulerStats

    def counted(self, name: str) -> int:
        """By how much a counter grew."""
        return int(getattr(self.after, name) - getattr(self.before, name))

    @property
    def completions(self) -> list[Any]:
        return [completion for output in self.outputs for completion in output.outputs]

    @property
    def texts(self) -> list[str]:
        return [completion.text for completion in self.completions]


def always(run: Run) -> bool:
    """Evidence of features that the engine cannot leave out:
    that they change the answer has a test of its own."""
    return True


@dataclass(frozen=True)
class Feature:
    """engine, params: settings that switch it on. changes_answer: if so, the reference has it too.
    is_at_work: evidence of it in a run. uses_adapters, uses_priorities: the requests bring them.
    is_seen_before: they run twice, and the second time counts."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    changes_answer: bool = False
    is_at_work: Callable[[Run], bool] = always
    uses_adapters: bool = False
    uses_priorities: bool = False
    is_seen_before: bool = False


def speculation(method: str, is_seen_before: bool = False, **settings: Any) -> Feature:
    """A drafter that is always asked."""
    config = {"method": method, "verification_cost": 0.0, **settings}
    return Feature(
        method,
        {"speculative_config": config},
        is_at_work=lambda run: run.counted("num_draft_tokens") > 0,
        is_seen_before=is_seen_before,
    )


PERFORMANCE = (
    speculation("ngram", prompt_lookup_min=1),
    speculation("suffix", is_seen_before=True),
    speculation("draft_model", model="the other model", num_speculative_tokens=3),
    speculation("early_exit", num_layers=2, num_speculative_tokens=3),
    speculation("eagle", model="an EAGLE head", num_speculative_tokens=3),
    speculation("eagle3", model="an EAGLE-3 head", num_speculative_tokens=3),
    Feature(
        "chunks", {"max_num_batched_tokens": 7}, is_at_work=lambda run: run.counted("num_steps") > MAX_TOKENS
    ),
    Feature(
        "prefix cache",
        {"enable_prefix_caching": True},
        # Log-probabilities of a prompt require that it is computed.
        is_at_work=lambda run: (
            run.counted("prefix_cache_hit_tokens") >= BLOCK_SIZE or run.outputs[0].prompt_logprobs is not None
        ),
        is_seen_before=True,
    ),
    Feature("priority", {"scheduling_policy": "priority", "max_num_seqs": 2}, uses_priorities=True),
    Feature(
        "preemption",
        {"num_gpu_blocks_override": 1 + 8},
        is_at_work=lambda run: run.counted("num_preemptions") > 0,
    ),
    Feature("process", {"multiprocess": True}),
    Feature("async scheduling", {"async_scheduling": True}),
    Feature("stages", {"pipeline_parallel_size": 2}),
)
ANSWERS = (
    Feature("quantised", {"quantization": "int8"}, changes_answer=True),
    Feature("adapter", {"enable_lora": True, "max_loras": 2}, uses_adapters=True, changes_answer=True),
    Feature(
        "structure",
        params={"structured_outputs": {"regex": r"\((one two|[a-z]+[0-9]) three [a-z ]{30}\)"}},
        changes_answer=True,
        is_at_work=lambda run: all(text.startswith("(") for text in run.texts),
    ),
    Feature(
        "n",
        params={"n": 3, "temperature": 0.9, "seed": 5},
        changes_answer=True,
        is_at_work=lambda run: len({tuple(c.token_ids) for c in run.completions}) > len(PROMPTS),
    ),
    Feature(
        "top-p",
        params={"temperature": 1.1, "seed": 6, "top_p": 0.9, "top_k": 60, "min_p": 0.001},
        changes_answer=True,
    ),
    Feature(
        "penalties",
        params={"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        changes_answer=True,
    ),
    Feature(
        "constraints",
        params={"logit_bias": {40: 3.0, 41: -50.0}, "bad_words": ["requ", "en", "a b"], "min_tokens": 6},
        changes_answer=True,
    ),
    Feature(
        "own processor",
        {"logits_processors": ["tests.end_to_end.custom_processors:NoRepeats"]},
        {"extra_args": {"no_repeats": True}},
        changes_answer=True,
    ),
    Feature(
        "stop expression",
        params={"stop_regex": [STOP_REGEX], "include_stop_str_in_output": True},
        changes_answer=True,
        is_at_work=lambda run: any(c.stop_reason == STOP_REGEX for c in run.completions),
    ),
    Feature(
        "logprobs",
        params={"logprobs": 3},
        changes_answer=True,
        is_at_work=lambda run: all(len(c.logprobs) == len(c.token_ids) for c in run.completions),
    ),
    Feature(
        "prompt logprobs",
        params={"prompt_logprobs": 2},
        changes_answer=True,
        is_at_work=lambda run: all(
            len(o.prompt_logprobs or []) == len(o.prompt_token_ids) for o in run.outputs
        ),
    ),
    Feature(
        "thinking budget",
        params={"thinking_budget": 4},
        changes_answer=True,
        is_at_work=lambda run: any("</think>" in text for text in run.texts),
    ),
)
FEATURES = (*PERFORMANCE, *ANSWERS)

CONTRADICTIONS = {
    frozenset({"structure", "thinking budget"}): "thinking_budget and structured_outputs contradict",
    **{
        frozenset({"async scheduling", method}): f"'{method}' guesses .* from tokens that the host knows"
        for method in ("ngram", "suffix", "early_exit")
    },
    **{
        frozenset({"async scheduling", "stages", method}): "does not go with pipeline_parallel_size"
        for method in ("draft_model", "eagle")
    },
    frozenset(
        {"stages", "early_exit"}
    ): "early_exit guesses from the first layers and the head, which no stage has",
    frozenset(
        {"stages", "eagle3"}
    ): "eagle3 guesses from hidden states of layers all over the model, which no stage",
}
"""Features that are refused together, and with which words."""

Pair = tuple[Feature, Feature]


def is_one_choice(pair: Pair) -> bool:
    """True for two values of one engine setting, of which an engine has one: those are no pair."""
    first, second = pair
    return any(second.engine.get(name, value) != value for name, value in first.engine.items())


def names(pair: Pair) -> frozenset[str]:
    return frozenset(feature.name for feature in pair)


def pair_id(pair: Pair) -> str:
    return " with ".join(feature.name for feature in pair)


def engine_settings(features: Sequence[Feature]) -> dict[str, Any]:
    merged: dict[str, Any] = {"enable_prefix_caching": False}
    for feature in features:
        merged.update(feature.engine)
    return merged


ALL_PAIRS: list[Pair] = [pair for pair in itertools.combinations(FEATURES, 2) if not is_one_choice(pair)]


def contradict(features: Sequence[Feature]) -> bool:
    together = {feature.name for feature in features}
    return any(contradiction <= together for contradiction in CONTRADICTIONS)


SERVED_PAIRS: list[Pair] = [pair for pair in ALL_PAIRS if not contradict(pair)]
MAX_ROW = 8
"""Features of a row. More would be fewer rows, in which some features leave others nothing to do."""

Row = tuple[Feature, ...]


def covering_rows() -> list[Row]:
    """Rows of compatible features with every served pair:
    a row grows by the feature that adds most new pairs.

    Pairs with "process" come first, so that few rows have it: to start a process takes seconds.
    """
    in_order = sorted(SERVED_PAIRS, key=lambda pair: "process" not in names(pair))
    served, missing = {names(pair) for pair in SERVED_PAIRS}, {names(pair) for pair in SERVED_PAIRS}

    def gain(feature: Feature, row: list[Feature]) -> int:
        pairs = {names((feature, other)) for other in row}
        may_join = pairs <= served and feature not in row and not contradict([*row, feature])
        return len(pairs & missing) if may_join else 0

    rows: list[Row] = []
    while missing:
        row = list(next(pair for pair in in_order if names(pair) in missing))
        while len(row) < MAX_ROW:
            gains = [gain(feature, row) for feature in FEATURES]
            if max(gains) == 0:
                break
            row.append(FEATURES[gains.index(max(gains))])
        missing.difference_update(names(pair) for pair in itertools.combinations(row, 2))
        rows.append(tuple(row))
    return rows


ROWS = covering_rows()


class Engines:
    """Engines by their settings; few are open at a time."""

    def __init__(
        self, model: Path, draft_models: dict[str, Path], adapter: LoRARequest, capacity: int
    ) -> None:
        """draft_models: by what features call them."""
        self._model, self._draft_models, self._adapter, self._capacity = (
            model,
            draft_models,
            adapter,
            capacity,
        )
        self._open: dict[str, LLM] = {}

    def run(self, features: Sequence[Feature]) -> Run:
        """Run all requests with these features on."""
        llm = self.get(engine_settings(features))
        prompts, asked = self.requests(llm, features)
        assert llm.reset_prefix_cache()
        if any(feature.is_seen_before for feature in features):
            llm.generate(prompts, **asked)
        before = llm.get_metrics()
        outputs = llm.generate(prompts, **asked)
        assert llm.reset_prefix_cache(), "a request left blocks behind"
        return Run(outputs, before, llm.get_metrics())

    def requests(
        self, llm: LLM, features: Sequence[Feature]
    ) -> tuple[list[dict[str, list[int]]], dict[str, Any]]:
        """Prompts, and the other arguments of ``generate``."""
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        for feature in features:
            params.update(feature.params)
        asked: dict[str, Any] = {"sampling_params": SamplingParams(**params), "use_tqdm": False}
        if any(feature.uses_adapters for feature in features):
            asked["lora_request"] = [self._adapter if adapted else None for adapted in ADAPTED]
        if any(feature.uses_priorities for feature in features):
            asked["priority"] = PRIORITIES
        thinking = llm.get_tokenizer().encode("<think>", add_special_tokens=False)
        return [{"prompt_token_ids": [*prompt, *thinking]} for prompt in PROMPTS], asked

    def close(self) -> None:
        for llm in self._open.values():
            llm.close()

    def get(self, settings: dict[str, Any]) -> LLM:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._open:
            if len(self._open) == self._capacity:
                self._open.pop(next(iter(self._open))).close()
            self._open[key] = self.make(settings)
        return self._open[key]

    def make(self, settings: dict[str, Any]) -> LLM:
        """A new engine, which the caller closes."""
        speculative = settings.get("speculative_config", {})
        if "model" in speculative:
            path = str(self._draft_models[speculative["model"]])
            settings = {**settings, "speculative_config": {**speculative, "model": path}}
        is_virtual = "pipeline_parallel_size" in settings and not settings.get("multiprocess")
        make = (
            virtual_llm if is_virtual else LLM
        )  # stages are threads, or processes of an engine in another one
        given = {"max_model_len": 64, "num_gpu_blocks_override": 65, **settings}
        return make(**tiny_settings(self._model, **given))


class Reference:
    """What engines without the features that must not change the answer say;
    every answer is computed once."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._answers: dict[frozenset[str], list[RequestOutput]] = {}

    def answer(self, features: Sequence[Feature]) -> list[RequestOutput]:
        wanted = [feature for feature in features if feature.changes_answer]
        key = frozenset(feature.name for feature in wanted)
        if key not in self._answers:
            self._answers[key] = self._engines.run(wanted).outputs
        return self._answers[key]


@pytest.fixture(scope="module")
def adapter(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    return random_adapter(tmp_path_factory.mktemp("adapters") / "adapter", tiny_model("llama"), rank=8)


@pytest.fixture(scope="module")
def draft_models(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    heads = tmp_path_factory.mktemp("heads")
    return {
        "the other model": tiny_model("qwen2-window"),
        "an EAGLE head": random_head(heads / "eagle", "eagle"),
        "an EAGLE-3 head": random_head(heads / "eagle3", "eagle3"),
    }


@pytest.fixture(scope="module")
def engines(tiny_model: TinyModel, draft_models: dict[str, Path], adapter: LoRARequest) -> Iterator[Engines]:
    opened = Engines(tiny_model("llama"), draft_models, adapter, capacity=1)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def reference(
    tiny_model: TinyModel, draft_models: dict[str, Path], adapter: LoRARequest
) -> Iterator[Reference]:
    opened = Engines(tiny_model("llama"), draft_models, adapter, capacity=4)
    yield Reference(opened)
    opened.close()


def shown(outputs: list[RequestOutput]) -> list[Any]:
    """Everything that is equal in equal answers, but for the values of log-probabilities."""
    return [
        (
            [(list(c.token_ids), c.text, c.finish_reason, c.stop_reason) for c in output.outputs],
            [[entry and list(entry) for entry in entries or []] for entries in logprob_maps(output)],
            output.error,
        )
        for output in outputs
    ]


def logprob_maps(output: RequestOutput) -> list[Any]:
    return [output.prompt_logprobs, *(completion.logprobs for completion in output.outputs)]


def logprob_values(outputs: list[RequestOutput]) -> list[float]:
    entries = [
        entry for o in outputs for entries in logprob_maps(o) for entry in entries or [] if entry is not None
    ]
    return [value.logprob for entry in entries for value in entry.values()]


def check(engines: Engines, reference: Reference, features: Sequence[Feature]) -> set[str]:
    """Compare the answer of an engine with these features; the names of those that were at work."""
    run, expected = engines.run(features), reference.answer(features)
    assert shown(run.outputs) == shown(expected)
    assert logprob_values(run.outputs) == pytest.approx(logprob_values(expected), abs=1e-4)
    return {feature.name for feature in features if feature.is_at_work(run)}


def check_pair(engines: Engines, reference: Reference, pair: Pair) -> None:
    at_work = check(engines, reference, pair)
    for feature in pair:
        assert feature.name in at_work, f"{feature.name} was not at work"


def test_rows_of_features_give_the_answer_of_the_plain_engine_and_every_pair_is_at_work(
    engines: Engines, reference: Reference
) -> None:
    proven: set[frozenset[str]] = set()
    for row in ROWS:
        try:
            at_work = check(engines, reference, row)
        except AssertionError as error:
            for pair in itertools.combinations(row, 2):  # which two do not get on?
                check_pair(engines, reference, pair)
            raise AssertionError(
                f"{[f.name for f in row]} fail together, but no two of them alone"
            ) from error
        proven |= {frozenset(pair) for pair in itertools.combinations(at_work, 2)}
    left = [pair for pair in SERVED_PAIRS if names(pair) not in proven]
    for pair in left:
        check_pair(engines, reference, pair)
    print(f"{len(SERVED_PAIRS)} pairs in {len(ROWS)} rows, {len(left)} of them by themselves")


def test_the_rows_contain_every_pair_and_no_contradiction() -> None:
    contained = [names(pair) for row in ROWS for pair in itertools.combinations(row, 2)]
    assert set(contained) == {names(pair) for pair in SERVED_PAIRS}


@pytest.mark.slow
@pytest.mark.parametrize("pair", SERVED_PAIRS, ids=pair_id)
def test_a_pair_of_features_gives_the_answer_of_the_plain_engine(
    engines: Engines, reference: Reference, pair: Pair
) -> None:
    check_pair(engines, reference, pair)


@pytest.mark.parametrize("feature", ANSWERS, ids=lambda feature: feature.name)
def test_a_feature_that_changes_answers_changes_this_one(reference: Reference, feature: Feature) -> None:
    assert shown(reference.answer([feature])) != shown(reference.answer([]))


@pytest.mark.parametrize("together", CONTRADICTIONS, ids=lambda together: " with ".join(sorted(together)))
def test_features_that_contradict_each_other_are_refused_with_a_sentence(
    engines: Engines, together: frozenset[str]
) -> None:
    features = [feature for feature in FEATURES if feature.name in together]
    assert {feature.name for feature in features} == together
    with pytest.raises((RequestError, ConfigError), match=CONTRADICTIONS[together]):
        engines.run(features)


def test_every_two_features_are_a_pair_a_contradiction_or_one_choice() -> None:
    left_out = [names(pair) for pair in itertools.combinations(FEATURES, 2) if is_one_choice(pair)]
    drafters = {feature.name for feature in FEATURES if "speculative_config" in feature.engine}
    assert {*left_out} == {frozenset(pair) for pair in itertools.combinations(drafters, 2)}
    assert {*map(names, ALL_PAIRS)} >= {together for together in CONTRADICTIONS if len(together) == 2}
