"""``/v1/responses``: the body, the answer, its items.
Stateless: nothing is stored, so nothing can be referred to."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from minivllm.server.bodies.body import Body, OrDefault
from minivllm.server.bodies.fields import (
    MAX_TOKEN_ID,
    CallerFields,
    Label,
    NeutralFields,
    NeutralVerbosity,
    Nothing,
    ReasoningEffort,
    SamplingFields,
)
from minivllm.server.bodies.formats import (
    FunctionName,
    JsonSchemaFormat,
    ResponseFormatJsonObject,
    ResponseFormatText,
)
from minivllm.server.bodies.other_clients import PART_LABELS
from minivllm.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    CustomGrammar,
    CustomTextFormat,
    FunctionDefinition,
    NamedFunction,
    TokenLogprob,
)
from minivllm.server.protocol.completions import PromptTokensDetails

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    labels = PART_LABELS
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: None = None


class OutputText(Body):
    """Text of an earlier answer, sent back. parsed: the same again, from the parse helper of clients."""

    labels = PART_LABELS
    type: Literal["output_text"]
    text: str
    parsed: Any = None
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class InputImage(Body):
    """For models that read images; others refuse it with a reason. image_url: a data URL.
    file_id: refused."""

    labels = PART_LABELS
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: None = None


InputPart = Annotated[InputText | OutputText | InputImage, Field(discriminator="type")]
ResultPart = Annotated[InputText | InputImage, Field(discriminator="type")]


class Item(Body):
    """id, status: as the answer had them."""

    id: Label | None = None
    status: Status | None = None


class FunctionItem(Item):
    call_id: str
    namespace: None = None
    caller: None = None


class MessageItem(Item):
    type: OrDefault[Literal["message"]] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS)]
    phase: None = None


class FunctionCallItem(FunctionItem):
    """arguments: JSON as the model wrote it, cut where the call is incomplete.
    parsed_arguments: the same again, from helpers of clients."""

    type: Literal["function_call"]
    name: str
    arguments: str
    parsed_arguments: Any = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class FunctionCallOutputItem(FunctionItem):
    """name: of the function, which call_id says already."""

    type: Literal["function_call_output"]
    output: str | Annotated[list[ResultPart], Field(min_length=1, max_length=MAX_PARTS)]
    name: Label | None = None


class CustomToolCallItem(FunctionItem):
    type: Literal["custom_tool_call"]
    name: str
    input: str
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class CustomToolCallOutputItem(FunctionItem):
    """name: of the tool, which call_id says already."""

    type: Literal["custom_tool_call_output"]
    output: str | Annotated[list[ResultPart], Field(min_length=1, max_length=MAX_PARTS)]
    name: Label | None = None


class WebSearchCallItem(Body):
    """A search that another server made; what it found is in the message after it."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["web_search_call"]


class SummaryText(Body):
    labels = PART_LABELS
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    labels = PART_LABELS
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """Reasoning of an earlier answer, sent back; it goes to the chat template with the message that follows.

    summary: stands in for the content where another server kept that to itself.
    encrypted_content: of another server, and not to be read here.
    """

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS)]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str | None:
        parts = self.content or self.summary
        return "\n".join(part.text for part in parts) if parts else None


def _kind_of_item(item: Any) -> str:
    """A message may come without a type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[WebSearchCallItem, Tag("web_search_call")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[MessageItem, Tag("message")],
    Discriminator(_kind_of_item),
]


class FunctionTool(FunctionDefinition):
    type: Literal["function"]
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(min_length=1, max_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None


class CustomGrammarFormat(CustomGrammar):
    type: Literal["grammar"]


class CustomTool(Body):
    """A tool that takes any text; see ``chat.CustomTool``."""

    labels = PART_LABELS
    type: Literal["custom"]
    name: FunctionName
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None
    description: str | None = None
    format: Annotated[CustomTextFormat | CustomGrammarFormat, Field(discriminator="type")] | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(min_length=1, max_length=1)] | None = None


HostedKind = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "computer_use_preview",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
]


class HostedTool(Body):
    """A tool that OpenAI runs, or has taught its models. The model here is not offered it."""

    model_config = ConfigDict(extra="ignore")
    type: HostedKind


ResponseTool = Annotated[FunctionTool | CustomTool | HostedTool, Field(discriminator="type")]


class NamedFunctionTool(NamedFunction):
    type: Literal["function"]


class NamedCustomTool(NamedFunction):
    type: Literal["custom"]


NamedTool = Annotated[NamedFunctionTool | NamedCustomTool, Field(discriminator="type")]


class AllowedFunctionTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class ResponseTextJsonSchema(JsonSchemaFormat):
    type: Literal["json_schema"]


class TextSettings(Body):
    format: (
        Annotated[
            ResponseFormatText | ResponseFormatJsonObject | ResponseTextJsonSchema,
            Field(discriminator="type"),
        ]
        | None
    ) = None
    verbosity: NeutralVerbosity = None


class ReasoningSettings(Body):
    """summary: "auto" leaves it to the model, and models here write none;
    their reasoning is in the answer as it is."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""Parts of items that answers here never have, reasoning, which is there in plain text,
and log-probabilities."""


class ResponseRequest(SamplingFields, CallerFields, NeutralFields):
    """A conversation to continue, as a text or a list of items.

    instructions: a system message before it. store: either, nothing is kept, as the answer says.
    max_tool_calls: counts calls of tools that the server itself runs, of which there are none. truncation:
    "auto" leaves the oldest items out of a conversation that is too long. top_logprobs: needs ``include``
    with message.output_text.logprobs. previous_response_id and all that follow it: only values that change
    nothing, but for those two.
    """

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunctionTool | NamedCustomTool | AllowedFunctionTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    include: Annotated[list[Includable], Field(max_length=MAX_PARTS)] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    background_options: None = None
    truncation: Literal["disabled", "auto"] | None = None
    context_management: Nothing | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: ResponseStreamOptions | None = None
    image: None = None
    access_programs: None = None


class OutputPart(TypedDict):
    """Text, or of an item of reasoning what the model thought."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


class OutputItem(TypedDict):
    """A message (role, content), a call (call_id, name,
    arguments or input) or reasoning (summary, content)."""

    id: str
    type: Literal["message", "function_call", "custom_tool_call", "reasoning"]
    status: Status
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseUsage(TypedDict):
    """output_tokens_details: reasoning_tokens."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(TypedDict):
    """The answer, with the settings it was made with."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
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
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage | None
    user: str | None
