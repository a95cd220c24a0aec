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
    "EngineArgs",
    "LoRARequest",
    "LogitsProcessor",
    "OutputKind",
    "PoolingParams",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

if TYPE_CHECKING:
    from minivllm.config import EngineArgs
    from minivllm.frontend.async_llm import AsyncLLM
    from minivllm.frontend.beam_search import BeamSearchParams
    from minivllm.frontend.llm import LLM
    from minivllm.frontend.outputs import CompletionOutput, RequestOutput
    from minivllm.logits_processors import BatchUpdate, LogitsProcessor
    from minivllm.messages import LoRARequest
    from minivllm.sampling_params import (
        OutputKind,
        PoolingParams,
        RepetitionDetection,
        SamplingParams,
        StructuredOutputs,
    )

_HOMES = {
    "LLM": "minivllm.frontend.llm",
    "AsyncLLM": "minivllm.frontend.async_llm",
    "BatchUpdate": "minivllm.logits_processors",
    "BeamSearchParams": "minivllm.frontend.beam_search",
    "CompletionOutput": "minivllm.frontend.outputs",
    "RequestOutput": "minivllm.frontend.outputs",
    "EngineArgs": "minivllm.config",
    "LoRARequest": "minivllm.messages",
    "LogitsProcessor": "minivllm.logits_processors",
    "OutputKind": "minivllm.sampling_params",
    "PoolingParams": "minivllm.sampling_params",
    "RepetitionDetection": "minivllm.sampling_params",
    "SamplingParams": "minivllm.sampling_params",
    "StructuredOutputs": "minivllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
