"""SmolLM2-135M in plain PyTorch, frozen: what the eye is trained through, in the second phase."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minivllm.hub.fetch import resolve_model
from tutorials.eye_training.model import PLACEHOLDER, PLACEHOLDER_ID


class Language:
    """The built-in model, with its tokenizer. dtype: of its arithmetic; bfloat16 is faster."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = resolve_model("smollm2")
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        self.model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).to(dtype)
        self.model.eval().requires_grad_(False)
        self.dtype = dtype
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{PLACEHOLDER}?"}], tokenize=False, add_generation_prompt=True
        )
        before, after = text.split(f"{PLACEHOLDER}?")
        self._before, self._after = self.ids(before), after
        self._prefix: Any = None

    def ids(self, text: str) -> list[int]:
        """Its tokens; special ones count."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    @property
    def table(self) -> Tensor:
        """Embeddings of all tokens, [vocabulary, hidden]."""
        weights: Tensor = self.model.get_input_embeddings().weight
        return weights

    def loss(self, images: Tensor, questions: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Cross-entropy of the answers' tokens. images: float32 [images, embeds, hidden]."""
        prompts = [self.ids(question + self._after) for question in questions]
        ends = [self.ids(f"{answer}<|im_end|>") for answer in answers]
        width = max(len(prompt) + len(end) for prompt, end in zip(prompts, ends))
        ids = torch.full((len(prompts), width), PLACEHOLDER_ID)
        targets = torch.full((len(prompts), width), -100)
        for row, (prompt, end) in enumerate(zip(prompts, ends)):
            ids[row, : len(prompt) + len(end)] = torch.tensor(prompt + end)
            targets[row, len(prompt) - 1 : len(prompt) + len(end) - 1] = torch.tensor(end)
        table = self.model.get_input_embeddings()
        inputs = torch.cat([images.to(self.dtype), table(ids)], dim=1)
        hidden = self.model.model(inputs_embeds=inputs, **self._after_prefix(len(ids))).last_hidden_state
        is_target = targets >= 0
        logits = self.model.lm_head(hidden[:, images.shape[1] :][is_target]).float()
        return functional.cross_entropy(logits, targets[is_target])

    @torch.no_grad()
    def answer(self, images: Tensor, question: str, most: int = 24) -> list[str]:
        """The most probable answers to one question, greedily. images: as above."""
        table = self.model.get_input_embeddings()
        prompt = table(torch.tensor([self.ids(question + self._after)])).expand(len(images), -1, -1)
        state = self._after_prefix(len(images))
        inputs, tokens = torch.cat([images.to(self.dtype), prompt], dim=1), []
        end = self.ids("<|im_end|>")[0]
        for _ in range(most):
            hidden = self.model.model(inputs_embeds=inputs, **state).last_hidden_state
            tokens.append(self.model.lm_head(hidden[:, -1]).argmax(-1))
            inputs = table(tokens[-1])[:, None]
            if (torch.stack(tokens) == end).any(0).all():
                break
        rows = torch.stack(tokens, dim=1).tolist()
        rows = [row[: row.index(end)] if end in row else row for row in rows]
        texts: list[str] = self.tokenizer.batch_decode(rows)
        return texts

    def _after_prefix(self, count: int) -> dict[str, Any]:
        """What makes the model go on after the beginning of every chat, which is computed once."""
        from transformers import DynamicCache

        parameters = inspect.signature(type(self.model.model).forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"  # transformers before 5.24
        if self._prefix is None:
            self._prefix = DynamicCache()
            with torch.no_grad():
                self.model.model(torch.tensor([self._before]), use_cache=True, **{name: self._prefix})
        cache = DynamicCache()
        for number, layer in enumerate(self._prefix.layers):
            shape = count, -1, -1, -1
            cache.update(layer.keys.expand(shape), layer.values.expand(shape), number)
        return {name: cache, "use_cache": True}
