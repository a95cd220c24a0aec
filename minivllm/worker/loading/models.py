"""From a resolved configuration to loaded models:
the one that is served, and the one that a drafter guesses with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minivllm.checkpoints.choose import read_model_facts
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.config import CudaGraphMode, EagleVersion, EngineConfig
from minivllm.device.policy import DevicePolicy
from minivllm.distributed.other_workers import NO_OTHERS, OtherWorkers
from minivllm.distributed.stage import Stage
from minivllm.errors import ConfigError
from minivllm.graphs.mode import graph_mode_of_draft
from minivllm.linear.choose import MethodChooser
from minivllm.models.decoder import Decoder
from minivllm.models.model import Model
from minivllm.plugins.plugin import import_object
from minivllm.plugins.points import MODEL_IMPLEMENTATIONS
from minivllm.spec_decode.eagle.checkpoint import EagleTensors, find_tensors, random_tensors
from minivllm.spec_decode.eagle.config import EagleConfig, read_eagle_config
from minivllm.spec_decode.eagle.head import EagleHead
from minivllm.spec_decode.eagle.mtp import MtpTensors, mtp_config, mtp_tensors
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.facts import ModelFacts
from minivllm.worker.loading.loader import ModelLoader


def load_model(
    config: EngineConfig, facts: ModelFacts, others: OtherWorkers = NO_OTHERS
) -> tuple[Model, Callable[[], None]]:
    """The model that is served, and what logs how its layers are quantised. Raises ModelError, or ConfigError
    for a quantisation that cannot be had."""
    return _load(config, facts, config.model_path, config.load_format, others)


def load_draft_model(config: EngineConfig, target: Model, stage: Stage | None = None) -> Model | None:
    """The drafter's own model, if it has one:
    stored, computed and quantised as the target is, whole in the last stage. Raises ModelError."""
    speculative = config.speculative
    if speculative is None or not speculative.has_model or not (stage is None or stage.is_last):
        return None
    if speculative.eagle_version is not None:
        return _load_head(config, speculative.eagle_version, target)
    assert speculative.model_path is not None
    facts, load_format = _read_draft(config, speculative.model_path)
    return _load(config, facts, speculative.model_path, load_format)[0]


def _read_draft(config: EngineConfig, path: str) -> tuple[ModelFacts, str]:
    """What is known of a draft model before it is loaded, and how it is loaded."""
    load_format = "dummy" if config.load_format == "dummy" else "auto"
    return read_model_facts(path, load_format), load_format


def graph_mode_of_drafter(config: EngineConfig) -> CudaGraphMode:
    """What is captured of the draft model, if there is one."""
    speculative = config.speculative
    if speculative is None or speculative.method != "draft_model" or speculative.model_path is None:
        return "none"
    facts, _ = _read_draft(config, speculative.model_path)
    return graph_mode_of_draft(config.cudagraph_mode, facts, config.attention_backend)


def check_weights(config: EngineConfig, facts: ModelFacts, model: Model, directory: str) -> None:
    """Raises ModelError if the safetensors files of a directory are not the weights of this model. Names and
    shapes are checked; only the first weight is read."""
    _loader(facts).check(config, facts, model, directory)


def new_model(
    config: EngineConfig, facts: ModelFacts, others: OtherWorkers = NO_OTHERS
) -> tuple[Model, MethodChooser]:
    """The model without its weights, for which no memory is taken yet, and what chooses how its layers are
    quantised. others: those that divide it. Raises ModelError for a model that cannot be served.
    """
    device = torch.device(config.device)
    policy = DevicePolicy.of(device)
    dtype, cache_dtype = getattr(torch, config.dtype), getattr(torch, config.cache.dtype)
    stored = None if facts.quantization is None else facts.quantization.method
    chooser = MethodChooser(config.quantization, stored, dtype, policy, _compiles(config))
    settings: dict[str, Any] = {
        "dtype": dtype,
        "attention_dtype": policy.attention_dtype(dtype, cache_dtype),
        "device": device,
        "max_model_len": config.scheduler.max_model_len,
        "choose_method": chooser,
        "cache_dtype": cache_dtype,
    }
    return _loader(facts).make(config, facts, others, settings), chooser


def _load(
    config: EngineConfig, facts: ModelFacts, path: str, load_format: str, others: OtherWorkers = NO_OTHERS
) -> tuple[Model, Callable[[], None]]:
    model, chooser = new_model(config, facts, others)
    _loader(facts).load(config, facts, model, path, load_format, chooser)
    return model, chooser.log_choices


def _loader(facts: ModelFacts) -> ModelLoader:
    loader: ModelLoader = import_object(
        "the model's loader", MODEL_IMPLEMENTATIONS[facts.implementation].loader
    )()
    return loader


def _compiles(config: EngineConfig) -> bool:
    return not config.enforce_eager and cannot_compile_reason(torch.device(config.device)) is None


def _load_head(config: EngineConfig, version: EagleVersion, target: Model) -> EagleHead:
    if not isinstance(target, Decoder):
        raise ConfigError(f"No {version} head guesses for a {type(target).__name__}: choose another method.")
    head_config, tensors, stored = _head_of(config, version, target.config)
    chooser = MethodChooser(
        config.quantization, stored, target.dtype, DevicePolicy.of(target.device), _compiles(config)
    )
    head = EagleHead(
        head_config,
        tensors,
        target,
        max_model_len=config.scheduler.max_model_len,
        choose_method=chooser,
        divides_experts=config.expert_parallel and version == "mtp",
    )
    head.load_weights(tensors.read(target.dtype))
    return head


def _head_of(
    config: EngineConfig, version: EagleVersion, target: DecoderConfig
) -> tuple[EagleConfig, EagleTensors | MtpTensors, str | None]:
    """Shape of the head, what it is loaded from, and how that is quantised."""
    if version == "mtp":
        stored = None if target.quantization is None else target.quantization.method
        tensors = mtp_tensors(config.model_path, target, config.load_format, config.seed)
        return mtp_config(target), tensors, stored
    assert config.speculative is not None and config.speculative.model_path is not None
    path = config.speculative.model_path
    head = read_eagle_config(path, version, target)
    is_dummy = config.load_format == "dummy"
    return head, random_tensors(head, config.seed) if is_dummy else find_tensors(path, head), None
