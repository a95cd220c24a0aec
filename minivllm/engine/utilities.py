"""What a frontend may call on a core by name, besides adding and aborting requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError
from minivllm.executor.remote_calls import check_arguments

if TYPE_CHECKING:
    from minivllm.engine.core import EngineCore

UTILITIES = frozenset(
    {
        "add_lora",
        "check_integrity",
        "collective_rpc",
        "is_sleeping",
        "list_loras",
        "num_recompilations",
        "recent_steps",
        "remove_lora",
        "reset_prefix_cache",
        "sleep",
        "start_profile",
        "stats",
        "stop_profile",
        "update_weights",
        "wake_up",
    }
)
"""Names of methods of EngineCore. Their arguments and results are plain values that msgpack can write."""


def call_utility(core: EngineCore, method: str, args: Sequence[Any]) -> Any:
    """Call ``method``. Raises RequestError for a name that is not in UTILITIES and arguments that do not fit."""
    if method not in UTILITIES:
        raise RequestError(f"{method!r} cannot be called on the engine; known are: {', '.join(sorted(UTILITIES))}.")
    function = getattr(core, method)
    return function(*check_arguments(function, args))
