"""How a frontend reaches an engine core. Here: in the same process, where a debugger steps from one to the other."""

from __future__ import annotations

from typing import Protocol

from minivllm.config import EngineArgs, EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.resolve import resolve
from minivllm.executor.uniproc import UniProcExecutor
from minivllm.messages import EngineOutput, EngineRequest, SchedulerStats


class EngineClient(Protocol):
    """What frontends use. model_vocab_size: width of the logits. eos_token_ids: all ids that end a sequence."""

    config: EngineConfig
    model_vocab_size: int
    eos_token_ids: tuple[int, ...]

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def get_outputs(self) -> list[EngineOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> SchedulerStats: ...

    def reset_prefix_cache(self) -> bool: ...

    def close(self) -> None: ...


class InProcessClient:
    """Runs one step of the core per ``get_outputs``."""

    def __init__(self, core: EngineCore, model_vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.config, self.core = core.config, core
        self.model_vocab_size, self.eos_token_ids = model_vocab_size, eos_token_ids

    def add_request(self, request: EngineRequest) -> None:
        self.core.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def get_outputs(self) -> list[EngineOutput]:
        """One step. An empty list means that nothing came out, not that nothing is left to do."""
        return self.core.step()

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        return self.core.stats()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def close(self) -> None:
        self.core.shutdown()


def make_client(args: EngineArgs) -> InProcessClient:
    """Load the model and start an engine core in this process. Raises ConfigError or ModelError."""
    config, decoder = resolve(args)
    core = EngineCore(config, UniProcExecutor(config, decoder))
    return InProcessClient(core, decoder.vocab_size, decoder.eos_token_ids)
