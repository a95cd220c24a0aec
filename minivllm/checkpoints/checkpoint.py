"""Stream a model's weights by Hugging Face name: safetensors (sharded or not), GGUF, or seeded dummies.

Files are mapped and tensors converted one at a time, so the peak is the model itself plus its largest tensor
(GGUF: plus three, since two are dequantised ahead). Names and shapes are checked before the first tensor is
handed out. Pickle-based formats are never opened.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minivllm.checkpoints.expert_tensors import ExpertTensors, expert_name
from minivllm.checkpoints.gguf_names.layout import GGUFLayout
from minivllm.checkpoints.hf_config import read_json_object
from minivllm.errors import ModelError, RequestError
from minivllm.families.family import Family
from minivllm.families.makers.registry import FAMILIES
from minivllm.gguf.gguf_file import (
    ROPE_TENSORS,
    GGUFFile,
    GGUFTensor,
    Treatment,
    find_gguf,
    hugging_face_name,
)
from minivllm.gguf.gguf_quants import GROUPED_BITS
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import (
    NORMS_BESIDE_EXPERTS,
    FeedForwardSpec,
    GatedDeltaSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    MoeSpec,
    SelfAttentionSpec,
    ShortConvSpec,
)
from minivllm.weights.packed_weights import FLOATS, PackedWeights, StoredPart
from minivllm.weights.stored_weight import QuantizedWeight, RestoredWeight, RowScaledWeight, StoredWeight

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_TYPES = FLOATS
DUMMY_STD = 0.02
MOST_DRAWN = 2**22 - 3
"""Of a random weight: eight billion values take minutes to draw. A prime, so that no two rows are equal."""
_ROWS_COMPARED = 8192
"""Rows of a head and of embeddings that are compared at a time."""
# Used in float32, and read as they are stored: rounded scores may choose other experts.
_EXACT = (
    "mlp.gate.weight",
    "mlp.gate.bias",
    "mlp.gate.e_score_correction_bias",
    "mlp.scale",
    "mlp.per_expert_scale",
    "mlp.shared_expert_gate.weight",
    "self_attn.sinks",
)

# Of heads, which are multiplied one by one.
_LATENT = ("self_attn.kv_b_proj.weight", "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight")

# Buffers that old checkpoints carry and every engine computes by itself.
_IGNORED = re.compile(r".*(rotary_emb\.inv_freq|self_attn\.(bias|masked_bias))")

Shape = tuple[int, ...]


def expected_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Name and shape of every weight the decoder needs,
    in Hugging Face naming and torch order ``[out, in]``."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        for norm in layer.norms.names:
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in _projections(layer, hidden).items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        vectors = {**_mixer_shapes(layer.mixer), **_other_vectors(layer, hidden)}
        shapes.update({prefix + name: shape for name, shape in vectors.items()})
    shapes["model.norm.weight"] = (hidden,)
    if config.per_layer is not None:
        width = config.per_layer.width
        shapes["model.embed_tokens_per_layer.weight"] = (config.vocab_size, config.num_layers * width)
        shapes["model.per_layer_model_projection.weight"] = (config.num_layers * width, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _projections(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, int, bool]]:
    """Name of each matrix of a layer -> its rows, its columns, and whether it has a bias."""
    matrices = {**_mixer_projections(layer.mixer, hidden), **_feed_forward(layer.mlp, hidden)}
    if layer.per_layer is not None:
        matrices["per_layer_input_gate"] = (layer.per_layer.width, hidden, False)
        matrices["per_layer_projection"] = (hidden, layer.per_layer.width, False)
    return matrices


def _mixer_projections(spec: MixerSpec, hidden: int) -> dict[str, tuple[int, int, bool]]:
    if isinstance(spec, ShortConvSpec):
        return {
            "conv.in_proj": (spec.widths[0], hidden, spec.bias),
            "conv.o_proj": (hidden, spec.widths[1], spec.bias),
        }
    if isinstance(spec, LatentSpec):
        query = spec.heads * (spec.nope_dim + spec.rope_dim)
        queries = {"self_attn.q_proj": (query, hidden, False)}
        if spec.query_rank is not None:
            queries = {
                "self_attn.q_a_proj": (spec.query_rank, hidden, spec.bias),
                "self_attn.q_b_proj": (query, spec.query_rank, False),
            }
        return {
            **queries,
            "self_attn.kv_a_proj_with_mqa": (spec.head_dim, hidden, spec.bias),
            "self_attn.kv_b_proj": (spec.heads * (spec.nope_dim + spec.value_dim), spec.kv_rank, False),
            "self_attn.o_proj": (hidden, spec.heads * spec.value_dim, spec.bias),
        }
    if isinstance(spec, GatedDeltaSpec | Mamba2Spec):
        into = {f"{spec.block}.{part}": (size, hidden, spec.bias) for part, size in spec.projections.items()}
        return {**into, f"{spec.block}.out_proj": (hidden, spec.widths[1], spec.bias)}
    if not isinstance(spec, SelfAttentionSpec):
        raise TypeError(f"Nothing is known of the weights of {spec}.")
    query, key_value, inputs = (
        spec.heads * spec.head_dim,
        spec.kv_heads * spec.head_dim,
        hidden * spec.qkv_inputs,
    )
    gate = {"self_attn.g_proj": (query, hidden, spec.qkv_bias)} if spec.output_gate else {}
    sizes = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    return {
        **{f"self_attn.{part}": (sizes[part], inputs, spec.qkv_bias) for part in spec.projected},
        **gate,
        "self_attn.o_proj": (hidden, query, spec.o_bias),
    }


def _mixer_shapes(spec: MixerSpec) -> dict[str, Shape]:
    """Of all that is no matrix of a linear layer."""
    if isinstance(spec, ShortConvSpec):
        bias = {"conv.conv.bias": (spec.channels,)} if spec.bias else {}
        return {"conv.conv.weight": (spec.channels, spec.taps), **bias}
    if isinstance(spec, GatedDeltaSpec | Mamba2Spec):
        return {f"{spec.block}.{name}": shape for name, shape in spec.parameters.items()}
    shapes: dict[str, Shape] = {}
    if isinstance(spec, LatentSpec):
        shapes["self_attn.kv_a_layernorm.weight"] = (spec.kv_rank,)
        if spec.query_rank is not None:
            shapes["self_attn.q_a_layernorm.weight"] = (spec.query_rank,)
    if isinstance(spec, SelfAttentionSpec):
        if spec.attend.has_sinks:
            shapes["self_attn.sinks"] = (spec.heads,)
        if spec.qk_norm is not None:
            heads, kv_heads = (spec.heads, spec.kv_heads) if spec.qk_norm == "whole width" else (1, 1)
            shapes["self_attn.q_norm.weight"] = (heads * spec.head_dim,)
            if spec.shares_cache_of is None:
                shapes["self_attn.k_norm.weight"] = (kv_heads * spec.head_dim,)
    return shapes


def _other_vectors(layer: LayerSpec, hidden: int) -> dict[str, Shape]:
    """Of all that is no matrix, outside the mixer and its norms."""
    shapes: dict[str, Shape] = {}
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.has_correction:
        shapes["mlp.gate.e_score_correction_bias"] = (layer.mlp.num_experts,)
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.beside is not None:
        shapes |= {f"{name}.weight": (hidden,) for name in NORMS_BESIDE_EXPERTS}
        shapes |= {"mlp.scale": (hidden,), "mlp.per_expert_scale": (layer.mlp.num_experts,)}
    if layer.per_layer is not None:
        shapes["post_per_layer_input_norm.weight"] = (hidden,)
    if layer.output_scale:
        shapes["output_scale.weight"] = (1,)
    return shapes


def _feed_forward(spec: FeedForwardSpec, hidden: int) -> dict[str, tuple[int, int, bool]]:
    if isinstance(spec, MlpSpec):
        return _gated_mlp("mlp", spec.inner, hidden, spec.bias)
    matrices = {"mlp.gate": (spec.num_experts, hidden, spec.router_bias)}
    for expert in range(spec.num_experts):
        matrices.update(_gated_mlp(f"mlp.experts.{expert}", spec.inner, hidden, spec.bias))
    if spec.shared is not None:
        matrices.update(_gated_mlp("mlp.shared_expert", spec.shared.inner, hidden, spec.shared.bias))
    if spec.beside is not None:
        matrices.update(_gated_mlp("mlp", spec.beside.inner, hidden, spec.beside.bias))
    if spec.shared_gate:
        matrices["mlp.shared_expert_gate"] = (1, hidden, False)
    return matrices


def _gated_mlp(block: str, inner: int, hidden: int, has_bias: bool) -> dict[str, tuple[int, int, bool]]:
    return {
        f"{block}.gate_proj": (inner, hidden, has_bias),
        f"{block}.up_proj": (inner, hidden, has_bias),
        f"{block}.down_proj": (hidden, inner, has_bias),
    }


def iterate_weights(
    model_path: str | Path,
    load_format: str,
    decoder_config: DecoderConfig,
    dtype: torch.dtype,
    seed: int = 0,
    kept_bits: frozenset[int] = frozenset(),
    wants: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, StoredWeight]]:
    """Yield (Hugging Face name, CPU tensor of ``dtype``) for exactly the names of ``expected_shapes`` that
    are wanted.

    What a router decides by, and sinks, come in the type in which they are stored. A tensor may be a view of
    the mapped file: copy it before changing it. With tied embeddings no lm_head is yielded. seed: used by
    load_format "dummy" only. kept_bits: a GGUF file's matrices of linear layers whose blocks are groups of
    that many bits come
    as ``GroupedWeight``; with 4 among them, other quantised types come as ``RestoredWeight``,
    since rounding those
    to 4 bits would spoil what the file holds. wants: tells the names whose tensors are read; all are checked.
    Raises ModelError, naming file and tensor, for a missing or broken file, a missing, unexpected or
    misshapen tensor, before anything is yielded.
    """
    expected = expected_shapes(decoder_config)
    family = FAMILIES[decoder_config.architecture].for_model(decoder_config)
    if load_format == "dummy":
        return _dummy_weights({name: shape for name, shape in expected.items() if wants(name)}, dtype, seed)
    gguf_path = find_gguf(model_path, load_format)
    if gguf_path is not None:
        weights: Iterator[tuple[str, StoredWeight]] = _gguf_weights(
            gguf_path, decoder_config, ExpertTensors(expected), expected, dtype, kept_bits, wants
        )
    else:
        num_layers = decoder_config.num_layers

        def own_name(stored: str) -> str | None:
            return None if family.leaves_out(stored, num_layers) else family.own_name(_full_name(stored))

        packed = None if decoder_config.quantization is None else PackedWeights(decoder_config.quantization)
        experts = ExpertTensors(expected, family.transposes_experts, family.may_transpose_experts)
        weights = _safetensors_weights(
            Path(model_path), family, own_name, experts, expected, dtype, packed, wants
        )
    return _rewritten(weights, family, decoder_config, model_path, dtype)


def iterate_head_weights(
    directory: Path, config: DecoderConfig, expected: Mapping[str, Shape], dtype: torch.dtype
) -> Iterator[tuple[str, StoredWeight]]:
    """Yield the tensors of the MTP head in a model's safetensors files, as ``iterate_weights`` yields those
    of the model.

    config: the model. expected: shapes of the head's tensors, by their names in the head (see
    ``Family.head_names``). Raises ModelError if there is no head, or one that does not have these shapes.
    """
    family = FAMILIES[config.architecture].for_model(config)

    def own_name(stored: str) -> str | None:
        return family.head_name(family.own_name(_full_name(stored)), config.num_layers)

    packed = None if config.quantization is None else PackedWeights(config.quantization)
    if not any(map(own_name, stored_tensors(directory, packed, lambda stored: False))):
        raise ModelError(
            f"{directory} holds no MTP head, though models of {family.architecture} may have one: choose "
            "another method, such as ngram."
        )
    experts = ExpertTensors(expected, family.transposes_experts, family.may_transpose_experts)
    weights = _safetensors_weights(
        directory, family, own_name, experts, expected, dtype, packed, lambda name: True
    )
    return _rewritten(weights, family, config, directory, dtype)


def _rewritten(
    weights: Iterator[tuple[str, StoredWeight]],
    family: Family,
    config: DecoderConfig,
    model_path: str | Path,
    dtype: torch.dtype,
) -> Iterator[tuple[str, StoredWeight]]:
    """The same weights as the family's decoder needs them."""
    rewrite = family.rewrite_weight
    if rewrite is None:
        return weights

    def rewritten(name: str, weight: StoredWeight) -> StoredWeight:
        """A quantised weight is rewritten by its values,
        which need not be such that its format could hold them."""
        if not isinstance(weight, QuantizedWeight):
            return rewrite(name, weight, config)
        values = weight.restore(dtype)
        new = rewrite(name, values, config)
        if new is values:
            return weight
        if isinstance(weight, RowScaledWeight) and weight.rounds_inputs and weight.values.dtype == torch.int8:
            raise ModelError(
                f"{model_path}: inputs of {name!r} are rounded to int8, but a {config.architecture} "
                "changes "
                f"that weight while it is loaded, which would no longer be exact: use the unquantised model."
            )
        return RestoredWeight(new)

    return ((name, rewritten(name, weight)) for name, weight in weights)


def _dummy_weights(
    expected: Mapping[str, Shape], dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in expected.items():
        yield name, dummy_weight(name, shape, dtype, seed)


def dummy_weight(name: str, shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random weights that depend on name and seed only, so that no loading order changes them;
    norms are 1. More than MOST_DRAWN values repeat the first ones."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    size = math.prod(shape)
    drawn = torch.randn(min(size, MOST_DRAWN), generator=generator).mul_(DUMMY_STD).to(dtype)
    return drawn.repeat(-(-size // MOST_DRAWN))[:size].view(shape)


def check_tensors(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], file_of: Mapping[str, Path], source: Path
) -> None:
    """Compare names and shapes with what the configuration asks for."""
    for name, shape in found.items():
        if name not in expected:
            raise ModelError(
                f"{file_of[name]} holds tensor {name!r}, which the model's configuration does not call for."
            )
        if shape != expected[name]:
            raise ModelError(
                f"{file_of[name]}: tensor {name!r} has shape {list(shape)}, but the configuration calls for "
                f"{list(expected[name])}."
            )
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{source} lacks tensor {missing[0]!r}{more}; the checkpoint is incomplete.")


def _is_ignored(name: str, expected: Mapping[str, Shape]) -> bool:
    tied_head = name == "lm_head.weight" and name not in expected
    return tied_head or (_IGNORED.fullmatch(name) is not None)


def _gguf_weights(
    path: Path,
    config: DecoderConfig,
    experts: ExpertTensors,
    expected: Mapping[str, Shape],
    dtype: torch.dtype,
    kept_bits: frozenset[int],
    wants: Callable[[str], bool],
) -> Iterator[tuple[str, StoredWeight]]:
    with GGUFFile(path) as file:
        family = FAMILIES[config.architecture].for_model(config)
        layout = GGUFLayout(family, config, expected)
        fused = () if any(name.endswith(".ffn_gate.weight") for name in file.tensors) else tuple(family.fused)
        behind = re.compile(r"blk\.(\d{1,6})\.")
        skip = {
            name
            for name in file.tensors
            if name in ROPE_TENSORS
            or family.leaves_out(behind.sub(r"model.layers.\1.", name), config.num_layers)
        }
        names = {name: hugging_face_name(name, fused, family.gguf_renamed) or name for name in file.tensors}
        found = layout.shapes(
            {names[name]: tensor.shape for name, tensor in file.tensors.items() if name not in skip}
        )
        found, file_of = experts.unstacked(found, dict.fromkeys(found, path))
        check_tensors(*_unfused(found, expected, file_of, family), path)
        skip |= {stored for stored, name in names.items() if not wants(name)}
        heads: dict[str, int] = {}
        if family.gguf_permutes_rotary:
            mixer = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, SelfAttentionSpec))
            heads = {"q_proj": mixer.heads, "k_proj": mixer.kv_heads}
        counts: Counter[tuple[str, Treatment]] = Counter()

        def treatment(name: str, tensor: GGUFTensor) -> Treatment:
            if name.endswith((*_EXACT, ".A_log")):
                return "exact"
            is_product = name != "model.embed_tokens.weight" or config.tie_word_embeddings
            if not kept_bits or not is_product or len(tensor.shape) < 2 or name.endswith(_LATENT):
                return "dequantize"
            chosen = _treatment(tensor.type_name, kept_bits)
            counts[tensor.type_name, chosen] += 1
            return chosen

        for stored, value in file.weights(dtype, heads, fused, family.gguf_renamed, skip, treatment):
            for name, weight in layout.restored(stored, value):
                for own, part in experts.split(name, weight):
                    yield from _parts(own, part, expected, family)
        for (type_name, chosen), count in counts.items():
            logger.info("%s: %d matrices of type %s %s.", path.name, count, type_name, _TREATMENTS[chosen])


_TREATMENTS: dict[Treatment, str] = {
    "keep": "keep their blocks",
    "restore": "are dequantised and stay so, since no operator here multiplies that type",
    "dequantize": "are dequantised and quantised anew",
    "exact": "are dequantised to float32",
}


def _treatment(type_name: str, kept_bits: frozenset[int]) -> Treatment:
    if GROUPED_BITS.get(type_name) in kept_bits:
        return "keep"
    return "dequantize" if type_name in FLOAT_TYPES or 4 not in kept_bits else "restore"


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor lies: its name in the file, the file, and what that file's header says of it."""

    name: str
    path: Path
    header: StoredPart


def _safetensors_weights(
    directory: Path,
    family: Family,
    own_name: Callable[[str], str | None],
    experts: ExpertTensors,
    expected: Mapping[str, Shape],
    dtype: torch.dtype,
    packed: PackedWeights | None,
    wants: Callable[[str], bool],
) -> Iterator[tuple[str, StoredWeight]]:
    """own_name: of a stored tensor, its name in what is loaded; None if that does not need it."""
    stored_in: dict[str, Path] = {}
    # weight -> its parts; a tensor that is a weight by itself is the part without a name
    parts_of: dict[str, dict[str, _StoredTensor]] = {}

    def used_name(stored: str) -> str | None:
        name = own_name(stored)
        if name is None or (packed is not None and packed.is_unused(name)):
            return None
        return None if _is_ignored(name, expected) else name

    def is_called_for(weight: str) -> bool:
        return any(part in expected for part in family.parts(weight)) or ".experts." in weight

    tensors = stored_tensors(directory, packed, lambda stored: used_name(stored) is not None)
    for stored, (path, header, is_listed) in tensors.items():
        name = used_name(stored)
        if name is None:
            continue
        weight, part = (packed.place(name, _full_name(stored)) if packed is not None else None) or (name, "")
        if not is_listed and not is_called_for(weight):
            logger.warning("%s: tensor %r is left out: no weight, and not in %s.", path, stored, INDEX_NAME)
            continue
        if name in stored_in:
            raise ModelError(f"{path}: tensor {name!r} is also in {stored_in[name]}.")
        stored_in[name] = path
        parts = parts_of.setdefault(weight, {})
        if part in parts:
            raise ModelError(
                f"{path}: tensor {name!r} is what {parts[part].name!r} in {parts[part].path} is too."
            )
        parts[part] = _StoredTensor(stored, path, header)

    def is_depthwise(name: str, shape: Shape) -> bool:
        """Of a convolution of every channel by itself: the one input of each is a dimension of its own."""
        return len(shape) == 3 and shape[1] == 1 and len(expected.get(name, ())) == 2

    with ExitStack() as stack:
        files = {tensor.path for parts in parts_of.values() for tensor in parts.values()}
        handles: dict[Path, Any] = {
            path: stack.enter_context(open_safetensors(path)) for path in sorted(files)
        }

        def read(tensor: _StoredTensor) -> torch.Tensor:
            result: torch.Tensor = handles[tensor.path].get_tensor(tensor.name)
            return result

        found: dict[str, Shape] = {}
        for weight, parts in list(parts_of.items()):
            if packed is not None and parts.keys() != {""}:
                found[weight] = packed.shape(weight, {part: tensor.header for part, tensor in parts.items()})
            elif packed is not None and weight not in expected and weight.endswith("_proj.bias"):
                # GPTQ writers give every layer a bias, of zeros where the model has none.
                if bool(read(parts[""]).any()):
                    raise ModelError(
                        f"{parts[''].path}: {weight!r} is not zero, but the model has no such bias."
                    )
                del parts_of[weight]
            else:
                shape = parts[""].header.shape
                found[weight] = (shape[0], shape[2]) if is_depthwise(weight, shape) else shape
        file_of = {name: next(iter(parts.values())).path for name, parts in parts_of.items()}
        found, file_of = experts.unstacked(found, file_of)
        check_tensors(*_unfused(found, expected, file_of, family), directory)
        for weight, parts in parts_of.items():
            if not wants(weight):
                continue
            if packed is not None and "" not in parts:
                value = packed.assemble(weight, {part: read(tensor) for part, tensor in parts.items()}, dtype)
            else:
                value = read(parts[""])
                value = value.flatten(1) if is_depthwise(weight, value.shape) else value
                if (
                    family.norm_offset
                    and weight.endswith("norm.weight")
                    and not weight.endswith(family.whole_norms)
                ):
                    value = value.float() + family.norm_offset
                value = value if weight.endswith(_EXACT) else value.to(dtype)
            for name, one in experts.split(weight, value):
                yield from _parts(name, one, expected, family)


def _unfused(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], file_of: Mapping[str, Path], family: Family
) -> tuple[dict[str, Shape], Mapping[str, Shape], dict[str, Path]]:
    """The arguments of check_tensors, with the parts in place of every tensor that holds several.

    Raises ModelError if its shape is not that of its parts, one below the other.
    """
    shapes: dict[str, Shape] = {}
    files: dict[str, Path] = {}
    for name, shape in found.items():
        parts = family.parts(name)
        if len(parts) > 1 and all(part in expected for part in parts):
            whole = sum(expected[part][0] for part in parts), *expected[parts[0]][1:]
            if shape != whole:
                raise ModelError(
                    f"{file_of[name]}: tensor {name!r} has shape {list(shape)}, but the configuration calls "
                    "for "
                    f"{list(whole)}."
                )
            shapes.update({part: expected[part] for part in parts})
        else:
            parts = (name,)
            shapes[name] = shape
        files.update(dict.fromkeys(parts, file_of[name]))
    return shapes, expected, files


def _parts(
    name: str, weight: StoredWeight, expected: Mapping[str, Shape], family: Family
) -> Iterator[tuple[str, StoredWeight]]:
    """The matrices that a tensor holds, under their own names."""
    parts, first = family.parts(name), 0
    groups = family.groups.get(name.split(".")[-2], 1) if len(parts) > 1 else 1
    if groups > 1:
        sizes = [expected[part][0] // groups for part in parts]
        in_groups = torch.arange(weight.shape[0]).unflatten(0, (groups, -1)).split(sizes, dim=1)
        for part, indices in zip(parts, in_groups, strict=True):
            own = indices.flatten()
            yield part, weight.part(own, slice(None)) if isinstance(weight, QuantizedWeight) else weight[own]
        return
    for part in parts:
        rows = slice(first, first := first + expected[part][0])
        yield part, weight.part(rows, slice(None)) if isinstance(weight, QuantizedWeight) else weight[rows]


def rows_of_layers(
    config: DecoderConfig, shapes: Mapping[str, Shape], module: str
) -> dict[str, torch.Tensor]:
    """The decoder's linear layers that a module of a published checkpoint holds, and which of its outputs are
    theirs, int64, in their order. Empty if the decoder has no such layer. shapes: [out, in] of all of them.
    Raises RequestError if the family does more to a weight than to put its rows into another order."""
    family = FAMILIES[config.architecture].for_model(config)
    name = family.own_name(_full_name(f"{module}.weight"))
    expected = {f"{layer}.weight": shape for layer, shape in shapes.items()}
    if not all(part in expected for part in family.parts(name)):
        return {}
    every = torch.arange(sum(expected[part][0] for part in family.parts(name)))
    layers = {}
    for part, rows in _parts(name, every, expected, family):
        assert isinstance(rows, torch.Tensor)
        own = rows if family.rewrite_weight is None else family.rewrite_weight(part, rows, config)
        if not torch.equal(own.sort().values.to(rows.dtype), rows.sort().values):
            raise RequestError(
                f"The family {family.architecture} changes the weight of {module}: no adapter fits it."
            )
        layers[part.removesuffix(".weight")] = own
    return layers


def _full_name(stored: str) -> str:
    """The decoder's name. Checkpoints of the bare decoder leave out the leading ``model.``."""
    return expert_name(
        "model." + stored if stored.startswith(("embed_tokens.", "layers.", "norm.")) else stored
    )


class PlacedTensor(NamedTuple):
    """Where a tensor of a checkpoint lies, and whether the index says so (or there is none)."""

    path: Path
    header: StoredPart
    is_listed: bool


def stored_tensors(
    directory: Path, packed: PackedWeights | None, is_used: Callable[[str], bool]
) -> dict[str, PlacedTensor]:
    """Every tensor of a checkpoint once, in the file in which the index places it:
    a copy elsewhere is an older one.

    is_used: tells the tensors that must be where the index says. Raises ModelError where they are not, and
    for a tensor in two files of which the index names neither.
    """
    files, listed = safetensors_files(directory)
    found: dict[str, PlacedTensor] = {}
    for path in files:
        for stored, header in read_header(path, packed).items():
            if listed.get(stored, path) != path:
                continue
            if stored in found:
                raise ModelError(f"{path}: tensor {stored!r} is also in {found[stored].path}.")
            found[stored] = PlacedTensor(path, header, not listed or stored in listed)
    for stored, path in listed.items():
        if stored not in found and is_used(stored):
            raise ModelError(
                f"{directory / INDEX_NAME} places tensor {stored!r} in {path.name}, which does not hold it."
            )
    return found


def has_other_head(directory: Path, config: DecoderConfig) -> bool:
    """Whether a checkpoint stores a head whose values, in the type it was saved in,
    are not those of its embeddings.

    Then the head counts, even where the configuration ties both, as in transformers.
    """
    family = FAMILIES[config.architecture].for_model(config)
    packed = None if config.quantization is None else PackedWeights(config.quantization)
    dtype = getattr(torch, config.dtype)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for stored, tensor in stored_tensors(directory, packed, lambda stored: False).items():
            name = family.own_name(_full_name(stored))
            if name in names and tensor.header.type in FLOAT_TYPES:
                slices[name] = stack.enter_context(open_safetensors(tensor.path)).get_slice(stored)
        if len(slices) < len(names):
            return False
        head, embedding = (slices[name] for name in names)
        num_rows = embedding.get_shape()[0]
        chunks = (slice(first, first + _ROWS_COMPARED) for first in range(0, num_rows, _ROWS_COMPARED))
        return head.get_shape() != embedding.get_shape() or any(
            not torch.equal(head[rows].to(dtype), embedding[rows].to(dtype)) for rows in chunks
        )


def safetensors_files(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and the index's claim which of them holds what (empty without an index)."""
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME], {}
    index_path = directory / INDEX_NAME
    if not index_path.is_file():
        pickled = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)
        )
        if pickled:
            raise ModelError(
                f"{directory} holds its weights as {pickled[0]}, a pickle file that could run any code, "
                "which is never "
                f"opened; convert the model to safetensors."
            )
        raise ModelError(
            f"{directory} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there. Weights in "
            "another "
            "format, such as pytorch_model.bin, must be converted to safetensors first."
        )
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path} has no weight_map.")
    listed: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise ModelError(
                f"{index_path}: {name!r} is placed in {file_name!r}, but must be in a .safetensors file "
                "beside it."
            )
        listed[name] = directory / file_name
    files = sorted(set(listed.values()))
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} is missing, though {index_path.name} lists it; fetch the model again.")
    return files, listed


def open_safetensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a valid safetensors file ({error}); it may be truncated. Fetch it again."
        ) from error


def read_header(path: Path, packed: PackedWeights | None) -> dict[str, StoredPart]:
    """Types and shapes by name in one file;
    safetensors itself checks that the header fits the file's length."""
    described: dict[str, StoredPart] = {}
    with open_safetensors(path) as file:
        names: Iterable[str] = file.keys()
        for name in names:
            view = file.get_slice(name)
            place = packed.place(_full_name(name), _full_name(name)) if packed is not None else None
            allowed = packed.stored_types(*place) if packed is not None and place is not None else FLOAT_TYPES
            is_unused = _IGNORED.fullmatch(name) or (packed is not None and packed.is_unused(name))
            if view.get_dtype() not in allowed and not is_unused:
                raise ModelError(
                    f"{path}: tensor {name!r} is stored as {view.get_dtype()}, but must be one of "
                    f"{', '.join(allowed)}."
                )
            described[name] = StoredPart(view.get_dtype(), tuple(view.get_shape()))
    return described
