"""``minivllm chat --url`` against the real server with a scripted core."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from minivllm.cli.chat.chat_remote import RemoteSession
from minivllm.cli.conversation.chat_session import ChatSession, Message
from minivllm.cli.conversation.slash_commands import run_command
from minivllm.errors import ModelError, RequestError
from minivllm.sampling_params import FALLBACK_SAMPLING, SamplingParams
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine

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


def frames(*deltas: Mapping[str, str]) -> str:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)


@contextmanager
def other_server(stream: str = "", metrics: str | None = None, is_cut: bool = False) -> Iterator[str]:
    """A server of another kind, which answers with ``stream``.
    is_cut: the connection ends before the answer does."""

    class OtherServer(BaseHTTPRequestHandler):
        def answer(self, page: str | None, kind: str, **headers: str) -> None:
            self.send_response(404 if page is None else 200)
            for name, value in {"content-type": kind, **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def do_GET(self) -> None:
            models = json.dumps({"data": [{"id": "other", "max_model_len": 64}]})
            self.answer({"/v1/models": models, "/metrics": metrics}.get(self.path), "application/json")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            page = stream if "chat" in self.path else None
            self.answer(page, "text/event-stream", **({"content_length": "99999"} if is_cut else {}))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def chat(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minivllm.cli.main", "chat", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, input=stdin or "")


def test_an_answer_streams_and_is_counted_as_the_server_counts(
    session: RemoteSession, keyed: ServedCore
) -> None:
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


def test_an_interrupt_keeps_what_was_said_and_frees_the_engine(
    session: RemoteSession, keyed: ServedCore
) -> None:
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
    assert "prefix cache  4 of 10 prompt tokens reused (40%), 1 by copying" in shown
    assert "KV cache      25.0% in use" in shown
    assert "0 tokens computed, 2 preemptions" in shown


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (None, "does not tell what its engine does.+answers 404"),
        ("vllm:num_requests_running 1.0\n", "does not tell what its engine does"),
        ("minivllm_engine_up 0.0\n", "does not answer: it is in a long step, hangs or has died"),
        (
            "minivllm_engine_up 1.0\n",
            "does not count kv_cache_usage_ratio: it runs another version of minivllm",
        ),
    ],
)
def test_a_server_that_tells_no_stats_gets_a_sentence(metrics: str | None, reason: str) -> None:
    with other_server(metrics=metrics) as url, pytest.raises(RequestError, match=reason):
        run_command(RemoteSession(url, "", settings()), "/stats")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_other_servers_is_shown_under_either_name(name: str) -> None:
    deltas = [{"role": "assistant", "content": ""}, {name: "Hm. "}, {name: "Well."}, {"content": "Yes."}]
    with other_server(frames(*deltas) + "data: [DONE]\n\n") as url:
        assert ask(RemoteSession(url, "", settings()), "x") == "<think>Hm. Well.</think>Yes."


BEGUN = [{"role": "assistant", "content": ""}, {"content": "Half an"}, {"content": " answer"}]
REFUSED = 'data: {"error": {"message": "The server is shutting down."}}\n\n'


@pytest.mark.parametrize(
    ("end", "is_cut", "sentence"),
    [
        ("", True, "cannot be reached (RemoteProtocolError): see whether it still runs"),
        ("", False, "is broken: it ended before [DONE]"),
        ("data: {not\n\n", False, "is broken: "),
        (REFUSED, False, "The server is shutting down."),
    ],
)
def test_what_has_arrived_of_an_answer_that_breaks_off_is_kept_and_the_session_goes_on(
    end: str, is_cut: bool, sentence: str
) -> None:
    with other_server(frames(*BEGUN) + end, is_cut=is_cut) as url:
        session = RemoteSession(url, "", settings())
        shown: list[str] = []
        generation = session.ask("x", shown.append, lambda: False)
        assert "".join(shown) == generation.text == "Half an answer"
        assert generation.interrupted and sentence in generation.failure
        assert ("is broken" in sentence) == ("is broken" in generation.failure)
        assert [(message.content, message.interrupted) for message in session.messages] == [
            ("x", False),
            ("Half an answer", True),
        ]
        session.ask("y", shown.append, lambda: False)
        assert len(session.messages) == 4
        done = chat("--url", url, "-p", "x", "--raw")
        assert done.returncode == 2 and done.stdout.startswith("Half an answer") and sentence in done.stderr
        assert "Traceback" not in done.stderr
        done = chat("--url", url, "-p", "x", "--json")
        record = json.loads(done.stdout)
        assert (record["text"], record["finish_reason"]) == (
            "Half an answer",
            "abort",
        ) and sentence in record["error"]


def test_an_answer_that_breaks_off_before_it_begins_leaves_the_conversation_as_it_was() -> None:
    with other_server(frames({"role": "assistant", "content": ""}), is_cut=True) as url:
        session = RemoteSession(url, "", settings())
        with pytest.raises(RequestError, match="cannot be reached"):
            ask(session, "x")
        assert session.messages == [] and session.last_generation is None


def test_a_server_whose_engine_dies_in_the_middle_of_an_answer_leaves_what_it_said(scripts: Scripts) -> None:
    core = ScriptedCore(scripts)
    core.step_seconds = 0.02
    with served(core, scripts.tokenizer) as running:
        session, shown = RemoteSession(running.url, "", settings()), list[str]()

        def show(text: str) -> None:
            shown.append(text)
            if len(shown) == 3:
                running.call(core.die)

        generation = session.ask("say:" + "on and on " * 300, show, lambda: False)
        assert (
            generation.interrupted and generation.failure == "The engine has died and the server is stopping."
        )
        assert session.messages[-1].interrupted and session.messages[-1].content == "".join(shown) != ""


def test_tokens_are_counted_as_a_chat_counts_that_has_the_engine_itself(
    session: RemoteSession, scripts: Scripts
) -> None:
    engine = SimpleNamespace(tokenizer=scripts.tokenizer, client=None)
    local = ChatSession(cast("LLMEngine", engine), "first", SamplingParams())
    texts = ["Größe <|im_end|> 😀", "", " spaces  ", "<think>well</think>"]
    for one in (session, local):
        one.messages = [Message(role=role, content=text) for text in texts for role in ("user", "assistant")]
    assert session.num_context_tokens() == local.num_context_tokens() > 0
    for text in texts:
        assert session.num_text_tokens(text) == local.num_text_tokens(text)
    for system in ("Be brief.", None):
        for one in (session, local):
            one.messages, one.system = [], system
        assert session.num_context_tokens() == local.num_context_tokens()
    assert local.num_context_tokens() == 0


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
