"""New weights in an engine that saves keys and values:
nothing of the old ones is ever found with the new ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM
from minivllm.errors import ModelError, RequestError
from minivllm.simulation.ranks import virtual_llm
from tests.kv_transfer.lookup_pair import consumer, unix
from tests.kv_transfer.test_connectors import GREEDY, OFFLOAD, OWN, PROMPTS, storage, transferred
from tests.kv_transfer.test_multi_connector import blocks, several
from tests.parity_reference import run, tiny_llm

TinyModel = Callable[..., Path]
PROMPT = PROMPTS[2]
"""Four blocks that can be found."""


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy to write into."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Iterator[Path]:
    """The same model with other weights."""
    path = Path(shutil.copytree(model, tmp_path / "other"))
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(path / "model.safetensors")
    changed = {name: one + 0.3 * torch.randn(one.shape, generator=generator) for name, one in tensors.items()}
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    yield path


def answer(llm: LLM) -> tuple[list[int], int]:
    [output] = run(llm, [PROMPT], GREEDY)
    llm.llm_engine.client.call("check_integrity")
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def plain(model: Path) -> list[int]:
    with tiny_llm(model) as llm:
        return answer(llm)[0]


def test_every_weights_find_their_own_blocks_and_no_others(model: Path, other: Path, tmp_path: Path) -> None:
    old, new = plain(model), plain(other)
    assert old != new
    with tiny_llm(model, kv_transfer_config=several(OFFLOAD, storage(tmp_path / "blocks"))) as llm:
        assert answer(llm) == (old, 0)
        llm.update_weights(str(other))
        assert answer(llm) == (new, 0)
        llm.update_weights(str(model))
        assert answer(llm) == (old, 32)
        assert blocks(llm) == [(0, 0, 0), (4, 4, 0)], "host memory is empty, files stay"
    with tiny_llm(other, kv_transfer_config=storage(tmp_path / "blocks")) as llm:
        assert answer(llm) == (new, 32)
    assert len(list((tmp_path / "blocks").iterdir())) == 2


def test_weights_that_change_while_an_engine_sleeps_are_noticed_when_they_are_read(
    model: Path, other: Path, tmp_path: Path
) -> None:
    old, new = plain(model), plain(other)
    with tiny_llm(model, kv_transfer_config=storage(tmp_path / "blocks")) as llm:
        assert answer(llm) == (old, 0)
        llm.sleep(level=1)
        (other / "model.safetensors").replace(model / "model.safetensors")  # not into it: it may be mapped
        llm.wake_up()
        assert answer(llm) == (old, 32), "level 1 kept the weights, and so the blocks are theirs"
        llm.sleep(level=2)
        llm.wake_up()
        assert answer(llm) == (new, 0)
        llm.sleep(level=2)
        llm.wake_up()
        assert answer(llm) == (new, 32)


def test_weights_that_do_not_fit_leave_the_blocks_as_they_were(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file({"model.norm.weight": torch.ones(3)}, broken / "model.safetensors")
    with tiny_llm(model, kv_transfer_config=storage(tmp_path / "blocks")) as llm:
        expected = answer(llm)[0]
        with pytest.raises(ModelError):
            llm.update_weights(str(broken))
        assert llm.reset_prefix_cache()
        assert answer(llm) == (expected, 32)


def test_all_workers_get_new_folders(model: Path, other: Path, tmp_path: Path) -> None:
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "enforce_eager": True,
        "block_size": 8,
        "max_model_len": 64,
    }
    config = storage(tmp_path / "blocks")
    given = {
        **settings,
        "num_gpu_blocks_override": 20,
        "tensor_parallel_size": 2,
        "kv_transfer_config": config,
    }
    with virtual_llm(model=str(model), **given) as llm:
        old = answer(llm)[0]
        llm.update_weights(str(other))
        new, num_found = answer(llm)
        assert num_found == 0 and new != old
        llm.update_weights(str(model))
        assert answer(llm) == (old, 32)
        assert transferred(llm).num_failed_blocks == 0
    folders = sorted(
        path.relative_to(tmp_path / "blocks").parts[1] for path in (tmp_path / "blocks").glob("*/*")
    )
    assert folders == ["rank0of2", "rank0of2", "rank1of2", "rank1of2"]


def test_host_memory_is_given_back_while_the_engine_sleeps(model: Path) -> None:
    with tiny_llm(model, kv_transfer_config=OFFLOAD) as llm:
        expected, _ = answer(llm)
        side = llm.llm_engine.client.core.executor.worker._connector  # type: ignore[attr-defined]
        assert sum(memory.numel() for memory in side._memory.values()) > 0
        llm.sleep(level=1)
        assert not side._memory
        llm.wake_up()
        assert answer(llm) == (expected, 0)


def test_a_connector_that_cannot_follow_says_so(model: Path, other: Path, tmp_path: Path) -> None:
    for config in (OWN, several(OFFLOAD, OWN), consumer(unix(tmp_path))):
        with tiny_llm(model, kv_transfer_config=config) as llm:
            expected, _ = answer(llm)
            with pytest.raises(RequestError, match="start another engine"):
                llm.update_weights(str(other))
            assert answer(llm)[0] == expected
