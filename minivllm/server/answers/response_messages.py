"""A request for a response, rewritten as the chat completion it stands for."""

import logging
from functools import cache
from typing import Any

from minivllm.server.answers.chat_messages import text_of
from minivllm.server.bodies.errors import ApiError, invalid, unsupported
from minivllm.server.bodies.fields import SamplingFields
from minivllm.server.bodies.other_clients import is_strict
from minivllm.server.protocol import responses as protocol

logger = logging.getLogger(__name__)

FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}
LOGPROBS = "message.output_text.logprobs"

_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_choice.function": "tool_choice",
    "tool_choice.custom": "tool_choice",
    "logprobs": "include",
}
"""Fields of a chat completion -> those of a response that they come from."""


class ChatForm:
    """values: the body of a chat completion. Raises ApiError 400 for what it cannot say."""

    def __init__(self, request: protocol.ResponseRequest) -> None:
        self._request = request
        self._messages: list[dict[str, Any]] = []
        self._places: dict[str, str] = dict(_NAMES)
        values: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.model_fields}
        for name in (
            "model",
            "stream",
            "user",
            "priority",
            "cache_salt",
            "parallel_tool_calls",
            "top_logprobs",
        ):
            values[name] = getattr(request, name)
        self._add_messages()
        values["messages"] = self._messages
        values["max_completion_tokens"] = request.max_output_tokens
        values["reasoning_effort"] = request.reasoning.effort if request.reasoning is not None else None
        values["response_format"] = _response_format(request)
        values["tools"] = self._tools()
        values["tool_choice"] = _tool_choice(request)
        values["logprobs"] = LOGPROBS in (request.include or ())
        self.values = values

    def renamed(self, error: ApiError) -> ApiError:
        """An error about the chat completion, told about the fields that the client wrote."""
        param = error.detail["param"]
        if param is None:
            return error
        known = [name for name in self._places if param == name or param.startswith(f"{name}.")]
        if not known:
            return error
        longest = max(known, key=len)
        new = self._places[longest] + param[len(longest) :]
        detail, message = error.detail, error.detail["message"].replace(param, new)
        return ApiError(
            error.status, message, type=detail["type"], param=new, code=detail["code"], headers=error.headers
        )

    def _tools(self) -> list[dict[str, Any]] | None:
        """Those that the model can be offered. The others are for OpenAI to run."""
        tools: list[dict[str, Any]] = []
        for index, tool in enumerate(self._request.tools or ()):
            place = f"tools.{len(tools)}"
            if isinstance(tool, protocol.HostedTool):
                if is_strict.get():
                    raise unsupported(
                        f"tools.{index}", f"is {tool.type}, a tool that this server cannot run."
                    )
                _log_hosted(tool.type)
                continue
            self._places |= {f"{place}.function": f"tools.{index}", f"{place}.custom": f"tools.{index}"}
            if isinstance(tool, protocol.CustomTool):
                custom: dict[str, Any] = {"name": tool.name, "description": tool.description}
                if isinstance(tool.format, protocol.CustomGrammarFormat):
                    grammar = {"syntax": tool.format.syntax, "definition": tool.format.definition}
                    custom["format"] = {"type": "grammar", "grammar": grammar}
                tools.append({"type": "custom", "custom": custom})
            else:
                function = tool.model_dump(include=FUNCTION_FIELDS, exclude_none=True)
                tools.append({"type": "function", "function": function})
        return tools or None

    def _add_messages(self) -> None:
        request = self._request
        if request.instructions is not None:
            self._add("instructions", {"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            self._add("input", {"role": "user", "content": request.input})
            return
        reasoning: str | None = None
        for index, item in enumerate(request.input):
            if isinstance(item, protocol.WebSearchCallItem):
                continue
            if isinstance(item, protocol.ReasoningItem):
                reasoning = item.text
                continue
            self._add_item(f"input.{index}", item)
            if reasoning is not None and self._messages[-1]["role"] == "assistant":
                self._messages[-1]["reasoning_content"] = reasoning
            reasoning = None
        if not self._messages:
            raise ApiError(400, "input has no message.", param="input", code="invalid_value")

    def _add(self, place: str, message: dict[str, Any]) -> None:
        self._places[f"messages.{len(self._messages)}"] = place
        self._messages.append(message)

    def _add_item(self, path: str, item: Any) -> None:
        """Append a message; calls of one turn go together,
        into the assistant message before them if there is one."""
        if isinstance(item, protocol.MessageItem):
            self._add(path, {"role": item.role, "content": _content(f"{path}.content", item.content)})
        elif isinstance(item, protocol.FunctionCallOutputItem | protocol.CustomToolCallOutputItem):
            self._places[f"messages.{len(self._messages)}.tool_call_id"] = f"{path}.call_id"
            output = text_of(f"{path}.output", item.output)
            self._add(path, {"role": "tool", "tool_call_id": item.call_id, "content": output})
        else:
            if not self._messages or self._messages[-1]["role"] != "assistant":
                self._add(path, {"role": "assistant", "content": None})
            calls = self._messages[-1].setdefault("tool_calls", [])
            place = f"messages.{len(self._messages) - 1}.tool_calls.{len(calls)}"
            self._places |= {place: path, f"{place}.function": path, f"{place}.id": f"{path}.call_id"}
            if isinstance(item, protocol.CustomToolCallItem):
                custom = {"name": item.name, "input": item.input}
                calls.append({"id": item.call_id, "type": "custom", "custom": custom})
            else:
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})


def _content(path: str, content: str | list[protocol.InputPart]) -> str | list[dict[str, Any]]:
    """The content of a message: one text, or the parts of a chat message if some are images.
    Whether the model
    reads images is checked there. Raises ApiError 400."""
    if isinstance(content, str) or not any(isinstance(part, protocol.InputImage) for part in content):
        return text_of(path, content)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, protocol.InputImage):
            parts.append({"type": "image_url", "image_url": _image_url(f"{path}.{index}", part)})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _image_url(path: str, part: protocol.InputImage) -> dict[str, Any]:
    if part.file_id is not None:
        raise unsupported(
            f"{path}.file_id", "names a stored file, but this server stores none: send image_url."
        )
    if part.image_url is None:
        raise invalid(f"{path}.image_url", "is missing: send the image as a data URL.")
    if part.detail == "original":
        raise unsupported(f"{path}.detail", "is 'original', but must be 'auto', 'low' or 'high'.")
    return {"url": part.image_url, "detail": part.detail}


@cache
def _log_hosted(kind: str) -> None:
    logger.info(
        "Models here are not offered the tool %r, which this server cannot run. (--strict refuses it.)", kind
    )


def _tool_choice(request: protocol.ResponseRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, protocol.AllowedFunctionTools):
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]},
        }
    return choice if choice is None or isinstance(choice, str) else _named(choice)


def _named(tool: protocol.NamedFunctionTool | protocol.NamedCustomTool) -> dict[str, Any]:
    return {"type": tool.type, tool.type: {"name": tool.name}}


def _response_format(request: protocol.ResponseRequest) -> dict[str, Any] | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if isinstance(wanted, protocol.ResponseTextJsonSchema):
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}
    return {"type": wanted.type}
