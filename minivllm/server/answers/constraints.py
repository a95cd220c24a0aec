"""Constraints on the form of an answer, for the engine:
response_format, structured_outputs and tool_choice."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minivllm.sampling_params import StructuredOutputs, ToolCalls
from minivllm.server.bodies.errors import invalid, unsupported
from minivllm.server.bodies.fields import RequestFields
from minivllm.server.bodies.formats import ResponseFormatJsonObject, ResponseFormatJsonSchema
from minivllm.server.parsers.choose import CallsOrAnswer, NamedCallParser, NativeCalls
from minivllm.server.parsers.events import Parser, PlainText
from minivllm.server.parsers.tool_calls import CallForm, HermesParser
from minivllm.server.protocol import chat

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords of JSON schemas whose values have names of schemas as keys, and those whose values are data."""


@dataclass(frozen=True)
class OfferedTools:
    """The tools that the model may call. must_call: it has to call one.
    named: the one that it has to call."""

    tools: list[chat.Tool]
    must_call: bool
    named: str | None = None

    @property
    def functions(self) -> list[chat.FunctionDefinition]:
        return [tool.function for tool in self.tools]

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the tools that take any text."""
        return frozenset(tool.function.name for tool in self.tools if isinstance(tool, chat.CustomTool))


@dataclass(frozen=True)
class Constraint:
    """The structure that an answer must have, and how it is read;
    None for free text, and for the model's own way."""

    structure: StructuredOutputs | None = None
    make_parser: Callable[[], Parser] | None = None


def offered_tools(request: chat.ChatCompletionRequest) -> OfferedTools | None:
    """None where no tool may be called. Raises ApiError 400 for a choice among tools that are not there."""
    tools, choice = request.tools or [], request.tool_choice or "auto"
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if not tools:
        raise invalid("tool_choice", "asks for a tool, but tools is empty.")
    if isinstance(choice, str):
        return OfferedTools(tools, choice == "required")
    chosen = choice.allowed_tools.tools if isinstance(choice, chat.AllowedToolChoice) else [choice]
    wanted = [tool.function.name for tool in chosen]
    known = [tool.function.name for tool in tools]
    for name in wanted:
        if name not in known:
            raise invalid("tool_choice", f"names {name!r}, but tools has only {', '.join(known)}.")
    if isinstance(choice, chat.NamedFunctionTool | chat.NamedCustomTool):
        return OfferedTools(tools, True, choice.function.name)
    allowed = [tool for tool in tools if tool.function.name in wanted]
    return OfferedTools(allowed, choice.allowed_tools.mode == "required")


def constraint(
    request: chat.ChatCompletionRequest, offered: OfferedTools | None, native: NativeCalls | None
) -> Constraint:
    """native: reads the calls as the model writes them by itself. Raises ApiError 400 or RequestError."""
    answer, structure = forced_answer(request)
    if structure is not None:
        if offered is not None:
            raise invalid("structured_outputs", "would make tool calls impossible: give tool_choice none.")
        return Constraint(structure, PlainText)
    if offered is None or not (offered.must_call or (answer is not None and native is not None)):
        return Constraint() if answer is None else Constraint(StructuredOutputs(json=answer), PlainText)
    if offered.named is not None:
        function = next(function for function in offered.functions if function.name == offered.named)
        return Constraint(
            StructuredOutputs(json=_arguments_schema(function)), partial(NamedCallParser, function.name)
        )
    single_call = request.parallel_tool_calls is False
    if offered.must_call or native is None or answer is None:
        # Also where calls could be answers: nothing but calls is possible.
        native = native or HermesParser
        return Constraint(_calls_structure(offered.functions, native.form, single_call, None), native)
    form = native.form
    if not form.opening and not _excludes(answer, answer, {"name", form.arguments_key}, {}):
        raise unsupported(
            "response_format",
            f"allows an object of name and {form.arguments_key}, which is how this model writes a tool call: "
            "set "
            "additionalProperties to false in its schema, or tool_choice to none.",
        )
    return Constraint(
        _calls_structure(offered.functions, form, single_call, answer),
        partial(CallsOrAnswer, native, [form.begin(function.name) for function in offered.functions]),
    )


def forced_answer(request: RequestFields) -> tuple[dict[str, Any] | None, StructuredOutputs | None]:
    """The schema that response_format forces an answer into, and structured_outputs; at most one of them."""
    wanted, structure, schema = request.response_format, request.structure(), None
    if isinstance(wanted, ResponseFormatJsonSchema):
        schema = _as_object(wanted.json_schema.schema_)
    elif isinstance(wanted, ResponseFormatJsonObject):
        schema = {"type": "object"}
    if schema is not None and structure is not None:
        why = "and response_format both say what the answer must look like: give one of them."
        raise invalid("structured_outputs", why)
    return schema, structure


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """JSON schema knows true for any value, and false for none."""
    if schema is False:
        raise invalid("response_format.json_schema.schema", "is false, which no answer follows.")
    return {} if schema is True else schema


def _arguments_schema(function: chat.FunctionDefinition) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _calls_structure(
    functions: Sequence[chat.FunctionDefinition],
    form: CallForm,
    single_call: bool,
    answer: dict[str, Any] | None,
) -> StructuredOutputs:
    """At least one call, its arguments by the schema of that function, or the answer."""
    calls = []
    for function in functions:
        schema = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [function.name]},
                form.arguments_key: {"$ref": "#/$defs/arguments"},
            },
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
            "$defs": {"arguments": _moved(_arguments_schema(function))},
        }
        calls.append((form.opening, json.dumps(schema), form.closing))
    separator = None if single_call else form.separator
    return StructuredOutputs(
        tool_calls=ToolCalls(
            calls=calls, separator=separator, answer=None if answer is None else json.dumps(answer)
        )
    )


def _moved(schema: Any, *, is_map: bool = False) -> Any:
    """A schema that now stands at ``#/$defs/arguments``:
    references into itself follow, those in data are data.

    is_map: the keys are names of schemas, not keywords.
    """
    if isinstance(schema, list):
        return [_moved(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if is_map:
        return {key: _moved(value) for key, value in schema.items()}
    moved = {
        key: value if key in _DATA else _moved(value, is_map=key in _MAPS) for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/arguments{reference[1:]}"
    return moved


def _excludes(schema: Any, root: dict[str, Any], names: set[str], known: dict[int, bool]) -> bool:
    """True if it is certain that no object that follows ``schema`` has all of ``names``.

    known: answers for schemas looked at before, by identity; a schema inside itself is no proof of anything.
    """
    if not isinstance(schema, dict):
        return False
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = False
    reference = schema.get("$ref")
    members = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(reference, str):
        target: Any = root if reference.startswith("#") else None
        for key in reference.split("/")[1:]:
            target = target.get(key) if isinstance(target, dict) else None
        found = _excludes(target, root, names, known)
    elif isinstance(members, list):
        found = all(_excludes(member, root, names, known) for member in members)
    elif isinstance(schema.get("type"), str) and schema["type"] != "object":
        found = True
    else:
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        properties = schema.get("properties", {})
        found = is_closed and isinstance(properties, dict) and not names <= set(properties)
    known[id(schema)] = found
    return found
