"""Six programs. ``python -m minivllm.lang.examples`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.lang import State, image, join, program, system, tool, user


@program
async def answer(s: State, question: str, length: int = 64) -> str:
    """A chain: two turns. 2 requests."""
    s += user(question)
    await s.gen("draft", max_tokens=length)
    s += user("Shorter.")
    short: str = await s.gen("short", max_tokens=length // 4)
    return short


@program
async def mood(s: State, text: str) -> str:
    """A choice. 1 request if both words are single tokens, else 2."""
    s += user(f"Is this kind or rude? {text}")
    return await s.select("mood", ["kind", "rude"])


@program
async def essay(s: State, topic: str, num_parts: int = 3, length: int = 200) -> str:
    """Branches that share the plan. 1 + num_parts + 1 requests."""
    s += user(f"Write about {topic}. Make a plan first.")
    await s.gen("plan", max_tokens=length // 2)
    branches = s.fork(num_parts)
    for number, branch in enumerate(branches, 1):
        branch += user(f"Part {number} of the plan, please.")
    texts = await join(branches, lambda branch: branch.gen("text", max_tokens=length))
    s += user("Sum up: " + " ".join(texts))
    summary: str = await s.gen("sum", max_tokens=length // 4)
    return summary


@dataclass
class Order:
    """What the structure asks for."""

    item: str
    count: int


@program
async def order(s: State, mail: str) -> tuple[Order, str]:
    """Structure: a value of a type, then one of two words. 2 requests."""
    s += user(f"Which item does this mail order, and how many?\n\n{mail}")
    data: Order = await s.gen("data", json=Order, max_tokens=60)
    s += user("Is it urgent?")
    return data, await s.gen("urgent", regex="yes|no")


def add(a: int, b: int) -> str:
    """A tool."""
    return str(a + b)


def day_of(city: str) -> str:
    """Another tool."""
    return f"It is Monday in {city}."


@dataclass
class Sum:
    """Arguments of ``add``."""

    a: int
    b: int


@dataclass
class City:
    """Arguments of ``day_of``."""

    city: str


TOOLS: Mapping[str, tuple[type, Callable[..., str]]] = {"add": (Sum, add), "day_of": (City, day_of)}


@program
async def assist(
    s: State, task: str, tools: Mapping[str, tuple[type, Callable[..., str]]] = TOOLS
) -> list[Any]:
    """An agent: it chooses a tool, writes its arguments, and reads the result,
    until it stops or after 4 calls."""
    s += system("You solve tasks with tools: " + ", ".join(tools) + ". Say the name of a tool, or stop.")
    s += user(task)
    results: list[Any] = []
    while len(results) < 4 and (name := await s.select("tool", [*tools, "stop"])) != "stop":
        kind, call = tools[name]
        s += " "
        arguments = await s.gen("arguments", json=kind, max_tokens=60)
        results.append(call(**vars(arguments)))
        s += tool(results[-1])
    return results


@program
async def look(s: State, picture: Any, questions: Sequence[str]) -> list[str]:
    """Questions about an image, which is encoded once. 1 request for each question.

    picture: an image of PIL, or the bytes of a file; the model must see.
    """
    branches = s.fork(len(questions))
    for branch, question in zip(branches, questions):
        branch += user(image(picture), question)
    return await join(branches, lambda branch: branch.gen("answer", max_tokens=20))


INPUTS: Mapping[str, tuple[Any, str]] = {
    "answer": (answer, "Why is the sky blue?"),
    "mood": (mood, "You have been a great help, thank you."),
    "essay": (essay, "the sea"),
    "order": (order, "Dear shop, please send me three red lamps. I need them tomorrow!"),
    "assist": (assist, "Which day is it in Paris?"),
}
"""Name -> program and an argument, for a model of text."""
