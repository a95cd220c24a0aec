"""The base of all bodies: strict types, no unknown fields, and null for what may be left out."""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from minivllm.server.bodies.other_clients import is_ignored

MAX_UNKNOWN_FIELDS = 8
T = TypeVar("T")


class _OrNull:
    """Says in the schema what ``Body`` does: null is the default."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(core), {"type": "null"}]}


OrDefault = Annotated[T, _OrNull()]
"""Type of a field with a default other than None."""


def _fail_fast(schema: Any) -> None:
    """Let every list inside a schema end at its first error, and every dictionary be counted first."""
    if isinstance(schema, list | tuple):
        for inner in schema:
            _fail_fast(inner)
    if not isinstance(schema, dict) or (
        schema.get("type") == "function-before" and schema["schema"].get("type") == "dict"  # done before
    ):
        return
    for inner in schema.values():
        _fail_fast(inner)
    if schema.get("type") == "list":
        schema["fail_fast"] = True
    elif schema.get("type") == "dict" and schema.get("max_length") is not None:
        counted = dict(schema)
        limit = counted["max_length"]

        def count(values: Any) -> Any:
            if isinstance(values, dict) and len(values) > limit:
                sizes = {"field_type": "Dictionary", "max_length": limit, "actual_length": len(values)}
                raise PydanticKnownError("too_long", sizes)
            return values

        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(count, counted))


class Body(BaseModel):
    """Base of all bodies: no unknown field, no conversion between types, no NaN or infinity.

    A field that may be left out may be null as well, which means the same, at every depth.
    What is wrong is reported a few times, not a million times: a list is left at its first wrong entry, a
    dictionary that is too long is not looked at, and of unknown fields a few are.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    labels: ClassVar[frozenset[str]] = frozenset()
    """Unknown fields that are left out instead of being refused."""

    @model_validator(mode="before")
    @classmethod
    def _fields_that_say_something(cls, values: Any) -> Any:
        """Without nulls in place of fields that may be left out, without labels,
        and with few unknown fields."""
        if not isinstance(values, dict):
            return values
        is_required = {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}
        kept, num_unknown = {}, 0
        for name, value in values.items():
            if name in is_required:
                if value is not None or is_required[name]:
                    kept[name] = value
            elif num_unknown < MAX_UNKNOWN_FIELDS and not is_ignored(name, cls.labels):
                kept[name] = value
                num_unknown += 1
        return kept

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema
