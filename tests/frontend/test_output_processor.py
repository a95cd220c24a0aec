"""Engine outputs in, request outputs out; the judge is decoding everything at once and cutting it by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.messages import EngineEvent, EngineOutput, EventType, FinishReason
from minivllm.processing.input_processor import InputProcessor, PreparedRequest
from minivllm.processing.output_processor import OutputProcessor
from minivllm.processing.outputs import RequestMetrics, RequestOutput
from minivllm.sampling_params import OutputKind, SamplingParams
from minivllm.tokenizer.detokenizer import TokenDecoder
from tests.frontend.scripted_client import EOS, engine_config, logprobs_at
from tests.frontend.small_tokenizers import byte_level_bpe, wrapped

pytestmark = pytest.mark.smoke

BACKEND = byte_level_bpe()
DECODER = TokenDecoder(BACKEND)
VOCAB = BACKEND.get_vocab_size()
KINDS = list(OutputKind)


def ids_of(text: str) -> list[int]:
    return BACKEND.encode(text).ids


class Frontend:
    """Input and output processor around an engine played by the test."""

    def __init__(self, decoder: TokenDecoder | None = DECODER) -> None:
        self.inputs = InputProcessor(
            engine_config(max_model_len=4096),
            wrapped(BACKEND),
            model_vocab_size=VOCAB + 10,
            eos_token_ids=(EOS,),
        )
        self.outputs = OutputProcessor(decoder)

    def add(self, prompt_ids: tuple[int, ...] = (1, 2, 3), **params: Any) -> PreparedRequest:
        prepared = self.inputs.prepare(
            "mine", {"prompt_token_ids": list(prompt_ids)}, SamplingParams(max_tokens=None, **params)
        )
        self.outputs.add_request(prepared)
        return prepared

    def step(self, *outputs: EngineOutput) -> list[RequestOutput]:
        return self.outputs.process_outputs(outputs).request_outputs


def merged(outputs: list[RequestOutput], index: int = 0) -> tuple[str, list[int], str | None]:
    """Text, ids and finish reason of one completion out of a delta stream."""
    parts = [part for output in outputs for part in output.outputs if part.index == index]
    return "".join(p.text for p in parts), [i for p in parts for i in p.token_ids], parts[-1].finish_reason


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB + 5), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
    st.sampled_from(KINDS),
    st.booleans(),
)
def test_every_kind_of_output_tells_the_same_story(
    ids: list[int], draw: random.Random, kind: OutputKind, skip: bool
) -> None:
    frontend = Frontend()
    prepared = frontend.add(output_kind=kind, skip_special_tokens=skip, logprobs=1)
    outputs: list[RequestOutput] = []
    position = 0
    while position < len(ids):
        count = draw.randrange(1, 5)
        chunk, position = ids[position : position + count], position + count
        outputs += frontend.step(
            EngineOutput(
                request_id=prepared.sequences[0].request_id,
                new_token_ids=chunk,
                logprobs=[logprobs_at(i, 1) for i in chunk],
                finish_reason=FinishReason.LENGTH if position >= len(ids) else None,
            )
        )
    whole = BACKEND.decode(ids, skip_special_tokens=skip)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1].outputs[0]
    assert last.cumulative_logprob == pytest.approx(-0.5 * len(ids))
    if kind is OutputKind.DELTA:
        assert merged(outputs) == (whole, ids, "length")
        assert sum(len(output.outputs[0].logprobs or []) for output in outputs) == len(ids)
    else:
        assert (last.text, last.token_ids, last.finish_reason) == (whole, ids, "length")
        assert [next(iter(entry)) for entry in last.logprobs or []] == ids
        assert all(whole.startswith(output.outputs[0].text) for output in outputs)
        assert kind is not OutputKind.FINAL_ONLY or len(outputs) == 1
    assert not frontend.outputs.has_unfinished_requests()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens_ends_the_request_and_aborts_it_in_the_engine(
    kind: OutputKind, include: bool
) -> None:
    frontend = Frontend()
    prepared = frontend.add(stop=["x STOP y"], output_kind=kind, include_stop_str_in_output=include)
    name = prepared.sequences[0].request_id
    ids = ids_of("abx STOP yz and more")
    outputs: list[RequestOutput] = []
    count = 0
    for count in range(len(ids)):
        processed = frontend.outputs.process_outputs(
            [EngineOutput(request_id=name, new_token_ids=[ids[count]])]
        )
        outputs += processed.request_outputs
        if processed.sequence_ids_to_abort:
            break
    assert processed.sequence_ids_to_abort == [name]
    text = (
        "".join(o.outputs[0].text for o in outputs)
        if kind is OutputKind.DELTA
        else outputs[-1].outputs[0].text
    )
    assert text == ("abx STOP y" if include else "ab")
    last = outputs[-1].outputs[0]
    assert (outputs[-1].finished, last.finish_reason, last.stop_reason) == (True, "stop", "x STOP y")
    assert "x STOP y" in BACKEND.decode(ids[: count + 1]) and "x STOP y" not in BACKEND.decode(ids[:count])
    assert frontend.step(EngineOutput(request_id=name, new_token_ids=[5])) == []


def test_tokens_behind_the_stop_string_in_the_same_step_are_dropped() -> None:
    frontend = Frontend()
    prepared = frontend.add(stop=["b"], logprobs=0)
    ids = ids_of("a") + ids_of("b") + ids_of("c")
    processed = frontend.outputs.process_outputs(
        [
            EngineOutput(
                request_id=prepared.sequences[0].request_id,
                new_token_ids=ids,
                logprobs=[logprobs_at(i, 0) for i in ids],
                finish_reason=FinishReason.LENGTH,
            )
        ]
    )
    (completion,) = processed.request_outputs[0].outputs
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("a", ids[:2], "b")
    assert completion.logprobs is not None and len(completion.logprobs) == 2
    assert processed.request_outputs[0].metrics.num_generation_tokens == 2
    assert processed.sequence_ids_to_abort == []  # the engine had finished it by itself


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop_reason", [None, 65])
def test_ending_token_stays_in_the_ids_and_out_of_the_text(include: bool, stop_reason: int | None) -> None:
    frontend = Frontend()
    prepared = frontend.add(include_stop_str_in_output=include, skip_special_tokens=False)
    ids = [*ids_of("the dog"), 65 if stop_reason else BACKEND.token_to_id("<|end|>")]
    (output,) = frontend.step(
        EngineOutput(
            request_id=prepared.sequences[0].request_id,
            new_token_ids=ids,
            finish_reason=FinishReason.STOP,
            stop_reason=stop_reason,
        )
    )
    (completion,) = output.outputs
    assert completion.token_ids == ids
    assert completion.text == BACKEND.decode(ids if include else ids[:-1], skip_special_tokens=False)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_reason)


def test_held_back_text_and_half_characters_come_out_at_the_end() -> None:
    frontend = Frontend()
    prepared = frontend.add(stop=["end of story"], output_kind=OutputKind.DELTA)
    name = prepared.sequences[0].request_id
    ids = ids_of("the end of") + ids_of("😀")[:1]
    outputs = [
        output for i in ids for output in frontend.step(EngineOutput(request_id=name, new_token_ids=[i]))
    ]
    assert merged(outputs)[0] == "the "
    outputs += frontend.step(EngineOutput(request_id=name, finish_reason=FinishReason.LENGTH))
    assert merged(outputs)[0] == BACKEND.decode(ids)


def test_n_completions_come_in_order_of_their_index() -> None:
    ids = {0: ids_of("zero zero zero"), 1: ids_of("one"), 2: ids_of("two two")}
    for kind in KINDS:
        frontend = Frontend()
        prepared = frontend.add(n=3, output_kind=kind)
        names = [request.request_id for request in prepared.sequences]
        outputs: list[RequestOutput] = []
        for step in range(max(map(len, ids.values()))):
            alive = [index for index in (2, 0, 1) if step < len(ids[index])]
            outputs += frontend.step(
                *(
                    EngineOutput(
                        request_id=names[index],
                        new_token_ids=[ids[index][step]],
                        finish_reason=FinishReason.LENGTH if step == len(ids[index]) - 1 else None,
                    )
                    for index in alive
                )
            )
            if kind is OutputKind.DELTA:
                assert [c.index for c in outputs[-1].outputs] == sorted(alive)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind is OutputKind.DELTA:
            assert [merged(outputs, index)[1] for index in range(3)] == [ids[0], ids[1], ids[2]]
        else:
            assert [c.token_ids for c in outputs[-1].outputs] == [ids[0], ids[1], ids[2]]
            assert [c.text for c in outputs[-1].outputs] == ["zero zero zero", "one", "two two"]
        assert kind is not OutputKind.FINAL_ONLY or len(outputs) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_arrive_in_chunks_and_are_shown_once_complete(kind: OutputKind) -> None:
    frontend = Frontend()
    prompt = (10, 11, 12, 13, 14)
    prepared = frontend.add(prompt, prompt_logprobs=2, output_kind=kind, n=2)
    names = [request.request_id for request in prepared.sequences]
    for chunk in (prompt[1:3], prompt[3:]):
        entries = [logprobs_at(i, 2) for i in chunk]
        assert frontend.step(EngineOutput(request_id=names[0], prompt_logprobs=entries)) == []
    outputs = frontend.step(EngineOutput(request_id=names[0], new_token_ids=[4]))
    outputs += frontend.step(
        *(EngineOutput(request_id=n, new_token_ids=[5], finish_reason=FinishReason.LENGTH) for n in names)
    )
    shown = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(shown) == {OutputKind.CUMULATIVE: 2, OutputKind.DELTA: 1, OutputKind.FINAL_ONLY: 1}[kind]
    first, *rest = shown[0]
    assert first is None
    assert [next(iter(entry)) for entry in rest if entry] == list(prompt[1:])
    assert all(entry is not None and len(entry) == 3 for entry in rest)


def test_logprobs_name_token_rank_and_text_and_the_token_itself_comes_first() -> None:
    frontend = Frontend()
    prepared = frontend.add(logprobs=2)
    dog = BACKEND.token_to_id("a")
    (output,) = frontend.step(
        EngineOutput(
            request_id=prepared.sequences[0].request_id,
            new_token_ids=[dog],
            logprobs=[logprobs_at(dog, 2)],
            finish_reason=FinishReason.LENGTH,
        )
    )
    assert output.outputs[0].logprobs is not None
    entries = list(output.outputs[0].logprobs[0].items())
    assert [(token, e.rank, e.logprob) for token, e in entries] == [
        (dog, 3, -0.5),
        (dog + 1, 1, -1.0),
        (dog + 2, 2, -2.0),
    ]
    assert [e.decoded_token for _, e in entries] == [BACKEND.decode([token]) for token, _ in entries]


def test_what_was_handed_out_never_changes_afterwards() -> None:
    frontend = Frontend()
    prepared = frontend.add(logprobs=0)
    name = prepared.sequences[0].request_id
    earlier = []
    for i in range(5):
        entries = [logprobs_at(i + 70, 0)]
        (output,) = frontend.step(EngineOutput(request_id=name, new_token_ids=[i + 70], logprobs=entries))
        earlier.append(output.outputs[0])
    assert [len(completion.token_ids) for completion in earlier] == [1, 2, 3, 4, 5]
    assert [len(completion.logprobs or []) for completion in earlier] == [1, 2, 3, 4, 5]


def test_without_a_tokenizer_ids_come_back_and_text_stays_empty() -> None:
    frontend = Frontend(decoder=None)
    prepared = frontend.add(logprobs=0)
    (output,) = frontend.step(
        EngineOutput(
            request_id=prepared.sequences[0].request_id,
            new_token_ids=[4, EOS],
            logprobs=[logprobs_at(4, 0), logprobs_at(EOS, 0)],
            finish_reason=FinishReason.STOP,
        )
    )
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("", [4, EOS])
    assert completion.logprobs is not None and completion.logprobs[0][4].decoded_token is None


def test_error_of_one_request_reaches_it_alone() -> None:
    frontend = Frontend()
    bad, good = frontend.add(), frontend.add()
    bad_name, good_name = bad.sequences[0].request_id, good.sequences[0].request_id
    first, second = frontend.step(
        EngineOutput(
            request_id=bad_name, finish_reason=FinishReason.ERROR, error="The grammar has no rules."
        ),
        EngineOutput(request_id=good_name, new_token_ids=[70]),
    )
    assert (first.finished, first.error) == (True, "The grammar has no rules.")
    assert first.outputs[0].finish_reason == "error"
    assert (second.finished, second.error) == (False, None)


def test_abort_ends_all_requests_of_an_id_with_what_they_held_back_and_is_idempotent() -> None:
    frontend = Frontend()
    prepared = frontend.add(stop=["fox trot"], n=2)
    frontend.add()
    names = [request.request_id for request in prepared.sequences]
    frontend.step(EngineOutput(request_id=names[1], new_token_ids=ids_of("quick fox"), finish_reason=None))
    outputs, to_abort = frontend.outputs.abort_requests([prepared.internal_id])
    assert to_abort == names
    assert [c.finish_reason for c in outputs[0].outputs] == ["abort", "abort"]
    assert [c.text for c in outputs[0].outputs] == ["", "quick fox"]
    assert frontend.outputs.abort_requests([prepared.internal_id]) == ([], [])
    assert frontend.outputs.num_unfinished_requests == 1
    assert len(frontend.outputs.abort_requests(["mine"])[1]) == 1
    assert not frontend.outputs.has_unfinished_requests()
    assert frontend.outputs._sequences == {}


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_answer_that_is_ended_from_outside_holds_no_half_of_a_character(reason: FinishReason) -> None:
    frontend = Frontend()
    frontend.add()
    token_ids = ids_of("so 👩")
    assert BACKEND.decode(token_ids[:-1]).endswith("\ufffd")
    (name,) = frontend.outputs._sequences
    frontend.step(EngineOutput(request_id=name, new_token_ids=token_ids[:-1], finish_reason=None))
    if reason is FinishReason.ABORT:
        (output,), _ = frontend.outputs.abort_requests(["mine"])
    else:
        (output,) = frontend.step(EngineOutput(request_id=name, new_token_ids=[], finish_reason=reason))
    assert output.outputs[0].text == "so "


def test_nothing_is_kept_of_finished_requests() -> None:
    frontend, draw = Frontend(), random.Random(0)
    alive: list[PreparedRequest] = []
    for _ in range(500):
        alive.append(frontend.add(n=draw.randrange(1, 4), stop=["the"], logprobs=1))
        request = alive.pop(draw.randrange(len(alive)))
        if draw.random() < 0.5:
            frontend.outputs.abort_requests([request.internal_id])
        else:
            frontend.step(
                *(
                    EngineOutput(
                        request_id=s.request_id, new_token_ids=[70], finish_reason=FinishReason.LENGTH
                    )
                    for s in request.sequences
                )
            )
    assert frontend.outputs._requests == {} and frontend.outputs._sequences == {}


def test_metrics_follow_from_the_events_and_the_arrival_of_tokens() -> None:
    metrics = RequestMetrics(arrival_time=10.0, num_prompt_tokens=100, num_cached_tokens=60)
    events = [(EventType.QUEUED, 10.5), (EventType.SCHEDULED, 11.0), (EventType.PREEMPTED, 11.5)]
    metrics.record_events(EngineEvent(kind, at) for kind, at in [*events, (EventType.SCHEDULED, 12.0)])
    assert metrics.ttft is None and metrics.decode_tokens_per_second is None and metrics.tpot is None
    metrics.record_tokens(1, now=13.0)
    assert metrics.decode_tokens_per_second is None
    metrics.record_tokens(3, now=14.0)
    metrics.record_tokens(1, now=15.0)
    metrics.finished_time = 16.0
    assert (metrics.queued_time, metrics.first_scheduled_time, metrics.num_preemptions) == (10.5, 11.0, 1)
    assert (metrics.ttft, metrics.queue_time, metrics.prefill_time, metrics.decode_time) == (
        3.0,
        1.0,
        2.0,
        2.0,
    )
    assert metrics.prefill_tokens_per_second == 20.0
    assert metrics.decode_tokens_per_second == 2.0
    assert (metrics.tpot, metrics.e2e_latency) == (0.5, 6.0)


def test_cached_tokens_of_n_completions_are_those_of_the_first() -> None:
    frontend = Frontend()
    prepared = frontend.add(n=2)
    outputs = [
        EngineOutput(
            request_id=s.request_id,
            new_token_ids=[70],
            finish_reason=FinishReason.LENGTH,
            num_cached_tokens=cached,
        )
        for s, cached in zip(prepared.sequences, (1, 2))
    ]
    (output,) = frontend.step(*outputs)
    assert output.num_cached_tokens == output.metrics.num_cached_tokens == 1
