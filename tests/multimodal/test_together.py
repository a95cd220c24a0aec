"""Images together with what else an engine does: several workers, drafts, adapters, caches outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from minivllm import LLM, LoRARequest, SamplingParams
from tests.kv_transfer.test_connectors import storage
from tests.lora.lora_adapters import write_adapter
from tests.multimodal.models import expected, make_tokenizer, picture, prompt, reference, text_config

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 64,
    "block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "max_num_batched_tokens": 40,
}
CASES: dict[str, dict[str, Any]] = {
    "a worker process": {"distributed_executor_backend": "mp"},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "TP 2 and PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "suffix drafts": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "DP 2": {"data_parallel_size": 2},
}

COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {},
    "compiled, PP 2": {"pipeline_parallel_size": 2},
    "compiled, TP 2 and drafts": {**CASES["TP 2"], **CASES["n-gram drafts"]},
}
CASES |= {
    case: {"enforce_eager": False, "compile_in_background": False, **settings}
    for case, settings in COMPILED.items()
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(
            pytest.param("smolvlm", case, marks=[pytest.mark.slow] * (case in COMPILED), id=case)
            for case in CASES
        ),
        pytest.param("llava-next", "TP 2 and PP 2", id="TP 2 and PP 2, lines of tiles"),
        pytest.param("llava-onevision", "n-gram drafts", id="n-gram drafts, lines of tiles"),
        pytest.param("qwen2.5-vl", "TP 2 and PP 2", id="TP 2 and PP 2, positions in space"),
        pytest.param("qwen3-vl", "TP 2 and PP 2", id="TP 2 and PP 2, deeper features"),
        pytest.param("qwen3-vl", "n-gram drafts", id="n-gram drafts, deeper features"),
        pytest.param("qwen3.5", "TP 2 and PP 2", id="TP 2 and PP 2, states"),
        *(
            pytest.param(kind, case, marks=pytest.mark.slow, id=f"{case}, {what}")
            for kind, what in (
                ("qwen2.5-vl", "positions in space"),
                ("qwen3-vl", "deeper features"),
                ("qwen3.5", "states"),
                ("llava-next", "lines of tiles"),
                ("llava-onevision", "resized lines of tiles"),
            )
            for case in COMPILED
        ),
    ],
)
def test_answers_are_those_of_transformers(directories: dict[str, Path], kind: str, case: str) -> None:
    directory = directories[kind]
    prompts = [
        ("<s>Look at <image> and say", [picture(0)]),
        ("<s>a<image>b c<image>d", [picture(1, 20, 90), picture(2, 64, 64)]),
        ("<s>Only words, words, words, words", []),
    ]
    with LLM(str(directory), **{**SETTINGS, **CASES[case]}) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt(text, *images) for text, images in prompts], GREEDY)
            for (text, images), output in zip(prompts, outputs):
                assert output.outputs[0].token_ids == expected(directory, text, images, NUM_TOKENS)[0]


def test_a_second_question_goes_to_the_engine_that_holds_the_image(directories: dict[str, Path]) -> None:
    with LLM(str(directories["smolvlm"]), **SETTINGS, data_parallel_size=2) as llm:
        for seed in range(3):
            asked = prompt("<s>Look at <image> and say", picture(seed, 60, 60))
            cached = [llm.generate(asked, GREEDY)[0].num_cached_tokens for _ in range(4)]
            assert cached[0] < min(cached[1:])


def test_a_draft_model_reads_text_only(directories: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(text_config()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    text, images = "<s>a<image>bc<image>d", [picture(1, 20, 90), picture(2, 64, 64)]
    with LLM(str(directories["smolvlm"]), **SETTINGS, speculative_config=drafts) as llm:
        (output,) = llm.generate(prompt(text, *images), GREEDY)
        assert output.outputs[0].token_ids == expected(directories["smolvlm"], text, images, NUM_TOKENS)[0]
        assert llm.llm_engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("kind", ("clip", "llava-next", "smolvlm", "qwen3-vl"))
def test_adapters_act_on_the_language_model(directories: dict[str, Path], tmp_path: Path, kind: str) -> None:
    directory = directories[kind]
    model, _ = reference(directory)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(5)
    matrices, rank = {}, 4
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    for name, tensor in parameters.items():
        part = name.split(".")
        if part[-1] != "weight" or part[-2] not in ("q_proj", "down_proj") or "vision" in name:
            continue
        a = torch.randn(rank, tensor.shape[1], generator=generator) / tensor.shape[1] ** 0.5
        b = torch.randn(tensor.shape[0], rank, generator=generator)
        module = name.removesuffix(".weight")
        matrices[f"base_model.model.{module}.lora_A.weight"] = a
        matrices[f"base_model.model.{module}.lora_B.weight"] = b
    adapter = LoRARequest(
        "changed", lora_path=str(write_adapter(tmp_path / "adapter", matrices, r=rank, lora_alpha=rank))
    )
    text, images = "<s>Look at <image> and say", [picture(0)]
    plain, _ = expected(directory, text, images, NUM_TOKENS)
    try:
        with torch.no_grad():
            for name in {name.split(".lora_")[0] for name in matrices}:
                a, b = (matrices[f"{name}.lora_{matrix}.weight"] for matrix in "AB")
                parameters[name.removeprefix("base_model.model.") + ".weight"] += b @ a
        changed, _ = expected(directory, text, images, NUM_TOKENS)
    finally:
        with torch.no_grad():
            for name, tensor in parameters.items():
                tensor.copy_(before[name])
    assert changed != plain
    with LLM(str(directory), **SETTINGS, enable_lora=True, max_lora_rank=8) as llm:
        asked = [prompt(text, *images)] * 3
        outputs = llm.generate(asked, GREEDY, lora_request=[None, adapter, None])
        assert [output.outputs[0].token_ids for output in outputs] == [plain, changed, plain]


def test_a_stored_cache_spares_the_encoder(directories: dict[str, Path], tmp_path: Path) -> None:
    """Another engine finds the keys and values of a span, for this image and no other."""
    directory, text = directories["smolvlm"], "<s>Look at <image> and say what it is."
    found, encoded = [], []
    for image in (picture(0, 60, 60), picture(0, 60, 60), picture(1, 60, 60)):
        with LLM(str(directory), **SETTINGS, kv_transfer_config=storage(tmp_path / "stored")) as llm:
            (output,) = llm.generate(prompt(text, image), GREEDY)
            assert output.outputs[0].token_ids == expected(directory, text, [image], NUM_TOKENS)[0]
            found.append(output.num_cached_tokens)
            encodings = llm.llm_engine.client.core.encodings  # type: ignore[attr-defined]
            encoded.append(encodings.num_encoded_units)
    assert found[1] > found[0] == 0
    assert encoded == [17, 0, 17]
    assert found[2] < 16
