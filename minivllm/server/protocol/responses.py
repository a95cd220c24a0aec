"""``/v1/responses``: the body, the answer, its items. Stateless: nothing is stored, so nothing can be referred to."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from minivllm.server.protocol.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, FunctionName
from minivllm.server.protocol.sampling import MAX_TOKEN_ID, Body, CacheSalt, Label, SamplingFields

Status = Literal["in_progress", "completed", "incomplete"]
Nothing = Annotated[list[Any], Field(max_length=0)]


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """Text of an earlier answer, sent back. parsed: the same again, from the parse helper of clients."""

    type: Literal["output_text"]
    text: str
    parsed: Any = None
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class InputImage(Body):
    """Understood, so that it can be refused with a reason."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


InputPart = Annotated[InputText | OutputText | InputImage, Field(discriminator="type")]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS)]
    phase: None = None
    id: Label | None = None
    status: Status | None = None


class FunctionCallItem(Body):
    """parsed_arguments: the arguments again, from helpers of clients."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    namespace: None = None
    caller: None = None
    id: Label | None = None
    status: Status | None = None


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: Label | None = None
    status: Status | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer, sent back; it goes to the chat template with the message that follows."""

    type: Literal["reasoning"]
    summary: Nothing
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: None = None
    id: Label | None = None
    status: Status | None = None


def _kind_of_item(item: Any) -> str:
    """A message may come without a type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[MessageItem, Tag("message")],
    Discriminator(_kind_of_item),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: FunctionName


class ResponseTextJsonSchema(Body):
    type: Literal["json_schema"]
    name: FunctionName
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseTextPlain(Body):
    type: Literal["text"]


class ResponseTextJsonObject(Body):
    type: Literal["json_object"]


class TextSettings(Body):
    format: (
        Annotated[ResponseTextPlain | ResponseTextJsonObject | ResponseTextJsonSchema, Field(discriminator="type")]
        | None
    ) = None


class ReasoningSettings(Body):
    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    summary: None = None


class ResponseRequest(SamplingFields):
    """A conversation to continue, as a text or a list of items.

    instructions: a system message before it. Fields that would need a memory (previous_response_id, store, background)
    take only their neutral value.
    """

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: Annotated[str, Field(max_length=512)] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: CacheSalt | None = None
    previous_response_id: None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: Nothing | None = None


class OutputTextPart(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class ReasoningTextPart(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(TypedDict):
    """A message (role, content), a function call (call_id, name, arguments) or reasoning (summary, content)."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Status
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputTextPart | ReasoningTextPart]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokensDetails(TypedDict):
    cached_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """The answer, with the settings it was made with."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
