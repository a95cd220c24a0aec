"""Texts that follow other texts, as tokens, and the tokens of a text that a stop string cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.tokenizer.detokenizer import TokenStream
    from minivllm.tokenizer.tokenizer import Tokenizer

_MARKS = ("\n", "a")


def encode_after(tokenizer: Tokenizer, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of ``text`` as it follows other text. encode: to ids, without what surrounds a whole text.

    Some tokenizers put a space before every text.
    There the text is encoded after a mark, whose tokens are taken off.
    """
    letter = encode("a")
    if tokenizer.decode(letter + letter) == "aa":
        return encode(text)
    for mark in _MARKS:
        begin, whole = encode(mark), encode(mark + text)
        if whole[: len(begin)] == begin and tokenizer.decode(whole, False).lstrip(" ") == mark + text:
            return whole[len(begin) :]
    return encode(text)


def tokens_of_text(token_ids: list[int], text: str, stream: TokenStream) -> tuple[list[int], str]:
    """The sampled tokens that a text consists of, and the rest of it,
    which a token has together with what was cut.

    token_ids: that were sampled. text: what is left of theirs. stream: a new one.
    """
    done, num_kept = "", 0
    for place, token_id in enumerate(token_ids, 1):
        new = stream.push(token_id)
        if not text.startswith(done + new):
            break
        if new:
            done, num_kept = done + new, place
    else:
        if done + stream.flush() == text:
            return token_ids, ""
    return token_ids[:num_kept], text[len(done) :]
