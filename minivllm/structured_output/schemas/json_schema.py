"""A JSON schema in the form the grammar compiler gets it:
each keyword in it is kept to, or the schema is refused.

Text that the compiled schema lets through is valid once ``json.loads`` has read it (of equal keys the last
one counts). The compiler, llguidance, gets what it is known to keep to: keywords of draft 2020-12, references
to definitions at the top, bounds that survive rounding, expressions written out. Drafts 4 to 2019-09 are read
by their ``$schema``.

Supported: type, enum, const, anyOf, allOf, oneOf (alternatives that exclude each other; references must do so
by a required property with const or enum), $ref within the schema;
properties (written in this order), required, additionalProperties, patternProperties, minProperties,
maxProperties; items, prefixItems, additionalItems, minItems, maxItems; minLength, maxLength, pattern, format;
minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf. ``uniqueItems: false`` and annotations
change nothing.

What is other than the name may suggest, always towards fewer texts:
- Strings and keys have one spelling:
  no ``\\/``, no ``\\uXXXX``, so no control characters but ``\\b \\t \\n \\f \\r``.
- minProperties counts keys, and other names than required ones may come twice: it may exceed required by one.
- pattern matches anywhere unless it has ``^`` and ``$``,
  which may stand only where a text begins and ends. ``\\d``,
  ``\\w`` are ASCII; ``\\D``, ``\\W``, ``\\s``, ``\\S`` leave out what ECMA-262 and Python read differently.
- format asserts where it is one of FORMATS in patterns.py, which says how they are narrowed.
  Others are annotations.
- Bounded numbers are written without exponent, and bounds are cut to ±2**53.
  An exclusive bound is kept by the next
  number of 15 digits, that of 0 by 1e-20.
  An unbounded number may have an exponent that no float has: Python reads it as inf.
- multipleOf counts the decimals that are written, as 0.3 is a multiple of 0.1 there, but not in floats.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from minivllm.errors import RequestError
from minivllm.structured_output.schemas.patterns import CONTROLS, FORMATS, to_rust

MAX_SCHEMA_DEPTH = 100
MAX_EXACT = 2**53
"""Whole numbers up to here are exact as floats."""
MAX_DIGITS, MAX_PLACES = 15, 20
"""Decimals of so many digits, with so many decimal places, are read exactly by the compiler."""
MAX_COMMON_MULTIPLE = 2**16
"""The compiler multiplies two multipleOf in 32 bits."""
MAX_ROUNDS = 20

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

_ASSERTED_ONCE = ("contentEncoding", "contentMediaType")
"""Assertions up to draft 7, annotations since."""
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf")
_SCHEMA_MAPS = ("properties", "patternProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Schema = dict[str, Any]


def sound_schema(schema: Schema) -> Schema:
    """The schema as the compiler gets it. Raises RequestError naming the path of what cannot be kept to."""
    return _Rewriter(schema).rewrite()


def subschemas(schema: Any) -> Iterator[tuple[str, Schema]]:
    """(path, schema) of a schema and all inside it, outer ones first; paths look like ``$.properties.name``.

    Values of enum, const, default and examples are data, not schemas.
    """
    waiting = [("$", schema)]
    while waiting:
        path, current = waiting.pop()
        if isinstance(current, dict):
            yield path, current
            waiting += reversed(list(_children(current, path)))


def _children(schema: Schema, path: str) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        place = f"{path}.{keyword}"
        if keyword in (*_SCHEMA_MAPS, "$defs", "definitions") and isinstance(value, dict):
            yield from ((f"{place}{_step(name)}", child) for name, child in value.items())
        elif keyword in (*_SCHEMA_LISTS, "prefixItems", "items") and isinstance(value, list):
            yield from ((f"{place}[{index}]", child) for index, child in enumerate(value))
        elif keyword in ("additionalProperties", "items", "additionalItems"):
            yield place, value


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self._root = root
        declared = str(root.get("$schema", ""))
        self._is_old = any(f"/draft-{number}/" in declared for number in ("03", "04", "06", "07"))
        self._knows_const = not any(f"/draft-{number}/" in declared for number in ("03", "04"))
        self._is_tuple_draft = self._is_old or "/draft/2019-09/" in declared
        self._names: dict[str, str] = {}
        self._waiting: list[tuple[str, Any, str]] = []
        self._here = "#"
        self._in_place: dict[str, list[tuple[str, str]]] = {}
        """Definitions that one refers to without anything in between, with the path of the reference."""
        self._multiples: set[Fraction] = set()

    def rewrite(self) -> Schema:
        written = self._schema(self._root, "$", in_place=True)
        definitions: dict[str, Any] = {}
        while self._waiting:
            self._here, target, path = self._waiting.pop()
            definitions[self._names[self._here]] = self._schema(target, path, in_place=True)
        self._check_loops()
        self._check_multiples()
        _check_end(written, definitions)
        return {**written, "$defs": definitions} if definitions else written

    def _schema(self, schema: Any, path: str, *, in_place: bool = False, depth: int = 0) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refusal(path, f"has {_shown(schema)}", "a schema is an object, true or false")
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(
                f"The JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels: flatten it with $ref."
            )
        if (
            schema is not self._root
            and _renames(schema)
            and any("$ref" in inner for _, inner in subschemas(schema))
        ):
            raise _refusal(path, "has an '$id' that references inside of it start from", "leave it out")
        written: Schema = {}
        conjuncts: list[Schema] = []
        for keyword, value in schema.items():
            place = f"{path}.{keyword}"
            is_asserted = keyword in _ASSERTED_ONCE and self._is_old
            if keyword in UNSUPPORTED or is_asserted or (keyword == "uniqueItems" and value is not False):
                raise RequestError(
                    f"The JSON schema uses {keyword!r} at {path}, which structured outputs do not support: "
                    "leave it "
                    "out and check the output afterwards."
                )
            if keyword == "type":
                written[keyword] = _types(value, path)
            elif keyword in ("const", "enum"):
                if keyword == "enum" and not isinstance(value, list):
                    raise _refusal(path, f"has {_shown(value)} as 'enum'", "it is a list of values")
                written[keyword] = _data(value, place)
            elif keyword in _COUNTS:
                written[keyword] = _count(keyword, value, path)
            elif keyword == "required":
                written[keyword] = _names(value, path)
            elif keyword == "multipleOf":
                written[keyword] = self._multiple(value, path)
            elif keyword == "pattern":
                written[keyword] = _expression(value, path)
            elif keyword == "format":
                conjuncts += _format(value, schema, path)
            elif keyword == "$ref":
                written[keyword] = self._reference(value, path, in_place)
            elif keyword in _SCHEMA_LISTS:
                if not isinstance(value, list) or not value:
                    raise _refusal(path, f"has {_shown(value)} as {keyword!r}", "it is a list of schemas")
                written[keyword] = [
                    self._schema(child, f"{place}[{index}]", in_place=in_place, depth=depth + 1)
                    for index, child in enumerate(value)
                ]
                if keyword == "oneOf" and "anyOf" not in schema and self._exclude_each_other(value):
                    written["anyOf"] = written.pop("oneOf")  # the same, and the compiler need not prove it
            elif keyword in _SCHEMA_MAPS:
                written[keyword] = self._map(keyword, value, place, depth)
            elif keyword == "additionalProperties":
                written[keyword] = self._schema(value, place, depth=depth + 1)
            elif keyword in ("prefixItems", "items", "additionalItems"):
                written |= self._items(keyword, schema, place, depth)
        written |= _bounds(schema, path)
        if (
            "minProperties" in written
            and written["minProperties"] > len(set(written.get("required", ()))) + 1
        ):
            raise _refusal(
                path,
                f"has 'minProperties' {written['minProperties']}, but keys may come twice",
                "name all of them but one in 'required'",
            )
        for conjunct in conjuncts:
            if "pattern" in written:
                written["allOf"] = [*written.get("allOf", ()), conjunct]
            else:
                written |= conjunct
        return written

    def _exclude_each_other(self, alternatives: list[Any]) -> bool:
        """True if these are objects that a required property tells apart: each has its own values for it.

        The compiler does not follow references,
        so it would refuse the schema of pydantic for a union of models.
        """
        tags = [self._tags(alternative) for alternative in alternatives]
        return all(
            any(values.isdisjoint(other[name]) for name, values in one.items() if name in other)
            for one, other in combinations(tags, 2)
        )

    def _tags(self, schema: Any) -> dict[str, set[tuple[str, Any]]]:
        """Required properties of an object -> the values that its 'const' or 'enum' leaves them; {} for any
        other schema, as what is no object has none of the properties."""
        schema = self._resolved(schema)
        properties, required = schema.get("properties"), schema.get("required")
        if schema.get("type") not in ("object", ["object"]):
            return {}
        if not isinstance(properties, dict) or not isinstance(required, list):
            return {}
        found = {}
        for name, inner in properties.items():
            tag = self._resolved(inner)
            values = [tag["const"]] if "const" in tag and self._knows_const else tag.get("enum")
            if name not in required or not isinstance(values, list):
                continue
            if not any(isinstance(one, (dict, list)) for one in values):
                found[name] = {
                    ("number" if type(one) in (int, float) else type(one).__name__, one) for one in values
                }
        return found

    def _resolved(self, schema: Any) -> Schema:
        """The target of a reference, or else the schema; {} if that cannot be used."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(schema, dict):
                break
            if "$ref" not in schema:
                return schema
            way = self._way(schema["$ref"])
            schema = way[-1] if way else None
        return {}

    def _way(self, reference: Any) -> list[Any]:
        """The path of a reference from the top of the schema, its target last; empty if there is none."""
        if not _is_local(reference):
            return []
        way: list[Any] = [self._root]
        for step in reference.split("/")[1:]:
            here, key = way[-1], unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                way.append(here[key])
            elif isinstance(here, list) and key.isdecimal() and int(key) < len(here):
                way.append(here[int(key)])
            else:
                return []
        return way

    def _map(self, keyword: str, value: Any, path: str, depth: int) -> Schema:
        if not isinstance(value, dict):
            raise _refusal(path, f"has {_shown(value)}", "it is an object whose values are schemas")
        written: Schema = {}
        for name, child in value.items():
            place = f"{path}{_step(name)}"
            key = _expression(name, place, exact=True) if keyword == "patternProperties" else name
            if key in written:
                raise _refusal(place, "has one expression written in two ways", "write it once")
            written[key] = self._schema(child, place, depth=depth + 1)
        return written

    def _items(self, keyword: str, schema: Schema, path: str, depth: int) -> Schema:
        """A tuple is a list of items and additionalItems in older drafts,
        prefixItems and items in the latest."""
        value = schema[keyword]
        has_tuple = isinstance(schema.get("items"), list)
        if keyword == "prefixItems" and self._is_tuple_draft:
            return {}
        if keyword == "prefixItems" and has_tuple:
            raise _refusal(path, "stands beside a list of 'items'", "use one of them")
        if keyword == "additionalItems":
            return {"items": self._schema(value, path, depth=depth + 1)} if has_tuple else {}
        if keyword == "prefixItems" or has_tuple:
            if not isinstance(value, list):
                raise _refusal(path, f"has {_shown(value)}", "it is a list of schemas")
            children = [
                self._schema(child, f"{path}[{index}]", depth=depth + 1) for index, child in enumerate(value)
            ]
            return {"prefixItems": children}
        return {"items": self._schema(value, path, depth=depth + 1)}

    def _reference(self, value: Any, path: str, in_place: bool) -> str:
        if not _is_local(value):
            raise RequestError(
                f"The JSON schema refers to {_shown(value)} at {path}, but only references within the "
                "schema, such as "
                "'#/$defs/name', are followed: copy that schema into this one."
            )
        if in_place:
            self._in_place.setdefault(self._here, []).append((value, path))
        if value == "#":
            return value
        if value not in self._names:
            way = self._way(value)
            if not way:
                raise _refusal(path, f"refers to {_shown(value)}", "there is nothing in the schema")
            if any(isinstance(one, dict) and _renames(one) for one in way[1:]):
                raise _refusal(
                    path,
                    f"refers to {_shown(value)}, which has an '$id'",
                    "leave '$id' out inside of the schema",
                )
            stem = re.sub("[^0-9A-Za-z]", "", value.rpartition("/")[2])
            self._names[value] = f"{stem}_{len(self._names)}"
            self._waiting.append((value, way[-1], value))
        return f"#/$defs/{self._names[value]}"

    def _multiple(self, value: Any, path: str) -> float:
        _check_number("multipleOf", value, path)
        if value <= 0:
            raise _refusal(path, f"has 'multipleOf' {value}", "it is a number above 0")
        value = _exact(value, path)
        self._multiples.add(Fraction(repr(value)))
        return value

    def _check_multiples(self) -> None:
        scale = math.lcm(*(multiple.denominator for multiple in self._multiples))
        common = math.lcm(*(int(multiple * scale) for multiple in self._multiples)) if self._multiples else 1
        if common >= MAX_COMMON_MULTIPLE:
            raise RequestError(
                "The JSON schema's values of 'multipleOf', taken together, have too many digits for "
                "structured outputs:"
                " leave some of them out and check the output afterwards."
            )

    def _check_loops(self) -> None:
        """No schema stands for itself."""
        try:
            TopologicalSorter(
                {name: dict(references) for name, references in self._in_place.items()}
            ).prepare()
        except CycleError as error:
            following, name = error.args[1][:2]
            place = dict(self._in_place[name])[following]
            raise _refusal(
                place, f"refers to {_shown(following)}, and so to itself without end", "end it"
            ) from None


def _check_end(root: Schema, definitions: dict[str, Any]) -> None:
    """Some value is finite. Which definitions have one is found in rounds;
    past the last round, no more is refused."""
    ends: set[str] = set()
    for _ in range(MAX_ROUNDS):
        found = {
            name for name in reversed(definitions) if name not in ends and _has_end(definitions[name], ends)
        }
        root_ends = "#" in ends or _has_end(root, ends)
        if root_ends:
            return
        if not found:
            raise RequestError(
                "No finite value keeps to the JSON schema: what it requires refers back to itself at every "
                "turn. Make "
                "something optional, or give it an alternative."
            )
        ends |= found


def _has_end(schema: Any, ends: set[str]) -> bool:
    """Some value of the schema is finite, as far as those in ``ends`` are known to have one."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ends:
        return False
    if not all(_has_end(one, ends) for one in schema.get("allOf", ())):
        return False
    if any(
        not any(_has_end(one, ends) for one in schema[name]) for name in ("anyOf", "oneOf") if name in schema
    ):
        return False
    types = schema.get("type", _TYPES)
    if set(types if isinstance(types, (list, tuple)) else [types]) - {"array", "object"}:
        return True
    if "object" in types:
        properties = schema.get("properties", {})
        if all(_has_end(properties.get(name, True), ends) for name in schema.get("required", ())):
            return True
    if "array" in types:
        fewest, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed = [*first[:fewest], *([schema.get("items", True)] if fewest > len(first) else [])]
        return all(_has_end(one, ends) for one in needed)
    return False


def _is_local(reference: Any) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _renames(schema: Schema) -> bool:
    """True if references inside start from here, not from the top."""
    return any(isinstance(name := schema.get(key), str) and not name.startswith("#") for key in ("$id", "id"))


def _types(value: Any, path: str) -> Any:
    for name in value if isinstance(value, list) else [value]:
        if name not in _TYPES:
            raise _refusal(path, f"has the type {_shown(name)}", f"known are {', '.join(_TYPES)}")
    return value


def _count(keyword: str, value: Any, path: str) -> int:
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not is_whole or not 0 <= value <= MAX_EXACT:
        raise _refusal(path, f"has {_shown(value)} as {keyword!r}", "it is a whole number from 0")
    return int(value)


def _names(value: Any, path: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _refusal(path, f"has {_shown(value)} as 'required'", "it is a list of names")
    return value


def _expression(value: Any, path: str, *, exact: bool = False) -> str:
    if not isinstance(value, str):
        raise _refusal(path, f"has {_shown(value)} as 'pattern'", "it is a text")
    try:
        return to_rust(value, exact=exact)
    except ValueError as error:
        raise _refusal(path, "has an expression that cannot be kept to", str(error)) from None


def _format(value: Any, schema: Schema, path: str) -> list[Schema]:
    """Formats are of strings: beside other types they say nothing. An unknown one is an annotation."""
    types = schema.get("type", "string")
    if not isinstance(value, str):
        raise _refusal(path, f"has {_shown(value)} as 'format'", "it is a name")
    if "string" not in (types if isinstance(types, list) else [types]) or value not in FORMATS:
        return []
    return [{"pattern": f"^{FORMATS[value]}$"}]


def _bounds(schema: Schema, path: str) -> Schema:
    """minimum and maximum of numbers, so that every decimal between them is so as a float as well."""
    given = {keyword: schema[keyword] for keyword in _BOUNDS if keyword in schema}
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(given.get(exclusive), bool):  # as draft 4 has it
            is_exclusive = given.pop(exclusive)
            if is_exclusive and inclusive in given:
                given[exclusive] = given.pop(inclusive)
    for keyword, value in given.items():
        _check_number(keyword, value, path)
    low = [
        _bound(given[name], name, upwards=True) for name in ("minimum", "exclusiveMinimum") if name in given
    ]
    high = [
        _bound(given[name], name, upwards=False) for name in ("maximum", "exclusiveMaximum") if name in given
    ]
    if max(low, default=0) > MAX_EXACT or min(high, default=0) < -MAX_EXACT:
        raise _refusal(
            path, "asks for numbers beyond ±2**53", "structured outputs do not keep to such bounds"
        )
    written: Schema = {}
    if low:
        written["minimum"] = max(*low, -MAX_EXACT)
    if high:
        written["maximum"] = min(*high, MAX_EXACT)
    return written


def _bound(value: float, keyword: str, *, upwards: bool) -> float:
    """The next inclusive bound with digits that the compiler reads exactly: 15 digits, 20 decimal places."""
    is_exclusive = keyword.startswith("exclusive")
    if not is_exclusive and (value == int(value) or abs(value) > MAX_EXACT):
        return int(value)
    exact = Decimal(repr(value))
    last_place = max(exact.adjusted() - MAX_DIGITS + 1, -MAX_PLACES) if value else -MAX_PLACES
    quantum = Decimal((0, (1,), last_place))
    steps = (exact / quantum).to_integral_value(ROUND_CEILING if upwards else ROUND_FLOOR)
    if is_exclusive and float(steps * quantum) == value:
        steps += 1 if upwards else -1
    bound = float(steps * quantum)
    return int(bound) if bound.is_integer() else bound


def _check_number(keyword: str, value: Any, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise _refusal(path, f"has {_shown(value)} as {keyword!r}", "it is a number")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _data(value: Any, path: str, depth: int = 0) -> Any:
    """A value of const or enum. Numbers that the compiler would round to others,
    and texts it cannot write, are refused."""
    if depth > MAX_SCHEMA_DEPTH:
        raise _refusal(path, "is nested too deeply", f"{MAX_SCHEMA_DEPTH} levels are supported")
    if isinstance(value, dict):
        return {name: _data(one, path, depth + 1) for name, one in value.items()}
    if isinstance(value, list):
        return [_data(one, path, depth + 1) for one in value]
    if isinstance(value, str) and CONTROLS.search(value):
        raise _refusal(
            path, f"has {json.dumps(value)[:60]}", "structured outputs cannot write its control characters"
        )
    return value if isinstance(value, (bool, str)) or value is None else _exact(value, path)


def _exact(value: float, path: str) -> float:
    if _is_finite(value) and value == int(value) and abs(value) <= MAX_EXACT:
        return int(value)
    digits = Decimal(repr(value)).as_tuple()
    if (
        isinstance(value, int)
        or len(digits.digits) > MAX_DIGITS
        or not -MAX_PLACES <= int(digits.exponent) <= 0
    ):
        raise _refusal(
            path,
            f"has the number {_shown(value)}",
            f"structured outputs know whole numbers up to 2**53 and others of up to {MAX_DIGITS} digits",
        )
    return value


def _refusal(path: str, what: str, advice: str) -> RequestError:
    return RequestError(f"The JSON schema at {path} {what}: {advice}.")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "a value of many levels"
    return text if len(text) <= 60 else f"{text[:60]}…"


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name, ensure_ascii=False)}]"
