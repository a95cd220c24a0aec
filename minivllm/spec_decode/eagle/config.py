"""The published format of EAGLE draft heads: what config.json says, and which tensors belong to it.

EAGLE and EAGLE-2 (Li et al. 2024) publish one and the same head, which predicts the target's next feature;
EAGLE-3 (Li et al. 2025) predicts tokens from three hidden states of the target. Both are one decoder layer of
a family that the table in ``registry`` knows, under names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from minivllm.checkpoints.hf_config import build_decoder_config, read_json_object
from minivllm.config import EagleVersion
from minivllm.errors import ModelError
from minivllm.specs.decoder import DecoderConfig

NUM_FUSED_LAYERS = 3
_CLASS_MARKS = ("Eagle3", "Eagle")
_ADVICE = "take the head that was trained for this very model"


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shape of a draft head.

    layer: its one decoder layer, as a model of its own; its vocabulary is the target's. target_hidden_size:
    width of the target's hidden states. draft_vocab_size: tokens the head can guess. fused_layers: eagle3:
    the target's layers whose inputs are fused, ascending. norm_before_residual: eagle3: the residual stream
    begins after hidden_norm instead of before it.
    """

    version: EagleVersion
    layer: DecoderConfig
    target_hidden_size: int
    draft_vocab_size: int
    fused_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False


def read_eagle_config(directory: str | Path, version: EagleVersion, target: DecoderConfig) -> EagleConfig:
    """The head in a directory, checked against the model it shall guess for.

    Raises ModelError naming file, field and value where the head cannot be run,
    or was made for another model.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} is no {version} head: it holds no config.json. Give the directory or the Hugging "
            "Face id of "
            "a published head."
        )
    entries, source = read_json_object(path), str(path)
    layer = build_decoder_config({**entries, "architectures": _family_names(entries)}, {}, source)
    if layer.quantization is not None:
        raise ModelError(
            f"{source}: the head is quantised, which is not supported: take the one it was made from."
        )
    if layer.num_layers != 1:
        raise ModelError(
            f"{source}: num_hidden_layers is {layer.num_layers}, but an {version} head has 1 layer: a whole "
            "model "
            "guesses with method 'draft_model'."
        )
    if layer.vocab_size != target.vocab_size:
        raise ModelError(
            f"{source}: vocab_size is {layer.vocab_size}, but the model it guesses for has "
            f"{target.vocab_size} "
            f"tokens: {_ADVICE}."
        )
    target_hidden_size = entries.get("target_hidden_size") or layer.hidden_size
    if target_hidden_size != target.hidden_size:
        raise ModelError(
            f"{source}: the head reads hidden states of {target_hidden_size} values, but those of the model "
            "it guesses "
            f"for have {target.hidden_size}: {_ADVICE}."
        )
    layer = replace(layer, tie_word_embeddings=False)
    if version == "eagle":
        if layer.hidden_size != target.hidden_size:
            raise ModelError(
                f"{source}: hidden_size is {layer.hidden_size}, but an eagle head is as wide as the model it "
                "guesses "
                f"for, {target.hidden_size}: {_ADVICE}."
            )
        if entries.get("draft_vocab_size") is not None:
            raise ModelError(f"{source}: draft_vocab_size is what EAGLE-3 heads have: use method 'eagle3'.")
        return EagleConfig(
            version=version,
            layer=layer,
            target_hidden_size=target_hidden_size,
            draft_vocab_size=layer.vocab_size,
        )
    draft_vocab_size = entries.get("draft_vocab_size") or layer.vocab_size
    if isinstance(draft_vocab_size, bool) or not isinstance(draft_vocab_size, int):
        raise ModelError(f"{source}: draft_vocab_size is {draft_vocab_size!r}, but must be a whole number.")
    if not 1 <= draft_vocab_size <= layer.vocab_size:
        raise ModelError(
            f"{source}: draft_vocab_size is {draft_vocab_size}, but must be from 1 to vocab_size, "
            f"{layer.vocab_size}."
        )
    norm_before_residual = entries.get("norm_before_residual", False)
    if not isinstance(norm_before_residual, bool):
        raise ModelError(
            f"{source}: norm_before_residual is {norm_before_residual!r}, but must be true or false."
        )
    return EagleConfig(
        version=version,
        layer=_reads_two_vectors(layer),
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        fused_layers=_fused_layers(entries, target, source),
        norm_before_residual=norm_before_residual,
    )


def _reads_two_vectors(model: DecoderConfig) -> DecoderConfig:
    """The same with attention on two vectors, side by side: that of the token and that of the feature."""
    (layer,) = model.layers
    return replace(model, layers=(replace(layer, mixer=replace(layer.attention, qkv_inputs=2)),))


def _family_names(entries: Mapping[str, Any]) -> list[str]:
    """The architectures without what marks them as heads,
    such as LlamaForCausalLMEagle3 and EagleLlamaForCausalLM."""
    names = entries.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return cast(list[str], names or [])  # refused, in a sentence, where it is read
    for mark in _CLASS_MARKS:
        names = [name.removeprefix(mark).removesuffix(mark) for name in names]
    return names


def _fused_layers(entries: Mapping[str, Any], target: DecoderConfig, source: str) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads.

    Heads of EAGLE-3's authors are trained with the inputs of layers 2, L / 2 and L - 3 of L. Others name
    layers: at the top level those whose inputs are meant, in ``eagle_config`` those whose outputs are.
    """
    nested = entries.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelError(f"{source}: eagle_config is {nested!r}, but must be an object.")
    if nested.get("use_aux_hidden_state", True) is not True:
        raise ModelError(
            f"{source}: use_aux_hidden_state is false, but EAGLE-3 heads are run with {NUM_FUSED_LAYERS} "
            "hidden states "
            "of the model: take another head."
        )
    name, layers = "eagle_aux_hidden_state_layer_ids", target.num_layers
    given, shift = (nested[name], 1) if nested.get(name) else (entries.get(name), 0)
    if given is None:
        given = [2, layers // 2, layers - 3]
        if len(set(given)) < NUM_FUSED_LAYERS or min(given) < 0:
            raise ModelError(
                f"The model has {layers} layers, too few for an EAGLE-3 head that reads the inputs of layers "
                f"{', '.join(map(str, given))}: name others as {name} in {source}."
            )
    is_list = isinstance(given, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in given)
    if not is_list or len(set(given)) != NUM_FUSED_LAYERS or len(given) != NUM_FUSED_LAYERS:
        raise ModelError(f"{source}: {name} is {given!r}, but must list {NUM_FUSED_LAYERS} different layers.")
    fused = sorted(layer + shift for layer in given)
    if fused[0] < 0 or fused[-1] >= layers:
        raise ModelError(
            f"{source}: {name} is {given!r}, but the model the head guesses for has {layers} layers: "
            f"{_ADVICE}."
        )
    return tuple(fused)
