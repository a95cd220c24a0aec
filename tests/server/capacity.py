"""How many streamed tokens per second the API process can serve when the model costs nothing.

The engine process is the mock of tests/mock_engine.py (real scheduler, sockets and threads, made-up tokens),
the load comes from a third process. Besides the rate on the clock it tells the tokens per second of CPU time
of the API process alone, which does not depend on what else the machine does.

As a program: ``python -m tests.server.capacity --streams 32 --tokens 256``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from minivllm.bench.reports.report import read_report
from minivllm.config import EngineArgs
from minivllm.engine_process.connection import EngineConnection
from minivllm.engine_process.process_clients import AsyncProcessClient
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.mock_engine import COMMAND, VOCAB_SIZE
from tests.model_families import save_word_tokenizer
from tests.server.serving import serve_in_thread


@dataclass(frozen=True)
class Capacity:
    """num_tokens: streamed by all requests. seconds: on the clock. cpu_seconds: of the API process."""

    num_tokens: int
    seconds: float
    cpu_seconds: float

    def __str__(self) -> str:
        rate, per_cpu = self.num_tokens / self.seconds, self.num_tokens / self.cpu_seconds
        return (
            f"{self.num_tokens:,} tokens: {rate:,.0f} tok/s, {per_cpu:,.0f} per CPU second of the API process"
        )


def measure(num_requests: int, num_streams: int, num_tokens: int, prompt_tokens: int = 16) -> Capacity:
    """Serve ``num_requests`` streams of ``num_tokens``, ``num_streams`` at a time."""
    length = prompt_tokens + num_tokens + 1
    args = EngineArgs(
        model="mock",
        max_num_seqs=num_streams,
        max_model_len=length,
        max_num_batched_tokens=max(256, num_streams * 4),
        num_gpu_blocks_override=num_streams * (length // 16 + 2),
    )
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(save_word_tokenizer(Path(directory)))
        report = Path(directory) / "report.json"

        def make_engine() -> AsyncLLM:
            return AsyncLLM(AsyncProcessClient(EngineConnection(args, COMMAND)), tokenizer)

        with serve_in_thread(make_engine) as server:
            command = [sys.executable, "-m", "minivllm.cli.main", "bench", "serve", "--url", server.url]
            command += ["--workload", f"fixed:{num_requests}:{prompt_tokens}:{num_tokens}"]
            # Prompts below the ids with which the mock is told to fail.
            command += [
                "--concurrency",
                str(num_streams),
                "--vocab-size",
                str(VOCAB_SIZE - 20),
                "--json",
                str(report),
            ]
            cpu_start = time.process_time()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            cpu_seconds = time.process_time() - cpu_start
        found = read_report(report)
    figures = {one.metric: one.samples for one in found.measurements}
    assert figures["errors"] == [0.0], found.notes
    seconds = found.configuration["seconds"]
    return Capacity(round(figures["output"][0] * seconds), seconds, cpu_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    print(measure(options.requests, options.streams, options.tokens))


if __name__ == "__main__":
    main()
