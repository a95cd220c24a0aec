"""From the names of a checkpoint to the parameters of a transformers model.

transformers renames tensors and merges some on the way (the matrices of all experts become one, for
instance); what it knows of that, by class of model, is asked of it. Files, formats and errors are those of
every other model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.checkpoints.checkpoint import (
    INDEX_NAME,
    Shape,
    check_tensors,
    dummy_weight,
    open_safetensors,
    stored_tensors,
)
from minivllm.errors import ModelError
from minivllm.weights.packed_weights import PackedWeights, StoredPart
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass
class _Source:
    """A tensor of the checkpoint, or the parts of a packed one: part -> (name in the file, file, header).

    pattern: of the converter that takes it; None if it is a parameter as it is.
    """

    name: str
    pattern: str | None
    parts: dict[str, tuple[str, Path, StoredPart]] = field(default_factory=dict)


class CheckpointNames:
    """Which tensors of a checkpoint make up which parameters of one model."""

    def __init__(self, model: PreTrainedModel, left_out: Sequence[str] = ()) -> None:
        """model: as transformers builds it, on any device. left_out: beginnings of names that checkpoints
        have and this model has not."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(model)
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._renamings: list[Any] = [one for one in transforms if not isinstance(one, WeightConverter)]
        self._model = model
        self._prefix = model.base_model_prefix
        self._state = dict(model.state_dict())
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        self.wants: Callable[[str], bool] = lambda name: True
        """Whether a parameter is to be read, of all that a checkpoint must hold."""
        buffers = {name for name, _ in model.named_non_persistent_buffers()}
        patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)rotary_emb\.inv_freq$"]
        self._ignored = [re.compile(pattern) for pattern in patterns] + [
            re.compile(re.escape(name) + "$") for name in buffers
        ]
        self._ignored += [re.compile("^" + re.escape(beginning)) for beginning in left_out]
        kept = {*(model._keep_in_fp32_modules_strict or ())}
        if model.dtype == torch.float16:
            kept |= {*(model._keep_in_fp32_modules or ())}
        in_words = [name.replace(".", r"\.").replace("*", "[^.]*") for name in kept]
        self._kept_wide = [re.compile(rf"(^|\.){words}(\.|$)") for words in in_words]

    @property
    def expected(self) -> dict[str, Shape]:
        """Parameter -> its shape, without those that are another one by another name."""
        return {name: tuple(tensor.shape) for name, tensor in self._state.items() if name not in self.tied}

    def dtype(self, name: str) -> torch.dtype:
        """What the parameter is computed in; some stay in float32 whatever the others are."""
        if any(pattern.search(name) for pattern in self._kept_wide):
            return torch.float32
        return self._state[name].dtype

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is known to be in checkpoints for nothing."""
        return name not in self._state and any(pattern.search(name) for pattern in self._ignored)

    def place(self, stored: str) -> tuple[str, str | None]:
        """(parameter, pattern of the converter that makes it, if any) for a tensor of the checkpoint."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(
            stored, self._renamings, self._converters, self._prefix, self._state
        )
        if name not in self._state and stored in self._state:
            return stored, None
        return name, pattern

    def knows(self, stored: str) -> bool:
        """Whether a tensor of a checkpoint is a parameter, or makes up one."""
        name, pattern = self.place(stored)
        return pattern is not None or name in self._state

    def converter(self, pattern: str) -> Any:
        """A converter of its own for one parameter."""
        return deepcopy(next(one for one in self._converters if pattern in one.source_patterns))

    def made_by(self, name: str, pattern: str) -> list[str]:
        """All parameters that the converter makes of what is placed under this name."""
        targets = self.converter(pattern).target_patterns
        return [name.replace(targets[0], target) for target in targets]

    def convert(
        self, name: str, sources: Sequence[tuple[_Source, Callable[[], Tensor]]]
    ) -> dict[str, Tensor]:
        """The parameters that the sources, in natural order, make up.
        Raises ModelError if they do not fit."""
        pattern = sources[0][0].pattern
        assert pattern is not None
        converter = self.converter(pattern)
        for source, read in sources:
            converter.add_tensor(name, source.name, source.pattern, read)
        try:
            made: dict[str, Any] = converter.convert(name, model=self._model, config=self._model.config)
        except Exception as error:  # whatever stacking raises for tensors that do not fit together
            raise ModelError(
                f"The tensors {sources[0][0].name!r} to {sources[-1][0].name!r} do not make up {name!r}: "
                f"{error}"
            ) from error
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def iterate_parameters(
    directory: Path, names: CheckpointNames, packed: PackedWeights | None
) -> Iterator[tuple[str, StoredWeight]]:
    """Yield (parameter, CPU tensor in its dtype) for exactly ``names.expected``; packed ones of linear layers
    as they are stored. A tensor may be a view of the mapped file.

    Raises ModelError, naming file and tensor, for a missing or broken file, a missing, unexpected or
    misshapen tensor; of tensors that are merged, shapes are checked when they are.
    """
    expected = names.expected
    places = _find_places(directory, names, packed)
    files = {path for sources in places.values() for one in sources for _, path, _ in one.parts.values()}
    with ExitStack() as stack:
        handles: dict[Path, Any] = {
            path: stack.enter_context(open_safetensors(path)) for path in sorted(files)
        }
        if packed is not None:
            _drop_empty_biases(places, expected, handles)
        found: dict[str, Shape] = {}
        file_of: dict[str, Path] = {}
        for name, sources in places.items():
            first = next(iter(sources[0].parts.values()))
            file_of[name] = first[1]
            if sources[0].pattern is not None:
                for target in names.made_by(name, sources[0].pattern):
                    found[target], file_of[target] = expected.get(target, ()), first[1]
            elif len(sources) > 1:
                raise ModelError(
                    f"{first[1]}: tensors {sources[0].name!r} and {sources[1].name!r} are both {name!r}."
                )
            elif "" in sources[0].parts:
                found[name] = first[2].shape
            else:
                assert packed is not None
                parts = {part: header for part, (_, _, header) in sources[0].parts.items()}
                found[name] = packed.shape(sources[0].name, parts)
        for name, source in names.tied.items():
            if name in found and source not in found:  # a tied pair may be stored under either name
                found[source], file_of[source] = found.pop(name), file_of[name]
                places[source] = places.pop(name)
            elif name in found:
                pair = [_read_plain(handles, places[one][0]) for one in (name, source)]
                if pair[0] is not None and pair[1] is not None and not torch.equal(pair[0], pair[1]):
                    raise ModelError(
                        f"{directory} stores {name!r} and {source!r} with different values, but its "
                        "configuration "
                        'ties them: give hf_overrides={"tie_word_embeddings": false} to use both.'
                    )
                del found[name], places[name]
        check_tensors(found, expected, file_of, directory)

        def read(name: str, source: _Source) -> StoredWeight:
            tensors = {
                part: handles[path].get_tensor(stored) for part, (stored, path, _) in source.parts.items()
            }
            if "" in tensors:
                value: Tensor = tensors[""].to(names.dtype(name))
                return value
            assert packed is not None
            return packed.assemble(source.name, tensors, names.dtype(name))

        def read_whole(name: str, source: _Source) -> Tensor:
            value = read(name, source)
            return value.restore(names.dtype(name)) if isinstance(value, QuantizedWeight) else value

        for name, sources in places.items():
            if not names.wants(name):
                continue
            if sources[0].pattern is None:
                yield name, read(name, sources[0])
                continue
            made = names.convert(name, [(source, partial(read_whole, name, source)) for source in sources])
            check_tensors(
                {target: tuple(value.shape) for target, value in made.items()},
                {target: expected[target] for target in made if target in expected},
                dict.fromkeys(made, file_of[name]),
                directory,
            )
            yield from made.items()


def _read_plain(handles: Mapping[Path, Any], source: _Source) -> Tensor | None:
    """The tensor as it is stored; None for one of several packed parts."""
    if "" not in source.parts:
        return None
    stored, path, _ = source.parts[""]
    tensor: Tensor = handles[path].get_tensor(stored)
    return tensor


def _find_places(
    directory: Path, names: CheckpointNames, packed: PackedWeights | None
) -> dict[str, list[_Source]]:
    """Parameter -> the tensors it is made of, in natural order: expert 10 follows expert 9."""
    from transformers.core_model_loading import dot_natural_key

    def is_used(stored: str) -> bool:
        return (packed is None or not packed.is_unused(stored)) and not names.is_ignored(
            names.place(stored)[0]
        )

    whole: dict[str, dict[str, tuple[str, Path, StoredPart]]] = {}
    for stored, (path, header, is_listed) in stored_tensors(directory, packed, is_used).items():
        if packed is not None and packed.is_unused(stored):
            continue
        weight, part = (packed.place(stored, stored) if packed is not None else None) or (stored, "")
        if not is_listed and not names.knows(weight):
            logger.warning("%s: tensor %r is left out: no weight, and not in %s.", path, stored, INDEX_NAME)
            continue
        whole.setdefault(weight, {})[part] = stored, path, header
    places: dict[str, list[_Source]] = {}
    for weight in sorted(whole, key=dot_natural_key):
        name, pattern = names.place(weight)
        if not names.is_ignored(name):
            places.setdefault(name, []).append(_Source(weight, pattern, whole[weight]))
    return places


def _drop_empty_biases(
    places: dict[str, list[_Source]], expected: Mapping[str, Shape], handles: Mapping[Path, Any]
) -> None:
    """GPTQ writers give every layer a bias, of zeros where the model has none.
    ModelError if there is more in one."""
    for name in [name for name in places if name.endswith(".bias") and name not in expected]:
        if places[name][0].pattern is None:
            [(stored, path, _)] = places.pop(name)[0].parts.values()
            if bool(handles[path].get_tensor(stored).any()):
                raise ModelError(f"{path}: {stored!r} is not zero, but the model has no such bias.")


def dummy_parameters(names: CheckpointNames, seed: int) -> Iterator[tuple[str, StoredWeight]]:
    """Random weights for all parameters, by ``dummy_weight``."""
    for name, shape in filter(lambda item: names.wants(item[0]), names.expected.items()):
        yield name, dummy_weight(name, shape, names.dtype(name), seed)
