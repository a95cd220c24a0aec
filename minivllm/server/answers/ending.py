"""Why a completion has ended, as both completion endpoints tell it."""

from typing import Any

from minivllm.processing.outputs import CompletionOutput


def ending(completion: CompletionOutput) -> dict[str, Any]:
    """The fields of a choice that say whether it has ended, and why."""
    reason = completion.finish_reason
    ended = {"finish_reason": reason if reason in (None, "length") else "stop"}
    return ended if completion.stop_reason is None else {**ended, "stop_reason": completion.stop_reason}
