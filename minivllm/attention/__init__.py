"""Attention over the blocks of the KV cache: backends that prepare their own metadata, chosen by name.

May import: attention.costs, attention.interface, attention.lists, attention.uncompiled, compilation, device,
kernels_triton_free, kernels_triton_free.strips, plugins, specs.
Door: `FlexAttention` in flex.py; what a backend is stands in interface/.
"""

from minivllm.attention.flex import FlexAttention, rule_attention
from minivllm.attention.interface.backend import (
    AttentionBackend,
    AttentionContext,
    BlockTables,
    MeasuredBackend,
    SharingBackend,
    StepRows,
)
from minivllm.attention.interface.rule import AttentionRule
from minivllm.attention.lists.bounds import Run, look_ahead
from minivllm.attention.lists.step_order import in_step_order
from minivllm.attention.registry import find_attention
from minivllm.attention.uncompiled.sdpa import SdpaAttention
from minivllm.plugins.points import register_attention

__all__ = [
    "AttentionBackend",
    "AttentionContext",
    "AttentionRule",
    "BlockTables",
    "FlexAttention",
    "MeasuredBackend",
    "Run",
    "SdpaAttention",
    "SharingBackend",
    "StepRows",
    "find_attention",
    "in_step_order",
    "look_ahead",
    "register_attention",
    "rule_attention",
]
