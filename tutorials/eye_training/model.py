"""The eye: a SigLIP encoder of 6 layers and LLaVA's projector, made by the engine's code for LLaVA.

An image of 64 × 64 pixels is 16 patches, so 16 embeddings. Files are those of any LLaVA model without its
language model, so the engine joins it to a text model: ``LLM(..., eye=DIR)``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlavaConfig, SiglipVisionConfig
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from minivllm.multimodal.eyes.llava import llava_parts
from tutorials.eye_training.canvases import EDGE

PATCH, WIDTH, LAYERS, HEADS = 16, 128, 6, 2
NUM_EMBEDS = (EDGE // PATCH) ** 2
PLACEHOLDER, PLACEHOLDER_ID = "<empty_output>", 16
"""A special token of SmolLM2 that no chat contains."""
HIDDEN, VOCAB = 576, 49152
"""Of SmolLM2-135M."""


def eye_config() -> LlavaConfig:
    """What an eye for SmolLM2 looks like."""
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=EDGE,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        text_config=LlamaConfig(hidden_size=HIDDEN, vocab_size=VOCAB),
        image_token_index=PLACEHOLDER_ID,
        image_seq_length=NUM_EMBEDS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    config.vision_config._attn_implementation = "sdpa"
    return config


class TrainedEye(nn.Module):
    """Its modules, by their names in a LLaVA checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        parts, _ = llava_parts(eye_config())
        self.parts = nn.ModuleDict(parts)

    def features(self, pixels: Tensor) -> Tensor:
        """Of the encoder: uint8 [images, 3, 64, 64] -> float32 [images, 16, 128]."""
        found = self.parts["vision_tower"](pixels.float() / 127.5 - 1, output_hidden_states=True)
        last: Tensor = found.hidden_states[-1]
        return last

    def project(self, features: Tensor) -> Tensor:
        """float32 [images, 16, 128] -> embeddings [images, 16, 576]."""
        found: Tensor = self.parts["multi_modal_projector"](features)
        return found

    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 [images, 3, 64, 64] -> float32 [images, 16, 576]."""
        return self.project(self.features(pixels))

    def save(self, folder: Path, dtype: torch.dtype = torch.float16) -> None:
        """Write weights, config.json and preprocessor_config.json into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in self.parts.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        entries = eye_config().to_diff_dict()
        entries["text_config"] = {"model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB}
        entries["image_token"] = PLACEHOLDER
        entries["architectures"] = ["LlavaForConditionalGeneration"]
        entries["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
        SiglipImageProcessorPil(size={"height": EDGE, "width": EDGE}).save_pretrained(folder)

    def load(self, folder: Path) -> TrainedEye:
        """Take the weights of a folder; returns itself."""
        tensors = load_file(folder / "model.safetensors")
        self.parts.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return self
