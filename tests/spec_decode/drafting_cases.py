"""What models that guess ahead are tested with:
prompts, ways to cut the work, and engines whose guesses are seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.spec_decode.drafter import DraftTask
from tests.parity_reference import random_prompts
from tests.spec_decode.scripted_drafter import speculation_of

_WORDS = random_prompts((6, 9, 7), seed=21)
PROMPTS = [_WORDS[0] * 3, _WORDS[1], _WORDS[2] * 2 + _WORDS[0], _WORDS[0], _WORDS[1] * 3]
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=13, ignore_eos=True, seed=3),
    SamplingParams(temperature=0.7, max_tokens=MAX_TOKENS, ignore_eos=True, seed=4, top_p=0.9, top_k=50),
    SamplingParams(temperature=1.3, max_tokens=11, ignore_eos=True, seed=5, min_p=0.01),
    GREEDY,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7},
    "preemption": {"max_model_len": 64, "num_gpu_blocks_override": 1 + 10},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 2},
}


def always_drafts(llm: LLM, count: int = 3) -> LLM:
    """However costly it is: how many guesses pay is not what is tested."""
    speculation_of(llm).lengths.choose = lambda request_id, batch_size: count  # type: ignore[method-assign]
    return llm


def recorded_guesses(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """(known tokens, guesses) of every request and step from here on."""
    drafter = speculation_of(llm).drafter
    original, recorded = drafter.propose, []

    def propose(tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        known = {task.request_id: task.token_ids.tolist() for task in tasks}
        proposals = original(tasks)
        recorded.extend((known[request_id], list(guess)) for request_id, guess in proposals.items())
        return proposals

    drafter.propose = propose  # type: ignore[method-assign]
    return recorded
