"""The table of rooms and their sizes in README.md. Run this file to bring it up to date."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- code map -->", "<!-- end of code map -->"

ROOMS = {
    "minivllm/*.py": "the vocabulary: configuration, sampling parameters, messages, requests, errors",
    "minivllm/scheduler": "how many tokens for whom: queues, budget, chunks, preemption, the end of a request",
    "minivllm/kv_cache": "block pool, LRU free queue, block hashes, prefix cache",
    "minivllm/engine": "`EngineCore.step()`, its own process, the clients",
    "minivllm/executor": "where workers live",
    "minivllm/worker": "persistent batch, step inputs, attention backends, compiled regions, graphs, sampler",
    "minivllm/models": "one config-driven decoder, families, safetensors and GGUF, fetching",
    "minivllm/quantization": "8 and 4 bits, fp8; GGUF, AWQ and GPTQ weights as they are",
    "minivllm/lora": "many adapters in one batch",
    "minivllm/spec_decode": "drafters, verification, how many drafts pay",
    "minivllm/structured_output": "grammars that mask the next token",
    "minivllm/frontend": "`LLM`, `AsyncLLM`; tokenizer, detokenizer, stop strings, beam search",
    "minivllm/server": "the OpenAI-compatible server: wire format, admission, streams, tool calls",
    "minivllm/metrics": "Prometheus metrics, a dashboard for them, the console's status line",
    "minivllm/cli": "`chat`, `generate`, `serve`, `bench`, `pull`, `env`, `trace` and their terminal",
    "kernels_triton_free": "functions of tensors: paged FlexAttention, quantised products, LoRA, sampling, …",
}


def count_lines() -> dict[str, int]:
    """Lines of Python in every room of the table."""
    counts = {}
    for room in ROOMS:
        files = ROOT.glob(room) if room.endswith(".py") else (ROOT / room).rglob("*.py")
        counts[room] = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    return counts


def code_map() -> str:
    """The table as Markdown."""
    rows = [f"| `{room}` | {lines:,} | {ROOMS[room]} |" for room, lines in count_lines().items()]
    return "\n".join(["| room | lines | holds |", "|---|---:|---|", *rows])


def update_readme() -> None:
    """Replace the table between the two markers."""
    path = ROOT / "README.md"
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{code_map()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    update_readme()
