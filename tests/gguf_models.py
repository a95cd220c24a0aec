"""Small GGUF files, written with the gguf package from small models of transformers."""

from __future__ import annotations

import zlib
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


# Where the float16 scales of a type's blocks lie; MXFP4 has one byte of exponent instead.
_SCALES_AT = {
    "Q5_K": (0, 2),
    "Q4_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}


def finite_blocks(type_name: str, blocks: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """Random blocks, uint8 [blocks, bytes], of a type that the gguf package may read but not write."""
    random = np.random.default_rng(seed)
    data = random.integers(
        0, 256, (blocks, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]), np.uint8
    )
    if type_name == "MXFP4":
        data[:, 0] = random.integers(120, 128, blocks) + round(np.log2(scale))
        return data
    for start in _SCALES_AT.get(type_name, (0,)):
        data[:, start : start + 2] = (scale * random.normal(size=(blocks, 1))).astype("<f2").view(np.uint8)
    return data


def stored_blocks(name: str, values: np.ndarray, type_name: str) -> np.ndarray:
    """A matrix in a type: as the gguf package writes it, or random blocks, which depend on the name only, of
    one that it reads only. uint8 [rows, bytes per row], or the values themselves for float types."""
    number = gguf.GGMLQuantizationType[type_name]
    try:
        return gguf.quants.quantize(values, number)
    except NotImplementedError:
        blocks = values.size // gguf.GGML_QUANT_SIZES[number][0]
        # Weights of about 0.05, what initialised models have:
        # numbers of a type times its inner scales differ in size.
        spread = np.std(gguf.quants.dequantize(finite_blocks(type_name, 64, seed=0), number))
        scale = 2.0 ** round(np.log2(0.05 / spread))
        return finite_blocks(type_name, blocks, zlib.crc32(name.encode()), scale).reshape(values.shape[0], -1)


def write_gguf(source: Path, target: Path, architecture: str, types: Mapping[str, str] | None = None) -> None:
    """Convert a small model as published converters do.

    types: GGML type of the matrices whose Hugging Face name holds the key, the first one that does;
    all others and norms stay float32.
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
    if mixer.attend.window is not None:
        writer.add_sliding_window(mixer.attend.window)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
    for name, tensor in iterate_weights(source, "auto", config, torch.float32):
        assert isinstance(tensor, torch.Tensor)
        data = tensor.numpy()
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        type_name = next(
            (kind for part, kind in (types or {}).items() if part in name and data.ndim == 2), "F32"
        )
        data = stored_blocks(name, data, type_name)
        if architecture in ("llama", "smollm3") and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = permute(data, mixer.heads if "q_proj" in name else mixer.kv_heads)
        writer.add_tensor(stored_name, data, raw_dtype=gguf.GGMLQuantizationType[type_name])
    write_all(writer)


def write_all(writer: Any) -> None:
    """Write the file that a ``GGUFWriter`` has been told of."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
