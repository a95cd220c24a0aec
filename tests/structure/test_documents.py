"""What the documents say: commands run, flags exist, snippets run, links lead somewhere,
numbers are measured ones."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.core
import typer.main

from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Measurement, make_report, read_report
from minivllm.cli.commands import app
from minivllm.config import KVTransferConfig
from minivllm.families.makers import registry
from tests.structure.code_map import BEGIN, END, ORDER, TOUR, code_map
from tests.structure.documents import DOCUMENTS, README, ROOT, blocks, name_of, text_of, without_code
from tests.transformers_models.families import FAMILIES
from tutorials import speed_picture

GPU_RESULTS = ROOT / "tests" / "gpu" / "results"

# Set-up, an open conversation, the checks themselves, and programs that rewrite documents.
NOT_RUN_HERE = {
    "pip install -e . && minivllm chat",
    "pip install -e '.[test]'",
    "pip install -e '.[server]'",
    "pip install pre-commit",
    "pre-commit install --config tests/pre-commit.yaml",  # test_pre_commit.py runs its hooks' programs
    "minivllm serve smollm2 --port 8000",  # tests/server does
    "minivllm serve smollm2 --disaggregated 1P1D",  # tests/server does
    "minivllm serve smollm2 --data-parallel-size 2",  # tests/data_parallel does
    "minivllm chat --eye tutorials/eye --max-model-len 2048",  # tests/multimodal does
    "pytest",
    "pytest -m smoke",
    "pytest -m slow tests/executor",
    "pytest tests/scheduler tests/kv_cache",
    "python -m tests.models.region_ledger --write",
    "python -m tests.gpu_code --write",
    "python3 -m venv ~/gpu-code",
    "~/gpu-code/bin/pip install -c tests/gpu_code/versions.txt -e .",
    "~/gpu-code/bin/python -m tests.gpu_code",
    "pytest -p tests.pretended_gpu.plugin -n0 tests/gpu",  # test_pretended_gpu.py does
    "PRETENDED_GPUS=2 pytest -p tests.pretended_gpu.plugin -n0 tests/gpu/test_cuda_workers.py",  # so here
    "PRETENDED_GPU_FOR_ALL=1 pytest -p tests.pretended_gpu.plugin -n0 tests/end_to_end/test_states.py",
}
NEEDS_NO_MODEL = ("minivllm trace", "minivllm env")


def console_examples() -> list[tuple[str, str]]:
    """(command, printed) of every console block, one command each."""
    examples = []
    for block in blocks("console"):
        command, _, printed = block.partition("\n")
        assert command.startswith("$ ")
        examples.append((command[2:], printed))
    return examples


def run(command: list[str], timeout: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
        timeout=timeout,
        cwd=ROOT,
    )


def run_example(command: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    assert program == "minivllm", command
    result = run([sys.executable, "-m", "minivllm.cli.main", *arguments])
    assert result.returncode == 0, result.stderr
    return result


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def test_the_first_document_is_short() -> None:
    assert README.stat().st_size <= 12_000


def test_every_command_is_run_by_a_test_or_is_set_up() -> None:
    commands = {
        line.partition("  #")[0].rstrip() for block in blocks("sh") for line in block.splitlines() if line
    }
    assert commands == NOT_RUN_HERE
    languages = {word for one in DOCUMENTS for word in re.findall(r"^```(\w+)$", text_of(one), re.MULTILINE)}
    assert languages == {"sh", "console", "python", "text"}


@pytest.mark.parametrize(
    ("command", "printed"), [example for example in console_examples() if "minivllm trace" in example[0]]
)
def test_trace_prints_what_the_readme_shows(command: str, printed: str) -> None:
    assert stripped(run_example(command).stdout) == stripped(printed)


def test_env_tells_what_the_readme_shows() -> None:
    [(command, printed)] = [example for example in console_examples() if "minivllm env" in example[0]]
    output = run_example(command).stdout
    shown = [line.split()[0] for line in printed.splitlines() if line != "…"]
    assert shown[1:] == ["device", "dtype", "kv_cache_dtype", "attention"]
    assert all(any(line.startswith(f"{word} ") for line in output.splitlines()) for word in shown)


@pytest.mark.slow
def test_chat_answers_as_the_readme_shows(smollm2_path: Path) -> None:
    [(command, printed)] = [example for example in console_examples() if "minivllm chat" in example[0]]
    result = run_example(command)
    assert result.stdout.startswith("The capital of France is Paris.")
    statistics = re.compile(
        r"TTFT .+ · prefill .+ tok/s \(0 cached\) · decode .+ tok/s · \d+ % of bandwidth bound · ctx [\d,]+/8,192 · "
        r"stop: \w+"
    )
    assert statistics.fullmatch(printed.splitlines()[-1])
    # A first start may say behind it that compiling goes on.
    assert any(statistics.fullmatch(line) for line in result.stderr.splitlines())


@pytest.mark.slow
def test_generate_prints_what_the_readme_shows(smollm2_path: Path) -> None:
    [(command, printed)] = [example for example in console_examples() if "minivllm generate" in example[0]]
    shown = [json.loads(line.replace(", …}", "}")) for line in printed.splitlines()]
    records = [json.loads(line) for line in run_example(command).stdout.splitlines()]
    assert [{name: record[name] for name in expected} for record, expected in zip(records, shown)] == shown


def test_console_examples_are_all_covered() -> None:
    kinds = {" ".join(command.split()[:2]) for command, _ in console_examples()}
    assert kinds == {*NEEDS_NO_MODEL, "minivllm chat", "minivllm generate"}


def commands_in(document: Path) -> list[list[str]]:
    """The words of every command line of ``minivllm``: in blocks of code, and between backquotes."""
    text = text_of(document)
    fenced = re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_code(text))]
    found = re.compile(r"^(?:\$ )?(?:.* (?:&&|-m) )?minivllm (\w+.*)$")
    return [shlex.split(match[1]) for line in lines if (match := found.match(line))]


def flags_of(command: Any) -> set[str]:
    """All flags of a command, ``--no-…`` and short ones included."""
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_and_flags_of_a_document_exist(document: Path) -> None:
    for words in commands_in(document):
        command, rest = typer.main.get_command(app), words
        while isinstance(command, typer.core.TyperGroup) and rest and re.match(r"\w", rest[0]):
            _, command, rest = command.resolve_command(typer.Context(command), rest)
        unknown = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} - flags_of(command)
        assert unknown <= {"--help"}, f"minivllm {shlex.join(words)}: there is no {unknown}"


def commands_below(command: Any) -> list[Any]:
    """All commands of a group, those of its groups included; a command itself."""
    if not isinstance(command, typer.core.TyperGroup):
        return [command]
    context = typer.Context(command)
    below = [command.resolve_command(context, [name])[1] for name in command.list_commands(context)]
    return [one for group in below for one in commands_below(group)]


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if "tests" not in one.parts], ids=name_of)
def test_flags_that_a_document_names_alone_are_those_of_a_command(document: Path) -> None:
    codes = re.findall(r"`(--[^`]+)`", without_code(text_of(document)))
    named = {word for code in codes for word in code.split() if word.startswith("--")}
    known = {flag for command in commands_below(typer.main.get_command(app)) for flag in flags_of(command)}
    assert named <= {*known, "--help", "--run", "--save"}, "the last two are flags of python -m tutorials"


@pytest.mark.parametrize(("folder", "group"), [("cli", "minivllm"), ("bench", "minivllm bench")])
def test_the_table_of_commands_is_that_of_the_command_line(folder: str, group: str) -> None:
    command = typer.main.get_command(app)
    for name in group.split()[1:]:
        _, command, _ = command.resolve_command(typer.Context(command), [name])
    text = text_of(ROOT / "minivllm" / folder / "README.md")
    shown = re.findall(rf"^\| `{group} (\w+).*?` \|", text, re.MULTILINE)
    assert sorted(shown) == sorted(command.list_commands(typer.Context(command)))


def test_the_table_of_endpoints_is_that_of_the_server() -> None:
    rows = re.findall(r"^\| (`/.*?`) \|", text_of(ROOT / "minivllm" / "server" / "README.md"), re.MULTILINE)
    shown = [path for row in rows for path in re.findall(r"`(.+?)`", row)]
    sources = [ROOT / "minivllm" / "server" / file for file in ("app.py", "page/page.py")]
    routes = [path for one in sources for path in re.findall(r"@app\.\w+\(\s*\"(/.*?)\"", text_of(one))]
    assert len(set(shown)) == len(shown)
    assert set(shown) == {path.replace("{name:path}", "{name}") for path in routes}


def test_the_settings_of_connectors_are_accepted() -> None:
    """And a connector reads each of its own settings."""
    settings = [block for block in blocks("text") if block.startswith('{"kv_connector"')]
    assert len(settings) == 6
    sources = "".join(text_of(path) for path in ROOT.glob("minivllm/kv_transfer/**/*.py"))
    for block in settings:
        values = json.loads(
            block.replace('{"kv_connector": …}, …', '{"kv_connector": "OffloadingConnector"}')
        )
        config = KVTransferConfig.from_dict(values)
        assert all(f'"{name}"' in sources for name in config.kv_connector_extra_config)


def snippets(needs_model: bool) -> list[str]:
    return [block for block in blocks("python") if ("smollm2" in block) == needs_model]


@pytest.mark.parametrize("snippet", snippets(needs_model=False))
def test_python_snippets_run(snippet: str) -> None:
    result = run([sys.executable, "-c", snippet])
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets(needs_model=True))
def test_python_snippets_with_a_model_run(snippet: str, smollm2_path: Path) -> None:
    result = run([sys.executable, "-c", snippet])
    assert result.returncode == 0, result.stderr
    assert result.stdout


def defined_names(node: ast.stmt) -> set[str]:
    """What a statement defines: a function, a class, or variables."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {found.id for target in targets for found in ast.walk(target) if isinstance(found, ast.Name)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_to_what_they_name(document: Path) -> None:
    """A link's text that is a Python name must be defined in the file it leads to; a method, in its class."""
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", text_of(document)):
        path = document.parent / target
        assert path.exists(), f"{document.name} links to {target}"
        name = text.strip("`")
        if (
            path.suffix != ".py"
            or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name)
            or name in (path.stem, path.name)
        ):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        body = tree.body
        for part in name.split("."):
            [found] = [node for node in body if part in defined_names(node)]
            body = getattr(found, "body", [])


def test_the_code_map_is_that_of_the_tree() -> None:
    table = text_of(TOUR).split(BEGIN)[1].split(END)[0]
    assert table.strip() == code_map(), "run python tests/structure/code_map.py"
    packages = {f"minivllm/{path.parent.name}" for path in (ROOT / "minivllm").glob("*/__init__.py")}
    assert set(ORDER) == {"minivllm", "kernels_triton_free", *packages}


def test_the_table_of_models_is_that_of_the_families() -> None:
    """And the families that run on transformers' layers are those that the tests compare."""
    section = text_of(ROOT / "minivllm" / "models" / "README.md").split("## Models")[1].split("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", section, re.MULTILINE)
    shown = {name: gguf.strip("`") if gguf.startswith("`") else None for name, gguf in rows}
    families = [family for module in registry._MODULES for family in module.FAMILIES]
    assert shown == {family.architecture: family.gguf_architecture for family in families}
    [listed] = re.findall(r"three configurations of each:\s(.+?)\.$", section, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == sorted(FAMILIES)
    assert all(len(configurations) == 3 for configurations in FAMILIES.values())


FIGURE = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ?(×|tok/s|ms|%)(?!\w)(?:<!-- (.+?) -->)?")


def unproven_figures(text: str, folder: Path) -> list[str]:
    """Numbers with the unit of a measurement that no report in ``folder`` has.

    After the number stands <!-- FILE | case | side | metric -->, where the median is; or FILE | case | side /
    other | metric for a ratio, gpu/FILE/key/… for a figure of tests/gpu/results, or "not measured". Blocks
    under
    <!-- sample output --> are one machine's,
    and the part that ``speed_picture`` writes is held against its reports by its own test.
    """
    before, _, rest = text.partition(speed_picture.BEGIN)
    text = before + rest.partition(speed_picture.END)[2]
    text = re.sub(r"^<!-- sample output -->\n```console\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [found[0] for found in FIGURE.finditer(text) if not _is_proven(*found.groups(), folder)]


def _is_proven(number: str, unit: str, mark: str | None, folder: Path) -> bool:
    if mark == "not measured":
        return True
    if mark is None:
        return False
    if mark.startswith("gpu/"):
        _, file, *keys = mark.split("/")
        return _is_proven_on_a_gpu(number, json.loads((GPU_RESULTS / file).read_text(encoding="utf-8")), keys)
    file, case, side, metric = mark.split(" | ")
    report = read_report(folder / file)
    side, _, against = side.partition(" / ")
    if against:
        key = (case, side, against, metric)
        values = [
            o.ratio for o in report.comparisons if o.holds and (o.case, o.side, o.against, o.metric) == key
        ]
        measured = "×"
    else:
        [one] = [
            one for one in report.measurements if (one.case, one.side, one.metric) == (case, side, metric)
        ]
        values, measured = [median(one.samples)], one.unit
    digits = len(number.partition(".")[2])
    scale = 100 if measured == "share" else 1
    shown = float(number.replace(",", ""))
    return unit == ("%" if measured == "share" else measured) and [
        round(v * scale, digits) for v in values
    ] == [shown]


def _is_proven_on_a_gpu(number: str, found: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        found = found[key]
    scale = 100 if keys[-1].startswith("share") else 1
    return round(found * scale, len(number.partition(".")[2])) == float(number.replace(",", ""))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_measured_number_is_that_of_a_report(document: Path) -> None:
    assert unproven_figures(text_of(document), speed_picture.MEASUREMENTS) == []


STEP = "<!-- r.json | decode | minivllm | step -->"


@pytest.mark.parametrize(
    ("text", "unproven"),
    [
        (f"It takes 3 ms{STEP}.", []),
        (f"It takes 3.14 ms{STEP}.", []),
        (f"It takes 3.2 ms{STEP}.", [f"3.2 ms{STEP}"]),
        (f"It takes 3 tok/s{STEP}.", [f"3 tok/s{STEP}"]),
        ("It is 1,200 tok/s fast, and 4.01 × faster.", ["1,200 tok/s", "4.01 ×"]),
        ("A tolerance of 5 %<!-- not measured -->.", []),
        ("<!-- sample output -->\n```console\n$ minivllm chat\n107 tok/s\n```\nbut 3 % here", ["3 %"]),
        ("```console\n$ minivllm chat\n107 tok/s\n```", ["107 tok/s"]),
        (f"{speed_picture.BEGIN}| 2.00 × |{speed_picture.END} 2 ×", ["2 ×"]),
    ],
)
def test_a_number_without_a_report_is_found(text: str, unproven: list[str], tmp_path: Path) -> None:
    step = Measurement("decode", "minivllm", "step", "ms", "lower", [3.14, 9.0, 1.0])
    (tmp_path / "r.json").write_bytes(msgspec.json.encode(make_report("roofline", {}, [step])))
    assert unproven_figures(text, tmp_path) == unproven
