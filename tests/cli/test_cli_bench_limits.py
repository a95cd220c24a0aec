"""``bench roofline``, ``overhead`` and ``startup``: bounds are counted right, and what is printed adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from minivllm import LLM, SamplingParams
from minivllm.bench.command import bench
from minivllm.bench.parts.overhead import IN_PROCESS, broadcast_seconds
from minivllm.bench.parts.parts import StepTimes, decode_note, missing_note
from minivllm.bench.parts.startup import start_engine
from minivllm.bench.reports.report import read_report
from minivllm.bench.sides.side_process import peak_memory_bytes
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.cli.engine.options import engine_flags, with_options
from minivllm.cli.main import main
from minivllm.config import EngineArgs
from minivllm.engine_process.client import load_core
from minivllm.errors import ModelError
from minivllm.profiling.spans import span
from minivllm.simulation import bounds
from minivllm.simulation.bounds import Machine, measure_machine


def eager(model: Path) -> EngineArgs:
    return EngineArgs(
        model=str(model), enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9, dtype="float32"
    )


def test_every_step_reads_all_weights_but_the_embedding(tiny_model: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model("llama")
    core, _ = load_core(eager(path))
    decoder = core.executor.worker.runner.model  # type: ignore[attr-defined]
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = sum(
        parameter.numel() * 4 for name, parameter in theirs.named_parameters() if "embed_tokens" not in name
    )
    assert bounds.weight_bytes(decoder) == expected
    config = theirs.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert bounds.kv_bytes_per_token(decoder) == per_token
    core.shutdown()


def test_the_operations_of_a_prefill_are_those_torch_counts(tiny_model: Callable[..., Path]) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    path, tokens = tiny_model("llama"), 24
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        theirs(torch.arange(tokens)[None], logits_to_keep=1)
    config = read_decoder_config(path)
    mixer = config.layers[0].mixer
    # Eager attention computes the whole square of scores; a causal one needs a little more than half of it.
    square = 4 * mixer.heads * mixer.head_dim * tokens**2 * config.num_layers
    triangle = 4 * mixer.heads * mixer.head_dim * tokens * (tokens + 1) / 2 * config.num_layers
    # After the last attention all tokens but one could be dropped, and transformers does not.
    by_module = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    last = f"LlamaForCausalLM.model.layers.{config.num_layers - 1}"
    dropped = (by_module[f"{last}.mlp"] + by_module[f"{last}.self_attn.o_proj"]) * (tokens - 1) / tokens
    rotary = 2 * tokens * mixer.head_dim / 2  # the angles, as a product of positions and frequencies
    ours = bounds.prefill_flops(config, tokens)
    assert ours == pytest.approx(counter.get_total_flops() - square + triangle - dropped, abs=rotary)


def test_the_products_of_a_prefill_are_those_the_engine_computes(tiny_model: Callable[..., Path]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    path, tokens = tiny_model("llama"), 24
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with LLM(**asdict(eager(path))) as llm, FlopCounterMode(display=False) as counter:
        llm.generate({"prompt_token_ids": list(range(2, 2 + tokens))}, params, use_tqdm=False)
    config = read_decoder_config(path)
    mixer = config.layers[0].mixer
    triangle = 4 * mixer.heads * mixer.head_dim * tokens * (tokens + 1) / 2 * config.num_layers
    products = {torch.ops.aten.mm, torch.ops.aten.addmm}
    counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if op in products)
    after_attention = mixer.heads * mixer.head_dim + 3 * config.layers[0].mlp.inner
    padding_row = 2 * config.hidden_size * (after_attention + config.vocab_size)
    assert counted - (bounds.prefill_flops(config, tokens) - triangle) in (0, padding_row), (
        "one row, or padded to two"
    )


def test_a_window_bounds_what_is_read_and_computed(tiny_model: Callable[..., Path]) -> None:
    window = read_decoder_config(tiny_model("mistral-window"))
    assert window.attention_specs[0].window == 24
    assert bounds.kv_tokens_read(window, 100.0) == 24
    assert bounds.kv_tokens_read(window, 10.0) == 10
    whole = read_decoder_config(tiny_model("mistral"))
    assert bounds.prefill_flops(window, 20) == bounds.prefill_flops(whole, 20)
    mixer = whole.layers[0].mixer
    keys = 24 * 25 / 2 + 76 * 24
    difference = bounds.prefill_flops(whole, 100) - bounds.prefill_flops(window, 100)
    per_key = 4 * mixer.heads * mixer.head_dim * whole.num_layers
    assert difference == pytest.approx(per_key * (100 * 101 / 2 - keys))


def test_the_machine_can_do_something() -> None:
    machine = measure_machine(torch.device("cpu"), torch.float32, size=2**20, width=64)
    assert machine.copy > 0 and machine.read > 0 and machine.flops > 0
    assert machine.bandwidth == max(machine.copy, machine.read)


def test_the_parts_of_what_is_missing_add_up() -> None:
    machine = Machine(copy=1e9, read=2e9, flops=1e12)
    times = StepTimes(whole=[0.100] * 3, parts={"schedule": [0.010] * 3, "attention": [0.020] * 3})
    note = missing_note(times, weights=80_000_000, kv=20_000_000, machine=machine, complete=True)
    # 100 MB at 2 GB/s are 50 ms of 100; 10 host, 20 - 10 attention, 70 - 40 the rest.
    assert (
        "Missing are 50 ms: 10 on the host" in note and "10 in attention" in note and "30 in layers" in note
    )
    assert "50% of the bound" in decode_note("decode", times, 80_000_000, 20_000_000, machine)
    assert "kernels" in missing_note(times, 80_000_000, 20_000_000, machine, complete=False)


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_roofline_prints_the_shares_and_what_is_missing(
    has_bfloat16: bool, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_bfloat16)
    result = CliRunner().invoke(
        bench,
        [
            "roofline", str(tiny_model("llama")), "--enforce-eager", "--steps", "4", "--context", "20",
            "--prefill", "30", "--repeats", "2", "--probe-mib", "1", "--probe-width", "64", "--batch", "2",
            "--json", str(tmp_path / "r.json"),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    assert "% of the bound" in result.output and "Missing are" in result.output
    report = read_report(tmp_path / "r.json")
    by_metric = {one.metric: one for one in report.measurements}
    [copy] = by_metric["copy"].samples
    [read] = by_metric["read"].samples
    read_bytes = report.configuration["weight_bytes"] + report.configuration["kv_bytes"]
    for step, share in zip(by_metric["step"].samples, by_metric["share of the bandwidth bound"].samples):
        assert share == pytest.approx(read_bytes / (max(copy, read) * 1e9) / (step / 1e3))
    assert len(by_metric["time to first token"].samples) == 2
    # In bfloat16 a CPU without it takes a minute for each product.
    assert report.configuration["probe_dtype"] == ("bfloat16" if has_bfloat16 else "float32")


@pytest.mark.slow
def test_a_start_is_measured_part_by_part_in_a_fresh_process(tiny_model: Callable[..., Path]) -> None:
    root = str(Path(__file__).parents[2])
    arguments = {"model": str(tiny_model("llama")), "enforce_eager": True, "max_model_len": 64}
    parts = start_engine(arguments, os.environ | {"PYTHONPATH": root})
    assert set(parts) == {
        "python", "import", "load", "compile", "capture", "other", "first token", "start to first token",
    }  # fmt: skip
    total = parts.pop("start to first token")
    assert sum(parts.values()) == pytest.approx(total, rel=0.01)
    assert parts["load"] > 0 and parts["import"] > 0 and parts["first token"] > 0


def test_a_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2; echo no such model >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(ModelError, match=r"did not start: no such model"):
        start_engine({"model": "m"}, os.environ)


@pytest.mark.slow
def test_startup_measures_cold_and_warm_and_the_chat(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    result = CliRunner().invoke(
        bench,
        ["startup", str(smollm2_path), "--enforce-eager", "--repeats", "1", "--chat", "--json", str(file)],
    )
    assert result.exit_code == 0, result.exception
    measured = {(one.case, one.metric) for one in read_report(file).measurements}
    assert {
        (case, metric) for case in ("cold", "warm") for metric in ("compile", "chat, first output")
    } <= measured


def test_engine_arguments_become_flags_again() -> None:
    seen: list[EngineArgs] = []

    @with_options
    def show(args: EngineArgs) -> None:
        seen.append(args)

    app = typer.Typer()
    app.command()(show)
    own = ["package.module:One", "package.module:Two"]
    args = EngineArgs(
        enforce_eager=True, enable_prefix_caching=False, hf_overrides={"a": 1}, logits_processors=own
    )
    result = CliRunner().invoke(app, engine_flags(args))
    assert result.exit_code == 0, result.output
    assert seen == [args]


def run_overhead(
    model: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[str, dict[str, list[float]]]:
    """What is printed, and the samples of every part."""
    small = [
        "--enforce-eager",
        "--device=cpu",
        "--batch=2",
        "--steps=4",
        "--context=5",
        "--num-gpu-blocks-override=9",
    ]
    report = model / "overhead.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "overhead", str(model), *small, *flags, f"--json={report}"])
    assert ended.value.code == 0
    measured = json.loads(report.read_text())["measurements"]
    return capsys.readouterr().out, {one["metric"]: one["samples"] for one in measured}


@pytest.mark.slow
def test_overhead_is_what_a_step_costs_besides_the_model(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said, parts = run_overhead(tiny_model("llama"), capsys)
    assert set(parts) == {*IN_PROCESS, "overhead", "step"} and "Overhead is" in said
    for total, *own in zip(parts["overhead"], *(parts[name] for name in IN_PROCESS)):
        assert total == pytest.approx(sum(own))


def test_the_way_to_workers_ends_with_the_slowest_of_them() -> None:
    def collective(method: str) -> list[float]:
        assert method == "clock"
        with span("write"):
            pass
        written = time.perf_counter()
        time.sleep(0.02)
        return [written, written + 0.01]

    seconds = broadcast_seconds(collective, 3)
    assert seconds["wake-up"] == pytest.approx([0.01] * 3, abs=2e-3)
    assert len(seconds["answer"]) == 3 and min(seconds["answer"]) >= 0.009


@pytest.mark.slow
def test_overhead_shows_the_way_to_workers_and_back(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said, parts = run_overhead(tiny_model("llama"), capsys, "--tensor-parallel-size=2")
    assert "The way to 2 worker(s) and back takes" in said
    broadcast = [parts[name] for name in ("encode", "ring write", "wake-up", "answer")]
    assert all(len(samples) == 4 and 0 <= min(samples) < max(samples) < 1000 for samples in broadcast)
    assert all(total < whole for total, whole in zip(parts["overhead"], parts["step"]))


def test_peak_memory_counts_the_processes_that_an_engine_has_started() -> None:
    child = "import sys; held = bytearray(b'x') * (60 * 2**20); print(end='!', flush=True); sys.stdin.read()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    before = peak_memory_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.read(1) == b"!"
        assert peak_memory_bytes() - before > 60 * 2**20  # a child of a child
        process.stdin.close()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the peak of a process is asked from /proc"
)
def test_peak_of_a_process_is_not_that_of_its_parent() -> None:
    child = "from minivllm.bench.sides.side_process import peak_memory_bytes; print(peak_memory_bytes())"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"held = bytearray(b'x') * (500 * 2**20); {start}"
    ran = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 0 < int(ran.stdout) < 400 * 2**20
