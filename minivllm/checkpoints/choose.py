"""Which implementation computes a model: the decoder of minivllm, or that of transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm.checkpoints.checkpoint import INDEX_NAME, SINGLE_NAME, has_other_head
from minivllm.checkpoints.hf_config import read_decoder_config, read_json_object
from minivllm.families.makers.registry import find_family, is_in_table
from minivllm.gguf.gguf_file import find_gguf
from minivllm.plugins.plugin import import_object
from minivllm.plugins.points import MODEL_IMPLEMENTATIONS
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.facts import ModelFacts

logger = logging.getLogger(__name__)


def read_model_facts(
    model_path: str | Path,
    load_format: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    wanted: str = "auto",
) -> ModelFacts:
    """Facts about a local model that the engine needs, from the implementation that computes it.

    wanted: "minivllm", "transformers", or "auto": see ``choose_implementation``. Raises ModelError naming the
    file, the field and the value when the model cannot be run.
    """
    implementation, _ = choose_implementation(model_path, load_format, overrides, wanted)
    describe = import_object("the implementation", MODEL_IMPLEMENTATIONS[implementation].describe)
    facts: ModelFacts = describe(model_path, load_format, overrides)
    return facts


def describe_decoder(
    model_path: str | Path, load_format: str = "auto", overrides: Mapping[str, Any] | None = None
) -> DecoderConfig:
    """The configuration of a model that ``Decoder`` computes. Raises ModelError."""
    config = read_decoder_config(model_path, load_format, overrides)
    return _with_stored_head(config, Path(model_path), load_format)


def _with_stored_head(config: DecoderConfig, path: Path, load_format: str) -> DecoderConfig:
    """Without the tie between head and embeddings where the checkpoint stores both, and they differ."""
    has_weights = path.is_dir() and any((path / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    if not config.tie_word_embeddings or load_format == "dummy" or not has_weights:
        return config
    if find_gguf(path, load_format) is not None or not has_other_head(path, config):
        return config
    logger.warning(
        "%s: tie_word_embeddings is true, but the checkpoint stores a head of its own, lm_head.weight: that "
        "is used.",
        path / "config.json",
    )
    return replace(config, tie_word_embeddings=False)


def choose_implementation(
    model_path: str | Path,
    load_format: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    wanted: str = "auto",
) -> tuple[str, str]:
    """("minivllm" or "transformers", why). "auto" takes minivllm's decoder for the families in its table."""
    if wanted != "auto":
        return wanted, "as asked for"
    if find_gguf(model_path, load_format) is not None:
        return "minivllm", "GGUF files are read by it alone"
    config = Path(model_path) / "config.json"
    entries = {**(read_json_object(config) if config.is_file() else {}), **(overrides or {})}
    architectures, model_type = entries.get("architectures") or [], entries.get("model_type")
    if not config.is_file() or not isinstance(architectures, list):
        return "minivllm", "its decoder knows this family"
    if is_in_table(architectures, model_type):
        text = entries.get("text_config")
        kind = text.get("model_type") if isinstance(text, Mapping) else None
        family = find_family(architectures, model_type, str(config))
        if kind is None or not family.texts or kind in family.texts:
            return "minivllm", "its decoder knows this family"
        return "transformers", f"minivllm's own decoder does not know {model_type} with {kind}"
    named = ", ".join(map(str, architectures)) or str(model_type)
    return "transformers", f"minivllm's own decoder does not know {named}"
