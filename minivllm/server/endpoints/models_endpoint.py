"""Models and adapters by name, ``/tokenize``, ``/detokenize``, ``/version``, ``/health``: small bodies and answers."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from minivllm.server.answers.chat_messages import template_messages
from minivllm.server.protocol.chat import MAX_MESSAGES, Message
from minivllm.server.service.models import ServedModel
from minivllm.server.service.service import Service
from minivllm.server.wire.errors import ApiError, invalid
from minivllm.server.wire.fields import Body, OrDefault, TokenId
from minivllm.server.wire.other_clients import LABELS

AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]


class LoadAdapterRequest(Body):
    """lora_name: the model's name from here on. lora_path: a directory in PEFT's format, inside the server's own."""

    lora_name: AdapterName
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class UnloadAdapterRequest(Body):
    lora_name: AdapterName


class ModelCard(TypedDict):
    """created: when the server started, Unix time [seconds]. root: what was loaded under this name.

    parent: of an adapter, the model it changes. default_sampling_params: what holds where a request says nothing.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    default_sampling_params: dict[str, float]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class DeletedModel(TypedDict):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class TokenizeRequest(Body):
    """Exactly one of prompt (a text) and messages (a conversation, by the chat template).

    add_special_tokens: what the tokenizer puts around a text; a chat template writes its own. parse_special_tokens:
    special tokens in the text count as such; left out, they do in a prompt and do not in messages, as when generating.
    """

    labels = LABELS
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: OrDefault[bool] = True
    add_generation_prompt: OrDefault[bool] = True
    parse_special_tokens: bool | None = None
    return_token_strs: OrDefault[bool] = False


class TokenizeResponse(TypedDict):
    """token_strs: the vocabulary's entries, null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(Body):
    labels = LABELS
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: OrDefault[bool] = False


class DetokenizeResponse(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


class Health(TypedDict):
    status: Literal["ok"]


SHOWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_card(service: Service, model: ServedModel) -> ModelCard:
    defaults = service.engine.get_default_sampling_params()
    return ModelCard(
        id=model.name,
        object="model",
        created=service.started_at,
        owned_by="minivllm",
        root=service.engine.config.model if model.lora is None else model.lora.path,
        parent=None if model.lora is None else service.models.base_name,
        max_model_len=service.max_model_len,
        default_sampling_params={name: getattr(defaults, name) for name in SHOWN_DEFAULTS},
    )


ASSUMED_CHARACTERS_PER_TOKEN = 64
"""Where the tokenizer has no bound of its own."""


def tokenize(service: Service, request: TokenizeRequest) -> TokenizeResponse:
    """Raises RequestError or ApiError 400."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt", code="invalid_value")
    tokenizer = service.engine.tokenizer
    if request.prompt is not None:
        limit = service.max_model_len * (tokenizer.max_characters_per_token or ASSUMED_CHARACTERS_PER_TOKEN)
        if len(request.prompt) > limit:
            message = (
                f"prompt has {len(request.prompt)} characters, but may have at most {limit}: no prompt holds more."
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        token_ids = tokenizer.encode(
            request.prompt, request.add_special_tokens, request.parse_special_tokens is not False
        )
    else:
        messages = template_messages(request.messages or [], service.chat_template)
        rendered = service.engine.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            parse_special_tokens=bool(request.parse_special_tokens),
        )
        token_ids = rendered["prompt_token_ids"]
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=service.max_model_len,
        tokens=token_ids,
        token_strs=tokenizer.convert_ids_to_tokens(token_ids) if request.return_token_strs else None,
    )


def detokenize(service: Service, request: DetokenizeRequest) -> DetokenizeResponse:
    """Raises RequestError or ApiError 400."""
    tokenizer = service.engine.tokenizer
    for index, token in enumerate(request.tokens):
        if token >= tokenizer.vocab_size:
            why = f"is {token}, but must be below {tokenizer.vocab_size}, the tokenizer's size."
            raise invalid(f"tokens.{index}", why)
    return DetokenizeResponse(prompt=tokenizer.decode(request.tokens, request.skip_special_tokens))
