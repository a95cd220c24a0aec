"""``minivllm chat --url`` against the real server with a scripted core."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from minivllm.cli.chat.chat_remote import RemoteSession
from minivllm.cli.conversation.slash_commands import run_command
from minivllm.errors import ModelError, RequestError
from minivllm.sampling_params import FALLBACK_SAMPLING, SamplingParams
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

KEY = "chat-key"


@pytest.fixture(scope="module")
def keyed(scripts: Scripts) -> Iterator[ServedCore]:
    settings: dict[str, Any] = {"served_model_names": ("first", "second"), "reasoning_parser": "think"}
    with served(ScriptedCore(scripts), scripts.tokenizer, api_keys=(KEY,), **settings) as running:
        yield running


@pytest.fixture
def session(keyed: ServedCore) -> RemoteSession:
    return RemoteSession(f"{keyed.url}/v1", "", settings(temperature=0.7, top_p=0.95), api_key=KEY)


def settings(**given: Any) -> Callable[[Mapping[str, Any]], SamplingParams]:
    return lambda defaults: SamplingParams(**{"max_tokens": None, **defaults, **given})


def ask(session: RemoteSession, text: str) -> str:
    """What is shown of the answer."""
    shown: list[str] = []
    session.ask(f"say:{text}", shown.append, lambda: False)
    return "".join(shown)


def chat(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minivllm.cli.main", "chat", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, input=stdin or "")


def test_an_answer_streams_and_is_counted_as_the_server_counts(session: RemoteSession, keyed: ServedCore) -> None:
    pieces: list[str] = []
    generation = session.ask("say:one two three", pieces.append, lambda: False)
    request = keyed.core.admitted[-1]
    assert "".join(pieces) == generation.text == "one two three" and len(pieces) > 2
    assert generation.finish_reason == "stop"
    assert generation.num_prompt_tokens == len(request.prompt_token_ids)
    assert generation.num_context_tokens == len(request.prompt_token_ids) + len(keyed.core.script(request))
    assert generation.metrics is not None and generation.metrics.ttft is not None
    assert (request.sampling_params.temperature, request.sampling_params.top_p) == (0.7, 0.95)
    line = generation.statistics_line(session.max_model_len)
    assert "TTFT" in line and f"ctx {generation.num_context_tokens}/4,096" in line and "stop: eos" in line


def test_every_turn_sends_the_whole_conversation_as_the_template_writes_it(
    session: RemoteSession, keyed: ServedCore, scripts: Scripts
) -> None:
    session.system = "Be brief."
    ask(session, "yes")
    ask(session, "no")
    sent = scripts.tokenizer.decode(keyed.core.admitted[-1].prompt_token_ids, skip_special_tokens=False)
    order = [sent.index(part) for part in ("Be brief.", "say:yes", "assistant", "say:no")]
    assert order == sorted(order)
    assert session.num_context_tokens() == len(session.prompt_token_ids(session.messages))


def test_settings_reach_the_engine(session: RemoteSession, keyed: ServedCore) -> None:
    for setting in ("temperature=0", "seed=5", 'stop=["end"]', 'logit_bias={"7": 2.5}', "max_tokens=3"):
        run_command(session, f"/set {setting}")
    assert ask(session, "a b c d e f") != "a b c d e f"
    request = keyed.core.admitted[-1]
    params = request.sampling_params
    assert (params.temperature, params.seed, params.stop, params.logit_bias) == (0.0, 5, ["end"], {7: 2.5})
    assert request.max_tokens == 3
    assert session.last_generation is not None and session.last_generation.finish_reason == "length"


def test_reasoning_is_shown_between_its_tags_and_not_kept(session: RemoteSession) -> None:
    assert ask(session, "<think>well, well</think>yes") == "<think>well, well</think>yes"
    assert session.messages[-1].content == "yes"


def test_an_interrupt_keeps_what_was_said_and_frees_the_engine(session: RemoteSession, keyed: ServedCore) -> None:
    shown: list[str] = []
    keyed.core.step_seconds = 0.02
    try:
        generation = session.ask("say:" + "on and on " * 300, shown.append, lambda: len(shown) > 3)
    finally:
        keyed.core.step_seconds = 0.0
    keyed.wait_until(lambda: not keyed.core.running)
    assert generation.interrupted and session.messages[-1].interrupted
    assert "on and on " * 300 > generation.text == "".join(shown) != ""
    assert generation.num_prompt_tokens == len(keyed.core.admitted[-1].prompt_token_ids)


def test_commands_work_or_say_why_not(session: RemoteSession, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("some notes")
    assert "notes.txt" in run_command(session, f"/read {notes}")[0]
    ask(session, "hello")
    assert "some notes" in session.messages[0].content
    assert f"first (at {session.url})" in run_command(session, "/show")[0]
    assert "hello" in run_command(session, "/tokens")[0]
    assert "second takes over from first" in run_command(session, "/model second")[0]
    with pytest.raises(RequestError, match="does not serve 'third'; it has: first, second"):
        run_command(session, "/model third")
    with pytest.raises(RequestError, match="another process"):
        run_command(session, "/trace")


def test_stats_are_those_of_the_server(session: RemoteSession, keyed: ServedCore) -> None:
    """The scripted core's own figures, which reach the chat by the server's metrics."""
    keyed.core.held = True
    others = [threading.Thread(target=ask, args=(session, "by others")) for _ in range(2)]
    try:
        for other in others:
            other.start()
        keyed.wait_until(lambda: len(keyed.core.running) == 2)
        shown = run_command(session, "/stats")[0]
    finally:
        keyed.core.held = False
        for other in others:
            other.join()
    limit = keyed.core.config.scheduler.max_num_seqs
    assert limit >= 2 and "requests      2 running, 0 waiting" in shown
    assert "prefix cache  4 of 10 prompt tokens reused (40%)" in shown
    assert "KV cache      25.0% in use" in shown
    assert "0 tokens computed, 2 preemptions" in shown


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (None, "does not tell what its engine does.+answers 404"),
        ("vllm:num_requests_running 1.0\n", "does not tell what its engine does"),
        ("minivllm_engine_up 0.0\n", "does not answer: it is in a long step, hangs or has died"),
        ("minivllm_engine_up 1.0\n", "does not count kv_cache_usage_ratio: it runs another version of minivllm"),
    ],
)
def test_a_server_that_tells_no_stats_gets_a_sentence(metrics: str | None, reason: str) -> None:
    class OtherServer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/v1/models": json.dumps({"data": [{"id": "other", "max_model_len": 64}]}), "/metrics": metrics}
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            session = RemoteSession(f"http://127.0.0.1:{server.server_port}", "", settings())
            with pytest.raises(RequestError, match=reason):
                run_command(session, "/stats")
        finally:
            server.shutdown()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_other_servers_is_shown_under_either_name(name: str) -> None:
    deltas = [{"role": "assistant", "content": ""}, {name: "Hm. "}, {name: "Well."}, {"content": "Yes."}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    frames = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    class OtherServer(BaseHTTPRequestHandler):
        def answer(self, page: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(page.encode())

        def do_GET(self) -> None:
            self.answer(json.dumps({"data": [{"id": "other", "max_model_len": 64}]}), "application/json")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(frames, "text/event-stream")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            session = RemoteSession(f"http://127.0.0.1:{server.server_port}", "", SamplingParams())
            assert ask(session, "x") == "<think>Hm. Well.</think>Yes."
        finally:
            server.shutdown()


def test_a_refusal_is_the_servers_sentence_and_changes_nothing(session: RemoteSession) -> None:
    with pytest.raises(RequestError, match="more blocks than the cache has"):
        ask(session, "REFUSE")
    run_command(session, "/set temperature=0.5")
    with pytest.raises(RequestError, match="max_model_len is 4096"):
        ask(session, "far too long " * 4096)
    assert session.messages == []
    assert ask(session, "fine") == "fine"


def test_the_command_answers_once_with_a_key(keyed: ServedCore) -> None:
    result = chat("second", "--url", keyed.url, "--api-key", KEY, "-p", "say:Hello, you.", "--raw")
    assert (result.returncode, result.stdout) == (0, "Hello, you.\n"), result.stderr
    assert "stop: eos" in result.stderr
    result = chat("--url", keyed.url, "--api-key", KEY, "--json", stdin="say:piped")
    record = json.loads(result.stdout)
    assert (record["text"], record["finish_reason"]) == ("piped", "stop") and record["num_output_tokens"] > 1


def test_what_no_flag_says_is_sampled_as_the_server_does_by_default(keyed: ServedCore) -> None:
    session = RemoteSession(keyed.url, "", settings(top_p=0.5), api_key=KEY)
    ask(session, "x")
    params = keyed.core.admitted[-1].sampling_params
    assert (params.temperature, params.top_p) == (FALLBACK_SAMPLING["temperature"], 0.5)


def test_mistakes_get_a_sentence(keyed: ServedCore) -> None:
    params = settings()
    with pytest.raises(ModelError, match="answers 401: give its key with --api-key"):
        RemoteSession(keyed.url, "", params)
    with pytest.raises(ModelError, match="There is no server at http"):
        RemoteSession("http://127.0.0.1:9", "", params)
    with pytest.raises(RequestError, match="does not serve 'other'"):
        RemoteSession(keyed.url, "other", params, api_key=KEY)
    result = chat("--url", keyed.url, "--block-size", "16", "--enforce-eager", "-p", "x")
    assert result.returncode == 2 and "leave out --enforce-eager, --block-size" in result.stderr.replace(
        "--block-size, --enforce-eager", "--enforce-eager, --block-size"
    )
