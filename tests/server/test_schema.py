"""schemathesis reads the server's own OpenAPI schema and tries everything on it:
no 5xx, no hang, no other form.

The judge is schemathesis with all its checks; expected is what the schema says. One is told what to accept:
bodies that follow the schema may still be refused, because whether a prompt fits depends on the model, and
large ones with 413.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

KEY = "schema-key"
CONFIGURATION = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "403", "404", "413", "429"]

[checks.negative_data_rejection]
expected-statuses = ["400", "401", "404", "405", "413"]
"""
GOOD = {"messages": [{"role": "user", "content": "say:fine"}]}


@pytest.fixture(scope="module")
def keyed(scripts: Scripts) -> Iterator[ServedCore]:
    with served(ScriptedCore(scripts), scripts.tokenizer, api_keys=(KEY,)) as running:
        yield running


def run_schemathesis(server: ServedCore, directory: Path, *flags: str) -> tuple[int, str]:
    """(test cases run, the report); fails if any check does."""
    (directory / "schemathesis.toml").write_text(CONFIGURATION)
    report = directory / "report.ndjson"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}", "--checks", "all", "--seed", "1"),
            *(
                "--request-timeout",
                "20",
                "--report",
                "ndjson",
                "--report-ndjson-path",
                str(report),
                "--no-color",
            ),
            *flags,
        ],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=560,
    )
    shown = "\n".join(line[:300] for line in result.stdout.splitlines()[-150:])
    assert result.returncode == 0, shown + result.stderr[-2000:]
    num_cases = 0
    for line in report.read_text().splitlines():
        event = json.loads(line).get("ScenarioFinished")
        if event is not None:
            num_cases += len(event["recorder"].get("cases", ()))  # an operation without examples has none
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=GOOD, headers={"authorization": f"Bearer {KEY}"}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    assert not server.core.running
    return num_cases, result.stdout


def test_every_endpoint_keeps_to_its_own_schema(keyed: ServedCore, tmp_path: Path) -> None:
    num_cases, _ = run_schemathesis(keyed, tmp_path, "--max-examples", "4", "--phases", "fuzzing")
    assert num_cases >= 40


@pytest.mark.slow
def test_thousands_of_cases_find_no_failure_of_the_server(keyed: ServedCore, tmp_path: Path) -> None:
    num_cases, _ = run_schemathesis(keyed, tmp_path, "--max-examples", "60")
    assert num_cases >= 2000
