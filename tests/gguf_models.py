"""Small GGUF files, written with the gguf package from small models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order that converters give llama models."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(source: Path, target: Path, architecture: str, types: Mapping[str, str] | None = None) -> None:
    """Convert a small model as published converters do.

    types: GGML type of the matrices whose Hugging Face name holds the key, the first one that does; all others and
    norms stay float32.
    """
    config = read_decoder_config(source)
    layer = config.layers[0]
    mixer = layer.mixer
    writer: Any = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(layer.mlp.inner)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(mixer.heads)
    writer.add_head_count_kv(mixer.kv_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rotary[0].theta)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
    for name, tensor in iterate_weights(source, "auto", config, torch.float32):
        assert isinstance(tensor, torch.Tensor)
        data = tensor.numpy()
        if architecture in ("llama", "smollm3") and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = permute(data, mixer.heads if "q_proj" in name else mixer.kv_heads)
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        type_name = next((kind for part, kind in (types or {}).items() if part in name and data.ndim == 2), "F32")
        number = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(stored_name, gguf.quants.quantize(data, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
