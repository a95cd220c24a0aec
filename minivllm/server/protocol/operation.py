"""Models and adapters by name, ``/tokenize``, ``/detokenize``, ``/version``, ``/health``:
bodies and answers."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from minivllm.server.bodies.body import Body, OrDefault
from minivllm.server.bodies.fields import TokenId
from minivllm.server.bodies.other_clients import LABELS
from minivllm.server.protocol.chat import MAX_MESSAGES, Message, TemplateFields

AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]


class LoadAdapterRequest(Body):
    """lora_name: the model's name from here on.
    lora_path: a directory in PEFT's format, inside the server's own."""

    lora_name: AdapterName
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class UnloadAdapterRequest(Body):
    lora_name: AdapterName


class ImageLimits(TypedDict):
    """Of the images of a request. max_images: in all messages together. max_side: of width and height
    [pixels]. max_ratio: of the longer side to the shorter one. max_body_bytes: of the whole request."""

    max_images: int
    max_file_bytes: int
    max_pixels: int
    max_side: int
    max_ratio: int
    max_body_bytes: int
    media_types: list[str]


class ModelCard(TypedDict):
    """created: when the server started, Unix time [seconds]. root: what was loaded under this name.

    parent: of an adapter, the model it changes. default_sampling_params: what holds where a request says
    nothing. input_modalities: "text", and "image" where the model sees. image_limits: null where it does not.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    default_sampling_params: dict[str, float]
    input_modalities: list[str]
    image_limits: ImageLimits | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class DeletedModel(TypedDict):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class TokenizeRequest(TemplateFields):
    """Exactly one of prompt (a text) and messages (a conversation, by the chat template).

    add_special_tokens: what the tokenizer puts around a text; left out, a prompt gets them, and messages do
    not, whose template writes its own. parse_special_tokens: special tokens in the text count as such; left
    out, they do in a prompt and do not in messages, as when generating.
    """

    labels = LABELS
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
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
