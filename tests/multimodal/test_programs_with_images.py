"""Programs of the language with images: what ``LLM.chat`` answers, each image encoded once,
and scores that are those of transformers."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.errors import RequestError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.lang import Generated, Selected, State, assistant, image, join, program, run_offline, tool, user
from minivllm.lang.examples.programs import look
from minivllm.multimodal.encodings import Encodings
from minivllm.sampling_params import StructuredOutputs
from tests.multimodal.conftest import core_of, engine
from tests.multimodal.models import expected, picture, reference

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
KINDS = ("smolvlm", "gemma3", "qwen3-vl")


@pytest.fixture(scope="module", params=KINDS)
def llm(directories: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine(directories[request.param]) as llm:
        yield llm


def value(llm: LLM, made: Any, *args: Any) -> Any:
    [outcome] = run_offline(llm, made, [args])
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def encodings(llm: LLM) -> Encodings:
    found = core_of(llm).encodings
    assert found is not None
    return found


def refused(llm: LLM, made: Any, *args: Any) -> str:
    with pytest.raises(RequestError) as error:
        value(llm, made, *args)
    return str(error.value)


@program(temperature=0.0)
async def chain(s: State, first: Any, second: Any) -> list[str]:
    s += user("This: ", image(first), "What is it?")
    texts = [await s.gen("one", regex="[a-z]{4}")]
    s += user("And ", "this ", image(second), image(first), "?")
    return [*texts, await s.gen("two", regex="[a-z]{4}")]


def parts_of(*given: Any) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image_pil", "image_pil": one}
        for one in given
    ]


def test_turns_with_images_are_those_of_the_chat(llm: LLM) -> None:
    one, two = picture(0), picture(1, 20, 60)
    answers = value(llm, chain, one, two)
    messages: list[Any] = [{"role": "user", "content": parts_of("This: ", one, "What is it?")}]
    params = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(regex="[a-z]{4}"))
    assert llm.chat([messages], params, use_tqdm=False)[0].outputs[0].text == answers[0]
    messages += [
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": parts_of("And this ", two, one, "?")},
    ]
    assert llm.chat([messages], params, use_tqdm=False)[0].outputs[0].text == answers[1]


@program(**GREEDY)
async def plain(s: State, given: Any) -> Any:
    s += "<s>Look at "
    s += image(given)
    s += " and say"
    await s.gen("x", max_tokens=4)
    return s.details["x"]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_texts_with_images_are_answered_as_by_transformers(
    directories: dict[str, Path], kind: str
) -> None:
    with engine(directories[kind]) as llm:
        found = value(llm, plain, picture(2))
        assert isinstance(found, Generated)
        assert (
            found.token_ids == expected(directories[kind], "<s>Look at <image> and say", [picture(2)], 4)[0]
        )


@program
async def choose(s: State, given: Any, choices: list[str]) -> Selected:
    s += "<s>See "
    s += image(given)
    s += "it is "
    await s.select("x", choices)
    found = s.details["x"]
    assert isinstance(found, Selected)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choices", [["cat", "horse", "a bird"], ["a", "b"]])
def test_scores_after_an_image_are_those_of_transformers(
    directories: dict[str, Path], kind: str, choices: list[str]
) -> None:
    model, processor = reference(directories[kind])
    with engine(directories[kind]) as llm:
        found = value(llm, choose, picture(3), choices)
    for choice, logprobs in zip(choices, found.logprobs, strict=True):
        inputs = processor(images=[picture(3)], text=f"<s>See <image>it is {choice}", return_tensors="pt")
        with torch.inference_mode():
            logits = model(**inputs).logits[0]
        ids = inputs["input_ids"][0, -len(choice) :].tolist()
        wanted = torch.log_softmax(logits[-len(choice) - 1 : -1].double(), -1)
        assert logprobs == pytest.approx([float(row[one]) for row, one in zip(wanted, ids)], abs=1e-4)


@program(**GREEDY)
async def questions(s: State, given: Any, texts: list[str]) -> list[str]:
    s += user(image(given), "An image.")
    s += assistant("Yes.")
    await s.commit()
    branches = s.fork(len(texts))
    for branch, text in zip(branches, texts):
        branch += user(text)
    return await join(branches, lambda branch: branch.gen("x", max_tokens=2))


def test_branches_share_an_image_and_what_was_computed_of_it(directories: dict[str, Path]) -> None:
    with engine(directories["smolvlm"]) as llm:
        given = picture(4, 60, 60)
        (alone,) = llm.chat([[{"role": "user", "content": parts_of(given)}]], use_tqdm=False)
        units = encodings(llm).num_encoded_units
        llm.reset_prefix_cache()
        before = llm.get_metrics().num_computed_tokens
        assert len(value(llm, questions, given, ["What?", "Where?", "Who??"])) == 3
        assert encodings(llm).num_encoded_units in (units, 2 * units), "at most once more"
        assert len(alone.prompt_token_ids) > 100, "the image is most of it"
        # The prompt, then in each branch the last token of it, the turn, and a sampled token.
        turns = [len(f"user:{text}assistant:") + 1 for text in ("What?", "Where?", "Who??")]
        prompt = (
            len(alone.prompt_token_ids) - len("assistant:") + len("An image.") + len("assistant:Yes.") + 1
        )
        computed = llm.get_metrics().num_computed_tokens - before
        assert computed <= prompt + 1 + sum(turns) + 2 * 3 + 3, (computed, prompt, turns)


def test_the_example_asks_three_questions_about_an_image_that_is_encoded_once(
    directories: dict[str, Path],
) -> None:
    data = io.BytesIO()
    picture(5).save(data, "PNG")
    with engine(directories["smolvlm"]) as llm:
        answers = value(llm, look.using(**GREEDY), data.getvalue(), ["What?", "Where?", "Who?"])
        assert len(answers) == 3
        units = encodings(llm).num_encoded_units
        params = SamplingParams(**GREEDY, max_tokens=20)
        for text, answer in zip(["What?", "Where?", "Who?"], answers):
            messages: list[Any] = [{"role": "user", "content": parts_of(picture(5), text)}]
            assert llm.chat([messages], params, use_tqdm=False)[0].outputs[0].text == answer
        assert encodings(llm).num_encoded_units == units


def test_programs_see_through_an_async_engine(directories: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enforce_eager": True}
    settings |= {"num_gpu_blocks_override": 64, "block_size": 16, "max_num_seqs": 8, "max_model_len": 512}

    async def run() -> list[str]:
        async with AsyncLLM.from_args(EngineArgs(model=str(directories["smolvlm"]), **settings)) as llm:
            return await chain(llm, picture(0), picture(1, 20, 60))

    with engine(directories["smolvlm"]) as other:
        assert asyncio.run(run()) == value(other, chain, picture(0), picture(1, 20, 60))


def test_an_eye_that_was_joined_sees_in_programs(parts: dict[str, Path]) -> None:
    with engine(parts["text"], eye=str(parts["eye"])) as llm:
        answers = value(llm, look.using(**GREEDY), picture(6), ["What?", "Where?"])
        params = SamplingParams(**GREEDY, max_tokens=20)
        for text, answer in zip(["What?", "Where?"], answers):
            messages: list[Any] = [{"role": "user", "content": parts_of(picture(6), text)}]
            assert llm.chat([messages], params, use_tqdm=False)[0].outputs[0].text == answer
        found = value(llm, plain, picture(2))
        assert found.token_ids == expected(parts["both"], "<s>Look at <image> and say", [picture(2)], 4)[0]


def test_what_cannot_be_seen_is_told(directories: dict[str, Path], parts: dict[str, Path]) -> None:
    @program
    async def appended(s: State, *pieces: Any) -> None:
        for piece in pieces:
            s += piece
        await s.gen(max_tokens=1)

    shown = image(picture(0))
    with engine(directories["smolvlm"]) as llm:
        assert "write user(image(…))" in refused(llm, appended, user("Hello"), shown)
        assert "but may have at most 8" in refused(llm, appended, *[shown] * 9)
        assert "must be one for each" in refused(llm, appended, "<image>what?")
        assert "formats PNG, JPEG, WEBP" in refused(llm, appended, image(b"no image"))
        assert "takes texts and images: write str(…) or image(…)" in refused_block(llm)
        value(llm, appended, user("<image> is a text here"))
        gc.collect()  # errors hold the states that raised them
        value(llm, appended, user("Hello"), tool(shown))
    with engine(parts["text"]) as llm:
        assert "the model cannot see it" in refused(llm, appended, user(shown, "What?"))


def refused_block(llm: LLM) -> str:
    @program
    async def wrong(s: State) -> None:
        s += user(picture(0))

    return refused(llm, wrong)


def test_prompt_logprobs_begin_after_images(directories: dict[str, Path]) -> None:
    with engine(directories["smolvlm"]) as llm:
        given = {"prompt": "<s><image>abc", "multi_modal_data": {"image": picture(0)}}
        for start in (0, 50):
            params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
            with pytest.raises(RequestError, match=r"begin at prompt_logprobs_start \d+ or later"):
                llm.generate(given, params, use_tqdm=False)
