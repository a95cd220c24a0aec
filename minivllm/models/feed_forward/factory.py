"""The part that computes a feed-forward spec."""

from __future__ import annotations

from minivllm.linear.factory import LinearFactory
from minivllm.models.feed_forward.experts import ExpertsBesideMlp, MixtureOfExperts
from minivllm.models.feed_forward.gated_mlp import FeedForward, GatedMlp
from minivllm.specs.layers import FeedForwardSpec, MoeSpec


def make_feed_forward(spec: FeedForwardSpec, hidden_size: int, factory: LinearFactory) -> FeedForward:
    """A gated MLP, experts, or both."""
    if isinstance(spec, MoeSpec) and spec.beside is not None:
        return ExpertsBesideMlp(spec, spec.beside, hidden_size, factory)
    if isinstance(spec, MoeSpec):
        return MixtureOfExperts(spec, hidden_size, factory)
    return GatedMlp(spec, hidden_size, factory)
