"""GGUF files: values as the gguf package reads them, rows as the model needs them,
broken files refused at once."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.errors import ModelError
from minivllm.gguf.gguf_file import GGUFFile, find_gguf, hugging_face_name, unpermute_rotary_rows
from minivllm.gguf.gguf_quants import BLOCK_LAYOUTS, GROUPED_BITS, dequantize_blocks, group_blocks
from tests.gguf_models import finite_blocks
from tests.models.rotary_reference import llama3_factors

TYPES = {layout.name: number for number, layout in BLOCK_LAYOUTS.items()}


def write_small(path: Path, rope_factors: list[float] | None = None) -> Path:
    """A one-layer llama-shaped file with several tensor types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_array("general.languages", ["en", "de"])
    writer.add_array("minivllm.numbers", [1, 2, 3])
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (40, 64), "blk.0.attn_q.weight": (64, 64), "blk.0.attn_norm.weight": (64,)}
    kinds = ["Q8_0", "Q4_1", "F32"]
    for (name, shape), kind in zip(shapes.items(), kinds):
        values = random.normal(size=shape).astype(np.float32)
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.mark.parametrize("type_name", list(TYPES))
def test_every_supported_type_dequantises_as_the_gguf_package_does(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    layout = BLOCK_LAYOUTS[TYPES[type_name]]
    assert (layout.elements, layout.num_bytes, TYPES[type_name]) == (elements, num_bytes, int(kind))
    blocks = np.random.default_rng(0).integers(0, 256, size=(64, num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        wanted = gguf.quants.dequantize(blocks, kind)
    np.testing.assert_array_equal(dequantize_blocks(blocks.tobytes(), type_name).ravel(), wanted.ravel())


@pytest.mark.parametrize("type_name", list(GROUPED_BITS))
def test_groups_of_a_type_are_exactly_its_values(type_name: str) -> None:
    data = finite_blocks(type_name, 50, seed=1).tobytes()
    codes, scale, offset = group_blocks(data, type_name)
    assert codes.dtype == np.uint8 and codes.max() < 2 ** GROUPED_BITS[type_name]
    values = codes.astype(np.float32) * scale[:, None] + offset[:, None]
    assert np.array_equal(values.ravel(), dequantize_blocks(data, type_name).ravel())


def test_metadata_and_tensors_are_those_the_gguf_package_reads(small_file: Path) -> None:
    reader = gguf.GGUFReader(small_file)
    with GGUFFile(small_file) as file:
        for key, value in file.metadata.items():
            assert value == reader.fields[key].contents()
        assert file.metadata["general.languages"] == ["en", "de"]
        assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
        for tensor in reader.tensors:
            wanted = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            assert file.tensors[tensor.name].shape == tuple(wanted.shape)
            assert torch.equal(file.dequantize(tensor.name, torch.float32), wanted)
            assert torch.equal(file.dequantize(tensor.name, torch.bfloat16), wanted.to(torch.bfloat16))
            kind, raw = file.raw(tensor.name)
            assert kind == tensor.tensor_type.name
            assert bytes(raw.numpy().tobytes()) == tensor.data.tobytes()
            assert raw.shape[0] == (wanted.shape[0] if wanted.ndim == 2 else 1)


def test_a_file_is_parsed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads the configuration, the tokenizer and the weights of it."""
    parsed: list[Path] = []
    parse = GGUFFile._parse

    def counted(file: GGUFFile) -> None:
        parsed.append(file.path)
        parse(file)

    monkeypatch.setattr(GGUFFile, "_parse", counted)
    path = write_small(tmp_path / "a.gguf")
    for count in (1, 2):  # so young that its next version could have the same times
        with GGUFFile(path) as file:
            first = file.metadata, file.tensors, file.dequantize("blk.0.attn_norm.weight", torch.float32)
        assert len(parsed) == count
    os.utime(path, (10**9, 10**9))
    for _ in range(3):
        with GGUFFile(path) as file:
            assert (file.metadata, file.tensors) == first[:2]
            assert torch.equal(file.dequantize("blk.0.attn_norm.weight", torch.float32), first[2])
    assert len(parsed) == 3
    write_small(path, rope_factors=[1.0] * 8)
    os.utime(path, (10**9 + 1, 10**9 + 1))
    with GGUFFile(path) as file:
        assert "rope_freqs.weight" in file.tensors


def test_chunked_dequantisation_equals_whole(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUFFile(small_file) as file:
        whole = file.dequantize("token_embd.weight", torch.float32)
        monkeypatch.setattr("minivllm.gguf.gguf_file.DEQUANTIZE_CHUNK", 96)
        assert torch.equal(file.dequantize("token_embd.weight", torch.float32), whole)


def test_the_default_model_dequantises_as_the_gguf_package_does(smollm2_path: Path) -> None:
    reader = gguf.GGUFReader(smollm2_path)
    names = {"blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight", "blk.7.attn_v.weight"}
    with GGUFFile(smollm2_path) as file:
        assert len(file.tensors) == 272
        for tensor in reader.tensors:
            if tensor.name in names:
                wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                assert np.array_equal(file.dequantize(tensor.name, torch.float32).numpy(), wanted)


def test_interleaved_rotary_on_file_rows_equals_half_rotary_on_unpermuted_rows() -> None:
    heads, head_dim, width = 3, 8, 5
    generator = torch.Generator().manual_seed(0)
    in_file = torch.randn(heads * head_dim, width, dtype=torch.float64, generator=generator)
    x = torch.randn(width, dtype=torch.float64, generator=generator)
    angles = torch.rand(head_dim // 2, dtype=torch.float64, generator=generator) * 6
    interleaved = torch.view_as_complex((in_file @ x).reshape(heads, head_dim // 2, 2))
    turned = interleaved * torch.polar(torch.ones_like(angles), angles)
    first, second = (unpermute_rotary_rows(in_file, heads) @ x).reshape(heads, 2, head_dim // 2).unbind(1)
    torch.testing.assert_close(first * angles.cos() - second * angles.sin(), turned.real)
    torch.testing.assert_close(second * angles.cos() + first * angles.sin(), turned.imag)


def test_unpermuting_undoes_the_permutation_that_converters_apply() -> None:
    heads, head_dim = 4, 6
    rows = torch.arange(heads * head_dim)
    converted = rows.reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
    assert torch.equal(unpermute_rotary_rows(converted, heads), rows)


def test_names_are_mapped_to_hugging_face_names() -> None:
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.11.attn_q.bias") == "model.layers.11.self_attn.q_proj.bias"
    assert hugging_face_name("blk.0.attn_k_norm.weight") == "model.layers.0.self_attn.k_norm.weight"
    assert hugging_face_name("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    assert hugging_face_name("blk.3.ffn_gate_chexps.weight") is None
    assert hugging_face_name("blk.x.attn_q.weight") is None


def test_llama3_rotary_factors_in_a_file_become_llama3_parameters(tmp_path: Path) -> None:
    factors = llama3_factors(16, 10000.0, 8.0, 1.0, 4.0, 1024)
    rotary = read_decoder_config(write_small(tmp_path / "l3.gguf", factors)).rotary[0]
    assert (rotary.type, rotary.factor, rotary.original_max_position) == ("llama3", 8.0, 1024)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        read_decoder_config(write_small(tmp_path / "odd.gguf", [1.0, 7.0, 2.0, 9.0, 1.0, 1.0, 1.0, 3.0]))


def test_a_directory_counts_as_gguf_when_it_holds_one_such_file_and_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path, "gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        find_gguf(tmp_path, "gguf")
    with pytest.raises(ModelError, match="load_format"):
        find_gguf(tmp_path / "a.gguf", "safetensors")


def test_every_truncation_is_refused(small_file: Path, tmp_path: Path) -> None:
    data = small_file.read_bytes()
    target = tmp_path / "cut.gguf"
    for length in [*range(0, 1200, 7), len(data) // 2, len(data) - 40]:
        target.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(target)


def header(tensors: int = 0, entries: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(
    name: str, dimensions: list[int], kind: int = 0, offset: int = 0, count: int | None = None
) -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return (
        text(name)
        + struct.pack("<I", len(dimensions) if count is None else count)
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


BROKEN = {
    "wrong magic": (header(magic=b"GGML"), "begin with"),
    "old version": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "version"),
    "huge tensor count": (header(tensors=2**63), "tensors"),
    "huge entry count": (header(entries=2**63), "metadata"),
    "huge name": (header(entries=1) + struct.pack("<Q", 2**62), "entry 0"),
    "huge string": (header(entries=1) + text("key") + struct.pack("<IQ", 8, 2**40), "'key'"),
    "huge array": (header(entries=1) + text("key") + struct.pack("<IIQ", 9, 4, 2**61), "'key'"),
    "huge string array": (header(entries=1) + text("key") + struct.pack("<IIQ", 9, 8, 2**61), "'key'"),
    "nested array": (header(entries=1) + text("key") + struct.pack("<IIQ", 9, 9, 1), "'key'"),
    "unknown value type": (header(entries=1) + text("key") + struct.pack("<I", 77), "'key'"),
    "no UTF-8": (header(entries=1) + struct.pack("<Q", 2) + b"\xff\xfe", "UTF-8"),
    "entry twice": (header(entries=2) + 2 * (text("key") + struct.pack("<IB", 0, 1)), "twice"),
    "bad alignment": (header(entries=1) + text("general.alignment") + struct.pack("<II", 4, 3), "alignment"),
    "zero alignment": (header(entries=1) + text("general.alignment") + struct.pack("<II", 4, 0), "alignment"),
    "no dimensions": (header(tensors=1) + tensor("w", []), "'w'"),
    "too many dimensions": (header(tensors=1) + tensor("w", [1], count=2**31), "'w'"),
    "zero dimension": (header(tensors=1) + tensor("w", [0, 4]), "'w'"),
    "product overflows": (header(tensors=1) + tensor("w", [2**32, 2**32]), "'w'"),
    "unknown tensor type": (header(tensors=1) + tensor("w", [32], kind=99), "'w'"),
    "row of half a block": (header(tensors=1) + tensor("w", [33], kind=3), "'w'"),
    "row of half a super-block": (header(tensors=1) + tensor("w", [128], kind=11), "'w'"),
    "super-blocks beyond the end": (header(tensors=1) + tensor("w", [256, 40], kind=10), "'w'"),
    "beyond the end": (header(tensors=1) + tensor("w", [32], offset=2**40), "'w'"),
    "offset wraps around": (header(tensors=1) + tensor("w", [32], offset=2**64 - 32), "'w'"),
    "misaligned": (header(tensors=1) + tensor("w", [32], offset=4), "'w'"),
    "tensor twice": (header(tensors=2) + tensor("w", [8]) + tensor("w", [8], offset=32), "twice"),
    "overlap": (header(tensors=2) + tensor("v", [16]) + tensor("w", [8], offset=32), "overlaps"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_header_is_refused_by_name_without_allocating(name: str, tmp_path: Path) -> None:
    content, expected = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content + b"\0" * 512)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "broken.gguf" in str(caught.value) and expected in str(caught.value)
    assert peak < 1_000_000


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_mutated_file_is_read_or_refused_with_a_sentence(
    small_file: Path, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(small_file.read_bytes())
    for position, value in changes:
        data[position] = value
    path = small_file.with_name("mutated.gguf")
    path.write_bytes(bytes(data))
    try:
        read_decoder_config(path)
        with GGUFFile(path) as file:
            for name in file.tensors:
                file.dequantize(name, torch.float32)
    except ModelError as error:
        assert "mutated.gguf" in str(error)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for name in ("empty.gguf", "absent.gguf"):
        with pytest.raises(ModelError, match=name):
            GGUFFile(tmp_path / name)


def test_an_unsupported_gguf_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "gemma.gguf", "gemma")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"gemma.*llama.*qwen3"):
        read_decoder_config(tmp_path / "gemma.gguf")
