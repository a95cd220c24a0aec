"""Preemption, aborts, small caches: answers stay what they are, and nothing is left behind."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from minivllm import SamplingParams
from minivllm.batch.step_inputs import StepInputs
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.messages import FeatureLines
from minivllm.models.model import ImageRows
from minivllm.multimodal.eyes.llava_next import in_lines
from minivllm.multimodal.items import PixelTensors
from tests.multimodal.conftest import core_of, encoded_images, engine
from tests.multimodal.models import OTHERS, expected, picture, prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("kind", ("clip", "llava-next", "llava-onevision", "smolvlm", "qwen3-vl", *OTHERS))
def test_a_cache_of_one_image_serves_many(directories: dict[str, Path], kind: str) -> None:
    directory = directories[kind]
    prompts = [
        (f"<s>{number}<image>and<image>.", [picture(number), picture(number + 1)]) for number in range(5)
    ]
    tokens = 100 if kind == "gemma4" else 40
    settings = {"encoder_cache_bytes": 1, "max_num_batched_tokens": tokens, "num_gpu_blocks_override": 128}
    with engine(directory, **settings) as llm:
        outputs = llm.generate([prompt(text, *images) for text, images in prompts], GREEDY)
        for (text, images), output in zip(prompts, outputs):
            assert output.outputs[0].token_ids == expected(directory, text, images, 4)[0]


def test_pixels_have_a_bound_and_all_requests_end(directories: dict[str, Path]) -> None:
    directory = directories["smolvlm"]
    prompts = [
        (f"<s>{number}<image>and<image>", [picture(number), picture(number + 7)]) for number in range(6)
    ]
    with engine(directory, num_gpu_blocks_override=256, max_num_seqs=2) as llm:
        core = core_of(llm)
        assert core.encodings is not None
        core.encodings._most_bytes = 1
        outputs = llm.generate([prompt(text, *images) for text, images in prompts], GREEDY)
        for (text, images), output in zip(prompts, outputs):
            assert output.outputs[0].token_ids == expected(directory, text, images, 4)[0]


@pytest.mark.parametrize("caches", (True, False))
@pytest.mark.parametrize("kind", ("clip", "llava-next", "qwen3-vl", "qwen3.5", *OTHERS))
def test_preempted_requests_answer_the_same(directories: dict[str, Path], kind: str, caches: bool) -> None:
    """Answers grow until blocks run out: victims come back with the encoding, or without."""
    directory = directories[kind]
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    prompts = [(f"<s>{number}<image>.", [picture(number)]) for number in range(4)]
    room = {"num_gpu_blocks_override": 11, "max_model_len": 96}
    if kind.startswith("gemma4"):  # an image has about 60 embeddings
        room = {"num_gpu_blocks_override": 16, "max_model_len": 112}
    settings = {**room, "encoder_cache_bytes": 1}
    with engine(directory, enable_prefix_caching=caches, **settings) as llm:
        outputs = llm.generate([prompt(text, *images) for text, images in prompts], params)
        assert llm.get_metrics().num_preemptions > 0
        for (text, images), output in zip(prompts, outputs):
            assert output.outputs[0].token_ids == expected(directory, text, images, 28)[0]


def test_aborted_between_question_and_answer(directories: dict[str, Path]) -> None:
    with engine(directories["smolvlm"]) as llm:
        core, frontend = core_of(llm), llm.llm_engine
        questions: list[bytes] = []
        core.ask_for_pixels(questions.extend)
        frontend.add_request("a", prompt("<s><image>", picture(0)), GREEDY)
        assert len(questions) == 1 and core.step() == [] and not core.has_work()
        frontend.abort_request(["a"])
        core.take_pixels(PixelTensors(questions[0], (17, 3, 16, 16), bytes(17 * 3 * 16 * 16)))
        assert core.encodings is not None and core.encodings.num_held_pixels == 0
        # Another one that wants the image before the answer to the first question is there.
        frontend.add_request("b", prompt("<s><image>", picture(0)), GREEDY)
        frontend.abort_request(["b"])
        frontend.add_request("c", prompt("<s><image>", picture(0)), GREEDY)
        assert len(questions) == 2
        assert frontend.images is not None
        core.take_pixels(frontend.images.pixels(questions[1]))
        outputs = []
        while frontend.has_unfinished_requests():
            outputs += frontend.step()
        assert (
            outputs[-1].outputs[0].token_ids
            == expected(directories["smolvlm"], "<s><image>", [picture(0)], 4)[0]
        )


def test_an_image_that_cannot_be_had_ends_its_requests_alone(directories: dict[str, Path]) -> None:
    with engine(directories["clip"]) as llm:
        core, frontend = core_of(llm), llm.llm_engine
        questions: list[bytes] = []
        core.ask_for_pixels(questions.extend)
        for name in ("a", "b"):
            frontend.add_request(name, prompt(f"<s>{name}<image>", picture(0)), GREEDY)
        frontend.add_request("text", {"prompt": "<s>text"}, GREEDY)
        core.take_pixels(PixelTensors(questions[0], error="The file is gone."))
        last = {}
        while frontend.has_unfinished_requests():
            last |= {output.request_id: output for output in frontend.step()}
        assert last["a"].error == last["b"].error == "The file is gone."
        assert last["text"].outputs[0].finish_reason == "length"


def test_random_requests_and_aborts_leave_nothing(directories: dict[str, Path]) -> None:
    """Workers and scheduler count the same bytes after every step."""
    chance = random.Random(5)
    settings = {"num_gpu_blocks_override": 24, "max_model_len": 200, "max_num_batched_tokens": 30}
    with engine(directories["smolvlm"], **settings, max_num_batched_encoder_embeds=8) as llm:
        core, frontend = core_of(llm), llm.llm_engine
        assert core.encodings is not None
        core.encodings._capacity = 80
        core.encodings._config = replace(core.encodings._config, encoder_cache_bytes=80 * 64 * 4)
        started = 0
        while started < 25 or frontend.has_unfinished_requests():
            if started < 25 and chance.random() < 0.4:
                images = [picture(chance.randrange(5), 40, 20) for _ in range(chance.randrange(3))]
                text = "<s>" + "x" * chance.randrange(8) + "<image>" * len(images) + "?"
                given = prompt(text, *images) if images else {"prompt": text}
                frontend.add_request(str(started), given, GREEDY)
                started += 1
            if chance.random() < 0.1:
                frontend.abort_request([str(chance.randrange(25))])
            frontend.step()
            core.scheduler.check_integrity()
            assert core.encodings.num_bytes >= core.executor.worker._images.num_bytes  # type: ignore[attr-defined]
            assert core.encodings.num_bytes <= 80 * 64 * 4


@pytest.mark.parametrize("kind", ("clip", "gemma4", "aya-vision"))
def test_sleep_and_new_weights_forget_images(directories: dict[str, Path], kind: str) -> None:
    directory = directories[kind]
    text, images = "<s><image>", [picture(0)]
    with engine(directory) as llm:
        for level in (1, 2):
            llm.generate(prompt(text, *images), GREEDY)
            llm.sleep(level)
            assert core_of(llm).executor.worker._images.num_bytes == 0  # type: ignore[attr-defined]
            llm.wake_up()
            (output,) = llm.generate(prompt(text, *images), GREEDY)
            assert output.outputs[0].token_ids == expected(directory, text, images, 4)[0]
            assert output.num_cached_tokens == 0


def test_memory_is_measured_with_images_in_every_row(directories: dict[str, Path]) -> None:
    """The largest step holds the features of all levels beside what a text takes."""
    with engine(directories["qwen3-vl"], max_num_batched_tokens=48) as llm:
        worker = core_of(llm).executor.worker  # type: ignore[attr-defined]
        made: list[ImageRows] = []
        plain = worker._images.rows

        def rows(inputs: StepInputs) -> ImageRows:
            made.append(plain(inputs))
            return made[-1]

        worker._images.rows = rows
        worker._profile_step()
    (images,) = made
    assert [tensor.shape for tensor in (images.features, *images.deeper)] == [(48, 64)] * 3
    assert images.is_image.all()


@pytest.mark.parametrize("workers", (1, 2))
@pytest.mark.parametrize("division", ("tensor_parallel_size", "pipeline_parallel_size"))
def test_what_workers_of_a_host_keep_of_images_is_taken_from_the_memory_that_they_share(
    directories: dict[str, Path], division: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of the first stage keeps as much."""
    free, cache_bytes = 6 * 2**20, 2**20
    monkeypatch.setattr("minivllm.worker.worker.cache_memory", lambda *arguments: free)
    sizes = {"num_gpu_blocks_override": None, "max_model_len": 1024, "encoder_cache_bytes": cache_bytes}
    with engine(directories["smolvlm"], **sizes, max_num_seqs=64, **{division: workers}) as llm:
        executor: Any = core_of(llm).executor
        in_use = sum(
            tensor.nbytes
            for worker in executor.workers
            for cache in worker.runner.paged_model.caches
            for tensor in cache[:2]
        )
        in_use += cache_bytes * len(encoded_images(llm))
    assert 0.95 * free < in_use <= free


@pytest.mark.parametrize("kind", ("llava-next", "llava-onevision"))
def test_lines_of_tiles_are_kept_in_place_of_the_tiles(
    directories: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are laid once, however many steps read them."""
    laid: list[FeatureLines] = []

    def noted(embeds: Tensor, lines: FeatureLines) -> Tensor:
        laid.append(lines)
        return in_lines(embeds, lines)

    monkeypatch.setattr("minivllm.multimodal.eyes.encoded_images.in_lines", noted)
    text, images = "<s>Look at <image> and say", [picture(0, 47, 48)]
    with engine(directories[kind], max_num_batched_tokens=16, encoder_cache_bytes=1) as llm:
        config, encodings = llm.llm_engine.config.images, core_of(llm).encodings
        assert config is not None and encodings is not None
        (output,) = llm.generate(prompt(text, *images), GREEDY)
        assert output.outputs[0].token_ids == expected(directories[kind], text, images, 4)[0]
        num_kept = output.prompt_token_ids.count(config.placeholder)
        assert encodings.num_bytes == num_kept * 64 * 4
        assert num_kept != encodings.num_encoded_units * config.unit_embeds <= config.most_embeds
    assert len(laid) == 1


def test_the_size_of_the_largest_image_is_logged(
    directories: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="minivllm"):
        resolve(EngineArgs(model=str(directories["llava-onevision"]), device="cpu", dtype="float32"))
    (told,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Images: ")]
    # 9 tiles and the whole image, of 16 features and a newline each, of 64 numbers.
    largest = 10 * 17 * 64 * 4 / 2**20
    assert f"of up to 170 embeddings ({largest:.1f} MiB); a step encodes up to " in told
    assert told.endswith(f"and {2 * largest:.1f} MiB are kept.")


def test_bytes_of_an_image_count_all_levels(directories: dict[str, Path]) -> None:
    with engine(directories["qwen3-vl"]) as llm:
        config = llm.llm_engine.config.images
        assert config is not None
        llm.generate(prompt("<s><image>.", picture(0, 40, 24)), GREEDY)
        encodings = core_of(llm).encodings
        assert encodings is not None
        assert (
            encodings.num_bytes == 3 * 5 * 64 * 4 * 3
        )  # squares of 8 x 8 pixels, hidden size, float32, levels
        assert config.encoder_cache_bytes == 2 * config.most_embeds * 64 * 4 * 3
