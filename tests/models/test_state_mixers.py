"""Mixers that keep a matrix as their state, over rows cut into steps,
against the plain loop over the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels_triton_free.state.rows import StateRows
from minivllm.checkpoints.checkpoint import expected_shapes
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import CompileRegion, TensorSpec
from minivllm.linear.factory import LinearFactory
from minivllm.models.mixers.factory import make_mixer, make_update
from minivllm.models.mixers.mixer import LayerContext
from minivllm.models.reference.states import STATE_MIXERS
from minivllm.program.fuse import fuse
from minivllm.program.program import World
from minivllm.program.runner import Runner
from minivllm.program.seams import Attend
from minivllm.specs.caches import TOKENS, StateSpec
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import GatedDeltaSpec, LayerSpec, Mamba2Spec, MlpSpec, NormSpec
from tests.attention.backends import uncompiled

HIDDEN, CPU = 32, torch.device("cpu")
SPECS = [
    GatedDeltaSpec(key_heads=2, key_dim=12, heads=4, value_dim=8, taps=4, norm_eps=1e-5),
    GatedDeltaSpec(key_heads=3, key_dim=8, heads=3, value_dim=16, taps=2, norm_eps=1e-2),
    Mamba2Spec(heads=8, head_dim=8, groups=2, state_dim=12, taps=3, norm_eps=1e-5, bias=True),
    Mamba2Spec(heads=6, head_dim=4, groups=1, state_dim=16, taps=4, norm_eps=1e-2, conv_bias=False),
]
STEPS = ((1, 1), (70, 1), (1, 3), (1, 1), (0, 65), (100, 10), (1, 0), (1, 1), (26, 69))
"""Tokens of two requests in each step."""


def mixer_shapes(spec: GatedDeltaSpec | Mamba2Spec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a mixer."""
    layer, prefix = LayerSpec(mixer=spec, mlp=MlpSpec(inner=1), norms=NormSpec(eps=1e-6)), "model.layers.0."
    config = DecoderConfig(
        architecture="",
        vocab_size=1,
        hidden_size=HIDDEN,
        max_position_embeddings=1,
        rms_norm_eps=1e-6,
        layers=(layer,),
        rotary=(),
    )
    own = f"{prefix}{spec.block}."
    return {
        name.removeprefix(prefix): s for name, s in expected_shapes(config).items() if name.startswith(own)
    }


def rows_of(read: tuple[int, int], write: tuple[int, int], counts: np.ndarray) -> StateRows:
    starts = np.cumsum(counts) - counts
    token_rows = np.repeat(np.arange(2), counts)
    offsets = np.arange(counts.sum()) - starts[token_rows]
    values = (read, write, starts, counts, token_rows, offsets)
    return StateRows(*(torch.tensor(np.array(value), dtype=torch.int32) for value in values))


def assert_steps_equal_the_loop(spec: GatedDeltaSpec | Mamba2Spec, compile_region: CompileRegion) -> None:
    """Every step writes its states into other slots than those it reads;
    the first one reads the zeros of slot 0."""
    generator = torch.Generator().manual_seed(1)
    mixer = make_mixer(spec, HIDDEN, LinearFactory(torch.float32, CPU), torch.float32)
    linear_of = {part: linear for linear in mixer.linears for part in linear.sizes}
    weights: dict[str, Tensor] = {}
    vectors: dict[str, Tensor] = {}
    for name, shape in mixer_shapes(spec).items():
        tensor = weights[name] = (
            torch.randn(shape, generator=generator) / (shape[-1] if len(shape) > 1 else 2) ** 0.5
        )
        _, _, own = name.partition(".")
        module, _, kind = own.rpartition(".")
        if module in linear_of:
            linear_of[module].load(module, kind, tensor)
        else:
            vectors[own.removesuffix(".weight")] = tensor
    declared = StateSpec.of(spec, torch.float32, CPU)
    update = make_update(spec, declared, compile_region)
    stream = TensorSpec((TOKENS, HIDDEN), torch.float32, CPU)
    context = LayerContext(0, 0, lambda: vectors, lambda: torch.empty(0), stream)
    output = TensorSpec((TOKENS, *mixer.output_shape), torch.float32, CPU)
    cut = Attend(0, output, lambda: mixer.attend_weights(vectors))
    positions = TensorSpec((TOKENS,), torch.int32, CPU)
    inputs = {"h": stream, "stream": stream, "positions": positions, "adapters": None}
    program = [*mixer.before_attention(context, "h"), cut, *mixer.after_attention(context, "h")]
    runner = Runner(fuse(program, inputs, results=("x",)).body, uncompiled)
    states = tuple(torch.zeros(5, *shape) for shape in declared.shapes)
    texts = [torch.randn(sum(step[row] for step in STEPS), HIDDEN, generator=generator) for row in range(2)]
    outputs: list[list[Tensor]] = [[], []]
    read, done = (0, 0), [0, 0]
    for index, step in enumerate(STEPS):
        write, counts = ((1, 2), (3, 4))[index % 2], np.array(step)
        x = torch.cat([text[first : first + count] for text, first, count in zip(texts, done, step)])
        rows, prepared = rows_of(read, write, counts), update.prepare(counts)

        def attend(
            layer: int, q: Tensor, weights: Any = None, rows: Any = rows, prepared: Any = prepared
        ) -> Tensor:
            return update(q, states, rows, prepared, weights)

        (added,) = runner([x, x, torch.zeros(len(x), dtype=torch.int32)], World(attend))
        for row, out in enumerate(added.split(list(step))):
            outputs[row].append(out)
            done[row] += step[row]
        read = write
    for text, out in zip(texts, outputs):
        expected = STATE_MIXERS[type(spec)](text, spec, weights)
        torch.testing.assert_close(torch.cat(out), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert all(not state[0].any() for state in states)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@torch.inference_mode()
def test_steps_of_any_sizes_equal_a_loop_over_the_whole_text(spec: GatedDeltaSpec | Mamba2Spec) -> None:
    assert_steps_equal_the_loop(spec, uncompiled)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS[::2], ids=str)
@torch.inference_mode()
def test_compiled_steps_equal_a_loop_over_the_whole_text(spec: GatedDeltaSpec | Mamba2Spec) -> None:
    assert_steps_equal_the_loop(spec, RegionCompiler(True))
