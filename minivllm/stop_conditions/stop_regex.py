"""Stop expressions: regular expressions found while the text grows, without reading any of it twice.

A backtracking engine would search the growing text again with every token, and some expressions would keep it
busy for ages. Here an expression becomes a nondeterministic automaton without empty moves (Glushkov 1961):
every character or class written in it is a place, and a set of places is an int with a bit for each. All
matches in progress advance together, one step per character (Thompson 1968); those that started at the same
character share one set. A place that an older match has reached is struck from the younger ones, since from
there on the older one ends no later and is the longer. That leaves where the earliest match in progress
began, which is what a stream must hold back, and bounds the work for a character and the memory by the number
of places.

The syntax is that of Python's ``re``, whose parser reads it and which decides what a class contains. Syntax
that looks beyond the matched text or depends on the order of attempts (anchors, lookaround, backreferences,
…) is refused. A match ends as soon as it can (see ``stop_strings``), so ``a+`` ends at the first a, and
greedy and lazy repetition are the same.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from re import _parser as re_parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from minivllm.errors import RequestError
from minivllm.stop_conditions.stop_strings import StopMatch

MAX_ELEMENTS = 256
"""Of all stop expressions of a request: their characters, classes and groups, repeated ones as often as they
may be. So many matches can be in progress at once, each about half a microsecond per character, in the loop
that serves all."""

ACCEPT = 1  # the first bit of a set of places: the match is complete

_REFUSED = {
    "AT": "anchors and word boundaries",
    "ASSERT": "lookaround",
    "ASSERT_NOT": "lookaround",
    "FAILURE": "lookaround",
    "GROUPREF": "backreferences",
    "GROUPREF_EXISTS": "conditional groups",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repetition",
}
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}


MAX_DEPTH = 50
"""Groups inside one another: the parser calls itself for each."""


def group_depth(pattern: str) -> int:
    """At least as many groups as lie inside one another:
    a parenthesis that is not escaped counts until it closes."""
    depth = deepest = 0
    is_escaped = False
    for character in pattern:
        if not is_escaped:
            depth += (character == "(") - (character == ")" and depth > 0)
            deepest = max(deepest, depth)
        is_escaped = character == "\\" and not is_escaped
    return deepest


def compile_stop_patterns(patterns: Iterable[str]) -> list[StopPattern]:
    """One matcher per expression. Raises RequestError,
    with a sentence that names the expression and what is wrong."""
    compiled: list[StopPattern] = []
    room = MAX_ELEMENTS
    for index, pattern in enumerate(patterns):
        name = f"stop_regex.{index} is {reprlib.repr(pattern)}, but"
        if group_depth(pattern) > MAX_DEPTH:
            raise RequestError(f"{name} its groups lie too deep inside each other: simplify it.")
        try:
            compiled.append(StopPattern(pattern, room))
        except TooLargeError:
            raise RequestError(
                f"{name} with it the stop expressions have more than {MAX_ELEMENTS} elements, repeated ones "
                "counted as "
                "often as they may occur: use * or + for large counts."
            ) from None
        except (re.error, OverflowError) as error:
            raise RequestError(f"{name} must be a regular expression: {error}.") from None
        except ValueError as error:
            raise RequestError(f"{name} {error}") from None
        room -= compiled[-1].num_elements
    return compiled


class Progress(NamedTuple):
    """Progress of a sequence. position: characters read so far. matches: those in progress, the oldest first;
    each is the place where it began, and the places whose character may come next."""

    position: int
    matches: tuple[tuple[int, int], ...]


class StopPattern:
    """One expression. Implements StopMatcher; remembers each distinct character of the texts it reads."""

    start = Progress(0, ())

    def __init__(self, pattern: str, max_elements: int = MAX_ELEMENTS) -> None:
        """Raises what ``compile_stop_patterns`` makes sentences of."""
        tree = re_parser.parse(pattern)
        compiler = Compiler(max_elements)
        self._first = compiler.sequence(tree, tree.state.flags, ACCEPT)
        if self._first & ACCEPT:
            raise ValueError("must not match the empty text, which is everywhere.")
        self.pattern = pattern
        self.num_elements = compiler.num_elements
        self._following = compiler.following
        self._classes = [(re.compile(*key).match, places) for key, places in compiler.classes.items()]
        self._places_of_char: dict[str, int] = {}

    def scan(self, state: Progress, text: str) -> tuple[Progress, int, StopMatch | None]:
        return self._read(state, text, may_match=True)

    def skip(self, state: Progress, text: str) -> Progress:
        return self._read(state, text, may_match=False)[0]

    def num_held(self, state: Progress) -> int:
        return state.position - state.matches[0][0] if state.matches else 0

    def _read(self, state: Progress, text: str, may_match: bool) -> tuple[Progress, int, StopMatch | None]:
        position, matches = state
        for num_read, char in enumerate(text, start=1):
            places_of_char = self._places(char)
            if not matches and not places_of_char & self._first:
                position += 1
                continue
            advanced: list[tuple[int, int]] = []
            taken = ACCEPT
            for began, places in (*matches, (position, self._first)):
                reached = self._advance(places & places_of_char)
                if may_match and reached & ACCEPT:
                    match = StopMatch(self.pattern, position + 1 - began)
                    return Progress(position + 1, ()), num_read, match
                reached &= ~taken
                if reached:
                    taken |= reached
                    advanced.append((began, reached))
            position, matches = position + 1, tuple(advanced)
        return Progress(position, matches), len(text), None

    def _places(self, char: str) -> int:
        """The places that take this character."""
        places = self._places_of_char.get(char)
        if places is None:
            places = 0
            for contains, its_places in self._classes:
                if contains(char):
                    places |= its_places
            self._places_of_char[char] = places
        return places

    def _advance(self, places: int) -> int:
        """Where the match can go on after one of these places has taken a character."""
        reached = 0
        while places:
            lowest = places & -places
            reached |= self._following[lowest.bit_length() - 1]
            places ^= lowest
        return reached


class TooLargeError(Exception):
    """There is no room for so many elements."""


class Compiler:
    """Goes through a parsed expression from its end to its start: each part is told what follows (a set of
    places) and gives the places where it may begin, with what follows among them if it may be empty."""

    def __init__(self, max_elements: int) -> None:
        self.num_elements = 0
        self.following = [0]  # by place; ACCEPT takes no character
        self.classes: dict[tuple[str, int], int] = {}  # (expression for one character, flags) -> its places
        self._max_elements = max_elements

    def sequence(self, tree: Any, flags: int, then: int) -> int:
        for kind, argument in reversed(tree.data):
            then = self._element(str(kind), argument, flags, then)
        return then

    def _element(self, kind: str, argument: Any, flags: int, then: int) -> int:
        self.num_elements += 1
        if self.num_elements > self._max_elements:
            raise TooLargeError
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repetition(least, most, inner, flags, then)
        if kind == "BRANCH":
            begin = 0
            for branch in argument[1]:
                begin |= self.sequence(branch, flags, then)
            return begin
        if kind == "SUBPATTERN":
            _, added, removed, inner = argument
            if added & (re.ASCII | re.UNICODE):  # one takes the other's place
                flags &= ~(re.ASCII | re.UNICODE)
            return self.sequence(inner, (flags | added) & ~removed, then)
        if kind in _REFUSED:
            raise ValueError(
                f"stop expressions have no {_REFUSED[kind]}: a match must show in its own text alone, "
                "whatever is "
                "around it."
            )
        place = self._place(then)
        key = _one_character(kind, argument), flags
        self.classes[key] = self.classes.get(key, 0) | place
        return place

    def _repetition(self, least: int, most: int, inner: Any, flags: int, then: int) -> int:
        if not inner.data:
            return then
        if most is re_parser.MAXREPEAT:
            begin = self._loop(inner, flags, then)
            if least == 0:
                return begin | then
            least -= 1
        else:
            begin = then
            for _ in range(most - least):
                begin = self.sequence(inner, flags, begin) | then
        for _ in range(least):
            begin = self.sequence(inner, flags, begin)
        return begin

    def _loop(self, inner: Any, flags: int, then: int) -> int:
        """Once or more. Where it begins is known only at the end,
        so a place of its own stands for that meanwhile."""
        again = self._place(0)
        num_before = len(self.following)
        begin = self.sequence(inner, flags, then | again) & ~again
        for place in range(num_before, len(self.following)):
            if self.following[place] & again:
                self.following[place] = self.following[place] & ~again | begin
        return begin

    def _place(self, then: int) -> int:
        """A new place, as a set."""
        self.following.append(then)
        return 1 << (len(self.following) - 1)


def _one_character(kind: str, argument: Any) -> str:
    """The expression, in characters that have no meaning of their own,
    for what a parsed one allows at one place."""
    if kind == "ANY":
        return "."
    if kind == "LITERAL":
        return _escaped(argument)
    if kind == "NOT_LITERAL":
        return f"[^{_escaped(argument)}]"
    members = ""
    for member, value in argument:
        if str(member) == "NEGATE":
            members += "^"
        elif str(member) == "CATEGORY":
            members += _CATEGORIES[str(value)]
        else:
            members += "-".join(map(_escaped, value if str(member) == "RANGE" else [value]))
    return f"[{members}]"


def _escaped(code: int) -> str:
    return rf"\U{code:08x}"
