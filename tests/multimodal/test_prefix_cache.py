"""What is cached of prompts with images is found again, and never for another image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from minivllm import LLM, SamplingParams
from minivllm.multimodal.encodings import Encodings
from tests.multimodal.conftest import core_of, engine
from tests.multimodal.models import OTHERS, expected, picture, prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def encodings(llm: LLM) -> Encodings:
    found = core_of(llm).encodings
    assert found is not None
    return found


def answer(
    llm: LLM, text: str, images: Sequence[Image.Image], salt: str | None = None
) -> tuple[list[int], int]:
    """(tokens, prompt tokens that came from the cache)."""
    more = {} if salt is None else {"cache_salt": salt}
    (output,) = llm.generate(prompt(text, *images, **more), GREEDY)
    return output.outputs[0].token_ids, output.num_cached_tokens


def wanted(directory: Path, text: str, images: list[Image.Image]) -> list[int]:
    return expected(directory, text, images, 3)[0]


@pytest.mark.parametrize(
    "kind", ("clip", "llava-next", "llava-onevision", "smolvlm", "gemma3", "qwen3-vl", "qwen3.5", *OTHERS)
)
def test_two_pictures_swapped_swap_the_answers(directories: dict[str, Path], kind: str) -> None:
    one, two = picture(0, 50, 20), picture(1, 50, 20)
    text = "<s>First <image> then <image>?"
    with engine(directories[kind]) as llm:
        for images in ([one, two], [two, one], [one, one]):
            assert answer(llm, text, images)[0] == wanted(directories[kind], text, images)


def test_a_question_that_parts_from_another_one_inside_a_block_asks_for_no_pixels(
    directories: dict[str, Path],
) -> None:
    """A copy of the block in which the image ends, and the beginning of the question after it, will do."""
    directory, images = directories["smolvlm"], [picture(2, 60, 60)]
    with engine(directory, encoder_cache_bytes=1) as llm:
        # The last placeholder is token 116, and "What " ends before token 123.
        answer(llm, "<s>A picture <image>What has it?", images)
        answer(llm, "<s><image>", [picture(3)])
        before = encodings(llm).num_encoded_units, encodings(llm).num_questions
        tokens, num_cached = answer(llm, "<s>A picture <image>What was it?", images)
        assert tokens == wanted(directory, "<s>A picture <image>What was it?", images)
        assert num_cached == 123
        assert (encodings(llm).num_encoded_units, encodings(llm).num_questions) == before


def test_after_a_hit_inside_an_image_only_the_rest_of_it_is_encoded(directories: dict[str, Path]) -> None:
    directory, image = directories["smolvlm"], picture(2, 60, 60)
    texts = [
        f"<s>{start} <image>What {verb} it?" for start in ("A picture", "Another") for verb in ("has", "was")
    ]
    with engine(directory, encoder_cache_bytes=1, reuse_partial_blocks=False) as llm:
        counts = []
        for text in texts:
            before = encodings(llm).num_encoded_units
            tokens, num_cached = answer(llm, text, [image])
            assert tokens == wanted(directory, text, [image])
            counts.append((encodings(llm).num_encoded_units - before, num_cached))
            if text == texts[0]:
                answer(llm, "<s><image>", [picture(3)])  # which takes the room of this one
    whole = counts[0][0]
    # The last placeholder of the first text is token 116, in the block that begins with 112.
    assert whole > 3 and counts[1] == (1, 112)
    assert counts[2] == (whole, 0) and counts[3][0] == 0, "encoded again from the first unit, then kept"


def test_a_second_question_encodes_nothing_and_asks_for_nothing(directories: dict[str, Path]) -> None:
    image = picture(2, 60, 60)
    with engine(directories["smolvlm"]) as llm:
        answer(llm, "<s><image>What is it?", [image])
        before = encodings(llm).num_encoded_units, encodings(llm).num_questions
        tokens, num_cached = answer(llm, "<s><image>Where is it?", [image])
        assert (encodings(llm).num_encoded_units, encodings(llm).num_questions) == before
        assert tokens == wanted(directories["smolvlm"], "<s><image>Where is it?", [image])
        assert num_cached >= 110  # the span of 116 tokens, but for what the last whole block leaves of it


@pytest.mark.parametrize(
    "kind", ("clip", "llava-next", "llava-onevision", "gemma3", "qwen3-vl", "qwen3.5", *OTHERS)
)
def test_hits_end_before_inside_and_after_a_span(directories: dict[str, Path], kind: str) -> None:
    """Texts of several lengths before an image;
    then the same text goes on with another image, or with none."""
    directory = directories[kind]
    with engine(directory, num_gpu_blocks_override=128) as llm:
        for num_before in (0, 5, 14, 15, 22):
            start = f"<s>{'a' * num_before}"
            for text, images in [
                (f"{start}<image>b", [picture(0)]),
                (f"{start}<image>b", [picture(1)]),
                (f"{start}<image>bcd", [picture(1)]),
                (f"{start}b<image>.", [picture(1)]),
            ]:
                assert answer(llm, text, images)[0] == wanted(directory, text, images)


def test_one_pixel_is_another_image_and_another_format_is_not(directories: dict[str, Path]) -> None:
    image = picture(3)
    other = image.copy()
    other.putpixel((5, 5), (1, 2, 3))
    file = io.BytesIO()
    image.save(file, "PNG")
    with engine(directories["clip"]) as llm:
        images = llm.llm_engine.images
        assert images is not None
        plain, changed, stored = images.read([image, other, file.getvalue()], None)
        assert plain.digest == stored.digest != changed.digest
        del plain, changed, stored
        text = "<s>0123456789abcde<image>?"  # the first block ends before the image
        answer(llm, text, [image])
        assert answer(llm, text, [other])[1] == 16
        assert answer(llm, text, [Image.open(io.BytesIO(file.getvalue()))])[1] > 40


def test_salts_are_kept_apart(directories: dict[str, Path]) -> None:
    with engine(directories["clip"]) as llm:
        answer(llm, "<s><image>What is it?", [picture(0)], salt="a")
        assert answer(llm, "<s><image>What is it?", [picture(0)], salt="b")[1] == 0
        assert answer(llm, "<s><image>What is it?", [picture(0)], salt="a")[1] > 0


def test_four_answers_share_one_encoding(directories: dict[str, Path]) -> None:
    with engine(directories["smolvlm"]) as llm:
        params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate(prompt("<s>Look: <image>", picture(4, 60, 60)), params)
        assert len(output.outputs) == 4
        assert (encodings(llm).num_questions, encodings(llm).num_encoded_units) == (1, 17)


def test_eight_requests_with_three_images_encode_three(directories: dict[str, Path]) -> None:
    directory = directories["clip"]
    with engine(directory, num_gpu_blocks_override=128) as llm:
        texts = [f"<s>{number}: <image>" for number in range(8)]
        outputs = llm.generate(
            [prompt(text, picture(number % 3)) for number, text in enumerate(texts)], GREEDY
        )
        assert (encodings(llm).num_questions, encodings(llm).num_encoded_units) == (3, 3)
        for number, (text, output) in enumerate(zip(texts, outputs)):
            assert output.outputs[0].token_ids == wanted(directory, text, [picture(number % 3)])
