"""The memory of weights that oneDNN has packed: as a tensor that can be stacked, and back.

To PyTorch a packed weight is an opaque tensor, of which one can neither stack several nor take a part. Its
bytes can be kept in any tensor, though, and be multiplied there, by the functions with which AOTInductor's
packages restore the packed weights that they contain.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.linear import pack_weight, packed_linear


def memory_of(packed: Tensor) -> Tensor:
    """All bytes of a weight from ``pack_weight``, as int32 [bytes / 4]: no copy.
    The weight lives as long as they."""
    num_bytes: int = torch.ops.mkldnn._nbytes(packed)
    memory = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    memory.weight = packed  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.int32)


@lru_cache(maxsize=1)
def can_restore() -> bool:
    """Whether ``packed_in`` works: PyTorch promises none of what it calls."""
    weight, x = torch.eye(64, dtype=torch.bfloat16), torch.arange(128, dtype=torch.bfloat16).view(2, 64)
    try:
        memory = memory_of(pack_weight(weight)).clone()
        return torch.equal(packed_linear(x, packed_in(memory, 64, 64), None, 64), x)
    except (AttributeError, OSError, RuntimeError):
        return False


def packed_in(memory: Tensor, out_features: int, in_features: int) -> Tensor:
    """The weight [out, in] of bfloat16 whose bytes ``memory_of`` gave, copied to wherever ``memory`` lies:
    contiguous, and there for as long as what is returned is used."""
    create, layout, dtype = _creator()
    about, handle = _description(out_features, in_features), ctypes.c_void_p()
    sizes, strides = (ctypes.c_int64 * 2)(out_features, in_features), (ctypes.c_int64 * 2)(in_features, 1)
    cpu, offset = (0, 0), 0
    place = memory.data_ptr(), 2, sizes, strides, offset
    if create(*place, dtype, *cpu, ctypes.byref(handle), layout, about.data_ptr(), about.numel()):
        raise RuntimeError(
            f"PyTorch {torch.__version__} restores no packed weight [{out_features}, {in_features}]."
        )
    weight: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))
    return weight


def moved(packed: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """The same weight of bfloat16 over a copy of its bytes, if it can be restored; else itself."""
    if not can_restore():
        return packed
    memory = copy(memory_of(packed))
    weight = packed_in(memory, *packed.shape)
    weight.memory = memory  # type: ignore[attr-defined]
    return weight


@lru_cache(maxsize=256)
def _description(out_features: int, in_features: int) -> Tensor:
    """How oneDNN packs weights of this shape, in its own words."""
    packed = pack_weight(torch.zeros(out_features, in_features, dtype=torch.bfloat16))
    description: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    return description


@lru_cache(maxsize=1)
def _creator() -> tuple[Any, int, int]:
    """A function of PyTorch's C interface, and the numbers by which it knows packed tensors and bfloat16."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    create = library.aoti_torch_create_tensor_from_blob_v2
    word, number, address = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    words = ctypes.POINTER(word)
    placed: list[Any] = [address, word, words, words, word, number, number, number]
    create.argtypes = [*placed, ctypes.POINTER(address), number, address, word]
    return create, library.aoti_torch_layout__mkldnn(), library.aoti_torch_dtype_bfloat16()


def _capsule(handle: ctypes.c_void_p) -> Any:
    """As functions of PyTorch take an address."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(handle, None, None)
