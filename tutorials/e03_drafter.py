"""C · Worked example, a new drafter: what usually follows this token, learnt from the answers so far.

Chapter 12 said what a drafter may do: guess. It can be anything that proposes tokens, since the model checks
them all. This one remembers, for every pair of tokens, what came next the last time. It is short, and it
plugs into the engine.
"""

# %% [markdown]
# ## The drafter
# ``propose`` is asked once per step, for all requests that write. ``finish`` is told when one has left: here
# that is when its text is learnt from, so that the next user profits.

# %%
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from minivllm import LLM, Drafter, DraftTask, SamplingParams, register_drafter
from minivllm.messages import SchedulerStats
from tutorials.lesson import Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
K, N, OUTSIDE = 6, 24, 512  # the small model knows the ids 0 to 511


class PairDrafter(Drafter):
    """Continues with what followed the last two tokens in an earlier answer."""

    cost_per_token = 0.0

    def __init__(self) -> None:
        self.next_of: dict[tuple[int, int], int] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        return {task.request_id: guess for task in tasks if (guess := self._continue(task))}

    def _continue(self, task: DraftTask) -> list[int]:
        first, second = task.token_ids[-2:].tolist()
        guess: list[int] = []
        while len(guess) < task.max_tokens and (first, second) in self.next_of:
            first, second = second, self.next_of[first, second]
            guess.append(second)
        return guess

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        triples = zip(output_token_ids, output_token_ids[1:], output_token_ids[2:])
        self.next_of.update({(first, second): third for first, second, third in triples})


# %% [markdown]
# ## The same question three times
# The first time it knows nothing. The second time it knows the whole answer, unless a pair of tokens occurs
# twice with different continuations. So take a prompt whose answer has no such pair, and predict: the prompt
# gives the first token, the second must be written alone (its pair holds a token of the prompt), and from
# there on every step writes K + 1 tokens.


# %%
def ask(drafter: Drafter, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[SchedulerStats]]:
    """Ask one after the other; the answers, and the counters after each."""
    params = SamplingParams(temperature=0.0, max_tokens=N, ignore_eos=True)
    answers, stats = [], []
    register_drafter("pairs", lambda context: drafter)
    # Where checking a guess costs nothing, the engine always asks for as many as it may:
    # K, so steps can be predicted.
    speculative = {"method": "pairs", "num_speculative_tokens": K, "verification_cost": 0.0}
    with LLM(**engine_arguments(enable_prefix_caching=False), speculative_config=speculative) as llm:
        for prompt in prompts:
            [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
            stats.append(llm.get_metrics())
    return answers, stats


class Silent(Drafter):
    """Never guesses: the control."""

    cost_per_token = 0.0

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        return {}

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        pass


def is_unambiguous(answer: list[int]) -> bool:
    return len(set(pairwise(answer))) == len(answer) - 1


lesson.heading("The same question, again and again")
candidates = [[(seed * i + 3 * seed) % 512 for i in range(1, 9)] for seed in range(2, 40)]
control, _ = ask(Silent(), candidates)
which = next(index for index, answer in enumerate(control) if is_unambiguous(answer))
prompt, answer = candidates[which], control[which]
lesson.say(f"  prompt {prompt}")
rest = N - 2
lesson.predict("steps, first time", N, "nothing is known")
lesson.predict(
    "steps, second and third time", [2 + -(-rest // (K + 1))] * 2, f"2, then {K + 1} tokens a step"
)
answers, stats = ask(PairDrafter(), [prompt] * 3)
totals = [0, *(entry.num_steps for entry in stats)]
steps = [later - earlier for earlier, later in pairwise(totals)]
lesson.measure("steps, first time", steps[0])
lesson.measure("steps, second and third time", steps[1:])
lesson.check(all(given == answer for given in answers), "the three answers are the same, and the control's")
lesson.bars(
    "e03_steps", f"Steps for {N} tokens", {f"time {n}": count for n, count in enumerate(steps, 1)}, "steps"
)

# %% [markdown]
# ## Another question
# On a question it has never seen, it guesses little, and mostly wrong.
# That costs some work and changes nothing.

# %%
lesson.heading("Questions it has never seen")
answers, stats = ask(PairDrafter(), candidates)
lesson.predict("answers that changed", 0, "the model checks every guess")
lesson.measure("answers that changed", sum(a != b for a, b in zip(answers, control)))
final = stats[-1]
lesson.say(f"  {final.num_accepted_tokens} of {final.num_draft_tokens} guesses were right")
lesson.check(
    final.num_steps + final.num_accepted_tokens == N * len(candidates), "every right guess saved a step"
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Let it learn while it writes, not only when a request has left. (Answers that run in circles profit.)"
)
def learning() -> str:
    class Learning(PairDrafter):
        def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
            for task in tasks:
                self.finish(task.request_id, task.token_ids[-2 * K :].tolist())
            return super().propose(tasks)

    answers, stats = ask(Learning(), candidates[:12])
    _, plain = ask(PairDrafter(), candidates[:12])
    assert answers == control[:12] and stats[-1].num_steps < plain[-1].num_steps
    return f"{stats[-1].num_steps} steps instead of {plain[-1].num_steps} for the same twelve answers"


@lesson.exercise("A drafter that proposes a token outside of the vocabulary: what should happen? Try it.")
def nonsense() -> str:
    class Nonsense(Silent):
        def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
            return {task.request_id: [OUTSIDE] * task.max_tokens for task in tasks}

    answers, stats = ask(Nonsense(), [prompt])
    assert answers == [answer] and stats[-1].num_draft_tokens == 0
    return "the same answer: an id outside has no embedding, so the engine drops it, and says so once"


lesson.passed(
    f"a question asked again takes {steps[1]} steps instead of {steps[0]}",
    "no answer changes",
    "every right guess saves a step",
)
