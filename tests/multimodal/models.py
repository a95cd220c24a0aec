"""Tiny random models that see, as transformers saves them, and what transformers answers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from minivllm.config import EngineArgs
from tests.multimodal.other_models import MAKERS, PROCESSORS

SPECIAL = [
    "<s>",
    "</s>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<soft>",
    "<eoi>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<img>",
    "</img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %}{{ "
    "message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ "
    "part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


NEWLINES = ("ĊĊ", "ĊĊĊ", "ĊĊĊĊ")
"""Tokens of several newlines, as byte-level vocabularies write them."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte and for a few newlines, and the special ones of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *alphabet, *NEWLINES])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
    )


def text_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": len(SPECIAL) + 256 + len(NEWLINES),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "tie_word_embeddings": False,
            **changes,
        }
    )


_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
}


def save_llava(directory: Path, kind: str = "clip") -> Path:
    """25 embeddings for an image, or 49 with SigLIP."""
    if kind == "clip":
        vision: Any = CLIPVisionConfig(**_VISION, image_size=20, projection_dim=32)
        size = {"size": {"shortest_edge": 20}, "crop_size": {"height": 20, "width": 20}}
        processor: Any = CLIPImageProcessorPil(**size)
    else:
        vision = SiglipVisionConfig(**_VISION, image_size=28)
        processor = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    config = LlavaConfig(
        vision_config=vision,
        text_config=text_config(),
        image_token_index=2,
        image_token_id=2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default" if kind == "clip" else "full",
        tie_word_embeddings=False,
    )
    return _save(directory, LlavaForConditionalGeneration(config), processor)


def text_config_of(kind: str, **changes: Any) -> Any:
    """The same for a Llama, a Mistral or a Qwen2."""
    settings = text_config(**changes).to_dict()
    for name in ("model_type", "architectures"):
        settings.pop(name, None)
    if kind == "mistral":
        return MistralConfig(**settings, sliding_window=24)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**settings)


def save_lines_of_tiles(directory: Path, kind: str = "llava-next", text: Any = None) -> Path:
    """Tiles of 12 × 12 pixels with 9 features each, at most 4 of them and the whole image; with OneVision, of
    16 × 16 pixels with 16 features, at most 9 of them, whose features are resized to about those of 2.
    text: the language model's configuration."""
    settings: dict[str, Any] = {"image_token_index": 2, "tie_word_embeddings": False}
    if kind == "llava-next":
        edge = 12
        pinpoints = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]
    else:
        edge = 16
        pinpoints = [[rows, columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    settings["image_grid_pinpoints"] = pinpoints = [[edge * side for side in size] for size in pinpoints]
    if kind == "llava-next":
        settings |= {
            "vision_config": CLIPVisionConfig(**_VISION, image_size=edge, projection_dim=32),
            "text_config": text or text_config_of("mistral"),
        }
        processor: Any = LlavaNextImageProcessorPil(
            size={"shortest_edge": edge},
            crop_size={"height": edge, "width": edge},
            image_grid_pinpoints=pinpoints,
        )
        return _save(directory, LlavaNextForConditionalGeneration(LlavaNextConfig(**settings)), processor)
    settings |= {
        "vision_config": SiglipVisionConfig(**_VISION, image_size=edge, vision_use_head=False),
        "text_config": text or text_config_of("qwen2"),
        "video_token_index": 3,
        "vision_aspect_ratio": "anyres_max_2",
    }
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": edge, "width": edge}, image_grid_pinpoints=pinpoints
    )
    return _save(
        directory, LlavaOnevisionForConditionalGeneration(LlavaOnevisionConfig(**settings)), processor
    )


def save_tiles(directory: Path, kind: str = "idefics3") -> Path:
    """Tiles of 16 × 16 pixels with 4 embeddings each; at most 4 × 4 of them."""
    config_class, model_class = {
        "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
        "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
    }[kind]
    config = config_class(
        vision_config={**_VISION, "image_size": 16},
        text_config=text_config(),
        image_token_id=2,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    processor = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 16})
    return _save(directory, model_class(config), processor)


def save_gemma3(directory: Path) -> Path:
    """16 embeddings for an image, which see one another; every second layer has a window."""
    boi, soft, eoi = (SPECIAL.index(text) for text in ("<image>", "<soft>", "<eoi>"))
    text = text_config(pad_token_id=0).to_dict() | {
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    }
    for name in ("model_type", "architectures", "rope_parameters", "rope_theta", "rope_scaling"):
        text.pop(name, None)
    config = Gemma3Config(
        vision_config={**_VISION, "image_size": 32},
        text_config=text,
        mm_tokens_per_image=16,
        boi_token_index=boi,
        image_token_index=soft,
        eoi_token_index=eoi,
        tie_word_embeddings=True,
    )
    processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return _save(directory, Gemma3ForConditionalGeneration(config), processor)


def save_grid(directory: Path, kind: str = "qwen2.5-vl") -> Path:
    """Squares of 8 × 8 pixels, 4 to 36 of them, rotated by row and column."""
    text = text_config().to_dict()
    for name in ("model_type", "architectures", "rope_theta", "rope_scaling"):
        text.pop(name, None)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "num_heads": 4, "patch_size": 4, "in_channels": 3}
    if kind == "qwen2-vl":
        config: Any = Qwen2VLConfig(
            vision_config={**vision, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            text_config=text,
            image_token_id=2,
            tie_word_embeddings=False,
        )
        model: PreTrainedModel = Qwen2VLForConditionalGeneration(config)
    else:
        config = Qwen2_5_VLConfig(
            vision_config={
                **vision,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            text_config=text,
            image_token_id=2,
            tie_word_embeddings=False,
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
    size = {"shortest_edge": 4 * 64, "longest_edge": 36 * 64}
    return _save(directory, model, Qwen2VLImageProcessorPil(size=size, patch_size=4))


def save_grid_of_qwen3(directory: Path, kind: str = "qwen3-vl") -> Path:
    """As ``save_grid``. Features of two more levels are added after the first two layers; in a Qwen3.5 none
    are, but every second layer keeps a state. "moe" in the kind: with experts."""
    text = text_config(num_hidden_layers=4).to_dict()
    for name in ("model_type", "architectures", "rope_theta", "rope_scaling"):
        text.pop(name, None)
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [5, 2, 1]}
    text["rope_parameters"] = {**rotary, "mrope_interleaved": True}
    vision: dict[str, Any] = {
        "depth": 3,
        "num_heads": 4,
        "patch_size": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_position_embeddings": 25,
    }
    common: dict[str, Any] = {"image_token_id": 2, "tie_word_embeddings": False}
    if kind.endswith("moe"):
        text |= {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
        text |= {"shared_expert_intermediate_size": 48}
    classes: dict[str, tuple[Any, Any]] = {
        "qwen3-vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
        "qwen3-vl-moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
        "qwen3.5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
        "qwen3.5-moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    }
    if kind.startswith("qwen3-vl"):
        vision["deepstack_visual_indexes"] = [0, 2]
    else:
        text |= {
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    config_class, model_class = classes[kind]
    model = model_class(config_class(vision_config=vision, text_config=text, **common))
    size = {"shortest_edge": 4 * 64, "longest_edge": 36 * 64}
    return _save(directory, model, Qwen2VLImageProcessorPil(size=size, patch_size=4))


def save_canvas(directory: Path, kind: str = "internvl") -> Path:
    """Tiles of 16 × 16 pixels with 4 embeddings each, at most 5 of them and the whole image."""
    text = text_config().to_dict()
    for name in ("model_type", "architectures", "rope_parameters"):
        text.pop(name, None)
    config = InternVLConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": [4, 4],
            "image_size": [16, 16],
            "layer_scale_init_value": 0.5,
        },
        text_config=(Qwen2Config if kind == "internvl" else Qwen3Config)(**text),
        image_token_id=2,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    processor = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=5)
    return _save(directory, InternVLForConditionalGeneration(config), processor)


def save_lines(directory: Path, kind: str = "mistral3") -> Path:
    """A run for each 8 lines of pixels of an image, of at most 48 × 48; with Pixtral, of each 4 of 32 × 32."""
    text = text_config().to_dict()
    for name in ("model_type", "architectures"):
        text.pop(name, None)
    settings: dict[str, Any] = {
        "vision_config": PixtralVisionConfig(**_VISION, image_size=48, head_dim=8),
        "text_config": MistralConfig(**text, sliding_window=None if kind == "mistral3" else 24),
        "image_token_index": 2,
        "tie_word_embeddings": False,
    }
    if kind == "mistral3":
        config: Any = Mistral3Config(**settings, spatial_merge_size=2)
        processor = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size={"height": 4, "width": 4})
        return _save(directory, Mistral3ForConditionalGeneration(config), processor)
    config = LlavaConfig(**settings, vision_feature_layer=-1, vision_feature_select_strategy="full")
    processor = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
    return _save(directory, LlavaForConditionalGeneration(config), processor)


def _save(directory: Path, model: PreTrainedModel, processor: Any) -> Path:
    """With weights large enough that every part of the model matters, and norms that are not trivial."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else noise * (0.3 if parameter.dim() == 1 else 0.15))
    model.float().eval().save_pretrained(directory)
    parts = [processor, make_tokenizer()]
    if isinstance(processor, ProcessorMixin):
        has_all = all(getattr(processor, name) is not None for name in processor.get_attributes())
        parts = [processor] if has_all else [processor.image_processor, processor.tokenizer]
    for part in parts:
        part.save_pretrained(directory)
    return directory


def save_other(directory: Path, kind: str) -> Path:
    """One of OTHERS."""
    model, PROCESSORS[directory] = MAKERS[kind](text_config().to_dict(), make_tokenizer())
    return _save(directory, model, PROCESSORS[directory])


def _pixtral_processor(*args: Any, **settings: Any) -> Any:
    """Its file imports the processor that needs torchvision, for one function, which the other one has too."""
    module = "transformers.models.pixtral.image_processing_pixtral"
    with patch.dict(sys.modules, {module: image_processing_pil_pixtral}):
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor(*args, **settings)


@cache
def reference(directory: Path) -> tuple[PreTrainedModel, Any]:
    """(model, processor) of transformers."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    if directory in PROCESSORS:
        return model, PROCESSORS[directory]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    if model.config.vision_config.model_type == "pixtral":
        merge = getattr(model.config, "spatial_merge_size", 1)
        images: Any = PixtralImageProcessorPil.from_pretrained(directory)
        return model, _pixtral_processor(images, tokenizer, 4, merge, image_token="<image>")
    if model.config.model_type == "internvl":
        names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>"}
        names |= {f"{name}_id": tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}
        for name, value in {**names, "video_token": "<video>"}.items():
            setattr(tokenizer, name, value)
        images = GotOcr2ImageProcessorPil.from_pretrained(directory)
        with patch.object(ProcessorMixin, "check_argument_for_proper_class"):  # it has no part for videos
            return model, InternVLProcessor(images, tokenizer, None, image_seq_length=4)
    if model.config.model_type.startswith("qwen"):
        images = Qwen2VLImageProcessorPil.from_pretrained(directory)
        tokenizer.image_token, tokenizer.image_token_id, tokenizer.video_token = "<image>", 2, "<video>"
        with patch.object(ProcessorMixin, "check_argument_for_proper_class"):
            return model, Qwen2_5_VLProcessor(images, tokenizer, None)
    if model.config.model_type == "llava_next":
        images = LlavaNextImageProcessorPil.from_pretrained(directory)
        return model, LlavaNextProcessor(images, tokenizer, 4, "default", num_additional_image_tokens=1)
    if model.config.model_type == "llava_onevision":
        images = LlavaOnevisionImageProcessorPil.from_pretrained(directory)
        most = model.config.vision_aspect_ratio
        with patch.object(ProcessorMixin, "check_argument_for_proper_class"):
            return model, LlavaOnevisionProcessor(
                images, tokenizer, None, 16, "full", vision_aspect_ratio=most
            )
    if model.config.model_type == "llava":
        is_clip = model.config.vision_config.model_type == "clip_vision_model"
        images = (CLIPImageProcessorPil if is_clip else SiglipImageProcessorPil).from_pretrained(directory)
        strategy = model.config.vision_feature_select_strategy
        return model, LlavaProcessor(images, tokenizer, 4, strategy, num_additional_image_tokens=int(is_clip))
    if model.config.model_type == "gemma3":
        names = {"boi_token": "<image>", "image_token": "<soft>", "eoi_token": "<eoi>"}
        names |= {f"{name}_id": tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}
        for name, value in names.items():
            setattr(tokenizer, name, value)
        images = Gemma3ImageProcessorPil.from_pretrained(directory)
        return model, Gemma3Processor(images, tokenizer, image_seq_length=16)
    images = Idefics3ImageProcessorPil.from_pretrained(directory)
    return model, Idefics3Processor(images, tokenizer, image_seq_len=4)


def expected(
    directory: Path, text: str, images: list[Image.Image], num_tokens: int, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """Tokens that transformers generates greedily, and the logits [tokens,
    vocab] that they were taken from. options: of its processor."""
    model, processor = reference(directory)
    inputs = processor(images=images or None, text=text, return_tensors="pt", **options)
    with torch.inference_mode():
        out = model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, torch.cat(out.logits)


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Smooth noise: resizing keeps some of it."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


KINDS = (
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3.5",
    "clip",
    "siglip",
    "llava-next",
    "llava-onevision",
    "idefics3",
    "smolvlm",
    "gemma3",
    "pixtral",
    "mistral3",
    "internvl",
    "internvl qwen3",
)


WITH_EXPERTS = ("qwen3-vl-moe", "qwen3.5-moe")
"""Like the kinds before "-moe", but for the language model."""


OTHERS = tuple(MAKERS)
"""Families that transformers computes."""
CAUSAL = tuple(kind for kind in OTHERS if kind != "gemma4")
"""Those of them whose images do not see themselves."""


def save(directory: Path, kind: str) -> Path:
    """A model of one of KINDS, WITH_EXPERTS, or OTHERS."""
    if kind in OTHERS:
        return save_other(directory, kind)
    if kind == "gemma3":
        return save_gemma3(directory)
    if kind in ("pixtral", "mistral3"):
        return save_lines(directory, kind)
    if kind in ("llava-next", "llava-onevision"):
        return save_lines_of_tiles(directory, kind)
    if kind.startswith("internvl"):
        return save_canvas(directory, kind)
    if kind.startswith("qwen3"):
        return save_grid_of_qwen3(directory, kind)
    if kind.startswith("qwen"):
        return save_grid(directory, kind)
    return (save_llava if kind in ("clip", "siglip") else save_tiles)(directory, kind)


def engine_args(directory: Path, **changes: Any) -> EngineArgs:
    """Of a small uncompiled engine in float32, as servers get it."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "enforce_eager": True,
        "num_gpu_blocks_override": 64,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_model_len": 512,
    }
    return EngineArgs(model=str(directory), **settings | changes)


def prompt(text: str, *images: Any, **more: Any) -> dict[str, Any]:
    """A prompt as ``LLM.generate`` takes it."""
    return {"prompt": text, "multi_modal_data": {"image": list(images)}, **more}
