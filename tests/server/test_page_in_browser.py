"""People at the page, in a headless Chromium:
at a desk and with a phone, in the dark and in light, by keys alone."""

from __future__ import annotations

import base64
import io
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
from PIL import Image

from minivllm.frontend.async_llm import AsyncLLM
from tests.multimodal.models import engine_args, picture, save
from tests.server.browser import CHROMIUM, Browser
from tests.server.serving import ScriptedCore, Scripts, ServedCore, serve_in_thread, served
from tests.server.test_page import HOSTILE as HOSTILE_TEXT
from tests.server.test_page import cached

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="There is no Chromium here: apt-get install chromium brings one."
    ),
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
    return self.scheduler.schedule(1, "two")  # a line much wider than the screen of any phone, so that it has to scroll
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
    "[a](https://a.example/x_(y)) ![picture](https://a.example/p.png) <https://b.example> "
    "[c](mailto:c@d.example)",
    "```\nnever closed\n\n  indented\n",
    "Text\n```py\nx = 1\n```\nText\n- item\nlazy item\n\nEnd",
    "It costs $5, or $6 with tax; $ 7 $ and a$b$c, not US$ 8.",
    "\n\n".join(
        f"```{name}\n# a // b\n'c\\'d' \"e\" 0x1f 2.5e-3 <p>`f\n/* g -- h\n```"
        for name in ("py", "js", "sql", "html")
    ),
]
MATH = [
    r"The area is $\pi r^2$: \(x_i \in \mathbb{R}^n\), so **$a_1 * b_1$** holds for $5.",
    "Then\n$$\n- x\n= \\frac{1}{2}\n$$\nwhere\n\\[\n  y\n\\]\n- item\n  $$z$$\n",
    "$$ never closed\n- item\n\nText $$a$$ and \\[b\\] in it",
    r"$$\begin{aligned} a &= b \\ &= c \end{aligned}.$$" + "\n\n$\\unknown{x}$ stays\n\n$$\\unknown$$\n\nEnd",
    "- [ ] open\n- [x] done *now*\n  - [X] deeper\n- [ ]none\n- [y] none\n1. [x] one",
]
HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script><iframe "
    "srcdoc='<script>alert(1)</script>'></iframe>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](/live) [e](//f.example)",
    "[g](java\tscript:alert(1)) [h](vbscript:x) [i](file:///etc/passwd) ![j](javascript:alert(1)) "
    "[k](blob:https://x/y)",
    '```"><img src=x onerror=alert(1)>\n</code></pre><svg onload=alert(1)>\n```',
    "| <b>a</b> | [x](javascript:alert(1)) |\n|-|-|\n| <script>alert(1)</script> | y |",
    r"$<img src=x onerror=alert(1)>$ \(\href{javascript:alert(1)}{x}\) $$\unicode{<b>}$$",
    r"$\text{<script>alert(1)</script>}$",
    r"$\style{onload:alert(1)}{x}$ $[a](javascript:alert(1))$ $\begin{constructor}\end{constructor}$ $\toString{x}$",
    "```html\n<script>alert(1)</script><img src='x' onerror=\"alert(1)\">\n```",
    "```py\n'<img src=x onerror=alert(1)>' # <script>alert(1)</script>\n```",
    "- [x] <script>alert(1)</script> [y](javascript:alert(1))",
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


def ask_by_button(page: Browser, text: str) -> None:
    page.write("message", text)
    page.press("send")


def ended(page: Browser, how: str, number: int = 0) -> None:
    page.wait_for(f"document.querySelectorAll('.assistant')[{number}]?.dataset.done === {how!r}")


def problem(page: Browser) -> str:
    page.wait_for("document.querySelector('.problem')")
    return str(page.value("[...document.querySelectorAll('.problem')].at(-1).textContent"))


def focused(page: Browser) -> str:
    return str(page.value("document.activeElement.id || document.activeElement.textContent"))


def test_the_prefix_cache_is_a_nested_list_and_what_others_wrote_is_text(
    page: Browser, scripts: Scripts
) -> None:
    core = ScriptedCore(scripts)
    core.tree = cached(scripts)
    with served(core, scripts.tokenizer, show_cached_texts=True) as server:
        connected(page, server)
        page.wait_for("document.getElementById('tree').dataset.nodes === '4'")
        texts = "[...document.querySelectorAll('#tree > li{} > .text')].map(e => e.textContent)"
        assert page.value(texts.format("")) == ["say: one"]
        assert page.value(texts.format(":first-child > ul > li")) == [HOSTILE_TEXT, "say: two"]
        assert page.value("document.title") == "minivllm"
        assert page.value("document.querySelectorAll('#tree script').length") == 0
        facts = page.value("[...document.querySelectorAll('#tree .facts')].map(e => e.textContent)")
        assert facts[0].endswith("2.0 KiB, 2 requests") and facts[2].endswith("2.0 KiB, unused for 2 min")
        assert facts[3].startswith("1 token, 2.0 KiB, unused for 2 min, with a salt")
        assert "7 blocks not shown" in str(page.value("document.getElementById('tree-text').textContent"))


def test_a_person_writes_without_a_click_reads_and_watches_the_engine(
    page: Browser, running: ServedCore
) -> None:
    running.core.step_seconds = 0.02
    connected(page, running)
    assert page.value("[...document.querySelectorAll('#model option')].map(o => o.value)") == [
        "first",
        "second",
    ]
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
    assert re.search(
        r"(, 1 request|\b\d+ requests)\. Step \d+ computed (1 token|\d+ tokens) for \d+ of them\.", said
    )
    assert page.value("[0, 1, 2].map((number) => counted(number, 'token'))") == [
        "0 tokens",
        "1 token",
        "2 tokens",
    ]
    pixels = (
        "new Set(document.getElementById('heat').getContext('2d').getImageData(0, 0, 900, 100).data).size"
    )
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


def brought(image: Image.Image, name: str, event: str, element: str) -> str:
    """A script that pastes an image into an element, or drops it there."""
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    field = {"paste": "clipboardData", "drop": "dataTransfer"}[event]
    kind = {"paste": "ClipboardEvent", "drop": "DragEvent"}[event]
    return f"""{{
        const bytes = Uint8Array.from(atob("{data}"), (one) => one.charCodeAt(0)), brought = new DataTransfer();
        brought.items.add(new File([bytes], "{name}", {{ type: "image/png" }}));
        const options = {{ {field}: brought, bubbles: true, cancelable: true }};
        document.getElementById("{element}").dispatchEvent(new {kind}("{event}", options));
    }}"""


def test_images_are_pasted_dropped_and_seen(page: Browser, tmp_path: Path) -> None:
    engine = AsyncLLM.from_args(engine_args(save(tmp_path / "clip", "clip")))
    shown = "document.querySelectorAll('{} .thumbnail').length"
    with serve_in_thread(lambda: engine) as server:
        page.open(f"{server.url}/")
        page.wait_for("document.getElementById('status').textContent === 'connected'")
        assert page.value("document.getElementById('attach').hidden") is False
        page.value("document.getElementById('max-tokens').value = '4'")
        page.value(brought(picture(0), "a.png", "paste", "message"))
        page.wait_for(f"{shown.format('#next-images')} === 1")
        page.value(brought(picture(1), "b.png", "drop", "log"))
        page.wait_for(f"{shown.format('#next-images')} === 2")
        page.value(brought(picture(2, 300, 1), "long.png", "drop", "log"))
        page.wait_for("document.getElementById('image-problem').textContent.includes('200 times as long')")
        page.value("document.querySelector('#next-images button').click()")
        page.wait_for(f"{shown.format('#next-images')} === 1")
        ask(page, "What is it?")
        page.wait_for("document.querySelector('.assistant')?.dataset.done")
        assert page.value("document.querySelectorAll('.problem').length") == 0
        assert page.value(shown.format(".message.user")) == 1
        assert page.value(shown.format("#next-images")) == 0
        assert page.value("document.getElementById('image-problem').textContent") == ""
        page.reload()
        page.wait_for("document.querySelector('.message.user')")
        assert "1 image sent, no longer here" in page.value(
            "document.querySelector('.message.user').textContent"
        )


def test_a_model_that_reads_text_takes_no_images(page: Browser, running: ServedCore) -> None:
    connected(page, running)
    assert page.value("document.getElementById('attach').hidden") is True
    page.value(brought(Image.new("RGB", (9, 9)), "a.png", "paste", "message"))
    page.wait_for("document.getElementById('image-problem').textContent.includes('reads text only')")
    assert page.value("document.querySelectorAll('#next-images li').length") == 0


def test_an_empty_field_is_the_models_own_default(
    page: Browser, core: ScriptedCore, scripts: Scripts, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 0.9, "top_k": 20}'
    )
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
        page.value("document.getElementById('sampling').open = true")
        page.write("temperature", "0.25")
        ask(page, "say:b")
        ended(page, "stop", 1)
    sampling = [one.sampling_params for one in core.admitted]
    assert [(one.temperature, one.top_p, one.top_k) for one in sampling] == [(0.6, 0.9, 20), (0.25, 0.9, 20)]


def test_the_log_follows_the_answer_unless_its_reader_has_scrolled_up(
    page: Browser, running: ServedCore
) -> None:
    running.core.step_seconds = 0.005
    connected(page, running)
    ask(page, "say:" + "\n\n".join(f"paragraph {number}" for number in range(80)))
    behind = (
        "(({scrollHeight: h, scrollTop: t, clientHeight: c}) => h - t - c)(document.getElementById('log'))"
    )
    page.wait_for(f"{TEXTS}[0]?.includes('paragraph 30')")
    assert page.value(f"document.getElementById('log').scrollTop > 0 && {behind} < 30")
    page.value("document.getElementById('log').scrollTop = 0")
    page.wait_for(f"{TEXTS}[0].includes('paragraph 45')")
    assert page.value("document.getElementById('log').scrollTop") == 0
    assert not page.value("document.getElementById('newest').hidden")
    page.press("newest")
    page.wait_for(f"{TEXTS}[0].includes('paragraph 70')")
    assert page.value(f"{behind} < 30 && document.getElementById('newest').hidden")


# -- Markdown --------------------------------------------------------------------------------------


class Canonical(HTMLParser):
    """Elements and text of a rendering, without what is a matter of taste:
    the same for the page and for a library."""

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
    events = [
        event if event.startswith("<") else re.sub(r"\n+", "\n", event).strip() for event in parser.events
    ]
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
    joined = ["\n\n".join(draw.sample(DOCUMENTS, 4)) for _ in range(30)]
    for text in [*DOCUMENTS, *joined, *MATH, "\n\n".join(MATH)]:
        whole = rendered(page, [text])
        if not text.startswith(tuple(MATH)):
            assert canonical(whole) == canonical(library.render(text), levels=2), text
        for _ in range(3):
            cuts = sorted(draw.sample(range(len(text)), min(12, len(text))))
            pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
            assert rendered(page, pieces) == whole, pieces
        assert rendered(page, list(text)) == whole, text


def drawn(page: Browser, source: str) -> str | None:
    """MathML of a formula, without its namespace and attributes; None if it is refused."""
    found = page.value(f"formula({json.dumps(source)}, false)?.outerHTML")
    return None if found is None else re.sub(r" [a-z]+=\"[^\"]*\"", "", found)[6:-7]


FORMULAS = {
    r"\frac{a}2": "<mfrac><mi>a</mi><mn>2</mn></mfrac>",
    r"\frac12": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"\sqrt[3]{x}+\sqrt y": "<mrow><mroot><mi>x</mi><mn>3</mn></mroot><mo>+</mo><msqrt><mi>y</mi></msqrt></mrow>",
    "x_i^2": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
    "f''": "<msup><mi>f</mi><mo>′′</mo></msup>",
    r"\alpha\le\Omega": "<mrow><mi>α</mi><mo>≤</mo><mi>Ω</mi></mrow>",
    r"\sum_{i=1}^n i": "<mrow><munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover>"
    "<mi>i</mi></mrow>",
    r"\int_0^1": "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>",
    r"\lim_{x\to0}": "<munder><mo>lim</mo><mrow><mi>x</mi><mo>→</mo><mn>0</mn></mrow></munder>",
    r"\text{if } \mathbb{R}\mathbf x": "<mrow><mtext>if&nbsp;</mtext><mi>ℝ</mi><mi>𝐱</mi></mrow>",
    r"\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}": "<mrow><mo>(</mo><mtable>"
    "<mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr></mtable><mo>)</mo></mrow>",
    r"\left(\frac1x\right.": "<mrow><mo>(</mo><mfrac><mn>1</mn><mi>x</mi></mfrac></mrow>",
    r"\hat{x}\not=\underbrace{a}_n": "<mrow><mover><mi>x</mi><mo>^</mo></mover><mo>≠</mo>"
    "<munder><munder><mi>a</mi><mo>⏟</mo></munder><mi>n</mi></munder></mrow>",
    r"a &= b \\ &= c": "<mtable><mtr><mtd><mi>a</mi></mtd><mtd><mo>=</mo><mi>b</mi></mtd></mtr>"
    "<mtr><mtd></mtd><mtd><mo>=</mo><mi>c</mi></mtd></mtr></mtable>",
}
REFUSED = [
    r"\unknown",
    r"\frac{a}",
    "a^",
    "^2",
    "{a",
    "a}",
    "a^b^c",
    r"\left(a",
    r"\begin{pmatrix}1",
    r"\end{x}",
    "%",
    "&",
]
REFUSED += [
    r"\begin{x}\end{x}",
    r"\begin{cases}1\end{matrix}",
    r"\href{javascript:x}{y}",
    "{" * 200 + "}" * 200,
    r"\hat" * 999,
]


def test_mathematics_is_drawn_by_the_browser_and_refused_whole_where_something_is_unknown(
    page: Browser, running: ServedCore
) -> None:
    connected(page, running)
    assert {source: drawn(page, source) for source in FORMULAS} == FORMULAS
    assert {source: drawn(page, source) for source in REFUSED} == dict.fromkeys(REFUSED)
    ask(page, "say:" + "\n\n".join(MATH[:4]))
    ended(page, "stop")
    blocks = page.value(
        "[...document.querySelectorAll('.text math')].map(e => e.getAttribute('display') || 'inline')"
    )
    assert blocks == ["inline"] * 3 + ["block"] * 6
    [text] = page.value(TEXTS)
    assert r"$\unknown{x}$ stays" in text and r"$$\unknown$$" in text and "holds for $5." in text
    assert "$$ never closed" in text
    heights = "[...document.querySelectorAll('math')].map(e => e.getBoundingClientRect().height)"
    assert min(page.value(heights)) > 5


def test_every_formula_is_drawn_or_refused_whatever_is_in_it(page: Browser, running: ServedCore) -> None:
    connected(page, running)
    tokens = page.value(
        "[LETTERS, OPERATORS, SUMS, INTEGRALS, FENCES, ACCENTS, UNDER].flatMap(all => [...all.keys()])"
        ".concat(...LIMITS, ...FUNCTIONS, ...SIZES, ...TEXTS, ...Object.keys(ALPHABETS), ...SPACES.keys())"
        ".map(name => '\\\\' + name)"
    )
    structures = [
        r"\frac",
        r"\binom",
        r"\sqrt",
        r"\sqrt[",
        r"\left",
        r"\right",
        r"\middle",
        r"\not",
        r"\overset",
        r"\tag",
    ]
    environments = [
        f"\\{edge}{{{name}}}" for edge in ("begin", "end") for name in ("cases", "pmatrix", "array", "align")
    ]
    plain = [*"{{{}}}__^^&'()[]|12xyzA~%$#é字😀", r"\\", " ", "\n", "{a}", "{1}", "{}"]
    draw = random.Random(0)
    sources = [
        "".join(
            draw.choice(draw.choice([tokens, structures, environments, plain, plain]))
            for _ in range(draw.randint(1, 8))
        )
        for _ in range(5000)
    ]
    outcomes = page.value(f"{json.dumps(sources)}.map(one => formula(one, true)?.localName ?? null)")
    assert set(outcomes) == {"math", None} and outcomes.count("math") > 300
    alone = page.value(
        f"{json.dumps(tokens)}.filter(one => !formula(one, false) && !formula(one + '{{x}}', false)"
        " && !formula(one + '(', false))"
    )
    assert [one for one in alone if re.fullmatch(r"\\\w+", one)] == [], (
        "every command that has a name can be drawn"
    )


def test_a_list_of_tasks_shows_what_is_done(page: Browser, running: ServedCore) -> None:
    connected(page, running)
    ask(page, "say:" + MATH[4])
    ended(page, "stop")
    boxes = (
        "[...document.querySelectorAll('.task input')].map(e => [e.ariaLabel, e.checked, e.disabled, e.type])"
    )
    done, undone = ["done", True, True, "checkbox"], ["not done", False, True, "checkbox"]
    assert page.value(boxes) == [undone, done, done, done]
    items = "[...document.querySelectorAll('li')].map(e => e.textContent.split('\\n')[0])"
    assert page.value(items) == ["open", "done nowdeeper", "deeper", "[ ]none", "[y] none", "one"]


COLOURED = {
    "python": ("# no 'string'", "'it\\'s # 1'", "0x1F", "return"),
    "js": ('/* no\n"string" */', "`a\n// 1`", "1.5e-3", "const"),
    "cpp": ("// no 'x'", '"a // 1"', "42ul", "template"),
    "rust": ("// no", '"&\'a"', "1_000u32", "fn"),
    "bash": ("# no", "'a # b'", "7", "then"),
    "sql": ("-- no", "'it'", "3", "SELECT"),
    "html": ("<!-- no <p> -->", '"a"', "12", "<p"),
    "json": ("// no", '"a"', "1", "true"),
}


@pytest.mark.parametrize("language", COLOURED)
def test_code_has_colours_and_keeps_its_text(page: Browser, running: ServedCore, language: str) -> None:
    connected(page, running)
    code = "\nplain ".join(COLOURED[language])
    shown = rendered(page, [f"```{language}\n{code}\n```"])
    found = page.value(
        f"(() => {{ const e = document.createElement('div'); e.append(...coloured({language!r}, "
        f"{json.dumps(code)}));"
        " return [e.textContent, [...e.children].map(s => [s.className, s.textContent])] })()"
    )
    kinds = [list(one) for one in zip(("comment", "string", "number", "keyword"), COLOURED[language])]
    assert found == [code, kinds]
    assert '<span class="comment">' in shown
    assert page.value("coloured('unheard-of', '# 1')") == ["# 1"]


def test_reasoning_is_open_while_it_is_written_and_folded_afterwards(
    page: Browser, core: ScriptedCore, scripts: Scripts
) -> None:
    core.step_seconds = 0.02
    with served(core, scripts.tokenizer, reasoning_parser="think") as server:
        connected(page, server)
        ask(page, "say:<think>" + "step by step " * 10 + "</think>" + "The answer. " * 10)
        thoughts = "document.querySelector('details.reasoning')"
        page.wait_for(f"{thoughts}?.textContent.includes('step by')")
        assert page.value(f"[{thoughts}.open, {thoughts}.hidden]") == [True, False]
        page.wait_for(f"{TEXTS}[0].includes('The answer')")
        assert page.value(f"{thoughts}.open") is False
        ended(page, "stop")
        ask(page, "say:plain")
        ended(page, "stop", 1)
        hidden = "[...document.querySelectorAll('details.reasoning')].map(e => e.hidden)"
        assert page.value(hidden) == [False, True]
        page.reload()
        page.wait_for("document.querySelectorAll('.assistant').length === 2")
        assert page.value(hidden) == [False, True]
        assert (
            "step by step" in page.value(f"{thoughts}.textContent")
            and page.value(f"{thoughts}.open") is False
        )
        asked = scripts.tokenizer.decode(core.admitted[-1].prompt_token_ids)
        assert asked.count("step by step") == 10, "in the first question only: reasoning is not sent back"


# -- conversations and the keyboard ----------------------------------------------------------------

OPTIONS = "[...document.querySelectorAll('#chats option')].map(o => o.text)"


def pick(page: Browser, title: str) -> None:
    page.value(
        "(() => { const s = document.getElementById('chats');"
        f" s.value = [...s.options].find(o => o.text === {title!r}).value;"
        " s.dispatchEvent(new Event('change')) })()"
    )


def test_conversations_are_there_after_a_reload_to_pick_from_go_on_with_and_delete(
    page: Browser, running: ServedCore
) -> None:
    connected(page, running)
    assert page.value(OPTIONS) == ["New chat"] and page.value("document.getElementById('delete').disabled")
    ask(page, "say:first **one**")
    ended(page, "stop")
    page.press("clear")
    ask(page, "say:second")
    ended(page, "stop")
    page.reload()
    page.wait_for("document.getElementById('status').textContent === 'connected'")
    assert page.value(OPTIONS) == ["say:second", "say:first **one**"]
    assert page.value(TEXTS) == ["second"] and focused(page) == "message"
    pick(page, "say:first **one**")
    assert page.value("document.querySelector('.text strong').textContent") == "one"
    page.reload()
    page.wait_for("document.getElementById('status').textContent === 'connected'")
    assert page.value(TEXTS) == ["first one"], "a reload shows the chat that was open"
    ask(page, "say:third")
    ended(page, "stop", 1)
    decode = running.core.script.tokenizer.decode  # type: ignore[attr-defined]
    asked = decode(running.core.admitted[-1].prompt_token_ids)
    assert "first **one**" in asked and "second" not in asked
    assert page.value(OPTIONS) == ["say:first **one**", "say:second"]
    page.press("delete")
    assert page.value(OPTIONS) == ["say:first **one**", "say:second"], "asked once more"
    page.press("delete")
    assert page.value(OPTIONS) == ["say:second"] and page.value(TEXTS) == ["second"]
    page.reload()
    assert page.value(OPTIONS) == ["say:second"]
    sent = " ".join(url for url in page.requested)
    assert "first" not in sent and "second" not in sent


def test_what_was_written_until_a_reload_is_kept(page: Browser, running: ServedCore) -> None:
    running.core.step_seconds = 0.02
    connected(page, running)
    ask(page, "say:" + "on and on " * 100)
    page.wait_for(f"{TEXTS}[0]?.includes('on and on')")
    page.reload()
    page.wait_for(f"{TEXTS}[0]?.includes('on and on')")
    running.wait_until(lambda: not running.core.running)
    page.press("clear")
    running.core.held = True
    ask(page, "say:never answered")
    running.wait_until(lambda: bool(running.core.running))
    page.reload()
    page.wait_for("document.getElementById('message').value === 'say:never answered'")
    running.core.held = False
    assert page.value(OPTIONS)[0] == "say:never answered"
    page.wait_for("document.getElementById('status').textContent === 'connected'")
    page.key("Enter")
    ended(page, "stop")
    assert page.value("document.getElementById('message').value") == ""


BROKEN = [
    "{",
    "null",
    "7",
    '{"a": 1}',
    "[null, 1, {}, [], {'id': 1}]",
    '[{"id": "a", "draft": "", "messages": [null]}]',
]
BROKEN += [
    '[{"id": "a", "draft": "", "messages": [{"role": "system", "content": 7}]}]',
    "<script>alert(1)</script>",
]


def test_a_storage_with_anything_in_it_does_not_break_the_page(page: Browser, running: ServedCore) -> None:
    for broken in BROKEN:
        connected(page, running)
        page.value(f"localStorage.setItem('minivllm.chats', {json.dumps(broken)})")
        page.reload()
        page.wait_for("document.getElementById('status').textContent === 'connected'")
        assert page.value(OPTIONS) == ["New chat"], broken
        ask(page, "say:good")
        ended(page, "stop")
        assert page.value("JSON.parse(localStorage.getItem('minivllm.chats')).length") == 1


def test_a_storage_that_is_full_or_off_is_told_and_the_page_goes_on(
    page: Browser, running: ServedCore
) -> None:
    connected(page, running)
    for method in ("write", "read"):
        page.value(f"storage.{method} = () => {{ throw new DOMException('full', 'QuotaExceededError') }}")
        page.press("clear")
        ask(page, f"say:{method}")
        ended(page, "stop")
        assert page.value(TEXTS) == [method]
        assert not page.value("document.getElementById('unkept').hidden")
    assert page.value(OPTIONS) == ["say:read", "say:write"], "for as long as the page is open"
    page.reload()
    page.wait_for("document.getElementById('status').textContent === 'connected'")
    assert page.value("document.getElementById('unkept').hidden")


def test_the_oldest_conversations_make_room(page: Browser, running: ServedCore) -> None:
    connected(page, running)
    script = """(() => { const text = 'x'.repeat(%d);
      for (let n = 0; n < %d; n += 1)
        chats.keep({id: 'n' + n, draft: '', messages: [{role: 'user', content: n + text}]});
      return [chats.isKept, localStorage.getItem('minivllm.chats').length, ...chats.all().map(one => one.id)] })()"""
    is_kept, _, *ids = page.value(script % (10, 60))
    assert is_kept and ids == [f"n{number}" for number in reversed(range(10, 60))]
    is_kept, size, *ids = page.value(script % (300_000, 10))
    assert is_kept and size <= 2_000_002 and ids == [f"n{number}" for number in reversed(range(4, 10))]
    is_kept, size, *ids = page.value(
        "(write => { storage.write = text => { if (text.length > 1000000) throw new Error('full'); "
        "write(text) } })"
        "(storage.write), " + script % (300_000, 10)
    )
    assert is_kept and size <= 1_000_000 and ids == ["n9", "n8", "n7"]


def test_enter_sends_at_a_desk_starts_a_line_on_a_phone_and_ends_a_composition(
    page: Browser, running: ServedCore
) -> None:
    connected(page, running)
    message = "document.getElementById('message').value"
    page.write("message", "say:a")
    page.key("Enter", shift=True)
    page.type("b")
    assert page.value(message) == "say:a\nb"
    page.value("document.getElementById('message').value = 'say:'")
    page.call("Input.imeSetComposition", text="か", selectionStart=1, selectionEnd=1)
    page.key("Enter")
    assert page.value("document.querySelectorAll('.message').length") == 0
    page.value("document.getElementById('message').value = 'say:safari'")
    pressed = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true, cancelable: true})"
    assert page.value(f"document.getElementById('message').dispatchEvent({pressed})"), (
        "the input method has it"
    )
    assert page.value("document.querySelectorAll('.message').length") == 0
    page.look(390, 844, "light", is_phone=True)
    page.value("document.getElementById('message').value = ''")
    page.write("message", "say:one")
    page.key("Enter")
    page.type("two")
    assert page.value(message) == "say:one\ntwo"
    page.wait_for("document.getElementById('message').enterKeyHint === 'enter'")
    page.press("send")
    ended(page, "stop")
    page.look(1400, 900, "light")
    ask(page, "say:three")
    ended(page, "stop", 1)


@pytest.mark.parametrize(("width", "height"), [(390, 844), (844, 390)])
def test_most_of_a_phone_is_the_conversations(
    page: Browser, running: ServedCore, width: int, height: int, tmp_path: Path
) -> None:
    running.core.step_seconds = 0.02
    page.look(width, height, "light", is_phone=True)
    connected(page, running)
    ask_by_button(page, "say:" + "on and on " * 60)
    share = "document.getElementById('log').clientHeight / innerHeight"
    bottoms = "['message', 'send', 'stop', 'sampling'].map(id => $(id).getBoundingClientRect().bottom)"
    below = f"Math.max(...{bottoms})"
    page.wait_for(f"{TEXTS}[0]?.includes('on and on')")
    for state in ("writing", "done"):
        assert (
            page.value("innerHeight") == height
            and page.value("document.documentElement.scrollWidth") == width
        )
        assert page.value(share) >= 0.6 and page.value(below) <= height, state
        page.screenshot(tmp_path / f"{width}-{state}.png")
        if state == "writing":
            page.press("stop")
            ended(page, "stopped")


def test_nothing_a_model_writes_runs_loads_or_leads_anywhere_but_the_web(
    page: Browser, running: ServedCore
) -> None:
    connected(page, running)
    ask(page, "say:" + "\n\n".join(HOSTILE))
    ended(page, "stop")
    [text] = page.value(TEXTS)
    assert "<img src=x onerror=alert(1)><script>alert(1)</script>" in text
    assert (
        page.value(
            "document.querySelectorAll('#log :is(img, script, iframe, svg, b, a, object, form)').length"
        )
        == 0
    )
    allowed = {
        "code",
        "del",
        "em",
        "span",
        "strong",
        "a",
        "p",
        "h3",
        "pre",
        "div",
        "header",
        "button",
        "article",
    }
    allowed |= {"ul", "li", "table", "thead", "tbody", "tr", "th", "td", "input"}
    allowed |= {"details", "summary", "math", "mrow", "mi", "mo", "mn", "mtext", "mspace"}
    attributes = "[...new Set([...document.querySelectorAll('#log *')].flatMap(e => e.getAttributeNames()))]"
    assert [
        name for name in page.value(attributes) if name.startswith("on") or name in ("href", "src", "style")
    ] == []
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
    "piece",
    [
        *(
            "*a",
            "**a ",
            "[",
            "`",
            "_a ",
            "- ",
            "> ",
            "\n",
            " ",
            "|",
            "# ",
            "-",
            "a`b",
            "~~a",
            "\t",
            "1. x\n",
            "([",
        ),
        *("$", "$a ", "$$ ", "$$\n", "\\[\n", "\\(", "\\(a", "- [ ] ", "$$a\n\n", "$$\\frac", "$${"),
    ],
)
def test_no_text_takes_long_to_read(page: Browser, running: ServedCore, piece: str) -> None:
    connected(page, running)
    text = piece * (100_000 // len(piece))
    took = page.value(
        f"(() => {{ const t = performance.now(); for (const p of ['x\\n', '- x\\n', '# ', '`', '|-', "
        "'```js\\n'])"
        f" new MarkdownView(document.createElement('div')).add(p + {json.dumps(text)} + 'x');"
        " return performance.now() - t })()"
    )
    print(f"{piece!r}: {took:.0f} ms for six texts of 100,000 characters")
    assert took < 10_000


# -- errors ----------------------------------------------------------------------------------------


def test_a_wrong_key_is_told_and_the_right_one_opens(
    page: Browser, core: ScriptedCore, scripts: Scripts
) -> None:
    with served(core, scripts.tokenizer, api_keys=(KEY,)) as server:
        page.open(f"{server.url}/")
        page.wait_for("document.activeElement.id === 'key'")
        assert page.value("document.getElementById('status').textContent") == "a key is needed"
        page.type("wrong")
        page.key("Enter")
        page.wait_for(
            "document.getElementById('key-problem').textContent === 'The server does not accept this key.'"
        )
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
        asking = (
            f"fetch('/v1/completions', {{method: 'POST', headers: {headers}, body: '{{\"prompt\": [5]}}'}})"
        )
        page.value(f"void {asking}")
        server.wait_until(lambda: len(core.admitted) > 1)
        page.value("document.getElementById('message').value = ''")
        ask(page, "say:hello")
        page.wait_for("document.querySelectorAll('.problem').length === 2")
        assert re.match(
            r"The server is full, try again in \d+ s\. It says: The server is full: 1 of 1", problem(page)
        )
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
        assert re.match(
            r"This chat has filled the context: start a new chat\. .*max_model_len is 200", problem(page)
        )


def test_a_server_that_is_gone_is_told_and_found_again(
    page: Browser, core: ScriptedCore, scripts: Scripts
) -> None:
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
    page.wait_for(
        "document.getElementById('status').textContent === 'the server does not answer, trying again'"
    )
    core = ScriptedCore(scripts)
    with served(core, scripts.tokenizer, port=server.port) as server:
        page.wait_for("document.getElementById('status').textContent === 'connected'")
        page.value("document.getElementById('message').focus()")
        page.key("Enter")
        ended(page, "stop", 2)
        page.wait_for("Number(document.getElementById('heat').dataset.columns) > 3")


# -- what it looks like ----------------------------------------------------------------------------

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
    ask_by_button(page, "say:" + ANSWER)
    ended(page, "stop")
    wide = "averylongwordwithoutanyspace" * 12 + "\n\n|" + "a wide cell|" * 12 + "\n|" + "-|" * 12
    ask_by_button(page, f"say:{wide}\n\n$$" + "a + " * 60 + "b$$")
    ended(page, "stop", 1)
    ask_by_button(page, "say:REFUSE")
    problem(page)
    page.value("document.getElementById('sampling').open = true")
    boxes = "[document.documentElement, document.body, document.getElementById('log')]"
    sideways = f"{boxes}.map(e => e.scrollWidth - e.clientWidth)"
    assert page.value(sideways) == [0, 0, 0]
    assert page.value("innerWidth") == width
    worst = sorted(page.value(CONTRASTS))
    print(f"{screen}: {len(worst)} texts, contrasts from {worst[0][0]:.1f} ({worst[0][1]})")
    assert len(worst) > 40 and worst[0][0] >= 4.5
    is_dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    assert is_dark == (scheme == "dark")
    page.value("document.getElementById('sampling').open = false")
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
    for _ in range(15):
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
        "summary",
        "temperature",
        "top-p",
        "max-tokens",
        "model",
        "chats",
        "clear",
        "delete",
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
