"""The variants of example A: functions of positions, and the backends that the engine makes of them.

They are in a module of their own,
because an engine finds ``"tutorials.attention_variants:alibi"`` in any process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.attention import AttentionBackend, AttentionContext, AttentionRule, rule_attention

WINDOW, SINKS, HEADS = 8, 2, 4


def fade_by_distance(score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - torch.exp2(-8.0 * (head + 1) / HEADS) * (query - key)


def window_with_sinks(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((key > query - WINDOW) | (key < SINKS))


def soft_cap(score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return 0.1 * torch.tanh(score / 0.1)


def same_chunk(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key // 8 == query // 8)


def alibi(context: AttentionContext) -> AttentionBackend:
    return rule_attention(context, AttentionRule(score_change=fade_by_distance))


def sinks(context: AttentionContext) -> AttentionBackend:
    return rule_attention(context, AttentionRule(visibility=window_with_sinks))


def capped(context: AttentionContext) -> AttentionBackend:
    return rule_attention(context, AttentionRule(score_change=soft_cap))


def chunked(context: AttentionContext) -> AttentionBackend:
    return rule_attention(context, AttentionRule(visibility=same_chunk))
