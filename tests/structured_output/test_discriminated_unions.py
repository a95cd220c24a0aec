"""oneOf behind references: served where a required property tells the alternatives apart,
and refused otherwise."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from minivllm.errors import RequestError
from minivllm.structured_output.schemas.json_schema import sound_schema
from tests.structured_output.small_vocabulary import EOS, SmallVocabulary


class Cat(BaseModel, extra="forbid"):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel, extra="forbid"):
    kind: Literal["dog", "puppy"]
    tricks: list[str]


class Shelter(BaseModel, extra="forbid"):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def reachable(vocabulary: SmallVocabulary, schema: Any, text: str) -> bool:
    byte_ids = {written[0]: token for token, written in vocabulary.bytes.items() if len(written) == 1}
    tokens = [*(byte_ids[byte] for byte in text.encode()), *EOS]
    return vocabulary.grammar(json=schema).valid_drafts(tokens) == tokens


@pytest.mark.parametrize(
    ("pet", "is_valid"),
    [
        ({"kind": "cat", "lives": 7}, True),
        ({"kind": "dog", "tricks": ["sit"]}, True),
        ({"kind": "puppy", "tricks": []}, True),
        ({"kind": "dog", "lives": 7}, False),
        ({"kind": "cow", "lives": 7}, False),
        ({"lives": 7}, False),
    ],
)
def test_a_discriminated_union_of_pydantic_is_served(
    vocabulary: SmallVocabulary, pet: dict[str, Any], is_valid: bool
) -> None:
    schema = Shelter.model_json_schema()
    assert "oneOf" in json.dumps(schema) and "$ref" in json.dumps(schema["properties"])
    text = json.dumps({"pet": pet}, separators=(",", ":"))
    assert Draft202012Validator(schema).is_valid({"pet": pet}) == is_valid
    assert reachable(vocabulary, Shelter, text) == is_valid


def branch(*values: Any, name: str = "t", **changes: Any) -> dict[str, Any]:
    made = {"type": "object", "properties": {name: {"enum": list(values)}}, "required": [name]}
    return {**made, **changes}


REFERENCE = {"$ref": "#/$defs/deep"}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "other values": (branch("a", "b"), branch("c"), True),
    "a const": (branch("a"), branch(properties={"t": {"const": "b"}}), True),
    "values behind a reference": (branch("a"), branch(properties={"t": REFERENCE}), True),
    "null and texts": (branch(None), branch("null"), True),
    "truth and numbers": (branch(True), branch(1), True),
    "equal numbers": (branch(1), branch(1.0), False),
    "a value of both": (branch("a", "b"), branch("b", "c"), False),
    "a value behind a reference of both": (branch("deep"), branch(properties={"t": REFERENCE}), False),
    "not required": (branch("a"), branch("b", required=[]), False),
    "no object": (branch("a"), branch("b", type=["object", "null"]), False),
    "any type": (branch("a"), {**branch("b"), "type": ["object", "array"]}, False),
    "properties of other names": (branch("a"), branch("b", name="u"), False),
    "any value": (branch("a"), branch(properties={"t": {"type": "string"}}), False),
    "lists": (branch(["a"]), branch(["b"]), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_alternatives_are_taken_for_exclusive_only_if_they_are(name: str) -> None:
    one, other, are_exclusive = PAIRS[name]
    schema = {
        "oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/via"}],
        "$defs": {"one": one, "via": {"$ref": "#/$defs/other"}, "other": other, "deep": {"enum": ["deep"]}},
    }
    assert ("anyOf" in sound_schema(schema)) == are_exclusive


def test_every_pair_of_alternatives_counts() -> None:
    schema = {"oneOf": [branch("a"), branch("b"), branch("a", "c")]}
    assert "anyOf" not in sound_schema(schema)
    assert "oneOf" in sound_schema({"oneOf": [branch("a"), branch("b")], "anyOf": [branch("a", "b")]})


def test_a_draft_that_does_not_know_const_is_not_told_apart_by_it() -> None:
    constants = [branch(properties={"t": {"const": value}}) for value in "ab"]
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "oneOf": constants}
    assert "anyOf" not in sound_schema(schema) and "anyOf" in sound_schema({"oneOf": constants})


@pytest.mark.parametrize("target", ["#/$defs/loop", "#/nowhere", "elsewhere.json", 7])
def test_references_that_lead_nowhere_are_refused_as_ever(target: Any) -> None:
    schema = {"oneOf": [{"$ref": target}, branch("b")], "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    with pytest.raises(RequestError, match="refers to"):
        sound_schema(schema)


def test_overlapping_alternatives_behind_references_are_refused_still(vocabulary: SmallVocabulary) -> None:
    schema = {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": branch("x", "y"), "b": branch("y", "z")},
    }
    with pytest.raises(RequestError):
        vocabulary.grammar(json=schema)
