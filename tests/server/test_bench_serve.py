"""``minivllm bench serve`` against the real server with a scripted core,
and against streams that it must not trust."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from minivllm.bench.command import bench
from minivllm.bench.reports.figures import percentile
from minivllm.bench.reports.report import Measurement, Report, make_report, read_report
from minivllm.bench.requests.workloads import arrive, make_workload
from minivllm.bench.serve import LoadGenerator, ServedRecord, Target, keeps, parse_slo, token_times
from minivllm.bench.sides.drive import Task
from minivllm.cli.engine.openai_server import server_root
from minivllm.errors import ConfigError
from minivllm.messages import EngineRequest
from tests.server.capacity import measure
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

WORD = 40
"""A token with a visible text of its own."""


def forever(request: EngineRequest) -> list[int]:
    return [WORD] * 1000


@pytest.fixture(scope="module")
def endless(scripts: Scripts) -> Iterator[ServedCore]:
    """A server whose model always says as much as it may."""
    with served(ScriptedCore(forever), scripts.tokenizer, served_model_names=("endless",)) as running:
        yield running


def run_bench(server: ServedCore, directory: Path, *arguments: str) -> Report:
    path = directory / "report.json"
    command = ["serve", "--url", f"{server.url}/v1", "--vocab-size", "300", "--json", str(path), *arguments]
    result = CliRunner().invoke(bench, command)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return read_report(path)


def samples(report: Report, metric: str) -> list[float]:
    [found] = [one.samples for one in report.measurements if one.metric == metric]
    return found


def test_a_closed_loop_keeps_its_places_full_and_never_more(endless: ServedCore, tmp_path: Path) -> None:
    endless.core.admitted.clear()
    most = 0
    add = endless.core.add_request

    def counted(request: EngineRequest) -> None:
        nonlocal most
        add(request)
        most = max(most, len(endless.core.running))
        # After the two that warm up, nothing moves until all places are taken.
        endless.core.held = len(endless.core.admitted) > 2 and most < 3

    endless.core.add_request = counted  # type: ignore[method-assign]
    try:
        report = run_bench(
            endless,
            tmp_path,
            "--workload",
            "random:12:4:9",
            "--concurrency",
            "3",
            "--png",
            str(tmp_path / "p.png"),
        )
    finally:
        endless.core.add_request = add  # type: ignore[method-assign]
    assert most == 3
    tasks = make_workload("random:12:4:9", 300)
    sent = endless.core.admitted[2:]  # the first two warm up
    assert sorted(request.prompt_token_ids for request in sent) == sorted(task.prompt for task in tasks)
    assert len(samples(report, "TTFT")) == 12
    seconds = report.configuration["seconds"]
    num_tokens = sum(task.max_tokens for task in tasks)
    assert samples(report, "output")[0] * seconds == pytest.approx(num_tokens)
    assert samples(report, "prompt and output")[0] * seconds == pytest.approx(
        num_tokens + sum(len(task.prompt) for task in tasks)
    )
    assert samples(report, "errors") == [0.0]
    assert {one.side for one in report.measurements} == {"endless"}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_chat_is_measured_by_the_tokens_the_server_counts(endless: ServedCore, tmp_path: Path) -> None:
    report = run_bench(
        endless, tmp_path, "--endpoint", "chat", "--workload", "fixed:4:5:6", "--concurrency", "2"
    )
    assert samples(report, "output")[0] * report.configuration["seconds"] == pytest.approx(4 * 6)


def test_time_to_first_token_counts_from_the_moment_a_request_was_due(
    scripts: Scripts, tmp_path: Path
) -> None:
    """The engine takes one request at a time and 20 ms a step:
    of a burst of 5, the last one waits for the others."""
    core = ScriptedCore(forever, max_num_seqs=1)
    core.step_seconds = 0.02
    with served(core, scripts.tokenizer) as server:
        report = run_bench(server, tmp_path, "--workload", "fixed:5:3:4", "--arrivals", "burst:5:1")
    ttft = sorted(samples(report, "TTFT"))
    assert ttft[-1] - ttft[0] >= 4 * 4 * 20 * 0.99


def test_failures_count_by_class_and_only_as_failures(scripts: Scripts, tmp_path: Path) -> None:
    with served(ScriptedCore(forever, max_num_seqs=1), scripts.tokenizer, max_queued_requests=1) as server:
        report = run_bench(
            server, tmp_path, "--workload", "fixed:9:3:40", "--arrivals", "burst:9:1", "--slo", "e2e:60000"
        )
    [num_failed] = samples(report, "errors: HTTP 429")
    assert samples(report, "errors") == [num_failed] == [7.0]
    assert len(samples(report, "E2E")) == 2
    assert samples(report, "within the SLO") == [pytest.approx(2 / 9)]
    assert samples(report, "goodput")[0] * report.configuration["seconds"] == pytest.approx(2)
    assert any("7 × HTTP 429: The server is full" in note for note in report.notes)


def test_overload_is_told_beside_the_same_server_without_it(scripts: Scripts, tmp_path: Path) -> None:
    """Two run and one waits; a second run comes far faster than the closed loop's rate,
    so most are told 429."""
    core = ScriptedCore(forever, max_num_seqs=2)
    core.step_seconds = 0.002
    with served(core, scripts.tokenizer, max_queued_requests=1) as server:
        report = run_bench(
            server, tmp_path, "--workload", "fixed:20:3:60", "--concurrency", "2", "--overload", "50"
        )
    usual, over = "fixed:20:3:60, 2 at a time", "fixed:20:3:60, 50 × that rate"
    found = {(one.case, one.metric): one.samples for one in report.measurements}
    assert len(found[usual, "TTFT"]) == 20 and (usual, "time to 429") not in found
    [num_refused] = found[over, "errors: HTTP 429"]
    assert num_refused == len(found[over, "time to 429"]) == 20 - len(found[over, "TTFT"]) > 0
    [note] = [note for note in report.notes if note.startswith("p99 ITL of admitted requests")]
    before, after = (percentile(found[case, "ITL"], 0.99) for case in (usual, over))
    assert f"{after:.3g} ms, {after / before:.2f} × the {before:.3g} ms" in note
    assert f"{num_refused:g} requests" in note and f"longest {max(found[over, 'time to 429']):.3g} ms" in note


def test_a_server_is_set_beside_the_engine_in_process(endless: ServedCore, tmp_path: Path) -> None:
    """The report of the other side is made up, so that what must come out is known."""
    offline = make_report(
        "throughput",
        {},
        [
            Measurement(
                case="fixed:8:3:5", side="minivllm", metric=metric, unit=unit, better=better, samples=samples
            )
            for metric, unit, better, samples in (
                ("output", "tok/s", "higher", [1000.0]),
                ("TTFT", "ms", "lower", [1.0, 2.0, 3.0]),
            )
        ],
    )
    path = tmp_path / "offline.json"
    path.write_bytes(msgspec.json.encode(offline))
    arguments = ["--concurrency", "8", "--against", str(path)]
    report = run_bench(endless, tmp_path, "--workload", "fixed:8:3:5", *arguments)
    ours = {one.metric: one.samples for one in report.measurements if one.side == "endless"}
    added = percentile(ours["TTFT"], 0.5) - 2.0
    assert report.notes[-1] == (
        f"The server gives {ours['output'][0] / 1000.0:.1%} of the output rate in process, "
        f"and adds {added:.3g} ms to the median TTFT."
    )
    ratios = {one.metric: one.ratio for one in report.comparisons}
    assert ratios["output"] == pytest.approx(ours["output"][0] / 1000.0)
    assert ratios["TTFT"] == pytest.approx(2.0 / percentile(ours["TTFT"], 0.5))
    assert [one.samples for one in report.measurements if one.side == "in process"] == [
        [1000.0],
        [1.0, 2.0, 3.0],
    ]


def test_the_capacity_of_the_api_process_is_measured_with_an_engine_that_costs_nothing() -> None:
    found = measure(num_requests=6, num_streams=3, num_tokens=20)
    assert found.num_tokens == 6 * 20
    assert found.seconds > 0 and found.cpu_seconds > 0


def test_cancelled_requests_leave_the_engine_and_stand_for_nothing(
    endless: ServedCore, tmp_path: Path
) -> None:
    report = run_bench(
        endless, tmp_path, "--workload", "fixed:20:3:50", "--cancel-rate", "0.5", "--concurrency", "4"
    )
    [num_cancelled] = samples(report, "cancelled")
    assert 3 <= num_cancelled <= 17
    assert len(samples(report, "TTFT")) == 20 - num_cancelled
    assert samples(report, "errors") == [0.0]
    endless.wait_until(lambda: not endless.core.running)


def test_turns_of_a_conversation_wait_for_the_turn_before(endless: ServedCore, tmp_path: Path) -> None:
    endless.core.admitted.clear()
    run_bench(endless, tmp_path, "--workload", "multi-turn:2:3:4:3", "--concurrency", "6")
    lengths = [len(request.prompt_token_ids) for request in endless.core.admitted[2:]]
    assert sorted(lengths) == [4, 4, 11, 11, 18, 18]
    assert lengths.index(18) > lengths.index(11) > lengths.index(4)


@contextmanager
def answering(lines: list[str]) -> Iterator[str]:
    """A server that answers every POST with these lines; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"{line}\n\n" for line in lines).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def measured(*lines: str) -> ServedRecord:
    """The record of one request that is answered with ``lines``."""
    with answering(list(lines)) as url:
        records, _ = asyncio.run(LoadGenerator(Target(url=url), concurrency=1).run([Task([1, 2], 7)]))
    return records[0]


def chunk(text: str, **others: Any) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "text": text}], **others})


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 7}}'
DONE = "data: [DONE]"


def test_a_chunk_is_not_a_token() -> None:
    record = measured(chunk("three tokens here"), chunk(" and four more"), chunk(""), USAGE, DONE)
    assert (record.error, record.num_chunks, len(record.times), record.num_prompt_tokens) == (None, 2, 7, 2)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ((chunk("a"), DONE), "no usage"),
        ((chunk("a"), USAGE), "broken stream: ValueError: it ended before"),
        ((chunk("a"), "data: {nonsense", DONE), "broken stream"),
        ((chunk("a"), "data: [1]", DONE), "broken stream"),
        ((chunk("a"), 'data: {"error": {"message": "the core died"}}', DONE), "stream error: the core died"),
    ],
)
def test_a_stream_that_cannot_be_trusted_is_a_failure_with_its_reason(
    lines: tuple[str, ...], error: str
) -> None:
    record = measured(*lines)
    assert record.error is not None and record.error.startswith(error)
    assert record.times == []


@given(
    chunks=st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=30).map(sorted),
    num_tokens=st.integers(1, 60),
)
def test_tokens_are_spread_over_chunks_in_order_from_the_first_to_the_last(
    chunks: list[float], num_tokens: int
) -> None:
    times = token_times(chunks, num_tokens)
    assert len(times) == num_tokens
    assert times == sorted(times)
    assert times[0] == chunks[0]
    assert num_tokens == 1 or times[-1] == chunks[-1]
    if num_tokens == len(chunks):
        assert times == chunks
    elif num_tokens > len(chunks):
        assert set(times) == set(chunks)


def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for() -> None:
    workload = make_workload("fixed:4001:1:1", 100)

    def gaps(text: str) -> list[float]:
        times = [task.arrival for task in arrive(workload, text, seed=3)]
        assert times[0] == 0.0
        return [after - before for before, after in pairwise(times)]

    def variation(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean

    for text, expected in (("poisson:20", 1.0), ("gamma:20:0.25", 2.0), ("gamma:20:4", 0.5)):
        assert sum(gaps(text)) / 4000 == pytest.approx(1 / 20, rel=0.1)
        assert variation(gaps(text)) == pytest.approx(expected, rel=0.1)
    assert gaps("poisson:20") != gaps("gamma:20:0.25")
    assert [task.arrival for task in arrive(make_workload("fixed:5:1:1", 100), "burst:2:3")] == [
        0,
        0,
        3,
        3,
        6,
    ]


def test_a_trace_is_sent_at_its_own_times(endless: ServedCore, tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [5, n + 1], "max_tokens": 2, "arrival": 0.2 * n} for n in range(3)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    endless.core.admitted.clear()
    run_bench(endless, tmp_path, "--workload", str(trace), "--arrivals", "trace")
    sent = endless.core.admitted[2:]
    assert [request.prompt_token_ids for request in sent] == [line["prompt_token_ids"] for line in lines]
    start = endless.core.admitted[1].arrival_time  # of a request before the trace
    assert all(
        request.arrival_time > start + line["arrival"] for request, line in zip(sent, lines, strict=True)
    )


def test_goodput_needs_every_limit_kept() -> None:
    record = ServedRecord(arrival=1.0, times=[1.3, 1.4, 1.5])
    assert keeps(record, parse_slo("ttft:301,tpot:101,e2e:501"))
    for text in ("ttft:299", "tpot:99", "e2e:499", "ttft:299,tpot:101"):
        assert not keeps(record, parse_slo(text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "ttft=5"], "--slo is 'ttft=5'"),
        (["--slo", "itl:5"], "ttft, tpot or e2e"),
        (["--slo", "ttft:nan"], "--slo"),
        (["--arrivals", "poisson"], "--arrivals is 'poisson'"),
        (["--arrivals", "gamma:1:-2"], "gamma:RATE:SHAPE"),
        (["--arrivals", "poisson:1", "--concurrency", "2"], "exclude each other"),
        (["--overload", "10", "--arrivals", "poisson:1"], "excludes --arrivals"),
        (["--overload", "10", "--rates", "1,2"], "and --rates"),
        (["--arrivals", "poisson:1", "--rates", "1,2"], "exclude each other"),
        (["--rates", "4,2"], "--rates is '4,2', but must be ascending numbers"),
        (["--rates", "1,2", "--against", "a.json"], "leave out --rates"),
        (["--endpoint", "embeddings"], "completions or chat"),
        (["--url", "localhost"], "--url is 'localhost'"),
        (["--url", "http://127.0.0.1:9", "--model", ""], None),
    ],
)
def test_a_mistake_gets_a_sentence(arguments: list[str], message: str | None) -> None:
    result = CliRunner().invoke(bench, ["serve", "--workload", "fixed:1:1:1", *arguments])
    if message is None:
        assert result.exit_code == 0 and "ConnectError" in result.output
    else:
        assert isinstance(result.exception, ConfigError) and message in str(result.exception)


def test_a_url_may_end_in_v1_or_not() -> None:
    assert (
        server_root("http://a:1/v1/")
        == server_root("http://a:1/v1")
        == server_root("http://a:1")
        == "http://a:1"
    )


def test_a_sweep_over_rates_draws_the_curve_of_a_server(endless: ServedCore, tmp_path: Path) -> None:
    endless.core.admitted.clear()
    files = {name: tmp_path / f"sweep.{name}" for name in ("json", "csv", "png")}
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    command = [
        "serve",
        "--url",
        endless.url,
        "--rates",
        "40,400",
        "--workload",
        "fixed:6:3:5",
        "--repeats",
        "2",
    ]
    command += ["--vocab-size", "300"]
    result = CliRunner().invoke(bench, [*command, "--slo", "e2e:60000", *flags])
    assert result.exit_code == 0, result.output + repr(result.exception)
    report = read_report(files["json"])
    assert (report.kind, report.configuration["rates"]) == ("serve", "40,400")
    assert {(one.x, one.case, one.side) for one in report.measurements} == {
        (rate, f"fixed:6:3:5 at {rate}/s", "endless") for rate in (40, 400)
    }
    for rate in (40, 400):
        own = {one.metric: one.samples for one in report.measurements if one.x == rate}
        assert len(own["TTFT"]) == 2 * 6 and len(own["requests"]) == len(own["goodput"]) == 2
        assert own["within the SLO"] == [1.0, 1.0] and own["errors"] == [0.0, 0.0]
        for requests, output in zip(own["requests"], own["output"]):
            assert output == pytest.approx(5 * requests)
    prompts = [tuple(request.prompt_token_ids) for request in endless.core.admitted]
    assert len(set(prompts)) == len(prompts) == 2 + 2 * 2 * 6, "no prefix cache answers for the engine"
    assert any("rate" in note and "endless: " in note for note in report.notes)
    assert files["csv"].read_text().count("fixed:6:3:5 at 40/s,") == len(report.measurements) / 2
    assert files["png"].read_bytes().startswith(b"\x89PNG")
