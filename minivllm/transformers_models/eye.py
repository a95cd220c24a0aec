"""Image encoders of families that are not in ``multimodal.eyes``: the ``get_image_features`` of their model
of transformers, without its language model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ModelError
from minivllm.transformers_models.describe.names import CheckpointNames, iterate_parameters


def load_eye_parts(
    directory: Path, config: Any, has_weights: bool
) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """(modules, what they compute of pixels [units, 3, height, width]: [units, embeds, hidden]) of a model
    for images and text. config: that of transformers. has_weights: whether they are read from the directory,
    and not random. Raises ModelError where they are not all there."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.get_default_dtype())
    body = model.base_model
    language, head = body.get_decoder(), model.get_output_embeddings()
    left_out = [name for name, module in model.named_modules() if module in (language, head)]
    for name in left_out:
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, None)
    model.all_tied_weights_keys = {}
    model.to_empty(device="cpu")
    model.initialize_weights()
    if has_weights:
        names = CheckpointNames(model, [f"{name}." for name in left_out])
        for name, value in iterate_parameters(directory, names, None):
            if not isinstance(value, Tensor):
                raise ModelError(f"{directory}: {name!r} of the image encoder is quantised.")
            module, _, own = name.rpartition(".")
            getattr(model.get_submodule(module), own).data.copy_(value)

    def encode(pixels: Tensor) -> Tensor:
        found = body.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        features: Tensor = found if isinstance(found, Tensor) else torch.cat(list(found))
        return features.reshape(len(pixels), -1, features.shape[-1])

    return {"": body}, encode
