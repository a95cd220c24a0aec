"""``/v1/models``, ``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter``: what is served under which names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints
from typing_extensions import TypedDict

from minivllm.server.wire.fields import Body

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
