"""What passes a JSON schema is valid after json.loads: no second spelling of a key, no key counted twice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from minivllm.errors import RequestError
from minivllm.structured_output.schemas.json_schema import sound_schema
from tests.structured_output.small_vocabulary import EOS, SmallVocabulary

OPEN: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
RENAMED: dict[str, tuple[dict[str, Any], str]] = {
    "a letter as an escape": (OPEN, '{"\\u0061":"x"}'),
    "after the key itself": (OPEN, '{"a":1,"\\u0061":"x"}'),
    "a slash": ({"properties": {"/": {"type": "integer"}}}, '{"\\/":"x"}'),
    "an escape in capitals": ({"properties": {"\u00e4": {"type": "integer"}}}, '{"\\u00E4":"x"}'),
    "a surrogate pair": ({"properties": {"\U0001f642": {"type": "integer"}}}, '{"\\ud83d\\ude42":"x"}'),
    "a line break as an escape": ({"properties": {"\n": {"type": "integer"}}}, '{"\\u000a":"x"}'),
    "a control character": ({"properties": {"\x01": {"type": "integer"}}}, '{"\\u0001":"x"}'),
    "a quotation mark": ({"properties": {'"': {"type": "integer"}}}, '{"\\u0022":"x"}'),
    "a pattern": ({"patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061b":"x"}'),
    "a key that may not be": ({"properties": {"a": False}}, '{"\\u0061":1}'),
    "a required key": ({"required": ["a"], "additionalProperties": {"type": "integer"}}, '{"\\u0061":"x"}'),
    "deep inside": ({"properties": {"b": {"items": OPEN}}}, '{"b":[{"\\u0061":"x"}]}'),
}


def reachable(vocabulary: SmallVocabulary, schema: dict[str, Any], text: str) -> bool:
    byte_ids = {written[0]: token for token, written in vocabulary.bytes.items() if len(written) == 1}
    tokens = [*(byte_ids[byte] for byte in text.encode()), *EOS]
    return vocabulary.grammar(json=schema).valid_drafts(tokens) == tokens


@pytest.mark.parametrize("name", RENAMED)
def test_a_key_has_one_spelling(vocabulary: SmallVocabulary, name: str) -> None:
    schema, text = RENAMED[name]
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    assert not reachable(vocabulary, schema, text)


@pytest.mark.parametrize(
    "text", ['{"a":1}', '{"b":"x"}', '{"\\n\\"":1}', '{"a":1,"ä🙂/":[]}', '{"b":1,"b":2}']
)
def test_other_keys_are_as_free_as_before(vocabulary: SmallVocabulary, text: str) -> None:
    assert reachable(vocabulary, OPEN, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"minProperties": 2}, '{"b":1,"b":2}'),
        ({"required": ["a"], "minProperties": 3}, '{"a":1,"b":1,"b":2}'),
        ({"patternProperties": {"^b": {}}, "minProperties": 2}, '{"b":1,"b":2}'),
        ({"allOf": [{"minProperties": 2}]}, '{"b":1,"b":2}'),
    ],
)
def test_keys_that_may_come_twice_do_not_count_twice(schema: dict[str, Any], text: str) -> None:
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    with pytest.raises(RequestError, match="keys may come twice: name all of them but one in 'required'"):
        sound_schema(schema)


def test_one_more_property_than_the_required_ones_is_kept_to(vocabulary: SmallVocabulary) -> None:
    schema = {"type": "object", "required": ["a"], "minProperties": 2}
    assert reachable(vocabulary, schema, '{"a":1,"b":1}')
    assert not reachable(vocabulary, schema, '{"a":1}')
    assert reachable(vocabulary, {"type": "object", "minProperties": 1}, '{"b":1,"b":2}')


@pytest.mark.parametrize("keyword", ["const", "enum", "default", "examples"])
def test_a_reference_in_data_is_data(vocabulary: SmallVocabulary, keyword: str) -> None:
    value = {"$ref": "https://example.com/nowhere"}
    schema = {"anyOf": [{keyword: [value] if keyword in ("enum", "examples") else value, "type": "object"}]}
    assert reachable(vocabulary, schema, json.dumps(value))
    named = {
        "type": "object",
        "properties": {keyword: {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    }
    assert reachable(vocabulary, named, f'{{"{keyword}":1}}')
    assert not reachable(vocabulary, named, f'{{"{keyword}":"x"}}')


ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "itself": ({"$ref": "#"}, r"to itself without end"),
    "in a circle": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "itself",
    ),
    "in allOf": ({"allOf": [{"$ref": "#"}]}, r"at \$\.allOf\[0\] refers"),
    "in anyOf": ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "itself"),
    "what is required": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "No finite value",
    ),
    "an item": (
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1, "$defs": {"a": {"$ref": "#"}}},
        "No f",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_schemas_without_an_end_are_refused(name: str) -> None:
    schema, complaint = ENDLESS[name]
    with pytest.raises(RequestError, match=complaint):
        sound_schema(schema)


def test_recursion_that_ends_is_kept_to(vocabulary: SmallVocabulary) -> None:
    node = {
        "type": "object",
        "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["n"],
    }
    assert reachable(vocabulary, node, '{"n":{"n":null}}')
    assert not reachable(vocabulary, node, '{"n":{"n":1}}')


def test_references_are_json_pointers(vocabulary: SmallVocabulary) -> None:
    schema = {"$ref": "#/$defs/a~1b%25/0", "$defs": {"a/b%": [{"type": "integer"}], "a~1b%25": [{}]}}
    assert reachable(vocabulary, schema, "1")
    assert not reachable(vocabulary, schema, "null")
