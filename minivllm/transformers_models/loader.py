"""Making a model of transformers, and filling it with weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.config import EngineConfig
from minivllm.distributed.other_workers import OtherWorkers
from minivllm.linear.choose import ROUNDING_GROUP, MethodChooser
from minivllm.transformers_models.describe.config import TransformersConfig
from minivllm.transformers_models.describe.names import dummy_parameters, iterate_parameters
from minivllm.transformers_models.model import TransformersModel
from minivllm.weights.packed_weights import PackedWeights


class TransformersLoader:
    """Loads ``TransformersModel``; a ``ModelLoader``."""

    def make(
        self,
        config: EngineConfig,
        facts: TransformersConfig,
        others: OtherWorkers,
        settings: Mapping[str, Any],
    ) -> TransformersModel:
        unit = ROUNDING_GROUP if config.quantization == "int4" else 1
        return TransformersModel(
            facts, communicator=others.communicator, stage=others.stage, input_unit=unit, **settings
        )

    def load(
        self,
        config: EngineConfig,
        facts: TransformersConfig,
        model: TransformersModel,
        path: str,
        load_format: str,
        chooser: MethodChooser,
    ) -> None:
        if load_format == "dummy":
            model.load_weights(dummy_parameters(model.names, config.seed))
        else:
            model.load_weights(iterate_parameters(Path(path), model.names, _packed(facts)))

    def check(
        self, config: EngineConfig, facts: TransformersConfig, model: TransformersModel, directory: str
    ) -> None:
        next(iterate_parameters(Path(directory), model.names, _packed(facts)))


def _packed(facts: TransformersConfig) -> PackedWeights | None:
    """What unpacks the linear layers of the checkpoint, if they are quantised."""
    return None if facts.quantization is None else PackedWeights(facts.quantization)
