"""Which layers of a decoder belong to which stage of a pipeline, and what all stages know of all layers."""

from __future__ import annotations

import torch

from minivllm.distributed.stage import Stage, divide_layers
from minivllm.errors import ConfigError
from minivllm.linear.factory import LinearFactory
from minivllm.models.decoder.layer import DecoderLayer
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import LayerSpec


def layers_of(stage: Stage, config: DecoderConfig) -> range:
    """The layers of one stage. Every stage reads about as many weights for a token as the others: the last
    one those of the head, the first one a row of the embedding."""
    if stage.size == 1:
        return range(config.num_layers)
    known = {spec: layer.weights_per_token for spec, layer in _whole_layers(config).items()}
    costs = [known[spec] for spec in config.layers]
    costs[0] += config.hidden_size
    costs[-1] += config.hidden_size * config.vocab_size
    return divide_layers(costs, stage.size)[stage.number]


def check_deeper_levels(config: DecoderConfig, num_stages: int, levels: int) -> None:
    """Raises ConfigError unless the first of so many stages can add ``levels`` levels of features of images,
    one after each of its first layers. After the last layer of the model it cannot: the end of that layer is
    computed for picked tokens only."""
    most = len(layers_of(Stage(0, num_stages), config)) - (num_stages == 1)
    if levels > most:
        raise ConfigError(
            f"Features of images are added after the first {levels} layers of this model, but only {most} of "
            f"them can be in the first stage if pipeline_parallel_size is {num_stages}: lower it, or use "
            "limit_mm_per_prompt={'image': 0} to serve the model without images."
        )


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear layer of all stages and all workers that an adapter may change, by name."""
    known = {
        spec: [
            (f"{block}.{part}", linear.whole_shape(part))
            for block, linear in layer.named_linears
            for part in linear.sizes
        ]
        for spec, layer in _whole_layers(config).items()
    }
    return {
        f"model.layers.{index}.{name}": shape
        for index, spec in enumerate(config.layers)
        for name, shape in known[spec]
    }


def _whole_layers(config: DecoderConfig) -> dict[LayerSpec, DecoderLayer]:
    """One of each kind, without weights."""
    factory = LinearFactory(torch.float32, torch.device("cpu"))
    return {
        spec: DecoderLayer(spec, config.hidden_size, factory, torch.float32) for spec in set(config.layers)
    }
