"""The extension point of implementations of models: making a model, and filling it with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.config import EngineConfig
from minivllm.distributed.other_workers import OtherWorkers
from minivllm.linear.choose import MethodChooser
from minivllm.models.decoder import Decoder
from minivllm.models.model import Model
from minivllm.specs.decoder import DecoderConfig


class ModelLoader(Protocol):
    """Makes and fills the models of one implementation. ``plugins.MODEL_IMPLEMENTATIONS`` names the loaders.

    facts, model: always those of the same implementation.
    """

    def make(
        self, config: EngineConfig, facts: Any, others: OtherWorkers, settings: Mapping[str, Any]
    ) -> Model:
        """The model without weights; no memory is allocated for them.
        settings: arguments that all models take.

        Raises ModelError for a model that cannot be served.
        """

    def load(
        self,
        config: EngineConfig,
        facts: Any,
        model: Any,
        path: str,
        load_format: str,
        chooser: MethodChooser,
    ) -> None:
        """Fill the model from the files at ``path``.
        load_format: see ``iterate_weights``; "dummy": random weights."""

    def check(self, config: EngineConfig, facts: Any, model: Any, directory: str) -> None:
        """Raises ModelError unless the safetensors files of a directory are weights of this model. Names and
        shapes are checked; only the first weight is read."""


class DecoderLoader:
    """Loads ``Decoder``, for every family of minivllm."""

    def make(
        self, config: EngineConfig, facts: DecoderConfig, others: OtherWorkers, settings: Mapping[str, Any]
    ) -> Decoder:
        is_first = others.stage is None or others.stage.is_first
        more: dict[str, Any] = {"in_space": config.images is not None}
        if config.images is not None and is_first:
            more["sees"], more["deeper_levels"] = True, config.images.deeper_levels
        if config.speculative is not None and config.speculative.eagle_version is not None:
            more["embeds_last"] = True
        if others.group is not None:
            more["group"] = others.group
        if others.communicator is not None:
            more["communicator"], more["divides_experts"] = others.communicator, config.expert_parallel
        return Decoder(facts, stage=others.stage, **settings, **more)

    def load(
        self,
        config: EngineConfig,
        facts: DecoderConfig,
        model: Decoder,
        path: str,
        load_format: str,
        chooser: MethodChooser,
    ) -> None:
        dtype = getattr(torch, config.dtype)
        model.load_weights(
            iterate_weights(path, load_format, facts, dtype, config.seed, chooser.kept_bits, model.wants)
        )

    def check(self, config: EngineConfig, facts: DecoderConfig, model: Decoder, directory: str) -> None:
        next(iterate_weights(directory, "safetensors", facts, getattr(torch, config.dtype)))
