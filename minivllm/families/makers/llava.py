"""LLaVA: a language model of another family, to which an image encoder is joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ModelError
from minivllm.families.dense import Description
from minivllm.families.entries import Entries
from minivllm.families.family import IMAGE_PARTS, TEXT_PREFIXES, Family, defaults, text_part, tied_text_part
from minivllm.families.languages import LLAMA, MISTRAL, QWEN2

_TEXTS: Mapping[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2)}


def _text(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model, with the defaults of its family."""
    text, model = tied_text_part(entries), entries.get("model_type")
    if model == "llava_onevision" and not entries.get("tie_word_embeddings"):
        # The language model's entry counts too.
        text = {**text, "tie_word_embeddings": text_part(entries).get("tie_word_embeddings", False)}
    kind = text.get("model_type", "qwen2" if model == "llava_onevision" else "llama")
    if kind not in _TEXTS:
        raise ModelError(
            f"text_config.model_type is {kind!r}, which minivllm's own layers do not serve as the language "
            f"model of {model}: served are {', '.join(_TEXTS)}."
        )
    return {**_TEXTS[kind].defaults, **text, "model_type": kind}


def _described(entries: Entries) -> Description:
    """As the language model's family says."""
    return _TEXTS[entries.get("model_type")].describe(entries)


def _llava(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        gguf_architecture=None,
        defaults=defaults(),
        describe=_described,
        rewrite_config=_text,
        prefixes=TEXT_PREFIXES,
        left_out=(*IMAGE_PARTS, "image_newline", "model.image_newline"),
        texts=tuple(_TEXTS),
    )


FAMILIES = (
    _llava("LlavaForConditionalGeneration", "llava"),
    _llava("LlavaNextForConditionalGeneration", "llava_next"),
    _llava("LlavaOnevisionForConditionalGeneration", "llava_onevision"),
)
