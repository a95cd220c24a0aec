"""Draws the README's picture of ``minivllm chat``:
a real conversation with the default model, rendered by the chat.

``python -m tutorials.chat_picture tutorials/pictures/chat.svg``
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.terminal.answer_view import render_block
from minivllm.cli.trace.command import folded, heat_strip
from minivllm.config import EngineArgs
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.sampling_params import SamplingParams

COLUMNS = 112
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the square of a number.",
)


def draw(
    engine: LLMEngine, model: str, questions: tuple[str, ...] = QUESTIONS, max_tokens: int | None = None
) -> str:
    """The conversation and the trace of its last answer, as an SVG."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    session = ChatSession(engine, model, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    size = session.max_model_len
    console.print(Text(f"{model} · {engine.client.config.device} · context {size:,} tokens", style="dim"))
    for question in questions:
        console.print(Text.assemble(("> ", "bold"), question))
        generation = session.ask(question, lambda text: None, lambda: False)
        console.print(render_block(generation.text))
        console.print(Text(generation.statistics_line(size) + "\n", style="dim"))
    console.print(Text.assemble(("> ", "bold"), "/trace"))
    if session.last_generation is not None:
        console.print(heat_strip(folded(session.insight.steps(session.last_generation)), 1, COLUMNS))
    return console.export_svg(title="minivllm chat")


def main() -> None:
    """Write the picture to the path given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", default="smollm2")
    chosen = parser.parse_args()
    with LLMEngine.from_args(EngineArgs(model=chosen.model, compile_in_background=False)) as engine:
        # The first answer warms the machine up: the one in the picture is as fast as all that follow.
        draw(engine, chosen.model, QUESTIONS[:1], max_tokens=16)
        engine.reset_prefix_cache()
        picture = draw(engine, chosen.model)
    chosen.path.parent.mkdir(parents=True, exist_ok=True)
    chosen.path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
