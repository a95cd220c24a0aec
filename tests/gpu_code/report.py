"""What was compiled: faults, and the table that is kept beside this file. Needs no PyTorch."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "kernels.txt"
NAME_LENGTH = 70

LIBRARY_CALLS = {
    "extern_kernels.addmm",  # cuBLAS
    "extern_kernels.bmm",
    "extern_kernels.mm",
    "extern_kernels._scaled_mm",  # of float8
    "extern_kernels._grouped_mm",  # of experts: CUTLASS
    "torch.ops.aten.topk.default",  # the experts of a token: Inductor knows no way of its own
}
"""What regions leave to libraries on purpose.
Any other operator that Inductor generates no code for is a fault."""


@dataclass(frozen=True)
class Configuration:
    """One kernel as Triton compiled it with one size of its blocks; the GPU chooses between several by time.

    kernel: its name. registers: of a thread.
    stack: bytes of a thread, for registers that are spilled. shared: bytes of a block.
    """

    kernel: str
    warps: int
    registers: int
    stack: int
    shared: int


@dataclass
class RegionReport:
    """What a region became. shape: the model or vocabulary that it was compiled for. error: why it did not
    compile. launches: kernel -> how often a call of the region launches it. library: operators left to
    libraries, and how often. warnings: while it was compiled, which a start would show."""

    shape: str
    region: str
    error: str = ""
    launches: dict[str, int] = field(default_factory=dict)
    library: dict[str, int] = field(default_factory=dict)
    configurations: list[Configuration] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.shape}: {self.region}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RegionReport:
        configurations = [Configuration(**one) for one in values.pop("configurations")]
        return cls(**values, configurations=configurations)


def read_wrapper(code: str) -> tuple[dict[str, int], dict[str, int]]:
    """(launches, library calls) of the Python that Inductor writes around the kernels of a graph."""
    launches = Counter(re.findall(r"^\s+(\w+)\.run\(", code, re.MULTILINE))
    library = Counter(
        re.findall(
            r"^\s+(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(", code, re.MULTILINE
        )
    )
    return dict(launches), dict(library)


def faults(report: RegionReport) -> list[str]:
    """Sentences about what must not be. One configuration may spill where another one does not: Inductor
    takes none that spills more than 16 registers, unless all do."""
    if report.error:
        return [f"{report.name} does not compile: {report.error}"]
    found = []
    for kernel in report.launches:
        spilled = [one.stack for one in report.configurations if one.kernel == kernel]
        if not spilled:
            found.append(f"{report.name}: {kernel} is launched, but no compilation was seen.")
        elif min(spilled):
            found.append(
                f"{report.name}: {kernel} spills {min(spilled)} bytes a thread in every configuration."
            )
    found += [
        f"{report.name}: {operator} is left to PyTorch, which launches it by itself."
        for operator in report.library
        if operator not in LIBRARY_CALLS
    ]
    return found + [f"{report.name} warns: {text}" for text in report.warnings]


def tables(reports: Iterable[RegionReport]) -> dict[str, str]:
    """Shape -> its part of the table: a line for each region, and below it one for each of its kernels."""
    lines: dict[str, list[str]] = {}
    for report in reports:
        own = lines.setdefault(report.shape, [])
        own.append(f"{report.region}: {_counts(report)}")
        own += [
            f"    {_kernel_line(name, count, report.configurations)}"
            for name, count in report.launches.items()
        ]
    return {shape: "\n".join(own) for shape, own in lines.items()}


def join(parts: Mapping[str, str], versions: str) -> str:
    """The whole table."""
    head = (
        "# Written by python -m tests.gpu_code --write: kernels of each region, for an H200. Ranges are over "
        "the\n"
        f"# configurations that the GPU chooses between.\n# {versions}\n"
    )
    return head + "".join(f"\n## {shape}\n{part}\n" for shape, part in parts.items())


def split(table: str) -> tuple[dict[str, str], str]:
    """What ``join`` was given; of nothing, nothing."""
    head, *parts = table.split("\n\n## ")
    named = [part.rstrip("\n").split("\n", 1) for part in parts]
    return {shape: text for shape, text in named}, head.rpartition("# ")[2].strip()


def _counts(report: RegionReport) -> str:
    if report.error:
        return "does not compile"
    launches = _number(sum(report.launches.values()), "launch")
    return ", ".join([launches, *(f"{count} {name}" for name, count in sorted(report.library.items()))])


def _kernel_line(kernel: str, count: int, configurations: Sequence[Configuration]) -> str:
    own = [one for one in configurations if one.kernel == kernel]
    facts = [_number(count, "launch"), _number(len(own), "configuration")]
    for name in ("warps", "registers", "shared"):
        values = [getattr(one, name) for one in own]
        facts.append(f"{name} {_range(values)}")
    if any(one.stack for one in own):
        facts.append(f"stack {_range([one.stack for one in own])}")
    return f"{_short(kernel)}: {', '.join(facts)}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low}-{high}"


def _number(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count} {noun if count == 1 else plural}"


def _short(kernel: str) -> str:
    """Without its number, which changes where a kernel before it comes or goes;
    and not the whole list of operators."""
    name = kernel.rpartition("_")[0]
    return name if len(name) < NAME_LENGTH else f"{name[: NAME_LENGTH - 2]}.."


def differences(old: str, new: str) -> list[str]:
    """Lines of the table that are other ones now, with two lines around them."""
    return list(
        difflib.unified_diff(old.splitlines(), new.splitlines(), "kernels.txt", "compiled now", "", "", 2, "")
    )
