"""Compiled tiles of several rows on a CUDA device, judged by brute force in float64."""

from __future__ import annotations

import pytest
import torch

from minivllm.attention import AttentionContext
from minivllm.attention.shared_tiles import SharedMetadata
from minivllm.compilation.compiler import RegionCompiler
from minivllm.device.policy import DevicePolicy
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache
from tests.attention.test_shared_tiles import Always, Row, brute_force, made
from tests.gpu.test_cuda_attention import TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here"),
]

DEVICE, BLOCK_SIZE, KV_HEADS = torch.device("cuda"), 64, 2


def rows_of(num_rows: int, tokens: int) -> list[Row]:
    """A tree of two levels and a row that shares nothing, 320 tokens and more."""
    root, branches = [1, 2, 3], ([4, 5], [6])
    rows = [Row([7, 8], 70, tokens)]
    for index in range(num_rows):
        own = 10 + 2 * index
        prefix = [*root, *branches[index % 2]]
        rows.append(Row([*prefix, own, own + 1], len(prefix) * BLOCK_SIZE + 60 + index % 3, tokens))
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 128)])
@torch.inference_mode()
def test_rows_that_are_read_together_equal_the_definition(
    group: int, head_dim: int, dtype: torch.dtype
) -> None:
    """One tile, two, and more; then rows of four tokens."""
    spec = AttentionSpec(None, head_dim**-0.5, group)
    size = 64 // group
    for num_rows, tokens in ((2, 1), (size + 3, 1), (4 * size, 1), (size, 4)):
        rows = rows_of(num_rows, tokens)
        tables, num_blocks, step = made(rows, BLOCK_SIZE, DEVICE)
        context = AttentionContext(
            specs=(spec,), kv_heads=KV_HEADS, query_group=group, head_dim=head_dim, dtype=dtype,
            query_dtype=dtype, cache_dtype=dtype, tables=tables, num_blocks=num_blocks,
            max_num_seqs=len(rows), max_num_batched_tokens=step.num_padded, few_tokens=5,
            compile_region=RegionCompiler(True, single_rows=True), compiles=True,
            policy=DevicePolicy.of(DEVICE), device=DEVICE,
        )  # fmt: skip
        attention = Always(context)
        shape = num_blocks, BLOCK_SIZE, KV_HEADS, head_dim
        cache = LayerCache(*(torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2)))
        q = torch.randn(step.num_padded, KV_HEADS, group, head_dim, device=DEVICE).to(dtype)
        metadata = attention.prepare(step)
        assert isinstance(metadata, SharedMetadata) and Reach() in metadata.tiles.lists
        out = attention.attend(metadata, cache, spec, q)
        error = (out.double() - brute_force(rows, cache, q)).abs().max()
        assert error < TOLERANCE[dtype], f"{num_rows} rows of {tokens} tokens: {error}"
