"""A model that sees, with the sizes of SmolVLM-256M and random weights: nothing has to be fetched.

Only its description is written; the engine makes the weights (``load_format="dummy"``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>")
_IMAGE = _SPECIAL.index("<image>")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a SmolVLM. The defaults are those of SmolVLM-256M, where a square image has 17 units of 64
    embeddings."""

    text: dict[str, Any] = field(
        default_factory=lambda: {
            "vocab_size": 49280,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
        }
    )
    """Entries of a LlamaConfig."""
    vision: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "patch_size": 16,
            "image_size": 512,
        }
    )
    """Entries of a SmolVLMVisionConfig; ``image_size`` is the edge of a tile [pixels]."""
    scale_factor: int = 4
    """Patches along each side of a square that becomes one embedding."""
    tiles: int = 4
    """Most tiles along a side of an image."""


def write_random_model(directory: Path, sizes: Sizes | None = None) -> None:
    """Write what an engine reads of a SmolVLM besides its weights: sizes, image processor and tokenizer.
    sizes: left out, those of SmolVLM-256M."""
    from transformers import SmolVLMConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    sizes = Sizes() if sizes is None else sizes
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = SmolVLMConfig(
        vision_config=sizes.vision,
        text_config={"model_type": "llama", "tie_word_embeddings": False, **ends, **sizes.text},
        image_token_id=_IMAGE,
        scale_factor=sizes.scale_factor,
        tie_word_embeddings=False,
        architectures=["SmolVLMForConditionalGeneration"],
        dtype="bfloat16",
    )
    edge = sizes.vision["image_size"]
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": sizes.tiles * edge}, max_image_size={"longest_edge": edge}
    )
    config.save_pretrained(directory)
    processor.save_pretrained(directory)
    _byte_tokenizer(sizes.tiles).save_pretrained(directory)


def _byte_tokenizer(tiles: int) -> PreTrainedTokenizerFast:
    """One token for each byte, for two newlines, and for each marker of a tile."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    places = range(1, tiles + 1)
    markers = [f"<row_{row}_col_{column}>" for row in places for column in places]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*_SPECIAL, *markers, *alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[1],
        additional_special_tokens=[*_SPECIAL[2:], *markers],
    )
