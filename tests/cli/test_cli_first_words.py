"""What people type first works, or the sentence says how:
prompts, short names, units, files of flags, short helps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from minivllm.bench.command import bench
from minivllm.cli.commands import ALIASES, NOT_HERE, app
from minivllm.cli.engine import engine_start
from minivllm.cli.engine.grouped_command import RARE
from minivllm.cli.engine.openai_server import server_root
from minivllm.cli.engine.options import whole_number
from minivllm.cli.main import main
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve_dtype
from minivllm.errors import ConfigError
from minivllm.hub import fetch
from tests.cli.scripted_engine import ScriptedEngine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineArgs]]:
    """The arguments of engines that commands start."""
    seen: list[EngineArgs] = []
    monkeypatch.setattr(engine_start, "create_engine", lambda args: seen.append(args) or ScriptedEngine())
    monkeypatch.setattr(engine_start, "fetch_model", lambda args: None)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    yield seen


def run(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["chat", "why so blue?"], "smollm2"),
        (["chat", "org/name", "why so blue?"], "org/name"),
        (["chat", "-m", "org/name", "why so blue?"], "org/name"),
        (["chat", "--model", "org/name", "-p", "why so blue?"], "org/name"),
        (["run", "smollm2", "why so blue?"], "smollm2"),
        (["generate", "why so blue?"], "smollm2"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else one,
)
def test_a_prompt_may_stand_after_the_model_or_alone(
    started: list[EngineArgs], capsys: pytest.CaptureFixture[str], arguments: list[str], model: str
) -> None:
    assert run(*arguments) == 0
    assert [args.model for args in started] == [model]
    assert "WHY SO BLUE?" in capsys.readouterr().out


def test_two_prompts_are_refused(started: list[EngineArgs], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat", "one prompt", "-p", "another") == 2 and not started
    assert "two prompts" in capsys.readouterr().err


def test_a_path_with_a_space_is_a_model(started: list[EngineArgs], tmp_path: Path) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    assert run("chat", str(model), "-p", "x") == 0
    assert started[0].model == str(model)


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2M", 2 * 2**20), ("1g", 10**9)],
)
def test_whole_numbers_may_end_in_a_unit(started: list[EngineArgs], text: str, number: int) -> None:
    assert whole_number(text) == number
    assert run("chat", "-p", "x", "--max-model-len", text) == 0
    assert started[0].max_model_len == number


@pytest.mark.parametrize("text", ["", "k", "8kk", "1.5", "eight", "1e400k", "nan", "infK"])
def test_what_is_no_whole_number_gets_a_sentence(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="no whole number: write it like"):
        whole_number(text)


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("half", "float16"), ("fp32", "float32")])
def test_dtypes_have_short_names(short: str, name: str) -> None:
    assert resolve_dtype(EngineArgs(model="m", dtype=short).dtype, "float32", "cpu")[0] == name


def test_built_in_names_may_be_written_in_capitals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch, "fetch_wheel_model", lambda name, wheel, cache, progress: tmp_path / name)
    assert fetch.resolve_model("SmolLM2") == tmp_path / "smollm2"


def test_the_address_of_a_server_needs_no_scheme() -> None:
    assert (
        server_root("localhost:8000") == server_root("http://localhost:8000/v1/") == "http://localhost:8000"
    )
    with pytest.raises(ConfigError, match=r"must be like http://127\.0\.0\.1:8000"):
        server_root("localhost")


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("help", "pull") == 0
    assert "minivllm pull" in capsys.readouterr().out
    assert run("help") == 0
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-v", "-V", "--version"])
def test_the_version_has_its_usual_flags(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run(flag) == 0
    assert capsys.readouterr().out.startswith("minivllm ")


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_commands_of_other_programs_get_a_sentence(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(name) == 2
    assert f"There is no command '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["smollm2", "SmolLM2", "Why is the sky blue?"])
def test_a_model_or_a_prompt_without_a_command_is_told_the_command(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert run(word) == 2
    assert "To talk with a model: minivllm chat" in capsys.readouterr().err


def test_other_names_of_commands_lead_to_commands_that_exist() -> None:
    names = {command.name for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }
    assert set(ALIASES.values()) <= names


def test_models_on_this_machine_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run("list") == 0
    assert capsys.readouterr().out.split(maxsplit=1) == ["smollm2", "not fetched yet\n"]
    wheel = fetch.WHEEL_MODELS["smollm2"]
    stored = tmp_path / "models" / "smollm2" / wheel.file_name
    stored.parent.mkdir(parents=True)
    with stored.open("wb") as file:
        file.truncate(wheel.member_bytes)
    assert run("list") == 0
    assert str(stored) in capsys.readouterr().out


# a file of flags


def test_flags_come_from_a_file_and_the_command_line_comes_first(
    started: list[EngineArgs], tmp_path: Path
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: org/name\nmax-model-len: 4k\nmax_num_seqs: 3\nenforce-eager: true\nenable-prefix-caching: "
        "false\n"
        "speculative-config: {method: ngram}\nlogits-processors: ['a:B']\n"
    )
    assert run("chat", "--config", str(file), "--max-num-seqs", "5", "-p", "x") == 0
    args = started[0]
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("org/name", 4000, 5)
    assert args.enforce_eager and not args.enable_prefix_caching
    assert args.speculative_config == {"method": "ngram"} and args.logits_processors == ["a:B"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("max-model-ln: 4", "'max-model-ln', which is no flag of this command. Did you mean max-model-len?"),
        ("- a", "must hold flags and their values"),
        ("{", "is no YAML or JSON"),
        ("[" * 5000, "holds lists within lists without end"),
        (b"\xff\xfe", "is not UTF-8 text"),
        ("config: x", "no flag of this command"),
        ("max-model-len: eight", "no whole number"),
    ],
)
def test_a_wrong_file_of_flags_gets_a_sentence(
    started: list[EngineArgs],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | bytes,
    sentence: str,
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run("chat", "--config", str(file), "-p", "x") == 2 and not started
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/dev/zero", "it is a device; give a regular file"),
        (".", "it is a directory; give a regular file"),
        ("/nonexistent/flags.yaml", "Cannot read /nonexistent/flags.yaml: No such file or directory"),
    ],
)
def test_only_a_regular_file_of_flags_is_read(
    started: list[EngineArgs], capsys: pytest.CaptureFixture[str], path: str, sentence: str
) -> None:
    """A device has no end: the command ran out of memory."""
    assert run("chat", "--config", path, "-p", "x") == 2 and not started
    assert sentence in " ".join(capsys.readouterr().err.split())


WHOLE_NUMBER = "is no whole number: write it like 4096, 8k (8,000) or 8K (8,192)"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["chat", "--max-tokens", "abc"], f"'abc' {WHOLE_NUMBER}"),
        (["chat", "--max-tokens="], f"'' {WHOLE_NUMBER}"),
        (["chat", "--seed", "1.5"], f"'1.5' {WHOLE_NUMBER}"),
        (["chat", "--stop-token-ids", "2", "--stop-token-ids", "x"], f"'x' {WHOLE_NUMBER}"),
        (["serve", "--port", "http"], f"'http' {WHOLE_NUMBER}"),
        (["trace", "--budget", "x"], f"'x' {WHOLE_NUMBER}"),
        (["chat", "--temperature", "hot"], "'hot' is no number: write it like 0.7"),
        (["chat", "--gpu-memory-utilization", "half"], "'half' is no number"),
        (["serve", "--request-timeout="], "'' is no number"),
        (["chat", "--stop="], "stop has an empty string, but each must have at least one character"),
        (["chat", "--stop-regex="], "stop_regex has an empty string"),
        (["chat", "--bad-words="], "bad_words has an empty string"),
        (["chat", "--tokenizer="], "tokenizer is empty: give it a value, or leave it out"),
        (["chat", "--profile="], "profile is empty: give it a value, or leave it out"),
        (["chat", "--dtype="], "dtype is '', but must be one of auto"),
        (["chat", "--url="], "--url is '', but must be like http://127.0.0.1:8000"),
        (["serve", "--host="], "host is '', but must be an address, such as 127.0.0.1"),
        (["serve", "--lora-directory="], "an empty text names no file"),
        (
            ["serve", "--lora", "a=/nonexistent"],
            "/nonexistent must be a directory with an adapter_config.json",
        ),
        (["serve", "--api-key="], "An API key is empty"),
        (["serve", "--served-model-name="], "A served_model_name is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_is_none_is_repeated_with_what_is_allowed(
    started: list[EngineArgs], capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    command, *flags = arguments
    assert run(command, *flags, *(["-p", "x"] if command == "chat" else [])) == 2 and not started
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_an_empty_name_is_no_default_model(started: list[EngineArgs]) -> None:
    for arguments in (["--model="], [""]):
        run("chat", *arguments, "-p", "x")
    assert [args.model for args in started] == ["", ""]


# helps

WITH_ENGINE_FLAGS = [
    *(["chat"], ["generate"], ["serve"]),
    *(
        ["bench", str(command.name)]
        for command in bench.registered_commands
        if "help_all" in inspect.signature(command.callback).parameters
    ),
]


def help_lines(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0
    return result.output.splitlines()


@pytest.mark.parametrize("path", WITH_ENGINE_FLAGS, ids=" ".join)
def test_a_help_fits_on_a_page_and_the_complete_one_is_named(path: list[str]) -> None:
    lines = help_lines(*path, "--help")
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    assert "--help-all" in lines[-1]
    everything = help_lines(*path, "--help-all")
    assert len(everything) >= len(lines)


def test_rare_flags_are_flags() -> None:
    words = {word for path in WITH_ENGINE_FLAGS for word in " ".join(help_lines(*path, "--help-all")).split()}
    by_other_names = {"model_option": "--model", "cors_origins": "--cors-origin", "nnodes": "--nnodes"}
    for name in RARE:
        assert by_other_names.get(name, f"--{name.replace('_', '-')}") in {
            word.rstrip(",") for word in words
        }, name
