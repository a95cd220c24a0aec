"""``/v1/models``, and loading and unloading adapters while others stream."""

from __future__ import annotations

from minivllm.server.protocol.models import DeletedModel, LoadAdapterRequest, ModelCard, ModelList, UnloadAdapterRequest
from minivllm.server.service.models import ServedModel
from minivllm.server.service.service import Service

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


def model_list(service: Service) -> ModelList:
    return ModelList(object="list", data=[model_card(service, model) for model in service.models.all])


async def load_adapter(service: Service, request: LoadAdapterRequest) -> ModelCard:
    """Raises ApiError, see ``ServedModels.load``."""
    return model_card(service, await service.models.load(request.lora_name, request.lora_path))


async def unload_adapter(service: Service, request: UnloadAdapterRequest) -> DeletedModel:
    """Raises ApiError, see ``ServedModels.unload``."""
    await service.models.unload(request.lora_name)
    return DeletedModel(id=request.lora_name, object="model", deleted=True)
