"""``/v1/chat/completions``: the body, the answer and the chunks of a stream."""

import json
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, StringConstraints, Tag
from typing_extensions import TypedDict

from minivllm.server.bodies.body import Body, OrDefault
from minivllm.server.bodies.fields import (
    MAX_TOKEN_ID,
    Label,
    NeutralFields,
    NeutralVerbosity,
    Nothing,
    ReasoningEffort,
    RequestFields,
)
from minivllm.server.bodies.formats import FunctionName
from minivllm.server.bodies.other_clients import MESSAGE_LABELS, PART_LABELS
from minivllm.server.protocol.completions import PromptLogprob, Usage

MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128

CUSTOM_ARGUMENT = "input"
"""Name of the argument by which a custom tool is a function."""
TemplateValue = bool | int | float | Annotated[str, StringConstraints(max_length=4096)]


class TextPart(Body):
    labels = PART_LABELS
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: None = None


class ImageUrl(Body):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Body):
    """For models that see; others refuse it with a reason."""

    labels = PART_LABELS
    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: None = None


class RefusalPart(Body):
    labels = PART_LABELS
    type: Literal["refusal"]
    refusal: str


TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class FunctionCall(Body):
    """arguments: JSON as a string, as the model wrote it.
    parsed_arguments: the same again, from client helpers."""

    labels = PART_LABELS
    name: str
    arguments: str
    parsed_arguments: Any = None


class FunctionToolCall(Body):
    """index: the call's place in a stream, which helpers of clients leave in what they gathered."""

    labels = PART_LABELS
    index: Annotated[int, Field(ge=0)] | None = None
    id: str
    type: OrDefault[Literal["function"]] = "function"
    function: FunctionCall


class CustomCall(Body):
    name: str
    input: str


class CustomToolCall(Body):
    """A call of a custom tool, whose input is any text."""

    labels = PART_LABELS
    index: Annotated[int, Field(ge=0)] | None = None
    id: str
    type: Literal["custom"]
    custom: CustomCall

    @property
    def function(self) -> FunctionCall:
        """The call as the model made it."""
        return FunctionCall(name=self.custom.name, arguments=json.dumps({CUSTOM_ARGUMENT: self.custom.input}))


def _kind_of_call(call: Any) -> str:
    """A call may come without a type."""
    kind = call.get("type") if isinstance(call, dict) else getattr(call, "type", None)
    return "custom" if kind == "custom" else "function"


ToolCall = Annotated[
    Annotated[FunctionToolCall, Tag("function")] | Annotated[CustomToolCall, Tag("custom")],
    Discriminator(_kind_of_call),
]


class SystemMessage(Body):
    labels = MESSAGE_LABELS
    role: Literal["system", "developer"]
    content: str | TextParts
    name: Label | None = None


class UserMessage(Body):
    labels = MESSAGE_LABELS
    role: Literal["user"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS)]
    name: Label | None = None


class AssistantMessage(Body):
    """Needs content, a refusal or tool calls. Lists that the API itself returned as null may be sent back.

    reasoning: another name of reasoning_content, which clients of newer servers send.
    parsed: the content again, as objects, which the parse helper of clients puts beside it.
    provider_specific_fields: fields of the answer again, as litellm keeps them.
    """

    labels = MESSAGE_LABELS
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantPart], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    function_call: None = None
    audio: None = None
    annotations: Nothing | None = None
    parsed: Any = None
    provider_specific_fields: Any = None


class ToolMessage(Body):
    labels = MESSAGE_LABELS
    role: Literal["tool"]
    content: str | TextParts
    tool_call_id: str
    name: Label | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class FunctionDefinition(Body):
    """parameters: the JSON schema of the arguments. strict: arguments must follow it."""

    labels = PART_LABELS
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    labels = PART_LABELS
    type: Literal["function"]
    function: FunctionDefinition


class CustomTextFormat(Body):
    type: Literal["text"]


class CustomGrammar(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomGrammarFormat(Body):
    type: Literal["grammar"]
    grammar: CustomGrammar


class CustomDefinition(Body):
    """format: told to the model with the description; its input is not forced into it."""

    labels = PART_LABELS
    name: FunctionName
    description: str | None = None
    format: Annotated[CustomTextFormat | CustomGrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(Body):
    """A tool that takes any text. The model is offered a function with one text as its argument."""

    labels = PART_LABELS
    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def function(self) -> FunctionDefinition:
        """The function that the model is offered."""
        description, form = self.custom.description or "", self.custom.format
        if isinstance(form, CustomGrammarFormat):
            grammar = f"The input follows this grammar ({form.grammar.syntax}):\n{form.grammar.definition}"
            description = f"{description}\n{grammar}".strip()
        schema = {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
            "required": [CUSTOM_ARGUMENT],
            "additionalProperties": False,
        }
        return FunctionDefinition(name=self.custom.name, description=description or None, parameters=schema)


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamedFunction(Body):
    name: FunctionName


class NamedFunctionTool(Body):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomTool(Body):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def function(self) -> NamedFunction:
        return self.custom


NamedTool = Annotated[NamedFunctionTool | NamedCustomTool, Field(discriminator="type")]


class AllowedTools(Body):
    """mode: "auto" leaves the choice to the model, "required" makes it call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedFunctionTool | NamedCustomTool | AllowedToolChoice, Field(discriminator="type")]
)


class TemplateFields(Body):
    """Arguments of the model's chat template for a conversation.

    reasoning_effort, chat_template_kwargs: names that the template knows; "none" switches thinking off, and
    so does False for enable_thinking or think, its names with other servers. continue_final_message: go on
    with the last message, which needs add_generation_prompt to be False or left out. add_special_tokens: put
    around it what the tokenizer puts around texts. parse_special_tokens: special tokens that stand in
    messages and tools count as such; by default they are text, so that no message can end its turn and begin
    another. documents: for templates that know them. chat_template: takes the place of the model's, where the
    operator allows it.
    """

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    documents: Annotated[list[dict[str, str]], Field(max_length=MAX_MESSAGES)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: (
        Annotated[dict[Annotated[str, Field(max_length=64)], TemplateValue], Field(max_length=16)] | None
    ) = None


class ChatCompletionRequest(RequestFields, NeutralFields, TemplateFields):
    """A conversation to continue.

    max_completion_tokens (max_tokens is its older name): None is the rest of the context. logprobs,
    top_logprobs: for every token of the answer. include_reasoning: False leaves the reasoning out of the
    answer. echo: begin the answer with the last message, if that is the assistant's. In place of an answer in
    the form of response_format the model may call a tool. store: either, nothing is kept. verbosity and all
    that follow it: only values that change nothing.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    store: bool | None = None
    verbosity: NeutralVerbosity = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    """One entry per token of the text."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCallOut(TypedDict):
    name: str
    arguments: str


class CustomCallOut(TypedDict):
    name: str
    input: str


class ToolCallOut(TypedDict):
    """A call of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[FunctionCallOut]
    custom: NotRequired[CustomCallOut]


class AnswerMessage(TypedDict):
    """reasoning: the same as reasoning_content, under the name that newer clients read."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallOut]]


class ChatChoice(TypedDict):
    """stop_reason: the stop string, stop expression or token id that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: NotRequired[int | str]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """created: Unix time [seconds]. prompt_token_ids, prompt_logprobs: if they were asked for."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class Delta(TypedDict):
    """tool_calls: the place of the call as ``index``, and what is new of it.
    reasoning: as in ``AnswerMessage``."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
