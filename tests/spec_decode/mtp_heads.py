"""MTP heads inside small checkpoints: of random weights, and one that guesses a model made for it without a
mistake. ``ReferenceMtp`` is the judge: the formulas, around a decoder layer of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity_reference import reference_model
from tests.spec_decode.eagle_heads import HALF, HIDDEN, crafted_model, mixing

STATE_FAMILIES = ("Qwen3Next", "Qwen3_5")
WEIGHTS = "model.safetensors"


def copied(directory: Path, source: Path, tensors: dict[str, Tensor]) -> Path:
    """The model in ``source`` with other tensors."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )
    return directory


def config_of(directory: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return entries


def has_states(directory: Path) -> bool:
    """Whether the family is one of Qwen's, which name their heads otherwise."""
    return config_of(directory)["architectures"][0].startswith(STATE_FAMILIES)


def head_names(directory: Path) -> dict[str, str]:
    """Published names of what a head has beside its layer."""
    if has_states(directory):
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
        return dict(zip(("fc", "enorm", "hnorm", "norm"), ("mtp.fc", *norms)))
    layer = f"model.layers.{config_of(directory)['num_hidden_layers']}"
    own = "eh_proj", "enorm", "hnorm", "shared_head.norm"
    return dict(zip(("fc", "enorm", "hnorm", "norm"), (f"{layer}.{name}" for name in own)))


def layer_prefix(directory: Path) -> str:
    """Where a head's layer lies in the checkpoint."""
    number = config_of(directory)["num_hidden_layers"]
    return "mtp.layers.0." if has_states(directory) else f"model.layers.{number}."


def random_head_tensors(source: Path, seed: int = 0) -> dict[str, Tensor]:
    """A head for a model whose last layer attends, by published names; norms and biases are random too."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = load_file(source / WEIGHTS)
    last = f"model.layers.{config_of(source)['num_hidden_layers'] - 1}."
    middle = 0.0 if has_states(source) else 1.0  # of norms
    head: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if name.startswith(last):
            if name.endswith("norm.weight"):
                value = middle + 0.2 * noise(*tensor.shape)
            elif name.endswith("bias"):
                value = 0.3 * noise(*tensor.shape)
            else:
                value = 1.2 * noise(*tensor.shape) / tensor.shape[-1] ** 0.5
            head[layer_prefix(source) + name.removeprefix(last)] = value
    names = head_names(source)
    head[f"{names['fc']}.weight"] = noise(HIDDEN, 2 * HIDDEN) / 8
    for norm in ("enorm", "hnorm", "norm"):
        head[f"{names[norm]}.weight"] = middle + 0.2 * noise(HIDDEN)
    if not has_states(source):  # copies that published checkpoints hold
        head[layer_prefix(source) + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        head[layer_prefix(source) + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return head


def with_random_head(directory: Path, source: Path, seed: int = 0) -> Path:
    """The model with a head that knows nothing."""
    return copied(directory, source, {**load_file(source / WEIGHTS), **random_head_tensors(source, seed)})


PREVIOUS_TOO: dict[str, Any] = {"use_qk_norm": False}
"""What ``crafted_glm`` needs of the family "glm4-moe"."""


def crafted_glm(directory: Path, glm: Path) -> Path:
    """``crafted_model`` of a GLM: no window lets layer 0 see the last token and the one before, but biases of q
    and k: scores depend on the distance alone, are equal at 0 and 1, and fall off steeply after that."""
    tensors = load_file(crafted_model(directory.with_name(f"{directory.name} without biases"), glm) / WEIGHTS)
    frequencies = 10000.0 ** -(torch.arange(4) / 4)  # of 8 turned elements
    is_used = torch.tensor([0.0, 1.0, 1.0, 0.0])
    keys, queries = torch.zeros(16), torch.zeros(16)
    keys[:4] = is_used
    queries[:4] = 12000.0 * torch.cos(frequencies / 2) * is_used
    queries[4:8] = -12000.0 * torch.sin(frequencies / 2) * is_used
    tensors["model.layers.0.self_attn.k_proj.bias"] = keys.repeat(2)
    tensors["model.layers.0.self_attn.q_proj.bias"] = queries.repeat(4)
    return copied(directory, glm, tensors)


def with_knowing_head(directory: Path, model: Path) -> Path:
    """``crafted_glm`` with the head that guesses everything it says. Its layer adds nothing: the token before
    the last one is known from nothing but the feature, and the last one from nothing but the embedding."""
    head = {
        name: torch.ones_like(tensor) if name.endswith("norm.weight") else torch.zeros_like(tensor)
        for name, tensor in random_head_tensors(model).items()
    }
    m, eye, zero = mixing(), torch.eye(HALF), torch.zeros(HALF, HALF)
    # √2 [e; 0] and √2 [e_before; …] -> [e; M(e_before + e)]
    from_embedding = torch.cat([torch.cat([eye, zero], 1), torch.cat([m, zero], 1)])
    from_feature = torch.cat([torch.cat([zero, zero], 1), torch.cat([m, zero], 1)])
    fc = head_names(model)["fc"]
    head[f"{fc}.weight"] = torch.cat([from_embedding, from_feature], 1) * 0.5**0.5
    return copied(directory, model, {**load_file(model / WEIGHTS), **head})


class ReferenceMtp:
    """A head as its formulas say, for a whole text at once, in float32: no cache, no chunks."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        """scratch: gets the model with one more layer, which transformers loads."""
        self.target = reference_model(directory)
        tensors = load_file(directory / WEIGHTS)
        self._names = head_names(directory)
        self._tensors = {name: tensors[f"{stored}.weight"] for name, stored in self._names.items()}
        self._adds = 1.0 if has_states(directory) else 0.0
        self._eps = config_of(directory)["rms_norm_eps"]
        self.layer = self._layer_of_transformers(directory, scratch, tensors)

    def _layer_of_transformers(self, directory: Path, scratch: Path, tensors: dict[str, Tensor]) -> Any:
        entries = config_of(directory)
        number, prefix = entries["num_hidden_layers"], layer_prefix(directory)
        longer = {
            f"model.layers.{number}.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(tuple(self._names.values()))
            and not name.endswith((f"{number}.embed_tokens.weight", "shared_head.head.weight"))
        }
        copied(scratch, directory, longer)
        entries["num_hidden_layers"] = number + 1
        if "layer_types" in entries:
            entries["layer_types"].append("full_attention")
        (scratch / "config.json").write_text(json.dumps(entries))
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
        return model.model.layers[-1]

    def features(self, tokens: list[int]) -> Tensor:
        """The target's hidden states after its final norm, [tokens, HIDDEN]."""
        with torch.inference_mode():
            states: Tensor = self.target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        return states[0]

    def step(self, tokens: list[int], features: Tensor) -> Tensor:
        """The next features [n, HIDDEN] of n tokens, each the one after that of its feature."""
        with torch.inference_mode():
            embedded = self.target.model.embed_tokens(torch.tensor(tokens))
            both = torch.cat([self._norm(embedded, "enorm"), self._norm(features, "hnorm")], -1)
            x = (both @ self._tensors["fc"].T)[None]
            places = torch.arange(len(tokens))[None]
            mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            turned = self.target.model.rotary_emb(x, position_ids=places)
            out = self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
            return self._norm((out[0] if isinstance(out, tuple) else out)[0], "norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return scaled * (self._adds + self._tensors[name])

    def guess(self, tokens: list[int], num_known: int) -> tuple[Tensor, Tensor]:
        """(logits [vocab] of what follows ``tokens``, the next feature), where the target has seen all but the
        last known one of them."""
        features = self.features(tokens[: num_known - 1])
        while True:
            outputs = self.step(tokens[1 : len(features) + 1], features)
            if len(features) == len(tokens) - 1:
                break
            features = torch.cat([features, outputs[-1:]])
        with torch.inference_mode():
            logits: Tensor = self.target.lm_head(outputs[-1])
        return logits, outputs[-1]
