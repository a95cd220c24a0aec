"""A family of JSON schemas, generated from a seed:
nested, enums, bounds, references, alternatives, patterns, unicode.

Every schema has finite instances only, so that a random model comes to an end.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ["a", "name", "größe", "键", "x y", "пара", 'quo"te', "back\\slash", "🙂", "A_1"]
PATTERNS = ["^[a-c]{1,3}$", "^[0-9]{2}-[0-9]{2}$", "^(foo|bar)$", "^[^\\W\\d]{1,2}$", "^x.?$", "^[éüñ]{2}$"]
FORMATS = ["date", "time", "ipv4", "uuid"]


def integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    bounds = [{"minimum": low}, {"exclusiveMinimum": low}][rng.randrange(2)]
    high = low + rng.randint(5, 500)
    return {"type": "integer", **bounds, **[{"maximum": high}, {"exclusiveMaximum": high}][rng.randrange(2)]}


def number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-9, 9) / 4
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 40) / 8}


def multiple(rng: random.Random, depth: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([2, 5, 7, 10])}


def string(rng: random.Random, depth: int) -> Schema:
    shortest = rng.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 4)}


def pattern(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def formatted(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def enum(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = [*WORDS, None, True, 3, -1.5, [1, "ü"], {"k": None}]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def constant(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice([0, "ü", None, False, {"a": [1, 2]}, [[]]])}


def simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def array(rng: random.Random, depth: int) -> Schema:
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": schema(rng, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(0, 2),
    }


def pair(rng: random.Random, depth: int) -> Schema:
    return {
        "type": "array",
        "prefixItems": [schema(rng, depth - 1), schema(rng, depth - 1)],
        "items": False,
        "minItems": rng.randint(0, 2),
    }


def record(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def both(rng: random.Random, depth: int) -> Schema:
    name = rng.choice(WORDS)
    typed = {"type": "object", "properties": {name: schema(rng, depth - 1)}, "additionalProperties": False}
    return {"allOf": [typed, {"required": [name]}]}


def referenced(rng: random.Random, depth: int) -> Schema:
    """A reference to one of the definitions that every schema of the family brings."""
    return {"$ref": f"#/$defs/{rng.choice(['leaf', 'list', 'tree'])}"}


LEAVES = [integer, number, multiple, string, pattern, formatted, enum, constant, simple]
BRANCHES = [array, pair, record, either, both, referenced]


def schema(rng: random.Random, depth: int) -> Schema:
    return rng.choice(BRANCHES if depth > 0 and rng.random() < 0.7 else LEAVES)(rng, depth)


def make_schema(seed: int) -> Schema:
    """Schema number ``seed``: each kind is at the top of every fifteenth, whatever is below."""
    rng = random.Random(seed)
    top = [*BRANCHES, *LEAVES][seed % (len(BRANCHES) + len(LEAVES))]
    leaf = {"properties": {"leaf": {"type": "null"}}, "required": ["leaf"], "type": "object"}
    tree = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}
    definitions = {
        "leaf": rng.choice(LEAVES)(rng, 0),
        "list": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3},
        "tree": {"anyOf": [{**leaf, "additionalProperties": False}, tree]},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top(rng, 3), "$defs": definitions}
