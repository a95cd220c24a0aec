"""minivllm: the architecture of vLLM V1 in readable, pure PyTorch.

Importing this package is cheap: torch is imported when an engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BatchUpdate",
    "BeamSearchParams",
    "CompletionOutput",
    "DraftContext",
    "DraftTask",
    "Drafter",
    "EngineArgs",
    "LoRARequest",
    "LogitsProcessor",
    "OutputKind",
    "PoolingParams",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "SchedulingPolicy",
    "SortedQueue",
    "StructuredOutputs",
    "__version__",
    "register_attention",
    "register_drafter",
    "register_policy",
]

if TYPE_CHECKING:
    from minivllm.config import EngineArgs
    from minivllm.frontend.async_llm import AsyncLLM
    from minivllm.frontend.llm import LLM
    from minivllm.messages import LoRARequest
    from minivllm.plugins import register_attention, register_drafter, register_policy
    from minivllm.processing.outputs import CompletionOutput, RequestOutput
    from minivllm.sampling.logits_processors import BatchUpdate, LogitsProcessor
    from minivllm.sampling_params import (
        BeamSearchParams,
        OutputKind,
        PoolingParams,
        RepetitionDetection,
        SamplingParams,
        StructuredOutputs,
    )
    from minivllm.scheduler.policy import SchedulingPolicy, SortedQueue
    from minivllm.spec_decode.drafter import DraftContext, Drafter, DraftTask

_HOMES = {
    "frontend.llm": ("LLM",),
    "frontend.async_llm": ("AsyncLLM",),
    "sampling.logits_processors": ("BatchUpdate", "LogitsProcessor"),
    "processing.outputs": ("CompletionOutput", "RequestOutput"),
    "spec_decode.drafter": ("DraftContext", "DraftTask", "Drafter"),
    "config": ("EngineArgs",),
    "messages": ("LoRARequest",),
    "scheduler.policy": ("SchedulingPolicy", "SortedQueue"),
    "plugins": ("register_attention", "register_drafter", "register_policy"),
}
"""Module -> public names that live there; all others are in ``sampling_params``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    from importlib import import_module

    home = next((module for module, names in _HOMES.items() if name in names), "sampling_params")
    return getattr(import_module(f"minivllm.{home}"), name)
