"""How the memory of the KV cache is shared out among the layers of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable

from minivllm.batch.layer_caches import draft_input_bytes, kv_groups
from minivllm.config import EngineConfig
from minivllm.device.memory import MAX_CPU_CACHE_BYTES, cache_memory
from minivllm.errors import ConfigError
from minivllm.kv_cache.sizing import PoolLimits, coarse, enough_blocks, fit_pools, size_pools
from minivllm.kv_cache.specs import GroupSpec, total_bytes
from minivllm.models.model import Model, StagedModel
from minivllm.plugins.points import ATTENTION
from minivllm.specs.facts import ModelFacts
from minivllm.worker.loading.models import new_model

logger = logging.getLogger(__name__)


def groups_of(config: EngineConfig, model: Model, draft: Model | None) -> list[GroupSpec]:
    """The KV groups of a model, without their sizes. draft: see ``kv_groups``."""
    block_size, length = config.cache.block_size, config.scheduler.max_model_len
    knows_windows = ATTENTION.is_ours(config.attention_backend)
    travels = config.kv_transfer is not None  # then one hash names a block of each group
    elsewhere = model.all_attention_specs if isinstance(model, StagedModel) else ()
    groups = kv_groups(
        model,
        block_size,
        length,
        draft=draft,
        is_shared=config.speculative is not None and config.speculative.has_model,
        may_drop=knows_windows,
        one_size=travels,
        elsewhere=elsewhere,
    )
    forgets = any(group.reach for group in kv_groups(model, block_size, length))
    if forgets and not any(group.reach for group in groups):
        reason = (
            "the draft model keeps its own in the same blocks" if knows_windows else "attention may read it"
        )
        logger.info("Layers with sliding windows keep all keys and values, since %s.", reason)
    return groups


def size_groups(
    config: EngineConfig, groups: list[GroupSpec], free_bytes: Callable[[], int], kept_bytes: int = 0
) -> tuple[list[GroupSpec], str]:
    """The groups with the blocks that the pool of each gets, the null block included,
    and what their size follows from.

    Explicit sizes come first; otherwise a share of the memory that is free now, and no more than max_num_seqs
    requests of max_model_len tokens can use. free_bytes: tells that share. kept_bytes: of this memory, what
    is no part of a pool, see ``bytes_of_draft_inputs``. Raises ConfigError if not even one request of
    max_model_len fits.
    """
    cache, scheduler = config.cache, config.scheduler
    limits = PoolLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        longest_chunk=scheduler.longest_chunk,
    )
    needed = 1 + groups[0].max_blocks(scheduler.max_model_len, scheduler.longest_chunk)
    if cache.num_blocks is not None:
        groups, origin = size_pools(groups, cache.num_blocks, limits), "num_gpu_blocks_override"
    elif cache.memory_bytes is not None:
        groups, origin = fit_pools(groups, cache.memory_bytes - kept_bytes, limits), "kv_cache_memory_bytes"
    else:
        fitting = fit_pools(groups, free_bytes() - kept_bytes, limits)[0].num_blocks
        enough = enough_blocks(groups[0], limits)
        if config.device != "cpu":
            fitting = max(coarse(fitting), min(fitting, needed))
        groups = size_pools(groups, min(fitting, enough), limits)
        origin = f"a share of {cache.memory_utilization:g} of the free memory"
        if config.device == "cpu":
            origin += f", at most {MAX_CPU_CACHE_BYTES / 2**30:g} GiB"
        if enough < fitting:
            origin = "all that max_num_seqs requests of max_model_len tokens can use"
    if groups[0].num_blocks < needed:
        size = total_bytes(size_pools(groups, needed, limits))
        raise ConfigError(
            f"The KV cache gets {max(groups[0].num_blocks, 0)} blocks of {groups[0].block_size} tokens "
            f"({origin}), "
            f"but one request of max_model_len = {scheduler.max_model_len} tokens needs {needed} with the "
            f"null block ({size / 2**20:.0f} MiB): lower max_model_len or give the cache more memory."
        )
    return groups, origin


def bytes_of_draft_inputs(config: EngineConfig, model: Model) -> int:
    """What layers that keep a state hold of drafts until they are known to be accepted."""
    if config.speculative is None:
        return 0
    num_drafts = config.scheduler.max_num_seqs * config.speculative.num_speculative_tokens
    return num_drafts * draft_input_bytes(model)


def planned_pools(config: EngineConfig, facts: ModelFacts) -> tuple[list[GroupSpec], str]:
    """The pools that ``size_groups`` would give a model on this machine, without its weights.
    On a CUDA device
    these are larger than an engine's, since the memory of weights and activations is not known yet.

    Raises ModelError for a model that cannot be served.
    """
    model, _ = new_model(config, facts)
    groups = groups_of(config, model, None)
    utilization = config.cache.memory_utilization
    kept_bytes = bytes_of_draft_inputs(config, model)
    return size_groups(
        config, groups, lambda: cache_memory(model.device, utilization, lambda: None), kept_bytes
    )


def pool_text(group: GroupSpec) -> str:
    """ "full attention in 5 layers: 100 blocks of 64 tokens, 6,400 tokens in 30.0 MiB", or "state in 3
    layers: 64 states in 2.0 MiB"; the null block is left out."""
    blocks, size = group.num_blocks - 1, group.num_blocks * group.block_bytes
    held = f"{blocks:,} blocks of {group.block_size} tokens, {blocks * group.block_size:,} tokens"
    if group.kind == "state":
        held = f"{blocks:,} states"
    return (
        f"{group.name} in {len(group.layers)} layer{'s' * (len(group.layers) != 1)}: {held} in "
        f"{size / 2**20:,.1f} MiB"
    )
