"""What would take too long or too much is refused, with a sentence, and costs its neighbours nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams, StructuredOutputs
from minivllm.errors import ModelError, RequestError
from minivllm.messages import EngineRequest
from minivllm.request import Request, RequestStatus
from minivllm.sampling_params import MAX_GRAMMAR_BYTES
from minivllm.structured_output.compiler import GrammarCompiler
from minivllm.structured_output.grammar import Grammar
from minivllm.structured_output.manager import GrammarCache, StructuredOutputManager
from tests.structured_output.small_vocabulary import EOS, VOCAB_SIZE, SmallVocabulary, allowed, engine_config

ALL_BUT_ONE = {
    "json": {"type": "null"},
    "regex": "a",
    "choice": ["a"],
    "grammar": 'start: "a"',
    "json_object": True,
}


class Counting(GrammarCompiler):
    """Counts what it compiles."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        super().__init__(compiler._config, compiler._vocab_size)
        self.num_compiled = 0

    def compile(self, structured: StructuredOutputs, eos_token_ids: list[int]) -> Grammar:
        self.num_compiled += 1
        return super().compile(structured, eos_token_ids)


def make_request(request_id: str, **structured: Any) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputs(**structured))
    return Request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[5],
            sampling_params=params,
            max_tokens=8,
            seed=0,
            arrival_time=0.0,
            eos_token_ids=EOS,
        )
    )


@pytest.mark.parametrize("first", ALL_BUT_ONE)
@pytest.mark.parametrize("second", ALL_BUT_ONE)
def test_exactly_one_structure_is_given(first: str, second: str) -> None:
    given = {name: ALL_BUT_ONE[name] for name in {first, second}}
    if first == second:
        assert getattr(StructuredOutputs(**given), first)
    else:
        with pytest.raises(RequestError, match="exactly one of json, regex, choice, grammar, json_object"):
            StructuredOutputs(**given)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "none of them"),
        ({"json": 7}, "json is of type int"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"choice": []}, "choice has 0 strings, but must have 1 to 1000"),
        ({"choice": "yes"}, "choice is 'yes', but must be a list of 1 to 1000 strings"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"regex": ""}, "non-empty text"),
        ({"regex": "\ud800"}, "half a surrogate pair"),
        ({"regex": "a", "disable_any_whitespace": True}, "Whitespace options are for json"),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "contradict each other",
        ),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "may have at most"),
        ({"json": {"enum": ["x" * 1_000_000]}}, "may have at most"),
        ({"schema": {}}, "'schema' is not an option of structured outputs"),
    ],
)
def test_structures_that_make_no_sense_are_refused_in_a_sentence(
    fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        StructuredOutputs(**fields)


def test_ignore_eos_contradicts_a_structure() -> None:
    with pytest.raises(RequestError, match="contradict"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "invalid regex"),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "too deeply nested"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "recursion"),
    ({"grammar": "start: missing"}, "missing"),
    (
        {"json": {"properties": {"a": {"type": "string", "format": 3}}}},
        r"at \$\.properties\.a has 3 as 'format'",
    ),
    (
        {"json": {"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        r"at \$\.items: the alternatives of oneOf",
    ),
    ({"json": {"$defs": {"x": {"enum": []}}, "$ref": "#/$defs/x"}}, "Unsatisfiable"),
    ({"json": {"$ref": "#/$defs/nowhere"}}, "nothing in the schema"),
    ({"json": {"type": "string", "not": {}, "x-guidance": {"lenient": True}}}, r"'not' at \$,"),
    ({"json": {"type": "array", "uniqueItems": True}}, r"'uniqueItems' at \$,"),
    ({"json": {"items": {"$ref": "https://example.com/x"}}}, r"at \$\.items, but only references within"),
    ({"json": json.loads('{"items":' * 120 + "{}" + "}" * 120)}, "nested deeper than 100"),
]


@pytest.mark.parametrize(("structured", "complaint"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_kept_to_is_refused(
    vocabulary: SmallVocabulary, structured: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        vocabulary.grammar(**structured)


@pytest.mark.parametrize("kind", ["string", "integer", "number"])
@pytest.mark.parametrize("name", ["color", "int32", "int64", "double", "binary", "password"])
def test_formats_that_are_not_known_are_annotations(
    vocabulary: SmallVocabulary, kind: str, name: str
) -> None:
    """As JSON schema has it, and as schemas made by OpenAPI generators need it."""
    plain = vocabulary.grammar(json={"type": kind})
    assert allowed(vocabulary.grammar(json={"type": kind, "format": name})) == allowed(plain)


def test_a_regex_whose_masks_take_too_long_ends_its_request_only(tiny_model: Callable[..., Path]) -> None:
    hard = StructuredOutputs(regex="(([a-z]*[0-9]*){1,50}){1,50}z")
    sizes: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 50, "block_size": 16}
    with LLM(str(tiny_model("llama")), enforce_eager=True, **sizes) as llm:
        plain = SamplingParams(max_tokens=40, seed=1)
        [alone] = llm.generate("Hello", plain)
        failing = SamplingParams(max_tokens=100, seed=1, structured_outputs=hard, min_tokens=90)
        neighbour, failed = llm.generate(["Hello", "Hello"], [plain, failing])
        assert neighbour.outputs[0].token_ids == alone.outputs[0].token_ids
        assert failed.outputs[0].finish_reason == "error"
        assert "could not be continued" in str(failed.error)
        assert re.fullmatch("[a-z0-9]*", failed.outputs[0].text), (
            "the token that no mask allowed is not delivered"
        )
        assert llm.get_metrics().kv_cache_usage == 0


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no tokenizer"):
        GrammarCompiler(engine_config(tmp_path), VOCAB_SIZE).compile(StructuredOutputs(regex="a"), EOS)


def test_the_cache_is_bounded_in_bytes_and_drops_the_least_recently_used(vocabulary: SmallVocabulary) -> None:
    structures = [StructuredOutputs(regex="a" * length) for length in (1, 1000, 2000, 3000)]
    grammar = vocabulary.grammar(regex="a")
    whole = GrammarCache(10**9)
    for structured in structures[:3]:
        whole.put(structured, grammar)
    cache = GrammarCache(whole.num_bytes)
    for structured in structures[:3]:
        cache.put(structured, grammar)
    assert cache.get(structures[0]) is grammar
    cache.put(structures[3], "why not")
    assert cache.num_bytes <= whole.num_bytes
    assert cache.get(structures[1]) is None
    assert cache.get(structures[0]) is grammar
    assert cache.get(structures[3]) == "why not"
    cache.put(structures[3], grammar)
    assert len(cache) == 3 or cache.num_bytes <= whole.num_bytes
    tiny = GrammarCache(1)
    tiny.put(structures[0], grammar)
    assert (len(tiny), tiny.num_bytes) == (0, 0)


def test_equal_structures_are_compiled_once_and_a_full_cache_still_serves(word_tokenizer: Path) -> None:
    for cache_bytes, hits in ((10**9, 1), (1, 0)):
        manager = StructuredOutputManager(engine_config(word_tokenizer), VOCAB_SIZE, cache_bytes=cache_bytes)
        counted = Counting(manager._compiler)
        manager._compiler = counted
        requests = [make_request(str(number), regex="[ab]+") for number in range(3)]
        for request in requests:
            manager.prepare(request)
            assert request.status is RequestStatus.BLOCKED
        released: list[tuple[Request, str | None]] = []
        while len(released) < 3:
            released += manager.poll(may_wait=True)
        assert released == [(request, None) for request in requests]
        assert counted.num_compiled == 1
        assert len({id(request.token_mask) for request in requests}) == 3
        later = make_request("later", regex="[ab]+")
        manager.prepare(later)
        assert (later.status is RequestStatus.WAITING) == bool(hits)
        manager.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux has priorities of threads.")
def test_compiling_steps_back_for_the_engine_but_reading_the_vocabulary_does_not(
    word_tokenizer: Path,
) -> None:
    class Watched(GrammarCompiler):
        def read_vocabulary(self, eos_token_ids: list[int]) -> Any:
            seen.append(("vocabulary", os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            return super().read_vocabulary(eos_token_ids)

        def compile(self, structured: StructuredOutputs, eos_token_ids: list[int]) -> Grammar:
            seen.append(("grammar", os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            return super().compile(structured, eos_token_ids)

    seen: list[tuple[str, int]] = []
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    manager = StructuredOutputManager(engine_config(word_tokenizer), VOCAB_SIZE)
    manager._compiler = Watched(engine_config(word_tokenizer), VOCAB_SIZE)
    manager.prepare(make_request("0", regex="a"))
    while not list(manager.poll(may_wait=True)):
        pass
    manager.shutdown()
    assert seen[:2] == [("vocabulary", own), ("grammar", 15)]


def test_a_grammar_that_takes_too_long_is_given_up_and_aborted_requests_are_forgotten(
    word_tokenizer: Path,
) -> None:
    manager = StructuredOutputManager(engine_config(word_tokenizer), VOCAB_SIZE, seconds=0.0)
    never: Future[Grammar] = Future()
    manager._compiler.compile = lambda *_: never.result()  # type: ignore[method-assign]
    slow, aborted = make_request("slow", regex="a"), make_request("aborted", regex="b")
    for request in (slow, aborted):
        manager.prepare(request)
    aborted.status = RequestStatus.FINISHED_ABORTED
    [(request, error)] = manager.poll(may_wait=True)
    assert request is slow
    assert "within 0 s" in str(error)
    assert list(manager.poll(may_wait=True)) == []
    never.set_exception(RequestError("never mind"))
    manager.shutdown()


def test_the_tokenizer_named_beside_the_model_is_the_one_that_counts(
    word_tokenizer: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(engine_config(tmp_path), tokenizer=str(word_tokenizer))
    assert GrammarCompiler(config, VOCAB_SIZE).compile(StructuredOutputs(regex="a"), EOS) is not None
    with pytest.raises(ModelError, match="no tokenizer"):
        GrammarCompiler(engine_config(tmp_path), VOCAB_SIZE).compile(StructuredOutputs(regex="a"), EOS)


def test_a_model_without_a_tokenizer_says_that_structures_need_one(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model("llama").iterdir():
        if "token" not in file.name:
            (bare / file.name).symlink_to(file)
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with (
        LLM(str(bare), enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9) as llm,
        pytest.raises(RequestError, match="structured_outputs needs a tokenizer"),
    ):
        llm.generate({"prompt_token_ids": [5]}, params)
