"""Who gets in: never more than the bounds, everything given back, and a quick 429 for the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.server.bodies.errors import ApiError
from minivllm.server.limits.admission import MAX_RETRY_AFTER, Admission, Ticket
from tests.server.serving import ScriptedCore, Scripts, served

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "tokens", "start", "leave"]), st.integers(1, 12), st.integers(0, 9)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS)
def test_the_bounds_hold_and_places_are_given_back(actions: list[tuple[str, int, int]]) -> None:
    admission = Admission(max_running=4, max_queued=6, max_queued_prompt_tokens=20)
    inside: list[Ticket] = []
    tokens: dict[Ticket, int] = {}
    for action, number, which in actions:
        if action == "enter":
            fits = sum(ticket.num_completions for ticket in inside) + number <= 10
            try:
                inside.append(admission.enter(number))
                assert fits
            except ApiError as error:
                assert not fits
                assert error.status == (400 if number > 10 else 429)
        elif inside:
            ticket = inside[which % len(inside)]
            if action == "tokens":
                waiting = sum(tokens.values())
                try:
                    ticket.add_prompt_tokens(number)
                    assert waiting == 0 or waiting + number <= 20
                    tokens[ticket] = tokens.get(ticket, 0) + number
                except ApiError as error:
                    assert error.status == 429 and waiting + number > 20
            elif action == "start":
                ticket.started()
                tokens.pop(ticket, None)
            else:
                inside.remove(ticket)
                tokens.pop(ticket, None)
                admission.leave(ticket)
                admission.leave(ticket)
        assert admission.num_completions == sum(ticket.num_completions for ticket in inside) <= 10
        assert admission.num_queued_prompt_tokens == sum(tokens.values())
        assert 1 <= admission.retry_after() <= MAX_RETRY_AFTER


def test_ten_times_overload_admits_what_fits_and_refuses_the_rest_at_once(scripts: Scripts) -> None:
    """Open loop: 120 requests meet 4 places and a queue of 8. Refusals come while nothing else moves."""
    core = ScriptedCore(scripts, max_num_seqs=4)
    core.held = True

    async def main(url: str) -> tuple[list[httpx.Response], list[asyncio.Task[httpx.Response]]]:
        async with httpx.AsyncClient(
            base_url=url, timeout=60, limits=httpx.Limits(max_connections=200)
        ) as http:
            body = {"messages": [{"role": "user", "content": "say:ok"}]}
            tasks = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(120)]
            refused: list[httpx.Response] = []
            while len(refused) < 108:  # the engine stands still, so only refusals can come
                await asyncio.sleep(0.01)
                refused = [task.result() for task in tasks if task.done()]
            assert len(core.admitted) == 12
            core.held = False
            answers = await asyncio.gather(*tasks)
            return refused, [answer for answer in answers if answer not in refused]  # type: ignore[misc]

    with served(core, scripts.tokenizer, max_queued_requests=8) as server:
        refused, answered = asyncio.run(main(server.url))
        assert server.run.service.admission.num_completions == 0
    assert Counter(response.status_code for response in refused) == {429: 108}
    for response in refused:
        assert 1 <= int(response.headers["retry-after"]) <= MAX_RETRY_AFTER
        assert response.json()["error"]["code"] == "queue_full"
    assert [response.status_code for response in answered] == [200] * 12  # type: ignore[attr-defined]


def test_waiting_prompt_tokens_are_bounded_and_n_counts(scripts: Scripts) -> None:
    core = ScriptedCore(scripts)
    core.held = True

    async def main(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            first = asyncio.create_task(http.post("/v1/completions", json={"prompt": [5] * 50, "n": 2}))
            while len(core.admitted) < 2:
                await asyncio.sleep(0.005)
            second = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            core.held = False
            third_status = 429
            status = (await first).status_code
            while third_status == 429:
                third_status = (
                    await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
                ).status_code
            return [status, second.status_code, third_status]

    with served(core, scripts.tokenizer, max_queued_prompt_tokens=100) as server:
        assert asyncio.run(main(server.url)) == [200, 429, 200]


def test_the_official_client_comes_back_after_a_429(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = ScriptedCore(scripts, max_num_seqs=1)
    core.held = True
    sleeps: list[float] = []

    async def main(url: str) -> str | None:
        async def sleep(seconds: float, *arguments: Any) -> None:
            sleeps.append(seconds)
            core.held = False
            await real_sleep(0.05)

        real_sleep = asyncio.sleep
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=50) as client:
            messages: Any = [{"role": "user", "content": "say:ok"}]
            first = asyncio.create_task(client.chat.completions.create(model="scripted", messages=messages))
            while not core.admitted:
                await real_sleep(0.005)
            import anyio

            monkeypatch.setattr(anyio, "sleep", sleep)
            second = await client.chat.completions.create(model="scripted", messages=messages)
            await first
            return second.choices[0].message.content

    with served(core, scripts.tokenizer, max_queued_requests=0) as server:
        assert asyncio.run(main(server.url)) == "ok"
    assert sleeps and sleeps[0] == 1.0  # what Retry-After said
