"""With any drafter, sampled tokens have the distribution of the model, over more than 50,000 tokens.

Every token was drawn from a distribution that is known: transformers computes it from the text before. How
often each token followed each other one is compared with what these distributions let expect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import SamplingParams
from minivllm.spec_decode.drafter import DraftTask
from tests.parity_reference import random_prompts, reference_model, tiny_llm
from tests.spec_decode.eagle_heads import random_head
from tests.spec_decode.scripted_drafter import speculation_of

TinyModel = Callable[..., Path]

TOKENS = [10, 57, 130, 211, 330]
"""The small vocabulary: no other tokens are allowed."""
NUM_REQUESTS, LENGTH = 128, 400
TEMPERATURE = 3.0
NUM_DRAFTS = 2
# 5 tokens before, 5 tokens each whose numbers add up:
# 20 degrees of freedom, and 52.4 is passed once in 10,000 times.
DEGREES, LIMIT = len(TOKENS) * (len(TOKENS) - 1), 52.4


class StubbornDrafter:
    """Guesses the same wherever it is asked:
    the likeliest mistake to be made with guesses is to prefer them."""

    cost_per_token = 0.0

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        return {task.request_id: TOKENS[:1] * min(task.max_tokens, NUM_DRAFTS) for task in tasks}

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """It learns nothing."""


@pytest.fixture(scope="module")
def models(tiny_model: TinyModel) -> dict[str, Path]:
    """The model that each drafter guesses for: of one layer, or of as many as the drafter needs."""
    return defaultdict(
        lambda: tiny_model("llama", num_hidden_layers=1),
        {name: tiny_model("llama", num_hidden_layers=n) for name, n in (("early_exit", 2), ("eagle3", 3))},
    )


@pytest.fixture(scope="module")
def drafters(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any] | None]:
    heads = tmp_path_factory.mktemp("heads")
    return {
        "none": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "suffix": {"method": "suffix"},
        "early_exit": {"method": "early_exit", "num_layers": 1},
        "draft_model": {"method": "draft_model", "model": str(tiny_model("llama", num_hidden_layers=2))},
        "eagle": {"method": "eagle", "model": str(random_head(heads / "eagle", "eagle"))},
        "eagle3": {"method": "eagle3", "model": str(random_head(heads / "eagle3", "eagle3"))},
        "stubborn": {"method": "ngram"},
    }


def sampled(model: Path, name: str, config: dict[str, Any] | None) -> list[list[int]]:
    """Texts [NUM_REQUESTS] of a first token and LENGTH others, drawn with drafts in nearly every step."""
    settings: dict[str, Any] = {"max_num_seqs": NUM_REQUESTS, "block_size": 64, "max_model_len": LENGTH + 8}
    settings |= {"num_gpu_blocks_override": 1 + 7 * NUM_REQUESTS}
    if config is not None:
        settings["speculative_config"] = {
            **config,
            "num_speculative_tokens": NUM_DRAFTS,
            "verification_cost": 0.0,
        }
    prompt = random_prompts((1,), seed=3)[0]
    params = SamplingParams(
        n=NUM_REQUESTS,
        temperature=TEMPERATURE,
        max_tokens=LENGTH,
        ignore_eos=True,
        allowed_token_ids=TOKENS,
        seed=11,
    )
    with tiny_llm(model, **settings) as llm:
        if config is not None:
            speculation = speculation_of(llm)
            speculation.lengths.choose = lambda request_id, batch_size: NUM_DRAFTS  # type: ignore[method-assign]
            if name == "stubborn":
                speculation.drafter = StubbornDrafter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        metrics = llm.get_metrics()
    if config is not None:
        assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
        assert metrics.num_drafts > NUM_REQUESTS * LENGTH / 5
    return [prompt + list(completion.token_ids) for completion in output.outputs]


def statistic(model: Path, texts: list[list[int]]) -> float:
    """χ² of the tokens by the token before; texts begin with a token that is not counted."""
    chances = torch.cat([_chances(model, texts[i : i + 16]) for i in range(0, len(texts), 16)])
    place = {token: index for index, token in enumerate(TOKENS)}
    indices = torch.tensor([[place[token] for token in text[1:]] for text in texts])
    before, after = indices[:, :-1].flatten(), indices[:, 1:].flatten()
    chances = chances.flatten(0, 1)
    total = 0.0
    for token in range(len(TOKENS)):
        p = chances[before == token]
        observed = torch.bincount(after[before == token], minlength=len(TOKENS)).double()
        deviation = observed - p.sum(0)
        # Each draw is a multinomial one of its own; their covariances add up.
        covariance = p.sum(0).diag() - p.T @ p
        total += float(deviation @ torch.linalg.pinv(covariance) @ deviation)
    return total


def _chances(model: Path, texts: list[list[int]]) -> Tensor:
    """[texts, LENGTH - 1, TOKENS] float64: of the third token of each text and those behind it."""
    with torch.inference_mode():
        logits = reference_model(model)(torch.tensor(texts), use_cache=False).logits[:, 1:-1]
    return (logits[..., TOKENS].double() / TEMPERATURE).softmax(-1)


@pytest.mark.parametrize(
    "name",
    [
        "ngram",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("none", "suffix", "early_exit", "draft_model", "eagle", "eagle3", "stubborn")
        ),
    ],
)
def test_tokens_are_distributed_as_the_model_says(
    models: dict[str, Path], drafters: dict[str, dict[str, Any] | None], name: str
) -> None:
    model = models[name]
    texts = sampled(model, name, drafters[name])
    assert sum(len(text) - 2 for text in texts) > 50_000
    assert statistic(model, texts) < LIMIT
    # The judge itself: if one token in fifty were a guess that was not drawn, it would notice.
    generator = torch.Generator().manual_seed(0)
    for text in texts:
        for position in torch.nonzero(torch.rand(LENGTH, generator=generator) < 0.02).flatten().tolist():
            text[1 + position] = TOKENS[0]
    assert statistic(model, texts) > 2 * LIMIT
