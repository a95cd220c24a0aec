"""What programs written for OpenAI's own client rely on:
retries, timeouts, helpers, parsing, loops with tools.

The judge is the client itself, synchronous and asynchronous;
what is left in the engine is read from its gauges.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from tests.server.serving import RealServer, ScriptedCore, Scripts, ServedCore, served

FULL: dict[str, Any] = {"prompt": "say:" + "a b c d " * 100, "max_tokens": 300}


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say:{text}"}]


@pytest.fixture
def narrow(scripts: Scripts) -> Iterator[ServedCore]:
    """A server with one place and no queue; its engine stands still until told to go on."""
    core = ScriptedCore(scripts, max_num_seqs=1)
    core.held = True
    with served(core, scripts.tokenizer, max_queued_requests=0) as running:
        yield running


class Retries(httpx.BaseTransport):
    """The client's ordinary transport, counting answers by status;
    ``on_refusal`` is called after each refused one."""

    def __init__(self, on_refusal: Callable[[httpx.Response], None] = lambda response: None) -> None:
        self.statuses: list[int] = []
        self._inner = httpx.HTTPTransport()
        self._on_refusal = on_refusal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        self.statuses.append(response.status_code)
        if response.status_code >= 400:
            self._on_refusal(response)
        return response


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses [seconds] that the synchronous client would make, in their order; none is made."""
    pauses: list[float] = []
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**{**vars(time), "sleep": pauses.append}))
    return pauses


def client_of(server: ServedCore, transport: httpx.BaseTransport, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="unused",
        http_client=httpx.Client(transport=transport),
        **options,
    )


def test_a_client_told_to_come_back_does_and_is_served(narrow: ServedCore, slept: list[float]) -> None:
    """Retry-After is what it waits for, to the second."""
    blocker = threading.Thread(
        target=httpx.post, args=(f"{narrow.url}/v1/completions",), kwargs={"json": FULL}
    )
    blocker.start()
    narrow.wait_until(lambda: len(narrow.core.running) == 1)
    told: list[str] = []

    def free_the_place(response: httpx.Response) -> None:
        told.append(response.headers["retry-after"])
        narrow.core.held = False
        narrow.wait_until(lambda: narrow.run.service.admission.num_completions == 0)

    transport = Retries(free_the_place)
    with client_of(narrow, transport, max_retries=2) as client:
        answer = client.chat.completions.create(model="scripted", messages=say("at last"))
    blocker.join()
    assert answer.choices[0].message.content == "at last"
    assert transport.statuses == [429, 200]
    assert slept == [float(seconds) for seconds in told] and slept[0] >= 1


def test_a_server_that_shuts_down_is_asked_again(narrow: ServedCore, slept: list[float]) -> None:
    narrow.core.held = False
    narrow.run.service.admission.is_draining = True

    def open_again(response: httpx.Response) -> None:
        if len(transport.statuses) == 2:
            narrow.run.service.admission.is_draining = False

    transport = Retries(open_again)
    with client_of(narrow, transport, max_retries=3) as client:
        answer = client.completions.create(model="scripted", prompt="say:back")
    assert answer.choices[0].text == "back"
    assert transport.statuses == [503, 503, 200] and slept == [5.0, 5.0]


def test_mistakes_are_not_repeated_and_have_the_clients_own_classes(server: ServedCore) -> None:
    for change, error_class in (
        ({"model": "missing"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 10_000}, openai.BadRequestError),
    ):
        transport = Retries()
        body: dict[str, Any] = {"model": "scripted", "prompt": "say:x", **change}
        with client_of(server, transport, max_retries=3) as client, pytest.raises(error_class) as raised:
            client.completions.create(**body)
        assert transport.statuses == [raised.value.status_code]
        assert raised.value.request_id is not None and raised.value.type == "invalid_request_error"


def gauges(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if set(sample.labels) <= {"engine"}
    }


def wait_until_free(server: RealServer) -> None:
    """Nothing runs, waits or holds a block, as the engine itself says."""
    names = (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "num_completions_admitted",
    )
    server.served.wait_until(lambda: not any(gauges(server.url)[f"minivllm_{name}"] for name in names))


def test_speculation_shows_in_the_metrics(real_server: RealServer, real_client: openai.OpenAI) -> None:
    """The judge of what was kept is the engine's own record of steps: fewer of them than tokens."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

    def counts() -> list[float]:
        values = gauges(real_server.url)
        return [values[f"minivllm_spec_decode_{name}_total"] for name in names] + [
            values["minivllm_engine_steps_total"]
        ]

    before = counts()
    answer = real_client.completions.create(
        model="tiny", prompt=[5, 6, 7] * 8, max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
    )
    drafts, drafted, kept, steps = (new - old for new, old in zip(counts(), before))
    assert answer.usage is not None and answer.usage.completion_tokens == 100
    assert 0 < kept <= drafted <= 3 * drafts
    assert steps < 100


ENDLESS: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 500, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_whose_patience_ends_frees_its_blocks(real_server: RealServer, stream: bool) -> None:
    """The engine is paused, so that nothing but the client's leaving can end its request."""
    wait_until_free(real_server)
    engine = real_server.served.run.service.engine

    def in_the_engine(method: str) -> None:
        call = getattr(engine, method)()
        asyncio.run_coroutine_threadsafe(call, real_server.served.loop).result(30)

    with openai.OpenAI(
        base_url=f"{real_server.url}/v1", api_key="unused", max_retries=0, timeout=1.0
    ) as client:
        if stream:
            chunks = client.completions.create(model="tiny", stream=True, **ENDLESS)
            next(iter(chunks))
            assert gauges(real_server.url)["minivllm_kv_cache_usage_ratio"] > 0
        in_the_engine("pause")
        try:
            with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
                if stream:
                    list(chunks)
                else:
                    client.completions.create(model="tiny", **ENDLESS)
        finally:
            in_the_engine("resume")
        if stream:
            chunks.close()
    wait_until_free(real_server)


def test_streams_that_are_left_early_free_their_blocks(real_server: RealServer) -> None:
    """By a context manager that ends, by close(), and by a cancelled task."""

    async def leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{real_server.url}/v1", api_key="unused", max_retries=0
        ) as client:
            async with await client.completions.create(model="tiny", stream=True, **ENDLESS) as stream:
                await anext(aiter(stream))
            stream = await client.completions.create(model="tiny", stream=True, **ENDLESS)
            await anext(aiter(stream))
            await stream.close()
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in await client.completions.create(model="tiny", stream=True, **ENDLESS):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    wait_until_free(real_server)
    assert gauges(real_server.url)["minivllm_kv_cache_usage_ratio"] == 0


def test_the_stream_helper_gathers_what_came(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=say("one two three")) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    [done] = [event for event in events if event.type == "content.done"]
    assert deltas == done.content == final.choices[0].message.content == "one two three"
    assert final.choices[0].finish_reason == "stop"


def test_raw_and_streaming_responses_show_headers_and_lines(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="scripted", messages=say("raw"))
    assert raw.headers["content-type"] == "application/json" and raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == "raw"
    with client.chat.completions.with_streaming_response.create(
        model="scripted", messages=say("in lines"), stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert "".join(pieces) == "in lines"


class City(BaseModel):
    name: str
    people: int


ROME = '{"name": "Rome", "people": 2800000}'


def test_parse_gives_the_model_that_was_asked_for(client: openai.OpenAI, server: ServedCore) -> None:
    answer = client.chat.completions.parse(model="scripted", messages=say(ROME), response_format=City)
    assert answer.choices[0].message.parsed == City(name="Rome", people=2_800_000)
    structured = server.core.admitted[-1].sampling_params.structured_outputs
    assert structured is not None and set(json.loads(structured.json)["properties"]) == {"name", "people"}
    with client.chat.completions.stream(model="scripted", messages=say(ROME), response_format=City) as stream:
        assert (
            stream.until_done().get_final_completion().choices[0].message.parsed
            == answer.choices[0].message.parsed
        )
    response = client.responses.parse(model="scripted", input=f"say:{ROME}", text_format=City)
    assert response.output_parsed == answer.choices[0].message.parsed


def test_what_the_helpers_return_can_be_sent_back_as_it_is(client: openai.OpenAI) -> None:
    first = client.chat.completions.parse(model="scripted", messages=say(ROME), response_format=City)
    messages = [*say(ROME), first.choices[0].message, *say("thanks")]
    assert (
        client.chat.completions.create(model="scripted", messages=messages).choices[0].message.content
        == "thanks"
    )
    response = client.responses.parse(model="scripted", input=f"say:{ROME}", text_format=City)
    back: Any = [*say(ROME), *response.output, *say("thanks")]
    assert client.responses.create(model="scripted", input=back).output_text == "thanks"


def test_parse_says_when_the_answer_was_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="scripted", messages=say(ROME), response_format=City, max_tokens=3
        )


def test_the_asynchronous_client_does_the_same(server: ServedCore) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            parsed = await client.chat.completions.parse(
                model="scripted", messages=say(ROME), response_format=City
            )
            assert parsed.choices[0].message.parsed == City(name="Rome", people=2_800_000)
            async with client.chat.completions.stream(model="scripted", messages=say("a b c")) as stream:
                assert (await stream.get_final_completion()).choices[0].message.content == "a b c"
            raw = await client.completions.with_raw_response.create(model="scripted", prompt="say:raw")
            assert raw.parse().choices[0].text == "raw" and raw.headers["x-request-id"]
            async with client.completions.with_streaming_response.create(
                model="scripted", prompt="say:lines", stream=True
            ) as response:
                assert [line async for line in response.iter_lines()][-2:] == ["data: [DONE]", ""]
            assert [card.id async for card in client.models.list()] == ["scripted", "other"]
            vectors = await client.embeddings.create(model="scripted", input=["a", "b"])
            assert [item.index for item in vectors.data] == [0, 1]

    asyncio.run(main())


ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two whole numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5, 6]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_a_tool_goes_through_a_real_engine(real_client: openai.OpenAI, stream: bool) -> None:
    """Random weights call the tool only because they must;
    the second turn reads the call and the tool's result."""
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 5?"}]
    # Whitespace between the tokens of JSON has no end of its own.
    options: dict[str, Any] = {"seed": 1, "extra_body": {"bad_words": ["\n", " ", "\t", "\r"]}}

    def turn(**others: Any) -> Any:
        if not stream:
            return real_client.chat.completions.create(model="tiny", messages=messages, tools=[ADD], **others)
        with real_client.chat.completions.stream(
            model="tiny", messages=messages, tools=[ADD], **others
        ) as events:
            return events.get_final_completion()

    first = turn(tool_choice={"type": "function", "function": {"name": "add"}}, **options).choices[0]
    [call] = first.message.tool_calls
    numbers = json.loads(call.function.arguments)
    assert first.finish_reason in ("tool_calls", "stop")
    assert call.function.name == "add" and numbers["a"] in (1, 2, 3) and numbers["b"] in (4, 5, 6)
    messages.append(first.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
    second = real_client.chat.completions.create(
        model="tiny", messages=messages, tools=[ADD], tool_choice="none", max_tokens=8
    ).choices[0]
    assert second.finish_reason in ("length", "stop") and not second.message.tool_calls
    assert second.message.content is not None


def test_a_timeout_of_the_client_is_not_the_servers(server: ServedCore) -> None:
    """A request that times out leaves the server as it was: the next one is answered."""
    server.core.held = True
    try:
        with (
            openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="unused", max_retries=1, timeout=0.2
            ) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.completions.create(model="scripted", prompt="say:never")
        server.wait_until(lambda: not server.core.running)
    finally:
        server.core.held = False
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        assert client.completions.create(model="scripted", prompt="say:now").choices[0].text == "now"
