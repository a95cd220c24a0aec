"""Finds what a JSON schema asks for and no grammar can promise, before anything is compiled.

A keyword that is silently ignored would give output that does not validate, so it is refused with its path. What is
merely unknown is an annotation, as the JSON Schema specification has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from minivllm.errors import RequestError

MAX_SCHEMA_DEPTH = 100

UNSUPPORTED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
"""Assertions that cannot be checked while text grows from left to right in a context-free grammar."""

_SCHEMA = ("additionalProperties", "items", "additionalItems")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def check_json_schema(schema: dict[str, Any]) -> None:
    """Raises RequestError naming the path of the first keyword that cannot be kept to, or of a reference elsewhere."""
    for path, subschema in subschemas(schema):
        for keyword in subschema:
            if keyword in UNSUPPORTED:
                raise RequestError(
                    f"The JSON schema uses {keyword!r} at {path}, which structured outputs do not support: leave it "
                    "out and check the output afterwards."
                )
        if subschema.get("uniqueItems") is True:
            raise RequestError(
                f"The JSON schema uses 'uniqueItems' at {path}, which structured outputs do not support: leave it out "
                "and check the output afterwards."
            )
        reference = subschema.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise RequestError(
                f"The JSON schema refers to {reference!r} at {path}, but only references within the schema, such as "
                "'#/$defs/name', are followed: copy that schema into this one."
            )


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of the schema itself and all inside it, outer ones first; paths look like ``$.properties.name``.

    Values of enum, const, default and examples are data, not schemas. Raises RequestError if it is nested too deeply.
    """
    waiting: list[tuple[str, Any, int]] = [("$", schema, 0)]
    while waiting:
        path, current, depth = waiting.pop()
        if not isinstance(current, dict):
            continue
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(
                f"The JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels: flatten it with $ref."
            )
        yield path, current
        inner: list[tuple[str, Any]] = []
        for keyword, value in current.items():
            place = f"{path}.{keyword}"
            if keyword in _SCHEMA_MAPS and isinstance(value, dict):
                inner += [(f"{place}{_step(name)}", child) for name, child in value.items()]
            elif (keyword in _SCHEMA_LISTS or keyword == "items") and isinstance(value, list):
                inner += [(f"{place}[{index}]", child) for index, child in enumerate(value)]
            elif keyword in _SCHEMA:
                inner.append((place, value))
        waiting += [(place, child, depth + 1) for place, child in reversed(inner)]


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name, ensure_ascii=False)}]"
