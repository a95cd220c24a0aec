"""What the engine would make of a model on this machine."""

from __future__ import annotations

from typing import Any


def implementation(model: str) -> dict[str, str]:
    """The implementation that computes a model, and the reason. Raises ModelError if there is none."""
    from minivllm.checkpoints.choose import choose_implementation, read_model_facts
    from minivllm.hub.fetch import resolve_model

    path = resolve_model(model, weights=False)
    value, why = choose_implementation(path)
    read_model_facts(path, wanted=value)
    return {"value": value, "why": why}


def kv_cache_pools(model: str) -> dict[str, Any]:
    """The KV cache of a model in an engine with default settings: one pool for each kind of layers.

    Raises ModelError if the model cannot be served, ConfigError if the cache is too small for it.
    """
    from minivllm.config import EngineArgs
    from minivllm.engine.resolve import resolve
    from minivllm.hub.fetch import resolve_model
    from minivllm.worker.loading.cache_size import planned_pools

    config, facts = resolve(EngineArgs(model=str(resolve_model(model, weights=False))))
    groups, why = planned_pools(config, facts)
    if config.device == "cuda":
        why += ", of which weights and activations will leave less"
    return {
        "max_model_len": config.scheduler.max_model_len,
        "why": why,
        "pools": [
            {
                "kind": group.name,
                "layers": len(group.layers),
                "block_size": group.block_size,
                "blocks": group.num_blocks - 1,
                "tokens": None if group.kind == "state" else (group.num_blocks - 1) * group.block_size,
                "bytes": group.num_blocks * group.block_bytes,
            }
            for group in groups
        ],
    }
