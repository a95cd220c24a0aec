"""B · Worked example, a new logits processor: answers that must begin with given tokens, where asked for.

"Answer with a JSON object" works better when the answer is made to begin with a brace. A logits processor can
do that: it sees the logits before anything is drawn from them, and forbids all tokens but one. Its two
methods with work in them are short, and no other request in the batch notices.
"""

# %% [markdown]
# ## The processor
# ``LogitsProcessor`` is the protocol. One object serves all requests: ``update_state`` tells it which of them
# came, left or changed places, ``apply`` gets the logits of all of them at once, request i in row i.
# ``concerns`` keeps it away from requests that it has nothing to do with, which then cost nothing. It may
# look at what a request has said so far, and at nothing else: then its answers are the same with guesses that
# are verified together (chapter 12).

# %%
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm import LLM, BatchUpdate, LogitsProcessor, SamplingParams
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
BEGINNING, N = [41, 42, 43, 44], 16
Forced = tuple[list[int], Sequence[int]]


class ForcedBeginning(LogitsProcessor):
    """Requests with extra_args {"beginning": token ids} answer with these first."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._rows: dict[int, Forced] = {}

    @classmethod
    def concerns(cls, params: SamplingParams) -> bool:
        return "beginning" in (params.extra_args or {})

    def is_argmax_invariant(self) -> bool:
        return False  # it forbids what may be the likeliest token

    def update_state(self, update: BatchUpdate) -> None:
        update.apply_to(
            self._rows, lambda added: ((added.params.extra_args or {})["beginning"], added.output_token_ids)
        )

    def apply(self, logits: Tensor) -> Tensor:
        for row in range(len(logits)):
            beginning, output = self._rows[row]
            if len(output) < len(beginning):
                allowed = beginning[len(output)]
                kept = logits[row, allowed].clone()
                logits[row] = -torch.inf
                logits[row, allowed] = kept
        return logits


# %% [markdown]
# ## Plug it in
# ``LLM(logits_processors=[ForcedBeginning])``, and each request says in ``extra_args`` what it wants of it.
# An engine in a process of its own cannot be handed a class; it takes ``"package.module:ForcedBeginning"``,
# as does the command line.


# %%
def answers(
    prompts: list[list[int]], forced: list[bool], num_tokens: int = N, **engine: object
) -> list[list[int]]:
    """What the engine writes; which requests have to begin as told."""
    params = [
        SamplingParams(
            temperature=0.1,
            seed=3,
            max_tokens=num_tokens,
            ignore_eos=True,
            extra_args={"beginning": BEGINNING} if is_forced else None,
        )
        for is_forced in forced
    ]
    with LLM(**engine_arguments(**engine), logits_processors=[ForcedBeginning]) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


# %% [markdown]
# ## Predict
# The forced request begins as it must. What comes then is what the model would have written if the beginning
# had stood in its prompt: even the random numbers are the same, since they belong to positions (chapter 9).
# Its neighbour writes what it would have written alone.

# %%
lesson.heading("A forced request and its neighbour")
own, neighbour = [7, 8, 9, 11], [7, 8, 9, 10]
free = answers([own, neighbour], [False, False])
expected = answers([own + BEGINNING], [False], num_tokens=N - len(BEGINNING))[0]
lesson.predict("beginning of the forced answer", BEGINNING, "nothing else was allowed")
lesson.predict("its other tokens that differ from a longer prompt's", 0, "the same logits, the same noise")
lesson.predict("tokens of the neighbour that changed", 0, "its rows are not touched")
forced = answers([own, neighbour], [True, False])
lesson.measure("beginning of the forced answer", forced[0][: len(BEGINNING)])
differing = sum(a != b for a, b in zip(forced[0][len(BEGINNING) :], expected))
lesson.measure("its other tokens that differ from a longer prompt's", differing)
lesson.measure("tokens of the neighbour that changed", sum(a != b for a, b in zip(forced[1], free[1])))
lesson.check(forced[0] != free[0], "without the processor it is another answer")


def shown(tokens: list[int], count: int) -> list[Cell]:
    return [(str(token), "prompt" if place < count else "decode") for place, token in enumerate(tokens)]


rows = {
    "free": shown(free[0], 0),
    "forced": shown(forced[0], len(BEGINNING)),
    "neighbour": shown(forced[1], 0),
}
lesson.cells("e02_forced", "Answers", rows, legend={"prompt": "forced", "decode": "sampled"})

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Does it survive preemption? Squeeze five forced requests into five blocks, and compare with plenty of "
    "room."
)
def preempted() -> str:
    prompts = [[n, n + 1, n + 2] for n in range(20, 25)]
    roomy = answers(prompts, [True] * 5, num_tokens=30)
    squeezed = answers(prompts, [True] * 5, num_tokens=30, num_gpu_blocks_override=6, max_model_len=64)
    assert roomy == squeezed and all(tokens[:4] == BEGINNING for tokens in squeezed)
    return "the same answers: a request that comes back brings its output along, and needs nothing else"


@lesson.exercise("And speculative decoding? Let prompt lookup guess: are the answers the same?")
def speculative() -> str:
    prompts = [[*BEGINNING, 5, 6, *BEGINNING, 5], own]
    plain = answers(prompts, [True, True])
    guessed = answers(prompts, [True, True], speculative_config={"method": "ngram"})
    assert plain == guessed
    return "the same: guesses of such a request are verified one by one, each with the output before it"


lesson.passed(
    "a forced answer begins as it must, and goes on as if that had stood in its prompt",
    "its neighbour does not notice",
)
