"""The answer of a response: items and typed events, made of a chat completion's deltas."""

import copy
from collections.abc import Callable
from typing import Any

from minivllm.server.bodies.ids import new_id
from minivllm.server.protocol import responses as protocol
from minivllm.server.protocol.chat import Delta, TokenLogprob

Tell = Callable[..., None]
"""``tell(event type, **fields)``"""

_TEXTS: dict[str, tuple[str, dict[str, Any], protocol.OutputPart]] = {
    "message": (
        "msg",
        {"role": "assistant"},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
}
"""Kind of an item with text -> prefix of its id, its other fields, its part."""


class ResponseItems:
    """The answer's items as they grow out of chat deltas; every change is told as an event."""

    def __init__(self, tell: Tell) -> None:
        self.items: list[protocol.OutputItem] = []
        self._tell = tell

    def add(self, delta: Delta, logprobs: list[TokenLogprob] | None = None) -> None:
        """logprobs: of the tokens that the delta comes from, None unless they were asked for."""
        self._add_text("reasoning", delta.get("reasoning_content"), [])
        self._add_text("message", delta.get("content"), logprobs or [])
        for call in delta.get("tool_calls", ()):
            self._add_call(call)

    def close(self, status: protocol.Status) -> None:
        """End the item that is open, if any;
        ``status`` is "incomplete" where the answer stopped inside it."""
        if not self._is_open():
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            self._tell_of_item("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        elif item["type"] == "custom_tool_call":
            self._tell_of_item("custom_tool_call_input.done", input=item["input"])
        else:
            part = item["content"][0]
            fields = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            self._tell_of_item(f"{part['type']}.done", content_index=0, text=part["text"], **fields)
            self._tell_of_item("content_part.done", content_index=0, part=part)
        self._tell("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _is_open(self) -> bool:
        return bool(self.items) and self.items[-1]["status"] == "in_progress"

    def _tell_of_item(self, kind: str, **fields: Any) -> None:
        self._tell(
            f"response.{kind}", item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields
        )

    def _begin(self, kind: str, id_prefix: str, **fields: Any) -> None:
        self.close("completed")
        item: Any = {"id": new_id(id_prefix), "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._tell("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _add_text(self, kind: str, text: str | None, logprobs: list[TokenLogprob]) -> None:
        if not text:
            return
        id_prefix, own_fields, empty_part = _TEXTS[kind]
        if not self._is_open() or self.items[-1]["type"] != kind:
            self._begin(kind, id_prefix, content=[], **own_fields)
            self.items[-1]["content"].append(copy.deepcopy(empty_part))
            self._tell_of_item("content_part.added", content_index=0, part=empty_part)
        part = self.items[-1]["content"][0]
        part["text"] += text
        fields = {}
        if "logprobs" in part:
            part["logprobs"] += logprobs
            fields["logprobs"] = logprobs
        self._tell_of_item(f"{part['type']}.delta", content_index=0, delta=text, **fields)

    def _add_call(self, call: dict[str, Any]) -> None:
        if "custom" in call:
            custom = call["custom"]
            if "name" in custom:
                self._begin("custom_tool_call", "ctc", input="", call_id=call["id"], name=custom["name"])
            if custom["input"]:
                self.items[-1]["input"] += custom["input"]
                self._tell_of_item("custom_tool_call_input.delta", delta=custom["input"])
            return
        function = call["function"]
        if "name" in function:
            self._begin("function_call", "fc", arguments="", call_id=call["id"], name=function["name"])
        if function["arguments"]:
            self.items[-1]["arguments"] += function["arguments"]
            self._tell_of_item("function_call_arguments.delta", delta=function["arguments"])
