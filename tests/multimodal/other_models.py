"""Tiny random models of families that transformers computes, and their processors. A family is a row of
MAKERS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    AyaVisionProcessor,
    CLIPVisionConfig,
    Cohere2Config,
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLProcessor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusProcessor,
    LlamaConfig,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    QianfanOCRConfig,
    QianfanOCRForConditionalGeneration,
    QianfanOCRProcessor,
    Qwen3Config,
    SiglipVisionConfig,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
Made = tuple[PreTrainedModel, Any]
"""A model, and its processor."""


def _settings(text: Mapping[str, Any]) -> dict[str, Any]:
    """text: of the Llama that other tests have, as what any other language model takes."""
    taken = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    taken += (
        "num_key_value_heads",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return {name: text[name] for name in taken}


def _aya_vision(text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Made:
    """Tiles of 16 × 16 pixels with 4 embeddings each, at most 4 of them and the whole image, each after its
    name; every second layer of the language model has a window."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
    config = AyaVisionConfig(
        vision_config=SiglipVisionConfig(**_VISION, image_size=16, patch_size=4, vision_use_head=False),
        text_config=Cohere2Config(**_settings(text), **layers, logit_scale=0.5),
        downsample_factor=2,
        image_token_index=tokenizer.convert_tokens_to_ids("<soft>"),
        vision_feature_layer=-1,
    )
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=4, crop_to_patches=True)
    names = {"start_of_img_token": "<img>", "end_of_img_token": "</img>", "img_patch_token": "<soft>"}
    processor = AyaVisionProcessor(
        images, tokenizer, patch_size=4, img_size=16, downsample_factor=2, image_token="<image>", **names
    )
    return AyaVisionForConditionalGeneration(config), processor


def _qianfan_ocr(text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Made:
    """Tiles of 16 × 16 pixels with 4 embeddings each, at most 5 of them and the whole image, in one run."""
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<soft>"}
    name_tokens(tokenizer, names)
    config = QianfanOCRConfig(
        vision_config={
            **_VISION,
            "image_size": [16, 16],
            "patch_size": [4, 4],
            "layer_scale_init_value": 0.5,
        },
        text_config=Qwen3Config(**_settings(text), head_dim=16),
        image_token_id=tokenizer.convert_tokens_to_ids("<soft>"),
        image_seq_length=4,
    )
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=5)
    return QianfanOCRForConditionalGeneration(config), QianfanOCRProcessor(images, tokenizer, 4)


def _vipllava(text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Made:
    """25 embeddings of an image, made of the features of two layers."""
    config = VipLlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION, image_size=20, patch_size=4, projection_dim=32),
        text_config=LlamaConfig(**_settings(text)),
        image_token_index=2,
        vision_feature_layers=[-1, -2],
    )
    size = {"size": {"shortest_edge": 20}, "crop_size": {"height": 20, "width": 20}}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(**size), tokenizer, 4, "default", num_additional_image_tokens=1
    )
    return VipLlavaForConditionalGeneration(config), processor


def _deepseek_vl(text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Made:
    """25 embeddings of an image, which is padded to a square."""
    name_tokens(tokenizer, {"image_token": "<image>"})
    config = DeepseekVLConfig(
        vision_config=SiglipVisionConfig(**_VISION, image_size=20, patch_size=4),
        text_config=LlamaConfig(**_settings(text)),
        image_token_id=2,
        tie_word_embeddings=False,
    )
    images = DeepseekVLImageProcessorPil(size={"height": 20, "width": 20}, min_size=2)
    return DeepseekVLForConditionalGeneration(config), DeepseekVLProcessor(
        images, tokenizer, num_image_tokens=25
    )


def _janus(text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Made:
    """16 embeddings of an image, between two markers. It could draw images too."""
    name_tokens(tokenizer, {"image_token": "<image>", "boi_token": "<img>", "eoi_token": "</img>"})
    vision = {name: value for name, value in _VISION.items() if name != "intermediate_size"}
    drawing = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 32}
    drawing |= {"embed_dim": 4, "num_embeddings": 8, "projection_dim": 8, "image_token_embed_dim": 8}
    config = JanusConfig(
        vision_config={**vision, "image_size": 16, "patch_size": 4, "mlp_ratio": 2, "projection_dim": 64},
        vq_config={**drawing, "num_patches": 4},
        text_config=LlamaConfig(**_settings(text)),
        image_token_id=2,
        tie_word_embeddings=False,
    )
    images = JanusImageProcessorPil(size={"height": 16, "width": 16}, min_size=2)
    return JanusForConditionalGeneration(config), JanusProcessor(images, tokenizer, num_image_tokens=16)


def _gemma4(text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, is_small: bool = False) -> Made:
    """Squares of 8 × 8 pixels, at most 70 of them, which see one another in the layers with a window. Keys
    are values in the others, with heads of other sizes. is_small: they do not see one another; layers read
    embeddings of their own, and some keys and values of other layers."""
    names = {"boi_token": "<img>", "eoi_token": "</img>", "image_token": "<image>"}
    names |= {"boa_token": "[IMG_BREAK]", "eoa_token": "[IMG_END]", "audio_token": "<soft>"}
    name_tokens(tokenizer, names)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    settings = {**_settings(text), "num_hidden_layers": 4, "sliding_window": 12, "head_dim": 16}
    settings["layer_types"] = ["sliding_attention", "full_attention"] * 2
    settings["global_head_dim"] = 32
    if is_small:
        settings |= {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": settings["vocab_size"],
            "num_kv_shared_layers": 2,
        }
    else:
        settings |= {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
        }
    vision = {**_VISION, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
    config = Gemma4Config(
        text_config=settings,
        vision_config={**vision, "position_embedding_size": 200, "standardize": not is_small},
        video_token_id=tokenizer.convert_tokens_to_ids("<global-img>"),
        **ids,
    )
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    with patch.object(ProcessorMixin, "check_argument_for_proper_class"):  # it has no part for videos
        processor = Gemma4Processor(None, images, tokenizer, None)
    return Gemma4ForConditionalGeneration(config), processor


def name_tokens(tokenizer: PreTrainedTokenizerFast, names: Mapping[str, str]) -> None:
    """Have a tokenizer call some of its tokens so."""
    tokenizer._set_model_specific_special_tokens(dict(names))


MAKERS: Mapping[str, Callable[[Mapping[str, Any], PreTrainedTokenizerFast], Made]] = {
    "aya-vision": _aya_vision,
    "qianfan-ocr": _qianfan_ocr,
    "vipllava": _vipllava,
    "deepseek-vl": _deepseek_vl,
    "janus": _janus,
    "gemma4": _gemma4,
    "gemma4-small": partial(_gemma4, is_small=True),
}
PROCESSORS: dict[Path, Any] = {}
"""Directory of a model that was saved -> the processor that it was made with."""
