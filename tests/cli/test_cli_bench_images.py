"""``bench images``: a second question costs its text alone, and units spread an image over steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest

from minivllm.bench.images.command import mark
from minivllm.bench.images.random_model import Sizes, write_random_model
from minivllm.bench.images.workloads import PROMPT_TOKENS, SeeingEngine
from minivllm.bench.reports.report import Report, read_report
from minivllm.cli.main import main
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.multimodal.spans.families import make_expansion
from minivllm.tokenizer.tokenizer import load_tokenizer

UNITS = 17
"""Of a square picture: four by four tiles, and the whole."""
TINY = Sizes(
    text={
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
    vision={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 16,
    },
    scale_factor=2,
)
SETTINGS = {
    "load_format": "dummy",
    "enforce_eager": True,
    "dtype": "float32",
    "device": "cpu",
    "block_size": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smolvlm")
    write_random_model(directory, TINY)
    return directory


@pytest.fixture(scope="module")
def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """Of a small run from the command line."""
    path = tmp_path_factory.mktemp("report") / "images.json"
    engine = ",".join(["minivllm", *(f"{name}={json.dumps(value)}" for name, value in SETTINGS.items())])
    small = [
        "--width=60",
        "--height=60",
        "--units=4",
        "--streams=2",
        "--tokens=40",
        "--arrivals=2",
        "--pause=3",
        "--repeats=2",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "images", f"--model={model}", f"--engine={engine}", *small, f"--json={path}"])
    assert ended.value.code == 0
    yield read_report(path)


def samples(report: Report, case: str, side: str, metric: str) -> list[float]:
    [found] = [one for one in report.measurements if (one.case, one.side, one.metric) == (case, side, metric)]
    return found.samples


def test_a_second_question_encodes_nothing_and_computes_its_text_and_part_of_a_block(report: Report) -> None:
    case, first, second = "the same image again", "first question", "second question"
    assert samples(report, case, first, "encoded units") == [UNITS] * 2
    assert samples(report, case, first, "images whose pixels are asked for") == [1, 1]
    assert samples(report, case, second, "encoded units") == [0, 0]
    assert samples(report, case, second, "images whose pixels are asked for") == [0, 0]
    # Four placeholders and two markers for each tile and for the whole, a newline after a row, and an end.
    span = UNITS * (4 + 2) + 4 + 1
    assert report.notes[0] == f"{case}: {span} tokens stand for it."
    assert samples(report, case, first, "computed tokens") == [span + PROMPT_TOKENS] * 2
    for computed in samples(report, case, second, "computed tokens"):
        assert 1 <= computed <= PROMPT_TOKENS + SETTINGS["block_size"] - 1  # type: ignore[operator]


def test_units_spread_an_image_over_steps(report: Report) -> None:
    for case, steps in (("text, whole images", 1), ("text, 4 units a step", ceil(UNITS / 4))):
        assert samples(report, case, "beside images", "images answered meanwhile") == [2, 2]
        assert samples(report, case, "beside images", "steps that encode an image") == [steps] * 4


def test_text_is_measured_alone_and_beside_images(report: Report) -> None:
    for case in ("text, whole images", "text, 4 units a step"):
        for side in ("text alone", "beside images"):
            gaps = samples(report, case, side, "gap between tokens")
            assert len(gaps) == 2 * 2 * (40 - 1) and min(gaps) > 0
    assert sum("mark: " in note for note in report.notes) == 7


def test_marks_say_whether_they_hold() -> None:
    assert mark("a", 2.0, most=2) == "a: 2 (mark: at most 2, holds)."
    assert mark("a", 2.01, most=2) == "a: 2.01 (mark: at most 2, missed)."
    assert mark("a", 10.0, least=10) == "a: 10 (mark: at least 10, holds)."
    assert mark("a", 9.9, least=10) == "a: 9.9 (mark: at least 10, missed)."
    assert mark("a", 1.0) == "a: 1."


def test_pictures_and_texts_never_come_twice(model: Path) -> None:
    args = EngineArgs.from_kwargs(model=str(model), max_model_len=256, num_gpu_blocks_override=40, **SETTINGS)
    with LLMEngine.from_args(args) as engine:
        seeing = SeeingEngine(engine, (20, 20))
        assert len({seeing.picture().tobytes() for _ in range(4)}) == 4
        texts = [seeing.text() for _ in range(200)]
        assert len(set(map(tuple, texts))) == 200
        placeholder = engine.client.config.images.placeholder  # type: ignore[union-attr]
        assert placeholder not in {token for text in texts for token in text}


def test_a_model_that_reads_text_only_is_refused(model: Path) -> None:
    args = EngineArgs.from_kwargs(
        model=str(model),
        limit_mm_per_prompt={"image": 0},
        max_model_len=64,
        num_gpu_blocks_override=9,
        **SETTINGS,
    )
    with (
        LLMEngine.from_args(args) as engine,
        pytest.raises(ConfigError, match="nothing to measure with images"),
    ):
        SeeingEngine(engine, (20, 20))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine=vllm"], "--engine is 'vllm', but must be minivllm"),
        (["--engine=minivllm,model=x"], "must not hold model, which this benchmark sets: give --model"),
        (["--engine=minivllm,max_num_batched_encoder_embeds=64"], "give --units"),
        (['--engine=minivllm,limit_mm_per_prompt={"image": 0}'], "limit_mm_per_prompt={'image': 0}"),
    ],
)
def test_what_cannot_be_measured_gets_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "images", *arguments])
    assert ended.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_the_model_that_is_made_has_the_sizes_of_smolvlm_256m(tmp_path: Path) -> None:
    """A picture of 1,024 by 1,024 pixels stands as 1,127 tokens, as the formula of its processor gives."""
    import torch
    from transformers import AutoConfig, SmolVLMForConditionalGeneration

    write_random_model(tmp_path)
    config, processor = (
        json.loads((tmp_path / name).read_text()) for name in ("config.json", "preprocessor_config.json")
    )
    expansion = make_expansion("smolvlm", config, processor, str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    span = expansion.expand(1024, 1024, {}, lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert (span.num_units, expansion.unit_embeds, expansion.most_embeds) == (17, 64, 1088)
    assert len(span.token_ids) == 67 + 4 * (66 * 4 + 1)
    with torch.device("meta"):
        model = SmolVLMForConditionalGeneration(AutoConfig.from_pretrained(tmp_path))
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e6) == 256
