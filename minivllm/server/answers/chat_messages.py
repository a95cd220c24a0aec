"""Conversations as chat templates read them:
roles checked, content parts joined, tool calls with parsed arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from minivllm.server.bodies.errors import invalid, unsupported
from minivllm.server.bodies.json_bounds import JsonBounds
from minivllm.server.protocol import chat, responses

RESERVED_TEMPLATE_NAMES = {
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}
"""Arguments of the renderer itself; a client's names for the template must not reach it."""


def template_messages(
    messages: Sequence[chat.Message], chat_template: str, *, sees: bool = False
) -> list[dict[str, Any]]:
    """Plain dictionaries for the chat template. Raises ApiError 400 with the path of what is wrong. sees: the
    model takes images: messages that have some keep their parts."""
    call_ids: set[str] = set()
    made = []
    for index, message in enumerate(messages):
        parts = image_parts(message.content) if sees else None
        if parts is not None:
            message = message.model_copy(update={"content": ""})
        entry = _template_message(f"messages.{index}", message, call_ids, chat_template)
        made.append(entry if parts is None else {**entry, "content": parts})
    return made


def have_images(messages: Sequence[chat.Message]) -> bool:
    """Whether some of them have images."""
    return any(_has_images(message.content) for message in messages)


def _has_images(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(part, chat.ImagePart) for part in content)


def image_parts(content: Any) -> list[dict[str, Any]] | None:
    """The parts of a content with images, as ``render_chat`` takes them; None for one without."""
    if not _has_images(content):
        return None
    return [
        {"type": "image_url", "image_url": {"url": part.image_url.url, "detail": part.image_url.detail}}
        if isinstance(part, chat.ImagePart)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def template_tools(tools: Sequence[chat.Tool], chat_template: str) -> list[dict[str, Any]]:
    """Tools for the chat template. Raises ApiError 400 for a model that has not learnt to call any."""
    if "tools" not in chat_template:
        raise unsupported("tools", "cannot be given to this model: its chat template has no place for them.")
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools.{index}.function.name", f"is {name!r}, which another tool has already.")
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in tools
    ]


def template_options(
    fields: chat.TemplateFields, tools: Sequence[chat.Tool], chat_template: str, *, trusts_templates: bool
) -> dict[str, Any]:
    """The arguments of ``render_chat`` besides messages. tools: those that the model may call.
    Raises ApiError 400.

    chat_template: the model's. trusts_templates: a request may bring another one.
    """
    if fields.chat_template is not None:
        if not trusts_templates:
            why = (
                "is not taken from requests here: the operator allows it with --trust-request-chat-template."
            )
            raise unsupported("chat_template", why)
        chat_template = fields.chat_template
    continues = fields.continue_final_message is True
    if continues and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message", "contradicts add_generation_prompt: set one of them to false."
        )
    names = _template_names(fields, chat_template)
    if tools:
        names["tools"] = template_tools(tools, chat_template)
    if fields.documents is not None:
        if "documents" not in chat_template:
            raise unsupported(
                "documents", "cannot be given to this model: its chat template has no place for them."
            )
        names["documents"] = fields.documents
    return {
        "add_generation_prompt": not continues and fields.add_generation_prompt is not False,
        "continue_final_message": continues,
        "chat_template": fields.chat_template,
        "chat_template_kwargs": names,
        "add_special_tokens": bool(fields.add_special_tokens),
        "parse_special_tokens": bool(fields.parse_special_tokens),
    }


def _template_names(fields: chat.TemplateFields, chat_template: str) -> dict[str, Any]:
    """Further names for the chat template:
    chat_template_kwargs, and what the switches of thinking mean to it."""
    names: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    for name in names:
        if name in RESERVED_TEMPLATE_NAMES or name not in chat_template:
            raise unsupported(
                f"chat_template_kwargs.{name}", "is not a name that this model's chat template knows."
            )
    for switch in ("reasoning_effort", "enable_thinking", "think"):
        value = getattr(fields, switch)
        if value is None:
            continue
        is_effort = isinstance(value, str)
        thinks = value not in (False, "none")
        if is_effort and "reasoning_effort" in chat_template:
            names["reasoning_effort"] = value
        elif "enable_thinking" in chat_template:
            names["enable_thinking"] = thinks
        elif thinks and (is_effort or "<think>" not in chat_template):
            raise unsupported(switch, "has no meaning for this model: its chat template does not know it.")
    return names


def _template_message(
    path: str, message: chat.Message, call_ids: set[str], chat_template: str
) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": text_of(f"{path}.content", message.content)}
    if (
        isinstance(message, chat.SystemMessage)
        and message.role == "developer"
        and "developer" not in chat_template
    ):
        entry["role"] = "system"
    if isinstance(message, chat.ToolMessage):
        if message.tool_call_id not in call_ids:
            raise invalid(f"{path}.tool_call_id", "names no tool call of an assistant message before it.")
        entry["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        entry["name"] = message.name
    if isinstance(message, chat.AssistantMessage):
        _add_assistant_fields(path, message, entry, call_ids)
    return entry


def _add_assistant_fields(
    path: str, message: chat.AssistantMessage, entry: dict[str, Any], call_ids: set[str]
) -> None:
    if message.content is None and message.refusal is None and not message.tool_calls:
        raise invalid(
            f"{path}.content", "is missing: an assistant message needs content, a refusal or tool_calls."
        )
    if message.content is None and message.refusal is not None:
        entry["content"] = message.refusal
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        entry["reasoning_content"] = reasoning
    if message.tool_calls:
        entry["tool_calls"] = [
            _template_call(f"{path}.tool_calls.{index}", call)
            for index, call in enumerate(message.tool_calls)
        ]
        call_ids.update(call.id for call in message.tool_calls)


def _template_call(path: str, call: chat.ToolCall) -> dict[str, Any]:
    # A text inside the body, so the bounds of the body have not seen into it.
    JsonBounds().check(call.function.arguments.encode(errors="replace"), f"{path}.function.arguments")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": _template_arguments(call.function.arguments)},
    }


def _template_arguments(text: str) -> Any:
    """An object, of which a cut text has a part;
    any other text that the model wrote goes back to it as it is."""
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return text
    return arguments if isinstance(arguments, Mapping) else text


def text_for_custom_tool(arguments: str) -> str:
    """The text in the arguments that a model wrote, or in their beginning;
    other arguments are a text themselves."""
    read = _template_arguments(arguments)
    text = read.get(chat.CUSTOM_ARGUMENT) if isinstance(read, Mapping) else None
    return text if isinstance(text, str) else arguments


def text_of(path: str, content: Any) -> str:
    """Content as one text; parts are joined by newlines. Raises ApiError 400 for an image."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, chat.ImagePart | responses.InputImage):
            raise unsupported(
                f"{path}.{index}",
                "is an image, but this model reads text only: at most 0 images per request.",
            )
        texts.append(part.refusal if isinstance(part, chat.RefusalPart) else part.text)
    return "\n".join(texts)
