"""KV caches of fewer bits: logits are transformers' over keys and values rounded the same way,
in less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.engine.resolve import resolve_cache_dtype
from minivllm.errors import ConfigError
from minivllm.models.decoder import Decoder
from minivllm.worker.loading import loader
from tests.parity_reference import engine_logits, greedy, random_prompts, reference_model, runner_of, tiny_llm

TinyModel = Callable[..., Path]
GPU_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16]
REASON = cannot_compile_reason(torch.device("cpu"))


class RoundingCache(DynamicCache):
    """Keys and values as a page of this dtype gives them back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rounds_to = dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        limit = torch.finfo(self.rounds_to).max
        k, v = (x.clamp(-limit, limit).to(self.rounds_to).float() for x in (key_states, value_states))
        return super().update(k, v, *args, **kwargs)


def logits_over_rounded(directory: Path, token_ids: list[int], dtype: torch.dtype) -> Tensor:
    """transformers' logits [len(token_ids), vocab] in float32, but for the rounding of keys and values."""
    with torch.inference_mode():
        return reference_model(directory)(
            torch.tensor([token_ids]), past_key_values=RoundingCache(dtype)
        ).logits[0]


@contextmanager
def as_on_a_gpu(cache_dtype: torch.dtype) -> Iterator[None]:
    """Engines that are started meanwhile attend in float32 over pages of this dtype,
    as only a GPU's kernel can."""

    class WideDecoder(Decoder):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(
                *args, **settings | {"attention_dtype": torch.float32, "cache_dtype": cache_dtype}
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "Decoder", WideDecoder)
        yield


def distance(logits: Tensor, reference: Tensor) -> float:
    return float((logits - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_over_keys_and_values_rounded_the_same_way(
    tiny_model: TinyModel, family: str, dtype: torch.dtype
) -> None:
    directory, prompt = tiny_model(family), random_prompts((70,))[0]
    with as_on_a_gpu(dtype), tiny_llm(directory, max_num_batched_tokens=24) as llm:
        assert {cache.k.dtype for cache in runner_of(llm).paged_model.caches} == {dtype}
        completion, logits = engine_logits(llm, prompt, max_tokens=8)
    token_ids = prompt + completion[:-1]
    ours = distance(logits, logits_over_rounded(directory, token_ids, dtype))
    unrounded = distance(logits, logits_over_rounded(directory, token_ids, torch.float32))
    # A value next to the middle between two representable ones may be rounded the other way here than there.
    assert ours < 0.1 * unrounded, "the difference is what rounding makes, and nothing else"


def test_a_cpu_attends_over_bfloat16_pages(tiny_model: TinyModel) -> None:
    assert_close_over_bfloat16_pages(tiny_model("llama"))


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_cpu_attends_over_bfloat16_pages_compiled(tiny_model: TinyModel) -> None:
    assert_close_over_bfloat16_pages(tiny_model("llama"), enforce_eager=False)


def assert_close_over_bfloat16_pages(directory: Path, **settings: Any) -> None:
    prompt = random_prompts((70,))[0]
    with tiny_llm(directory, kv_cache_dtype="bfloat16", **settings) as llm:
        assert {cache.v.dtype for cache in runner_of(llm).paged_model.caches} == {torch.bfloat16}
        completion, logits = engine_logits(llm, prompt, max_tokens=8)
    # Queries and outputs of attention are in bfloat16 as well: 2 ** -9 each time.
    assert distance(logits, logits_over_rounded(directory, prompt + completion[:-1], torch.bfloat16)) < 2**-7


def test_the_same_memory_holds_more_tokens_in_fewer_bits(tiny_model: TinyModel) -> None:
    directory = tiny_model("llama")
    page = 2 * 3 * 8 * 2 * 16  # values of K and V: layers, tokens, KV heads, head_dim
    memory: dict[str, Any] = {"kv_cache_memory_bytes": 100 * page * 4 + 5, "num_gpu_blocks_override": None}
    num_pages = {}
    for name in ("float32", "bfloat16"):
        with tiny_llm(directory, kv_cache_dtype=name, **memory) as llm:
            num_pages[name] = runner_of(llm).limits.groups[0].num_blocks
    with as_on_a_gpu(torch.float8_e4m3fn), tiny_llm(directory, **memory) as llm:
        num_pages["fp8_e4m3"] = runner_of(llm).limits.groups[0].num_blocks
        [sizes] = llm.collective_rpc("memory_bytes")
        assert sizes["kv_cache"] == 400 * page
        assert greedy(llm, random_prompts()), "and it generates"
    assert num_pages == {"float32": 100, "bfloat16": 200, "fp8_e4m3": 400}


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "capability", "resolved"),
    [
        ("auto", "bfloat16", "cpu", (0, 0), "bfloat16"),
        ("bfloat16", "bfloat16", "cpu", (0, 0), "bfloat16"),
        ("bfloat16", "float32", "cpu", (0, 0), "bfloat16"),
        ("float32", "bfloat16", "cpu", (0, 0), "float32"),
        ("auto", "bfloat16", "cuda", (8, 0), "bfloat16"),
        ("bfloat16", "bfloat16", "cuda", (8, 0), "bfloat16"),
        ("bfloat16", "float32", "cuda", (8, 0), "bfloat16"),
        ("fp8_e5m2", "bfloat16", "cuda", (8, 0), "float8_e5m2"),
        ("fp8_e4m3", "float16", "cuda", (8, 9), "float8_e4m3fn"),
        ("fp8_e4m3", "bfloat16", "cuda", (9, 0), "float8_e4m3fn"),
    ],
)
def test_every_device_has_the_dtypes_that_save_something(
    asked: str, dtype: str, device: Any, capability: tuple[int, int], resolved: str
) -> None:
    assert resolve_cache_dtype(asked, dtype, device, capability)[0] == resolved


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "capability", "sentence"),
    [
        (
            "fp8_e4m3",
            "bfloat16",
            "cpu",
            (0, 0),
            "a CPU cannot attend to blocks of 8 bits.* bfloat16 takes half",
        ),
        ("fp8_e5m2", "float32", "cpu", (0, 0), "a CPU cannot attend to blocks of 8 bits"),
        (
            "float32",
            "bfloat16",
            "cuda",
            (9, 0),
            "saves nothing .*'bfloat16': use 'auto', or fp8_e4m3 or fp8_e5m2",
        ),
        ("float16", "bfloat16", "cuda", (9, 0), "saves nothing"),
        ("fp8_e4m3", "bfloat16", "cuda", (8, 6), r"compute capability 8\.6.* use fp8_e5m2"),
    ],
)
def test_what_costs_more_than_it_saves_is_refused_with_the_reason(
    asked: str, dtype: str, device: Any, capability: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve_cache_dtype(asked, dtype, device, capability)
