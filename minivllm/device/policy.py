"""Preferences of a kind of device: one object for all choices that depend on the device.

Which device it is, and how to talk to it, stays with PyTorch: streams, events and pinned memory are no
choices. A policy says nothing about where tensors lie, so a test can take the choices for a GPU on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels_triton_free.packed.whole_numbers import can_multiply_whole_numbers
from kernels_triton_free.quantized_linear import can_multiply_int4

WIDE_HEAD = 256
"""Largest head_dim that attention kernels on CUDA take with the default options."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies float8."""
MIN_TILES = 256
"""Room for query tiles of prompt chunks on a CPU: as much as the default budget of 2048 tokens takes."""

PAIR_TOKENS = 16
MAX_STRIP_GROUP = 8
"""Query heads of a KV head that attention over strips is written out for: each takes registers of its own."""


@dataclass(frozen=True, kw_only=True)
class DevicePolicy:
    """The choices for one device.

    type: what messages call it. capability: of a CUDA device. multiplies_int4: a CPU's 4-bit operator can be
    used. multiplies_bfloat16: a CPU has products of bfloat16 (AVX512-BF16, or AMX). multiplies_whole_numbers:
    compiled loops over integers of 16 bits are its fastest products (AVX2 and no more).
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    multiplies_int4: bool = False
    multiplies_bfloat16: bool = False
    multiplies_whole_numbers: bool = False

    @classmethod
    def of(cls, device: torch.device) -> DevicePolicy:
        """That of a device which is there."""
        if device.type == "cuda":
            return cls(type="cuda", capability=torch.cuda.get_device_capability(device))
        return cls(
            type="cpu",
            multiplies_int4=can_multiply_int4(),
            multiplies_bfloat16=torch.cpu._is_avx512_bf16_supported(),
            multiplies_whole_numbers=can_multiply_whole_numbers(),
        )

    @property
    def on_cpu(self) -> bool:
        """Host and device are one: nothing is copied between them, graphs save no calls,
        all threads compute."""
        return self.type == "cpu"

    # -- compiled code and memory ------------------------------------------------------------------

    @property
    def keeps_packages(self) -> bool:
        """Compiled regions are packages on disk, so sizes that follow from the free memory are dynamic in
        them. On CUDA graphs hide what a call costs; on a CPU nothing does."""
        return self.on_cpu

    @property
    def has_own_memory(self) -> bool:
        """Weights can leave the device for host memory, and adapters there are pinned."""
        return not self.on_cpu

    # -- attention ---------------------------------------------------------------------------------

    def attention_dtype(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.dtype:
        """Of queries and attention's output. dtype: of the weights.
        A CPU attends in the dtype of the cache."""
        return cache_dtype if self.on_cpu else dtype

    def prompt_attention_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype prompt chunks attend. On a CPU without products of bfloat16 float32 is faster: for
        512 tokens 3.5 instead of 5.6 ms a layer on one core."""
        return dtype if self._attends_fast(dtype) or not self.on_cpu else torch.float32

    def _attends_fast(self, dtype: torch.dtype) -> bool:
        """True if this CPU multiplies the blocks of a prompt in bfloat16."""
        return self.on_cpu and self.multiplies_bfloat16 and dtype == torch.bfloat16

    def query_tile_size(self, query_group: int, dtype: torch.dtype) -> int:
        """Queries per tile of a prompt chunk that attends in this dtype. On CUDA 128, the kernel's own block;
        on a CPU enough for 64 rows, and no more, since short chunks pay for the padding; where it multiplies
        bfloat16, 64: with 32, 512 tokens of SmolLM2-135M took 6 % longer with AMX, with 128 as long."""
        if self.on_cpu:
            return 64 if query_group == 1 or self._attends_fast(dtype) else 32
        return 128

    def keys_together(self, dtype: torch.dtype) -> int:
        """Keys that a prompt chunk, attending in this dtype, reads as one block, if those of the cache are
        smaller. Larger blocks mean fewer passes over what is computed of a query, and more keys that are
        masked. On two cores with AMX 512 tokens of SmolLM2-135M took 1.61 ms a layer in blocks of 64, 1.37 of
        128 and 1.41 of 256, and 2,000 tokens 20.8, 16.8 and 15.3; in float32, without AMX, 512 took 3.4, 3.7
        and 4.2."""
        return 128 if self._attends_fast(dtype) else 1

    @property
    def min_tiles(self) -> int:
        """Room for tiles that is kept in any case:
        where it costs nothing, engines of different budgets then share their compiled code."""
        return MIN_TILES if self.on_cpu else 2

    @property
    def gathers_blocks(self) -> bool:
        """Prompt chunks attend to a copy of the blocks they read, in their own dtype,
        not to the cache in place."""
        return self.on_cpu

    def stores_strips(self, query_group: int) -> bool:
        """Keys and values lie in strips (``kernels_triton_free.strips``). On a CPU of two cores, a step of 32
        rows with some 290 tokens of context each took 51 ms over a cache of bfloat16 and 60 over one of
        float32; with FlexAttention over plain blocks 89 and 70 (SmolLM2-135M)."""
        return self.on_cpu and query_group <= MAX_STRIP_GROUP

    def pair_tokens(self, max_model_len: int) -> int:
        """Tokens of the longest prompt chunk that may attend token by token, as decoding rows do, where keys
        and values lie in strips; the engine measures which way costs less. A tile takes as long however few
        of its queries are there: after 1,024 tokens of SmolLM2-135M 2 tokens took 0.08 of a tile's time, 8
        took 0.24, 16 took 0.44 and 32 took 0.85 in bfloat16, and 0.15, 0.38, 0.75 and 1.44 in float32 (one
        core with AVX-512)."""
        return min(PAIR_TOKENS, max_model_len // 2) if self.on_cpu else 0

    @property
    def lists_full_blocks(self) -> bool:
        """Tiles of a single row tell blocks that are visible whole from others, in lists as wide as the cache
        has blocks, which the CPU's template asserts. On CUDA the decode kernel would split its work by the
        size of the whole cache, so all blocks are listed as partial, in lists as wide as a request can be
        long."""
        return self.on_cpu

    def decode_batches(self, max_num_seqs: int) -> list[int]:
        """Numbers of tiles that rows with a single token are padded to, each with a kernel of its own; empty
        where one kernel serves them all. On CUDA, where the kernel wants a fixed one: powers of two."""
        if self.on_cpu:
            return []
        return sorted(
            {size for size in (2**power for power in range(16)) if size < max_num_seqs} | {max_num_seqs}
        )

    def kernel_options(
        self, block_size: int, head_dim: int, dtype: torch.dtype, tile_size: int, has_low: bool = False
    ) -> Mapping[str, int]:
        """FlexAttention's options for tiles of so many queries over blocks of so many keys. Without its
        option the CPU's template takes a flash-decoding variant, which does not compile where no block is
        full.

        On CUDA the keys that a kernel reads at once must divide a block, which the 128 that Inductor takes
        for heads of 64 do not. And by default kernels for single queries fetch no keys ahead: on an H100 they
        took 1.50 times as long for one request of 4,096 tokens, 1.12 times for 64 of 576 and 1.04 times for
        256 of 1,024. With both bounds (has_low) over heads of 64 the kernel for prompt chunks spills
        registers in the 4 warps that Inductor takes (gpt-oss, not timed); heads of 128 have 8. Heads of more
        than WIDE_HEAD (Gemma 4's 512) spill in as many warps as others take, and three stages of keys and
        values do not fit into the shared memory of a prompt chunk's kernel (neither timed).
        """
        if self.on_cpu:
            return {"PARTITION_SIZE": 1}
        is_wide = head_dim > WIDE_HEAD
        if tile_size == 1:
            return {"BLOCK_N": min(32, block_size), "num_stages": 3, "num_warps": 4 if is_wide else 2}
        if is_wide:
            return {"BLOCK_N": min(16, block_size), "num_stages": 2, "num_warps": 8}
        block_n = min(64 if dtype.itemsize <= 2 and head_dim <= 128 else 32, block_size)
        return {"BLOCK_N": block_n, **({"num_warps": 8} if has_low and head_dim <= 64 else {})}

    # -- linear layers -----------------------------------------------------------------------------

    @property
    def tiles_adapters(self) -> bool:
        """Compiled loops multiply LoRA adapters tile by tile where few rows use them."""
        return self.on_cpu

    @property
    def multiplies_float8(self) -> bool:
        return not self.on_cpu and self.capability >= FLOAT8_CAPABILITY
