"""Facts about a model that the engine needs before loading it, the same for every implementation."""

from __future__ import annotations

from typing import Protocol

from minivllm.weights.quantization_config import StoredQuantization


class ModelFacts(Protocol):
    """Facts of a model's configuration. ``DecoderConfig`` has them, and so has ``TransformersConfig``.

    max_position_embeddings: tokens that a text may have, YaRN's and linear extensions counted in;
    can_be_longer: the model is scaled for whatever length is asked for.
    dtype: what the checkpoint was saved in ("float32", "bfloat16", "float16"). quantization: how its linear
    layers are stored, if not in that type. keeps_states: some layers keep a state in place of keys and
    values. implementation: what computes it, as ``EngineArgs.model_impl`` names it.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def implementation(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def can_be_longer(self) -> bool: ...
    @property
    def keeps_states(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def quantization(self) -> StoredQuantization | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
