"""The README's picture of a chat can be drawn again."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

from minivllm.config import EngineArgs
from minivllm.frontend.llm_engine import LLMEngine
from tutorials.chat_picture import draw


def words_of(svg: str) -> str:
    """All text of an SVG by rich, spaces left out."""
    parts = re.findall(r"<text [^>]*>(.*?)</text>", svg)
    return re.sub(r"\s", "", html.unescape("".join(parts)))


def test_the_picture_shows_questions_statistics_and_the_trace(
    tiny_model: Callable[..., Path], word_tokenizer: Path
) -> None:
    args = EngineArgs(
        model=str(tiny_model("llama")), tokenizer=str(word_tokenizer), enforce_eager=True, max_model_len=256
    )
    with LLMEngine.from_args(args) as engine:
        words = words_of(draw(engine, "tiny", ("w1 w2",), max_tokens=4))
    assert ">w1w2" in words and "TTFT" in words and ">/tracestep" in words


def test_the_readmes_picture_is_one_of_these() -> None:
    words = words_of(
        (Path(__file__).parents[2] / "tutorials" / "pictures" / "chat.svg").read_text(encoding="utf-8")
    )
    for part in ("minivllmchat", "WhatisthecapitalofFrance", "ofbandwidthbound", ">/trace"):
        assert part in words
