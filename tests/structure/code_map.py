"""The table of packages in minivllm/README.md. Run this file to bring it up to date."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "minivllm" / "README.md"
BEGIN, END = "<!-- code map -->", "<!-- end of code map -->"

ORDER = (
    "minivllm",
    "minivllm/config",
    "minivllm/lang",
    "minivllm/frontend",
    "minivllm/processing",
    "minivllm/multimodal",
    "minivllm/tokenizer",
    "minivllm/stop_conditions",
    "minivllm/data_parallel",
    "minivllm/engine_process",
    "minivllm/startup",
    "minivllm/engine",
    "minivllm/scheduler",
    "minivllm/kv_cache",
    "minivllm/kv_transfer",
    "minivllm/executor",
    "minivllm/distributed",
    "minivllm/worker",
    "minivllm/batch",
    "minivllm/attention",
    "minivllm/device",
    "minivllm/specs",
    "minivllm/families",
    "minivllm/models",
    "minivllm/program",
    "minivllm/linear",
    "kernels_triton_free",
    "minivllm/compilation",
    "minivllm/graphs",
    "minivllm/sampling",
    "minivllm/spec_decode",
    "minivllm/structured_output",
    "minivllm/lora",
    "minivllm/checkpoints",
    "minivllm/weights",
    "minivllm/gguf",
    "minivllm/transformers_models",
    "minivllm/hub",
    "minivllm/plugins",
    "minivllm/server",
    "minivllm/metrics",
    "minivllm/profiling",
    "minivllm/cli",
    "minivllm/simulation",
    "minivllm/bench",
)
"""In the order in which a request passes them; folders inside a folder belong to it."""


def purpose(folder: str) -> str:
    """The first sentence of the package."""
    if folder == "minivllm":
        return "the vocabulary: configuration, sampling parameters, messages, requests, plug-ins, errors"
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("``", "`")
    return sentence[0].lower() + sentence[1:] if sentence[:2].istitle() else sentence


def code_map() -> str:
    """The table as Markdown."""
    rows = [f"| `{folder}` | {purpose(folder)} |" for folder in ORDER]
    return "\n".join(["| package | holds |", "|---|---|", *rows])


def update() -> None:
    """Replace the table between the two markers."""
    before, rest = TOUR.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    TOUR.write_text(f"{before}{BEGIN}\n{code_map()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    update()
