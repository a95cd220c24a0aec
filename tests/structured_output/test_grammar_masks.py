"""The mask of a grammar, judged by brute force:
which tokens keep the text the beginning of an allowed one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from minivllm.errors import RequestError
from minivllm.request import RequestStatus, Stop
from minivllm.sampling_params import ToolCalls
from tests.structured_output.small_vocabulary import EOS, VOCAB_SIZE, SmallVocabulary, allowed

CHOICES = ["red", "green", "greenish", "grün", "over the", "你好", 'say "hi"\n', "back\\slash", "/slash/"]


def digits_and_letters(text: bytes) -> bool:
    """Beginnings of [0-9]{2}(ab|cd){1,2}[.]?"""
    if len(text) > 7 or any(not 48 <= byte <= 57 for byte in text[:2]):
        return False
    words = [
        first + second + dot
        for first in (b"ab", b"cd")
        for second in (b"", b"ab", b"cd")
        for dot in (b"", b".")
    ]
    return any(word.startswith(text[2:]) for word in words)


def is_whole(text: bytes) -> bool:
    body = text[2:].removesuffix(b".")
    return (
        len(text) >= 4
        and digits_and_letters(text)
        and body in (b"ab", b"cd", b"abab", b"abcd", b"cdab", b"cdcd")
    )


def beginnings_of_choices(text: bytes) -> bool:
    return any(choice.encode().startswith(text) for choice in CHOICES)


CASES: dict[str, tuple[dict[str, object], Callable[[bytes], bool], Callable[[bytes], bool]]] = {
    "regex": ({"regex": "[0-9]{2}(ab|cd){1,2}[.]?"}, digits_and_letters, is_whole),
    "lark": ({"grammar": 'start: D D w w? "."?\nD: /[0-9]/\nw: "ab" | "cd"'}, digits_and_letters, is_whole),
    "gbnf": ({"grammar": 'root ::= [0-9] [0-9] w w? "."?\nw ::= "ab" | "cd"'}, digits_and_letters, is_whole),
    "choice": (
        {"choice": CHOICES},
        beginnings_of_choices,
        lambda text: text.decode(errors="replace") in CHOICES,
    ),
    "enum": (
        {"json": {"enum": ["a", "grün", 12, 123]}, "disable_any_whitespace": True},
        lambda text: any(value.startswith(text) for value in (b'"a"', '"grün"'.encode(), b"12", b"123")),
        lambda text: text in (b'"a"', '"grün"'.encode(), b"12", b"123"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_allowed_exactly_if_the_text_stays_viable(vocabulary: SmallVocabulary, name: str) -> None:
    structured, is_viable, may_end = CASES[name]
    rng = random.Random(0)
    for _ in range(12):
        grammar, text = vocabulary.grammar(**structured), b""
        while True:
            [mask] = allowed(grammar)
            expected = {token for token, piece in vocabulary.bytes.items() if is_viable(text + piece)}
            assert mask == expected | (set(EOS) if may_end(text) else set()), text
            token = rng.choice(sorted(mask))
            stop = grammar.append(token)
            if token in EOS:
                assert stop == Stop(RequestStatus.FINISHED_STOPPED)
                break
            assert stop is None
            text += vocabulary.bytes[token]


def test_where_nothing_can_follow_only_the_end_of_sequence_is_allowed(vocabulary: SmallVocabulary) -> None:
    grammar = vocabulary.grammar(regex="a")
    grammar.append(vocabulary.tokenizer.encode("a")[0])
    assert allowed(grammar) == [set(EOS)]


def test_special_tokens_and_ids_behind_the_tokenizer_are_never_allowed(vocabulary: SmallVocabulary) -> None:
    [mask] = allowed(vocabulary.grammar(regex=r"(.|\n)*"))
    assert mask & vocabulary.tokenizer.special_ids == set(EOS)
    assert max(mask) < vocabulary.tokenizer.vocab_size < VOCAB_SIZE


def test_each_drafted_position_has_the_mask_it_has_once_the_drafts_are_accepted(
    vocabulary: SmallVocabulary,
) -> None:
    rng = random.Random(1)
    for _ in range(30):
        drafted, stepped = vocabulary.grammar(regex="[0-9]{2}(ab|cd){1,2}[.]?"), []
        follower = vocabulary.grammar(regex="[0-9]{2}(ab|cd){1,2}[.]?")
        tokens: list[int] = []
        while not tokens or tokens[-1] not in EOS:
            [mask] = allowed(follower)
            stepped.append(mask)
            tokens.append(rng.choice(sorted(mask)))
            follower.append(tokens[-1])
        start = rng.randrange(len(tokens))
        for token in tokens[:start]:
            drafted.append(token)
        assert allowed(drafted, tokens[start:-1]) == stepped[start:]
        # Nothing is remembered of the drafts: the state is as before.
        assert allowed(drafted) == [stepped[start]]
        for token in tokens[start:-1]:
            assert drafted.append(token) is None


def test_masks_behind_a_draft_that_may_not_come_are_left_open(vocabulary: SmallVocabulary) -> None:
    encode = vocabulary.tokenizer.encode
    grammar = vocabulary.grammar(regex="[0-9]{3}x")
    drafts = [encode("7")[0], encode("x")[0], encode("7")[0]]
    rows = allowed(grammar, drafts)
    assert rows[1] < rows[0] < set(range(VOCAB_SIZE))
    assert rows[2] == rows[3] == set(range(VOCAB_SIZE))
    assert grammar.valid_drafts(drafts) == drafts[:1]
    assert allowed(grammar) == rows[:1]


def test_forced_tokens_are_those_that_leave_no_choice(vocabulary: SmallVocabulary) -> None:
    grammar = vocabulary.grammar(
        json={
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        disable_any_whitespace=True,
    )
    forced = grammar.forced_tokens()
    written = b"".join(vocabulary.bytes[token] for token in forced)
    assert forced
    assert b'{"a":'.startswith(written)
    assert grammar.valid_drafts(forced) == forced


def test_a_token_that_may_not_come_ends_the_request_with_an_error(vocabulary: SmallVocabulary) -> None:
    grammar = vocabulary.grammar(regex="a+")
    stop = grammar.append(vocabulary.tokenizer.encode("b")[0])
    assert stop is not None
    assert stop.status is RequestStatus.FINISHED_ERROR
    assert stop.error is not None
    assert "could not be continued" in stop.error
    assert allowed(grammar) == [set(range(VOCAB_SIZE))]  # the mask thread does not fail on it


def test_a_tag_that_is_a_token_of_its_own_may_be_that_token(word_tokenizer: Path, tmp_path: Path) -> None:
    """Or be spelt out, as any text may; before anything else it is no text at all."""
    shutil.copytree(word_tokenizer, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.add_tokens([AddedToken("<tool_call>", special=False)])
    backend.save(str(path))
    vocabulary = SmallVocabulary(tmp_path)
    tag = backend.token_to_id("<tool_call>")
    spelt = vocabulary.tokenizer.encode("<", add_special_tokens=False)
    calls = ToolCalls(calls=[("<tool_call>", '{"enum": [1]}', "")], answer='{"type": "boolean"}')
    grammar = vocabulary.grammar(tool_calls=calls)
    [first] = allowed(grammar)
    assert {tag, *spelt} < first and vocabulary.tokenizer.encode("t", add_special_tokens=False)[0] in first
    assert grammar.append(tag) is None
    assert allowed(grammar) == [set(vocabulary.tokenizer.encode("1", add_special_tokens=False))]


def test_a_tool_whose_schema_cannot_be_kept_to_is_refused(vocabulary: SmallVocabulary) -> None:
    never = '{"type": "array", "items": {"enum": []}, "minItems": 1}'
    for schema, complaint in (('{"not": {}}', "'not' at"), (never, r"at \$\.items")):
        with pytest.raises(RequestError, match=complaint):
            vocabulary.grammar(tool_calls=ToolCalls(calls=[("", "{}", ""), ("", schema, "")], answer="{}"))
