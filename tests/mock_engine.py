"""An engine process without a model, run in place of the real one:
real scheduler, sockets and threads, made-up tokens.

What it says is a function of the prompt and the position, and some prompts make it fail in a given way.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from minivllm.config import CacheConfig, EngineArgs, SchedulerConfig
from minivllm.engine.core import EngineCore
from minivllm.engine_process import client
from minivllm.errors import ConfigError, ModelError
from minivllm.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.simulation.executor import SimulatedExecutor, simulated_config

COMMAND = (sys.executable, "-P", str(Path(__file__)))
VOCAB_SIZE, EOS = 1000, 1
RAISE, HANG, CRASH = 990, 991, 992
"""Prompts that begin with one of these make the step fail."""


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What the engine says after a prompt, greedy or not."""
    return [token_at(prompt[0], len(prompt) + index) for index in range(count)]


def token_at(first: int, position: int) -> int:
    return 2 + (first * 7919 + position * 104729) % (VOCAB_SIZE - 20)


@dataclass
class DecoderStandIn:
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (EOS,)


class MockWorker:
    """The token of a request depends on its first token and its length."""

    def __init__(self, seconds_per_step: float) -> None:
        self._seconds_per_step = seconds_per_step
        self._requests: dict[str, list[int]] = {}

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.num_scheduled_tokens:
            time.sleep(self._seconds_per_step)
        for request_id in step.finished_request_ids:
            self._requests.pop(request_id, None)
        for new in step.new_requests:
            request = new.request
            first = request.prompt_token_ids[0]
            if first == RAISE:
                raise ValueError("the model has a fever")
            if first == HANG:
                time.sleep(1000)
            if first == CRASH:
                os.kill(os.getpid(), signal.SIGSEGV)
            # first token, known tokens, computed tokens
            self._requests[request.request_id] = [
                first,
                len(request.prompt_token_ids),
                new.num_computed_tokens,
            ]
        for cached in step.cached_requests:
            self._requests[cached.request_id][2] = cached.num_computed_tokens
        output = ModelRunnerOutput()
        for request_id, count in step.num_scheduled_tokens.items():
            state = self._requests[request_id]
            state[2] += count
            if state[2] == state[1]:
                output.sampled_token_ids[request_id] = [token_at(state[0], state[1])]
                state[1] += 1
        return output


def load_core(args: EngineArgs, seat: None = None, number: int = 0) -> tuple[EngineCore, DecoderStandIn]:
    """model: "mock", or "mock:0.01" for steps of 10 ms, or the way in which loading fails."""
    kind, _, seconds = args.model.partition(":")
    if kind == "no-config":
        raise ConfigError("max_model_len is 1, but must be 2.")
    if kind == "no-model":
        raise ModelError("There is no such model.")
    if kind == "bug":
        raise KeyError("lm_head")
    if kind == "exit":
        os._exit(7)
    config = simulated_config(
        SchedulerConfig(
            max_num_seqs=args.max_num_seqs or 16,
            max_num_batched_tokens=args.max_num_batched_tokens or 256,
            max_model_len=args.max_model_len or 256,
        ),
        model=args.model,
        model_path=str(Path(__file__).parent),
        seed=args.seed,
        cache=CacheConfig(block_size=args.block_size or 16),
    )
    run = MockWorker(float(seconds or 0)).run
    executor = SimulatedExecutor(config, run, args.num_gpu_blocks_override or 100, VOCAB_SIZE)
    return EngineCore(config, executor), DecoderStandIn()


if __name__ == "__main__":
    from minivllm.engine_process import process

    client.load_core = load_core  # type: ignore[assignment]
    process.main()
