"""Prompt chunks in bfloat16, compiled:
as precise as an attention in float64 whose result is rounded, nearly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from kernels_triton_free.strips.visibility import Bounds
from minivllm.attention import FlexAttention, StepRows
from minivllm.attention.lists.bounds import bounds_of
from minivllm.compilation.compiler import RegionCompiler, cannot_compile_reason
from minivllm.device.policy import DevicePolicy
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import LayerCache
from tests.attention.backends import laid_in_strips, new_context
from tests.attention.random_batches import CPU, BatchShape, new_batch

HEADS, GROUP, DIM = 2, 3, 64
SHAPE = BatchShape(max_num_seqs=2, max_model_len=512, block_size=32, num_blocks=40)
FAST = DevicePolicy(type="cpu", multiplies_bfloat16=True)
CHUNKS = (150, 246), (0, 50)
"""Of two requests: the first position, and the one behind the last."""


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.skipif(
    cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler for torch.compile here"
)
@pytest.mark.parametrize("in_strips", [True, False], ids=["strips", "plain"])
@pytest.mark.parametrize("window", [None, 40])
@torch.inference_mode()
def test_scores_of_sixty_keep_their_weights(window: int | None, in_strips: bool) -> None:
    """Rounded to bfloat16, such a score would be off by a tenth, and so would its weight."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    sizes = (end - begin for begin, end in CHUNKS)
    queries = [10 * torch.randn(size, HEADS, GROUP, DIM, generator=generator).bfloat16() for size in sizes]
    plain = LayerCache(
        *torch.randn(2, SHAPE.num_blocks, SHAPE.block_size, HEADS, DIM, generator=generator).bfloat16()
    )
    order = torch.randperm(SHAPE.num_blocks - 1, generator=generator).to(torch.int32) + 1
    batch = new_batch(SHAPE)
    tables = batch.groups[0]
    spec, expected = AttentionSpec(window, DIM**-0.5, GROUP), []
    for slot, ((begin, _), q) in enumerate(zip(CHUNKS, queries)):
        blocks = order[16 * slot : 16 * slot + 16]
        tables.block_table.host[slot, :16] = blocks.numpy()
        keys_and_values = q.double(), plain.k.double(), plain.v.double(), blocks, begin
        positions = np.arange(begin, begin + len(q))
        bounds = Bounds(
            *(None if x is None else torch.from_numpy(x) for x in bounds_of(positions, spec.reach))
        )
        expected.append(gathered_sdpa_attention(*keys_and_values, bounds=bounds, scale=spec.scale))
    dtypes = dict.fromkeys(("dtype", "query_dtype", "cache_dtype"), torch.bfloat16)
    context = new_context(
        tables,
        SHAPE,
        [spec],
        compile_region=RegionCompiler(enabled=True),
        in_strips=in_strips,
        kv_heads=HEADS,
        query_group=GROUP,
        head_dim=DIM,
        policy=FAST,
        **dtypes,
    )
    backend = FlexAttention(context)
    starts, ends = np.array(CHUNKS, dtype=np.int64).T
    step = StepRows(
        np.arange(2), starts, ends - starts, num_single=0, num_few=0, num_padded=int((ends - starts).sum())
    )
    cache = laid_in_strips(plain) if in_strips else plain
    found = backend.attend(backend.prepare(step), cache, spec, torch.cat(queries))
    exact = torch.cat(expected)
    assert error(found, exact) < 2 * error(exact.bfloat16(), exact)
