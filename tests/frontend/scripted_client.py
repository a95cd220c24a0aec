"""An engine client without a model:
each sequence gets the tokens a script says, as many per step as it says."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.config import EngineConfig, SchedulerConfig
from minivllm.messages import (
    EngineEvent,
    EngineOutput,
    EngineRequest,
    EventType,
    FinishReason,
    PositionLogprobs,
    SchedulerStats,
)
from minivllm.simulation.executor import simulated_config

EOS = 1


def engine_config(
    max_model_len: int = 64, policy: str = "fcfs", seed: int = 0, model_path: str = "/"
) -> EngineConfig:
    scheduler = SchedulerConfig(
        max_model_len=max_model_len, policy=policy, has_priorities=policy == "priority"
    )
    return simulated_config(scheduler, model="scripted", model_path=model_path, seed=seed)


def logprobs_at(token_id: int, num_alternatives: int) -> PositionLogprobs:
    """Made-up but recognisable: the token itself with rank 3, then the ids after it."""
    alternatives = [token_id + 1 + place for place in range(num_alternatives)]
    return PositionLogprobs(
        [token_id, *alternatives], [-0.5, *(-1.0 - place for place in range(num_alternatives))], 3
    )


class ScriptedClient:
    """Runs every request at once. ``script(request)`` gives its tokens, an exception for the whole engine, or
    an error text for that request. ``tokens_per_step`` more than 1 plays speculative decoding."""

    def __init__(
        self,
        script: Callable[[EngineRequest], list[int] | str],
        *,
        config: EngineConfig | None = None,
        vocab_size: int = 500,
        eos_token_ids: tuple[int, ...] = (EOS,),
        tokens_per_step: int = 1,
        fail_at_step: int | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self.config = config or engine_config()
        self.model_vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.requests: list[EngineRequest] = []
        self.running: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.closed = 0
        self.num_steps = 0
        self._script = script
        self._scripts: dict[str, list[int] | str] = {}
        self._num_given: dict[str, int] = {}
        self._tokens_per_step = tokens_per_step
        self._fail_at_step = fail_at_step
        self._failure = failure

    def add_request(self, request: EngineRequest) -> None:
        assert request.request_id not in self._num_given, "internal ids are unique"
        self.requests.append(request)
        self.running[request.request_id] = request
        self._scripts[request.request_id] = self._script(request)
        self._num_given[request.request_id] = 0

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def get_outputs(self) -> list[EngineOutput]:
        if self.num_steps == self._fail_at_step and self._failure is not None:
            raise self._failure
        self.num_steps += 1
        outputs = [self._advance(request) for request in list(self.running.values())]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.request_id]
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running=len(self.running), num_steps=self.num_steps)

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def close(self) -> None:
        self.closed += 1

    def _advance(self, request: EngineRequest) -> EngineOutput:
        script, given = self._scripts[request.request_id], self._num_given[request.request_id]
        output = EngineOutput(request_id=request.request_id, num_cached_tokens=2)
        if given == 0:
            output.events = [EngineEvent(EventType.QUEUED, 1.0), EngineEvent(EventType.SCHEDULED, 2.0)]
        if isinstance(script, str):
            output.finish_reason, output.error = FinishReason.ERROR, script
            return output
        params = request.sampling_params
        if given == 0 and params.prompt_logprobs is not None:
            output.prompt_logprobs = [
                logprobs_at(i, params.prompt_logprobs) for i in request.prompt_token_ids[1:]
            ]
        for token_id in script[given : given + self._tokens_per_step]:
            output.new_token_ids.append(token_id)
            given += 1
            if token_id in request.eos_token_ids and not params.ignore_eos:
                output.finish_reason = FinishReason.STOP
            elif token_id in params.stop_token_ids:
                output.finish_reason, output.stop_reason = FinishReason.STOP, token_id
            elif given == min(request.max_tokens, len(script)):
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                break
        if params.logprobs is not None:
            output.logprobs = [logprobs_at(token_id, params.logprobs) for token_id in output.new_token_ids]
        self._num_given[request.request_id] = given
        return output
