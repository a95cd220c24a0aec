"""``minivllm bench``: cases and sides are read right, all sides get the same tokens,
mistakes get a sentence."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.bench.command import bench as bench_app
from minivllm.bench.engines import parse_loads, without_features
from minivllm.bench.parts.kernels import COMPILED_TELLS, NAME_CHARS, readable
from minivllm.bench.parts.parts import timed_spans
from minivllm.bench.reports.figures import memory_figures
from minivllm.bench.reports.report import read_report
from minivllm.bench.requests.workloads import SpeedCase, WorkloadCase, parse_case
from minivllm.bench.rounds import side_processes
from minivllm.bench.rounds.rounds import common_room
from minivllm.bench.rounds.side_processes import (
    Side,
    SideSpec,
    check_installed,
    complete,
    parse_peer_pythons,
    parse_sides,
    steady_pool,
)
from minivllm.bench.sides.drive import Room, Task
from minivllm.errors import ConfigError, ModelError
from minivllm.profiling.spans import span


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minivllm.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def test_cases_are_read() -> None:
    assert parse_case("decode:16") == SpeedCase(16, 128, 64)
    assert parse_case("decode:2:300") == SpeedCase(2, 300, 64)
    assert parse_case("prefill:512") == SpeedCase(1, 512, 1)
    assert parse_case("fixed:8:512:64") == WorkloadCase("fixed:8:512:64", at_a_time=64)
    drawn = parse_case("decode:2:9,temperature=0.7,top_k=20,repetition_penalty=1.1")
    assert drawn.name == "decode 64, batch 2, prompt 9, temperature 0.7, top_k 20, repetition_penalty 1.1"
    sampling = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    assert [task.sampling for task in drawn.tasks(50, 0)] == [sampling] * 2
    prompts = [[task.prompt for task in case.tasks(50, 0)] for case in (drawn, parse_case("decode:2:9"))]
    assert prompts[0] == prompts[1], "the same prompts as greedily"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("decode:1,top_p=0.9", "needs a temperature above 0"),
        ("decode:1,temperature=0", "needs a temperature above 0"),
        ("decode:1,temperature=hot", "must be NAME=NUMBER, with one of temperature, top_p"),
        ("decode:1,n=2", "must be NAME=NUMBER, with one of temperature, top_p"),
        ("prefill:8,temperature=1", "takes no parameters of sampling"),
    ],
)
def test_parameters_of_sampling_are_checked(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_case(text)


@pytest.mark.parametrize("text", ["decode", "decode:0", "decode:a", "decode:1:2:3", "prefill:1:2"])
def test_another_case_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="decode:BATCH"):
        parse_case(text)


def test_prompts_differ_between_runs_and_repetitions_and_are_the_same_for_everyone() -> None:
    case = parse_case("decode:3:20")
    assert case.tasks(50, 0) == case.tasks(50, 0)
    prompts = [tuple(task.prompt) for repetition in (-1, 0, 1) for task in case.tasks(50, repetition)]
    assert len(set(prompts)) == len(prompts) == 9
    assert all(len(prompt) == 20 and max(prompt) < 50 for prompt in prompts)


def test_sides_are_read() -> None:
    text = [
        "minivllm,enable_prefix_caching=false,block_size=32,dtype=float32",
        "transformers,llama.cpp,n=x",
        "vllm",
    ]
    mine, transformers, llama, vllm = parse_sides(text, parse_peer_pythons(["llama.cpp=/some/python"]))
    assert (mine.engine, mine.arguments) == (
        "minivllm",
        {"dtype": "float32", "enable_prefix_caching": False, "block_size": 32},
    )
    assert (transformers.name, transformers.arguments, transformers.python) == (
        "transformers",
        {},
        sys.executable,
    )
    assert (llama.arguments, llama.python) == ({"n": "x"}, "/some/python")
    assert vllm.engine == "vllm"


@pytest.mark.parametrize("text", ["vllm", "vllm=", "tgi=/some/python", "/some/python"])
def test_another_form_of_a_peer_s_python_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be ENGINE=PATH"):
        parse_peer_pythons([text])


@pytest.mark.parametrize(
    "texts",
    [
        ["tgi"],
        ["minivllm,eager"],
        ["transformers,block_size=3"],
        ["minivllm", "minivllm"],
        ["a=b"],
        ["minivllm", ""],
    ],
)
def test_another_side_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_sides(texts)


def test_our_side_gets_room_for_the_benchmark_unless_it_is_told_otherwise() -> None:
    room = Room(longest=192, running=16, tokens=16 * 192)
    own = complete(SideSpec("minivllm", "minivllm"), "m", "auto", room).arguments
    assert own["max_model_len"] == 256
    assert own["num_gpu_blocks_override"] == steady_pool(room, 64) >= 2 * 16 * 3 + 1
    told = SideSpec("minivllm", "minivllm", {"max_model_len": 999, "gpu_memory_utilization": 0.1})
    own = complete(told, "m", "auto", room).arguments
    assert own["max_model_len"] == 999
    assert "num_gpu_blocks_override" not in own


def test_the_room_is_that_of_the_most_demanding_cases() -> None:
    cases = [
        parse_case("decode:16:128"),
        parse_case("prefill:512"),
        WorkloadCase("fixed:9:100:4", at_a_time=4),
    ]
    assert common_room(cases) == Room(longest=513, running=16, tokens=16 * 192)


def test_ablation_turns_off_one_feature_at_a_time() -> None:
    base = SideSpec("minivllm", "minivllm")
    without = without_features(base, [parse_case("fixed:8:512:64")])
    assert without["compile"].arguments == {"enforce_eager": True}
    assert without["prefix cache"].arguments == {"enable_prefix_caching": False}
    assert without["chunked prefill"].arguments == {"max_num_batched_tokens": 8 * 576}
    assert all(len(spec.arguments) == 1 for spec in without.values())
    eager = SideSpec("minivllm,enforce_eager=true", "minivllm", {"enforce_eager": True})
    assert "compile" not in without_features(eager, [parse_case("decode:1")]), "it is off already"


@pytest.mark.parametrize("text", ["", "2,1", "0,1", "1,x", "1,2.5", "0"])
def test_loads_of_a_sweep_ascend(text: str) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        parse_loads("--rates", text, whole=True)
    assert parse_loads("--rates", "0.5,2", whole=False) == [0.5, 2.0]


def test_spans_are_timed_while_one_looks() -> None:
    with timed_spans("sleep", "nothing") as seconds:
        for _ in range(2):
            with span("sleep"), span("something else"):
                time.sleep(0.01)
    with span("sleep"):
        pass
    assert len(seconds["sleep"]) == 2 and min(seconds["sleep"]) >= 0.01
    assert seconds["nothing"] == [] and set(seconds) == {"sleep", "nothing"}


def test_a_side_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"stopped: .*config\.json"):
        Side(SideSpec("minivllm", "minivllm", {"model": str(tmp_path)}))


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_a_missing_peer_is_told_with_the_remedy(engine: str) -> None:
    if importlib.util.find_spec({"vllm": "vllm", "llama.cpp": "llama_cpp"}[engine]) is not None:
        pytest.skip(f"{engine} is installed here")
    with pytest.raises(
        ConfigError, match=r"not installed: pip install .*, name a Python .* or leave it out of --vs"
    ):
        check_installed(SideSpec(engine, engine))


def test_a_python_without_llama_cpp_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be run"):
        check_installed(SideSpec("llama.cpp", "llama.cpp", python="/no/such/python"))
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    with pytest.raises(ConfigError, match=r"has no llama_cpp: install llama-cpp-python there"):
        check_installed(SideSpec("llama.cpp", "llama.cpp", python=str(other)))


def test_implementations_are_compared_on_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_processes, "hf_directory", lambda model: Path("made of", model))
    sides = parse_sides(["minivllm,model_impl=minivllm", "minivllm,model_impl=transformers", "minivllm"])
    models = [complete(side, "m.gguf", "auto", Room(10, 1, 10)).arguments["model"] for side in sides]
    assert models == ["made of/m.gguf", "made of/m.gguf", "m.gguf"]


def test_llama_cpp_wants_a_gguf_file(tiny_model: Callable[..., Path]) -> None:
    side = SideSpec("llama.cpp", "llama.cpp")
    with pytest.raises(ConfigError, match=r"GGUF files only"):
        complete(side, str(tiny_model("llama")), "auto", Room(10, 1, 10))


def test_a_dtype_that_llama_cpp_cannot_have_is_refused_before_anything_is_looked_for() -> None:
    flags = ["no/such/model", "--dtype", "float32", "--vs", "openvino,llama.cpp"]
    result = CliRunner().invoke(bench_app, ["model", *flags])
    assert isinstance(result.exception, ConfigError)
    assert "float32 cannot hold for llama.cpp" in str(result.exception)


def test_wrong_usage_exits_2_with_a_sentence() -> None:
    result = bench("model", "--vs", "tgi")
    assert result.returncode == 2
    assert "known are" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_all_sides_generate_the_same_and_the_figures_are_written(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    file, table, markdown, picture = (tmp_path / f"figures.{kind}" for kind in ("json", "csv", "md", "png"))
    result = bench(
        "model", str(tiny_model("llama")), "--engine", "minivllm,enforce_eager=true",
        "--vs", "transformers,transformers-cb", "--case", "decode:2:9", "--case", "prefill:24", "--repeats", "1",
        "--dtype", "float32", "--json", str(file), "--csv", str(table), "--markdown", str(markdown),
        "--png", str(picture),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = read_report(file)
    assert report.kind == "model"
    assert {comparison.agreement for comparison in report.comparisons} == {1.0}
    assert {comparison.against for comparison in report.comparisons} == {"transformers", "transformers-cb"}
    speeds = [one for one in report.measurements if one.metric == "speed"]
    assert len(speeds) == 6 and all(one.samples[0] > 0 for one in speeds)
    assert all(one.samples == [0.0] for one in report.measurements if one.metric == "errors")
    assert "ratio" in result.stdout and "peak memory" in result.stdout
    assert table.read_text().count("\n") == 1 + len(report.measurements)
    assert markdown.read_text().startswith("| case | metric |")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_timed_arrivals_follow_one_another_on_a_real_side(tiny_model: Callable[..., Path]) -> None:
    spec = SideSpec(
        "minivllm", "minivllm", {"enforce_eager": True, "max_model_len": 64, "num_gpu_blocks_override": 9}
    )
    spec = SideSpec(spec.name, spec.engine, spec.arguments | {"model": str(tiny_model("llama"))})
    tasks = [
        Task([5, 6, 7], 4),
        Task([5, 6, 7], 4, arrival=0.01, after=0),
        Task([5] * 70, 4),
        Task([8], 1, 0.02),
    ]
    with Side(spec) as side:
        answer = side.run(tasks)
        first, second, refused, late = answer.records
        assert first.token_ids == second.token_ids and len(first.times) == 4
        assert second.arrival >= first.times[-1] + 0.01
        assert (
            refused.error is not None
            and refused.error.startswith("ContextLengthError: ")
            and refused.token_ids == []
        )
        assert late.arrival == 0.02 and late.times[0] >= 0.02 and len(late.token_ids) == 1
        counted = {"kv_peak", "cache_hit_rate", "preemptions", "weight_bytes", "kv_touched_bytes"}
        assert set(answer.counters) == counted
        assert 0 < answer.counters["weight_bytes"] + answer.counters["kv_touched_bytes"] < answer.peak_bytes
        assert side.run([Task([5, 6, 7], 4)]).records[0].token_ids == first.token_ids


@pytest.mark.slow
def test_memory_of_workers_in_processes_of_their_own_is_counted(tiny_model: Callable[..., Path]) -> None:
    arguments = {
        "model": str(tiny_model("llama")),
        "enforce_eager": True,
        "max_model_len": 64,
        "device": "cpu",
    }
    peaks = []
    for size in (1, 2):
        with Side(SideSpec("ours", "minivllm", arguments | {"tensor_parallel_size": size})) as side:
            answer = side.run([Task([5, 6, 7], 4)])
            [rest] = [
                figure.samples for figure in memory_figures(answer) if figure.metric == "of it the rest"
            ]
            assert rest[0] > 0
            peaks.append(answer.peak_bytes)
    assert peaks[1] > 2 * peaks[0]  # the engine core, and two workers


def test_roofline_names_every_part_outside_the_model(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        "--batch",
        "4",
        "--steps",
        "12",
        "--context",
        "5",
        "--prefill",
        "8",
        "--repeats",
        "1",
        "--enforce-eager",
    ]
    flags += ["--probe-mib", "1", "--probe-width", "64", "--kernels"]
    monkeypatch.setenv(COMPILED_TELLS, "0")
    result = CliRunner().invoke(bench_app, ["roofline", str(tiny_model("llama")), *flags])
    assert result.exit_code == 0, result.exception
    for part in ("schedule", "build inputs", "update from output", "frontend", "overhead", "Overhead is"):
        assert part in result.output
    assert "aten::addmm" in result.output or "aten::mm" in result.output
    assert "between kernels" in result.output and os.environ[COMPILED_TELLS] == "1"


def test_kernels_of_compiled_code_have_names_that_can_be_read() -> None:
    assert readable("graph_0_cpp_fused_mul_silu_split_1") == "mul_silu_split_1"
    assert readable("aoti_torch_cpu__linear_pointwise") == "linear_pointwise"
    assert readable("aten::max") == "aten::max"
    long = readable(
        "graph_0_cpp_fused__to_copy_add_amax_arange_div_exp_index_le_mul_scalar_tensor_select_stack_sub_0"
    )
    assert long.startswith("to_copy_add_amax") and long.endswith("ub_0") and len(long) == NAME_CHARS


@pytest.mark.slow
def test_a_run_that_was_refused_or_ended_early_has_no_speed(tiny_model: Callable[..., Path]) -> None:
    """Against a pattern that ends answers, one that cannot be compiled, and one that lets them go on."""
    case = parse_case("decode:2:8")
    arguments = {"model": str(tiny_model("llama")), "enforce_eager": True, "device": "cpu"}

    def speeds(pattern: str) -> list[list[float]]:
        with Side(
            complete(SideSpec("ours", "minivllm", {**arguments, "regex": pattern}), "", "auto", case.room)
        ) as side:
            tasks = case.tasks(side.facts["vocab_size"], 0)
            return [figure.samples for figure in case.figures(tasks, side.run(tasks))]

    assert speeds("[ab]{3}") == [] and speeds("(") == []
    assert [len(samples) for samples in speeds("[ -~]*~~~~")] == [1]


@pytest.mark.slow
def test_shapes_are_measured_one_after_the_other_and_what_is_done_is_not_repeated(tmp_path: Path) -> None:
    """On a CPU, with small sizes; a run without time for more is gone on with."""
    file = tmp_path / "gpu.json"
    arguments = ["gpu", "--tiny", "--repeats", "1", "--calibrate", "0", "--json", str(file)]
    arguments += ["--engine", "minivllm,enforce_eager=true,device=cpu"]
    shapes = ["--shape", "nano-256", "--shape", "qwen3-30b-a3b"]
    first = bench(*arguments, "--shape", "nano-256")
    assert first.returncode == 0, first.stderr
    begun = read_report(file)
    assert begun.configuration["shapes"] == ["nano-256"]
    second = bench(*arguments, *shapes)
    assert second.returncode == 0, second.stderr
    found = read_report(file)
    assert found.configuration["shapes"] == ["nano-256", "qwen3-30b-a3b"]
    assert found.measurements[: len(begun.measurements)] == begun.measurements
    speeds = [one for one in found.measurements if one.metric == "speed"]
    assert [one.case for one in speeds] == [
        f"{shape} (tiny): {case}"
        for shape in ("nano-256", "qwen3-30b-a3b")
        for case in ("decode 64, batch 2, prompt 8", "prefill 16")
    ]
    assert all(sample > 0 for one in speeds for sample in one.samples)
    other = bench(*arguments, "--dtype", "float32")
    assert other.returncode == 2 and "results with another dtype" in other.stderr
    unknown = bench("gpu", "--shape", "gpt-5")
    assert unknown.returncode == 2 and "there are: nano-256, llama-8b" in unknown.stderr
