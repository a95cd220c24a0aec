"""A directory of blocks: other processes and other days hit it,
and whatever is not the block's own file is ignored."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from minivllm.config import KVTransferConfig
from minivllm.kv_cache.specs import one_group
from minivllm.kv_transfer.connector import make_scheduler_side
from minivllm.kv_transfer.connectors.shared_storage import SharedStorageScheduler
from minivllm.request import Request
from tests.kv_transfer.test_connectors import GREEDY, PROMPTS, block_files, storage, transferred
from tests.lora.lora_adapters import random_adapter
from tests.parity_reference import run, tiny_llm
from tests.scheduler.simulated_worker import make_engine_request

TinyModel = Callable[..., Path]
PROMPT = PROMPTS[2]
NUM_BLOCKS = len(PROMPT) // 8
"""Whole blocks of the prompt, without its last token."""

SCRIPT = """
import json, sys
from minivllm import LLM, SamplingParams
model, prompt, config = json.loads(sys.argv[1])
with LLM(model, dtype="float32", device="cpu", enforce_eager=True, block_size=8, max_model_len=128, max_num_seqs=8,
         num_gpu_blocks_override=128, kv_transfer_config=config) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids), output.num_cached_tokens]))
"""


def answer(model: Path, path: Path, **settings: Any) -> tuple[list[int], int]:
    """Of a new engine: the tokens, and how many of the prompt were found."""
    with tiny_llm(model, kv_transfer_config=storage(path), **settings) as llm:
        [output] = run(llm, [PROMPT], GREEDY)
        return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_another_process_hits_what_this_one_saved(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tokens, num_found = answer(model, tmp_path)
    assert num_found == 0
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(model), PROMPT, storage(tmp_path)])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(result.stdout) == [tokens, 8 * NUM_BLOCKS]


def test_a_file_is_a_safetensors_file_with_the_tensors_of_all_layers(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    answer(tiny_model("llama"), tmp_path)
    first = block_files(tmp_path, PROMPT)[0]
    with safetensors.safe_open(first, "pt") as file:
        names, metadata = list(file.keys()), file.metadata()
        assert metadata["block_hash"] == first.stem and {"0.k", "0.v"} <= set(names)
        assert all(
            file.get_tensor(name).shape[0] == 8 and file.get_tensor(name).dtype == torch.float32
            for name in names
        )
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert first.stat().st_mode & 0o077 == 0


def other_header(data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    return data[:8] + data[8 : 8 + length].replace(b"F32", b"I32") + data[8 + length :]


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path, other: path.write_bytes(b""),
    "too long": lambda path, other: path.write_bytes(path.read_bytes() + b"\0"),
    "of another block": lambda path, other: path.write_bytes(other.read_bytes()),
    "another header": lambda path, other: path.write_bytes(other_header(path.read_bytes())),
    "half written": lambda path, other: path.write_bytes(
        path.read_bytes()[:2000].ljust(path.stat().st_size, b"\0")
    ),
    "one bit": lambda path, other: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])
    ),
    "a symbolic link": lambda path, other: (
        path.rename(path.with_suffix(".x")),
        path.symlink_to(path.with_suffix(".x")),
    ),
    "a directory": lambda path, other: (path.unlink(), path.mkdir()),
    "a pipe": lambda path, other: (path.unlink(), os.mkfifo(path)),
}

NEVER_ASKED = ("a directory", "a pipe")
"""No regular file under its name: the block counts as missing."""


def test_what_is_not_the_blocks_own_file_is_ignored_with_one_line_and_written_anew(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    tokens, _ = answer(model, tmp_path)
    first, second = block_files(tmp_path, PROMPT)[:2]
    good = second.read_bytes()
    for name, damage in DAMAGES.items():
        damage(second, first)
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "minivllm"),
            tiny_llm(model, kv_transfer_config=storage(tmp_path)) as llm,
        ):
            for _ in range(2):
                [output] = run(llm, [PROMPT], GREEDY)
                assert list(output.outputs[0].token_ids) == tokens, name
                llm.llm_engine.client.call("check_integrity")
            assert transferred(llm).num_loaded_blocks == 1, name
        lines = [record for record in caplog.records if "is ignored" in record.message]
        assert len(lines) == (name not in NEVER_ASKED), name
        if second.is_dir():
            second.rmdir()
            second.write_bytes(good)
        assert second.read_bytes() == good and not second.is_symlink(), name


def test_other_weights_settings_and_lengths_have_other_folders(tiny_model: TinyModel, tmp_path: Path) -> None:
    llama, tokens = tiny_model("llama"), {}
    variants: dict[str, tuple[Path, dict[str, Any]]] = {
        "plain": (llama, {}),
        "weights": (tiny_model("mistral"), {}),
        "block size": (llama, {"block_size": 16}),
        "cache dtype": (llama, {"kv_cache_dtype": "bfloat16"}),
        "rotary": (
            llama,
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}},
        ),
        "quantization": (llama, {"quantization": "int8"}),
        "random weights": (llama, {"load_format": "dummy"}),
        "another seed": (llama, {"load_format": "dummy", "seed": 1}),
    }
    for name, (model, settings) in variants.items():
        tokens[name], num_found = answer(model, tmp_path, **settings)
        assert num_found == 0, name
    assert len(list(tmp_path.iterdir())) == len(variants)
    assert answer(llama, tmp_path) == (tokens["plain"], 8 * NUM_BLOCKS)


def test_a_salt_and_other_tokens_have_other_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=storage(tmp_path)) as llm:
        for prompt in (
            {"prompt_token_ids": PROMPT},
            {"prompt_token_ids": PROMPT, "cache_salt": "tenant"},
            {"prompt_token_ids": [PROMPT[0] + 1, *PROMPT[1:]]},
        ):
            assert llm.reset_prefix_cache()
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == 0


def test_an_adapter_has_files_of_its_own_and_what_it_holds_counts_not_its_name(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    adapters = [
        None,
        *(random_adapter(tmp_path / str(seed) / "adapter", model, seed=seed) for seed in (1, 2)),
    ]
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1}

    def answers(config: dict[str, Any] | None) -> list[tuple[list[int], int]]:
        found = []
        for adapter in adapters:
            with tiny_llm(model, kv_transfer_config=config, **settings) as llm:
                prompt = {"prompt_token_ids": PROMPT}
                [output] = llm.generate([prompt], GREEDY, lora_request=adapter, use_tqdm=False)
                found.append((list(output.outputs[0].token_ids), output.num_cached_tokens))
        return found

    plain = answers(None)
    assert len({tuple(tokens) for tokens, _ in plain}) == 3
    config = storage(tmp_path / "blocks")
    assert answers(config) == plain, "nobody finds what another one has saved"
    assert answers(config) == [(tokens, 8 * NUM_BLOCKS) for tokens, _ in plain]


def test_a_directory_of_ten_thousand_blocks_is_there_at_once(tmp_path: Path) -> None:
    config = KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        fingerprint="f",
    )
    folder = tmp_path / "f" / "rank0of1"
    folder.mkdir(parents=True)
    for index in range(10_000):
        (folder / f"{index:064x}.safetensors").touch()
    started = time.perf_counter()
    side = make_scheduler_side(config, [one_group(1, 8, 100, 10)], block_bytes=[100])
    request = Request(make_engine_request("r", [1] * 805))
    request.block_hashes = [bytes.fromhex(f"{index:064x}") for index in range(100)]
    assert isinstance(side, SharedStorageScheduler) and side.get_num_new_matched_tokens(request, 0) == 800
    assert time.perf_counter() - started < 1.0
