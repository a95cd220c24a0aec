"""Calls by name: which methods of a worker may be called from outside, and whether arguments fit a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from minivllm.errors import RequestError

WORKER_METHODS = frozenset({"adapter_shapes", "memory_bytes", "weight_checksums"})
"""Methods of a Worker that ``collective_rpc`` of a frontend may call: they only look."""


def check_arguments(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The arguments, plain values turned into the annotated types. Raises RequestError that says what does not fit."""
    name, signature = function.__name__, inspect.signature(function, eval_str=True)
    try:
        bound = signature.bind(*args)
        return [msgspec.convert(value, signature.parameters[key].annotation) for key, value in bound.arguments.items()]
    except (TypeError, msgspec.ValidationError) as error:
        parameters = signature.replace(return_annotation=inspect.Signature.empty)
        raise RequestError(f"{name} cannot be called so: {error}. Its parameters are {parameters}.") from None
