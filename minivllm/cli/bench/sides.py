"""The two sides of a comparison, each alive in a process of its own and asked in turn.

A side reads one JSON object per line, ``{"prompts": [[ids]], "new_tokens": n}``, generates greedily without stopping at
end-of-sequence ids, and answers ``{"seconds": s, "token_ids": [[ids]]}``. Its first line is ``{"ready": {...}}``.

    python -m minivllm.cli.bench.sides minivllm '{"model": "smollm2"}'
"""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from minivllm.errors import ConfigError, MinivllmError, ModelError

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, new tokens each) -> generated ids of each prompt."""

ENGINES = ("minivllm", "transformers")


def parse_side(text: str, model: str, dtype: str) -> tuple[str, dict[str, Any]]:
    """ "minivllm,enable_prefix_caching=false" -> engine and its arguments. Raises ConfigError for an unknown engine."""
    engine, *pairs = text.split(",")
    if engine not in ENGINES:
        raise ConfigError(f"{engine!r} cannot be measured; known are: {', '.join(ENGINES)}.")
    arguments: dict[str, Any] = {"model": model, "dtype": dtype}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"{pair!r} must have the form argument=value.")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    if engine == "transformers" and set(arguments) - {"model", "dtype"}:
        raise ConfigError("The transformers side takes no further arguments.")
    return engine, arguments


class Side:
    """A running side process. Use as a context manager."""

    def __init__(self, name: str, engine: str, arguments: dict[str, Any]) -> None:
        """Raises ConfigError if the engine is not installed, ModelError if it does not start."""
        if importlib.util.find_spec(engine) is None:
            raise ConfigError(f"{engine} is not installed: pip install {engine}, or leave it out of --vs.")
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minivllm.cli.bench.sides", engine, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout
        self._messages: list[str] = []
        # A pipe that nobody reads fills up and stops the process.
        self._reader = threading.Thread(target=self._messages.extend, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        self.ready: dict[str, Any] = self._receive()["ready"]

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Generate; returns {"seconds", "token_ids", "peak_bytes"}."""
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._stdin, flush=True)
        return self._receive()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _receive(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            self._process.wait()
            self._reader.join(timeout=5)
            last = next((text.strip() for text in reversed(self._messages) if text.strip()), "no message")
            raise ModelError(f"{self.name} stopped: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve_minivllm(arguments: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load our engine. Returns how to generate, and facts about what was loaded."""
    from minivllm.config import EngineArgs
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.sampling_params import OutputKind, SamplingParams

    engine = LLMEngine.from_args(EngineArgs.from_kwargs(**arguments))

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
        )
        ids = [engine.add_request(None, {"prompt_token_ids": prompt}, params) for prompt in prompts]
        done: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] = list(output.outputs[0].token_ids)
        return [done[request_id] for request_id in ids]

    config = engine.client.config
    return generate, {"dtype": config.dtype, "device": config.device, "vocab_size": engine.client.model_vocab_size}


def serve_transformers(arguments: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load the same weights into transformers' generate."""
    import torch
    from transformers import AutoModelForCausalLM

    from minivllm.config import EngineArgs
    from minivllm.engine.resolve import resolve

    config, decoder = resolve(EngineArgs.from_kwargs(**arguments))
    directory, _, file = config.model_path.rpartition("/")
    source = {"gguf_file": file} if file.endswith(".gguf") else {}
    model = AutoModelForCausalLM.from_pretrained(
        directory if source else config.model_path, dtype=getattr(torch, config.dtype), **source
    )
    model = model.eval()
    torch.nn.Module.to(model, config.device)
    model.generation_config.eos_token_id = None
    pad = model.generation_config.pad_token_id or 0

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=config.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=pad,
            )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    return generate, {"dtype": config.dtype, "device": config.device, "vocab_size": decoder.vocab_size}


def main() -> None:
    """Serve one side on standard input and output until the input ends."""
    engine, arguments = sys.argv[1], json.loads(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr
    try:
        generate, facts = (serve_minivllm if engine == "minivllm" else serve_transformers)(arguments)
    except MinivllmError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(json.dumps({"ready": facts}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        started = time.perf_counter()
        token_ids = generate(task["prompts"], task["new_tokens"])
        seconds = time.perf_counter() - started
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        print(json.dumps({"seconds": seconds, "token_ids": token_ids, "peak_bytes": peak}), file=answers, flush=True)


if __name__ == "__main__":
    main()
