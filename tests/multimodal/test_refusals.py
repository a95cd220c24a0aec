"""What is not served with images is said; text is served all the same, and costs nothing more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm import BeamSearchParams, SamplingParams
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import ConfigError, RequestError
from tests.models.region_ledger import described, recorded
from tests.multimodal.conftest import engine
from tests.multimodal.models import expected, picture, prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def test_no_images_are_asked_for(directories: dict[str, Path]) -> None:
    arguments = {"model": str(directories["clip"]), "limit_mm_per_prompt": {"image": 0}}
    config, _ = resolve(EngineArgs(device="cpu", **arguments))
    assert config.images is None and "limit_mm_per_prompt={'image': 0}" in config.no_images


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_num_batched_tokens": 23}, "max_num_batched_tokens is 23, but must be at least 24"),
        ({"long_prefill_token_threshold": 15}, "long_prefill_token_threshold is 15, but must be at least 16"),
    ],
)
def test_an_image_that_sees_itself_must_fit_into_a_step(
    directories: dict[str, Path], arguments: dict[str, Any], reason: str
) -> None:
    args = EngineArgs(model=str(directories["gemma3"]), device="cpu", max_num_seqs=8, **arguments)
    config, _ = resolve(args)
    assert config.images is None and reason in config.no_images


def test_a_model_without_its_encoder_reads_text(directories: dict[str, Path]) -> None:
    directory = directories["clip"]
    with engine(directory, limit_mm_per_prompt={"image": 0}) as llm:
        (output,) = llm.generate({"prompt": "<s>Only words."}, GREEDY)
        assert output.outputs[0].token_ids == expected(directory, "<s>Only words.", [], 3)[0]
        for given in (prompt("<s><image>", picture(0)),):
            with pytest.raises(
                RequestError, match=r"at most 0 per prompt\. The engine was started with limit_mm_per"
            ):
                llm.generate(given)
        part = {"type": "image_pil", "image_pil": picture(0)}
        with pytest.raises(RequestError, match=r"messages\.0\.content\.0 is an image: at most 0 images"):
            llm.chat([{"role": "user", "content": [part]}])
        assert llm.llm_engine.client.core.executor.worker._images is None  # type: ignore[attr-defined]


def test_beams_and_prompt_logprobs_are_refused(directories: dict[str, Path]) -> None:
    with engine(directories["clip"]) as llm:
        with pytest.raises(RequestError, match="A beam search takes no images"):
            llm.beam_search(prompt("<s><image>", picture(0)), BeamSearchParams(beam_width=2, max_tokens=2))
        with pytest.raises(
            RequestError, match="prompt_logprobs of a prompt with images are given after the last image only"
        ):
            llm.generate(prompt("<s><image>", picture(0)), SamplingParams(prompt_logprobs=1))


@pytest.mark.parametrize("value", ({"image": -1}, {"video": 1}, {"image": "8"}, [8]))
def test_limits_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
        EngineArgs(limit_mm_per_prompt=value)


@pytest.mark.slow
def test_regions_for_text_are_those_of_a_model_that_reads_only(directories: dict[str, Path]) -> None:
    """Seeing adds one region, the first one with images."""
    settings = {"model": str(directories["clip"]), "num_gpu_blocks_override": 64, "block_size": 16}
    regions = {}
    for limit in (0, 8):
        with recorded({**settings, "max_model_len": 512, "limit_mm_per_prompt": {"image": limit}}) as (
            recorder,
        ):
            regions[limit] = [described(region) for region in recorder.regions]
    assert set(regions[0]) < set(regions[8])
    (added,) = set(regions[8]) - set(regions[0])
    assert added.startswith("first")


def test_reading_text_imports_neither_pil_nor_an_encoder(tiny_model: Any) -> None:
    """transformers imports PIL wherever it is installed,
    so the modules of the frontend are looked at alone."""
    frontend = (
        "import sys, minivllm.multimodal.prompt_images, minivllm.multimodal.chat_parts, "
        "minivllm.multimodal.encodings\n"
        "found = {'PIL', 'transformers'}"
    )
    engine_ = (
        "from minivllm import LLM; import sys; found = {'transformers.models.clip', "
        "'transformers.models.siglip'}\n"
        f"with LLM({str(tiny_model('llama'))!r}, device='cpu', enforce_eager=True, "
        "num_gpu_blocks_override=64,\n"
        "         max_model_len=256) as llm: llm.generate({'prompt_token_ids': [5, 6]})"
    )
    for code in (frontend, engine_):
        code += "\nprint(sorted(found & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"
