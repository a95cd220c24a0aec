"""B · Worked example, a new logits processor: answers that must begin with given tokens, for those who ask for it.

"Answer with a JSON object" works better when the answer is made to begin with a brace. A stage of the sampler can do
that: it sees the logits before anything else does, and forbids all tokens but one. Fifteen lines, and nobody else in
the batch notices.
"""

# %% [markdown]
# ## The stage
# ``PositionMask`` is the seam: ``touches`` says, on the host, which rows it has anything to do with, so that all others
# cost nothing; ``apply`` edits the logits of a row, knowing its slot and how many tokens stand before the one to be
# sampled. It must not depend on which tokens those are: then it also works for guesses that are verified together
# (chapter 12).

# %%
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.frontend.outputs import RequestOutput
from minivllm.worker.persistent_batch import PersistentBatch
from minivllm.worker.sampler import Sampler
from minivllm.worker.sampling_state import PositionMask
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
MARK, BEGINNING, N = 500, [41, 42, 43, 44], 16


class ForcedBeginning:
    """Requests whose prompt ends with MARK answer with BEGINNING first."""

    def __init__(self, batch: PersistentBatch) -> None:
        self._batch = batch

    def _prompt_length(self, slot: int) -> int | None:
        """Prompt tokens of the marked request in this slot, if there is one."""
        for request in self._batch.requests.values():
            if request.slot == slot and request.data.prompt_token_ids[-1] == MARK:
                return len(request.data.prompt_token_ids)
        return None

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return np.array([self._prompt_length(slot) is not None for slot in slots.tolist()])

    def apply(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
            length = self._prompt_length(slot)
            if length is not None and position - length < len(BEGINNING):
                allowed = BEGINNING[position - length]
                kept = logits[row, allowed].clone()
                logits[row] = -torch.inf
                logits[row, allowed] = kept


# %% [markdown]
# ## Plug it in
# The sampler takes its masks in order. A grammar of the engine, if there is one, goes before this one.


# %%
def answers(prompts: list[list[int]], forced: bool, num_tokens: int = N, **engine: object) -> list[list[int]]:
    """What the engine writes, with or without the stage."""
    params = SamplingParams(temperature=0.1, seed=3, max_tokens=num_tokens, ignore_eos=True)
    with LLM(**engine_arguments(**engine)) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        if forced:
            masks: tuple[PositionMask, ...] = (runner.token_masks, ForcedBeginning(runner.batch))
            runner.sampler = Sampler(runner.sampling_state, masks=masks)
        given: list[RequestOutput] = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in given]


# %% [markdown]
# ## Predict
# The marked request begins as it must. What comes then is what the model would have written if the beginning had stood
# in its prompt: even the random numbers are the same, since they belong to positions (chapter 9). Its neighbour writes
# what it would have written alone.

# %%
lesson.heading("A marked request and its neighbour")
marked, neighbour = [7, 8, 9, MARK], [7, 8, 9, 10]
free = answers([marked, neighbour], forced=False)
expected = answers([marked + BEGINNING], forced=False, num_tokens=N - len(BEGINNING))[0]
lesson.predict("beginning of the marked answer", BEGINNING, "nothing else was allowed")
lesson.predict("its other tokens that differ from a longer prompt's", 0, "the same logits, the same noise")
lesson.predict("tokens of the neighbour that changed", 0, "its rows are not touched")
forced = answers([marked, neighbour], forced=True)
lesson.measure("beginning of the marked answer", forced[0][: len(BEGINNING)])
differing = sum(a != b for a, b in zip(forced[0][len(BEGINNING) :], expected))
lesson.measure("its other tokens that differ from a longer prompt's", differing)
lesson.measure("tokens of the neighbour that changed", sum(a != b for a, b in zip(forced[1], free[1])))
lesson.check(forced[0] != free[0], "without the stage the marked answer is another one")


def shown(tokens: list[int], count: int) -> list[Cell]:
    return [(str(token), "prompt" if place < count else "decode") for place, token in enumerate(tokens)]


rows = {"free": shown(free[0], 0), "forced": shown(forced[0], len(BEGINNING)), "neighbour": shown(forced[1], 0)}
lesson.cells("e02_forced", "Answers", rows, legend={"prompt": "forced", "decode": "sampled"})

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Does it survive preemption? Squeeze five marked requests into five blocks, and compare with plenty of room."
)
def preempted() -> str:
    prompts = [[n, n + 1, n + 2, MARK] for n in range(20, 25)]
    roomy = answers(prompts, forced=True, num_tokens=30)
    squeezed = answers(prompts, forced=True, num_tokens=30, num_gpu_blocks_override=6, max_model_len=64)
    assert roomy == squeezed and all(tokens[:4] == BEGINNING for tokens in squeezed)
    return "the same answers: a request that comes back finds its slot and its length, and needs nothing else"


@lesson.exercise("And speculative decoding? Let prompt lookup guess: are the answers the same?")
def speculative() -> str:
    prompts = [[*BEGINNING, 5, 6, *BEGINNING, 5, MARK], marked]
    plain = answers(prompts, forced=True)
    guessed = answers(prompts, forced=True, speculative_config={"method": "ngram"})
    assert plain == guessed
    return "the same: a mask by position is there for every guessed position in advance"


lesson.passed(
    "a marked answer begins as it must, and goes on as if that had stood in its prompt",
    "its neighbour does not notice",
)
