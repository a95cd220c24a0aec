"""Regular expressions that come with a model's files and name its layers, matched in bounded time.

A backtracking engine may be kept busy for ages by an expression with many repeats. Those with few go to
Python's ``re``; the others become the automaton of ``stop_regex``, whose work grows with the length of the
name alone.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import _parser as re_parser  # type: ignore[attr-defined]
from typing import Any

from minivllm.stop_conditions.stop_regex import ACCEPT, MAX_DEPTH, Compiler, TooLargeError, group_depth

MAX_NAME_LENGTH = 256
"""Longer names of layers match no expression."""
MAX_PATTERN_LENGTH = 1024
MAX_ELEMENTS = 512
MAX_REPEATS = 3
"""So few repeats, of single characters, end soon in any engine."""
_AT_END = 2  # the second bit of a set of places: the match is complete if the name ends here


@lru_cache(maxsize=4096)
def name_pattern(pattern: str) -> NamePattern:
    """The matcher of an expression; ValueError says what is wrong with it."""
    return NamePattern(pattern)


class NamePattern:
    """One expression with the syntax of Python's ``re``."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_LENGTH or group_depth(pattern) > MAX_DEPTH:
            raise ValueError(
                f"it has more than {MAX_PATTERN_LENGTH} characters, or groups too deep inside each other"
            )
        try:
            self._expression = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        is_short = not re.search(r"\)[*+{]", pattern) and len(re.findall(r"[*+{]", pattern)) <= MAX_REPEATS
        self._automaton = None if is_short else _Automaton(pattern)

    def begins(self, name: str) -> bool:
        """True if the beginning of the name matches."""
        if len(name) > MAX_NAME_LENGTH:
            return False
        return (
            bool(self._expression.match(name))
            if self._automaton is None
            else self._automaton.match(name, ACCEPT)
        )

    def is_all_of(self, name: str) -> bool:
        """True if the whole name matches."""
        if len(name) > MAX_NAME_LENGTH:
            return False
        return (
            bool(self._expression.fullmatch(name))
            if self._automaton is None
            else self._automaton.match(name, 0)
        )


class _Automaton:
    """All ways to match a name from its first character on, advanced together."""

    def __init__(self, pattern: str) -> None:
        compiler = _AnchoredCompiler(MAX_ELEMENTS)
        compiler.following.append(0)  # the place of _AT_END
        tree = re_parser.parse(pattern)
        _drop_beginning(tree)
        try:
            self._first = compiler.sequence(tree, tree.state.flags, ACCEPT)
        except TooLargeError:
            raise ValueError(
                f"it has more than {MAX_ELEMENTS} elements, repeated ones counted as often"
            ) from None
        except ValueError:
            raise ValueError(
                "it has many repeats, and lookaround, backreferences or anchors inside besides"
            ) from None
        self._following = compiler.following
        self._classes = [(re.compile(*key).match, places) for key, places in compiler.classes.items()]

    def match(self, name: str, early: int) -> bool:
        """early: the places at which a match may end before the name does."""
        places = self._first
        for character in name:
            if places & early:
                return True
            taking = sum(its_places for contains, its_places in self._classes if contains(character)) & places
            places = 0
            while taking:
                lowest = taking & -taking
                places |= self._following[lowest.bit_length() - 1]
                taking ^= lowest
        return bool(places & (ACCEPT | _AT_END))


class _AnchoredCompiler(Compiler):
    """Also takes ``$``, after which nothing may come."""

    def _element(self, kind: str, argument: Any, flags: int, then: int) -> int:
        if kind == "AT" and str(argument) in ("AT_END", "AT_END_STRING") and not flags & re.MULTILINE:
            return _AT_END if then & (ACCEPT | _AT_END) else 0
        return super()._element(kind, argument, flags, then)


def _drop_beginning(tree: Any) -> None:
    """Take ``^`` from where every match begins anyway."""
    while tree.data and str(tree.data[0][0]) == "AT" and "BEGINNING" in str(tree.data[0][1]):
        del tree.data[0]
    if tree.data and str(tree.data[0][0]) == "BRANCH":
        for branch in tree.data[0][1][1]:
            _drop_beginning(branch)
    elif tree.data and str(tree.data[0][0]) == "SUBPATTERN":
        _drop_beginning(tree.data[0][1][3])
