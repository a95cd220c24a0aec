"""An OpenAI-compatible server as commands see it: its address, its models, its streams, its errors."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, ModelError, RequestError
from minivllm.messages import SchedulerStats

if TYPE_CHECKING:
    import httpx


def server_root(url: str, flag: str = "--url") -> str:
    """The URL without a /v1 at its end; HOST:PORT is one of http.
    Raises ConfigError, naming the flag, for no http URL."""
    root = url.rstrip("/").removesuffix("/v1")
    if re.fullmatch(r"[^/:\s]+:\d+", root):
        root = f"http://{root}"
    if not root.startswith(("http://", "https://")):
        raise ConfigError(f"{flag} is {url!r}, but must be like http://127.0.0.1:8000.")
    return root


def key_header(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def unreachable(root: str, error: Exception) -> RequestError:
    return RequestError(
        f"The server at {root} cannot be reached ({type(error).__name__}): see whether it still runs, then "
        "try again."
    )


def served_models(root: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The entries of /v1/models, at least one, each with an "id". Raises ModelError that says what to do."""
    import httpx

    try:
        answer = httpx.get(f"{root}/v1/models", headers=headers, timeout=30, trust_env=False)
        answer.raise_for_status()
        models = [dict(model) for model in answer.json()["data"]]
        if not models or not all(isinstance(model["id"], str) for model in models):
            raise ValueError
        return models
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        advice = "give its key with --api-key" if status == 401 else "is it an OpenAI-compatible server?"
        raise ModelError(f"{root}/v1/models answers {status}: {advice}") from None
    except httpx.HTTPError as error:
        raise ModelError(f"There is no server at {root} ({type(error).__name__}): start one first.") from None
    except (ValueError, KeyError, TypeError):
        raise ModelError(
            f"{root}/v1/models is no list of models: is it an OpenAI-compatible server?"
        ) from None


def engine_stats(root: str, headers: Mapping[str, str]) -> SchedulerStats:
    """Counters of the engines of a minivllm server, for all its clients, from /metrics.

    Raises RequestError for a server that cannot be reached, or that is none of ours and counts other things.
    """
    import httpx

    try:
        answer = httpx.get(f"{root}/metrics", headers=headers, timeout=30, trust_env=False)
    except httpx.HTTPError as error:
        raise unreachable(root, error) from None
    values: dict[str, list[float]] = {}
    for metric, value in _METRIC.findall(answer.text) if answer.is_success else ():
        values.setdefault(metric, []).append(float(value))
    if "engine_up" not in values:
        raise RequestError(
            f"The server at {root} does not tell what its engine does: minivllm's own servers do, under "
            "/metrics "
            f"(this one answers {answer.status_code})."
        )
    if not any(values["engine_up"]):
        raise RequestError(
            f"The engine of the server at {root} does not answer: it is in a long step, hangs or has died. "
            "Try again, "
            "and see the server's log."
        )
    missing = [metric for metric in ("kv_cache_usage_ratio", *_COUNTS.values()) if metric not in values]
    if missing:
        raise RequestError(
            f"The server at {root} does not count {missing[0]}: it runs another version of minivllm."
        )
    counts: dict[str, Any] = {field: int(sum(values[metric])) for field, metric in _COUNTS.items()}
    usage = values["kv_cache_usage_ratio"]
    return SchedulerStats(kv_cache_usage=sum(usage) / len(usage), **counts)


_METRIC = re.compile(r'^minivllm_(\w+)(?:\{engine="\d+"\})? (\S+)$', re.MULTILINE)
_COUNTS = {
    "num_running": "num_requests_running",
    "num_waiting": "num_requests_waiting",
    "prefix_cache_queried_tokens": "prefix_cache_queries_total",
    "prefix_cache_hit_tokens": "prefix_cache_hits_total",
    "prefix_cache_copied_tokens": "prefix_cache_copied_total",
    "num_preemptions": "num_preemptions_total",
    "num_steps": "engine_steps_total",
    "num_computed_tokens": "computed_tokens_total",
    "num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
"""Where ``SchedulerStats`` stand in the metrics of a server."""


async def stream_events(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON of every ``data:`` line, until ``[DONE]``.
    Raises ValueError for a stream that ends before it."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event is no JSON object")
        yield event
    raise ValueError("it ended before [DONE]")


def error_message(text: str) -> str:
    """The sentence in an error body, or the beginning of the body."""
    try:
        return str(json.loads(text)["error"]["message"])[:1000]
    except (ValueError, KeyError, TypeError):
        return text[:300]
