"""Models that see, whose language model is computed by the layers of transformers; and why some do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GemmaConfig, GraniteConfig

from minivllm import LLM, SamplingParams
from minivllm.checkpoints.choose import choose_implementation
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import ModelError
from minivllm.multimodal.spans.by_processor import ByProcessor
from tests.multimodal.conftest import engine
from tests.multimodal.models import (
    KINDS,
    expected,
    make_tokenizer,
    picture,
    prompt,
    save_lines_of_tiles,
    text_config,
)
from tests.multimodal.other_models import name_tokens
from tests.multimodal.test_parity import check

NAMED = [kind for kind in KINDS if not kind.startswith("qwen")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("kind", NAMED)
def test_layers_of_transformers_see_what_those_of_minivllm_see(
    directories: dict[str, Path], kind: str
) -> None:
    directory = directories[kind]
    with engine(directory, model_impl="transformers") as llm:
        check(llm, directory, "<s>Look at <image> and say", [picture(0)])
        check(llm, directory, "<s><image><image>Which?", [picture(1, 20, 90), picture(2, 64, 64)])
        check(llm, directory, "<s>Only words.", [])


@pytest.mark.parametrize("text", (GraniteConfig, GemmaConfig))
def test_a_language_model_of_any_family(tmp_path: Path, text: type) -> None:
    """Their embeddings are scaled after features took their places."""
    settings = text_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id")
    more = {"embedding_multiplier": 3.0, "logits_scaling": 2.0} if text is GraniteConfig else {"head_dim": 16}
    config = text(**{name: settings[name] for name in names}, **more)
    directory = save_lines_of_tiles(tmp_path, "llava-next", config)
    implementation, why = choose_implementation(directory)
    assert implementation == "transformers" and why.endswith(f"llava_next with {config.model_type}")
    with engine(directory, max_num_batched_tokens=24, max_num_seqs=4) as llm:
        check(llm, directory, "<s>a<image>b<image>c", [picture(0), picture(1, 16, 16)])
        check(llm, directory, "<s>Only words.", [])


@pytest.mark.parametrize("model_impl", ("auto", "minivllm"))
def test_texts_that_minivllm_knows_are_its_own(directories: dict[str, Path], model_impl: str) -> None:
    for kind in NAMED:
        assert choose_implementation(directories[kind], wanted=model_impl)[0] == "minivllm"


def vars_of(directory: Path) -> dict[str, Any]:
    """Of an engine whose workers are other processes."""
    return {"model": str(directory), "device": "cpu", "dtype": "float32", "enforce_eager": True,
            "num_gpu_blocks_override": 64, "block_size": 16, "max_num_seqs": 4, "max_model_len": 256}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("vipllava", {"tensor_parallel_size": 2}),
        ("vipllava", {"pipeline_parallel_size": 2}),
        ("gemma4-small", {"tensor_parallel_size": 2}),
    ],
)
def test_several_workers(directories: dict[str, Path], kind: str, size: dict[str, int]) -> None:
    directory = directories[kind]
    with LLM(**vars_of(directory), **size) as llm:
        images = [picture(0), picture(1)]
        text = "<s>a<image>b<image>c"
        (output,) = llm.generate(prompt(text, *images), GREEDY)
        assert output.outputs[0].token_ids == expected(directory, text, images, 4)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("vipllava", "aya-vision"))
def test_compiled_steps_of_text_and_uncompiled_ones_of_images_agree(
    directories: dict[str, Path], kind: str
) -> None:
    directory = directories[kind]
    with engine(directory, enforce_eager=False, compile_in_background=False) as llm:
        check(llm, directory, "<s>a<image>b<image>c", [picture(0), picture(1, 16, 16)])
        check(llm, directory, "<s>Only words.", [])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("paligemma", "their tokens see what comes later, or are rotated by row and column"),
        ("glm4v", "their tokens see what comes later, or are rotated by row and column"),
        ("mllama", "has no get_image_features"),
        ("lighton_ocr", "get_image_features needs image_sizes besides pixels"),
        ("kosmos-2", "their language model is of a kind of its own"),
    ],
)
def test_families_that_do_something_else_with_images_say_so(tmp_path: Path, family: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ModelError, match=f"Images of models of type '{family}' are not served: .*{reason}"):
        ByProcessor({"model_type": family}, str(tmp_path))


@pytest.mark.parametrize(
    ("family", "images", "reason"),
    [
        ("cohere2_vision", "Cohere2VisionImageProcessor", "their processor cannot be made here"),
        ("aria", "AriaImageProcessor", "get_image_features reads pixel_mask besides pixels"),
        ("exaone4_5", "Qwen2VLImageProcessor", "get_image_features reads image_grid_thw besides pixels"),
        ("ovis2", "Ovis2ImageProcessor", "their processor needs more than the number of their tiles"),
        ("blip-2", "BlipImageProcessor", "Blip2Processor does not say what stands for one of them"),
    ],
)
def test_processors_that_do_something_else_say_so(
    tmp_path: Path, family: str, images: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": images}))
    tokenizer = make_tokenizer()
    name_tokens(tokenizer, {"image_token": "<image>"})
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"Images of models of type '{family}' are not served: .*{reason}"):
        ByProcessor({"model_type": family}, str(tmp_path))


def change(directory: Path, target: Path, file: str, **entries: object) -> None:
    shutil.copytree(directory, target, dirs_exist_ok=True)
    found = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(found | entries))


def test_a_model_whose_images_are_not_served_reads_text(directories: dict[str, Path], tmp_path: Path) -> None:
    change(directories["vipllava"], tmp_path, "processor_config.json", image_token="<no such token>")
    config, _ = resolve(EngineArgs(model=str(tmp_path), device="cpu"))
    assert config.images is None and "'vipllava' are not served" in config.no_images
    with engine(tmp_path) as llm:
        (output,) = llm.generate({"prompt": "<s>Only words."}, GREEDY)
    assert output.outputs[0].token_ids == expected(directories["vipllava"], "<s>Only words.", [], 4)[0]


def test_an_encoder_that_gives_more_than_the_processor_writes_is_refused(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    change(directories["aya-vision"], tmp_path, "processor_config.json", downsample_factor=1, patch_size=4)
    with (
        pytest.raises(ModelError, match="gives 4 features of a tile, but its processor writes 16"),
        engine(tmp_path),
    ):
        pass
