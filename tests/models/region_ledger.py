"""The ledger of compiled regions:
which regions every kind of model has in every layout, and the graph of each.

``python -m tests.models.region_ledger --write`` writes ``regions.json``; ``test_region_ledger.py`` compares,
and so does ``--check``, which needs no pytest. Graphs are compared with the version of PyTorch that the ledger
was written with; names of regions, their variants and their number with every version.
Nothing is compiled and nothing is generated: an engine is started whose compiler only takes note of what it
is asked for, with the device policy of a plain CPU, so that every machine finds the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from minivllm import LLM, EngineArgs
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.packaged.region_packages import export_region
from minivllm.compilation.regions import Region
from minivllm.device.policy import DevicePolicy
from minivllm.simulation.ranks import lockstep_workers, virtual_llm
from minivllm.worker.worker import Worker
from tests.model_families import save_tiny_model
from tests.spec_decode.eagle_heads import random_head

LEDGER = Path(__file__).with_name("regions.json")
TORCH = ".".join(torch.__version__.split(".")[:2])
"""Graphs are those of one minor version of PyTorch."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}
FAMILIES = ("llama", "gemma3", "olmo2", "qwen3-moe", "deepseek-v2", "lfm2", "qwen3-next")
"""One of each kind of layer: plain, windows and norms on both sides, norms over all heads, experts,
latents, states."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"moe_intermediate_size": 64},
    "deepseek-v2": {"moe_intermediate_size": 64},
    "deepseek-v3": {"moe_intermediate_size": 64},
    "glm4-moe": {"moe_intermediate_size": 64},
    "qwen3-next": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
"""What makes the layers of a family divisible by two."""
VARIANTS: dict[str, dict[str, Any]] = {
    "TP 2 and PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "LoRA": {"enable_lora": True, "max_lora_rank": 8},
    "int8": {"quantization": "int8"},
    "early exit": {
        "speculative_config": {"method": "early_exit", "num_layers": 1, "num_speculative_tokens": 2}
    },
    "EAGLE": {"head": "eagle"},
    "EAGLE-3": {"head": "eagle3"},
    "by transformers": {"model_impl": "transformers"},
}
"""Of the first family. head: version of an EAGLE head."""
MTP: dict[str, Any] = {
    "load_format": "dummy",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
}
HEADS: dict[str, dict[str, Any]] = {"MTP": MTP, "MTP, TP 2": {**MTP, "tensor_parallel_size": 2}}
"""Of families whose checkpoints hold heads."""
ACROSS_LAYERS = ("gemma4-small",)
"""Families whose layers read what other layers made, so that stages cannot divide them."""
WITH_HEADS = ("glm4-moe", "deepseek-v3")
SHARED_EXPERTS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
"""Of the family with experts: engines in lockstep."""


class Recorder(RegionCompiler):
    """Hands out regions as they are, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(enabled=True, single_rows=True)
        self.regions: list[Region] = []

    def _make(self, region: Region) -> Callable:
        self.regions.append(region)
        return region.function


def canonical_graph(region: Region) -> str:
    """The exported graph as text that no order of arguments and no name changes: inputs are numbered by their
    first use, and those that nothing reads are left out."""
    graph = export_region(region, {}).graph
    names: dict[torch.fx.Node, str] = {}
    lines: list[str] = []

    def shown(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            if value not in names:
                tensor = value.meta.get("val")
                shape = [size if isinstance(size, int) else "*" for size in getattr(tensor, "shape", ())]
                names[value] = f"in{len(names)}"
                lines.append(f"{names[value]}: {getattr(tensor, 'dtype', None)} {shape}")
            return names[value]
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(shown, value))})"
        return repr(value)

    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        args = [shown(value) for value in node.args] + [
            f"{key}={shown(one)}" for key, one in node.kwargs.items()
        ]
        if node.op == "output":
            lines.append(f"output {args}")
            continue
        names.setdefault(node, f"v{len(names)}")
        lines.append(f"{names[node]} = {node.target}({', '.join(args)})")
    return "\n".join(lines)


def described(region: Region) -> str:
    """Name, variants for numbers of rows, and a digest of the graph."""
    variants = "".join(f" +{rows}" for rows in ("single", "few") if region.has_code_for(rows))
    digest = hashlib.sha256(canonical_graph(region).encode()).hexdigest()[:12]
    return f"{region.name}{variants} {digest}"


@contextmanager
def recorded(arguments: dict[str, Any]) -> Iterator[list[Recorder]]:
    """The recorders of all workers of an engine, or of engines in lockstep, in order of rank."""
    recorders: dict[Worker, Recorder] = {}

    def make(worker: Worker) -> Recorder:
        return recorders.setdefault(worker, Recorder())

    policy = mock.patch.object(DevicePolicy, "of", lambda device: DevicePolicy(type="cpu"))
    with mock.patch.object(Worker, "_make_compiler", make), policy:
        if arguments.get("enable_expert_parallel"):
            yield [recorders[worker] for worker in lockstep_workers(EngineArgs(**arguments))]
            return
        with virtual_llm(**arguments) as llm:
            assert isinstance(llm, LLM)
            yield list(recorders.values())


def settings_of(model: Path, **settings: Any) -> dict[str, Any]:
    """Engine arguments for a small engine of this model."""
    return {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "sdpa",
        "block_size": 8,
        "max_model_len": 64,
        "max_num_seqs": 12,
        "num_gpu_blocks_override": 24,
        "compile_in_background": False,
        **settings,
    }


def regions_of(model: Path, **settings: Any) -> list[dict[str, int]]:
    """Of each rank: region -> how often it was asked for, which is how often equal ones are compiled."""
    arguments = settings_of(model, **settings)
    with tempfile.TemporaryDirectory() as directory:
        if version := arguments.pop("head", None):
            head = random_head(Path(directory) / "head", version)
            drafting = {"method": version, "model": str(head), "num_speculative_tokens": 2}
            arguments["speculative_config"] = drafting
        EngineArgs(**arguments)
        with recorded(arguments) as recorders:
            return [dict(sorted(Counter(map(described, one.regions)).items())) for one in recorders]


def comparable(ranks: list[dict[str, int]], version: str) -> list[dict[str, int]]:
    """Of the regions of each rank what must be equal with this version of PyTorch and with that of the ledger."""
    if version == TORCH:
        return ranks
    return [
        dict(Counter(name.rpartition(" ")[0] for name, count in one.items() for _ in range(count)))
        for one in ranks
    ]


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """(family, what is special, engine arguments)."""
    found = [(family, name, settings) for family in FAMILIES for name, settings in LAYOUTS.items()]
    found += [(family, name, LAYOUTS[name]) for family in ACROSS_LAYERS for name in ("alone", "TP 2")]
    found += [(FAMILIES[0], name, settings) for name, settings in VARIANTS.items()]
    found += [(family, name, settings) for family in WITH_HEADS for name, settings in HEADS.items()]
    return [*found, ("qwen3-moe", "EP 2", SHARED_EXPERTS)]


def main() -> None:
    """Write, check or print the ledger."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--check", action="store_true", help="exit status 1 if regions differ from the ledger"
    )
    parser.add_argument("--only", default="", help="cases whose name holds this")
    chosen = parser.parse_args()
    ledger: dict[str, Any] = {"torch": TORCH}
    with tempfile.TemporaryDirectory() as directory:
        for family, name, settings in cases():
            title = f"{family}, {name}"
            if chosen.only not in title:
                continue
            path = Path(directory) / family
            if not path.exists():
                save_tiny_model(path, family, SHAPES.get(family, {}))
            try:
                ledger[title] = regions_of(path, **settings)
            except Exception as error:
                print(f"{title}: {type(error).__name__}: {error}")
                raise
            print(family, name, [sum(one.values()) for one in ledger[title]], flush=True)
    text = json.dumps(ledger, indent=1, sort_keys=True) + "\n"
    if chosen.write:
        LEDGER.write_text(text, encoding="utf-8")
    elif not chosen.check:
        print(text)
    else:
        recorded_ones = json.loads(LEDGER.read_text(encoding="utf-8"))
        version = recorded_ones["torch"]
        other = [
            title
            for title, ranks in ledger.items()
            if title != "torch"
            and comparable(ranks, version) != comparable(recorded_ones.get(title, []), version)
        ]
        what = "Graphs and regions" if version == TORCH else "Names, variants and numbers of regions"
        print(f"{what} with PyTorch {TORCH}, and the ledger's with {version}: {len(other)} differ. {other}")
        sys.exit(bool(other))


if __name__ == "__main__":
    main()
