"""A frontend with an engine process and two workers, which says what it does: what processes are killed in.

``python -m tests.executor.frontend_program ARGUMENTS PHASE``: ARGUMENTS of the engine as JSON. PHASE: where
to wait for the end. Every line of its output is JSON: ``{"phase": …}``, or ``{"error": …, "time": …}`` for
every caller, with time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any

from torch import Tensor

from minivllm import AsyncLLM, BatchUpdate, EngineArgs, LogitsProcessor, SamplingParams
from minivllm.errors import EngineDeadError

PARAMS = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


class Phased(LogitsProcessor):
    """Made when everything else is ready: the last moment of a start, made longer. Changes nothing."""

    def __init__(self, vocab_size: int, device: Any) -> None:
        logging.getLogger("minivllm.phases").info("warm-up")
        time.sleep(0.2)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, update: BatchUpdate | None) -> None:
        """It keeps none."""

    def apply(self, logits: Tensor) -> Tensor:
        return logits


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class PhasesOfTheLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Reading the weights"):
            tell(phase="load")
        elif record.name == "minivllm.phases":
            tell(phase=message)


def failed(error: EngineDeadError) -> None:
    tell(error=str(error), time=time.monotonic())


async def stream(llm: AsyncLLM, first: int) -> None:
    prompt = {"prompt_token_ids": list(range(first, first + 180))}
    try:
        async for output in llm.generate(prompt, PARAMS):
            if len(output.outputs[0].token_ids) == 1 and first == 10:
                tell(phase="decode")
    except EngineDeadError as error:
        failed(error)


async def main(arguments: dict[str, Any], phase: str) -> None:
    package = logging.getLogger("minivllm")
    package.addHandler(PhasesOfTheLog())
    package.setLevel(logging.INFO)
    tell(phase="start")
    try:
        llm = AsyncLLM.from_args(EngineArgs(**arguments))
    except EngineDeadError as error:
        failed(error)
        return
    async with llm:
        if phase in ("prefill", "decode"):
            streams = [asyncio.create_task(stream(llm, first)) for first in (10, 20, 30)]
            await asyncio.sleep(0.05)  # of some seventy steps until the first token
            tell(phase="prefill")
            await asyncio.gather(*streams)
        if phase != "shutdown":
            tell(phase="idle")
            try:
                while True:
                    await llm.check_health()
                    await asyncio.sleep(0.01)
            except EngineDeadError as error:
                failed(error)
        tell(phase="shutdown")
    tell(phase="over")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2]))
