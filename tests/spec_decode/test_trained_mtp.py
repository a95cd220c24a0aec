"""An MTP head that was trained in minutes saves steps: on chapters that it has not seen, a step gives at least
1.5 tokens, and they are the tokens of the model alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from tests.spec_decode.drafting_cases import always_drafts
from tests.spec_decode.trained_mtp import (
    NUM_HELD_OUT,
    as_glm,
    chapters,
    tokens_of_text,
    train,
    with_trained_head,
)

PROMPT_LENGTH, ANSWER_LENGTH = 64, 96


def answers(
    model: Path, gguf: Path, prompts: list[list[int]], **settings: Any
) -> tuple[list[list[int]], float]:
    """Greedy answers, and tokens per step of a request that verifies drafts."""
    llm = LLM(
        model=str(model),
        tokenizer=str(gguf),
        dtype="float32",
        device="cpu",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        num_gpu_blocks_override=48,
        **settings,
    )
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_LENGTH, ignore_eos=True)
    with llm if "speculative_config" not in settings else always_drafts(llm):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        metrics = llm.get_metrics()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, 1 + metrics.num_accepted_tokens / max(1, metrics.num_drafts)


@pytest.mark.matrix  # minutes of training
@pytest.mark.timeout(3600)
def test_a_head_that_was_trained_in_minutes_saves_a_third_of_the_steps(
    smollm2_path: Path, tmp_path: Path
) -> None:
    texts = chapters()
    [seen] = tokens_of_text(smollm2_path, ["\n\n".join(texts[:-NUM_HELD_OUT])])
    held_out = tokens_of_text(smollm2_path, texts[-NUM_HELD_OUT:])
    prompts = [tokens[:PROMPT_LENGTH] for tokens in held_out if len(tokens) >= PROMPT_LENGTH][:6]
    model = as_glm(tmp_path / "model", smollm2_path)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        head = train(model, seen)
        seconds = time.process_time() - start
    finally:
        torch.set_num_threads(num_threads)
    trained = with_trained_head(tmp_path / "trained", model, head)
    drafting = {"method": "mtp", "num_speculative_tokens": 3, "verification_cost": 0.0}
    plain, _ = answers(model, smollm2_path, prompts)
    tokens, per_step = answers(trained, smollm2_path, prompts, speculative_config=drafting)
    print(f"{seconds:.0f} s of one core, {per_step:.2f} tokens per step")
    assert tokens == plain
    assert per_step >= 1.5
