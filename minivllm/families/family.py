"""What a family is: a function from entries to layer specs, and what becomes of its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minivllm.families.dense import Description, dense
from minivllm.families.entries import Entries

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.specs.decoder import DecoderConfig

SHARED_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
)


FUSED_MLP: Mapping[str, tuple[str, ...]] = MappingProxyType({"gate_up_proj": ("gate_proj", "up_proj")})
"""Gate and up in one matrix, as several families store them."""


def defaults(**values: Any) -> Mapping[str, Any]:
    """SHARED_DEFAULTS with what is different in a family."""
    return MappingProxyType({**SHARED_DEFAULTS, **values})


TEXT_PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
)
IMAGE_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
"""Names of a checkpoint that also sees images: where its language model lies, and what else is there."""


SMOLVLM_PREFIXES: Mapping[str, str] = MappingProxyType({"model.text_model.": "model."})
SMOLVLM_IMAGE_PARTS = ("model.vision_model.", "model.connector.")
"""The same for Idefics 3 and SmolVLM."""


def text_part(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of a checkpoint that also sees images. Its dtype may stand outside."""
    text = entries.get("text_config")
    if not isinstance(text, Mapping):
        return entries
    outer = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id")
    return {**{name: entries[name] for name in outer if name in entries}, **text}


def tied_text_part(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, where whether its head is tied also stands outside, and counts."""
    tied = {name: entries[name] for name in ("tie_word_embeddings",) if name in entries}
    return {**text_part(entries), **tied}


NEXT_LAYER_HEAD: Mapping[str, str] = MappingProxyType(
    {
        "model.layers.{}.eh_proj.": "model.fc.",
        "model.layers.{}.shared_head.norm.": "model.norm.",
        "model.layers.{}.shared_head.head.": "",
        "model.layers.{}.embed_tokens.": "",
        "model.layers.{}.": "model.layers.0.",
    }
)
"""``Family.head_names`` where an MTP head is the layer after the last one (DeepSeek-V3, GLM-4.5). It may hold
copies of the model's embedding and head."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table.

    architecture, model_type: the family's names in config.json. gguf_architecture: its name in GGUF files.
    defaults: what an entry that config.json leaves out stands for (the values transformers assumes).
    describe: the entries, checked -> the layers and what else is true of the model.
    windowed: architecture that GGUF files of this one mean if they name a window. with_experts: the one that
    they mean if they count experts. has_windows: some layers may attend
    within a sliding window; their size is then an entry, also of GGUF files. gguf_permutes_rotary: GGUF files
    store the q and k rows of this family interleaved (see ``gguf_file``). rewrite_config: config.json's
    entries -> the same under the names and in the values that ``describe`` understands. renamed: module in
    the checkpoint -> its name in the decoder, where they differ.
    fused: module in the checkpoint -> the decoder's modules whose rows it holds, one below the other.
    groups: stored modules of ``fused`` whose rows lie in so many groups of equal size, each with rows of
    every part. norm_offset: norms are stored less this (1 where a family multiplies by 1 + w). GGUF files
    hold them whole. whole_norms: ends of the names of norms that are stored whole all the same.
    prefixes: beginnings of names in the checkpoint -> what the decoder has in their place.
    left_out: beginnings of the names of tensors that are not needed (those of an image encoder).
    texts: model_type of the language models that are described here, where the family joins its encoder to
    models of any family; empty: there is one, or none is joined.
    has_drafting_layers: checkpoints hold layers after the last one, which the model does not need:
    they guess further tokens (multi-token prediction).
    head_names: beginnings of the names of the tensors of an MTP head -> what the head has in their place, ""
    where it needs none; "{}" stands for the number of layers. The first that fits counts. Empty: checkpoints
    of the family hold no such head, or none that is known here.
    gguf_renamed: module, or block, as its name in GGUF files is understood elsewhere -> its name in the
    decoder. gguf_tiles_values: in GGUF files the values of a gated delta net do not lie key by key: the first
    value of every key comes first, then the second of every key.
    gguf_by_layer: entries of config.json whose metadata may be a list with a number for each layer, which
    ``from_gguf`` reads then.
    from_gguf: (metadata without the architecture's name, entries found so far) -> more entries of
    config.json. transposes_experts: stacked experts of its checkpoints lie [in, out], gates and ups in turn
    (gpt-oss). may_transpose_experts: they lie [in, out] or [out, in], as their shape says, gates above.
    fit: (this family, configuration) -> the same where what is said here depends on the configuration.
    rewrite_weight: (name in the decoder, tensor,
    configuration) -> the tensor this decoder needs in its place;
        constants of a family that can be multiplied into its weights cost nothing when the model runs.
    """

    architecture: str
    model_type: str
    gguf_architecture: str | None
    defaults: Mapping[str, Any]
    describe: Callable[[Entries], Description] = dense
    has_windows: bool = False
    windowed: str | None = None
    with_experts: str | None = None
    gguf_permutes_rotary: bool = False
    rewrite_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    norm_offset: float = 0.0
    whole_norms: tuple[str, ...] = ()
    prefixes: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    has_drafting_layers: bool = False
    head_names: Mapping[str, str] = field(default_factory=dict)
    gguf_renamed: Mapping[str, str] = field(default_factory=dict)
    gguf_tiles_values: bool = False
    gguf_by_layer: frozenset[str] = frozenset()
    from_gguf: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None
    transposes_experts: bool = False
    may_transpose_experts: bool = False
    fit: Callable[[Family, DecoderConfig], Family] | None = None
    rewrite_weight: Callable[[str, Tensor, DecoderConfig], Tensor] | None = None

    def for_model(self, config: DecoderConfig) -> Family:
        """This family as a model of this configuration has it."""
        return self if self.fit is None else self.fit(self, config)

    def own_name(self, stored: str) -> str:
        """The name, in the decoder, of a tensor of a safetensors file;
        fused ones keep the name of their module."""
        for prefix, own in self.prefixes.items():
            if stored.startswith(prefix):
                stored = own + stored.removeprefix(prefix)
        return ".".join(self.renamed.get(part, part) for part in stored.split("."))

    def leaves_out(self, stored: str, num_layers: int) -> bool:
        """Whether a tensor of a safetensors file is not needed in a model of so many layers."""
        layer = re.match(r"model\.layers\.(\d{1,6})\.", stored) if self.has_drafting_layers else None
        return stored.startswith(self.left_out) or (layer is not None and int(layer[1]) >= num_layers)

    def head_name(self, name: str, num_layers: int) -> str | None:
        """The name that a tensor with this ``own_name`` has in the MTP head of a model of so many layers;
        None if the head does not need it. Of several heads it is the first."""
        for pattern, own in self.head_names.items():
            beginning = pattern.format(num_layers)
            if name.startswith(beginning):
                return own + name.removeprefix(beginning) if own else None
        return None

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the decoder's tensors that one of this name holds, one below the other."""
        path, _, kind = name.rpartition(".")
        path, _, module = path.rpartition(".")
        return (
            tuple(f"{path}.{part}.{kind}" for part in self.fused[module]) if module in self.fused else (name,)
        )
