"""The configuration of a model that transformers computes:
what the engine must know of it, or why it cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.checkpoints.hf_config import GENERATION_NAME, read_dtype, read_json_object, read_token_ids
from minivllm.errors import ModelError
from minivllm.families.entries import MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB_SIZE, MAX_WIDTH
from minivllm.transformers_models.describe.checks import check_config, check_entries, rope_sets
from minivllm.weights.quantization_config import StoredQuantization, read_quantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Entries of ``layer_types`` that keep nothing but keys and values;
"attention" is an older word for the first."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """The facts of ``ModelFacts``, and ``entries``: config.json, which transformers reads itself.

    source: the file, to be named in errors.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    can_be_longer: bool
    keeps_states = False
    dtype: str
    quantization: StoredQuantization | None
    eos_token_ids: tuple[int, ...]
    entries: Mapping[str, Any]
    source: str

    @property
    def implementation(self) -> str:
        """See ModelFacts."""
        return "transformers"

    def load(self) -> PretrainedConfig:
        """A new configuration of transformers, without what says how weights are stored."""
        return _load(self.entries, self.source)


def read_transformers_config(
    directory: str | Path, overrides: Mapping[str, Any] | None = None
) -> TransformersConfig:
    """The facts of a local model that transformers has a decoder for. No code of the model's own is ever run.

    overrides: entries that replace those of config.json. Raises ModelError naming the file, the entry and the
    value if transformers does not know the model, or the model cannot be served.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory} holds no config.json, which transformers needs; a GGUF file has none.")
    source = str(path)
    entries = {**read_json_object(path), **(overrides or {})}
    if entries.get("model_type") == "mistral" and entries.get("layer_types"):
        # As AutoConfig does: only a Ministral has layers of two kinds.
        entries.update(model_type="ministral", architectures=["MinistralForCausalLM"])
    generation_path = path.with_name(GENERATION_NAME)
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    text_entries = entries.get("text_config")
    text_entries = text_entries if isinstance(text_entries, Mapping) else {}
    for part in (entries, text_entries):
        check_entries(part, source)
    whole = _load(entries, source)
    config = whole.get_text_config()
    check_config(config, source)
    architecture = _architecture(whole, entries, source)
    entries_of_text = {**text_entries, **entries}
    for name, value, most in _sizes(config):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ModelError(f"{source}: {name} is {value!r}, but must be a whole number from 1 to {most}.")
    others = sorted(
        {str(kind) for kind in getattr(config, "layer_types", None) or ()} - set(ATTENTION_LAYERS)
    )
    if others:
        raise ModelError(
            f"{source}: layer_types names {', '.join(others)}: such layers keep another state than keys and "
            "values, "
            "which transformers models are not served with here."
        )
    return TransformersConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_position_embeddings=_usable_positions(config),
        can_be_longer="dynamic" in _rope_types(config),
        dtype=read_dtype(entries_of_text, source),
        quantization=read_quantization(entries.get("quantization_config"), source),
        eos_token_ids=read_token_ids(
            "eos_token_id",
            [(source, entries_of_text), (str(generation_path), generation)],
            getattr(config, "eos_token_id", None),
            config.vocab_size,
        ),
        entries=entries,
        source=source,
    )


def describe_transformers_model(
    model_path: str | Path, load_format: str, overrides: Mapping[str, Any] | None = None
) -> TransformersConfig:
    """``read_transformers_config``, as ``plugins.MODEL_IMPLEMENTATIONS`` calls it.
    load_format: files of transformers are safetensors."""
    return read_transformers_config(model_path, overrides)


def _load(entries: Mapping[str, Any], source: str) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    model_type = entries.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        code = " Code that a model brings along is never run." if entries.get("auto_map") else ""
        raise ModelError(
            f"{source}: model_type is {model_type!r}, which neither minivllm nor transformers knows.{code}"
        )
    known = {
        name: value for name, value in entries.items() if name not in ("quantization_config", "auto_map")
    }
    try:
        config = CONFIG_MAPPING[model_type].from_dict(known)
    except Exception as error:  # a configuration class raises whatever its checks raise
        raise ModelError(f"{source} is refused by transformers: {one_sentence(error)}") from error
    return config


def _architecture(config: PretrainedConfig, entries: Mapping[str, Any], source: str) -> str:
    """The class that computes it. ModelError if that is no decoder of text, which may see images besides."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if sees else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names.get(config.model_type)
    named = entries.get("architectures") or [name]
    if name is None or not (sees or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        raise ModelError(
            f"{source}: model_type {config.model_type!r} has no decoder of text in transformers."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{source}: {named[0]} is an encoder with a decoder, which is not served: only decoders are."
        )
    if config.get_text_config() is not config and not sees:
        raise ModelError(
            f"{source}: {named[0]} takes more than text, which is not served: take the decoder of text alone "
            f"(model_type {config.get_text_config().model_type!r})."
        )
    if not isinstance(named, list) or named[0] != name:
        raise ModelError(
            f"{source}: architectures is {named!r}, but only the decoder of text, {name!r}, is served; "
            "family='package.module:FAMILY' names your own."
        )
    return str(name)


def _sizes(config: PretrainedConfig) -> list[tuple[str, Any, int]]:
    limits = {
        "num_hidden_layers": MAX_LAYERS,
        "hidden_size": MAX_WIDTH,
        "vocab_size": MAX_VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
    }
    return [(name, getattr(config, name, None), most) for name, most in limits.items()]


def _usable_positions(config: PretrainedConfig) -> int:
    """As ``usable_positions`` has it for the families of minivllm."""
    trained = config.max_position_embeddings
    reaches = []
    for rope in rope_sets(getattr(config, "rope_parameters", None)):
        original, factor = rope.get("original_max_position_embeddings") or trained, rope.get("factor")
        start = {"linear": trained, "yarn": original}.get(str(rope.get("rope_type")))
        reaches.append(trained if start is None or not factor else round(start * factor))
    return int(max(trained, min(reaches, default=0)))


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Of all layers: rope_parameters is one set of values, or one for every type of layer."""
    return {
        str(one.get("rope_type", "default")) for one in rope_sets(getattr(config, "rope_parameters", None))
    }


def one_sentence(error: Exception) -> str:
    """The message of an error of transformers, without line breaks;
    a KeyError contains little but the key."""
    said = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
    text = " ".join(said.split())
    text = text if len(text) <= 300 else text[:297] + "..."
    return text if text.endswith(".") else text + "."
