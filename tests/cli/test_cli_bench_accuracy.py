"""``minivllm bench accuracy``: figures are those of float64 on the same tokens,
and mistakes get a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.accuracy.accuracy import REFERENCE, accuracy_figures, tokenized
from minivllm.bench.accuracy.passages import PASSAGES
from minivllm.bench.reports.report import read_report
from minivllm.errors import RequestError
from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.cli.test_cli_bench import bench

LOGARITHMS = st.floats(-30, 0)


@given(st.lists(st.tuples(LOGARITHMS, LOGARITHMS), min_size=1))
def test_perplexity_is_the_inverse_of_the_mean_probability_and_an_error_has_no_sign(
    pairs: list[tuple[float, float]],
) -> None:
    found, expected = zip(*pairs)
    figures = accuracy_figures("text", "engine", found, expected)
    product = math.prod(math.exp(one) ** (1 / len(found)) for one in found)
    assert figures["perplexity"].samples == pytest.approx([1 / product])
    worst = max(abs(one - other) for one, other in pairs)
    [error] = figures["error"].samples
    assert worst / len(pairs) <= error + 1e-12 and error <= worst + 1e-12
    swapped = accuracy_figures("text", "engine", expected, found)
    assert swapped["error"].samples == pytest.approx([error])


def test_a_file_is_read_in_windows(word_tokenizer: Path, tmp_path: Path) -> None:
    file, model = tmp_path / "text.txt", str(word_tokenizer)
    file.write_text(PASSAGES[0], encoding="utf-8")
    ids = list(load_tokenizer(model).encode(PASSAGES[0]))
    windows = tokenized(model, file, 50)
    read = [token for one in windows for token in one]
    assert read == ids[: len(read)] and len(ids) - len(read) < 2
    assert {len(one) for one in windows[:-1]} == {50} and 2 <= len(windows[-1]) <= 50
    assert tokenized(model, None, 50)[0] == ids and len(tokenized(model, None, 50)) == len(PASSAGES)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="not UTF-8"):
        tokenized(model, file, 50)
    file.write_text("")
    with pytest.raises(RequestError, match="has 0 tokens"):
        tokenized(model, file, 50)


@pytest.mark.slow
def test_an_engine_that_computes_in_float32_makes_no_error(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text(PASSAGES[1], encoding="utf-8")
    settings = [
        "--engine",
        "minivllm,enforce_eager=true",
        "--vs",
        "minivllm,enforce_eager=true,quantization=int8",
    ]
    result = bench(
        "accuracy", str(tiny_model("llama")), *settings, "--dtype", "float32", "--text", str(text), "--window", "100",
        "--json", str(file),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = read_report(file)
    figures = {(one.side, one.metric): one.samples[0] for one in report.measurements}
    ours, rounded = settings[1], settings[3]
    assert figures[ours, "perplexity"] == pytest.approx(figures[REFERENCE, "perplexity"], rel=1e-5)
    assert figures[ours, "error"] < 1e-5 < figures[rounded, "error"]
    assert {(one.against, one.metric) for one in report.comparisons} == {
        (rounded, "perplexity"), (rounded, "error"), (REFERENCE, "perplexity")
    }  # fmt: skip
    assert "of text.txt" in result.stdout and "perplexity" in result.stdout


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--vs", "transformers-cb"], "name transformers, whose layers it runs"),
        (["--engine", "minivllm,lora=2"], "name minivllm,lora=2 without lora and regex"),
    ],
)
def test_what_tells_no_probabilities_of_a_text_is_refused(given: list[str], told: str) -> None:
    result = bench("accuracy", *given)
    assert result.returncode == 2
    assert told in result.stderr and "Traceback" not in result.stderr


def test_a_text_that_an_engine_refuses_ends_with_its_sentence(tiny_model: Callable[..., Path]) -> None:
    result = bench(
        "accuracy", str(tiny_model("llama")), "--engine", "minivllm,enforce_eager=true,max_model_len=64"
    )
    assert result.returncode == 1
    assert "stopped: The prompt has" in result.stderr and "Traceback" not in result.stderr
