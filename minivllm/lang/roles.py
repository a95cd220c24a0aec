"""Role blocks: turns of a conversation, written by the model's chat template, piece by piece.

Tokens that were computed never change. So the template's text up to here must begin with its text up to the
last block. A template that rewrites earlier turns (many leave out earlier thoughts) is refused.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError
from minivllm.tokenizer.valid_text import check_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minivllm.tokenizer.tokenizer import HiddenTexts, Tokenizer

_MARK_DIGITS = 24


@dataclass(frozen=True, eq=False, slots=True)
class Image:
    """A picture, for a model that sees."""

    source: Any


def image(source: Any) -> Image:
    """A picture in a user's or a tool's turn, or between plain texts. source: an image of PIL, or the bytes
    of a file."""
    return Image(source)


@dataclass(frozen=True, slots=True)
class Block:
    """One turn. Special tokens in its texts are text."""

    role: str
    parts: tuple[str | Image, ...]
    """No two texts follow one another."""

    @property
    def images(self) -> list[Image]:
        return [part for part in self.parts if isinstance(part, Image)]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


def system(*texts: str) -> Block:
    """A system turn: instructions that come first."""
    return _block("system", texts)


def user(*parts: str | Image) -> Block:
    """A user's turn, of texts and images. After it the model answers:
    ``gen``, ``select`` and plain text open the assistant's turn."""
    return _block("user", parts, may_see=True)


def assistant(*texts: str) -> Block:
    """An assistant's turn that is given, not generated: an example of an answer."""
    return _block("assistant", texts)


def tool(*parts: str | Image) -> Block:
    """The result of a tool, of texts and images."""
    return _block("tool", parts, may_see=True)


def _block(role: str, parts: tuple[str | Image, ...], *, may_see: bool = False) -> Block:
    for part in parts:
        if isinstance(part, str):
            check_text(f"A text of {role}(…)", part)
        elif isinstance(part, Image) and not may_see:
            raise RequestError(
                f"{role}(…) was given an image, but takes texts: show it in user(…) or tool(…)."
            )
        elif not isinstance(part, Image):
            taken = "texts and images: write str(…) or image(…)" if may_see else "texts: write str(…)"
            raise RequestError(
                f"{role}(…) was given an object of type {type(part).__name__}, but takes {taken} around it."
            )
    joined: list[str | Image] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return Block(role, tuple(joined))


@dataclass(frozen=True)
class Conversation:
    """What the template has written so far. Immutable, so branches share it."""

    tokenizer: Tokenizer
    hidden: HiddenTexts
    """Hides special tokens in messages.
    All branches use the same one, so equal messages have equal renderings."""
    chat_template: str | None
    """Takes the place of the model's."""
    variables: Mapping[str, Any]
    """Further names that the template knows."""
    mark: str | None = None
    """See PromptImages."""
    messages: tuple[Block, ...] = ()
    """Turns that are complete."""
    rendered: str = ""
    """Of these, special tokens hidden, up to where the open turn begins."""
    answer: str | None = None
    """The assistant's turn so far; None if it is not open."""

    def said(self, text: str) -> Conversation:
        """With ``text`` at the end of the open turn."""
        return replace(self, answer=(self.answer or "") + text)

    def extended(self, blocks: Sequence[Block], *, opens: bool) -> tuple[Conversation, str]:
        """With more turns, and the text that they add, special tokens hidden.
        opens: the assistant's turn follows.

        Raises RequestError if the template refuses the turns, or rewrites earlier ones.
        """
        if not blocks and (self.answer is not None or not opens):
            return self, ""
        history = (*self.messages, *blocks)
        before, said = self.rendered, ""
        if self.answer is None:
            rendered = self._render(history, opens)
            added = rendered[len(before) :]
        else:
            # The end of the answer is found by a mark in its place,
            # since templates strip white space around it.
            mark = "".join(secrets.choice("123456789") for _ in range(_MARK_DIGITS))
            marked = self._render((*self.messages, Block("assistant", (mark,)), *blocks), opens)
            history = (*self.messages, Block("assistant", (self.answer,)), *blocks)
            rendered = self._render(history, opens)
            added = marked.rpartition(mark)[2]
            said = rendered[len(before) : len(rendered) - len(added)]
        hidden_answer = self.hidden.hide(self.answer or "")
        if (
            not rendered.startswith(before)
            or not rendered.endswith(added)
            or said.strip() != hidden_answer.strip()
        ):
            raise RequestError(
                "The chat template rewrites earlier turns when new ones follow (many leave out thoughts), "
                "but a "
                "program keeps what was computed: give a chat_template that only appends."
            )
        answer = "" if opens else None
        return replace(self, messages=history, rendered=rendered, answer=answer), added

    def _render(self, turns: Sequence[Block], opens: bool) -> str:
        messages = [{"role": turn.role, "content": self._content(turn)} for turn in turns]
        return self.tokenizer.render_chat(messages, opens, chat_template=self.chat_template, **self.variables)

    def _content(self, turn: Block) -> str | list[dict[str, str]]:
        """Of a message: parts, if the template has to place images."""
        if not turn.images or self.mark is not None:
            text: str = self.hidden.hide(turn.text)
            return (self.mark or "") * len(turn.images) + text
        return [
            {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": self.hidden.hide(part)}
            for part in turn.parts
        ]
