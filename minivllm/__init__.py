"""minivllm: the architecture of vLLM V1 in readable, pure PyTorch.

Importing this package is cheap: torch is imported when an engine starts.

The files beside this one are the vocabulary of all packages: messages, requests, parameters, errors. Together
they are longer than other folders for a reason: they hold declarations, each of which is read alone.
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
]
__all__ += [
    "DraftContext",
    "DraftTask",
    "Drafter",
    "EngineArgs",
    "Entries",
    "Family",
    "KVConnector",
    "LoRARequest",
]
__all__ += [
    "LogitsProcessor",
    "OutputKind",
    "PoolingParams",
    "RepetitionDetection",
    "RequestOutput",
    "RoutingPolicy",
]
__all__ += ["SamplingParams", "SchedulingPolicy", "SortedQueue", "StructuredOutputs", "Turns", "__version__"]
__all__ += [
    "register_attention",
    "register_connector",
    "register_drafter",
    "register_family",
    "register_policy",
]
__all__ += ["register_routing", "rule_attention"]

if TYPE_CHECKING:
    from minivllm.attention import AttentionRule, rule_attention
    from minivllm.config import EngineArgs
    from minivllm.data_parallel.policy import RoutingPolicy
    from minivllm.families.dense import Description
    from minivllm.families.entries import Entries
    from minivllm.families.family import Family
    from minivllm.families.makers.registry import register_family
    from minivllm.frontend.async_llm import AsyncLLM
    from minivllm.frontend.llm import LLM
    from minivllm.kv_transfer.connector import KVConnector
    from minivllm.messages import LoRARequest
    from minivllm.plugins.points import (
        register_attention,
        register_connector,
        register_drafter,
        register_policy,
        register_routing,
    )
    from minivllm.processing.beam_search_params import BeamSearchParams
    from minivllm.processing.outputs import CompletionOutput, RequestOutput
    from minivllm.sampling.logits_processors import BatchUpdate, LogitsProcessor
    from minivllm.sampling_params import (
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
    name: f"minivllm.{module}"
    for module, names in {
        "attention": "AttentionRule rule_attention",
        "config": "EngineArgs",
        "data_parallel.policy": "RoutingPolicy",
        "frontend.async_llm": "AsyncLLM",
        "frontend.llm": "LLM",
        "kv_transfer.connector": "KVConnector",
        "messages": "LoRARequest",
        "families.entries": "Entries",
        "families.dense": "Description",
        "families.family": "Family",
        "families.makers.registry": "register_family",
        "plugins.points": "register_attention register_connector register_drafter register_policy "
        "register_routing",
        "processing.outputs": "CompletionOutput RequestOutput",
        "sampling.logits_processors": "BatchUpdate LogitsProcessor",
        "processing.beam_search_params": "BeamSearchParams",
        "sampling_params": "OutputKind PoolingParams RepetitionDetection SamplingParams StructuredOutputs",
        "scheduler.policy": "SchedulingPolicy Turns",
        "scheduler.queues": "SortedQueue",
        "spec_decode.drafter": "DraftContext DraftTask Drafter",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
