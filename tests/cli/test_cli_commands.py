"""The ``minivllm`` command as a program: output, errors, exit codes, start-up cost."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from minivllm import LLM, __version__
from minivllm.bench.command import bench
from minivllm.cli.commands import app
from minivllm.cli.engine import engine_start
from minivllm.cli.engine.engine_start import engine_log
from minivllm.cli.engine.options import SamplingOptions, model_defaults
from minivllm.cli.main import main
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, MinivllmError, ModelError
from minivllm.hub.fetch import resolve_model
from minivllm.sampling_params import SamplingParams
from tests.cli import scripted_engine
from tests.cli.scripted_engine import ScriptedEngine, create_scripted_engine
from tests.structure.documents import ROOT

SCRIPT = scripted_engine.__file__


def run(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command on a scripted engine, in a process of its own."""
    result = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, "NO_COLOR": "1", **environment},
        timeout=120,
    )
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout.decode("utf-8"), result.stderr.decode("utf-8")
    )


@pytest.mark.parametrize(
    ("redirection", "sentence", "code"),
    [
        ("<&-", "minivllm: The prompt on standard input is empty, but must hold at least one character", 2),
        (">/dev/full", "minivllm: The output cannot be written: No space left on device.", 1),
        (">&-", "minivllm: The output cannot be written: Bad file descriptor.", 1),
        (">/dev/full 2>/dev/full", "", 1),
        ("<&- >&- 2>&-", "", 2),
    ],
)
def test_closed_and_full_standard_streams_end_in_a_sentence(
    redirection: str, sentence: str, code: int
) -> None:
    prompt = "" if redirection.startswith("<") else "-p hello"
    line = f"{shlex.quote(sys.executable)} {shlex.quote(SCRIPT)} generate {prompt} {redirection}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert result.returncode == code
    assert result.stderr.startswith(sentence) and len(result.stderr.splitlines()) == bool(sentence)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """Commands in this process run on scripted engines, which are collected here."""
    made: list[ScriptedEngine] = []

    def create(args: EngineArgs) -> ScriptedEngine:
        made.append(create_scripted_engine(args))
        return made[-1]

    monkeypatch.setattr(engine_start, "create_engine", create)
    monkeypatch.setattr(engine_start, "fetch_model", lambda args: None)
    return made


def exit_code(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["chat", "--help"], ["chat", "-p", "x", "--top-p", "9"]]
)
def test_torch_is_not_imported_before_an_engine_starts(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from minivllm.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'prompt_toolkit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_every_engine_argument_has_a_flag_under_its_own_name() -> None:
    help_text = CliRunner().invoke(app, ["chat", "--help-all"], env={"COLUMNS": "80"}).output
    for field in fields(EngineArgs):
        assert f"--{field.name.replace('_', '-')}" in help_text


def test_engine_flags_without_values_are_the_defaults_of_the_engine_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[EngineArgs] = []
    monkeypatch.setattr(engine_start, "create_engine", lambda args: seen.append(args) or ScriptedEngine())
    monkeypatch.setattr(engine_start, "fetch_model", lambda args: None)
    assert exit_code("generate", "-p", "x") == 0
    assert seen == [EngineArgs()]


def test_engine_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineArgs] = []

    def create(args: EngineArgs) -> ScriptedEngine:
        seen.append(args)
        return ScriptedEngine()

    monkeypatch.setattr(engine_start, "create_engine", create)
    monkeypatch.setattr(engine_start, "fetch_model", lambda args: None)
    code = exit_code(
        *shlex.split(
            "generate org/name -p x --tokenizer t --revision r --dtype float16 --seed 3 --load-format dummy "
            "--device cpu --max-model-len 99 --max-num-seqs 5 --max-num-batched-tokens 77 "
            "--long-prefill-token-threshold 11 --gpu-memory-utilization 0.5 --kv-cache-memory-bytes 1000000 "
            "--block-size 32 --kv-cache-dtype bfloat16 --no-enable-prefix-caching --enforce-eager "
            """--scheduling-policy priority --hf-overrides '{"num_hidden_layers": 2}'"""
        )
    )
    assert code == 0
    assert seen == [
        EngineArgs(
            model="org/name",
            tokenizer="t",
            revision="r",
            dtype="float16",
            seed=3,
            load_format="dummy",
            device="cpu",
            max_model_len=99,
            max_num_seqs=5,
            max_num_batched_tokens=77,
            long_prefill_token_threshold=11,
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=1000000,
            block_size=32,
            kv_cache_dtype="bfloat16",
            enable_prefix_caching=False,
            enforce_eager=True,
            scheduling_policy="priority",
            hf_overrides={"num_hidden_layers": 2},
        )
    ]


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize("naming", [["org/name"], ["--model", "org/name"], ["--model=org/name"]])
def test_the_model_is_named_by_the_argument_or_by_the_option(
    command: str, naming: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def create(args: EngineArgs) -> ScriptedEngine:
        seen.append(args.model)
        return ScriptedEngine()

    monkeypatch.setattr(engine_start, "create_engine", create)
    monkeypatch.setattr(engine_start, "fetch_model", lambda args: None)
    assert exit_code(command, *naming, "-p", "x") == 0
    assert seen == ["org/name"]


@pytest.mark.parametrize("command", ["chat", "generate", "serve", "pull", "bench throughput"])
def test_a_model_named_twice_is_refused_with_both_names(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*command.split(), "smollm2", "--model", "org/name") == 2
    assert "named twice, as smollm2 and as --model org/name: give one of them." in capsys.readouterr().err


def test_sampling_flags_override_the_models_defaults(engines: list[ScriptedEngine]) -> None:
    code = exit_code(
        *shlex.split(
            "chat -p x --temperature 0.1 --top-p 0.5 --top-k 7 --min-p 0.2 --max-tokens 9 --min-tokens 2 "
            "--stop a "
            "--stop b --stop-regex [0-9]+ "
            "--stop-token-ids 4 --include-stop-str-in-output --ignore-eos --bad-words w --repetition-penalty "
            "1.1 "
            "--presence-penalty 0.3 --frequency-penalty 0.4 --no-skip-special-tokens"
        )
    )
    assert code == 0
    [params] = engines[0].params
    assert params == SamplingParams(
        temperature=0.1,
        top_p=0.5,
        top_k=7,
        min_p=0.2,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_regex=["[0-9]+"],
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        bad_words=["w"],
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        skip_special_tokens=False,
        output_kind=params.output_kind,
    )


def test_the_models_own_sampling_defaults_count_where_it_has_any() -> None:
    assert model_defaults(ScriptedEngine()) == {}
    own = SamplingParams(temperature=0.6, top_k=20, max_tokens=2048)
    assert model_defaults(ScriptedEngine(default_params=own)) == {"temperature": 0.6, "top_k": 20}
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    assert SamplingOptions(top_p=0.5).params(
        model_defaults(ScriptedEngine(default_params=greedy))
    ) == SamplingParams(temperature=0.0, repetition_penalty=1.1, top_p=0.5)


def test_a_one_shot_answer_is_alone_on_stdout_and_its_statistics_on_stderr() -> None:
    result = run("chat", "-p", "hello")
    assert (result.returncode, result.stdout) == (0, "HELLO\n")
    assert "TTFT" in result.stderr
    assert "stop: eos" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_piped_prompt_is_answered_once() -> None:
    assert run("chat", stdin="grüße\n".encode()).stdout == "GRÜSSE\n"
    assert run("chat", "-p", "-", stdin=b"dash").stdout == "DASH\n"
    assert run("generate", stdin=b"text").stdout == "TEXT\n"


def test_json_answers_parse_and_hold_the_tokens() -> None:
    record = json.loads(run("chat", "-p", "hello", "--json", "--system", "s").stdout)
    assert record["text"] == "HELLO"
    assert record["token_ids"] == [*map(ord, "HELLO"), 0]
    assert record["finish_reason"] == "stop"
    assert record["num_prompt_tokens"] == len("<system>s\n<user>hello\n<assistant>")


def test_generate_prints_one_json_object_per_prompt_in_order(
    engines: list[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "-p", "the longest prompt", "-p", "b", "-p", "cc", "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["text"] for record in records] == ["THE LONGEST PROMPT", "B", "CC"]
    assert [record["num_prompt_tokens"] for record in records] == [18, 1, 2]
    assert {"ttft", "decode_tokens_per_second"} <= set(records[0]["metrics"])
    assert engines[0].closed


def test_generate_uses_the_chat_template_only_when_asked(engines: list[ScriptedEngine]) -> None:
    assert exit_code("generate", "-p", "x") == 0
    assert exit_code("generate", "-p", "x", "--chat") == 0
    assert [engine.prompts for engine in engines] == [["x"], ["<user>x\n<assistant>"]]


def test_generate_fits_its_own_limit_to_the_context_but_not_the_users(engines: list[ScriptedEngine]) -> None:
    assert exit_code("generate", "-p", "abcd", "-p", "ab") == 0
    assert exit_code("generate", "-p", "abcd", "-p", "ab", "--max-model-len", "10") == 0
    assert exit_code("generate", "-p", "abcd", "--max-model-len", "10", "--max-tokens", "9") == 0
    assert [[params.max_tokens for params in engine.params] for engine in engines] == [
        [256, 256],
        [6, 8],
        [9],
    ]


def test_one_refused_prompt_does_not_harm_the_others(
    engines: list[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "-p", "a", "-p", "x" * 50, "-p", "b", "--max-model-len", "20", "--json") == 2
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record.get("text") for record in records] == ["A", None, "B"]
    assert "at most 19 fit" in records[1]["error"]
    assert exit_code("generate", "-p", "x" * 50, "-p", "b", "--max-model-len", "20") == 2
    printed = capsys.readouterr()
    assert "prompt 0: The prompt has 50 tokens" in printed.err
    assert "B" in printed.out


def test_control_characters_of_the_model_do_not_reach_the_terminal() -> None:
    for command in ("chat", "generate"):
        result = run(command, "-p", "escape")
        assert result.stdout == "red plain\n"
    assert json.loads(run("chat", "-p", "escape", "--json").stdout)["text"].startswith("\x1b[31m")


def test_a_model_without_chat_template_says_so_and_continues_the_text() -> None:
    result = run("chat", "base", "-p", "abc")
    assert result.stdout == "ABC\n"
    assert "base has no chat template" in result.stderr
    refused = run("generate", "base", "-p", "abc", "--chat")
    assert refused.returncode == 2
    assert "has no chat template, so --chat cannot work" in refused.stderr


def test_an_answer_cut_by_the_context_says_so_with_numbers() -> None:
    result = run("chat", "-p", "forever", "--max-model-len", "100")
    assert result.returncode == 0
    assert "100 of 100 tokens" in result.stderr
    assert "stop: length" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["chat", "missing", "-p", "x"], 1, "There is no model 'missing'"),
        (["chat", "-p", ""], 2, "The prompt is empty"),
        (
            ["chat", "-p", "x", "--max-tokens", "0"],
            2,
            "max_tokens is 0, but must be a whole number of at least 1",
        ),
        (["chat", "-p", "x", "--temperature", "nan"], 2, "temperature is nan, but must be a finite number"),
        (["chat", "-p", "x", "--temperature", "-1"], 2, "temperature is -1.0, but must be at least 0"),
        (["chat", "-p", "x", "--top-p", "0"], 2, "top_p is 0.0, but must be above 0 and at most 1"),
        (["chat", "-p", "x", "--dtype", "int3"], 2, "dtype is 'int3', but must be one of"),
        (["chat", "-p", "x", "--block-size", "7"], 2, "block_size is 7"),
        (["chat", "-p", "x", "--hf-overrides", "{"], 2, "hf_overrides is not valid JSON"),
        (["chat", "-p", "x", "--hf-overrides", "3"], 2, "must be a JSON object"),
        (["chat", "-p", "\udcff"], 2, "not valid UTF-8"),
        (["chat", "-p", "x" * 600], 2, "takes 618 of the context's 512 tokens"),
        (["generate", "-p", "x", "-p", " "], 2, "The prompt is empty"),
        (["generate", "-p", "x", "--stop", ""], 2, "stop"),
    ],
)
def test_bad_input_is_one_sentence_and_an_exit_code(
    arguments: list[str],
    code: int,
    sentence: str,
    engines: list[ScriptedEngine],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(*arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("minivllm: ")
    assert sentence in line
    assert all(engine.closed for engine in engines)


@pytest.mark.parametrize(
    "arguments",
    [["chta"], ["chat", "--unknown"], ["chat", "-p", "x", "--top-k", "many"], ["chat", "a", "b", "c"]],
)
def test_wrong_usage_exits_with_2_and_no_traceback(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_standard_input_that_is_no_text_is_refused() -> None:
    for stdin, message in ((b"\xff\xfe", "not valid UTF-8"), (b"", "is empty"), (b"\n", "is empty")):
        result = run("chat", stdin=stdin)
        assert result.returncode == 2
        assert message in result.stderr


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "chat", "-p", "forever", "--max-model-len", "50000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == b"on "
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in errors
    assert "Broken" not in errors


def test_an_unexpected_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: EngineArgs) -> ScriptedEngine:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_start, "create_engine", interrupted)
    monkeypatch.setattr(engine_start, "fetch_model", lambda args: None)
    assert exit_code("chat", "-p", "x") == 130


def test_ctrl_c_while_the_commands_are_imported_is_quiet() -> None:
    program = (
        "import sys\n"
        "from minivllm.cli.main import main\n"
        "assert not {'typer', 'rich'} & set(sys.modules), 'Ctrl-C meanwhile would show a traceback'\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'minivllm.cli.commands':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "main(['--help'])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_an_engine_that_fails_midway_is_closed_and_reported(
    engines: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(engine: ScriptedEngine) -> None:
        raise MinivllmError("The engine stopped: out of memory.")

    monkeypatch.setattr(ScriptedEngine, "step", fail)
    assert exit_code("chat", "-p", "x") == 1
    assert capsys.readouterr().err == "minivllm: The engine stopped: out of memory.\n"
    assert engines[0].closed


def test_version_and_env_tell_what_is_installed() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"minivllm {__version__}\n"
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["versions"]["minivllm"] == __version__
    assert report["versions"]["torch"]
    assert report["cpu"]["usable_cores"] >= 1
    assert all({"value", "why"} == set(choice) for choice in report["defaults"].values())
    readable = CliRunner().invoke(app, ["env"]).output
    for word in ("C++ compiler", "torch", "memory", "Directories"):
        assert word in readable


def test_env_tells_the_defaults_that_an_engine_resolves_to() -> None:
    from minivllm.engine.resolve import DEFAULTS, resolve_device, resolve_dtype

    report = json.loads(CliRunner().invoke(app, ["env", "--json"]).output)["defaults"]
    device = resolve_device("auto")
    assert report["device"]["value"] == device
    assert report["dtype"]["value"] == resolve_dtype("auto", "bfloat16", device)[0]
    assert report["max_num_seqs"]["value"] == str(DEFAULTS[device].max_num_seqs)
    assert report["max_num_batched_tokens"]["value"] == str(DEFAULTS[device].max_num_batched_tokens)


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_env_tells_the_kv_cache_dtype_of_this_cpu_and_why(
    has_bfloat16: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU with AVX2 and no more computes in float32, so nothing is halved unless that is asked for."""
    from minivllm.engine import resolve

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    monkeypatch.setattr(resolve, "cpu_computes_bfloat16", lambda: has_bfloat16)
    report = json.loads(CliRunner().invoke(app, ["env", "--json"]).output)["defaults"]
    assert report["dtype"]["value"] == report["kv_cache_dtype"]["value"] == dtype
    why = report["kv_cache_dtype"]["why"]
    assert ("--kv-cache-dtype bfloat16 takes half the memory" in why) is not has_bfloat16
    assert "that of the weights" in why and "float32" not in why


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU keeps packages")
def test_env_names_the_folder_in_which_an_engine_keeps_compiled_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    report = json.loads(CliRunner().invoke(app, ["env", "--json"]).output)
    assert report["directories"]["compiled_code"] == str(PackagedRegionCompiler()._directory)
    assert report["directories"]["compiled_code"] == str(tmp_path / "regions")


def test_env_tells_the_pools_that_an_engine_of_this_model_gets(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = str(tiny_model("qwen2-window", sliding_window=48))
    planned = json.loads(CliRunner().invoke(app, ["env", model, "--json"]).output)["kv_cache_pools"]
    with caplog.at_level(logging.INFO), LLM(model, enforce_eager=True) as llm:
        groups = llm.llm_engine.client.core.executor.kv_groups  # type: ignore[attr-defined]
    assert [(pool["kind"], pool["layers"], pool["block_size"]) for pool in planned["pools"]] == [
        ("full attention", 1, 64),
        ("sliding window of 48", 2, 32),
    ]
    readable = CliRunner().invoke(app, ["env", model], env={"COLUMNS": "200"}).output
    assert f"for requests of up to {planned['max_model_len']:,} tokens ({planned['why']}):" in readable
    for group, pool in zip(groups, planned["pools"], strict=True):
        assert (group.num_blocks - 1, group.block_size) == (pool["blocks"], pool["block_size"])
        assert pool["tokens"] == pool["blocks"] * pool["block_size"]
        assert pool["bytes"] == group.num_blocks * group.block_bytes
        size = f"{pool['blocks']:,} blocks of {pool['block_size']} tokens, {pool['tokens']:,} tokens in "
        assert (
            size in readable
            and f"{pool['kind']} in {pool['layers']} layer" in caplog.text
            and size in caplog.text
        )


def test_env_counts_states_where_layers_keep_no_tokens(tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("lfm2"))
    pools = json.loads(CliRunner().invoke(app, ["env", model, "--json"]).output)["kv_cache_pools"]["pools"]
    assert [(pool["kind"], pool["tokens"] is None) for pool in pools] == [
        ("full attention", False),
        ("state", True),
    ]
    readable = CliRunner().invoke(app, ["env", model], env={"COLUMNS": "200"}).output
    assert f"2 layers, {pools[1]['blocks']:,} states in " in readable


def test_env_explains_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    readable = CliRunner().invoke(app, ["env"]).output
    assert "not found" in readable
    assert "no C++ compiler" in readable and "install one, or name one in CXX" in readable


def test_pull_prints_the_path_and_reports_an_unknown_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("pull", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert exit_code("pull", "no-such-model") == 1
    assert capsys.readouterr().err.startswith("minivllm: There is no model 'no-such-model'")


COMMAND_PATHS = [
    [],
    *(
        [command]
        for command in ("chat", "generate", "serve", "pull", "list", "env", "trace", "simulate", "bench")
    ),
    *(["bench", command.name or ""] for command in bench.registered_commands),
]


@pytest.mark.parametrize("path", COMMAND_PATHS, ids=" ".join)
def test_every_help_has_an_example_of_that_very_command(path: list[str]) -> None:
    help_text = CliRunner().invoke(app, [*path, "--help"]).output
    assert " ".join(["Example: minivllm", *path]) in " ".join(help_text.split())


def test_a_mistyped_builtin_model_gets_a_suggestion() -> None:
    with pytest.raises(ModelError, match="Did you mean smollm2"):
        resolve_model("smolm2")


def test_a_notice_stays_on_the_screen_and_progress_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_log(verbose=False):
        logger = logging.getLogger("minivllm.worker")
        logger.info("a step of loading")
        logger.info("a notice", extra={"is_notice": True})
    assert capsys.readouterr().err == "a notice\n"


def program_of(model: str, *flags: str) -> str:
    result = CliRunner().invoke(app, ["env", model, "--program", *flags], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_env_shows_the_program_of_a_model_and_where_ranks_and_stages_cut_it(
    tiny_model: Callable[..., Path],
) -> None:
    model = str(tiny_model("llama"))

    def shown(*flags: str) -> str:
        return program_of(model, *flags)

    alone = shown()
    regions = [line.split()[0] for line in alone.splitlines()[1:] if line and not line.startswith(" ")]
    assert regions == ["first", "between", "last"]
    assert "RotateAndStore" in alone and "— Attend —" in alone and "— Sum —" not in alone
    divided = shown("--tp", "2")
    assert "— Sum —" in divided and "— Gather —" in divided and "queries" in divided
    stages = shown("--pp", "2")
    assert "Stage 1 of 2" in stages and "— Send —" in stages and "— Receive —" in stages and "entry" in stages


def test_env_shows_the_program_of_a_mixture_in_any_dtype(tiny_model: Callable[..., Path]) -> None:
    assert "ChosenExperts" in program_of(str(tiny_model("qwen3-moe")))


def test_a_printed_program_leads_to_the_class_of_each_code_and_seam(tiny_model: Callable[..., Path]) -> None:
    _, *lines = program_of(str(tiny_model("llama")), "--tp", "2").splitlines()
    for line in lines:
        found = re.search(r"\b([A-Z]\w+)\b.* ([\w/]+\.py):(\d+)", line)
        assert found, line
        what, file, number = found.groups()
        text = (ROOT / file).read_text(encoding="utf-8").splitlines()
        # A decorated class begins at its decorator.
        assert any(f"class {what}" in code for code in text[int(number) - 1 : int(number) + 1]), line


def test_a_row_of_a_printed_program_is_one_line_with_the_fields_of_its_code(
    tiny_model: Callable[..., Path],
) -> None:
    [norm, *_] = [line for line in program_of(str(tiny_model("llama"))).splitlines() if " AddNorm " in line]
    assert re.search(
        r" x, stream +h \[tokens, 64\], stream \[tokens, 64\] .+ norm=RmsNorm\(eps=1e-06\) *$", norm
    )
    inner = [line for line in program_of(str(tiny_model("llama"))).splitlines() if "GatedProduct" in line]
    assert all("method=PlainLinear()" in line and "activation='silu'" in line for line in inner)


def test_env_shows_no_program_with_images_of_a_model_that_reads_text(tiny_model: Callable[..., Path]) -> None:
    result = CliRunner().invoke(app, ["env", str(tiny_model("llama")), "--program", "--images"])
    assert isinstance(result.exception, ConfigError)
    assert "There is no program with images" in str(result.exception)


def test_env_takes_no_layout_without_a_program() -> None:
    for flags in (["--tp", "2"], ["--images"]):
        result = CliRunner().invoke(app, ["env", *flags])
        assert isinstance(result.exception, ConfigError) and "add --program" in str(result.exception)


def test_env_shows_no_program_without_a_model() -> None:
    result = CliRunner().invoke(app, ["env", "--program"])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError) and "name the model" in str(result.exception)
