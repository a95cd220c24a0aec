"""Role blocks: turns of a conversation, written by the model's chat template, piece by piece.

Tokens that were computed never change. So the template's text up to here must begin with its text up to the
last block. A template that rewrites earlier turns (many leave out earlier thoughts) is refused.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minivllm.tokenizer.tokenizer import HiddenTexts, Tokenizer

_MARK_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Block:
    """One turn. Special tokens in ``content`` are text."""

    role: str
    content: str


def system(*texts: str) -> Block:
    """A system turn: instructions that come first."""
    return _block("system", texts)


def user(*texts: str) -> Block:
    """A user's turn. After it the model answers:
    ``gen``, ``select`` and plain text open the assistant's turn."""
    return _block("user", texts)


def assistant(*texts: str) -> Block:
    """An assistant's turn that is given, not generated: an example of an answer."""
    return _block("assistant", texts)


def tool(*texts: str) -> Block:
    """The result of a tool."""
    return _block("tool", texts)


def _block(role: str, texts: tuple[str, ...]) -> Block:
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(
                f"{role}(…) was given a {type(text).__name__}, but takes texts: write str(…) around it."
            )
    return Block(role, "".join(texts))


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
            marked = self._render((*self.messages, Block("assistant", mark), *blocks), opens)
            history = (*self.messages, Block("assistant", self.answer), *blocks)
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
        messages = [{"role": turn.role, "content": self.hidden.hide(turn.content)} for turn in turns]
        return self.tokenizer.render_chat(messages, opens, chat_template=self.chat_template, **self.variables)
