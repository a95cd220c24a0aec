"""The page at ``/``: what it may load, who may read what it shows, and a person using it in a headless browser."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from browser import CHROMIUM, Browser
from serving import ScriptedCore, Scripts, ServedCore, served

from minivllm.server.page import PAGE_FILE, content_security_policy

KEY = "page-key"
PAGE = PAGE_FILE.read_text(encoding="utf-8")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")


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
    assert re.findall(r"(?:https?:)?//[a-z]", PAGE) == []
    for _, attributes in elements:
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
        # The policy allows neither inline handlers nor style attributes.
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


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
            assert attributes["role"] == "img" and ("aria-label" in attributes or "aria-describedby" in attributes)
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
    for path in ("/live", "/v1/models", "//", "/index.html", "/page.html"):
        assert httpx.get(f"{keyed.url}{path}").status_code == 401
    assert httpx.get(f"{keyed.url}/live", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


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


@needs_browser
def test_a_person_chats_stops_an_answer_and_watches_the_engine(scripts: Scripts, tmp_path: Path) -> None:
    core = ScriptedCore(scripts)
    core.step_seconds = 0.02
    with served(core, scripts.tokenizer, served_model_names=("first", "second")) as server, Browser(tmp_path) as page:
        page.open(f"{server.url}/")
        page.wait_for("[...document.querySelectorAll('#model option')].map(o => o.value).join() === 'first,second'")
        page.write("message", "say:<b>Hello</b>, you.")
        page.press("send")
        page.wait_for("document.querySelector('.assistant .figures')?.textContent.endsWith('stop')")
        # Text of a model is text: nothing in it becomes an element.
        assert page.value("document.querySelector('.assistant > div:nth-child(2)').textContent") == "<b>Hello</b>, you."
        assert page.value("document.querySelectorAll('#log b').length") == 0
        page.write("message", "say:" + "on and on " * 300)
        page.press("send")
        page.wait_for("document.querySelectorAll('.assistant')[1]?.textContent.includes('on and on')")
        page.wait_for("document.getElementById('running').textContent === '1'")
        page.wait_for("Number(document.getElementById('heat').dataset.rows) >= 1")
        page.wait_for("Number(document.getElementById('heat').dataset.columns) > 10")
        assert page.value("document.getElementById('kv').textContent") == "25 %"
        assert "requests. Step" in page.value("document.getElementById('heat-text').textContent")
        pixels = "new Set(document.getElementById('heat').getContext('2d').getImageData(0, 0, 900, 100).data).size"
        assert page.value(pixels) > 4
        page.press("stop")
        server.wait_until(lambda: not core.running)
        page.wait_for("document.querySelectorAll('.figures')[1].textContent.endsWith('stopped')")
        before = page.value("getComputedStyle(document.body).backgroundColor")
        page.press("theme")
        assert page.value("getComputedStyle(document.body).backgroundColor") != before
        page.screenshot(tmp_path / "page.png")
        assert page.errors == []
        assert all(url.startswith((server.url, "data:", "about:")) for url in page.requested)


@needs_browser
def test_the_page_asks_for_the_key_and_shows_errors_as_sentences(keyed: ServedCore, tmp_path: Path) -> None:
    with Browser(tmp_path) as page:
        page.open(f"{keyed.url}/")
        page.wait_for("!document.getElementById('key-form').hidden")
        page.write("key", KEY)
        page.value("document.getElementById('key-form').requestSubmit()")
        page.wait_for("document.getElementById('status').textContent.startsWith('live')")
        assert page.value("document.getElementById('key-form').hidden")
        assert KEY not in page.value("document.documentElement.outerHTML")
        page.write("message", "say:REFUSE")
        page.press("send")
        page.wait_for("document.querySelector('.message.error')?.textContent.includes('blocks than the cache has')")
        page.errors = [error for error in page.errors if "status of 4" not in error]
        assert page.errors == []
