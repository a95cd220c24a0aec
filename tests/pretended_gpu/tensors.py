"""Tensors that say they are on a GPU. Their values lie in host memory and are computed there.

``PretendedTensor`` wraps a CPU tensor; ``OnGpu`` is the mode under which factories make such tensors, and under
which every operator is looked at: do its tensors lie on one device, does it make the host wait, does it belong
to a graph?
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended_gpu import streams

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

WAITS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.item,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
"""Operators whose result, or its size, the host must know."""
MOVES = {
    aten.to,
    aten._to_copy,
    aten.copy_,
    aten.copy,
    aten.lift_fresh,
    aten.lift,
    aten.is_pinned,
    aten._pin_memory,
    aten.pin_memory,
}
"""Operators whose tensors may lie on two devices."""


class PretendedTensor(Tensor):
    """values: the CPU tensor whose memory this one has. made_by: the stream that made its memory, and the
    position there."""

    values: Tensor
    made_by: tuple[streams.Stream, int]

    @staticmethod
    def __new__(cls, values: Tensor, made_by: tuple[streams.Stream, int]) -> PretendedTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CUDA,
        )
        made.values, made.made_by = values, made_by
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def record_stream(self, stream: Any) -> None:
        pass

    def tolist(self) -> Any:
        streams.wait_for_device("tolist")
        return self.values.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{repr(self.values)[:-1]}, device='cuda:0')"


class OnGpu(TorchDispatchMode):
    """Of one thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


_pinned: dict[int, StorageWeakRef] = {}
"""Address of pinned memory -> its storage, for as long as that lives."""
_pinned_lock = threading.Lock()


def pin(tensor: Tensor) -> Tensor:
    with _pinned_lock:
        for address in [address for address, storage in _pinned.items() if storage.expired()]:
            del _pinned[address]
        storage = tensor.untyped_storage()
        _pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    storage = _pinned.get(tensor.untyped_storage().data_ptr())
    return storage is not None and not storage.expired()


def run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One operator, of tensors on the GPU, the CPU or both."""
    packet = func.overloadpacket
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_gpu = [tensor for tensor in given if isinstance(tensor, PretendedTensor)]
    if packet in MOVES:
        return _move(func, packet, args, kwargs)
    if packet is aten._has_compatible_shallow_copy_type:
        return False  # Module.to makes new parameters then
    device = kwargs.get("device")
    is_gpu = bool(on_gpu) if device is None else torch.device(device).type == "cuda"
    if not is_gpu and not on_gpu:
        return _on_cpu(func, args, kwargs)
    if device is not None:
        kwargs = {**kwargs, "device": CPU}
    _check_devices(func, packet, given)
    if packet in WAITS or _has_mask(packet, args) or _asks_for_a_size(func, kwargs):
        streams.wait_for_device(str(func))
    here = _launched(on_gpu)
    unwrapped = tree_map(_values, (args, kwargs))

    def launch() -> Any:
        with _disable_current_modes():
            result = func(*unwrapped[0], **unwrapped[1])
            if func.namespace == "c10d":
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.ScriptObject):
                        Work.unbox(leaf).wait()
            return result

    result = launch()
    capture = streams.capture_of_thread()
    if capture is not None and not _is_view(func, result, given):
        capture.record(launch, result)
    return _wrapped(result, on_gpu, here) if is_gpu else result


def _launched(given: list[Any]) -> tuple[streams.Stream, int]:
    """Where work on these tensors is launched. Raises RaceError if they may not be there yet."""
    stream = streams.current_stream()
    for tensor in given:
        if not stream.knows(*tensor.made_by):
            raise streams.RaceError(
                f"A stream uses a tensor {list(tensor.shape)} of another one, for which it has not waited."
            )
    return stream, stream.launch_work()


def _on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    must_pin = kwargs.get("pin_memory")
    if must_pin:
        kwargs = {**kwargs, "pin_memory": False}
    with _disable_current_modes():
        result = func(*args, **kwargs)
    return pin(result) if must_pin else result


def _move(func: Any, packet: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if packet is aten.is_pinned:
        return is_pinned(source)
    if packet in (aten._pin_memory, aten.pin_memory):
        return source if is_pinned(source) else pin(source.clone())
    if packet in (aten.lift_fresh, aten.lift):
        return source
    if packet in (aten.copy_, aten.copy):
        target, source = args[:2]
        is_late = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        _copy(target, source, is_late)
        return target
    # _to_copy, or a composite ``to`` that inference mode does not take apart.
    if packet is aten.to:
        with OnGpu():
            return func.decompose(*args, **kwargs)
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    is_late = bool(kwargs.pop("non_blocking", False))
    kwargs.pop("pin_memory", None)
    to_gpu = isinstance(source, PretendedTensor) if device is None else torch.device(device).type == "cuda"
    from_gpu = isinstance(source, PretendedTensor)
    with _disable_current_modes():
        made = torch.empty_like(
            _values(source),
            dtype=kwargs.get("dtype"),
            memory_format=kwargs.get("memory_format") or torch.preserve_format,
        )
    stream = streams.current_stream()
    target = PretendedTensor(made, (stream, stream.position)) if to_gpu else made
    if to_gpu != from_gpu and not to_gpu and is_late:
        pin(made)  # CUDA's allocator pins what it makes for such a copy
    _copy(target, source, is_late)
    return target


def _copy(target: Tensor, source: Tensor, is_late: bool) -> None:
    on_gpu = [tensor for tensor in (target, source) if isinstance(tensor, PretendedTensor)]
    into, values = _values(target), _values(source)

    def launch() -> None:
        with _disable_current_modes():
            into.copy_(values)

    if not on_gpu:
        launch()
        return
    to_gpu, is_captured = isinstance(target, PretendedTensor), streams.capture_of_thread() is not None
    if len(on_gpu) == 2:
        _launched(on_gpu)
        launch()
    elif not (is_late and is_pinned(values if to_gpu else into)):
        streams.wait_for_device(f"A copy {'to' if to_gpu else 'from'} the device")
        launch()
    elif is_captured:
        launch()
    else:
        _launched([] if to_gpu else on_gpu)
        with _disable_current_modes():
            if to_gpu:
                streams.launch_copy_to_device(values, into)
            else:
                streams.launch_copy_to_host(into, values)
    if is_captured:
        streams.capture_of_thread().record(launch, ())


def _check_devices(func: Any, packet: Any, given: list[Tensor]) -> None:
    strangers = [t for t in given if not isinstance(t, PretendedTensor) and t.dim() > 0]
    if strangers and any(isinstance(t, PretendedTensor) for t in given):
        if packet in (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_):
            streams.wait_for_device(f"{func} with indices of the host")
            return
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found at least two devices, cuda:0 "
            f"and cpu ({[list(t.shape) for t in strangers]})"
        )


def _has_mask(packet: Any, args: Any) -> bool:
    """Indexing by booleans looks for their places first."""
    if packet not in (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _asks_for_a_size(func: Any, kwargs: dict[str, Any]) -> bool:
    """How long the result is, is the sum of the repeats, unless it is given."""
    is_repeat = func in (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor)
    return is_repeat and kwargs.get("output_size") is None


def _is_view(func: Any, results: Any, given: list[Tensor]) -> bool:
    """True if nothing was computed: all results lie where arguments do, and none of these was written.
    (``reshape`` and ``contiguous`` are views or copies, as it comes.)"""
    if func._schema.is_mutable or func.namespace == "c10d":  # whose schemas do not say what they write
        return False
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    return all(
        leaf.untyped_storage().data_ptr() in known
        for leaf in tree_leaves(results)
        if isinstance(leaf, Tensor)
    )


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, PretendedTensor) else leaf


def _wrapped(result: Any, given: list[Any], here: tuple[streams.Stream, int]) -> Any:
    """Results on the GPU; an argument that was written is returned itself."""
    makers = {tensor.values.untyped_storage().data_ptr(): tensor.made_by for tensor in given}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        written = next((tensor for tensor in given if tensor.values is leaf), None)
        if written is not None:
            return written
        return PretendedTensor(leaf, makers.get(leaf.untyped_storage().data_ptr(), here))

    return tree_map(wrap, result)
