"""The page at ``/``: what it may load, and who may read what it shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from minivllm.frontend import async_llm
from minivllm.messages import KVTransferStats, PrefixNode, PrefixTree
from minivllm.server.page.page import assemble_page, content_security_policy
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

KEY = "page-key"
PAGE = assemble_page()


class Elements(HTMLParser):
    """All elements of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(PAGE)
    return parser.found


@pytest.fixture
def keyed(scripts: Scripts) -> Iterator[ServedCore]:
    with served(ScriptedCore(scripts), scripts.tokenizer, api_keys=(KEY,)) as running:
        yield running


def test_the_page_needs_nothing_from_elsewhere(elements: list[tuple[str, dict[str, str | None]]]) -> None:
    assert re.findall(r"""(?:src|href|url|import|fetch)\W{1,3}(?:https?:)?//""", PAGE) == []
    for _, attributes in elements:
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
        # The policy allows neither inline handlers nor style attributes.
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_the_page_counts_one_thing_in_the_singular() -> None:
    assert 'number + " " + noun + (number === 1 ? "" : "s")' in PAGE
    for noun in ("request", "token", "step"):
        assert re.findall(rf'\+ " {noun}s', PAGE) == [], "a number stands before its noun by counted() only"


def test_no_text_can_become_html_or_script() -> None:
    unsafe = ["innerHTML", "outerHTML", "insertAdjacentHTML", "setHTMLUnsafe", "createContextualFragment"]
    unsafe += ["document.write", "DOMParser", "srcdoc", "eval(", "Function("]
    assert [name for name in unsafe if name in PAGE] == []
    assert len(re.findall("<style>", PAGE)) == len(re.findall("<script>", PAGE)) == 1


SCRIPT = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)[0]


def test_the_files_of_the_script_declare_every_name_once() -> None:
    """They are one script: a second declaration of a name would be a syntax error in all of it."""
    declared: Counter[str] = Counter()
    for kind, rest in re.findall(
        r"^(const|let|class|function\*?|async function\*?) (.*)$", SCRIPT, re.MULTILINE
    ):
        if kind in ("const", "let"):
            outside = re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|\"[^\"]*\"", "", rest.partition("//")[0])
            names = re.findall(r"(?:^|,) *(\$|\w+) *(?==(?!=|>))", outside)
        else:
            names = re.findall(r"^\w+", rest)
        declared.update(names)
    assert {"storage", "MOST_CHARACTERS", "TREE_MS", "lastStep", "Chats", "ask"} <= set(declared)
    assert [name for name, count in declared.items() if count > 1] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="There is no node here to parse the script.")
def test_the_script_parses(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_control_has_a_name_and_every_id_the_script_uses_is_there_once(
    elements: list[tuple[str, dict[str, str | None]]],
) -> None:
    ids = Counter(attributes["id"] for _, attributes in elements if attributes.get("id"))
    assert set(ids.values()) == {1}
    assert set(re.findall(r'\$\("([a-z-]+)"\)', PAGE)) <= set(ids)
    labelled = {attributes.get("for") for tag, attributes in elements if tag == "label"}
    for tag, attributes in elements:
        if tag in ("input", "textarea", "select"):
            assert attributes["id"] in labelled
        if tag == "canvas":
            assert attributes["role"] == "img" and (
                "aria-label" in attributes or "aria-describedby" in attributes
            )
        for reference in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(reference) in (None, *ids)


def test_the_policy_allows_the_pages_own_script_and_no_other(server: ServedCore) -> None:
    answer = httpx.get(f"{server.url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == PAGE
    policy = answer.headers["content-security-policy"]
    assert policy == content_security_policy(PAGE)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "*" not in policy
    changed = content_security_policy(PAGE.replace("</script>", "steal();</script>"))
    assert changed != policy


def test_only_the_page_is_open_what_it_shows_needs_the_key(keyed: ServedCore) -> None:
    assert httpx.get(f"{keyed.url}/").status_code == 200
    for path in ("/live", "/live/tree", "/v1/models", "//", "/index.html", "/page.html"):
        assert httpx.get(f"{keyed.url}{path}").status_code == 401
    assert httpx.get(f"{keyed.url}/live", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_models_card_tells_the_sampling_defaults_of_its_generation_config(
    scripts: Scripts, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 20}')
    core = ScriptedCore(scripts)
    core.config = replace(core.config, model_path=str(tmp_path))
    with served(core, scripts.tokenizer) as server:
        [card] = httpx.get(f"{server.url}/v1/models").json()["data"]
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0}
    assert card["default_sampling_params"] == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, **neutral}


def test_live_tells_the_state_and_the_steps_after_the_last_known_one(server: ServedCore) -> None:
    body = {"prompt": "say:one two three", "max_tokens": 50}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    live = httpx.get(f"{server.url}/live").json()
    request = server.core.admitted[-1]
    mine = [step for step in live["steps"] if request.request_id in step["num_scheduled_tokens"]]
    counts = [step["num_scheduled_tokens"][request.request_id] for step in mine]
    assert counts == [len(request.prompt_token_ids)] + [1] * (len(server.core.script(request)) - 1)
    assert live["num_steps"] == live["steps"][-1]["step"]
    numbers = [step["step"] for step in live["steps"]]
    later = httpx.get(f"{server.url}/live", params={"after": numbers[1]}).json()
    assert [step["step"] for step in later["steps"]] == numbers[2:]
    for wrong in ("x", "-1", "1e99"):
        answer = httpx.get(f"{server.url}/live", params={"after": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "after"


def test_live_tells_what_came_from_elsewhere_by_tier(server: ServedCore) -> None:
    assert httpx.get(f"{server.url}/live").json()["tiers"] == []
    server.core.tiers = [
        KVTransferStats(
            tier="OffloadingConnector",
            block_bytes=10,
            hit_tokens=64,
            num_loaded_blocks=3,
            num_saved_blocks=5,
            num_failed_blocks=1,
        )
    ]
    try:
        assert httpx.get(f"{server.url}/live").json()["tiers"] == [
            {
                "name": "OffloadingConnector",
                "hit_tokens": 64,
                "loaded_bytes": 30,
                "saved_bytes": 50,
                "num_failed_blocks": 1,
            }
        ]
    finally:
        server.core.tiers = []


HOSTILE = "</ul><script>document.title = 'run'</script>"


def cached(scripts: Scripts) -> PrefixTree:
    """A text, two that continue it, and one of a tenant with a salt."""

    def node(depth: int, text: str, users: int, is_plain: bool = True) -> PrefixNode:
        ids = scripts.tokenizer.encode(text, add_special_tokens=False)
        return PrefixNode(
            depth=depth, num_tokens=max(1, len(ids)), token_ids=ids if is_plain else [], is_plain=is_plain,
            num_blocks=2, num_bytes=2048, users=users, age=0.0 if users else 90.0,
        )  # fmt: skip

    nodes = [
        node(0, "say: one", 2),
        node(1, HOSTILE, 2),
        node(1, "say: two", 0),
        node(0, "", 0, is_plain=False),
    ]
    return PrefixTree(nodes=nodes, num_blocks_left_out=7)


def test_the_tree_of_the_prefix_cache_has_texts_only_if_the_operator_wants_it(scripts: Scripts) -> None:
    core = ScriptedCore(scripts)
    core.tree = cached(scripts)
    with served(core, scripts.tokenizer) as server:
        answer = httpx.get(f"{server.url}/live/tree").json()
    assert [node["text"] for node in answer["nodes"]] == [None] * 4 and not answer["shows_texts"]
    with served(ScriptedCore(scripts), scripts.tokenizer, show_cached_texts=True) as server:
        server.core.tree = cached(scripts)
        answer = httpx.get(f"{server.url}/live/tree", params={"limit": 9}).json()
        assert server.core.asked_nodes == [9]
        for wrong in ("0", "201", "x"):
            refused = httpx.get(f"{server.url}/live/tree", params={"limit": wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "limit"
    assert [node["text"] for node in answer["nodes"]] == ["say: one", HOSTILE, "say: two", None]
    assert answer["num_blocks_left_out"] == 7 and answer["shows_texts"]
    first = {"depth": 0, "num_blocks": 2, "num_bytes": 2048, "users": 2, "age": 0.0, "is_plain": True}
    assert answer["nodes"][0].items() >= first.items()


def test_the_tree_is_empty_where_the_engine_does_not_answer(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "STATS_SECONDS", 0.1)
    core = ScriptedCore(scripts)
    core.tree = cached(scripts)
    with served(core, scripts.tokenizer) as server:
        core.silent = True
        assert httpx.get(f"{server.url}/live/tree").json()["nodes"] == []
        core.silent = False


def test_metrics_and_live_answer_though_the_engine_does_not(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "STATS_SECONDS", 0.1)
    core = ScriptedCore(scripts)

    def figures(url: str) -> dict[str, float]:
        lines = [
            line.split() for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")
        ]
        return {
            name.removeprefix("minivllm_"): float(value) for name, value in lines if "stats_age" not in name
        }

    with served(core, scripts.tokenizer) as server:
        before = figures(server.url)
        assert before['engine_up{engine="0"}'] == 1
        core.silent = True
        after = figures(server.url)
        assert after == before | {'engine_up{engine="0"}': 0}, "the last known figures, and that they are old"
        live = httpx.get(f"{server.url}/live").json()
        assert (live["engines"][0]["is_up"], live["steps"]) == (False, [])
        core.silent = False
        assert figures(server.url)['engine_up{engine="0"}'] == 1
