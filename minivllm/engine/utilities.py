"""What a frontend may call on a core by name, besides adding and aborting requests."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.engine.core import EngineCore

UTILITIES = frozenset(
    {
        "add_lora",
        "check_integrity",
        "list_loras",
        "num_recompilations",
        "remove_lora",
        "reset_prefix_cache",
        "stats",
    }
)
"""Names of methods of EngineCore. Their arguments and results are plain values that msgpack can write."""


def call_utility(core: EngineCore, method: str, args: Sequence[Any]) -> Any:
    """Call ``method``. Raises RequestError for a name that is not in UTILITIES and arguments that do not fit."""
    if method not in UTILITIES:
        raise RequestError(f"{method!r} cannot be called on the engine; known are: {', '.join(sorted(UTILITIES))}.")
    function = getattr(core, method)
    check_arguments(method, function, args)
    return function(*args)


def check_arguments(method: str, function: Any, args: Sequence[Any]) -> None:
    """Raises RequestError, with the signature, if ``function`` cannot be called with ``args``."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args)
    except TypeError as error:
        raise RequestError(f"{method} cannot be called so: {error}. Its signature is {method}{signature}.") from None
