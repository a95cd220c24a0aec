"""The one description of a decoder that the engine understands, whatever spelling a checkpoint used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

RotaryType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding, after Su et al. 2021 and its context-extension variants.

    dim: how many leading elements of each head are rotated (less than head_dim: partial rotary).
    factor: context extension of linear, dynamic, llama3 and yarn. original_max_position: context before extension.
    low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, truncate: yarn. attention_factor: cos and sin are
    multiplied by it (yarn; already resolved from mscale and mscale_all_dim).
    """

    type: RotaryType = "default"
    theta: float = 10000.0
    dim: int
    factor: float = 1.0
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint's linear layers are quantised, as its quantization_config says.

    group_size: inputs that share a scale (AWQ, GPTQ); 0 is a whole row. zeros_minus_one: GPTQ's first format stores
    each zero point less one. block: outputs and inputs that share a scale (fp8), if it has blocks.
    """

    method: Literal["awq", "gptq", "fp8"]
    group_size: int = 0
    zeros_minus_one: bool = False
    block: tuple[int, int] | None = None


class AttentionSpec(NamedTuple):
    """How one layer attends.

    window: sliding window in tokens, the query's own included, None for full attention. scale: factor of the scores.
    query_group: query heads per KV head (the layer's cache says how many KV heads there are, and of which size).
    chunk: a query sees only keys of its own chunk of so many positions (Llama 4), None for all. soft_cap: scaled
    scores s become cap * tanh(s / cap) (Gemma 2). has_sinks: a learned logit of each query head joins the softmax's
    denominator and has no value (gpt-oss); ``attend`` is given it.
    """

    window: int | None
    scale: float
    query_group: int = 1
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and options of a pre-norm decoder with rotary grouped-query attention and a gated MLP.

    layer_rotary: which layers rotate (SmolLM3 leaves some out). layer_windows: sliding window of each layer in tokens,
    None for full attention. qkv_bias, o_bias, mlp_bias: which projections carry a bias. qk_norm: RMSNorm over each
    head of q and k before rotary (Qwen3). qkv_inputs: vectors of hidden_size, side by side, that q, k and v are made of
    (2 in an EAGLE-3 head). dtype: what the checkpoint was saved in ("float32", "bfloat16", "float16").
    quantization: how its linear layers are stored, if not in that type.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rotary: RotaryConfig
    layer_rotary: tuple[bool, ...]
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qkv_inputs: int = 1
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh"] = "silu"
    dtype: str = "bfloat16"
    quantization: StoredQuantization | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def query_group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """How each layer attends."""
        return tuple(AttentionSpec(window, self.softmax_scale, self.query_group) for window in self.layer_windows)
