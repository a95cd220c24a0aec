"""``GET /``: a page to chat with the model and to watch the engine, and ``GET /live``, what the page looks at.

The page goes out in one piece, put together of its HTML, style and scripts, without anything from elsewhere. It holds
no data and needs no key; whatever it shows, it asks for with a key. Its Content-Security-Policy names the hashes of its
own script and style, so nothing else can run. Text of a model becomes text nodes only, see page_markdown.js.
Conversations stay in the browser, see page_chats.js.
"""

import asyncio
import base64
import hashlib
import re
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import Response
from typing_extensions import TypedDict

from minivllm.messages import KVTransferStats, SchedulerStats
from minivllm.server.bodies.errors import documented
from minivllm.server.service.service import Service

FOLDER = Path(__file__).parent
SCRIPTS = ("page_code.js", "page_math.js", "page_markdown.js", "page_chats.js", "page_watch.js", "page.js")


class LiveStep(TypedDict):
    """One decision of the scheduler. num_scheduled_tokens: per sequence. unfinished_prompts: those that sampled nothing
    yet. preempted: those that lost their place. loading: those that wait for keys and values from elsewhere."""

    step: int
    num_scheduled_tokens: dict[str, int]
    unfinished_prompts: list[str]
    preempted: list[str]
    loading: list[str]


class LiveTier(TypedDict):
    """Where keys and values are kept besides the KV cache. hit_tokens: found there."""

    name: str
    hit_tokens: int
    loaded_bytes: int
    saved_bytes: int
    num_failed_blocks: int


class LiveEngine(TypedDict):
    """One of several engines. is_up: it answered in time; else the figures are 0."""

    is_up: bool
    num_running: int
    num_waiting: int
    kv_cache_usage: float


class Live(TypedDict):
    """The engine now. kv_cache_usage: share of blocks in use, 0 to 1. num_steps: steps so far. steps: the last ones.
    engines: all of them, by number. tiers: of its connectors."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    num_steps: int
    steps: list[LiveStep]
    engines: list[LiveEngine]
    tiers: list[LiveTier]


def assemble_page() -> str:
    """The page with its style and scripts inside."""

    def text(name: str) -> str:
        return (FOLDER / name).read_text(encoding="utf-8")

    script = "\n".join(['"use strict";', *map(text, SCRIPTS)])
    page = text("page.html").replace("<style></style>", f"<style>\n{text('page.css')}</style>")
    return page.replace("<script></script>", f"<script>\n{script}</script>")


def content_security_policy(page: str) -> str:
    """Allows the inline scripts and styles of ``page``, requests to its own server, and nothing else."""

    def hashes(element: str) -> str:
        contents = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def add_page(app: FastAPI, service: Service) -> None:
    page = assemble_page()
    num_engines = service.engine.num_engines
    headers = {
        "content-security-policy": content_security_policy(page),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @app.get("/", responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}}, tags=["page"])
    async def index() -> Response:
        """A page to chat and to watch the engine."""
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/live", responses={200: {"model": Live}, **documented(400, 401, 503)}, tags=["page"])
    async def live(
        after: Annotated[int, Query(ge=0, le=2**53)] = 0, engine: Annotated[int, Query(ge=0, lt=num_engines)] = 0
    ) -> Response:
        """An engine now, and its scheduler's last decisions: those with step numbers above ``after``."""
        await service.engine.check_health()
        engines, steps = await asyncio.gather(service.engine.engine_stats(), service.engine.recent_steps(after, engine))
        stats = engines[engine] or SchedulerStats()
        answer = Live(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            num_preemptions=stats.num_preemptions,
            num_steps=stats.num_steps,
            steps=[
                {**msgspec.to_builtins(one), "unfinished_prompts": sorted(one.unfinished_prompts)}  # type: ignore[typeddict-item]
                for one in steps
            ],
            engines=[_engine(one) for one in engines],
            tiers=[_tier(one) for one in stats.kv_transfer],
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")


def _engine(stats: SchedulerStats | None) -> LiveEngine:
    known = stats or SchedulerStats()
    return LiveEngine(
        is_up=stats is not None,
        num_running=known.num_running,
        num_waiting=known.num_waiting,
        kv_cache_usage=known.kv_cache_usage,
    )


def _tier(stats: KVTransferStats) -> LiveTier:
    return LiveTier(
        name=stats.tier,
        hit_tokens=stats.hit_tokens,
        loaded_bytes=stats.num_loaded_blocks * stats.block_bytes,
        saved_bytes=stats.num_saved_blocks * stats.block_bytes,
        num_failed_blocks=stats.num_failed_blocks,
    )
