"""What a region is: a function of tensors together with the declaration of its inputs.

The declaration is data: it is checked, hashed into the name of a package, and turned into example inputs, so
that a region can be compiled before it has ever been called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kernels_triton_free.linear import pack_weight

MAX_SIZE = 65536
"""The largest dynamic dimension."""

RowCount = Literal["single", "few"]
"""Numbers of rows that have code of their own."""


@dataclass(frozen=True)
class Size:
    """A dimension whose size is not the same in every call: from 2 to MAX_SIZE.

    name: what it counts. example: its size in example inputs. single: its size in the code for a single row,
    which a region has whose first dimension declares one; None: it is dynamic there too. few: the same for a
    few rows. varies: False where it is always ``example`` in the code for several rows.
    """

    name: str
    example: int
    single: int | None = None
    few: int | None = None
    varies: bool = True


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a region takes. strides: None where it is contiguous. is_packed: by ``pack_weight``."""

    shape: tuple[int | Size, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None = None
    is_packed: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """A tensor of this very shape."""
        if tensor.is_mkldnn:
            return cls(tuple(tensor.shape), tensor.dtype, tensor.device, is_packed=True)
        strides = None if tensor.is_contiguous() else tensor.stride()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, strides)

    @property
    def dynamic(self) -> list[int]:
        """The dimensions that vary."""
        return [dim for dim, size in enumerate(self.shape) if isinstance(size, Size) and size.varies]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of an example."""
        return tuple(size.example if isinstance(size, Size) else size for size in self.shape)

    def fixed(self, rows: RowCount) -> TensorSpec:
        """As the code for so many rows takes it."""
        return replace(self, shape=tuple(_size(size, rows) or size for size in self.shape))

    def example(self) -> Tensor:
        """Such a tensor, of undefined contents. Memory that is never written takes no room."""
        if self.is_packed:
            return pack_weight(torch.zeros(self.sizes, dtype=self.dtype))
        if self.strides is not None:
            return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)
        return torch.empty(self.sizes, dtype=self.dtype, device=self.device)

    def describe(self, *, layout: bool = True) -> str:
        """What compiled code takes for granted: all but the dynamic sizes."""
        dynamic = self.dynamic
        sizes = ",".join("*" if dim in dynamic else str(size) for dim, size in enumerate(self.sizes))
        text = f"{self.dtype} {self.device.type} [{sizes}]"
        how = (
            "packed"
            if self.is_packed
            else "contiguous"
            if self.strides is None
            else f"strides {self.strides}"
        )
        return f"{text} {how}" if layout else text

    def describe_given(self, tensor: Tensor, *, layout: bool = True) -> str:
        """As ``describe``, of a tensor that was passed for this one: equal if it may be."""
        given = TensorSpec.of(tensor)
        if len(given.shape) == len(self.shape):
            shape = [self.shape[dim] if dim in self.dynamic else size for dim, size in enumerate(given.shape)]
            given = replace(given, shape=tuple(shape))
        return given.describe(layout=layout)


@dataclass(frozen=True)
class Region:
    """A pure function of tensors (it writes into those it is meant to, the KV cache, and nothing else).

    inputs: argument -> TensorSpec, or nested tuples of them as the function takes them, None where there is
    nothing. constants: everything besides its tensors that the function depends on, with a repr that tells it
    apart: compiled code that is kept on disk is found by it. rows: those it is compiled for; None: any
    number.
    """

    name: str
    function: Callable
    inputs: Mapping[str, Any]
    constants: object = ()
    rows: RowCount | None = None
    has_loops: bool = False
    """Code for a few rows computes in another way than code for more, so that it is worth having."""

    def has_code_for(self, rows: RowCount) -> bool:
        """Whether calls with so many rows have code of their own: where the first dimension of the first
        input declares it, and a few rows only with ``has_loops``."""
        _, first = next(self.tensors())
        return bool(_size(first.shape[0], rows)) and (rows == "single" or self.has_loops)

    def fixed(self, rows: RowCount) -> Region:
        """The same for calls with so many rows:
        without loops over rows, and without threads for what is too small."""
        inputs = {name: changed(spec, lambda spec: spec.fixed(rows)) for name, spec in self.inputs.items()}
        name = f"{self.name} of {'one row' if rows == 'single' else 'a few rows'}"
        return replace(self, name=name, inputs=inputs, rows=rows)

    def counts(self, rows: RowCount) -> dict[int, int]:
        """Place of an argument -> its first dimension in calls of that code."""
        found = {
            place: _size(spec.shape[0], rows)
            for place, spec in enumerate(self.inputs.values())
            if isinstance(spec, TensorSpec) and spec.shape
        }
        return {place: size for place, size in found.items() if size is not None}

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """(argument it belongs to, tensor), in the order of ``flatten``."""
        for name, spec in self.inputs.items():
            yield from ((name, part) for part in leaves(spec))

    def check(self, tensors: list[Tensor], *, layout: bool = True) -> None:
        """Raises TypeError where tensors are not the declared ones,
        because compiled code would not notice."""
        declared = list(self.tensors())
        if len(declared) != len(tensors):
            raise TypeError(
                f"The region {self.name!r} takes {len(declared)} tensors, but was given {len(tensors)}."
            )
        for (name, spec), tensor in zip(declared, tensors):
            given, expected = spec.describe_given(tensor, layout=layout), spec.describe(layout=layout)
            if given != expected:
                raise TypeError(
                    f"The region {self.name!r} takes {expected} in {name}, but was given {given}."
                )


CompileRegion = Callable[[Region], Callable]
"""Turns a region into what is called in place of its function."""


def specs_of(tensors: Any) -> Any:
    """Specs of the tensors, each of its very shape, in whatever tuples they are nested."""
    return changed(tensors, TensorSpec.of)


def flatten(values: tuple, tensors: list[Tensor]) -> None:
    """Append the tensors of nested tuples, in order."""
    for item in values:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, tuple):
            flatten(item, tensors)


def filled(declared: Any, tensors: Iterator[Tensor]) -> Any:
    """The declared structure with tensors in the places of their specs, in order."""
    return changed(declared, lambda spec: next(tensors))


def leaves(tree: Any) -> Iterator[Any]:
    """All of nested tuples that is neither a tuple nor None, in order."""
    if isinstance(tree, tuple):
        for item in tree:
            yield from leaves(item)
    elif tree is not None:
        yield tree


def changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Nested tuples with everything changed that is neither a tuple nor None."""
    if not isinstance(tree, tuple):
        return None if tree is None else change(tree)
    items = [changed(item, change) for item in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)


def _size(size: int | Size, rows: RowCount) -> int | None:
    """Of a dimension in the code for so many rows; None where it declares none."""
    return getattr(size, rows) if isinstance(size, Size) else None
