"""Several workers each move their own part of a block, and a block is there when all of them have it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import EngineDeadError
from minivllm.kv_cache.blocks.hashing import hash_block
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.simulation.ranks import virtual_llm
from tests.executor.test_tensor_parallel import PROMPTS, UNEVEN, arguments
from tests.kv_transfer.test_connectors import OFFLOAD, storage, transferred
from tests.kv_transfer.test_multi_connector import several
from tests.parity_reference import tokens_of

TinyModel = Callable[..., Path]


def answers(llm: LLM, num_tokens: int = 24) -> list[list[int]]:
    """Twice, one after the other: what the first ones left behind is found, or comes back from elsewhere."""
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    outputs = [llm.generate([prompt], greedy, use_tqdm=False) for prompt in PROMPTS * 2]
    outputs.append(llm.generate(PROMPTS, greedy, use_tqdm=False))
    return tokens_of([output for some in outputs for output in some])


def parts(path: Path, rank: int) -> list[Path]:
    """The files of a rank."""
    return list(path.rglob(f"rank{rank}of2/*.safetensors"))


@pytest.fixture
def uneven(tiny_model: TinyModel) -> Path:
    return tiny_model("llama-biases", **UNEVEN)


@pytest.mark.parametrize(("tier", "is_async"), [("host", False), ("directory", True)])
def test_what_the_parts_of_uneven_workers_bring_back_gives_the_same_tokens(
    uneven: Path, tmp_path: Path, tier: str, is_async: bool
) -> None:
    with LLM(**arguments(uneven)) as llm:
        expected = answers(llm)
    config = OFFLOAD if tier == "host" else storage(tmp_path)
    given = arguments(uneven, tensor_parallel_size=2, async_scheduling=is_async, kv_transfer_config=config)
    with virtual_llm(**given) as llm:
        assert answers(llm) == expected
        stats = transferred(llm)
        assert stats.num_loaded_blocks > 0 and stats.num_failed_blocks == 0
        # 3 KV heads of 16 values, K and V, float32, 2 layers, 16 tokens: of both workers together
        assert stats.block_bytes == 3 * 16 * 2 * 4 * 2 * 16
        llm.llm_engine.client.call("check_integrity")
    if tier == "directory":
        large, small = ({path.name: path.stat().st_size for path in parts(tmp_path, rank)} for rank in (0, 1))
        assert large.keys() == small.keys() and min(large.values()) > 1.5 * min(small.values())


def test_a_block_that_one_rank_lacks_is_missing_and_one_that_it_has_damaged_fails_for_all(
    uneven: Path, tmp_path: Path
) -> None:
    given = arguments(
        uneven, tensor_parallel_size=2, kv_transfer_config=storage(tmp_path), num_gpu_blocks_override=40
    )
    with virtual_llm(**given) as llm:
        expected = answers(llm)
    [folder] = {path.parent for path in parts(tmp_path, 1)}
    names, parent = [], b""
    for start in range(0, 80, 16):
        parent = hash_block(parent, PROMPTS[3]["prompt_token_ids"][start : start + 16])
        names.append(folder / f"{parent.hex()}.safetensors")
    names[1].write_bytes(names[1].read_bytes()[:-1])
    names[3].unlink()
    with virtual_llm(**given) as llm:
        [output] = llm.generate([PROMPTS[3]], use_tqdm=False)
        stats = transferred(llm)
        # Three blocks are there by name; the second one is bad with rank 1 alone, and the first one is kept.
        assert (stats.hit_tokens, stats.num_loaded_blocks, stats.num_failed_blocks) == (48, 1, 2)
        assert output.num_cached_tokens == 16
        assert answers(llm) == expected
        llm.llm_engine.client.call("check_integrity")


@pytest.mark.parametrize(
    "layout", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.slow)]
)
def test_worker_processes_find_what_those_of_another_engine_saved(
    uneven: Path, tmp_path: Path, layout: str
) -> None:
    config = several(OFFLOAD, storage(tmp_path))
    given = arguments(uneven, kv_transfer_config=config, **{layout: 2})
    with virtual_llm(**given) as llm:
        expected = answers(llm, num_tokens=4)
    with LLM(**given) as llm:
        assert answers(llm, num_tokens=4) == expected
        in_host, in_files = llm.get_metrics().kv_transfer
        assert in_host.num_failed_blocks == in_files.num_failed_blocks == 0
        assert in_files.num_loaded_blocks > 4
    assert len(parts(tmp_path, 0)) == len(parts(tmp_path, 1)) > 4


def test_who_waits_for_a_transfer_hears_of_the_end_of_the_workers() -> None:
    inbox = TransferInbox()
    threading.Timer(0.1, lambda: inbox.fail(EngineDeadError("gone"))).start()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            inbox.take(may_wait=True)
