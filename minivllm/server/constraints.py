"""What forces the form of an answer: response_format, structured_outputs and tool_choice, for the engine."""

from __future__ import annotations

from typing import Any

from minivllm.sampling_params import StructuredOutputs
from minivllm.server.errors import ApiError, unsupported
from minivllm.server.parsers.events import Parser
from minivllm.server.parsers.forced_calls import CallListParser, NamedCallParser
from minivllm.server.protocol.chat import (
    ChatCompletionRequest,
    FunctionDefinition,
    NamedTool,
    ResponseFormatJsonObject,
    ResponseFormatJsonSchema,
)


def structured_outputs(request: ChatCompletionRequest) -> StructuredOutputs | None:
    """The structure that the answer must have, None for free text. Raises ApiError 400 or RequestError."""
    wanted = request.response_format
    structure = request.structure()
    if structure is not None:
        if isinstance(wanted, (ResponseFormatJsonObject, ResponseFormatJsonSchema)):
            raise _contradiction("and response_format both say what the answer must look like: give one of them.")
        if request.tools and request.tool_choice != "none":
            raise _contradiction("would make tool calls impossible: give tool_choice none.")
        return structure
    if isinstance(wanted, (ResponseFormatJsonObject, ResponseFormatJsonSchema)):
        if request.tools and request.tool_choice != "none":
            raise unsupported("response_format", "of JSON would make tool calls impossible: give tool_choice none.")
        if isinstance(wanted, ResponseFormatJsonSchema):
            return StructuredOutputs(json=wanted.json_schema.schema_)
        return StructuredOutputs(json_object=True)
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return None
    functions = [tool.function for tool in request.tools or ()]
    if not functions:
        raise ApiError(
            400, "tool_choice asks for a tool, but tools is empty.", param="tool_choice", code="invalid_value"
        )
    if isinstance(choice, NamedTool):
        named = [function for function in functions if function.name == choice.function.name]
        if not named:
            names = ", ".join(function.name for function in functions)
            message = f"tool_choice names {choice.function.name!r}, but tools has only {names}."
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        return StructuredOutputs(json=_arguments_schema(named[0]))
    return StructuredOutputs(json=_calls_schema(functions, single_call=request.parallel_tool_calls is False))


def _contradiction(why: str) -> ApiError:
    return ApiError(400, f"structured_outputs {why}", param="structured_outputs", code="invalid_value")


def forced_parser(request: ChatCompletionRequest) -> Parser | None:
    """The parser of an answer that tool_choice forced into a form, None where it did not."""
    if isinstance(request.tool_choice, NamedTool):
        return NamedCallParser(request.tool_choice.function.name)
    return CallListParser() if request.tool_choice == "required" else None


def _arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _calls_schema(functions: list[FunctionDefinition], *, single_call: bool) -> dict[str, Any]:
    """A list of at least one ``{"name": …, "parameters": {…}}``, the parameters by the schema of that function."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [function.name]},
                "parameters": {"$ref": f"#/$defs/{function.name}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": {function.name: _moved(_arguments_schema(function), function.name) for function in functions},
    }
    return {**schema, "maxItems": 1} if single_call else schema


def _moved(schema: Any, name: str) -> Any:
    """A schema that now stands at ``#/$defs/name``: references into itself follow."""
    if isinstance(schema, list):
        return [_moved(entry, name) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, name) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return moved
