"""25 · An eye: 1.7 million weights that a language model reads as if they were words.

Chapter 24 had random weights. Here a small encoder, trained in this repository, is joined to SmolLM2, a model
that reads texts only. It sees 64 × 64 pixels and says about 40 words, which is enough to watch the whole path
with real answers. (LLaVA, Liu et al. 2023; llama.cpp joins such files as "mmproj".) The first run fetches the
language model, 93 MB.
"""

# %% [markdown]
# ## The eye
# Images are cut into patches of 16 × 16 pixels. SigLIP's layers make 128 numbers of each, and LLaVA's
# projector makes 576 of these: as many as an embedding of SmolLM2 has. The training froze the language model,
# so that texts are answered as before.

# %%
from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.engine.core import EngineCore
from tutorials.eye_training.canvases import EDGE
from tutorials.eye_training.marks import rate_answers, read_answer, read_sheet
from tutorials.eye_training.scenes import WHAT, WHICH_COLOUR, WHICH_DIGIT
from tutorials.lesson import Lesson

lesson = Lesson(__doc__)
FOLDER = Path(__file__).parent / "eye"
PATCH, BLOCK, SHOWN = 16, 16, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
llm = LLM(
    eye=str(FOLDER),
    device="cpu",
    enforce_eager=True,
    max_model_len=512,
    max_num_seqs=8,
    block_size=BLOCK,
    num_gpu_blocks_override=256,
)
core: EngineCore = llm.llm_engine.client.core  # type: ignore[attr-defined]
unseen = read_sheet(FOLDER / "unseen")
"""Canvases that were held out, and what they show."""


def message(text: str, image: Any = None) -> list[dict[str, Any]]:
    if image is None:
        return [{"role": "user", "content": text}]
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def ask(text: str, *images: Any) -> list[str]:
    """The answers to one question about each image."""
    outputs = llm.chat([message(text, image) for image in images], GREEDY, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def encoded() -> int:
    """Images that were encoded since the start."""
    assert core.encodings is not None
    return core.encodings.num_encoded_units


# %% [markdown]
# ## The span
# SmolLM2's chat template knows no images. So the engine writes a token that no chat uses before the text of
# the message, and puts the image's span in its place.

# %%
lesson.heading("Tokens of an image")
patches = (EDGE // PATCH) ** 2
lesson.predict("tokens that an image adds", patches, "one for each patch; LLaVA writes no markers")
with_image, without = (
    len(llm.chat([message(WHAT[0], image)], GREEDY, use_tqdm=False)[0].prompt_token_ids)
    for image in (unseen[0][1], None)
)
lesson.measure("tokens that an image adds", with_image - without)

# %% [markdown]
# ## What it sees
# Answers about canvases that it was not trained on: other handwriting, other parts of the photographs. Every
# word is an ordinary token of the language model.

# %%
scenes, canvases = zip(*unseen[:SHOWN], strict=True)
answers = ask(WHAT[0], *canvases)
rows: dict[str, list[tuple[str, str]]] = {}
for number, (scene, answer) in enumerate(zip(scenes, answers)):
    right, said = scene.caption.rstrip(".").split(), answer.rstrip(".").split()
    rows[f"canvas {number}"] = [
        (word, "cached" if right[place : place + 1] == [word] else "wasted")
        for place, word in enumerate(said)
    ]
lesson.cells("t25_answers", "What the model says", rows, legend={"cached": "right", "wasted": "wrong"})
rated = rate_answers(scenes, answers)
right, total = sum(map(sum, rated.values())), sum(map(len, rated.values()))
lesson.say(f"  {right} of {total} facts are right")
lesson.check(right >= 0.7 * total, "most facts are right, on canvases that it has not seen")

# %% [markdown]
# ## Two pictures change places
# The tokens of the two prompts are equal, placeholders included. Only what the encoder makes of the pixels
# differs, and the block hashes, which name the image.

# %%
lesson.heading("The same question, the pictures swapped")
first, second = [index for index, scene in enumerate(scenes) if len(scene.digits) == 1][:2]
lesson.predict("answers that changed places", 2, "nothing but the picture decides")
there, back = ask(WHAT[0], canvases[first], canvases[second]), ask(WHAT[0], canvases[second], canvases[first])
lesson.say(f"  {there[0]}  |  {there[1]}")
lesson.check(there[0] != there[1], "the two answers differ")
lesson.measure("answers that changed places", sum(one == other for one, other in zip(there, back[::-1])))

# %% [markdown]
# ## Asked twice
# The second question finds the keys and values of the span in the KV cache, so the eye need not look again.

# %%
lesson.heading("A second question")
lesson.predict("images encoded for a second question", 0, "its prefix covers the span")
before = encoded()
(colour,) = ask(WHICH_COLOUR, canvases[first])
lesson.measure("images encoded for a second question", encoded() - before)
lesson.say(f"  {WHICH_COLOUR} {colour}")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise("What does it say of a canvas without a digit, if the question claims that there is one?")
def without_a_digit() -> str:
    empty = next(image for scene, image in unseen if not scene.digits)
    described, asked = ask(WHAT[0], empty)[0], ask(WHICH_DIGIT, empty)[0]
    assert not read_answer(asked).digits
    return (
        f"asked what it is: {described!r}; asked for its digit: {asked!r}. The training had such questions."
    )


@lesson.exercise(
    "It learned from handwriting. Train it on printed digits for 40 seconds: how far does the loss fall?"
)
def printed_digits() -> str:
    import torch

    from tutorials.eye_training.canvases import printed_material
    from tutorials.eye_training.language import Language
    from tutorials.eye_training.model import TrainedEye
    from tutorials.eye_training.scenes import PLAIN, random_scene
    from tutorials.eye_training.training import language_losses

    torch.manual_seed(0)
    steps = 20
    losses = list(
        language_losses(
            TrainedEye().load(FOLDER),
            Language(),
            printed_material(),
            steps=steps,
            batch=8,
            peak=3e-4,
            scene=lambda numbers: random_scene(numbers, 1, numbers.choice(list(PLAIN))),
        )
    )
    begin, end = (sum(part) / len(part) for part in (losses[: steps // 4], losses[-steps // 4 :]))
    assert end < begin
    return f"from {begin:.2f} to {end:.2f} nats a token, in {steps} steps of 8 canvases"


lesson.passed(
    f"an image is {patches} tokens",
    "swapped pictures swap the answers",
    "a second question encodes nothing",
)
llm.close()
