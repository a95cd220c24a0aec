"""The programs of a model in a layout, without its weights: what ``minivllm env MODEL --program`` shows."""

from __future__ import annotations

import torch

from minivllm.checkpoints.checkpoint import expected_shapes
from minivllm.compilation.regions import Size
from minivllm.config import EngineConfig
from minivllm.distributed.communicator import Absent
from minivllm.distributed.stage import Stage
from minivllm.errors import ConfigError, ModelError
from minivllm.models.decoder import Decoder
from minivllm.models.model import token_specs
from minivllm.program.fuse import Plan
from minivllm.specs.caches import NO_CACHE, CacheSpec
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.facts import ModelFacts

META = torch.device("meta")


def planned_programs(config: EngineConfig, facts: ModelFacts, *, images: bool = False) -> list[Plan]:
    """Of rank 0 of each pipeline stage, with unquantised weights. images: of a step with images.
    Raises ModelError if the model is computed by its class of transformers, ConfigError if images are asked
    for and this engine would not see them."""
    if not isinstance(facts, DecoderConfig):
        raise ModelError(
            f"{config.model_path} is computed by its class of transformers, which is no list of pieces."
        )
    if images and config.images is None:
        raise ConfigError(f"There is no program with images: {config.no_images}")
    return [_plan(config, facts, number, images) for number in range(config.pipeline_parallel_size)]


def _plan(config: EngineConfig, facts: DecoderConfig, number: int, images: bool) -> Plan:
    dtype, ranks = getattr(torch, config.dtype), config.tensor_parallel_size
    decoder = Decoder(
        facts,
        dtype=dtype,
        attention_dtype=dtype,
        device=META,
        max_model_len=config.scheduler.max_model_len,
        communicator=Absent(0, ranks) if ranks > 1 else None,
        stage=Stage(number, config.pipeline_parallel_size),
        deeper_levels=0 if config.images is None or number else config.images.deeper_levels,
    )
    shapes = expected_shapes(facts).items()
    decoder.load_weights(
        (name, torch.empty(shape, dtype=dtype, device=META)) for name, shape in shapes if decoder.wants(name)
    )
    caches = [
        spec.declare(Size("blocks", 2), config.cache.block_size, META)
        if isinstance(spec, CacheSpec)
        else NO_CACHE
        for spec in decoder.cache_specs
    ]
    tokens = token_specs(META)
    return decoder.plan(decoder.with_images(tokens) if images else tokens, caches)
