"""A transformers model without weights:
its architecture, what its layers ask of attention, and its own constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError, ModelError
from minivllm.models.model import TokenInputs
from minivllm.models.shards import OwnHeads
from minivllm.specs.attention import AttentionSpec
from minivllm.transformers_models.describe.config import TransformersConfig, one_sentence
from minivllm.transformers_models.layers.attention import (
    ONE_AT_A_TIME,
    PAGED,
    PROBE,
    PROBE_TOKENS,
    Probe,
    RecordedMask,
    register_with_transformers,
)
from minivllm.transformers_models.layers.division import Division
from minivllm.transformers_models.trace.operators import LayerAttention, Step, StepHolder
from minivllm.transformers_models.trace.trace import OwnTensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_LOOKING_AHEAD: Mapping[str, Callable[[Any, AttentionSpec], bool]] = {
    "gemma3": lambda config, spec: True,
    "gemma4": lambda config, spec: (
        config.text_config.use_bidirectional_attention == "vision" and spec.window is not None
    ),
}
"""model_type -> (configuration, a layer's attention) -> whether tokens of an image see all of it there."""


@dataclass(frozen=True)
class Architecture:
    """model: on the meta device, its constants excepted. body: the module of it that computes hidden states.
    language: the module of that which has the layers, another one only where a model also sees images.
    eye: names, or their beginnings, of what such a model has for images alone: not in ``model`` any more.

    layers: what attention does, in the order of the calls. per_token: linear layers that see every token of a
    step just once, which is what adapters need. siblings: those of one block that read the same input.
    """

    model: PreTrainedModel
    body: nn.Module
    language: PreTrainedModel
    eye: tuple[str, ...]
    layers: tuple[LayerAttention, ...]
    per_token: frozenset[str]
    siblings: tuple[tuple[str, ...], ...]


def build_architecture(config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> Architecture:
    """Build the model that config.json names, and ask its layers. Takes no memory worth the name.

    Raises ModelError with the reason if it cannot run on the engine's attention.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    register_with_transformers()
    described = config.load()
    sees = described.get_text_config() is not described
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    try:
        with ONE_AT_A_TIME, torch.device("meta"):
            model = auto.from_config(described, dtype=dtype, attn_implementation=PROBE).eval()
    except ModelError:
        raise
    except Exception as error:  # a model class raises whatever building it raises
        if PROBE in str(error):
            raise ModelError(
                f"{config.source}: the attention of {config.architecture} does not go through transformers' "
                "attention "
                "interface, and cannot be served."
            ) from error
        raise ModelError(
            f"{config.source}: transformers cannot build {config.architecture}: {one_sentence(error)}"
        ) from error
    if model._is_stateful:
        raise ModelError(
            f"{config.source}: {config.architecture} keeps another state than keys and values (a scan or a "
            "convolution), which transformers models are not served with here."
        )
    if model._can_set_experts_implementation():
        model.set_experts_implementation(PROBE)
    probed = _probe(model, config)
    layers = probed.layers
    if len(layers) != config.num_layers:
        raise ModelError(
            f"{config.source}: {config.architecture} has {config.num_layers} layers, but {len(layers)} of "
            "them attend: "
            "the others keep another state, or attend by themselves, and cannot run on the engine's "
            "attention."
        )
    model.set_attn_implementation(PAGED)
    _make_constants(model, device)
    for name in probed.eye:
        owner, _, own = name.removesuffix(".").rpartition(".")
        setattr(model.get_submodule(owner), own, None)
    return probed


def _probe(model: PreTrainedModel, config: TransformersConfig) -> Architecture:
    """Run the whole model once on the meta device."""
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    probe = _new_probe(model)
    called: list[PreTrainedModel] = []
    used: set[nn.Module] = set()
    inputs: dict[str, list[Tensor]] = {}
    versions: dict[str, int] = {}

    def note_input(name: str, x: Tensor) -> None:
        inputs.setdefault(name, []).append(x)
        versions[name] = x._version

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda module, _: used.add(module)))
        if isinstance(module, PreTrainedModel) and module is not model:
            hooks.append(module.register_forward_pre_hook(lambda module, _: called.append(module)))
        elif isinstance(module, nn.Linear | Conv1D):
            hooks.append(
                module.register_forward_pre_hook(lambda _, given, name=name: note_input(name, given[0]))
            )
    try:
        _run(model, probe)
    except ModelError:
        raise
    except Exception as error:  # attention of its own fails in a way of its own
        adds_bias = RecordedMask.__name__ in str(error)
        what = "it adds a bias such as ALiBi to its mask" if adds_bias else f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{config.source}: the attention of {config.architecture} does not go through transformers' "
            "attention "
            f"interface, or builds its own mask or bias, and cannot be served ({what})."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise ModelError(f"{config.source}: {config.architecture} has no body apart from its head.")
    layers = _looking_ahead(model.config, probe.layers)
    sees = model.config.get_text_config() is not model.config
    eye = _unused(model, called[0], used) if sees else ()
    once = {name: given[0] for name, given in inputs.items() if len(given) == 1}
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, x in once.items():
        groups.setdefault((name.rpartition(".")[0], id(x), versions[name]), []).append(name)
    return Architecture(
        model=model,
        body=called[0],
        language=called[-1 if sees else 0],
        eye=eye,
        layers=layers,
        per_token=frozenset(name for name, x in once.items() if x.numel() == PROBE_TOKENS * x.shape[-1]),
        siblings=tuple(tuple(names) for names in groups.values() if len(names) > 1),
    )


def _unused(model: nn.Module, body: nn.Module, used: set[nn.Module]) -> tuple[str, ...]:
    """The names of what a text does not need of a model that also sees images, with a dot after modules."""
    prefix = next(name for name, module in model.named_modules() if module is body)
    names = [f"{prefix}.{name}" for name in body._parameters]
    for owner, beginning in ((model, ""), (body, f"{prefix}.")):
        names += [f"{beginning}{name}." for name, child in owner.named_children() if child not in used]
    return tuple(names)


def _looking_ahead(config: PretrainedConfig, layers: Sequence[LayerAttention]) -> tuple[LayerAttention, ...]:
    """Layers in which tokens of an image see all of it, which no probing with a text tells."""
    layers = tuple(layers)
    which = _LOOKING_AHEAD.get(config.model_type)
    if which is None:
        return layers
    return tuple(
        replace(layer, spec=layer.spec._replace(looks_ahead=which(config, layer.spec))) for layer in layers
    )


def _new_probe(model: PreTrainedModel, whole: Sequence[tuple[int, OwnHeads]] = ()) -> Probe:
    own = model.config.get_text_config()
    windows = {size for size in (getattr(own, "sliding_window", None),) if size}
    chunks = {size for size in (getattr(own, "attention_chunk_size", None),) if size}
    return Probe(model, windows, chunks, whole)


def _run(model: PreTrainedModel, probe: Probe) -> None:
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(PROBE_TOKENS, device="meta")[None]
    with probe.recording(), torch.inference_mode(False), torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False)


def probe_part(
    architecture: Architecture,
    division: Division | None,
    holder: StepHolder,
    layers: Sequence[LayerAttention],
) -> tuple[LayerAttention, ...]:
    """What attention does in the part of a model that is this worker's: its linear layers and experts are
    replaced. division: which part of its layers that is, if not all. layers: what they are in the whole
    model.

    Raises ConfigError if the parts do not fit together,
    mostly because a module takes its number of heads for granted.
    """
    model = architecture.model
    whole = (
        [] if division is None else [(division.num_heads(layer), division.heads(layer)) for layer in layers]
    )
    probe = _new_probe(model, whole)
    own = OwnTensors(model)
    model.set_attn_implementation(PROBE)
    try:
        nothing = Step(TokenInputs(torch.empty(0)), (), None)
        with own.given([tensor.to("meta") for tensor in own.tensors]), holder.running(nothing):
            _run(model, probe)
    except Exception as error:  # modules fail in ways of their own
        size = (
            "pipeline_parallel_size is above 1"
            if division is None
            else f"tensor_parallel_size is {division.shard.size}"
        )
        raise ConfigError(
            f"{size}, but the layers of {type(model).__name__} cannot be computed in parts, as transformers' "
            "plan "
            f"divides them: {one_sentence(error)}"
        ) from error
    finally:
        model.set_attn_implementation(PAGED)
    return tuple(probe.layers)


@torch.no_grad()
def _make_constants(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, scales),
    as transformers initialises them."""
    buffers = list(model.named_non_persistent_buffers())
    for name, buffer in buffers:
        parent, _, own = name.rpartition(".")
        value = torch.empty_like(buffer, device=device)
        model.get_submodule(parent)._buffers[own] = (
            value.fill_(torch.nan) if value.is_floating_point() else value
        )
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    with ONE_AT_A_TIME:
        model.initialize_weights()
    for name, _ in buffers:
        if model.get_buffer(name).isnan().any():
            raise ModelError(
                f"transformers does not say how the constant {name!r} of this model is computed."
            )
