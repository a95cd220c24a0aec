"""People at the page, in a headless Chromium: at a desk and with a phone, in the dark and in light, by keys alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.server.browser import CHROMIUM, Browser
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="There is no Chromium here: apt-get install chromium brings one."),
]
KEY = "page-key"
SCREENS = {
    f"{scheme} {name}": (width, height, scheme, name == "phone")
    for scheme in ("light", "dark")
    for name, width, height in (("desk", 1400, 900), ("phone", 390, 844))
}
ANSWER = """## A plan

Read *this* **first**, then `that`; see [the paper](https://arxiv.org/abs/2309.06180).

1. Allocate blocks
   - a free list
   - a table
2. Compute

| block | tokens | state |
|:------|-------:|:-----:|
| 1 | 16 | full |
| 2 | 7 | open |

```python
def step(self):
    return self.scheduler.schedule()  # a line that is much wider than the screen of any phone, so that it has to scroll
```

> Quoted once.
"""
DOCUMENTS = [
    ANSWER,
    "One *two* **three** ***four*** _five_ __six__ ~~seven~~ `eight` snake_case_name 2 * 3 * 4",
    "`` a ` b `` and `<b>` and \\*no emphasis\\* and 5 < 6 & 7",
    "# One\n## Two #\n### Three\n#### Four\nText\n***\nText\n- - -\n",
    "- one\n- two\n\n  more of two\n- three\n    - deeper\n      - deepest\n- four",
    "3. three\n4. four\n\nEnd",
    "* a\n* b\n\n1) x\n2) y\n",
    "> quote\nlazy\n> - list\n>   in it\n>\n> ```\n> code\n> ```\n\nout",
    "~~~\n```\n~~~\n\n````md\n```py\nx\n```\n````\n",
    "1. Run:\n   ```sh\n   pip install x\n     -e .\n   ```\n2. Done\n",
    "a | b\n--|--\n1 | 2\n3\n\nafter",
    "| a \\| b | c |\n|---|:-:|\n| **x** | `y` |\n",
    "no | table\nhere\n\n---|---\n",
    "[a](https://a.example/x_(y)) ![picture](https://a.example/p.png) <https://b.example> [c](mailto:c@d.example)",
    "```\nnever closed\n\n  indented\n",
    "Text\n```py\nx = 1\n```\nText\n- item\nlazy item\n\nEnd",
]
HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script><iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](/live) [e](//f.example)",
    "[g](java\tscript:alert(1)) [h](vbscript:x) [i](file:///etc/passwd) ![j](javascript:alert(1)) [k](blob:https://x/y)",
    '```"><img src=x onerror=alert(1)>\n</code></pre><svg onload=alert(1)>\n```',
    "| <b>a</b> | [x](javascript:alert(1)) |\n|-|-|\n| <script>alert(1)</script> | y |",
]
TEXTS = "[...document.querySelectorAll('.assistant .text')].map(e => e.textContent)"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as browser:
        yield browser
        expected = ("status of 4", "ERR_CONNECTION", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE_CHUNKED_ENCODING")
        assert [error for error in browser.errors if not any(part in error for part in expected)] == []


@pytest.fixture
def core(scripts: Scripts) -> ScriptedCore:
    return ScriptedCore(scripts)


@pytest.fixture
def running(core: ScriptedCore, scripts: Scripts) -> Iterator[ServedCore]:
    with served(core, scripts.tokenizer, served_model_names=("first", "second")) as server:
        yield server


def connected(page: Browser, server: ServedCore) -> None:
    page.open(f"{server.url}/")
    page.wait_for("document.getElementById('status').textContent === 'connected'")


def ask(page: Browser, text: str) -> None:
    page.write("message", text)
    page.key("Enter")


def ended(page: Browser, how: str, number: int = 0) -> None:
    page.wait_for(f"document.querySelectorAll('.assistant')[{number}]?.dataset.done === {how!r}")


def problem(page: Browser) -> str:
    page.wait_for("document.querySelector('.problem')")
    return str(page.value("[...document.querySelectorAll('.problem')].at(-1).textContent"))


def focused(page: Browser) -> str:
    return str(page.value("document.activeElement.id || document.activeElement.textContent"))


def test_a_person_writes_without_a_click_reads_and_watches_the_engine(page: Browser, running: ServedCore) -> None:
    running.core.step_seconds = 0.02
    connected(page, running)
    assert page.value("[...document.querySelectorAll('#model option')].map(o => o.value)") == ["first", "second"]
    assert focused(page) == "message"
    page.type("say:<b>Hello</b>, you.")
    page.key("Enter")
    ended(page, "stop")
    assert focused(page) == "message"
    assert page.value(TEXTS) == ["<b>Hello</b>, you."]
    assert re.fullmatch(
        r"TTFT \d+ ms · \d+ tokens · [\d.]+ tok/s · context \d+ of 4096 · stop",
        page.value("document.querySelector('.figures').textContent"),
    )
    ask(page, "say:" + "on and on " * 100)
    page.wait_for("document.getElementById('running').textContent === '1'")
    page.wait_for("Number(document.getElementById('heat').dataset.columns) > 10")
    assert page.value("document.getElementById('kv').textContent") == "25 %"
    said = page.value("document.getElementById('heat-text').textContent")
    assert re.search(r"(, 1 request|\b\d+ requests)\. Step \d+ computed (1 token|\d+ tokens) for \d+ of them\.", said)
    assert page.value("[0, 1, 2].map((number) => counted(number, 'token'))") == ["0 tokens", "1 token", "2 tokens"]
    pixels = "new Set(document.getElementById('heat').getContext('2d').getImageData(0, 0, 900, 100).data).size"
    assert page.value(pixels) > 4
    page.press("stop")
    running.wait_until(lambda: not running.core.running)
    ended(page, "stopped", 1)
    assert all(url.startswith((running.url, "data:", "about:")) for url in page.requested)


def test_escape_stops_an_answer_and_keeps_what_was_said(page: Browser, running: ServedCore) -> None:
    running.core.step_seconds = 0.02
    connected(page, running)
    ask(page, "say:" + "on and on " * 100)
    page.wait_for(f"{TEXTS}[0]?.includes('on and on')")
    assert page.value("document.getElementById('log').getAttribute('aria-busy')") == "true"
    page.key("Escape")
    ended(page, "stopped")
    running.wait_until(lambda: not running.core.running)
    assert page.value("document.getElementById('log').getAttribute('aria-busy')") == "false"
    assert focused(page) == "message"
    ask(page, "say:again")
    ended(page, "stop", 1)
    asked = running.core.script.tokenizer.decode(running.core.admitted[-1].prompt_token_ids)  # type: ignore[attr-defined]
    assert "assistant\non and on" in asked


def test_a_new_chat_forgets_the_answer_that_was_being_written(page: Browser, running: ServedCore) -> None:
    running.core.step_seconds = 0.02
    connected(page, running)
    ask(page, "say:" + "on and on " * 100)
    page.wait_for(f"{TEXTS}[0]?.includes('on and on')")
    page.press("clear")
    page.wait_for("!answering")
    ask(page, "say:new")
    ended(page, "stop")
    assert page.value(TEXTS) == ["new"]
    prompts = [running.core.script.tokenizer.decode(one.prompt_token_ids) for one in running.core.admitted]  # type: ignore[attr-defined]
    assert "on and on" in prompts[0] and "on and on" not in prompts[1]


def test_an_empty_field_is_the_models_own_default(
    page: Browser, core: ScriptedCore, scripts: Scripts, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 20}')
    core.config = replace(core.config, model_path=str(tmp_path / "model"))
    with served(core, scripts.tokenizer, api_keys=(KEY,)) as server:
        page.open(f"{server.url}/")
        page.wait_for("!document.getElementById('key-form').hidden")
        assert "0.6" not in page.value("document.documentElement.outerHTML")
        page.type(KEY)
        page.key("Enter")
        page.wait_for("document.getElementById('temperature').placeholder === '0.6'")
        assert "top_k 20" in page.value("document.getElementById('defaults').textContent")
        ask(page, "say:a")
        ended(page, "stop")
        page.value("document.querySelector('details').open = true")
        page.write("temperature", "0.25")
        ask(page, "say:b")
        ended(page, "stop", 1)
    sampling = [one.sampling_params for one in core.admitted]
    assert [(one.temperature, one.top_p, one.top_k) for one in sampling] == [(0.6, 0.9, 20), (0.25, 0.9, 20)]


def test_the_log_follows_the_answer_unless_its_reader_has_scrolled_up(page: Browser, running: ServedCore) -> None:
    running.core.step_seconds = 0.005
    connected(page, running)
    ask(page, "say:" + "\n\n".join(f"paragraph {number}" for number in range(80)))
    behind = "(({scrollHeight: h, scrollTop: t, clientHeight: c}) => h - t - c)(document.getElementById('log'))"
    page.wait_for(f"{TEXTS}[0]?.includes('paragraph 30')")
    assert page.value(f"document.getElementById('log').scrollTop > 0 && {behind} < 30")
    page.value("document.getElementById('log').scrollTop = 0")
    page.wait_for(f"{TEXTS}[0].includes('paragraph 45')")
    assert page.value("document.getElementById('log').scrollTop") == 0
    assert not page.value("document.getElementById('newest').hidden")
    page.press("newest")
    page.wait_for(f"{TEXTS}[0].includes('paragraph 70')")
    assert page.value(f"{behind} < 30 && document.getElementById('newest').hidden")


# -- Markdown ----------------------------------------------------------------------------------------------------


class Canonical(HTMLParser):
    """Elements and text of a rendering, without what is a matter of taste: the same for the page and for a library."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.events: list[str] = []
        self._levels = levels
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "button" or self._hidden:
            self._hidden += tag == "button"
        elif tag == "img":  # the page fetches nothing: a picture is a link
            self.events += [f"<a {dict(attrs)['src']}>", str(dict(attrs)["alt"]), "</a>"]
        elif tag in ("br", "p"):
            self.handle_data("\n")
        elif name := self._name(tag):
            kept = [str(value) for key, value in attrs if key in ("href", "start") and value != "1"]
            self.events.append(f"<{' '.join([name, *kept])}>")

    def handle_endtag(self, tag: str) -> None:
        if tag == "button":
            self._hidden -= 1
        elif tag == "p":
            self.handle_data("\n")
        elif not self._hidden and tag not in ("br", "img", "hr") and (name := self._name(tag)):
            self.events.append(f"</{name}>")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            if self.events and not self.events[-1].startswith("<"):
                data = self.events.pop() + data
            self.events.append(data)

    def _name(self, tag: str) -> str:
        if match := re.fullmatch(r"h([1-6])", tag):
            return f"h{min(6, int(match[1]) + self._levels)}"
        return {"div": "", "span": "", "header": "", "s": "del"}.get(tag, tag)


def canonical(html: str, levels: int = 0) -> list[str]:
    parser = Canonical(levels)
    parser.feed(re.sub(r'<header class="">.*?</header>|<header>.*?</header>', "", html))
    parser.close()
    events = [event if event.startswith("<") else re.sub(r"\n+", "\n", event).strip() for event in parser.events]
    return [event for event in events if event]


def rendered(page: Browser, pieces: list[str]) -> str:
    script = (
        "(() => { const e = document.createElement('div'), view = new MarkdownView(e);"
        " %s.forEach(piece => view.add(piece)); return e.innerHTML })()"
    )
    return str(page.value(script % json.dumps(pieces)))


def test_markdown_is_read_as_a_library_reads_it_in_one_piece_and_in_any_pieces(
    page: Browser, running: ServedCore
) -> None:
    connected(page, running)
    library = MarkdownIt("commonmark", {"breaks": True, "html": False}).enable(["table", "strikethrough"])
    draw = random.Random(0)
    for text in [*DOCUMENTS, *("\n\n".join(draw.sample(DOCUMENTS, 4)) for _ in range(30))]:
        whole = rendered(page, [text])
        assert canonical(whole) == canonical(library.render(text), levels=2), text
        for _ in range(3):
            cuts = sorted(draw.sample(range(len(text)), min(12, len(text))))
            pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
            assert rendered(page, pieces) == whole, pieces
        assert rendered(page, list(text)) == whole, text


def test_nothing_a_model_writes_runs_loads_or_leads_anywhere_but_the_web(page: Browser, running: ServedCore) -> None:
    connected(page, running)
    ask(page, "say:" + "\n\n".join(HOSTILE))
    ended(page, "stop")
    [text] = page.value(TEXTS)
    assert "<img src=x onerror=alert(1)><script>alert(1)</script>" in text
    assert page.value("document.querySelectorAll('#log :is(img, script, iframe, svg, b, a, object, form)').length") == 0
    allowed = {"code", "del", "em", "span", "strong", "a", "p", "h3", "pre", "div", "header", "button", "article"}
    allowed |= {"ul", "li", "table", "thead", "tbody", "tr", "th", "td"}
    found = page.value("[...new Set([...document.querySelectorAll('#log *')].map(e => e.localName))]")
    assert set(found) <= allowed
    ask(page, "say:[x](https://a.example/?q=1) https://b.example/c.")
    ended(page, "stop", 1)
    links = page.value("[...document.querySelectorAll('#log a')].map(a => [a.href, a.target, a.rel])")
    assert links == [
        [address, "_blank", "noopener noreferrer nofollow"]
        for address in ("https://a.example/?q=1", "https://b.example/c")
    ]
    assert all(url.startswith((running.url, "data:", "about:")) for url in page.requested)


@pytest.mark.parametrize(
    "piece", ["*a", "**a ", "[", "`", "_a ", "- ", "> ", "\n", " ", "|", "# ", "-", "a`b", "~~a", "\t", "1. x\n", "(["]
)
def test_no_text_takes_long_to_read(page: Browser, running: ServedCore, piece: str) -> None:
    connected(page, running)
    text = piece * (100_000 // len(piece))
    took = page.value(
        f"(() => {{ const t = performance.now(); for (const p of ['x\\n', '- x\\n', '# ', '`', '|-'])"
        f" new MarkdownView(document.createElement('div')).add(p + {json.dumps(text)} + 'x');"
        " return performance.now() - t })()"
    )
    print(f"{piece!r}: {took:.0f} ms for five texts of 100,000 characters")
    assert took < 10_000


# -- errors ------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_told_and_the_right_one_opens(page: Browser, core: ScriptedCore, scripts: Scripts) -> None:
    with served(core, scripts.tokenizer, api_keys=(KEY,)) as server:
        page.open(f"{server.url}/")
        page.wait_for("document.activeElement.id === 'key'")
        assert page.value("document.getElementById('status').textContent") == "a key is needed"
        page.type("wrong")
        page.key("Enter")
        page.wait_for("document.getElementById('key-problem').textContent === 'The server does not accept this key.'")
        page.type(KEY)
        page.key("Enter")
        page.wait_for("document.getElementById('status').textContent === 'connected'")
        assert page.value("document.getElementById('key-form').hidden") and focused(page) == "message"
        assert KEY not in page.value("document.documentElement.outerHTML")
        page.value("key = 'revoked'")
        ask(page, "say:hello")
        assert "API key is missing or wrong" in problem(page)
        page.wait_for("!document.getElementById('key-form').hidden")
        assert page.value("document.getElementById('message').value") == "say:hello"


def test_a_full_server_and_a_refused_prompt_are_told_in_words(
    page: Browser, core: ScriptedCore, scripts: Scripts
) -> None:
    core.config = replace(core.config, scheduler=replace(core.config.scheduler, max_num_seqs=1))
    with served(core, scripts.tokenizer, max_queued_requests=0) as server:
        connected(page, server)
        ask(page, "say:REFUSE")
        assert "more blocks than the cache has" in problem(page)
        core.held = True
        headers = "{'content-type': 'application/json'}"
        asking = f"fetch('/v1/completions', {{method: 'POST', headers: {headers}, body: '{{\"prompt\": [5]}}'}})"
        page.value(f"void {asking}")
        server.wait_until(lambda: len(core.admitted) > 1)
        page.value("document.getElementById('message').value = ''")
        ask(page, "say:hello")
        page.wait_for("document.querySelectorAll('.problem').length === 2")
        assert re.match(r"The server is full, try again in \d+ s\. It says: The server is full: 1 of 1", problem(page))
        assert page.value("document.querySelectorAll('.problem')[1].getAttribute('role')") == "alert"
        core.held = False
        server.wait_until(lambda: not core.running)
        page.key("Enter")  # the message is still there
        ended(page, "stop", 2)


def test_a_full_context_is_told_before_and_after_it_is_reached(page: Browser, scripts: Scripts) -> None:
    with served(ScriptedCore(scripts, max_model_len=200), scripts.tokenizer) as server:
        connected(page, server)
        ask(page, "say:" + "a" * 120)
        ended(page, "length")
        assert page.value("document.querySelector('.figures').textContent").endswith(
            "context 200 of 200 · cut: the context is full, start a new chat"
        )
        ask(page, "say:more")
        assert re.match(r"This chat has filled the context: start a new chat\. .*max_model_len is 200", problem(page))


def test_a_server_that_is_gone_is_told_and_found_again(page: Browser, core: ScriptedCore, scripts: Scripts) -> None:
    core.step_seconds = 0.02
    with served(core, scripts.tokenizer) as server:
        connected(page, server)
        ask(page, "say:" + "on and on " * 100)
        page.wait_for(f"{TEXTS}[0]?.includes('on and on')")
    ended(page, "failed")
    assert problem(page) in (
        "The server is shutting down.",
        "The server closed the connection before the answer was complete.",
    )
    ask(page, "say:hello")
    page.wait_for("document.querySelectorAll('.problem').length === 2")
    assert problem(page).startswith("The server does not answer: it has stopped, or the network is down.")
    page.wait_for("document.getElementById('status').textContent === 'the server does not answer, trying again'")
    core = ScriptedCore(scripts)
    with served(core, scripts.tokenizer, port=server.port) as server:
        page.wait_for("document.getElementById('status').textContent === 'connected'")
        page.value("document.getElementById('message').focus()")
        page.key("Enter")
        ended(page, "stop", 2)
        page.wait_for("Number(document.getElementById('heat').dataset.columns) > 3")


# -- what it looks like ------------------------------------------------------------------------------------------

CONTRASTS = """(() => {
  const channels = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = channels(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    const field = e.matches('input, textarea, select');
    if (!(own || field) || !e.getClientRects().length || e.matches('script')) continue;
    const colours = [getComputedStyle(e).color, ...(field ? [getComputedStyle(e, '::placeholder').color] : [])];
    for (const c of colours) { const [a, b] = [light(channels(c)), light(ground(e))].sort((x, y) => y - x);
      found.push([(a + 0.05) / (b + 0.05), e.localName + '#' + e.id + '.' + e.className]); }
  }
  return found;
})()"""


@pytest.mark.parametrize("screen", SCREENS)
def test_it_is_readable_on_every_screen_and_never_scrolls_sideways(
    page: Browser, running: ServedCore, screen: str, tmp_path: Path
) -> None:
    width, height, scheme, is_phone = SCREENS[screen]
    page.look(width, height, scheme, is_phone)
    connected(page, running)
    ask(page, "say:" + ANSWER)
    ended(page, "stop")
    ask(page, "say:" + "averylongwordwithoutanyspace" * 12 + "\n\n|" + "a wide cell|" * 12 + "\n|" + "-|" * 12)
    ended(page, "stop", 1)
    ask(page, "say:REFUSE")
    problem(page)
    page.value("document.querySelector('details').open = true")
    boxes = "[document.documentElement, document.body, document.getElementById('log')]"
    sideways = f"{boxes}.map(e => e.scrollWidth - e.clientWidth)"
    assert page.value(sideways) == [0, 0, 0]
    assert page.value("innerWidth") == width
    worst = sorted(page.value(CONTRASTS))
    print(f"{screen}: {len(worst)} texts, contrasts from {worst[0][0]:.1f} ({worst[0][1]})")
    assert len(worst) > 40 and worst[0][0] >= 4.5
    is_dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    assert is_dark == (scheme == "dark")
    page.value("document.querySelector('details').open = false")
    for place in (0, 9999):
        page.value(f"document.getElementById('log').scrollTop = {place}")
        page.screenshot(tmp_path / f"{screen.replace(' ', '-')}-{place}.png")


def test_keys_alone_reach_everything_and_the_focus_is_always_seen(page: Browser, running: ServedCore) -> None:
    connected(page, running)
    ask(page, "say:```py\nx = 1\n```")
    ended(page, "stop")
    outline = (
        "(({outlineStyle: s, outlineWidth: w}) => s !== 'none' && parseFloat(w) >= 2)"
        "(getComputedStyle(document.activeElement))"
    )
    reached: list[Any] = []
    for _ in range(14):
        page.key("Tab")
        reached.append(page.value("document.activeElement.id || document.activeElement.localName"))
        if reached[-1] == "body":
            continue  # the window's own controls
        assert page.value(outline), reached
        if page.value("document.activeElement.textContent") == "Copy":
            page.key("Enter")
            page.wait_for("document.activeElement.textContent === 'Copied'")
        if reached[-1] == "summary":
            page.key("Enter")
    wanted = [
        "send",
        "clear",
        "summary",
        "temperature",
        "top-p",
        "max-tokens",
        "model",
        "log",
        "button",
        "pre",
        "message",
    ]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted
    names = page.value(
        "[...document.querySelectorAll('button, input, select, textarea, pre, [role=log]')]"
        ".map(e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent)"
    )
    assert all(names)
