"""Images on the page: what may be sent, as its script decides in node, and what the server says about it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from minivllm.errors import RequestError
from minivllm.multimodal.files.decoding import (
    FORMATS,
    MAX_FILE_BYTES,
    MAX_PIXELS,
    MAX_RATIO,
    MAX_SIDE,
    _check_size,
)
from minivllm.server.page.page import FOLDER, assemble_page
from tests.server.serving import ScriptedCore, Scripts, served

BODY = 32 * 2**20
LIMITS = {
    "max_images": 3,
    "max_file_bytes": MAX_FILE_BYTES,
    "max_pixels": MAX_PIXELS,
    "max_side": MAX_SIDE,
    "max_ratio": MAX_RATIO,
    "max_body_bytes": BODY,
    "media_types": [f"image/{name.lower()}" for name in FORMATS],
}
CARD = {"id": "eye", "input_modalities": ["text", "image"], "image_limits": LIMITS}
NO_IMAGES = {"count": 0, "characters": 0}
PAGE = """
const listeners = {}, elements = {};
function $(id) {
  return elements[id] ??= {
    value: id === "model" ? "eye" : "", hidden: false, textContent: "", children: [], files: [],
    addEventListener(kind, listen) { listeners[id + " " + kind] = listen; },
    replaceChildren(...children) { this.children = children; },
    focus() {},
  };
}
const make = (name, className, ...children) => ({
  name, children, addEventListener() {}, src: "",
  async decode() { if (this.src.includes("BROKEN")) throw new Error(); [this.naturalWidth, this.naturalHeight] = [30, 20]; },
});
const counted = (number, noun) => number + " " + noun + (number === 1 ? "" : "s");
class FileReader { readAsDataURL(file) { this.result = "data:" + file.type + ";base64," + file.data; this.onload(); } }
let models = new Map(), chat = { messages: [] };
"""
"""What the script finds in a browser, as far as page_images.js needs it."""

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None, reason="There is no node here to run the script."
)


def run(script: str, folder: Path) -> Any:
    """What a script after that of the images prints, as JSON."""
    images = (FOLDER / "page_images.js").read_text(encoding="utf-8")
    return node("\n".join([PAGE, images, script]), folder)


def node(script: str, folder: Path) -> Any:
    """What a script prints, as JSON."""
    path = folder / "page.mjs"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(["node", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def problems(cases: list[list[Any]], folder: Path) -> list[str]:
    """Of each case, the arguments of imageProblem, what it returns."""
    found = run(
        f"console.log(JSON.stringify({json.dumps(cases)}.map((one) => imageProblem(...one))))", folder
    )
    assert isinstance(found, list)
    return found


def test_the_page_refuses_the_sizes_that_the_server_refuses(tmp_path: Path) -> None:
    sizes = [(1, 1), (MAX_SIDE, 2048), (MAX_SIDE, 2049), (MAX_SIDE + 1, 2000), (2000, MAX_SIDE + 1)]
    sizes += [(MAX_RATIO, 1), (MAX_RATIO + 1, 1), (1, MAX_RATIO + 1), (5000, 6000), (8000, 8000)]
    cases = [["a.png", CARD, "image/png", 100, width, height, NO_IMAGES] for width, height in sizes]
    for (width, height), problem in zip(sizes, problems(cases, tmp_path)):
        try:
            _check_size(width, height, "a.png")
        except RequestError:
            assert problem.startswith(f"a.png has {width} × {height} pixels, but"), problem
        else:
            assert problem == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({1: None}, "The page does not know the model yet"),
        ({1: {**CARD, "image_limits": None}}, "eye reads text only: it takes no images."),
        ({2: "image/gif"}, "a.png is no file of the formats PNG, JPEG, WEBP."),
        ({3: MAX_FILE_BYTES}, ""),
        ({3: MAX_FILE_BYTES + 1}, "a.png has 20.0 MiB, but may have at most 20."),
        ({6: {"count": 2, "characters": 10}}, ""),
        ({6: {"count": 3, "characters": 10}}, "a chat takes at most 3, start a new one"),
        ({6: {"count": 1, "characters": BODY - 70_000}}, "together may have about 23 MiB"),
    ],
)
def test_what_the_page_refuses(changes: dict[int, Any], reason: str, tmp_path: Path) -> None:
    case: list[Any] = ["a.png", CARD, "image/png", 4000, 30, 20, NO_IMAGES]
    for index, value in changes.items():
        case[index] = value
    (problem,) = problems([case], tmp_path)
    assert reason in problem and bool(reason) == bool(problem)


def test_pasted_and_dropped_images_go_with_the_next_message(tmp_path: Path) -> None:
    script = f"""
    models.set("eye", {json.dumps(CARD)});
    const file = (data, type = "image/png") => ({{ name: data + ".png", type, size: 3, data }});
    const event = (files, text = "") => ({{
      isPrevented: false, preventDefault() {{ this.isPrevented = true; }},
      clipboardData: {{ files, getData: () => text }}, dataTransfer: {{ files, types: ["Files"] }},
    }});
    const fire = async (name, one) => {{
      listeners[name](one);
      await new Promise((resolve) => setTimeout(resolve, 20));
      return [one.isPrevented, images.next.length, $("next-images").children.length, $("image-problem").textContent];
    }};
    const steps = [];
    offerImages();
    steps.push($("attach").hidden);
    steps.push(await fire("message paste", event([file("AAAA")])));
    steps.push(await fire("message paste", event([file("TEXT")], "a text beside it")));
    steps.push(await fire("chat drop", event([file("BBBB"), file("BROKEN")])));
    steps.push(await fire("chat drop", event([file("CCCC"), file("DDDD")])));
    const numbers = images.takeNext();
    steps.push(contentOf("What is it?", images.found(numbers)), contentOf("Text", []), contentOf("", images.found(numbers)).length);
    chat.messages.push({{ role: "user", content: "", images: numbers }});
    steps.push(await fire("chat drop", event([file("EEEE")])));
    models.get("eye").image_limits = null;
    models.get("eye").input_modalities = ["text"];
    offerImages();
    steps.push($("attach").hidden, await fire("message paste", event([file("FFFF")])));
    console.log(JSON.stringify(steps));
    """
    steps = run(script, tmp_path)
    urls = [f"data:image/png;base64,{data}" for data in ("AAAA", "BBBB", "CCCC")]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert steps == [
        False,
        [True, 1, 1, ""],
        [False, 1, 1, ""],
        [True, 2, 2, "BROKEN.png cannot be read as an image."],
        [True, 3, 3, "DDDD.png is one image too many: a chat takes at most 3, start a new one."],
        [*parts, {"type": "text", "text": "What is it?"}],
        "Text",
        3,
        [True, 0, 3, "EEEE.png is one image too many: a chat takes at most 3, start a new one."],
        True,
        [True, 0, 3, "eye reads text only: it takes no images."],
    ]


def test_images_are_sent_with_every_message_that_follows_and_not_kept(tmp_path: Path) -> None:
    """The whole script of the page, with a server that answers every message, but the third one first not."""
    acts = """
    const paste = async (data) => {
      const clipboardData = { files: [{ name: "a.png", type: "image/png", size: 3, data }], getData: () => "" };
      listeners["message paste"]({ clipboardData, preventDefault() {} });
      await until(() => images.next.length);
    };
    const send = async (text) => {
      $("message").value = text;
      listeners["chat-form submit"]({ preventDefault() {} });
      await until(() => !answering);
    };
    await until(() => models.size);
    $("model").value = "eye";
    await paste("AAAA");
    await send("What?");
    await send("More?");
    refuses = true;
    await paste("BBBB");
    await send("");
    const kept = images.next.length;
    refuses = false;
    await send("");
    images.urls.clear(); // as in a later visit
    openChat(chats.all()[0]);
    const shown = $("log").children[0].children;
    const untitled = chatTitle({ messages: [{ role: "user", content: "", images: ["1", "2"] }], draft: "" });
    await send("And?");
    const sent = bodies.map((body) => body.messages.filter((one) => one.role === "user").map((one) => one.content));
    console.log(JSON.stringify({ sent, kept, shown: shown.map((one) => one.children || one), untitled, stored: localStorage.text }));
    process.exit(0);
    """
    browser = Path(__file__).with_name("page_without_browser.js").read_text(encoding="utf-8")
    script = assemble_page().partition("<script>")[2].partition("</script>")[0]
    told = node("\n".join([browser, script, acts]), tmp_path)
    first, second = (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        for data in ("AAAA", "BBBB")
    )
    with_text = [first, {"type": "text", "text": "What?"}]
    assert told["sent"] == [
        [with_text],
        [with_text, "More?"],
        [with_text, "More?", [second]],
        [with_text, "More?", [second]],
        ["[1 image, no longer here]\nWhat?", "More?", "[1 image, no longer here]", "And?"],
    ]
    assert told["kept"] == 1, "what the server refused waits to be sent again"
    assert told["shown"] == [["1 image sent, no longer here"], "What?"]
    assert told["untitled"] == "2 images"
    assert "base64" not in told["stored"]


def test_a_model_that_reads_text_says_so(scripts: Scripts) -> None:
    with served(ScriptedCore(scripts), scripts.tokenizer) as server:
        [card] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["input_modalities"] == ["text"] and card["image_limits"] is None
    assert '<p id="attach" hidden>' in assemble_page()
