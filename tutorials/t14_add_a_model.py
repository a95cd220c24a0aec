"""14 · Add a model: Gemma joins the table of families, without a line of its forward pass.

The engine has one decoder for all models, and a table of how published families differ from it. Gemma is not
in that table. Reading its code, it differs from Llama in four ways. This chapter writes all four down as
arithmetic on the weights.
"""

# %% [markdown]
# The layers of transformers would run such a model as well; here the engine's own decoder shall do so.
#
# ## What is different about Gemma
# 1. Its norm multiplies by (1 + w) where Llama's multiplies by w.
# 2. It multiplies the embeddings by s, the square root of the hidden size, but not the head,
#    which shares its weights.
# 3. Its MLP is gated by a tanh-approximated GELU. The decoder has that one.
# 4. The head is always tied to the embedding. So are others.
#
# The first is a new weight, w' = 1 + w.
# The second looks like a line of code in the forward pass, and an untied head.
#
# ## The surprise: a norm does not see the scale
# Every sublayer reads the residual stream through an RMS norm, and a norm divides by the length: norm(x / s)
# = norm(x). So divide the whole stream by s. The embeddings lose their factor, and every sublayer must add
# 1/s of what it added before: divide the weights of its last projection by s. Nothing else in the model can
# tell the difference, except the epsilon in the norm, which becomes eps / s², since it is compared with a
# square.

# %%
from __future__ import annotations

import ast
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from minivllm import LLM, Description, Entries, Family, SamplingParams, register_family
from minivllm.batch.layer_caches import allocate_caches
from minivllm.errors import ModelError
from minivllm.families.dense import dense
from minivllm.families.family import SHARED_DEFAULTS
from minivllm.models.bound_program import BoundProgram, program_inputs
from minivllm.models.decoder import Decoder
from minivllm.models.decoder.program import decoder_program
from minivllm.models.model import TokenInputs, token_specs
from minivllm.program.fuse import FusedPieces, fuse
from minivllm.program.program import Piece, Program, Seam
from minivllm.program.seams import Attend, Sum
from minivllm.specs.decoder import DecoderConfig
from tutorials.lesson import Lesson
from tutorials.small_model import small_decoder

lesson = Lesson(__doc__)
transformers.utils.logging.disable_progress_bar()


def gemma_config(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gemma's entries as the decoder wants them."""
    eps = entries.get("rms_norm_eps", 1e-6) / entries["hidden_size"]
    return {**entries, "rms_norm_eps": eps, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}


def gemma_weight(name: str, weight: Tensor, config: DecoderConfig) -> Tensor:
    """Gemma's weights as the decoder wants them."""
    if name.endswith("norm.weight"):
        return weight + 1
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return weight / config.hidden_size**0.5
    return weight


GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    gguf_architecture=None,
    defaults={
        **SHARED_DEFAULTS,
        "vocab_size": 256000,
        "intermediate_size": 24576,
        "max_position_embeddings": 8192,
    },
    rewrite_config=gemma_config,
    rewrite_weight=gemma_weight,
)

# %% [markdown]
# ## The judge
# transformers builds a small Gemma with random weights and computes its logits in float32.
# It has never heard of this engine.


# %%
folder = tempfile.TemporaryDirectory(prefix="minivllm-tutorial-")
PROMPT = [(17 * i + 5) % 256 for i in range(40)]
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def save_random_model(name: str, **extra: Any) -> tuple[Path, Any]:
    """A seeded model of transformers' own ``name``, and where it was saved. Its norms scale by roughly 1."""
    config = getattr(transformers, f"{name}Config")(**SHAPE, **extra)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            norm = 0.2 * noise + (0 if name == "Gemma" else 1)
            parameter.copy_(norm if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5)
    path = Path(folder.name) / name
    model.save_pretrained(path)
    return path, model


def judged(model: Any, token_ids: list[int]) -> Tensor:
    """Log-probabilities [tokens, vocab] by transformers."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), dim=-1)


def worst_difference(path: Path, model: Any) -> tuple[float, int]:
    """Largest difference of a log-probability, over the prompt and 16 generated tokens;
    and how many were compared."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    engine = {
        "device": "cpu",
        "enforce_eager": True,
        "max_model_len": 128,
        "num_gpu_blocks_override": 9,
        "block_size": 16,
    }
    with LLM(str(path), **engine) as llm:
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    completion = output.outputs[0]
    token_ids = PROMPT + list(completion.token_ids)
    reference = judged(model, token_ids[:-1])
    if any(
        int(row.argmax()) != token for row, token in zip(reference[len(PROMPT) - 1 :], completion.token_ids)
    ):
        return float("inf"), 0
    assert output.prompt_logprobs is not None and completion.logprobs is not None
    ours = [*output.prompt_logprobs[1:], *completion.logprobs]
    differences = [
        abs(entry[token].logprob - float(row[token]))
        for entry, token, row in zip(ours, token_ids[1:], reference)
    ]
    return max(differences), len(differences)


# %% [markdown]
# ## Before and after

# %%
lesson.heading("An architecture the engine does not know")
path, model = save_random_model("Gemma")
try:
    LLM(str(path), device="cpu", model_impl="minivllm")  # "auto" would run the layers of transformers
except ModelError as error:
    lesson.say(f"  refused: {error}")
    refused = True
lesson.check(refused, "before the row is added, minivllm's decoder refuses the model in a sentence")

lesson.heading("With the row")
register_family(GEMMA)
lesson.predict(
    "log-probabilities compared", len(PROMPT) - 1 + 16, "all of the prompt but the first, and 16 new tokens"
)
worst, compared = worst_difference(path, model)
lesson.measure("log-probabilities compared", compared)
lesson.check(
    worst < 1e-4, f"the largest difference to transformers in float32 is {worst:.1e}, all greedy tokens agree"
)

# %% [markdown]
# ## Which of it matters?
# Leave out one piece at a time. A piece whose absence goes unnoticed would be a piece that is not tested.

# %%
lesson.heading("One piece left out at a time")


NAMES = {"1 + w": "GemmaWithoutOne", "1 / s": "GemmaWithoutScale", "GELU": "GemmaWithoutGelu"}


def without(piece: str) -> Family:
    def weight(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
        skipped = (piece == "1 + w" and name.endswith("norm.weight")) or (
            piece == "1 / s" and "_proj" in name
        )
        return tensor if skipped else gemma_weight(name, tensor, config)

    def entries(given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**gemma_config(given), **({"hidden_act": "silu"} if piece == "GELU" else {})}

    return Family(
        architecture=NAMES[piece],
        model_type="gemma",
        gguf_architecture=None,
        defaults=GEMMA.defaults,
        rewrite_config=entries,
        rewrite_weight=weight,
    )


def difference_with(family: Family) -> float:
    register_family(family)
    variant = Path(folder.name) / family.architecture
    variant.mkdir()
    (variant / "model.safetensors").symlink_to(path / "model.safetensors")
    text = (path / "config.json").read_text().replace("GemmaForCausalLM", family.architecture)
    (variant / "config.json").write_text(text)
    return worst_difference(variant, model)[0]


pieces = list(NAMES)
lesson.predict("pieces that are noticed", pieces, "each changes the logits")
lesson.measure(
    "pieces that are noticed", [piece for piece in pieces if difference_with(without(piece)) > 1e-2]
)
chapter = Path(__file__).read_text(encoding="utf-8")
parts = {
    "gemma_config": "def gemma_config",
    "gemma_weight": "def gemma_weight",
    "the row of the table": "GEMMA = ",
}
statements = {node.lineno: node for node in ast.parse(chapter).body}
first_lines = {name: chapter[: chapter.index(f"\n{start}")].count("\n") + 2 for name, start in parts.items()}
sizes = {name: (statements[line].end_lineno or line) - line + 1 for name, line in first_lines.items()}
lesson.bars("t14_lines", "Lines a new family takes", sizes, "lines")

# %% [markdown]
# ## Limits
# In bfloat16 dividing by s rounds the weights once more, unless s is a power of two (it is 64 for a hidden
# size of 4096): a relative error of 2⁻⁹ on top of the one they have. And a family whose *structure* differs
# cannot be folded into weights.
#
# ## A family whose structure differs
# OLMo 2 puts its norms after the sublayers, and norms all heads of q, and of k, as one vector. So its row
# has a ``describe`` of its own. That is a function from the checked entries of config.json to a
# ``Description``: a ``LayerSpec`` for each layer, and what else is true of the model. ``dense`` makes the
# layers of Llama, and takes what differs; here the norms are moved by hand, to show where they stand. The
# checkpoint calls the norms by other names than the decoder, which ``renamed`` translates. Nothing of the
# forward pass is written.


# %%
def describe_olmo2(entries: Entries) -> Description:
    """Llama's layers with NormSpec(place="after") and a norm of the whole width of q and of k."""
    described = dense(entries, qk_norm="whole width")
    layers = [replace(layer, norms=replace(layer.norms, place="after")) for layer in described.layers]
    return replace(described, layers=tuple(layers))


OLMO2 = Family(
    architecture="Olmo2ByHand",  # the table has a row for Olmo2ForCausalLM
    model_type="olmo2",
    gguf_architecture=None,
    defaults={
        **SHARED_DEFAULTS,
        "vocab_size": 50304,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    },
    describe=describe_olmo2,
    renamed={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
)

lesson.heading("Norms after the sublayers")
register_family(OLMO2)
olmo2_path, olmo2_model = save_random_model("Olmo2", eos_token_id=1)
entries_file = olmo2_path / "config.json"
entries_file.write_text(entries_file.read_text().replace("Olmo2ForCausalLM", OLMO2.architecture))
lesson.predict("log-probabilities of OLMo 2 compared", len(PROMPT) - 1 + 16, "as before")
olmo2_worst, olmo2_compared = worst_difference(olmo2_path, olmo2_model)
lesson.measure("log-probabilities of OLMo 2 compared", olmo2_compared)
lesson.check(olmo2_worst < 1e-4, f"the largest difference to transformers in float32 is {olmo2_worst:.1e}")

# %% [markdown]
# ## A piece more
# What can be folded into weights needs no code. What cannot, say a clamp, is a *piece* of the model's
# program. A piece is a frozen dataclass with ``__call__``, and the names of the registers that it reads and
# gives. To see that it lands in the right place, take one that can be folded as well: half of what attention
# adds. Here it stands after each layer's sum of attention's output. The judge is the same decoder with the
# weights of ``o_proj`` halved, and the arithmetic of a piece costs no region: it is fused with its
# neighbours.


# %%
@dataclass(frozen=True)
class Damp:
    """A register times a factor."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def damped(program: Program) -> Program:
    """With half of what attention adds to the stream: of "x" after the first Sum that follows Attend."""
    items: list[Piece | Seam] = []
    is_attended = False
    for item in program:
        items.append(item)
        is_attended = is_attended or isinstance(item, Attend)
        if is_attended and isinstance(item, Sum):
            items.append(Piece(Damp(0.5), ("x",), item.gives))
            is_attended = False
    return items


@torch.inference_mode()
def logits_of(decoder: Decoder, program: Program) -> tuple[Tensor, int]:
    """Of the last two of twelve tokens; and how many regions the program has."""
    tokens, slots = TokenInputs(torch.arange(12, dtype=torch.int32)), torch.arange(16, 28, dtype=torch.int32)
    caches = allocate_caches(decoder, num_blocks=2, block_size=16)
    declared = [spec.declare(2, 16, decoder.device) for spec in decoder.cache_specs]
    plan = fuse(program, program_inputs(token_specs(decoder.device), declared))
    bound = BoundProgram(plan, lambda region: region.function)

    def attend(layer: int, q: Tensor, sinks: Any = None) -> Tensor:
        scale = decoder.attention_specs[layer].scale
        return gathered_sdpa_attention(q, *caches[layer][:2], torch.tensor([1]), 0, scale=scale)

    world = decoder.world(attend)
    hidden = bound.body(tokens.positions, tokens, [cache.at(slots) for cache in caches], world)
    assert plan.tail is not None
    steps = [*plan.body.steps, *plan.tail.steps]
    (logits,) = bound.tail(hidden, torch.tensor([10, 11], dtype=torch.int32), tokens, world)
    return logits, sum(isinstance(step, FusedPieces) for step in steps)


lesson.heading("A piece in a program")
decoder, folded = small_decoder(num_hidden_layers=3), small_decoder.__wrapped__(num_hidden_layers=3)
for layer in folded.layers:
    layer.mixer.linears[-1].map_tensors(lambda weight: weight / 2)
programs = [decoder_program(one, one.layers, [one.vocab_size]) for one in (decoder, folded)]
plain, regions = logits_of(decoder, programs[0])
lesson.predict("regions with a piece more in each of 3 layers", regions, "it joins its neighbours")
with_piece, regions_with_piece = logits_of(decoder, damped(programs[0]))
lesson.measure("regions with a piece more in each of 3 layers", regions_with_piece)
expected, _ = logits_of(folded, programs[1])
lesson.check(torch.allclose(with_piece, expected, atol=1e-5), "the piece does what halved weights do")
lesson.check(not torch.allclose(with_piece, plain, atol=1e-2), "and without it the logits are others")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "IBM's Granite has four multipliers: embedding, residual, attention, logits. Fold all of them."
)
def granite() -> str:
    m_embedding, m_residual, m_attention, m_logits = 3.0, 0.6, 0.3, 0.4
    granite_path, granite_model = save_random_model(
        "Granite",
        embedding_multiplier=m_embedding,
        residual_multiplier=m_residual,
        attention_multiplier=m_attention,
        logits_scaling=m_logits,
    )

    def entries(given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**given, "rms_norm_eps": given["rms_norm_eps"] / m_embedding**2}

    def weight(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return tensor * m_residual / m_embedding
        if name.endswith("q_proj.weight"):
            return tensor * m_attention / config.attention_specs[0].scale
        return tensor / m_logits if name == "model.norm.weight" else tensor

    register_family(
        Family(
            architecture="GraniteByHand",  # the table has a row for GraniteForCausalLM
            model_type="granite",
            gguf_architecture=None,
            defaults=GEMMA.defaults,
            rewrite_config=entries,
            rewrite_weight=weight,
        )
    )
    path = granite_path / "config.json"
    path.write_text(path.read_text().replace("GraniteForCausalLM", "GraniteByHand"))
    worst, compared = worst_difference(granite_path, granite_model)
    assert worst < 1e-4 and compared == 55
    return f"{compared} log-probabilities differ by at most {worst:.1e}"


@lesson.exercise(
    "Does the epsilon matter? Leave it unscaled, on a model whose embeddings are small, and compare."
)
def epsilon() -> str:
    def unscaled(given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**gemma_config(given), "rms_norm_eps": given["rms_norm_eps"]}

    x = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-3
    exact = 8 * x / ((8 * x).square().mean() + 1e-6).sqrt()
    scaled = x / (x.square().mean() + gemma_config({"hidden_size": 64})["rms_norm_eps"]).sqrt()
    forgotten = (
        x / (x.square().mean() + unscaled({"hidden_size": 64, "rms_norm_eps": 1e-6})["rms_norm_eps"]).sqrt()
    )
    torch.testing.assert_close(scaled, exact)
    error = float((forgotten - exact).abs().max() / exact.abs().max())
    assert error > 0.2
    return (
        f"for embeddings of 0.001 the forgotten epsilon changes the norm by {error:.0%}; scaled, it is exact"
    )


lesson.passed(
    "an unknown architecture is refused in a sentence",
    f"with {sum(sizes.values())} lines Gemma's log-probabilities differ from transformers' by at most "
    f"{worst:.0e}",
    "each piece left out is noticed",
)
folder.cleanup()
