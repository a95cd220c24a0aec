"""An MTP head for SmolLM2, trained in minutes: SmolLM2 as a checkpoint of GLM-4.5 without experts, whose layers
are Llama's then, and a head that is taught what the model says next.

The head gets one decoder layer of transformers. It reads the model's hidden states of texts, of which the model
has written some, and learns the likeliest token of the model one place later, and the hidden state there (as
EAGLE's heads: Li et al. 2024).
"""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.tokenizer.tokenizer import load_tokenizer

NUM_TOKENS = 80_000
"""Of the text that is read."""
NUM_WRITTEN, START = 192, 32
"""Texts that the model writes, and tokens that each of them begins with."""
ROW = 224
"""Tokens that are read together."""
EPOCHS = 4
BATCH = 2
RATE = 1e-3
NUM_HELD_OUT = 12
"""Chapters that the head never sees."""


def chapters() -> list[str]:
    """The chapters of Python's reference manual that its interactive help shows."""
    return list(pydoc_data.topics.topics.values())


def as_glm(directory: Path, gguf: Path) -> Path:
    """SmolLM2 as a checkpoint of GLM-4.5, all of whose layers are dense."""
    config = read_decoder_config(gguf)
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    entries = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.active_inner,
        "num_hidden_layers": config.num_layers,
        "first_k_dense_replace": config.num_layers,
        "n_routed_experts": 8,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary[0].theta,
            "partial_rotary_factor": 1.0,
        },
        "attention_bias": False,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(entries))
    weights = iterate_weights(gguf, "gguf", config, torch.float32)
    own = {name: tensor.clone() for name, tensor in weights if isinstance(tensor, Tensor)}
    save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tokens_of_text(gguf: Path, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = load_tokenizer(gguf, "gguf")
    return [tokenizer.encode(text) for text in texts]


class Head(nn.Module):
    """norm(layer(fc([norm(embed(t)); norm(f)])))."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        hidden = target.config.hidden_size
        layers, norm = target.model.layers, type(target.model.norm)
        self.layer = type(layers[0])(target.config, 0)
        self.layer.load_state_dict(layers[-1].state_dict())
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.enorm, self.hnorm, self.norm = (norm(hidden, target.config.rms_norm_eps) for _ in range(3))
        with torch.no_grad():
            self.eh_proj.weight.copy_(torch.eye(hidden).repeat(1, 2) / 2)
            self.hnorm.weight.copy_(1 / target.model.norm.weight.abs().clamp(min=0.3))
            self.norm.weight.copy_(target.model.norm.weight)
        self._embed, self._rotary = [target.model.embed_tokens], [target.model.rotary_emb]  # no parameters

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """tokens int64 [rows, n], each the one after that of its feature [rows, n, hidden]."""
        x = self.eh_proj(torch.cat([self.enorm(self._embed[0](tokens)), self.hnorm(features)], -1))
        places = torch.arange(tokens.shape[1])[None]
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        turned = self._rotary[0](x, position_ids=places)
        out: Tensor = self.norm(
            self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        )
        return out

    def tensors(self, number: int) -> dict[str, Tensor]:
        """By published names."""
        own = {
            f"{name.removeprefix('layer.')}": tensor.detach().clone()
            for name, tensor in self.state_dict().items()
        }
        own["shared_head.norm.weight"] = own.pop("norm.weight")
        return {f"model.layers.{number}.{name}": tensor for name, tensor in own.items()}


class Lesson(NamedTuple):
    """tokens [rows, ROW] int64; features [rows, ROW, hidden]: the model's hidden states of them; said: the token
    that the model takes for the likeliest after each of them."""

    tokens: Tensor
    features: Tensor
    said: Tensor


def read(target: Any, rows: Tensor) -> Lesson:
    """A text that is there."""
    parts = [target.model(part, use_cache=False).last_hidden_state for part in rows.split(4)]
    said = [target.lm_head(part).argmax(-1) for part in parts]
    return Lesson(rows, torch.cat(parts).float(), torch.cat(said))


def written(target: Any, starts: Tensor) -> Lesson:
    """Texts that the model writes: every second one by the likeliest tokens, the others by drawn ones."""
    tokens, features, said, cache = [starts], [], [], None
    is_greedy = torch.arange(len(starts)) % 2 == 0
    for _ in range(ROW - START + 1):
        out = target.model(tokens[-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = target.lm_head(out.last_hidden_state)
        features.append(out.last_hidden_state)
        said.append(logits.argmax(-1))
        drawn = torch.distributions.Categorical(logits=logits[:, -1].float() / 0.7).sample()
        tokens.append(torch.where(is_greedy, said[-1][:, -1], drawn)[:, None])
    return Lesson(torch.cat(tokens[:-1], 1), torch.cat(features, 1).float(), torch.cat(said, 1))


def lessons(model: Path, token_ids: Sequence[int]) -> Lesson:
    """What the head learns from: the first tokens of a text, and what the model makes of places in it. In
    bfloat16, which takes a third of the time where a CPU multiplies it."""
    from transformers import AutoModelForCausalLM

    target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        known = read(target, torch.tensor(token_ids[: NUM_TOKENS // ROW * ROW]).view(-1, ROW))
        places = torch.randint(0, len(token_ids) - START, (NUM_WRITTEN,)).tolist()
        starts = torch.stack([torch.tensor(token_ids[place : place + START]) for place in places])
        own = [written(target, part) for part in starts.split(64)]
    return Lesson(*(torch.cat(parts) for parts in zip(known, *own)))


def train(model: Path, token_ids: Sequence[int]) -> Head:
    """A head for the model in a directory. token_ids: of the text that it learns from."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    rows, features, said = lessons(model, token_ids)
    target: Any = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False)
    )
    head = Head(target).train()
    # The head of the model is large, and most tokens never occur here.
    classes = said.unique()
    class_of = torch.zeros(target.config.vocab_size, dtype=torch.int64)
    class_of[classes] = torch.arange(len(classes))
    weight = target.lm_head.weight[classes]
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    batches = [order.split(BATCH) for order in (torch.randperm(len(rows)) for _ in range(EPOCHS))]
    num_steps = sum(map(len, batches))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=num_steps, pct_start=0.1)
    for batch in (batch for epoch in batches for batch in epoch):
        out = head(rows[batch, 1:], features[batch, :-1])
        labels = class_of[said[batch, 1:]].flatten()
        loss = F.cross_entropy((out @ weight.T).flatten(0, 1), labels)
        loss = loss + F.smooth_l1_loss(out, features[batch, 1:]) / 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return head


def with_trained_head(directory: Path, model: Path, head: Head) -> Path:
    """The checkpoint of ``as_glm`` with its head."""
    number = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    directory.mkdir()
    (directory / "config.json").write_text((model / "config.json").read_text())
    tensors = {**load_file(model / "model.safetensors"), **head.tensors(number)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
