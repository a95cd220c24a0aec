"""Crops of Gemma 3: a narrow image is shown as a whole and in crops, each in a run that sees itself."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from minivllm import SamplingParams
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.multimodal.prompt_images import PromptImages
from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.multimodal.conftest import core_of, engine
from tests.multimodal.models import expected, picture, prompt, reference
from tests.multimodal.test_parity import check

CROPS = {"do_pan_and_scan": True}
SIDES = st.integers(1, 1600)
TEXTS = st.lists(st.sampled_from(["word", "\n", "\n\n", " ", "<image>"]), max_size=4).map("".join)
WIDE, TALL = (600, 300), (280, 1100)


def new_images(directory: Path) -> PromptImages:
    config, _ = resolve(EngineArgs(model=str(directory), device="cpu"))
    assert config.images is not None
    return PromptImages(config.images, str(directory), load_tokenizer(directory))


@settings(max_examples=200, deadline=None)
@given(width=SIDES, height=SIDES, before=TEXTS, after=TEXTS)
@example(width=512, height=256, before="", after="")
@example(width=511, height=256, before="", after="")
@example(width=1280, height=256, before="\n", after="\n")
@example(width=256, height=307, before="", after="")
@example(width=640, height=256, before="", after=" ")
def test_crops_are_written_as_transformers_writes_them(
    directories: dict[str, Path], width: int, height: int, before: str, after: str
) -> None:
    width, height = (max(side, -(-max(width, height) // 190)) for side in (width, height))
    directory, text = directories["gemma3"], f"{before}<image>{after}"
    ours, tokenizer = new_images(directory), load_tokenizer(directory)
    images = [Image.new("RGB", (width, height))] + [picture(0)] * (text.count("<image>") - 1)
    pictures = [ours.read_one(image, CROPS, "an image") for image in images]
    token_ids = tokenizer.encode(ours.written(text, pictures), add_special_tokens=False)
    _, processor = reference(directory)
    inputs = processor(images=images, text=text, add_special_tokens=False, **CROPS)
    found, items = ours.expand(token_ids, pictures)
    assert found == list(inputs["input_ids"][0])
    assert sum(item.num_units for item in items) == len(inputs["pixel_values"])
    for item in items:
        runs = [found[item.offset + first : item.offset + first + count] for first, count in item.runs]
        assert runs == [[ours.config.placeholder + 4] * 16] * item.num_units  # <image>, <soft>
        assert item.length == item.runs[-1][0] + 17  # <eoi>


@pytest.mark.parametrize("size", (WIDE, TALL))
def test_tokens_and_logits_are_those_of_transformers(
    directories: dict[str, Path], size: tuple[int, int]
) -> None:
    directory = directories["gemma3"]
    with engine(directory) as llm:
        check(llm, directory, "<s>Look at <image> and say", [picture(0, *size)], **CROPS)
        check(llm, directory, "<s>Look at <image> and say", [picture(0, *size)])
        images = [picture(1, *size), picture(2), picture(1, *size)]
        check(llm, directory, "<s><image><image>\nor <image>", images, **CROPS)


def test_a_placeholder_in_token_ids_stands_for_the_crops_too(directories: dict[str, Path]) -> None:
    directory, image = directories["gemma3"], picture(0, *WIDE)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with engine(directory) as llm:
        token_ids = load_tokenizer(directory).encode("<s>Look: <image>?")
        given: dict[str, Any] = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [image]}}
        (output,) = llm.generate({**given, "mm_processor_kwargs": CROPS}, params)
        assert output.outputs[0].token_ids == expected(directory, "<s>Look: <image>?", [image], 4, **CROPS)[0]


@pytest.mark.parametrize("budget", (20, 33, 64))
def test_chunks_end_between_crops(directories: dict[str, Path], budget: int) -> None:
    directory = directories["gemma3"]
    with engine(directory, max_num_batched_tokens=budget, max_num_seqs=4) as llm:
        for _ in range(2):  # the second time some of it is cached
            check(llm, directory, "<s>a<image>bc<image>d", [picture(0, *TALL), picture(4, 50, 50)], **CROPS)
            check(llm, directory, "<s>a<image>e", [picture(0, *TALL)], **CROPS)
        steps = core_of(llm).scheduler.recent_steps(0)
        assert all(sum(step.num_scheduled_tokens.values()) <= budget for step in steps)


def test_a_cache_of_one_image_and_preempted_requests(directories: dict[str, Path]) -> None:
    directory = directories["gemma3"]
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    prompts = [(f"<s>{number}<image>.", [picture(number, *WIDE)]) for number in range(4)]
    room = {"num_gpu_blocks_override": 20, "max_model_len": 240, "encoder_cache_bytes": 1}
    with engine(directory, **room) as llm:
        outputs = llm.generate(
            [prompt(text, *images, mm_processor_kwargs=CROPS) for text, images in prompts], params
        )
        assert llm.get_metrics().num_preemptions > 0
        for (text, images), output in zip(prompts, outputs):
            assert output.outputs[0].token_ids == expected(directory, text, images, 28, **CROPS)[0]


def test_the_detail_of_a_message_chooses_crops(directories: dict[str, Path]) -> None:
    directory, image = directories["gemma3"], picture(0, *WIDE)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with engine(directory) as llm:
        for detail, is_cut in (("auto", False), ("low", False), ("high", True)):
            part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
            message = {"role": "user", "content": [part, {"type": "text", "text": "What?"}]}
            (output,) = llm.chat([message], params)
            text = "user:<image>What?</s>assistant:"
            tokens, _ = expected(directory, text, [image], 4, do_pan_and_scan=is_cut)
            assert output.outputs[0].token_ids == tokens
