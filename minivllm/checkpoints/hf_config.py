"""Read a model's configuration into ``DecoderConfig``:
config.json in either spelling, or a GGUF file's metadata.

transformers 4 wrote ``rope_theta``, ``rope_scaling`` and ``torch_dtype``; transformers 5 writes
``rope_parameters`` and ``dtype``. Both are normalised here, once, with the defaults and the rotary semantics
of transformers; GGUF metadata is first translated into the same entries. Nothing of transformers is imported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.checkpoints.gguf_names.config import read_gguf_config
from minivllm.errors import ModelError
from minivllm.families.entries import MAX_VOCAB_SIZE, MAX_WIDTH, Entries
from minivllm.families.makers.registry import find_family
from minivllm.families.rotary import usable_positions
from minivllm.gguf.gguf_file import find_gguf
from minivllm.specs.decoder import DecoderConfig
from minivllm.weights.quantization_config import read_quantization

logger = logging.getLogger(__name__)

GENERATION_NAME = "generation_config.json"
TokenIds = tuple[str, Mapping[str, Any]]
"""A file's name and its entries."""
MAX_CONFIG_BYTES = 64 * 1024 * 1024

DTYPES = ("float32", "bfloat16", "float16")
_AS_FLOAT32 = ("auto", "float64")


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
        generation_path = directory / GENERATION_NAME
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


def build_decoder_config(
    entries: Mapping[str, Any], generation: Mapping[str, Any], source: str
) -> DecoderConfig:
    """Normalise config.json's entries (and generation_config.json's);
    ``source`` is the file named in errors."""
    architectures = entries.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"{source}: architectures is {architectures!r}, but must be a list of names.")
    family = find_family(architectures, entries.get("model_type"), source)
    if family.rewrite_config is not None:
        entries = family.rewrite_config(entries)
    fields = Entries(entries, family.defaults, source)
    described = family.describe(fields)
    vocab_size = fields.whole("vocab_size", 1, MAX_VOCAB_SIZE)
    files = [(source, entries), (str(Path(source).with_name(GENERATION_NAME)), generation)]

    def token_ids(name: str) -> tuple[int, ...]:
        return read_token_ids(name, files, family.defaults.get(name), vocab_size)

    return DecoderConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=fields.whole("hidden_size", 1, MAX_WIDTH),
        max_position_embeddings=usable_positions(fields.max_positions, described.rotary),
        rms_norm_eps=described.norm_eps,
        layers=described.layers,
        rotary=described.rotary,
        embedding_scale=described.embedding_scale,
        logits_scale=described.logits_scale,
        logits_soft_cap=described.logits_soft_cap,
        per_layer=described.per_layer,
        placeholder_ids=described.placeholder_ids,
        placeholder_text_id=described.placeholder_text_id,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=read_dtype(entries, source),
        quantization=read_quantization(entries.get("quantization_config"), source),
        bos_token_id=next(iter(token_ids("bos_token_id")), None),
        eos_token_ids=token_ids("eos_token_id"),
    )


def read_dtype(entries: Mapping[str, Any], source: str) -> str:
    """A configuration without a dtype, or with "auto", is read as float32,
    which holds the numbers of all types."""
    value = entries.get("dtype") or entries.get("torch_dtype") or "auto"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name == "float64":
        logger.warning("%s: dtype is float64, but models are computed in float32 at most.", source)
    if not isinstance(name, str) or name not in (*DTYPES, *_AS_FLOAT32):
        listed = ", ".join((*DTYPES, *_AS_FLOAT32))
        raise ModelError(f"{source}: dtype is {value!r}, but must be one of {listed}.")
    return "float32" if name in _AS_FLOAT32 else name


def read_token_ids(name: str, files: Sequence[TokenIds], default: Any, vocab_size: int) -> tuple[int, ...]:
    """The token ids that the entry ``name`` of any file holds, in order;
    those of ``default`` if no file has it.

    An id outside the vocabulary is left out, with a warning that names its file: no model can generate it. So
    is a default of that kind, which belongs to the family's full-size models. Raises ModelError for what is
    no id.
    """
    given = [(source, entries[name]) for source, entries in files if name in entries]
    ids: dict[int, None] = {}
    for source, value in given or [("", default)]:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int):
                raise Entries({}, {}, source).refuse(
                    name, value, "must hold token ids, which are whole numbers"
                )
            if 0 <= token < vocab_size:
                ids[token] = None
            elif source:
                logger.warning(
                    "%s: %s names %d, but the vocabulary has ids from 0 to %d: it is left out.",
                    source,
                    name,
                    token,
                    vocab_size - 1,
                )
    return tuple(ids)
