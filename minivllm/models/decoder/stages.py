"""Which layers of a decoder belong to which stage of a pipeline."""

from __future__ import annotations

import torch

from minivllm.distributed.stage import Stage, divide_layers
from minivllm.models.decoder.layer import DecoderLayer
from minivllm.models.decoder_config import DecoderConfig
from minivllm.models.layer_specs import LayerSpec
from minivllm.models.linear_factory import LinearFactory


def layers_of(stage: Stage, config: DecoderConfig) -> range:
    """The layers of one stage. Every stage reads about as many weights for a token as the others: the last one those of
    the head, the first one a row of the embedding."""
    if stage.size == 1:
        return range(config.num_layers)
    factory = LinearFactory(torch.float32, torch.device("cpu"))
    known: dict[LayerSpec, int] = {}
    for spec in config.layers:
        if spec not in known:
            known[spec] = DecoderLayer(spec, config.hidden_size, factory, torch.float32).weights_per_token
    costs = [known[spec] for spec in config.layers]
    costs[0] += config.hidden_size
    costs[-1] += config.hidden_size * config.vocab_size
    return divide_layers(costs, stage.size)[stage.number]
