"""Kernel options of decode attention on a GPU: those tuned on this very device, else PyTorch's own.

FlexAttention's decode kernel reads K and V in blocks of BLOCK_N slots, splits every request's blocks among SPLIT_KV
thread blocks (flash decoding, Dao et al. 2023), and keeps num_stages blocks in flight. Which values read fastest
depends on the device, the head size and on how many requests times KV heads there are to fill it. ``minivllm bench
attention --tune`` finds out and keeps a table, which the next engine on that device reads.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
CHOICES: dict[str, tuple[int, ...]] = {
    "BLOCK_N": (16, 32, 64, 128),
    "SPLIT_KV": (1, 2, 4, 8, 16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}
"""Option -> values it may have."""

Positive = Annotated[int, msgspec.Meta(gt=0)]


class TunedCase(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest options of one shape. dtype: of K and V. group: query heads per KV head. context: tokens per request.

    gb_per_second, untuned_gb_per_second: K and V read, with these options and with PyTorch's own.
    """

    dtype: str
    head_dim: Positive
    batch_kv_heads: Positive
    group: Positive
    context: Positive
    page_size: Positive
    options: dict[str, int]
    gb_per_second: float
    untuned_gb_per_second: float

    @property
    def shape(self) -> tuple[object, ...]:
        """What a later measurement of the same replaces it by."""
        return self.dtype, self.head_dim, self.batch_kv_heads, self.group, self.context, self.page_size


class TunedTable(msgspec.Struct, frozen=True, kw_only=True):
    """What was tuned on one device."""

    schema_version: int
    device: str
    torch: str
    cases: list[TunedCase]


def table_path(device_name: str) -> Path:
    """Where the table of a device is kept: ``$MINIVLLM_HOME/decode_options``, else below ``~/.cache/minivllm``."""
    home = Path(os.environ.get("MINIVLLM_HOME") or Path.home() / ".cache" / "minivllm").expanduser()
    return home / "decode_options" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', device_name)}.json"


def read_table(device_name: str) -> TunedTable | None:
    """The table of this device; None, with a warning unless there is no file, if there is none that can be used."""
    path = table_path(device_name)
    try:
        table = msgspec.json.decode(path.read_bytes(), type=TunedTable)
        reason = _why_unusable(table, device_name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        table, reason = None, str(error)
    if reason is None:
        return table
    logger.warning(
        "The tuned options of decode attention in %s are ignored (%s): bench attention --tune writes them anew.",
        path,
        reason,
    )
    return None


def _why_unusable(table: TunedTable, device_name: str) -> str | None:
    if table.schema_version != SCHEMA_VERSION:
        return f"schema version {table.schema_version}, where {SCHEMA_VERSION} is read"
    if table.device != device_name:
        return f"it was tuned on a {table.device}"
    for case in table.cases:
        for name, value in case.options.items():
            if value not in CHOICES.get(name, ()):
                return f"{name} = {value} is none of the options that are tuned"
    return None


def add_to_table(device_name: str, cases: list[TunedCase]) -> Path:
    """Put cases into the device's table, in place of older ones of the same shape; whole or not at all.

    Returns its path. Raises OSError if it cannot be written.
    """
    path, known = table_path(device_name), read_table(device_name)
    by_shape = {case.shape: case for case in [*(known.cases if known else ()), *cases]}
    table = TunedTable(
        schema_version=SCHEMA_VERSION, device=device_name, torch=str(torch.__version__), cases=list(by_shape.values())
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as scratch:
        try:
            scratch.write(msgspec.json.format(msgspec.json.encode(table)) + b"\n")
            scratch.close()
            os.replace(scratch.name, path)
        except BaseException:
            os.unlink(scratch.name)
            raise
    return path


@dataclass(frozen=True)
class DecodeOptions:
    """The options of one device. origin: where they come from, in words; cases: what was tuned, if anything."""

    origin: str
    cases: tuple[TunedCase, ...] = ()

    @classmethod
    def of(cls, device: torch.device) -> DecodeOptions:
        """Those of a device; none on a CPU, where one compiled kernel serves every batch size."""
        if device.type != "cuda":
            return cls("none: on a CPU one kernel serves every batch")
        return cls.of_gpu(torch.cuda.get_device_name(device))

    @classmethod
    def of_gpu(cls, name: str) -> DecodeOptions:
        """Those of a GPU of this name. Until it is tuned, PyTorch chooses: blocks of 64 slots, two warps, one stage,
        two thread blocks per multiprocessor."""
        table = read_table(name)
        if table is None or not table.cases:
            return cls(f"not tuned on {name}: bench attention --tune measures what is fastest there")
        return cls(
            f"{len(table.cases)} cases tuned on {name} with torch {table.torch}, in {table_path(name)}",
            tuple(table.cases),
        )

    def choose(self, *, batch_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int) -> dict[str, int]:
        """Options for ``batch_kv_heads`` requests times KV heads: of the tuned case nearest to that, by ratio, and of
        equally near ones the longest context. None where nothing fits.

        Only cases of the same head_dim and dtype count, for these two decide what fits into a multiprocessor, and
        only kernel blocks that divide a KV block, since they must not reach into the next one.
        """
        fitting = [
            case
            for case in self.cases
            if (case.head_dim, case.dtype) == (head_dim, str(dtype).removeprefix("torch."))
            and block_size % case.options.get("BLOCK_N", 1) == 0
        ]
        if not fitting:
            return {}
        nearest = min(fitting, key=lambda case: (abs(math.log(case.batch_kv_heads / batch_kv_heads)), -case.context))
        return dict(nearest.options)
