"""``GET /``: a page to chat with the model and to watch the engine.
``GET /live``, ``GET /live/tree``: what it shows.

The page goes out in one piece, put together of its HTML, style and scripts, without anything from elsewhere.
It holds no data and needs no key; whatever it shows, it asks for with a key. Its Content-Security-Policy
names the hashes of its own script and style, so nothing else can run. Text of a model becomes text nodes
only, see page_markdown.js. Conversations stay in the browser, see page_chats.js.
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

from minivllm.messages import KVTransferStats, PrefixNode, PrefixTree, SchedulerStats
from minivllm.server.bodies.errors import documented
from minivllm.server.service.service import Service

MOST_TREE_NODES = 200
"""Of the prefix cache that one answer tells."""
FOLDER = Path(__file__).parent
SCRIPTS = (
    "page_code.js",
    "page_math.js",
    "page_markdown.js",
    "page_chats.js",
    "page_watch.js",
    "page_tree.js",
    "page_images.js",
    "page.js",
)


class LiveStep(TypedDict):
    """One decision of the scheduler. num_scheduled_tokens: per sequence. unfinished_prompts: those that
    sampled nothing yet. preempted: those that lost their place. loading: those that wait for keys and values
    from elsewhere."""

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
    """The engine now. kv_cache_usage: share of blocks in use, 0 to 1. num_steps: steps so far. steps: the
    last ones. engines: all of them, by number. tiers: of its connectors."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    num_steps: int
    steps: list[LiveStep]
    engines: list[LiveEngine]
    tiers: list[LiveTier]


class LiveNode(TypedDict):
    """Cached tokens that follow one another without a branch;
    it continues the last node before it with depth - 1.

    num_bytes: of the blocks that end in it. users: requests that hold it now. age: seconds since the last one
    did. is_plain: its beginning is known and has neither a cache salt nor an adapter. text: its first tokens,
    or null.
    """

    depth: int
    num_tokens: int
    num_blocks: int
    num_bytes: int
    users: int
    age: float
    is_plain: bool
    text: str | None


class LiveTree(TypedDict):
    """The prefix cache of an engine. nodes: depth first. num_blocks_left_out: blocks that none of them shows.
    shows_texts: whether the server was started so."""

    nodes: list[LiveNode]
    num_blocks_left_out: int
    shows_texts: bool


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
        digests = [
            base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents
        ]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src "
        "'self'; "
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
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        engine: Annotated[int, Query(ge=0, lt=num_engines)] = 0,
    ) -> Response:
        """An engine now, and its scheduler's last decisions: those with step numbers above ``after``."""
        await service.engine.check_health()
        engines, steps = await asyncio.gather(
            service.engine.engine_stats(), service.engine.recent_steps(after, engine)
        )
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

    @app.get("/live/tree", responses={200: {"model": LiveTree}, **documented(400, 401, 503)}, tags=["page"])
    async def live_tree(
        limit: Annotated[int, Query(ge=1, le=MOST_TREE_NODES)] = 60,
        engine: Annotated[int, Query(ge=0, lt=num_engines)] = 0,
    ) -> Response:
        """The prefix cache of an engine as a tree: at most ``limit`` nodes, those near the roots first."""
        await service.engine.check_health()
        tree = await service.engine.prefix_tree(limit, engine) or PrefixTree(nodes=[], num_blocks_left_out=0)
        has_texts = service.settings.show_cached_texts and service.engine.has_tokenizer
        texts = await service.in_text_thread(_texts, service, tree) if has_texts else [None] * len(tree.nodes)
        answer = LiveTree(
            nodes=[_node(node, text) for node, text in zip(tree.nodes, texts)],
            num_blocks_left_out=tree.num_blocks_left_out,
            shows_texts=has_texts,
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")


def _texts(service: Service, tree: PrefixTree) -> list[str | None]:
    """Of the first tokens of each node, special ones included."""
    decode = service.engine.tokenizer.decode
    return [
        decode(node.token_ids, skip_special_tokens=False) if node.is_plain else None for node in tree.nodes
    ]


def _node(node: PrefixNode, text: str | None) -> LiveNode:
    return LiveNode(
        depth=node.depth,
        num_tokens=node.num_tokens,
        num_blocks=node.num_blocks,
        num_bytes=node.num_bytes,
        users=node.users,
        age=node.age,
        is_plain=node.is_plain,
        text=text,
    )


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
