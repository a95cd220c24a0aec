"""The judge of the end-to-end tests:
what transformers computes in float32, prompt by prompt, without any padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.processing.outputs import RequestOutput
from minivllm.worker.model_runner import ModelRunner

BLOCK_SIZE = 8
MAX_MODEL_LEN = 128
MAX_TOKENS = 16
PROMPT_LENGTHS = (1, 8, 33, 64)


def random_prompts(
    lengths: Sequence[int] = PROMPT_LENGTHS, vocab_size: int = 416, seed: int = 7
) -> list[list[int]]:
    """Seeded random token ids; ids 0 to 3 are special and left out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


_GUESSES: dict[tuple[int, ...], list[int]] = {}
"""Prompt -> token ids that an engine gave last. Where transformers agrees with each of them, one pass over all
of them tells so, in place of one pass for each."""


@lru_cache(maxsize=2)
def reference_model(directory: Path, gguf_file: str | None = None) -> Any:
    """The model as transformers loads it, in float32."""
    from transformers import AutoModelForCausalLM

    named = {} if gguf_file is None else {"gguf_file": gguf_file}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **named).eval()


@lru_cache(maxsize=4096)
def _reference_tokens(
    directory: Path, gguf_file: str | None, prompt: tuple[int, ...], max_tokens: int
) -> list[int]:
    model, ids = reference_model(directory, gguf_file), torch.tensor([prompt])
    guess = _GUESSES.get(prompt, [])[:max_tokens]
    with torch.inference_mode():
        if guess and _is_greedy(model, prompt, guess, max_tokens):
            return guess
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def _is_greedy(model: Any, prompt: tuple[int, ...], tokens: list[int], max_tokens: int) -> bool:
    """Whether each of the tokens is the likeliest one after those before it,
    and the answer ends where it must."""
    end = model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else {*(end or ())}
    if ends.intersection(tokens[:-1]) or (len(tokens) < max_tokens and tokens[-1] not in ends):
        return False
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist() == tokens


def reference_tokens(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = MAX_TOKENS,
    gguf_file: str | None = None,
) -> list[list[int]]:
    """What transformers' greedy ``generate`` appends to each prompt: it is not called where one pass confirms
    what an engine said."""
    return [_reference_tokens(directory, gguf_file, tuple(prompt), max_tokens) for prompt in prompts]


def reference_logits(directory: Path, token_ids: Sequence[int], gguf_file: str | None = None) -> Tensor:
    """Logits [len(token_ids), vocab] of one forward pass over all of them."""
    with torch.inference_mode():
        return reference_model(directory, gguf_file)(torch.tensor([list(token_ids)])).logits[0]


def tiny_llm(model: Path, **settings: Any) -> LLM:
    """An engine with ``tiny_settings``."""
    return LLM(**tiny_settings(model, **settings))


def tiny_settings(model: Path, **settings: Any) -> dict[str, Any]:
    """Of a float32 engine, eager unless asked otherwise,
    with small blocks so that short prompts fill several."""
    return {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "enforce_eager": True,
        "compile_in_background": False,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 128,
        **settings,
    }


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Complete prompts of token ids, all in one batch."""
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs):
        if output.outputs:  # no error
            _GUESSES[tuple(prompt)] = list(output.outputs[0].token_ids)
    return outputs


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Greedy completions of prompts of token ids."""
    return tokens_of(run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens)))


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of the first completion of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def runner_of(llm: LLM) -> ModelRunner:
    """The model runner behind an in-process engine."""
    return llm.llm_engine.client.core.executor.worker.runner  # type: ignore[attr-defined]


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[Tensor]]:
    """Every block of logits [rows, vocab] that the engine computes meanwhile, in order."""
    runner, recorded = runner_of(llm), []
    original: Callable[..., Tensor] = runner._logits

    def record(*args: Any) -> Tensor:
        logits = original(*args)
        recorded.append(logits.cpu().clone())
        return logits

    runner._logits = record  # type: ignore[method-assign]
    try:
        yield recorded
    finally:
        runner._logits = original  # type: ignore[method-assign]


def engine_logits(llm: LLM, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy completion of one prompt,
    and the engine's logits at every position from the first to the last sampled."""
    with recorded_logits(llm) as recorded:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=0)
        completion = tokens_of(run(llm, [prompt], params))[0]
    return completion, torch.cat(recorded)


def assert_pool_unused(llm: LLM) -> None:
    """No request is left, every block is free again, and the bookkeeping is without contradiction."""
    scheduler = llm.llm_engine.client.core.scheduler  # type: ignore[attr-defined]
    scheduler.check_integrity()
    assert not scheduler.requests
    assert (
        scheduler.kv_cache_manager.pools[0].num_free_blocks
        == scheduler.kv_cache_manager.pools[0].num_blocks - 1
    )
    assert llm.get_metrics().kv_cache_usage == 0.0


def check_gguf_in_engine(path: Path, source: Path, prompt: list[int], max_tokens: int) -> None:
    """The engine's logits of a GGUF file are those of transformers for the model it was written from,
    in chunks."""
    with tiny_llm(path, tokenizer=str(source), max_num_batched_tokens=7) as llm:
        completion, logits = engine_logits(llm, prompt, max_tokens)
    expected = reference_logits(source, prompt + completion[:-1])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
