"""minivllm: the architecture of vLLM V1 in readable, pure PyTorch.

Importing this package is cheap: torch is imported when an engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionRule",
    "BatchUpdate",
    "BeamSearchParams",
    "CompletionOutput",
    "Description",
    "DraftContext",
    "DraftTask",
    "Drafter",
    "EngineArgs",
    "Entries",
    "Family",
    "KVConnector",
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
    "Turns",
    "__version__",
    "register_attention",
    "register_connector",
    "register_drafter",
    "register_family",
    "register_policy",
    "rule_attention",
]

if TYPE_CHECKING:
    from minivllm.attention import AttentionRule, rule_attention
    from minivllm.config import EngineArgs
    from minivllm.frontend.async_llm import AsyncLLM
    from minivllm.frontend.llm import LLM
    from minivllm.kv_transfer.connector import KVConnector
    from minivllm.messages import LoRARequest
    from minivllm.models.entries.entries import Entries
    from minivllm.models.families.dense import Description
    from minivllm.models.families.family import Family
    from minivllm.models.registry.registry import register_family
    from minivllm.plugins import register_attention, register_connector, register_drafter, register_policy
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
    from minivllm.scheduler.policy import SchedulingPolicy, Turns
    from minivllm.scheduler.queues import SortedQueue
    from minivllm.spec_decode.drafter import DraftContext, Drafter, DraftTask

_HOMES = {
    "LLM": "minivllm.frontend.llm",
    "AsyncLLM": "minivllm.frontend.async_llm",
    "AttentionRule": "minivllm.attention",
    "BatchUpdate": "minivllm.sampling.logits_processors",
    "BeamSearchParams": "minivllm.sampling_params",
    "CompletionOutput": "minivllm.processing.outputs",
    "RequestOutput": "minivllm.processing.outputs",
    "Description": "minivllm.models.families.dense",
    "DraftContext": "minivllm.spec_decode.drafter",
    "DraftTask": "minivllm.spec_decode.drafter",
    "Drafter": "minivllm.spec_decode.drafter",
    "KVConnector": "minivllm.kv_transfer.connector",
    "EngineArgs": "minivllm.config",
    "Entries": "minivllm.models.entries.entries",
    "Family": "minivllm.models.families.family",
    "LoRARequest": "minivllm.messages",
    "LogitsProcessor": "minivllm.sampling.logits_processors",
    "OutputKind": "minivllm.sampling_params",
    "PoolingParams": "minivllm.sampling_params",
    "RepetitionDetection": "minivllm.sampling_params",
    "SamplingParams": "minivllm.sampling_params",
    "SchedulingPolicy": "minivllm.scheduler.policy",
    "SortedQueue": "minivllm.scheduler.queues",
    "StructuredOutputs": "minivllm.sampling_params",
    "Turns": "minivllm.scheduler.policy",
    "register_attention": "minivllm.plugins",
    "register_connector": "minivllm.plugins",
    "register_drafter": "minivllm.plugins",
    "register_family": "minivllm.models.registry.registry",
    "register_policy": "minivllm.plugins",
    "rule_attention": "minivllm.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
