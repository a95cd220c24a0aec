"""The drafter's own model in speculative decoding, as far as it is settled before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from minivllm.checkpoints.choose import read_model_facts
from minivllm.checkpoints.hf_config import read_json_object
from minivllm.config import SpeculativeConfig
from minivllm.errors import ConfigError
from minivllm.gguf.gguf_file import GGUFFile, find_gguf
from minivllm.hub.fetch import resolve_model
from minivllm.spec_decode.eagle.checkpoint import find_tensors
from minivllm.spec_decode.eagle.config import read_eagle_config
from minivllm.spec_decode.eagle.mtp import check_mtp
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.facts import ModelFacts

logger = logging.getLogger(__name__)


def resolve_draft_model(
    config: SpeculativeConfig, target_path: Path, target: ModelFacts, max_model_len: int, load_format: str
) -> SpeculativeConfig:
    """Find the draft model, and check that it speaks of the same tokens. Raises ConfigError or ModelError."""
    is_dummy = load_format == "dummy"
    if config.eagle_version is not None and not isinstance(target, DecoderConfig):
        raise ConfigError(
            f"No {config.eagle_version} head guesses for a model that {target.implementation} computes: "
            "choose another method, such as ngram."
        )
    if config.eagle_version == "mtp":
        assert isinstance(target, DecoderConfig)
        check_mtp(target_path, target, load_format)
        return config
    path = resolve_model(str(config.model), weights=not is_dummy)
    if config.eagle_version is not None:
        assert isinstance(target, DecoderConfig)
        head = read_eagle_config(path, config.eagle_version, target)
        if not is_dummy:
            find_tensors(path, head)
        trained_for = head.layer.max_position_embeddings
        if trained_for < max_model_len:
            logger.info(
                "The head was made for texts of %d tokens: longer ones it may guess worse.", trained_for
            )
        return replace(config, model_path=str(path))
    draft = read_model_facts(path, "dummy" if is_dummy else "auto")
    advice = "take a smaller model of the same family"
    if draft.keeps_states:
        raise ConfigError(
            f"The draft model {config.model} ({draft.architecture}) has layers that keep a state, which "
            "cannot be taken back when its guesses are rejected: take one all of whose layers attend, or "
            "another method, such as ngram."
        )
    own, theirs = stored_tokens(path), stored_tokens(target_path)
    shared, width = own.keys() & theirs.keys(), min(draft.vocab_size, target.vocab_size)
    is_padded = (
        0 <= max(shared, default=-1) < width and min(own.keys() ^ theirs.keys(), default=width) >= width
    )
    if draft.vocab_size != target.vocab_size and not is_padded:
        raise ConfigError(
            f"The draft model {config.model} has a vocabulary of {draft.vocab_size} tokens, but the model it "
            "guesses "
            f"for has {target.vocab_size}, and no tokenizers show that both mean the same: {advice}."
        )
    if any(own[token_id] != theirs[token_id] for token_id in shared):
        raise ConfigError(
            f"The draft model {config.model} has another tokenizer than the model it guesses for: {advice}."
        )
    if draft.max_position_embeddings < max_model_len and not draft.can_be_longer:
        raise ConfigError(
            f"The draft model {config.model} was made for at most {draft.max_position_embeddings} tokens, "
            "but "
            f"max_model_len is {max_model_len}: lower it, or {advice}."
        )
    return replace(config, model_path=str(path))


def stored_tokens(path: Path) -> dict[int, str]:
    """Token id -> token, as the model's files write it;
    empty where they hold no tokenizer of a kind known here."""
    gguf_path = find_gguf(path)
    if gguf_path is not None:
        with GGUFFile(gguf_path) as file:
            return dict(enumerate(file.metadata.get("tokenizer.ggml.tokens", [])))
    if not (path / "tokenizer.json").is_file():
        return {}
    vocabulary = read_json_object(path / "tokenizer.json").get("model", {}).get("vocab", {})
    return {token_id: token for token, token_id in vocabulary.items()} if isinstance(vocabulary, dict) else {}
