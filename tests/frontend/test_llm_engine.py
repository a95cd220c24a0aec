"""LLMEngine and LLM over a client that plays the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, ContextLengthError, EngineDeadError, ModelError, RequestError
from minivllm.frontend.llm import LLM
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.messages import EngineRequest
from minivllm.processing.input_processor import default_sampling_params
from minivllm.processing.outputs import RequestOutput
from minivllm.sampling_params import FALLBACK_SAMPLING, OutputKind, SamplingParams
from tests.frontend.scripted_client import EOS, ScriptedClient, engine_config
from tests.frontend.small_tokenizers import byte_level_bpe, wrapped

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOKENIZER = wrapped(byte_level_bpe(), TEMPLATE)
END = TOKENIZER.encode("<|end|>")[0]


def echo(request: EngineRequest) -> list[int] | str:
    """Says the prompt again and ends; every sequence of n gets as many exclamation marks as its place."""
    marks = TOKENIZER.encode("!") * int(request.request_id.partition("-")[2] or 0)
    return [*request.prompt_token_ids, *marks, END]


def client(script: Any = echo, **options: Any) -> ScriptedClient:
    return ScriptedClient(script, vocab_size=TOKENIZER.vocab_size, eos_token_ids=(END,), **options)


def drain(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


GENEROUS = SamplingParams(max_tokens=None)


def test_delta_stream_adds_up_to_the_answer() -> None:
    with LLMEngine(client(), TOKENIZER) as engine:
        name = engine.add_request(
            None, "Größe 😀", SamplingParams(max_tokens=None, output_kind=OutputKind.DELTA)
        )
        outputs = drain(engine)
    assert {output.request_id for output in outputs} == {name}
    assert "".join(output.outputs[0].text for output in outputs) == "Größe 😀"
    assert len(outputs) == len(TOKENIZER.encode("Größe 😀")) + 1
    metrics = outputs[-1].metrics
    assert metrics.num_generation_tokens == len(outputs)
    assert (
        metrics.first_scheduled_time == 2.0 and metrics.ttft is not None and metrics.finished_time is not None
    )


def test_two_requests_with_the_same_id_are_both_served() -> None:
    engine = LLMEngine(client(), TOKENIZER)
    for text in ("fox", "lazy dog"):
        assert engine.add_request("same", text, GENEROUS) == "same"
    finished = [output.outputs[0].text for output in drain(engine) if output.finished]
    assert sorted(finished) == ["fox", "lazy dog"]


def test_stop_string_frees_the_sequence_in_the_engine() -> None:
    core = client()
    engine = LLMEngine(core, TOKENIZER)
    engine.add_request("a", "one STOP two", SamplingParams(max_tokens=None, stop=["STOP"]))
    last = drain(engine)[-1].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == ("one ", "stop", "STOP")
    assert core.running == {} and core.aborted == [core.requests[0].request_id]


def test_abort_keeps_what_was_said_and_frees_the_engine() -> None:
    core = client()
    engine = LLMEngine(core, TOKENIZER)
    engine.add_request("a", "the quick brown fox", GENEROUS)
    engine.step()
    (output,) = engine.abort_request(["a", "never heard of"])
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.token_ids) == (
        "abort",
        core.requests[0].prompt_token_ids[:1],
    )
    assert completion.text == TOKENIZER.decode(completion.token_ids)
    assert core.running == {} and not engine.has_unfinished_requests()
    assert engine.abort_request(["a"]) == []


def test_request_the_core_refuses_half_way_leaves_nothing_behind() -> None:
    def refuses_the_third(request: EngineRequest) -> list[int]:
        if request.request_id.endswith("-2"):
            raise RequestError("No room.")
        return [5]

    core = client(refuses_the_third)
    engine = LLMEngine(core, TOKENIZER)
    with pytest.raises(RequestError, match="No room"):
        engine.add_request("a", "fox", SamplingParams(n=3))
    assert core.running == {} and not engine.has_unfinished_requests()


def test_closed_engine_says_so_and_closes_once() -> None:
    core = client()
    engine = LLMEngine(core, TOKENIZER)
    with engine:
        pass
    engine.close()
    assert core.closed == 1
    for action in (
        engine.step,
        engine.stats,
        engine.reset_prefix_cache,
        lambda: engine.add_request("a", "b"),
    ):
        with pytest.raises(EngineDeadError, match="closed"):
            action()


def test_model_without_tokenizer_serves_token_ids_only() -> None:
    engine = LLMEngine(client())
    assert not engine.has_tokenizer
    engine.add_request("a", {"prompt_token_ids": [70, 71]}, GENEROUS)
    last = drain(engine)[-1].outputs[0]
    assert (last.text, last.token_ids) == ("", [70, 71, END])
    with pytest.raises(RequestError, match="no tokenizer"):
        _ = engine.tokenizer


# LLM


def llm(script: Any = echo, **options: Any) -> tuple[LLM, ScriptedClient]:
    core = client(script, **options)
    return LLM(engine=LLMEngine(core, TOKENIZER)), core


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts_whenever_they_finish() -> None:
    prompts = [
        "a long text that takes a while",
        "x",
        {"prompt": "the fox"},
        {"prompt_token_ids": TOKENIZER.encode("dog")},
    ]
    outputs = llm()[0].generate(prompts, GENEROUS)
    assert texts(outputs) == ["a long text that takes a while", "x", "the fox", "dog"]
    assert [output.prompt for output in outputs] == ["a long text that takes a while", "x", "the fox", None]
    assert all(output.finished and output.num_cached_tokens == 2 for output in outputs)


def test_single_prompt_in_any_form_gives_a_list_of_one_and_none_gives_none() -> None:
    model = llm()[0]
    for prompt in ("fox", {"prompt": "fox"}, ["fox"], ("fox",)):
        assert texts(model.generate(prompt, GENEROUS)) == ["fox"]
    assert model.generate([], GENEROUS) == []


def test_each_prompt_can_have_its_own_parameters_and_streams_are_not_built() -> None:
    model, core = llm()
    params = [SamplingParams(max_tokens=count, output_kind=OutputKind.DELTA) for count in (1, 2)]
    outputs = model.generate(["the quick brown fox"] * 2, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert all(r.sampling_params.output_kind is OutputKind.FINAL_ONLY for r in core.requests)
    with pytest.raises(RequestError, match=r"sampling_params has 1 entries, .* 2 prompts"):
        model.generate(["a", "b"], [GENEROUS])
    with pytest.raises(RequestError, match="sampling_params is 'x'"):
        model.generate(["a", "b"], "x")  # type: ignore[arg-type]


def test_n_completions_of_a_prompt_have_their_own_seeds_and_come_in_order() -> None:
    model, core = llm()
    (output,) = model.generate("fox", SamplingParams(n=3, max_tokens=None))
    assert [completion.text for completion in output.outputs] == ["fox", "fox!", "fox!!"]
    assert len({request.seed for request in core.requests}) == 3


def test_invalid_prompt_among_many_is_named_before_anything_runs() -> None:
    model, core = llm()
    with pytest.raises(RequestError, match="Prompt 1: prompt is empty"):
        model.generate(["fine", ""], GENEROUS)
    with pytest.raises(RequestError, match=r"^prompt is empty"):
        model.generate("", GENEROUS)
    with pytest.raises(RequestError, match=r"Prompt 0: .*must be a SamplingParams"):
        model.generate(["a", "b"], [7, GENEROUS])  # type: ignore[list-item]
    for wrong in (7, None):
        with pytest.raises(RequestError, match="one prompt or a list"):
            model.generate(wrong, GENEROUS)  # type: ignore[arg-type]
    assert core.requests == []


def test_priorities_go_through_where_the_engine_has_them() -> None:
    model, core = llm(config=engine_config(policy="priority"))
    model.generate(["a", "b"], GENEROUS, priority=[3, -1])
    model.generate(["a", "b"], GENEROUS, priority=4)
    assert [request.priority for request in core.requests] == [3, -1, 4, 4]


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), RuntimeError("broken"), EngineDeadError("out of memory")]
)
def test_interruption_aborts_what_is_left_and_is_passed_on(failure: BaseException) -> None:
    model, core = llm(fail_at_step=3, failure=failure)
    with pytest.raises(type(failure)):
        model.generate(["x", "a long text that takes a while"], GENEROUS)
    assert core.running == {}
    assert core.aborted == [core.requests[1].request_id]
    assert not model.llm_engine.has_unfinished_requests()


def test_error_in_the_engine_leaves_the_other_prompts_unharmed() -> None:
    def script(request: EngineRequest) -> list[int] | str:
        return "The weather is bad." if request.prompt_token_ids == TOKENIZER.encode("bad") else echo(request)

    first, second = llm(script)[0].generate(["bad", "good"], GENEROUS)
    assert (first.error, first.outputs[0].finish_reason) == ("The weather is bad.", "error")
    assert (second.error, second.outputs[0].text) == (None, "good")


def test_one_conversation_or_several() -> None:
    model = llm()[0]
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    assert texts(model.chat(hello, GENEROUS)) == ["<user>hello"]
    assert texts(model.chat([hello, bye], GENEROUS)) == ["<user>hello", "<user>bye"]
    with pytest.raises(RequestError, match="Conversation 1: messages is 'x'"):
        model.chat([hello, "x"], GENEROUS)  # type: ignore[list-item]
    for wrong in ([], "hello", ["hello"], {"role": "user", "content": "hello"}):
        with pytest.raises(RequestError, match="messages"):
            model.chat(wrong, GENEROUS)  # type: ignore[arg-type]


def test_a_given_chat_template_takes_the_place_of_the_models() -> None:
    template = "{{ messages[0].content }}!"
    assert texts(llm()[0].chat([{"role": "user", "content": "hello"}], GENEROUS, chat_template=template)) == [
        "hello!"
    ]


def test_metrics_tokenizer_and_prefix_cache_are_at_hand() -> None:
    with llm()[0] as model:
        assert model.get_tokenizer() is TOKENIZER
        model.generate("fox", GENEROUS)
        assert model.get_metrics().num_steps > 0
        assert model.reset_prefix_cache() is True
    with pytest.raises(EngineDeadError, match="closed"):
        model.generate("fox", GENEROUS)


def test_progress_bar_appears_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llm()[0]
    model.generate(["a", "b"], GENEROUS)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    model.generate(["a", "b"], GENEROUS, use_tqdm=False)
    assert capsys.readouterr().err == ""
    model.generate(["a", "b"], GENEROUS)
    assert "2/2" in capsys.readouterr().err


def test_what_are_no_prompts_is_refused_with_its_type() -> None:
    with pytest.raises(RequestError, match=r"^prompts is of type int, but must be one prompt or a list of"):
        llm()[0].generate(5, GENEROUS)  # type: ignore[arg-type]


def test_unknown_engine_argument_is_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="'modle' is not an engine argument"):
        LLM(modle="x")


def test_engine_that_cannot_get_a_tokenizer_frees_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = client(config=engine_config(model_path=str(tmp_path)))
    module = type("client_module", (), {"make_client": staticmethod(lambda args: core)})
    monkeypatch.setitem(__import__("sys").modules, "minivllm.data_parallel.client", module)
    with pytest.raises(ModelError):
        LLMEngine.from_args(EngineArgs(model="x", tokenizer=str(tmp_path / "missing")))
    assert core.closed == 1
    engine = LLMEngine.from_args(EngineArgs(model="x"))
    assert not engine.has_tokenizer


# generation_config.json


def test_defaults_come_from_the_models_generation_config(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 40,
        "eos_token_id": [1, EOS],
        "min_p": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    expected = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=40)
    (tmp_path / "model.gguf").touch()
    assert (
        default_sampling_params(str(tmp_path))
        == default_sampling_params(str(tmp_path / "model.gguf"))
        == expected
    )
    model, core = llm(config=engine_config(model_path=str(tmp_path)))
    model.generate("fox")
    assert (core.requests[0].sampling_params.temperature, core.requests[0].max_tokens) == (0.6, 40)


def test_a_limit_of_the_model_is_cut_to_what_the_prompt_leaves_and_a_callers_number_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 4096}')
    model, core = llm(config=engine_config(model_path=str(tmp_path)))
    room = model.llm_engine.config.scheduler.max_model_len - 3
    model.generate({"prompt_token_ids": [1, 2, 3]})
    model.generate({"prompt_token_ids": [1, 2, 3]}, model.get_default_sampling_params())
    assert [request.max_tokens for request in core.requests] == [room, room]
    with pytest.raises(ContextLengthError, match="max_tokens is 4095"):
        model.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4095))


@pytest.mark.parametrize(
    "content", [None, "{}", '{"eos_token_id": [1], "temperature": null, "max_new_tokens": 40}']
)
def test_a_model_that_does_not_say_how_to_sample_gets_the_fallback(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    params = default_sampling_params(str(tmp_path))
    assert {name: getattr(params, name) for name in FALLBACK_SAMPLING} == FALLBACK_SAMPLING


@pytest.mark.parametrize("content", ['{"do_sample": true}', '{"temperature": 1.0}'])
def test_a_model_may_say_that_it_samples_neutrally(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    assert default_sampling_params(str(tmp_path)) == SamplingParams()


def test_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert default_sampling_params(str(tmp_path)).is_greedy


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"top_p": 7}', '{"temperature": "hot"}', '{"top_k": 1.5}', "\udcff"]
)
def test_broken_generation_config_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        default_sampling_params(str(tmp_path))


def test_the_end_of_the_tokenizer_ends_sequences_too() -> None:
    """Fine-tunes often change the tokenizer's end of a turn, and leave the base model's in config.json."""
    tokenizer = wrapped(byte_level_bpe(), TEMPLATE)
    tokenizer.eos_token_id = 7
    core = ScriptedClient(echo, vocab_size=tokenizer.vocab_size, eos_token_ids=(END,))
    LLM(engine=LLMEngine(core, tokenizer)).generate({"prompt_token_ids": [1, 2, 3]})
    assert core.requests[0].eos_token_ids == [END, 7]
