"""From a resolved configuration to loaded models: the one that is served, and the one that a drafter guesses with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.config import EngineConfig
from minivllm.device.policy import DevicePolicy
from minivllm.errors import ConfigError
from minivllm.linear.choose import MethodChooser
from minivllm.models.decoder import Decoder
from minivllm.models.decoder_config import DecoderConfig
from minivllm.models.eagle.checkpoint import find_tensors, random_tensors
from minivllm.models.eagle.config import EagleVersion, read_eagle_config
from minivllm.models.eagle.head import EagleHead
from minivllm.models.model import Model


def load_model(config: EngineConfig, decoder_config: DecoderConfig) -> tuple[Model, Callable[[], None]]:
    """The model that is served, and what logs how its layers are quantised. Raises ModelError, or ConfigError for a
    quantisation that cannot be had."""
    return _load(config, decoder_config, config.model_path, config.load_format)


def load_draft_model(config: EngineConfig, target: Model, target_config: DecoderConfig) -> Model | None:
    """The drafter's own model, if it has one: stored, computed and quantised as the target is. Raises ModelError."""
    speculative = config.speculative
    if speculative is None or speculative.model_path is None:
        return None
    if speculative.eagle_version is not None:
        return _load_head(config, speculative.model_path, speculative.eagle_version, target, target_config)
    load_format = "dummy" if config.load_format == "dummy" else "auto"
    decoder_config = read_decoder_config(speculative.model_path, load_format)
    return _load(config, decoder_config, speculative.model_path, load_format)[0]


def _load(
    config: EngineConfig, decoder_config: DecoderConfig, path: str, load_format: str
) -> tuple[Model, Callable[[], None]]:
    device = torch.device(config.device)
    policy = DevicePolicy.of(device)
    dtype, cache_dtype = getattr(torch, config.dtype), getattr(torch, config.cache.dtype)
    stored = decoder_config.quantization
    chooser = MethodChooser(config.quantization, None if stored is None else stored.method, dtype, policy)
    model = Decoder(
        decoder_config,
        dtype=dtype,
        attention_dtype=policy.attention_dtype(dtype, cache_dtype),
        device=device,
        max_model_len=config.scheduler.max_model_len,
        choose_method=chooser,
        cache_dtype=cache_dtype,
    )
    model.load_weights(iterate_weights(path, load_format, decoder_config, dtype, config.seed, chooser.kept_bits))
    return model, chooser.log_choices


def _load_head(
    config: EngineConfig, path: str, version: EagleVersion, target: Model, target_config: DecoderConfig
) -> EagleHead:
    if not isinstance(target, Decoder):
        raise ConfigError(f"No {version} head guesses for a {type(target).__name__}: choose another method.")
    head_config = read_eagle_config(path, version, target_config)
    is_dummy = config.load_format == "dummy"
    tensors = random_tensors(head_config, config.seed) if is_dummy else find_tensors(path, head_config)
    chooser = MethodChooser(config.quantization, None, target.dtype, DevicePolicy.of(target.device))
    max_model_len = config.scheduler.max_model_len
    head = EagleHead(head_config, tensors, target, max_model_len=max_model_len, choose_method=chooser)
    head.load_weights(tensors.read(target.dtype))
    return head
