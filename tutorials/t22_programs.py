"""22 · Programs: a prefix that never changes is computed once.

Programs on top of a model ask many times: a chain of turns, several branches, a choice among texts. Each
request begins with the text before. An engine that keeps keys and values has computed that already, if the
tokens are the same. How many tokens remain? (SGLang, Zheng et al. 2024.)
"""

# %% [markdown]
# ## A tokenizer for the small model
# A program works on text, so the random model gets a tokenizer: one token for each byte.

# %%
from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minivllm import LLM
from minivllm.lang import State, join, program, run_offline
from tutorials.lesson import Lesson
from tutorials.small_model import SHAPE, engine_arguments, model_folder

lesson = Lesson(__doc__)
folder = model_folder(SHAPE)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({letter: number + 2 for number, letter in enumerate(letters)}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
arguments = engine_arguments(model=str(folder), num_gpu_blocks_override=64)
TEXT = "A plan that all branches begin with. " * 4 + "Ready? "
PLAN, BRANCHES, PART = 30, 4, 20


def computed(llm: LLM, work: object, *given: object) -> int:
    """Tokens that the engine computes for a program, with an empty cache."""
    llm.reset_prefix_cache()
    before = llm.get_metrics().num_computed_tokens
    [outcome] = run_offline(llm, work, [given])  # type: ignore[arg-type]
    if outcome.error is not None:
        raise outcome.error
    return llm.get_metrics().num_computed_tokens - before


# %% [markdown]
# ## Branches
# The program generates a plan, and several branches go on from it. What was sampled is appended as it was
# sampled, and an appended text is tokenised by itself. So all branches have the tokens of the plan, and only
# the last of them has not been computed yet: it was sampled, and nothing came after it. The engine shares
# whole blocks, and copies the block in which two texts part if at least 8 of its tokens are the same. Here
# they are.


# %%
@program(temperature=0.0, ignore_eos=True)
async def branches(s: State) -> None:
    s += TEXT
    await s.gen("plan", max_tokens=PLAN)
    parts = s.fork(BRANCHES)
    for number, part in enumerate(parts):
        part += f"{number}."
    await join(parts, lambda part: part.gen("text", max_tokens=PART))


lesson.heading("One plan, four branches")
length = len(TEXT)
alone = (length + PLAN - 1) + BRANCHES * (length + PLAN + 2 + PART - 1)
lesson.predict("without reuse", alone, "every request from its beginning")
lesson.predict(
    "with reuse",
    (length + PLAN - 1) + BRANCHES * (1 + 2 + PART - 1),
    "the plan once; each branch adds the last token of the plan, its number, and what it generates",
)
counts = []
for reuse in (False, True):
    with LLM(**{**arguments, "enable_prefix_caching": reuse}) as llm:
        counts.append(computed(llm, branches))
        lesson.measure("with reuse" if reuse else "without reuse", counts[-1])

parent = length + PLAN - 1
lesson.cells(
    "t22_tree",
    "Tokens of each request",
    {
        "plan": [(f"{parent}", "prompt")],
        **{
            f"branch {number}": [(f"{parent}", "cached"), (f"{1 + 2}", "prompt"), (f"{PART - 1}", "decode")]
            for number in range(BRANCHES)
        },
    },
    legend={"prompt": "computed", "cached": "found in the cache", "decode": "generated"},
)

# %% [markdown]
# ## A choice
# The score of a text is the mean logprob of its tokens. The logits after token i predict token i + 1, so the
# last token of the prompt must be computed with each choice. If all choices are single tokens, one request
# gives the logprobs of all of them.


# %%
@program
async def choice(s: State, choices: list[str]) -> str:
    s += TEXT
    await s.commit()
    return await s.select("choice", choices)


lesson.heading("A choice among four texts")
lesson.predict(
    "four texts of 3 tokens", length + 4 * (1 + 3), "the prompt once, then one token and the choice, each"
)
lesson.predict(
    "four single tokens", length + 1, "one request, which computes the last token of the prompt again"
)
with LLM(**arguments) as llm:
    lesson.measure("four texts of 3 tokens", computed(llm, choice, ["one", "two", "six", "ten"]))
    lesson.measure("four single tokens", computed(llm, choice, ["1", "2", "6", "9"]))

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise("How many tokens do the branches compute if whole blocks of 16 tokens are reused?")
def by_blocks() -> str:
    with LLM(**{**arguments, "reuse_partial_blocks": False}) as llm:
        count = computed(llm, branches)
    shared = (length + PLAN - 1) // 16 * 16
    assert count == (length + PLAN - 1) + BRANCHES * (length + PLAN + 2 + PART - 1 - shared)
    return f"{count:,}: each branch computes {length + PLAN - shared} tokens of the plan again"


@lesson.exercise(
    "Sampled tokens stay as they were sampled. Show a text whose tokens would change if it were sent."
)
def sampled_tokens() -> str:
    merged = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    assert merged.encode("ab").ids == [2]
    return (
        "a model may sample 'a' and then 'b'; as a text that is the one token 'ab', and no block is found "
        "again"
    )


lesson.passed(
    f"{counts[1]} instead of {counts[0]:,} tokens for four branches",
    "a choice computes one token more than it has",
)
