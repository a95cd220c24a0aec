"""24 · Images: tokens of a prompt whose embeddings come from somewhere else.

A language model reads embeddings, one for each token. A model that sees has an encoder, which makes
embeddings of pixels. In the prompt, tokens hold their places. The scheduler, the KV cache and prefix caching
go on as before: what changes is that a step can compute such a token only if its embedding is there. (LLaVA,
Liu et al. 2023; the encoder cache of vLLM V1.)
"""

# %% [markdown]
# ## A model that sees, with random weights
# The encoder reads tiles of 16 × 16 pixels and makes 4 embeddings of each. An image is cut into up to 4 × 4
# tiles, and a small copy of the whole image is one tile more.

# %%
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, SmolVLMConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from minivllm import LLM, SamplingParams
from minivllm.engine.core import EngineCore
from minivllm.messages import ImageItem
from tutorials.lesson import Lesson
from tutorials.small_model import SHAPE, engine_arguments, model_folder

lesson = Lesson(__doc__)
EDGE, EMBEDS, SIDE, BLOCK, WIDTH = 16, 4, 4, 16, 64
markers = ["<image>", "<fake_token_around_image>", "<global-img>"]
markers += [f"<row_{row}_col_{column}>" for row in range(1, SIDE + 1) for column in range(1, SIDE + 1)]
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({text: number for number, text in enumerate([*markers, *letters])}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()

folder = model_folder(SHAPE)
entries = {name: value for name, value in SHAPE.items() if name not in ("architectures", "dtype")}
config = SmolVLMConfig(
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": EDGE,
        "patch_size": 4,
    },
    text_config=LlamaConfig(**entries),
    image_token_id=0,
    scale_factor=2,
)
config.architectures = ["SmolVLMForConditionalGeneration"]
config.save_pretrained(folder)
sizes = {"size": {"longest_edge": SIDE * EDGE}, "max_image_size": {"longest_edge": EDGE}}
Idefics3ImageProcessorPil(**sizes).save_pretrained(folder)
PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=markers).save_pretrained(folder)

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
LOOK, WHAT = "Look at <image>", " and say what it shows."


def picture(seed: int) -> Image.Image:
    """60 × 60 pixels of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (60, 60, 3), dtype=np.uint8))


def prompt(text: str, seed: int) -> dict[str, object]:
    return {"prompt": text, "multi_modal_data": {"image": picture(seed)}}


@contextmanager
def engine(**arguments: object) -> Iterator[tuple[LLM, EngineCore]]:
    with LLM(**engine_arguments(model=str(folder), block_size=BLOCK, **arguments)) as llm:
        yield llm, llm.llm_engine.client.core  # type: ignore[attr-defined]


def units(core: EngineCore) -> int:
    """Tiles that were encoded since the start."""
    assert core.encodings is not None
    return core.encodings.num_encoded_units


# %% [markdown]
# ## The span
# The prompt has one placeholder. In its place come all tokens that the image brings, its *span*: for each
# tile two markers and a token for each embedding, after each row a newline; then an empty line, two markers,
# the tokens of the small copy, and a last marker. Runs of such tokens are all that the scheduler must know.

# %%
lesson.heading("60 × 60 pixels")
tiles = SIDE * SIDE + 1
lesson.predict("tiles", tiles, "the longer side becomes 64 pixels: 4 × 4 tiles, and the small copy")
lesson.predict("embeddings", tiles * EMBEDS, "4 for each tile")
lesson.predict(
    "tokens of the span",
    SIDE * (SIDE * (2 + EMBEDS) + 1) + 1 + 2 + EMBEDS + 1,
    "4 rows of 4 tiles and a newline; an empty line; the small copy between three markers",
)
with engine() as (llm, core):
    item: ImageItem = llm.llm_engine.prepare(None, prompt(LOOK + WHAT, 0), ONE).sequences[0].images[0]
lesson.measure("tiles", item.num_units)
lesson.measure("embeddings", item.num_embeds)
lesson.measure("tokens of the span", item.length)

# %% [markdown]
# ## Which block holds which tile
# The span is longer than a block, and blocks do not end where tiles end. A block's hash names the image and
# the distance to its span, so equal placeholder tokens of two images never share a block.

# %%
rows: dict[str, list[tuple[str, str]]] = {}
end = len(LOOK) - len("<image>") + item.length + len(WHAT)
for begin in range(0, end, BLOCK):
    held = []
    for number, (first, count) in enumerate(item.runs):
        inside = range(max(begin, item.offset + first), min(begin + BLOCK, item.offset + first + count))
        if inside:
            held.append((f"tile {number + 1}" + ("" if len(inside) == count else " …"), "cached"))
    rows[f"block {begin // BLOCK}"] = held or [("text", "prompt")]
lesson.cells("t24_blocks", "Tiles in the blocks of the KV cache", rows, legend={"cached": "of the image"})

# %% [markdown]
# ## Asked twice
# Embeddings are needed only until their keys and values are in the KV cache. A second question about the same
# image finds these, and needs neither the encoder nor the pixels. Another image shares the text before it.

# %%
lesson.heading("The same image, and another one")
lesson.predict("tiles encoded, first question", tiles, "all")
lesson.predict("tiles encoded, second question", 0, "its prefix covers the span")
lesson.predict("tiles encoded, another image", tiles, "its blocks have other hashes")
lesson.predict("tokens found for another image", 0, "the text before it does not fill a block")
with engine() as (llm, core):
    counts = []
    for seed, text in ((0, WHAT), (0, " and say who is in it."), (1, WHAT)):
        before = units(core)
        [output] = llm.generate(prompt(LOOK + text, seed), ONE, use_tqdm=False)
        counts.append((units(core) - before, output.num_cached_tokens))
lesson.measure("tiles encoded, first question", counts[0][0])
lesson.measure("tiles encoded, second question", counts[1][0])
lesson.measure("tiles encoded, another image", counts[2][0])
lesson.measure("tokens found for another image", counts[2][1])

# %% [markdown]
# ## A budget for the encoder
# The encoder takes longer than a step, above all on a CPU. So a step encodes no more than
# ``max_num_batched_encoder_embeds`` embeddings, and the chunk of the prompt ends where the first embedding is
# missing. Other requests decode in the meantime.

# %%
lesson.heading("Two tiles in each step")
lesson.predict(
    "steps until the first token", -(-tiles // 2), "17 tiles, two in a step; the last step reads the text"
)
with engine(max_num_batched_encoder_embeds=2 * EMBEDS) as (llm, core):
    llm.generate(prompt(LOOK + WHAT, 0), ONE, use_tqdm=False)
    chunks = [
        count for step in core.scheduler.recent_steps(0) for count in step.num_scheduled_tokens.values()
    ]
lesson.measure("steps until the first token", len(chunks))
lesson.say(f"  chunks: {', '.join(map(str, chunks))} tokens")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise("How many bytes do the embeddings of this image take, and its keys and values?")
def sizes_of_both() -> str:
    with engine() as (llm, core):
        llm.generate(prompt(LOOK + WHAT, 0), ONE, use_tqdm=False)
        assert core.encodings is not None
        kept = core.encodings.num_bytes
        [group] = core.executor.kv_groups
    assert kept == item.num_embeds * WIDTH * 4
    blocks = -(-(item.offset + item.length) // BLOCK)
    return f"{kept:,} bytes for a short while, and {blocks * group.block_bytes:,} bytes in {blocks} blocks"


@lesson.exercise("Put one more letter before the image. How many tokens does the cache find, and why?")
def moved() -> str:
    with engine() as (llm, core):
        found = []
        for text in (LOOK + WHAT, "!" + LOOK + WHAT):
            [output] = llm.generate(prompt(text, 0), ONE, use_tqdm=False)
            found.append(output.num_cached_tokens)
        assert found == [0, 0] and units(core) == tiles
    return (
        "none: keys depend on positions and on all tokens before. But its embeddings do not, so it was "
        "encoded once"
    )


lesson.passed(
    f"{item.length} tokens hold the places of {item.num_embeds} embeddings",
    "a second question encodes nothing",
    "a chunk ends where an embedding is missing",
)
