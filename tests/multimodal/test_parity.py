"""A model that sees answers as transformers does, however its prompt is cut into steps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_struct
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.errors import ModelError
from tests.multimodal.conftest import core_of, engine
from tests.multimodal.models import CAUSAL, KINDS, OTHERS, WITH_EXPERTS, expected, picture, prompt

NUM_TOKENS = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=8)


def check(llm: LLM, directory: Path, text: str, images: list[Any], **options: bool) -> None:
    """Equal tokens, and equal log-probabilities of the likeliest ones. options: of an image."""
    tokens, logits = expected(directory, text, images, NUM_TOKENS, **options)
    (output,) = llm.generate(prompt(text, *images, mm_processor_kwargs=options), GREEDY)
    completion = output.outputs[0]
    assert completion.token_ids == tokens
    logprobs = torch.log_softmax(logits, dim=-1)
    assert completion.logprobs is not None
    for place, entries in enumerate(completion.logprobs):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(logprobs[place, token]), abs=1e-4)


@pytest.mark.parametrize("kind", (*KINDS, *WITH_EXPERTS, *OTHERS))
def test_one_image_two_images_and_none(directories: dict[str, Path], kind: str) -> None:
    directory = directories[kind]
    with engine(directory) as llm:
        check(llm, directory, "<s>Look at <image> and say", [picture(0)])
        between = " " if kind.startswith("qwen") else ""  # transformers takes runs side by side for one image
        text = f"<s><image>{between}<image>Which is older?"
        check(llm, directory, text, [picture(1, 20, 90), picture(2, 64, 64)])
        # From an image's last token, generate of transformers goes on with another position in each axis.
        after = "." if kind.startswith("qwen") else ""
        check(llm, directory, f"<s>Ends with an image: <image>{after}", [picture(3, 33, 21)])
        check(llm, directory, "<s>Only words.", [])


def test_published_experts_lie_transposed(directories: dict[str, Path], tmp_path: Path) -> None:
    """Those that transformers 5 saves do not."""
    source = directories["qwen3-vl-moe"]
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    stored = load_file(source / "model.safetensors")
    stacks = [name for name in stored if ".mlp.experts." in name]
    assert len(stacks) == 8
    turned = {name: stored[name].transpose(1, 2).contiguous() for name in stacks}
    save_file({**stored, **turned}, tmp_path / "model.safetensors", {"format": "pt"})
    with engine(tmp_path) as llm:
        check(llm, tmp_path, "<s>Look at <image> and say", [picture(0)])
    misshapen = {stacks[0]: stored[stacks[0]][:, 1:].contiguous()}
    save_file({**stored, **misshapen}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="6 experts of this configuration make"), engine(tmp_path):
        pass


@pytest.mark.parametrize(
    "kind",
    ("clip", "llava-next", "llava-onevision", "smolvlm", "mistral3", "qwen3-vl", "qwen3.5", *CAUSAL),
)
@pytest.mark.parametrize("budget", (7, 16, 31))
def test_chunks_end_anywhere(directories: dict[str, Path], kind: str, budget: int) -> None:
    directory = directories[kind]
    with engine(directory, max_num_batched_tokens=budget, max_num_seqs=4, enable_prefix_caching=False) as llm:
        check(llm, directory, "<s>a<image>bc<image>d", [picture(0), picture(4, 50, 50)])


@pytest.mark.parametrize(
    ("kind", "budget"), [("gemma3", 20), ("gemma3", 33), ("gemma3", 64), ("gemma4", 74), ("gemma4", 101)]
)
@pytest.mark.parametrize("backend", ("flex", "sdpa", pytest.param("compiled flex", marks=pytest.mark.slow)))
def test_images_that_see_themselves_are_never_cut(
    directories: dict[str, Path], kind: str, budget: int, backend: str
) -> None:
    """Chunks end before a run or after it, whatever a step has room for; neighbours share the steps."""
    directory = directories[kind]
    cases = [
        ("<s>a<image>bc<image>d", [picture(0), picture(4, 50, 50)]),
        ("<s>Some words before it: <image>\nand after", [picture(5)]),
        ("<s>Only words, and more words than a step takes.", []),
    ]
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "compile_in_background": False}
    settings |= {
        "attention_backend": backend.split()[-1],
        "enforce_eager": not backend.startswith("compiled"),
    }
    with engine(directory, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt(text, *images) for text, images in cases], GREEDY)
            for (text, images), output in zip(cases, outputs):
                assert output.outputs[0].token_ids == expected(directory, text, images, NUM_TOKENS)[0]
        steps = core_of(llm).scheduler.recent_steps(0)
        assert all(sum(step.num_scheduled_tokens.values()) <= budget for step in steps)


@pytest.mark.parametrize(
    "kind", [kind for kind in (*KINDS, *OTHERS) if kind != "qwen3.5"]
)  # steps end at a state's snapshot
def test_a_prompt_that_fits_is_one_step(directories: dict[str, Path], kind: str) -> None:
    with engine(directories[kind]) as llm:
        llm.generate(prompt("<s>a<image>bc<image>d", picture(0), picture(1)), SamplingParams(max_tokens=1))
        (step,) = core_of(llm).scheduler.recent_steps(0)
        assert sum(step.num_scheduled_tokens.values()) > 40


@pytest.mark.parametrize("reach", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "num_runs"), [("smolvlm", 5), ("aya-vision", 5), ("gemma4-small", 1)])
def test_every_border_of_a_chunk_around_every_run(
    directories: dict[str, Path], kind: str, num_runs: int, reach: int
) -> None:
    directory = directories[kind]
    text, images = "<s>ab<image>cd", [picture(5, 40, 10)]
    tokens, _ = expected(directory, text, images, NUM_TOKENS)
    with engine(directory) as llm:
        prepared = llm.llm_engine.prepare(None, prompt(text, *images), GREEDY)
        (item,) = prepared.sequences[0].images
        del prepared  # it keeps its pictures
        assert len(item.runs) == item.num_units == num_runs
        places = {item.offset + place + shift for first, count in item.runs for place in (first, first + count)
                  for shift in range(-reach, reach + 1)}  # fmt: skip
        core = core_of(llm)
        for border in sorted(places):
            core.scheduler.config = replace(core.scheduler.config, long_prefill_token_threshold=border)
            assert llm.reset_prefix_cache()
            (output,) = llm.generate(
                prompt(text, *images), replace_struct(GREEDY, max_tokens=2, logprobs=None)
            )
            assert output.outputs[0].token_ids == tokens[:2], border


def test_one_unit_in_a_step_while_others_decode(directories: dict[str, Path]) -> None:
    directory = directories["idefics3"]
    text, images = "<s>Look at <image>.", [picture(6, 60, 60)]
    with engine(directory, max_num_batched_encoder_embeds=4) as llm:
        alone = llm.generate({"prompt": "<s>A long story"}, SamplingParams(temperature=0.0, max_tokens=24))
        core, engine_ = core_of(llm), llm.llm_engine
        assert llm.reset_prefix_cache()
        before = core.encodings.num_encoded_units if core.encodings else 0
        engine_.add_request(
            "story", {"prompt": "<s>A long story"}, SamplingParams(temperature=0.0, max_tokens=24)
        )
        engine_.step()
        engine_.add_request("image", prompt(text, *images), GREEDY)
        outputs = {}
        while engine_.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine_.step()}
        assert core.encodings is not None and core.encodings.num_encoded_units == before + 17
        steps = core.scheduler.recent_steps(0)
        both = [one for one in steps if len(one.num_scheduled_tokens) == 2 and one.unfinished_prompts]
        assert len(both) > 10, "the story is written while units are encoded"
        assert outputs["story"].outputs[0].token_ids == alone[0].outputs[0].token_ids
        assert outputs["image"].outputs[0].token_ids == expected(directory, text, images, NUM_TOKENS)[0]


def test_async_scheduling_gives_the_same(directories: dict[str, Path]) -> None:
    directory = directories["clip"]
    with engine(directory, async_scheduling=True, max_num_batched_tokens=16) as llm:
        check(llm, directory, "<s>a<image>bc<image>d", [picture(0), picture(4, 50, 50)])


def test_several_processes_of_an_engine(directories: dict[str, Path]) -> None:
    directory = directories["smolvlm"]
    text, images = "<s>a<image>bc<image>d", [picture(0), picture(4, 50, 50)]
    settings: dict[str, Any] = {"enforce_eager": True, "device": "cpu", "dtype": "float32"}
    with LLM(
        str(directory), multiprocess=True, num_gpu_blocks_override=64, max_model_len=512, **settings
    ) as llm:
        check(llm, directory, text, images)
