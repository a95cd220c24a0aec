"""Generates and compiles the GPU code of all shapes.
Exit status 1: something is at fault, or the table is an old one.

    python -m tests.gpu_code [--write] [--only REGEX] [--jobs N] [--seconds N] [--keep FOLDER] [--is-current]

Needs PyTorch and the Triton that fits it, but no GPU: see README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.gpu_code import sources
from tests.gpu_code.report import TABLE, RegionReport, differences, faults, join, split, tables
from tests.gpu_code.shapes import parts


def compile_here(chosen: list[str], keep: Path | None) -> None:
    """Compile these parts in this process, and print a line of JSON for each region."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {name: f"{scratch}/{name}" for name in ("TRITON_CACHE_DIR", "MINIVLLM_HOME")}
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        from tests.gpu_code.pretend_gpu import Card, pretend_gpu

        pretend_gpu(Card())
        from tests.gpu_code.compile_regions import Recorder, compile_part

        recorder = Recorder(keep)
        for part in chosen:
            compile_part(recorder, part)
            while recorder.reports:
                print(json.dumps(recorder.reports.pop(0).to_json()), flush=True)


def compile_all(
    chosen: list[str], jobs: int, keep: Path | None, seconds: float
) -> tuple[list[RegionReport], bool]:
    """Compile these parts in as many processes at once, within so many seconds. Returns the regions in the
    order of the parts, and whether those are all. Raises RuntimeError if a process ends early."""
    command = [sys.executable, "-m", "tests.gpu_code", *(["--keep", str(keep)] if keep else []), "--here"]
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(min(jobs, len(chosen)))]
        children = [
            stack.enter_context(
                subprocess.Popen([*command, *chosen[job::jobs]], stdout=output, cwd=sources.ROOT)
            )
            for job, output in enumerate(outputs)
        ]
        is_complete = True
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                is_complete = False
        for child in children:
            if child.poll() is None:
                child.kill()
            elif child.returncode:
                raise RuntimeError(
                    f"A process that compiles has ended with status {child.returncode}: see above."
                )
        reports = []
        for output in outputs:
            output.seek(0)
            lines = output.read().splitlines(keepends=True)
            reports += [RegionReport.from_json(json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(reports, key=lambda report: chosen.index(report.shape)), is_complete


def versions() -> str:
    return ", ".join(
        f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in ("torch", "triton")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="parts to compile; other ones stay as they are"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="after which what is not compiled is left out"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the Python that Inductor writes")
    parser.add_argument(
        "--is-current", action="store_true", help="only tell whether sources have changed: status 1"
    )
    parser.add_argument("--here", nargs="+", metavar="PART", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.is_current:
        return 0 if sources.are_current() else 1
    if given.here:
        compile_here(given.here, given.keep)
        return 0
    started, digest = time.monotonic(), sources.digest(sources.source_files())
    chosen = [part for part in parts() if re.search(given.only, part)]
    if not chosen:
        parser.error(f"--only {given.only!r} matches none of: {', '.join(parts())}")
    keep = given.keep and given.keep.resolve()
    reports, is_complete = compile_all(chosen, given.jobs, keep, given.seconds)
    found = [fault for report in reports for fault in faults(report)]
    print(*found, sep="\n", end="\n" if found else "")
    kernels = sum(len(report.launches) for report in reports)
    print(
        f"{len(reports)} regions, {kernels} kernels, {len(found)} faults: {time.monotonic() - started:.0f} s."
    )
    if not is_complete:
        print(f"Cut off: {len({report.shape for report in reports})} of {len(chosen)} parts were begun.")
    elif given.write:
        write(tables(reports))
        if not given.only:
            sources.DIGEST.write_text(f"{digest}\n")
    else:
        found += compare(tables(reports))
    return 1 if found else 0


def kept_parts() -> dict[str, str]:
    """Those of the table that is kept, if it is one of these versions."""
    parts_of_table, of = split(TABLE.read_text() if TABLE.is_file() else "")
    return parts_of_table if of == versions() else {}


def write(compiled: dict[str, str]) -> None:
    """Put these parts into the table in place of those that it has of them."""
    merged = kept_parts() | compiled
    TABLE.write_text(join({part: merged[part] for part in parts() if part in merged}, versions()))


def compare(compiled: dict[str, str]) -> list[str]:
    """Print how these parts differ from those of the table.
    Of other versions there is none to compare with."""
    kept = kept_parts()
    if not kept:
        print(f"No table is kept for {versions()}.")
        return []
    own = {part: text for part, text in kept.items() if part in compiled}
    changed = differences(join(own, versions()), join(compiled, versions()))
    if changed:
        print(
            *changed, "", "The table has changed: python -m tests.gpu_code --write, and commit it.", sep="\n"
        )
    return changed


if __name__ == "__main__":
    sys.exit(main())
