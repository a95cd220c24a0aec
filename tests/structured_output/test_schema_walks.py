"""Random schemas, random walks through their masks: what ends is valid, judged by jsonschema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from minivllm.errors import RequestError
from tests.structured_output.small_vocabulary import EOS, SmallVocabulary, allowed

KEYS = st.sampled_from(["a", "b", "ab", "/", "ä", '"', ""])
BOUND = st.one_of(st.integers(-20, 20), st.floats(-5, 5), st.sampled_from([0.1, 0.3, 1e-9, -0.0, 1e17]))
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer"])},
    optional={
        "minimum": BOUND,
        "exclusiveMinimum": BOUND,
        "maximum": BOUND,
        "exclusiveMaximum": BOUND,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25]),
    },
)
PATTERNS = [
    "^[ab]+$",
    "a",
    r"^\w$",
    r"^\W\D?$",
    r"^[^\s\d]{2}$",
    r"^.\S$",
    "^(a|b/)*$",
    "^a|b$",
    r"^\u00e4",
    "[[&&]",
]
STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "pattern": st.sampled_from(PATTERNS),
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(1, 5),
        "format": st.sampled_from(["date", "date-time", "ipv4", "ipv6", "email", "uuid", "duration"]),
    },
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from([0.5, 1.0, "a", "ä\n", "/"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=2)),
    max_leaves=3,
)
LEAVES = st.one_of(
    NUMBERS,
    STRINGS,
    st.booleans(),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, VALUES),
    st.just({"type": ["null", "boolean"]}),
)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(KEYS, inner, max_size=3),
            "required": st.lists(KEYS, max_size=2, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "^b", "b$"]), inner, max_size=2),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
        },
    )
    together = st.builds(
        lambda kind, parts, rest: {**rest, kind: parts},
        st.sampled_from(["anyOf", "allOf", "oneOf"]),
        st.lists(inner, min_size=1, max_size=3),
        st.one_of(st.just({}), objects),
    )
    references = st.just({"$ref": "#/$defs/x"})
    return st.one_of(objects, objects, arrays, together, references)


SCHEMAS = st.recursive(LEAVES, branches, max_leaves=6).filter(lambda schema: isinstance(schema, dict))


def walk(vocabulary: SmallVocabulary, schema: dict[str, Any], seed: int) -> str | None:
    """A text that the masks let through to its end;
    None if it did not come to one, or if the schema is refused."""
    try:
        grammar = vocabulary.grammar(json=schema, disable_any_whitespace=seed % 2 == 0)
    except RequestError:
        return None
    rng, text = random.Random(seed), b""
    for _ in range(60):
        [mask] = allowed(grammar)
        if mask & set(EOS) and (mask == set(EOS) or rng.random() < 0.5):
            return text.decode()
        # Bytes that close something are tried more often than others, so that the walk ends.
        closing = [token for token in mask if vocabulary.bytes.get(token, b"")[:1] in (b"}", b"]", b'"')]
        token = rng.choice(sorted(closing if closing and rng.random() < 0.3 else mask - set(EOS)))
        if grammar.append(token) is not None:
            return None
        text += vocabulary.bytes[token]
    return None


def check(vocabulary: SmallVocabulary, schema: dict[str, Any], leaf: Any, seed: int) -> None:
    whole = {**schema, "$defs": {"x": leaf}}
    text = walk(vocabulary, whole, seed)
    if text is not None:
        Draft202012Validator(whole, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
            json.loads(text)
        )


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, LEAVES, st.integers(0, 2**32))
def test_walks_end_in_valid_values(
    vocabulary: SmallVocabulary, schema: dict[str, Any], leaf: Any, seed: int
) -> None:
    check(vocabulary, schema, leaf, seed)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, LEAVES, st.integers(0, 2**32))
def test_many_walks_end_in_valid_values(
    vocabulary: SmallVocabulary, schema: dict[str, Any], leaf: Any, seed: int
) -> None:
    check(vocabulary, schema, leaf, seed)
