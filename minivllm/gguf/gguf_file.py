"""Read GGUF files safely: every count,
length and offset is checked against the file before anything is allocated.

GGUF is llama.cpp's container: a header, typed metadata, tensor descriptions, then aligned tensor data. The
file is mapped, so only what is asked for is read, and tensors are dequantised in chunks into their final
type.
"""

from __future__ import annotations

import mmap
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import torch

from minivllm.errors import ModelError
from minivllm.gguf.gguf_quants import BLOCK_LAYOUTS, LAYOUT_OF, dequantize_blocks, group_blocks
from minivllm.weights.stored_weight import GroupedWeight, RestoredWeight, StoredWeight

MAX_METADATA_ENTRIES = 65_536
MAX_TENSORS = 262_144
MAX_NAME_BYTES = 4_096
MAX_ARRAY_ELEMENTS = 8_388_608
MAX_ELEMENTS_PER_DIMENSION = 2**40
MAX_DIMENSIONS = 4
TENSORS_AHEAD = 2
"""Tensors that are dequantised side by side before they are asked for."""
DEQUANTIZE_CHUNK = 131_072  # elements turned into float32 at a time, few enough for a processor's cache

# GGUF metadata value types: number -> struct code; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # LFM2's name for it
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "mamba.in_proj",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.o_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "output_scale",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LAYER_VECTORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp.scale": "mlp.scale",
    "ffn_down_exps.scale": "mlp.per_expert_scale",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
ROPE_TENSORS = frozenset({ROPE_FACTORS, *LONGROPE_FACTORS.values()})

Treatment = Literal["keep", "restore", "dequantize", "exact"]
"""Keep a tensor's blocks; dequantise it and mark the values as quantised before; dequantise it and forget
that; or dequantise it to float32, whatever the model computes in."""


SETTLED_NANOSECONDS = 2 * 10**9
"""Clocks of file systems are coarse:
a file that was changed this long ago shows any further change in its times."""

_last_parsed: tuple[object, dict[str, Any], dict[str, GGUFTensor]] | None = None
"""Identity, metadata and tensors of one file:
a start reads the configuration, the tokenizer and the weights of it."""


def _identity(path: Path) -> object:
    """Equal as long as the file is the same; None for a file that has just been written."""
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < SETTLED_NANOSECONDS:
        return None
    return path.resolve(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's description. shape is in torch order (rows first);
    offset and num_bytes locate it in the file."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def find_gguf(model_path: str | Path, load_format: str = "auto") -> Path | None:
    """The GGUF file that ``model_path`` means, or None for a Hugging Face directory.

    A ``.gguf`` file is itself; a directory counts when it holds no config.json, or the load format is "gguf",
    and exactly one ``.gguf`` file. Raises ModelError when load format and path contradict each other.
    """
    path = Path(model_path)
    if path.is_file():
        if path.suffix == ".gguf" or load_format == "gguf":
            if load_format == "safetensors":
                raise ModelError(
                    f"{path} is a GGUF file, but load_format is safetensors; use load_format auto or gguf."
                )
            return path
        raise ModelError(f"{path} is neither a .gguf file nor a model directory.")
    if not path.is_dir():
        raise ModelError(f"{path} does not exist; give a model directory or a .gguf file.")
    if load_format == "gguf" or (load_format in ("auto", "dummy") and not (path / "config.json").exists()):
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        if load_format == "gguf" or files:
            raise ModelError(f"{path} holds {len(files)} .gguf files; give the path of the one to load.")
    return None


def hugging_face_name(
    gguf_name: str, fused: Collection[str] = (), renamed: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """Map ``blk.0.attn_q.weight`` to ``model.layers.0.self_attn.q_proj.weight``; None for an unknown name.

    fused: modules that hold several matrices in this family; ``ffn_up`` is one of them where there is no
    ``ffn_gate``. renamed: modules that mean something else in this family -> what they mean, and blocks
    ("mamba") likewise.
    """
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d{1,6})\.([a-z0-9_.]+)", gguf_name)
    if match is None:
        return None
    stored, _, kind = match[2].rpartition(".")
    if match[2] in _LAYER_VECTORS:
        module, kind = _LAYER_VECTORS[match[2]], ""
    elif stored in _LAYER_NAMES and kind in ("weight", "bias"):
        module = (
            "mlp.gate_up_proj" if stored == "ffn_up" and "gate_up_proj" in fused else _LAYER_NAMES[stored]
        )
    else:
        return None
    block, *rest = renamed.get(module, module).split(".")
    path = [f"model.layers.{int(match[1])}", renamed.get(block, block), *rest, kind]
    return ".".join(filter(None, path))


def unpermute_rotary_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Bring q or k rows from llama.cpp's interleaved rotary order back to Hugging Face's two halves.

    rows: ``[num_heads * head_dim, ...]``, weights, biases or raw blocks alike; of each head, rows ``2i`` and
    ``2i + 1`` of the file are rows ``i`` and ``i + head_dim / 2`` of the result, which is a new tensor of the
    same shape.
    """
    per_head = rows.shape[0] // num_heads
    return rows.reshape(num_heads, per_head // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class GGUFFile:
    """A mapped, fully validated GGUF file: ``metadata``, ``tensors``, and their data on demand.
    Use it with ``with``.

    Raises ModelError, naming the file and the tensor or entry,
    when anything in the header cannot be true of a file of this length.
    """

    def __init__(self, path: str | Path) -> None:
        global _last_parsed
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with self.path.open("rb") as file:
                self._size = self.path.stat().st_size
                if self._size < 24:
                    raise ModelError(f"{self.path} is {self._size} bytes long: too short to be a GGUF file.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        self._position = 0
        self._where = "its header"
        key = _identity(self.path)
        if key is not None and _last_parsed and _last_parsed[0] == key:
            _, self.metadata, self.tensors = _last_parsed
            return
        try:
            self._parse()
        except BaseException:
            self.close()
            raise
        if key is not None:
            _last_parsed = key, self.metadata, self.tensors

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def _refuse(self, reason: str) -> ModelError:
        return ModelError(
            f"{self.path} is not a valid GGUF file: {self._where} {reason}. Fetch the file again."
        )

    def _take(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if self._position + size > self._size:
            raise self._refuse("ends after the end of the file")
        (value,) = struct.unpack_from("<" + code, self._map, self._position)
        self._position += size
        return value

    def _take_string(self, limit: int) -> str:
        length = self._take("Q")
        if length > limit or length > self._size - self._position:
            raise self._refuse(f"claims a text of {length} bytes, more than the file holds or is allowed")
        raw = self._map[self._position : self._position + length]
        self._position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._refuse("holds text that is not UTF-8") from None

    def _take_strings(self, count: int) -> list[str]:
        """As many calls of ``_take_string``, for vocabularies of 100,000 entries and more."""
        data, size, position, length_at = (
            self._map,
            self._size,
            self._position,
            struct.Struct("<Q").unpack_from,
        )
        strings = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise self._refuse("ends after the end of the file")
            (length,) = length_at(data, position)
            position = start + length
            if position > size:
                raise self._refuse(f"claims a text of {length} bytes, more than the file holds or is allowed")
            strings.append(data[start:position])
        self._position = position
        try:
            return [text.decode() for text in strings]
        except UnicodeDecodeError:
            raise self._refuse("holds text that is not UTF-8") from None

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF.")
        self._position = 4
        version = self._take("I")
        if version not in (2, 3):
            raise self._refuse(f"names version {version}, but little-endian versions 2 and 3 are supported")
        num_tensors, num_entries = self._take("Q"), self._take("Q")
        if num_tensors > MAX_TENSORS or num_tensors * 24 > self._size:
            raise self._refuse(f"claims {num_tensors} tensors, more than the file can hold")
        if num_entries > MAX_METADATA_ENTRIES or num_entries * 13 > self._size:
            raise self._refuse(f"claims {num_entries} metadata entries, more than the file can hold")
        for index in range(num_entries):
            self._where = f"metadata entry {index}"
            key = self._take_string(MAX_NAME_BYTES)
            self._where = f"metadata entry {key!r}"
            if key in self.metadata:
                raise self._refuse("occurs twice")
            self.metadata[key] = self._take_value(self._take("I"))
        described = [self._take_tensor(index) for index in range(num_tensors)]
        self._place_tensors(described)

    def _take_value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == _STRING:
            return self._take_string(self._size)
        if kind != _ARRAY:
            raise self._refuse(f"has the unknown value type {kind}")
        element, count = self._take("I"), self._take("Q")
        if element == _STRING:
            smallest = 8
        elif element in _SCALARS:
            smallest = struct.calcsize("<" + _SCALARS[element])
        else:
            raise self._refuse(f"is an array of the unsupported element type {element}")
        if count > MAX_ARRAY_ELEMENTS or count * smallest > self._size - self._position:
            raise self._refuse(f"claims {count} array elements, more than the file holds or is allowed")
        if element == _STRING:
            return self._take_strings(count)
        values = struct.unpack_from(f"<{count}{_SCALARS[element]}", self._map, self._position)
        self._position += count * smallest
        return list(values)

    def _take_tensor(self, index: int) -> tuple[str, str, tuple[int, ...], int, int]:
        """One tensor description: (name, type, shape in torch order, offset within the data, bytes)."""
        self._where = f"tensor {index}"
        name = self._take_string(MAX_NAME_BYTES)
        self._where = f"tensor {name!r}"
        num_dimensions = self._take("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._refuse(f"has {num_dimensions} dimensions, but 1 to {MAX_DIMENSIONS} are allowed")
        dimensions = [self._take("Q") for _ in range(num_dimensions)]
        if not all(1 <= size <= MAX_ELEMENTS_PER_DIMENSION for size in dimensions):
            raise self._refuse(f"has the impossible shape {dimensions}")
        kind, offset = self._take("I"), self._take("Q")
        layout = BLOCK_LAYOUTS.get(kind)
        if layout is None:
            known = ", ".join(known_layout.name for known_layout in BLOCK_LAYOUTS.values())
            raise ModelError(
                f"{self.path}: tensor {name!r} has the GGML type {kind}, but supported are: {known}."
            )
        if dimensions[0] % layout.elements:
            raise self._refuse(f"has rows of {dimensions[0]} elements, not a multiple of {layout.elements}")
        num_elements = 1
        for size in dimensions:
            num_elements *= size
        return (
            name,
            layout.name,
            tuple(reversed(dimensions)),
            offset,
            num_elements // layout.elements * layout.num_bytes,
        )

    def _place_tensors(self, described: list[tuple[str, str, tuple[int, ...], int, int]]) -> None:
        """Check every tensor's place: aligned, inside the file, no overlap with another, no name twice."""
        self._where = "its header"
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._refuse(f"sets general.alignment to {alignment!r}, but it must be a power of two")
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise ModelError(
                f"{self.path} is one part of a split GGUF model; merge the parts into one file first."
            )
        data_start = -(-self._position // alignment) * alignment
        for name, type_name, shape, offset, num_bytes in described:
            self._where = f"tensor {name!r}"
            if name in self.tensors:
                raise self._refuse("occurs twice")
            if offset % alignment:
                raise self._refuse(f"begins at offset {offset}, not a multiple of {alignment}")
            if data_start + offset + num_bytes > self._size:
                end = data_start + offset + num_bytes
                raise self._refuse(
                    f"of shape {list(shape)} ends at byte {end}, but the file has {self._size}"
                )
            self.tensors[name] = GGUFTensor(name, type_name, shape, data_start + offset, num_bytes)
        end, previous = data_start, ""
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._where = f"tensor {tensor.name!r}"
                raise self._refuse(f"overlaps tensor {previous!r}")
            end, previous = tensor.offset + tensor.num_bytes, tensor.name

    def raw(self, name: str) -> tuple[str, torch.Tensor]:
        """The stored blocks of a tensor: (GGML type name, uint8 ``[rows, bytes per row]``), as a copy.

        A one-dimensional tensor is one row. Rows are in file order: rotary q and k rows of llama files are
        still interleaved, see ``unpermute_rotary_rows``.
        """
        tensor = self._tensor(name)
        blocks = torch.frombuffer(
            bytearray(self._map[tensor.offset : tensor.offset + tensor.num_bytes]), dtype=torch.uint8
        )
        rows = tensor.num_bytes // _bytes_per_row(tensor)
        return tensor.type_name, blocks.reshape(rows, -1)

    def dequantize(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor's values as ``dtype`` in its torch shape, computed in float32 one chunk at a time."""
        tensor = self._tensor(name)
        out = torch.empty(tensor.shape, dtype=dtype)
        flat = out.view(-1)
        for first, last, chunk in self._chunks(tensor):
            flat[first:last] = torch.from_numpy(dequantize_blocks(chunk, tensor.type_name)).view(-1)
        return out

    def grouped(self, name: str) -> GroupedWeight:
        """The stored blocks of a matrix as they are: its type must be one of GROUPED_BITS. Matrices of
        several experts are one below the other."""
        tensor = self._tensor(name)
        layout = LAYOUT_OF[tensor.type_name]
        codes = torch.empty(tensor.shape, dtype=torch.uint8).flatten(0, -2)
        scale, offset = (torch.empty(codes.shape[0], codes.shape[1] // layout.group_size) for _ in range(2))
        for first, last, chunk in self._chunks(tensor):
            pieces = group_blocks(chunk, tensor.type_name)
            for flat, piece, size in zip(
                (codes, scale, offset), pieces, (1, layout.group_size, layout.group_size)
            ):
                flat.view(-1)[first // size : last // size] = torch.from_numpy(piece).view(-1)
        return GroupedWeight(codes, scale, offset, bits=layout.bits)

    def _chunks(self, tensor: GGUFTensor) -> Iterator[tuple[int, int, bytes]]:
        """(first element, last element + 1, stored bytes) of one run of whole blocks after the other."""
        layout = LAYOUT_OF[tensor.type_name]
        blocks_per_chunk = DEQUANTIZE_CHUNK // layout.elements
        num_blocks = tensor.num_bytes // layout.num_bytes
        for first in range(0, num_blocks, blocks_per_chunk):
            last = min(first + blocks_per_chunk, num_blocks)
            chunk = self._map[
                tensor.offset + first * layout.num_bytes : tensor.offset + last * layout.num_bytes
            ]
            yield first * layout.elements, last * layout.elements, chunk

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}.")
        return self.tensors[name]

    def weights(
        self,
        dtype: torch.dtype,
        permuted_heads: dict[str, int],
        fused: Collection[str] = (),
        renamed: Mapping[str, str] = MappingProxyType({}),
        skip: Collection[str] = ROPE_TENSORS,
        treatment: Callable[[str, GGUFTensor], Treatment] = lambda name, tensor: "dequantize",
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield (Hugging Face name, tensor) one at a time, dequantised to ``dtype``,
        TENSORS_AHEAD of them in advance.

        permuted_heads: Hugging Face suffix (``"q_proj"``, ``"k_proj"``) -> heads, for files whose rotary rows
        are interleaved; empty otherwise. fused, renamed: see hugging_face_name. skip: GGUF names that are not
        weights. treatment: what becomes of each tensor, by its Hugging Face name and description.
        """
        # numpy lets go of the interpreter lock,
        # so some tensors are dequantised while the receiver works on another.
        with ThreadPoolExecutor(TENSORS_AHEAD) as ahead:
            waiting: deque[tuple[str, Future[StoredWeight]]] = deque()
            for gguf_name, tensor in self.tensors.items():
                if gguf_name in skip:
                    continue
                name = hugging_face_name(gguf_name, fused, renamed)
                if name is None:
                    raise ModelError(
                        f"{self.path} holds a tensor {gguf_name!r} that no supported architecture uses."
                    )
                heads = permuted_heads.get(name.split(".")[-2])
                waiting.append(
                    (name, ahead.submit(self._weight, tensor, dtype, heads, treatment(name, tensor)))
                )
                if len(waiting) > TENSORS_AHEAD:
                    yield _finished(waiting)
            while waiting:
                yield _finished(waiting)

    def _weight(
        self, tensor: GGUFTensor, dtype: torch.dtype, num_heads: int | None, treatment: Treatment
    ) -> StoredWeight:
        def rows(values: torch.Tensor) -> torch.Tensor:
            return values if num_heads is None else unpermute_rotary_rows(values, num_heads)

        if treatment == "keep":
            stored = self.grouped(tensor.name)
            return GroupedWeight(
                rows(stored.codes), rows(stored.scale), rows(stored.offset), bits=stored.bits
            )
        values = rows(self.dequantize(tensor.name, torch.float32 if treatment == "exact" else dtype))
        return RestoredWeight(values) if treatment == "restore" else values


def _finished(waiting: deque[tuple[str, Future[StoredWeight]]]) -> tuple[str, StoredWeight]:
    """The first weight that was waited for. Nothing else holds on to it: its receiver converts it."""
    name, weight = waiting.popleft()
    return name, weight.result()


def _bytes_per_row(tensor: GGUFTensor) -> int:
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    return tensor.num_bytes // rows
