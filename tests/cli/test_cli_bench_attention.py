"""``bench attention``: what is timed gives the right values, and tuning finds the fastest options that run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from minivllm.attention.decode_options import CHOICES, DecodeOptions, table_path
from minivllm.bench.command import bench
from minivllm.bench.parts import decode_attention
from minivllm.bench.parts.attention import PAGE_SIZES, Tuned, allowed, keep, parse_sizes, search, tuned_case
from minivllm.bench.parts.decode_attention import (
    Heads,
    compiled_attention,
    gathered_attention,
    largest_error,
    make_case,
)
from minivllm.bench.reports.report import read_report
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.errors import ConfigError, ModelError

CPU = torch.device("cpu")
HEADS = Heads(kv_heads=2, group=3, head_dim=16, dtype=torch.float32)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "minivllm"))


@pytest.mark.parametrize(("batch", "context", "page"), [(1, 5, 8), (3, 64, 16), (2, 100, 32)])
def test_a_case_reads_each_request_s_own_pages(batch: int, context: int, page: int) -> None:
    case = make_case(HEADS, batch, context, page, CPU)
    assert case.tables.unique().numel() == case.tables.numel() and int(case.tables.min()) >= 1
    assert case.bytes_read == 2 * batch * context * 2 * 16 * 4
    out = gathered_attention(case)()
    assert out.shape == (batch, 2, 3, 16)
    assert largest_error(case, out) < 1e-5
    for index, table in enumerate(case.tables):
        k, v = (cache[table.long()].flatten(0, 1)[:context].double() for cache in (case.k_cache, case.v_cache))
        scores = torch.einsum("hgd,khd->hgk", case.q[index].double(), k) / 4
        expected = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v)
        torch.testing.assert_close(out[index].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "context"), [(1, 100), (3, 64)])
def test_compiled_attention_gives_the_same(batch: int, context: int) -> None:
    if (reason := cannot_compile_reason(CPU)) is not None:
        pytest.skip(reason)
    case = make_case(HEADS, batch, context, 32, CPU)
    assert largest_error(case, compiled_attention(case, {"PARTITION_SIZE": 1})()) < 1e-5


def test_figures_are_bytes_over_time_and_shares_of_a_copy(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    result = CliRunner().invoke(
        bench,
        [
            "attention", str(tiny_model("llama")), "--backend", "gather", "--batch", "1,2", "--context", "40",
            "--page", "16", "--calls", "3", "--probe-mib", "1", "--json", str(file),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    measurements = read_report(file).measurements
    [copy] = measurements[0].samples
    for batch in (1, 2):
        own = {one.metric: one.samples for one in measurements if one.case == f"batch {batch}, context 40, page 16"}
        assert len(own["time"]) == 3 and own["largest error"][0] < 1e-4
        for time, rate, share in zip(own["time"], own["KV read"], own["share of a copy"]):
            assert rate == pytest.approx(2 * batch * 40 * 2 * 16 * 4 / (time * 1e-6) / 1e9)
            assert share == pytest.approx(rate / copy)


def test_the_search_finds_the_fastest_setting_that_runs() -> None:
    def run(setting: Mapping[str, int]) -> float:
        if setting.get("a") == 4 and setting.get("b") == 9:
            raise RuntimeError("no valid triton configs\nmore")
        return 10.0 - setting.get("a", 0) - setting.get("b", 0) / 10

    found = search(run, {}, {"a": (1, 2, 4), "b": (3, 6, 9)})
    assert found.setting == {"a": 4, "b": 6}
    assert (found.seconds, found.untuned_seconds) == (pytest.approx(5.4), 10.0)
    assert list(found.failed.values()) == ["RuntimeError: no valid triton configs"]


def test_the_search_goes_round_again_when_options_depend_on_each_other() -> None:
    times = {(1, 1): 5.0, (2, 1): 6.0, (1, 2): 4.0, (2, 2): 1.0}
    found = search(lambda setting: times[setting["a"], setting["b"]], {"a": 1, "b": 1}, {"a": (1, 2), "b": (1, 2)})
    assert found.setting == {"a": 2, "b": 2} and found.tried == 4


def test_what_does_not_run_at_all_is_told() -> None:
    def run(setting: Mapping[str, int]) -> float:
        raise RuntimeError("no compiler")

    with pytest.raises(ModelError, match="RuntimeError: no compiler"):
        search(run, {}, {"a": (1,)})


def test_blocks_of_keys_divide_pages() -> None:
    assert allowed("cuda", 32)["BLOCK_N"] == (16, 32)
    assert allowed("cuda", 32)["num_warps"] == CHOICES["num_warps"]
    assert allowed("cpu", 32) == {"page_size": PAGE_SIZES}


def tune(model: Path) -> list[str]:
    """The notes of a tuning run over batch 3, context 40, in which every setting runs, uncompiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_attention, "compiled_attention", lambda case, options: gathered_attention(case))
        file = model / "report.json"
        result = CliRunner().invoke(
            bench,
            [
                "attention", str(model), "--batch", "3", "--context", "40", "--calls", "2", "--probe-mib", "1",
                "--tune", "--json", str(file),
            ],
        )  # fmt: skip
    assert result.exit_code == 0, result.exception
    return read_report(file).notes


def test_on_a_cpu_tuning_names_the_block_size_to_start_with(tiny_model: Callable[..., Path]) -> None:
    [note] = tune(tiny_model("llama"))
    found = re.fullmatch(
        r"batch 3, context 40, page 64: --block-size (\d+) is best, ([\d.]+) × as fast as untuned; 5 settings ran.",
        note,
    )
    assert found is not None and int(found[1]) in PAGE_SIZES and float(found[2]) >= 1


def test_what_tuning_keeps_is_what_the_next_engine_on_that_gpu_uses() -> None:
    heads = Heads(kv_heads=2, group=3, head_dim=64, dtype=torch.bfloat16)
    case = make_case(heads, 3, 100, 32, CPU)
    setting = {"BLOCK_N": 32, "SPLIT_KV": 8, "num_warps": 4, "num_stages": 2}
    path = keep("Some GPU", [tuned_case(case, Tuned(setting, 1e-6, 2e-6, 9, {}))])
    assert path == table_path("Some GPU")
    options = DecodeOptions.of_gpu("Some GPU")
    assert options.choose(batch_kv_heads=6, head_dim=64, dtype=torch.bfloat16, block_size=32) == setting
    [kept] = options.cases
    assert (kept.batch_kv_heads, kept.group, kept.context, kept.page_size) == (6, 3, 100, 32)
    assert kept.gb_per_second == pytest.approx(2 * 3 * 100 * 2 * 64 * 2 / 1e-6 / 1e9) == 2 * kept.untuned_gb_per_second


def test_a_table_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file where a directory should be")
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    with pytest.raises(ModelError, match=r"Some_GPU\.json cannot be written: "):
        keep("Some GPU", [])


def test_wrong_sizes_and_combinations_are_refused(tiny_model: Callable[..., Path]) -> None:
    for text in ("", "0", "1,,2", "x", "-1", "1.5"):
        with pytest.raises(ConfigError, match="whole numbers above 0"):
            parse_sizes("batch", text)
    for flags in (["--backend", "xformers"], ["--backend", "gather", "--tune"]):
        result = CliRunner().invoke(bench, ["attention", str(tiny_model("llama")), *flags])
        assert isinstance(result.exception, ConfigError)
