"""A request for a response, rewritten as the chat completion it stands for."""

from typing import Any

from minivllm.server.answers.chat_messages import text_of
from minivllm.server.protocol import responses as protocol
from minivllm.server.protocol.chat import ChatCompletionRequest
from minivllm.server.wire.fields import SamplingFields

FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}


def as_chat_request(request: protocol.ResponseRequest) -> ChatCompletionRequest:
    """Raises ApiError 400 for what the chat form cannot say."""
    values: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.model_fields}
    for name in ("model", "stream", "user", "priority", "cache_salt", "parallel_tool_calls"):
        values[name] = getattr(request, name)
    values["messages"] = _messages(request)
    values["max_completion_tokens"] = request.max_output_tokens
    values["reasoning_effort"] = request.reasoning.effort if request.reasoning is not None else None
    values["response_format"] = _response_format(request)
    if request.tools is not None:
        values["tools"] = [
            {"type": "function", "function": tool.model_dump(include=FUNCTION_FIELDS, exclude_none=True)}
            for tool in request.tools
        ]
    values["tool_choice"] = _tool_choice(request)
    return ChatCompletionRequest.model_validate(values)


def _tool_choice(request: protocol.ResponseRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, protocol.AllowedFunctionTools):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if isinstance(choice, protocol.NamedFunctionTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(request: protocol.ResponseRequest) -> dict[str, Any] | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if isinstance(wanted, protocol.ResponseTextJsonSchema):
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}
    return {"type": wanted.type}


def _messages(request: protocol.ResponseRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    reasoning: str | None = None
    for index, item in enumerate(request.input):
        if isinstance(item, protocol.ReasoningItem):
            reasoning = "\n".join(part.text for part in item.content or ())
            continue
        _add_item(f"input.{index}", item, messages)
        if reasoning is not None and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = None
    return messages


def _add_item(path: str, item: protocol.InputItem, messages: list[dict[str, Any]]) -> None:
    """Append a message; calls of one turn go together, into the assistant message before them if there is one."""
    if isinstance(item, protocol.MessageItem):
        messages.append({"role": item.role, "content": text_of(f"{path}.content", item.content)})
    elif isinstance(item, protocol.FunctionCallOutputItem):
        output = text_of(f"{path}.output", item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    elif isinstance(item, protocol.FunctionCallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
