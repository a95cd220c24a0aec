"""Read a model's configuration into ``DecoderConfig``: config.json in either spelling, or a GGUF file's metadata.

transformers 4 wrote ``rope_theta``, ``rope_scaling`` and ``torch_dtype``; transformers 5 writes ``rope_parameters``
and ``dtype``. Both are normalised here, once, with the defaults and the rotary semantics of transformers; GGUF
metadata is first translated into the same entries. Nothing of transformers is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from minivllm.checkpoints.packed_weights import read_quantization
from minivllm.errors import ModelError
from minivllm.gguf.gguf_config import read_gguf_config
from minivllm.gguf.gguf_file import find_gguf
from minivllm.models.decoder_config import DecoderConfig, RotaryConfig, RotaryType
from minivllm.models.registry import BiasRule, Family, find_family

MAX_CONFIG_BYTES = 64 * 1024 * 1024

# Far above any published model, far below what would make an allocation absurd.
MAX_VOCAB_SIZE = 2**22
MAX_WIDTH = 2**20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_POSITIONS = 2**30

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def read_decoder_config(
    model_path: str | Path, load_format: str = "auto", overrides: Mapping[str, Any] | None = None
) -> DecoderConfig:
    """The decoder description of a local model: a directory with config.json, or a GGUF file.

    overrides: entries that replace those of config.json (for a GGUF file, of the config.json it stands for).
    Raises ModelError naming the file, the field and the value when the model cannot be run.
    """
    gguf_path = find_gguf(model_path, load_format)
    if gguf_path is not None:
        source, entries = str(gguf_path), read_gguf_config(gguf_path)
        generation: dict[str, Any] = {}
    else:
        directory = Path(model_path)
        source = str(directory / "config.json")
        if not (directory / "config.json").is_file():
            raise ModelError(f"{directory} holds no config.json; give a model directory or a .gguf file.")
        entries = read_json_object(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.is_file() else {}
    return build_decoder_config({**entries, **(overrides or {})}, generation, source)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file whose content is one object; ModelError names the file when it is anything else."""
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelError(
                f"{path} is {size} bytes long; a configuration of more than {MAX_CONFIG_BYTES} is refused."
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, but holds a {type(content).__name__}.")
    return content


def build_decoder_config(entries: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> DecoderConfig:
    """Normalise config.json's entries (and generation_config.json's); ``source`` is the file named in errors."""
    architectures = entries.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"{source}: architectures is {architectures!r}, but must be a list of names.")
    family = find_family(architectures, entries.get("model_type"), source)
    if family.rewrite_config is not None:
        entries = family.rewrite_config(entries)
    fields = _Fields(entries, family.defaults, source)

    hidden_size = fields.whole("hidden_size", 1, MAX_WIDTH)
    num_layers = fields.whole("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.whole("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.optional_whole("num_key_value_heads", 1, MAX_HEADS) or num_heads
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads {num_heads}")
    head_dim = fields.optional_whole("head_dim", 1, MAX_HEAD_DIM)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.refuse("hidden_size", hidden_size, f"must be a multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    max_positions = fields.whole("max_position_embeddings", 1, MAX_POSITIONS)
    layer_rotary = _layer_rotary(family, fields, num_layers)
    vocab_size = fields.whole("vocab_size", 1, MAX_VOCAB_SIZE)
    return DecoderConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0),
        rotary=_rotary(fields, head_dim, max_positions),
        layer_rotary=layer_rotary,
        layer_windows=_layer_windows(family, fields, num_layers, layer_rotary),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_bias(family.qkv_bias, fields),
        o_bias=_bias(family.o_bias, fields),
        mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        hidden_act=_activation(fields),
        dtype=_dtype(entries, source),
        quantization=read_quantization(entries.get("quantization_config"), source),
        bos_token_id=_bos_token_id(fields, generation, vocab_size),
        eos_token_ids=_eos_token_ids(fields, generation, vocab_size),
    )


class _Fields:
    """Checked access to configuration entries: an entry, else the family's default, else a sentence."""

    def __init__(self, entries: Mapping[str, Any], defaults: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.entries = entries
        self.defaults = defaults
        self.source = source
        self.prefix = prefix

    def get(self, name: str) -> Any:
        return self.entries[name] if name in self.entries else self.defaults.get(name)

    def refuse(self, name: str, value: Any, rule: str) -> ModelError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ModelError(f"{self.source}: {self.prefix}{name} is {shown}, but {rule}.")

    def whole(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, value, f"must be a whole number from {low} to {high}")
        return value

    def optional_whole(self, name: str, low: int, high: int) -> int | None:
        return None if self.get(name) is None else self.whole(name, low, high)

    def number(self, name: str, above: float, at_most: float) -> float:
        value = self.get(name)
        # ``above < value`` is false for NaN too, and a huge integer compares without overflowing.
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= at_most:
            raise self.refuse(name, value, f"must be a number above {above:g} and at most {at_most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.refuse(name, value, "must be true or false")
        return value


def _rotary(fields: _Fields, head_dim: int, max_positions: int) -> RotaryConfig:
    """Merge both spellings as transformers does: ``rope_scaling`` else ``rope_parameters``, gaps filled from above."""
    given = fields.entries.get("rope_scaling") or fields.entries.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise fields.refuse("rope_scaling", given, "must be an object or null")
    if any(isinstance(value, dict) for value in given.values()):
        raise fields.refuse(
            "rope_parameters", given, "must be one set of values: sets per layer type are not supported"
        )
    rope = _Fields(given, {"rope_theta": fields.get("rope_theta")}, fields.source, "rope_parameters.")

    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROTARY_TYPES:
        raise rope.refuse("rope_type", rope_type, f"must be one of {', '.join(ROTARY_TYPES)}")
    theta = rope.number("rope_theta", 0.0, 1e15)

    partial = given.get("partial_rotary_factor", fields.entries.get("partial_rotary_factor"))
    if partial is None:
        partial = 1.0
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise rope.refuse("partial_rotary_factor", partial, "must be above 0 and at most 1")
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise rope.refuse(
            "partial_rotary_factor", partial, f"must leave an even number of the {head_dim} head elements"
        )

    values: dict[str, Any] = {"original_max_position": max_positions}
    if rope_type == "dynamic" and dim == 2:
        raise rope.refuse("rope_type", rope_type, "must not be dynamic when only two elements of a head are rotated")
    if rope_type in ("linear", "dynamic", "llama3"):
        values["factor"] = rope.number("factor", 0.0, 1e6)
    if rope_type in ("llama3", "yarn"):
        original = fields.optional_whole("original_max_position_embeddings", 1, MAX_POSITIONS)
        original = original or rope.optional_whole("original_max_position_embeddings", 1, MAX_POSITIONS)
        values["original_max_position"] = original or max_positions
    if rope_type == "llama3":
        values["low_freq_factor"] = rope.number("low_freq_factor", 0.0, 1e6)
        values["high_freq_factor"] = rope.number("high_freq_factor", 0.0, 1e6)
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            raise rope.refuse("high_freq_factor", values["high_freq_factor"], "must be above low_freq_factor")
    if rope_type == "yarn":
        values.update(_yarn(rope, max_positions / values["original_max_position"]))
        if theta == 1.0:
            raise rope.refuse("rope_theta", theta, "must not be 1 with yarn")
    return RotaryConfig(type=cast(RotaryType, rope_type), theta=theta, dim=dim, **values)


def _yarn(rope: _Fields, implied_factor: float) -> dict[str, Any]:
    """YaRN's own values (Peng et al. 2023) with transformers' treatment of null and missing entries."""
    factor = implied_factor if rope.get("factor") is None else rope.number("factor", 0.0, 1e6)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = (
        rope.number(name, 0.0, 1e6) if rope.get(name) else None for name in ("mscale", "mscale_all_dim")
    )
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor", 0.0, 1e6)
    elif mscale is not None and mscale_all_dim is not None:
        attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    else:
        attention_factor = magnitude(1.0)
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": rope.number("beta_fast", 0.0, 1e6) if rope.get("beta_fast") else 32.0,
        "beta_slow": rope.number("beta_slow", 0.0, 1e6) if rope.get("beta_slow") else 1.0,
        "truncate": rope.flag("truncate") if "truncate" in rope.entries else True,
    }


def _layer_rotary(family: Family, fields: _Fields, num_layers: int) -> tuple[bool, ...]:
    if not family.has_no_rope_layers:
        return (True,) * num_layers
    listed = fields.get("no_rope_layers")
    if listed is None:
        interval = fields.whole("no_rope_layer_interval", 1, MAX_LAYERS)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(listed, list) or len(listed) < num_layers or not all(flag in (0, 1) for flag in listed):
        raise fields.refuse("no_rope_layers", listed, f"must list 0 or 1 for each of the {num_layers} layers")
    return tuple(bool(flag) for flag in listed[:num_layers])


def _layer_windows(
    family: Family, fields: _Fields, num_layers: int, layer_rotary: tuple[bool, ...]
) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * num_layers
    if family.windows == "never":
        return full
    window = fields.optional_whole("sliding_window", 1, MAX_POSITIONS)
    if family.windows == "every layer":
        return (window,) * num_layers
    enabled = fields.flag("use_sliding_window")
    if family.windows == "from max_window_layers" and not enabled:
        window = None
    layer_types = fields.entries.get("layer_types")
    if layer_types is None:
        if window is None or not enabled:
            return full
        if family.windows == "layers without rotary":
            return tuple(None if rotates else window for rotates in layer_rotary)
        first = fields.whole("max_window_layers", 0, 2**31)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    allowed = ("full_attention", "sliding_attention")
    if (
        not isinstance(layer_types, list)
        or len(layer_types) < num_layers
        or not all(kind in allowed for kind in layer_types)
    ):
        rule = f"must list {' or '.join(allowed)} for each of the {num_layers} layers"
        raise fields.refuse("layer_types", layer_types, rule)
    if window is None and "sliding_attention" in layer_types[:num_layers]:
        raise fields.refuse("layer_types", layer_types, "sliding_attention needs sliding_window, which is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types[:num_layers])


def _bias(rule: BiasRule, fields: _Fields) -> bool:
    return rule == "always" or (rule == "attention_bias" and fields.flag("attention_bias"))


def _activation(fields: _Fields) -> Literal["silu", "gelu", "gelu_pytorch_tanh"]:
    name = fields.get("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise fields.refuse("hidden_act", name, f"must be one of {', '.join(ACTIVATIONS)}")
    return cast(Literal["silu", "gelu", "gelu_pytorch_tanh"], ACTIVATIONS[name])


def _dtype(entries: Mapping[str, Any], source: str) -> str:
    """A configuration without a dtype predates the entry, when checkpoints were float32."""
    value = entries.get("dtype") or entries.get("torch_dtype") or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise ModelError(f"{source}: dtype is {value!r}, but must be one of {', '.join(DTYPES)}.")
    return cast(str, name)


def _bos_token_id(fields: _Fields, generation: Mapping[str, Any], vocab_size: int) -> int | None:
    ids = _token_ids("bos_token_id", fields, [fields.entries, generation], vocab_size)
    return ids[0] if ids else None


def _eos_token_ids(fields: _Fields, generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    return _token_ids("eos_token_id", fields, [fields.entries, generation], vocab_size)


def _token_ids(name: str, fields: _Fields, sources: list[Mapping[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """Ids of config.json first, then those only generation_config.json has; the family's default if neither names any.

    A default outside the vocabulary belongs to the family's full-size models and is left out.
    """
    given = [entries[name] for entries in sources if name in entries]
    if not given:
        default = fields.defaults.get(name)
        return () if default is None or default >= vocab_size else (default,)
    ids: dict[int, None] = {}
    for value in given:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise fields.refuse(name, value, f"must hold token ids from 0 to {vocab_size - 1}")
            ids[token] = None
    return tuple(ids)
