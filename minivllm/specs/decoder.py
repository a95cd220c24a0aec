"""The one description of a decoder that the engine understands, whatever spelling a checkpoint used."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.specs.attention import AttentionSpec, RotaryConfig
from minivllm.specs.layers import LayerSpec, PerLayerSpec, StateMixerSpec
from minivllm.weights.quantization_config import StoredQuantization


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: what is true of the whole model, and its layers.

    max_position_embeddings: tokens that a text may have, with the context's extension by YaRN or linear
    scaling. layers: one spec each, see ``specs.layers``. rotary: the rotary tables that they name by index.
    rms_norm_eps: of the norm after the last layer. embedding_scale: factor of the embeddings (not of a head
    that shares their weights). logits_scale: factor of the logits. logits_soft_cap: scaled logits become cap
    * tanh(logits / cap). dtype: what the checkpoint was saved in ("float32", "bfloat16", "float16").
    quantization: how its linear layers are stored, if not in that type. per_layer: the embeddings that all
    layers read beside the residual stream; None: there are none. placeholder_ids: tokens that stand for an
    image, and are embedded as placeholder_text_id also where a model writes them itself (Gemma 4).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    rotary: tuple[RotaryConfig, ...]
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    per_layer: PerLayerSpec | None = None
    placeholder_ids: tuple[int, ...] = ()
    placeholder_text_id: int = 0
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    quantization: StoredQuantization | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def implementation(self) -> str:
        """See ModelFacts."""
        return "minivllm"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state in place of keys and values."""
        return any(not isinstance(spec, AttentionSpec) for spec in self.attention_specs)

    @property
    def can_be_longer(self) -> bool:
        """Whether the rotary embedding is made for whatever length is asked for,
        beyond max_position_embeddings."""
        return any(rotary.type == "dynamic" for rotary in self.rotary)

    @property
    def attention_specs(self) -> tuple[AttentionSpec | StateMixerSpec, ...]:
        """How each layer with a KV cache attends; for a layer that keeps a state, the mixer's spec."""
        return tuple(layer.mixer.attends for layer in self.layers if layer.shares_cache_of is None)

    @property
    def reads_across_layers(self) -> bool:
        """Whether layers read keys and values of other layers, or per-layer embeddings."""
        return self.per_layer is not None or any(layer.shares_cache_of is not None for layer in self.layers)

    @property
    def caches(self) -> tuple[int, ...]:
        """The number of each layer's cache. Layers that share a cache have the same number."""
        numbers = list[int]()
        for layer in self.layers:
            shared = layer.shares_cache_of
            numbers.append(len(set(numbers)) if shared is None else numbers[shared])
        return tuple(numbers)
