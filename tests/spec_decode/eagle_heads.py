"""EAGLE heads in the published format:
of random weights, and such that guess a model made for it without a mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, HIDDEN = 416, 64
DRAFT_VOCAB = 400
HALF = HIDDEN // 2
NUM_SPECIAL = 4
LAYER_SHAPES = {
    "self_attn.q_proj": (64, HIDDEN),
    "self_attn.k_proj": (32, HIDDEN),
    "self_attn.v_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 64),
    "mlp.gate_proj": (96, HIDDEN),
    "mlp.up_proj": (96, HIDDEN),
    "mlp.down_proj": (HIDDEN, 96),
}


def head_config(version: str, **changes: Any) -> dict[str, Any]:
    """config.json of a head for the small models of the tests."""
    entries: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if version == "eagle" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    if version == "eagle3":
        entries["draft_vocab_size"] = DRAFT_VOCAB
    return {**entries, **changes}


def random_weights(version: str, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of a head under their published names; norms and bias are random too."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    prefix = "layers.0." if version == "eagle" else "midlayer."
    weights = {
        f"{prefix}{name}.weight": 1.2 * noise(*shape) / shape[1] ** 0.5
        for name, shape in LAYER_SHAPES.items()
    }
    norms = [f"{prefix}post_attention_layernorm"]
    if version == "eagle":
        weights |= {"fc.weight": noise(HIDDEN, 2 * HIDDEN) / 8, "fc.bias": 0.3 * noise(HIDDEN)}
        weights["embed_tokens.weight"] = 0.5 * noise(VOCAB, HIDDEN)
    else:
        for part in ("q", "k", "v"):
            name = f"{prefix}self_attn.{part}_proj.weight"
            weights[name] = 1.2 * noise(len(weights[name]), 2 * HIDDEN) / (2 * HIDDEN) ** 0.5
        norms += [f"{prefix}hidden_norm", f"{prefix}input_layernorm", "norm"]
        weights["fc.weight"] = noise(HIDDEN, 3 * HIDDEN) / 14
        weights["lm_head.weight"] = 0.5 * noise(DRAFT_VOCAB, HIDDEN)
        weights |= token_maps(torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values)
    weights |= {f"{name}.weight": 1.0 + 0.2 * noise(HIDDEN) for name in norms}
    return weights


def token_maps(tokens: Tensor) -> dict[str, Tensor]:
    """d2t and t2d of a draft vocabulary."""
    is_guessable = torch.zeros(VOCAB, dtype=torch.bool)
    is_guessable[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": is_guessable}


def save_head(directory: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors"
    )
    return directory


def random_head(directory: Path, version: str, seed: int = 0, **changes: Any) -> Path:
    """A head that knows nothing. changes: entries of its config.json."""
    return save_head(directory, random_weights(version, seed), head_config(version, **changes))


def crafted_model(directory: Path, mistral: Path, num_excluded: int = VOCAB - DRAFT_VOCAB) -> Path:
    """A model whose next token is a function of the last two tokens, nothing less and nothing more.

    From a Mistral with a sliding window of 2. Embeddings e are ±1 in the first half of the hidden values and
    0 in the second. Layer 0 attends evenly to the last token and the one before, and adds M(e_before + e) to
    the second half, with M so small that the length of the whole does not change. The other layers add
    nothing; the head looks at the second half alone. Special tokens and the last ``num_excluded`` ones are
    never said.
    """
    shutil.copytree(mistral, directory, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.zeros_like(tensor) for name, tensor in load_file(mistral / "model.safetensors").items()
    }
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name].fill_(1.0)
    weights["model.embed_tokens.weight"][:, :HALF] = (
        torch.randint(0, 2, (VOCAB, HALF), generator=generator) * 2.0 - 1
    )
    # Both KV heads of 16 carry values for two query heads each: the first of every pair is read.
    weights["model.layers.0.self_attn.v_proj.weight"][:, :HALF] = torch.eye(HALF)
    o = weights["model.layers.0.self_attn.o_proj.weight"]
    # The norm of the layer makes √2 e of e, and even attention halves the sum: √2 / 2 (e_before + e).
    o[HALF:, 0:16], o[HALF:, 32:48] = mixing()[:, :16] * 2**0.5, mixing()[:, 16:] * 2**0.5
    said = slice(NUM_SPECIAL, VOCAB - num_excluded)
    directions = torch.randn(VOCAB - num_excluded - NUM_SPECIAL, HALF, generator=generator)
    # All of one length, so that no token is likelier than others.
    weights["lm_head.weight"][said, HALF:] = F.normalize(directions, dim=-1) * (8 / MIXING)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


MIXING = 0.01
"""Size of what depends on the token before, against that of an embedding."""


def mixing() -> Tensor:
    """M [HALF, HALF] of ``crafted_model``: a rotation, made small."""
    return MIXING * torch.linalg.qr(torch.randn(HALF, HALF, generator=torch.Generator().manual_seed(2))).Q


def knowing_head(directory: Path, version: str, model: Path) -> Path:
    """The head that guesses everything ``crafted_model`` says.

    It needs the token before the last one, which it has from nothing but the feature, and the last one, which
    it has from nothing but the embedding.
    """
    m, eye, zero = mixing(), torch.eye(HALF), torch.zeros(HALF, HALF)
    weights = random_weights(version)
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name].fill_(1.0)
    half = 0.5**0.5
    if version == "eagle":
        # f = √2 [e_before; …] -> √2 [e; M(e_before + e)], which is a feature again; the layer adds nothing.
        from_embedding = torch.cat([torch.cat([eye, zero], 1), torch.cat([m, zero], 1)]) / half
        from_feature = torch.cat([torch.cat([zero, zero], 1), torch.cat([m, zero], 1)])
        weights["fc.weight"], weights["fc.bias"] = (
            torch.cat([from_embedding, from_feature], 1),
            torch.zeros(HIDDEN),
        )
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"layers.0.{name}.weight"].zero_()
        del weights["embed_tokens.weight"]  # the model's
        return save_head(directory, weights, head_config(version))
    # g = [e of the low layer; second half of the middle and the high one]. Attention sees the place itself
    # alone, and takes away what was in g: [e_before; …] -> [e; M(e_before + e)].
    low, high = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    low[:HALF, :HALF], high[HALF:, HALF:] = eye, eye / 2
    weights["fc.weight"] = torch.cat([low, high, high], 1)
    from_embedding = torch.cat([torch.cat([eye, zero], 1), torch.cat([m, zero], 1)]) * half
    from_feature = torch.cat([torch.cat([-eye, zero], 1), torch.cat([m, -eye], 1)]) * half
    weights["midlayer.self_attn.v_proj.weight"] = torch.cat([from_embedding, from_feature], 1)
    weights["midlayer.self_attn.k_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    weights["midlayer.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    weights["midlayer.mlp.down_proj.weight"].zero_()
    tokens = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(3))
    weights["lm_head.weight"] = load_file(model / "model.safetensors")["lm_head.weight"][tokens]
    weights |= token_maps(tokens)
    changes = {
        "architectures": ["MistralForCausalLMEagle3"],
        "model_type": "mistral",
        "sliding_window": 1,
        "num_key_value_heads": 4,
    }
    return save_head(directory, weights, head_config(version, **changes))
