"""Functions that compiled code computes in as few loops as it can, and writes nothing down between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

AS_ONE: dict[str, Callable[..., Any]] = {}
"""What operators compute, by their names."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")


def define_as_one(schema: str, function: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Make an operator of a function of tensors [rows, ...], which does not depend on the number of rows.

    Inductor decides after every single operation of a graph whether to write down its result: it does so
    where many values were read for it, or where much was computed. What follows one operator is inlined as a
    whole, and only its results may be written down. ``kernels_triton_free.cpu_code`` lowers what is defined
    before ``patch_inductor`` is called. shape: as for ``register_fake``.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernels_triton_free::{name}", shape, lib=_library)
    AS_ONE[name] = function
