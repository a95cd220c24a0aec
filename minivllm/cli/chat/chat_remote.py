"""``minivllm chat --url``: the same conversation with a model that an OpenAI-compatible server runs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

from minivllm.cli.conversation.chat_session import ChatSession, Message
from minivllm.cli.engine.engine_start import Generation
from minivllm.cli.engine.openai_server import (
    engine_stats,
    error_message,
    key_header,
    served_models,
    server_root,
    stream_events,
    unreachable,
)
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, RequestError
from minivllm.messages import FinishReason, SchedulerStats
from minivllm.processing.outputs import RequestMetrics
from minivllm.sampling_params import FALLBACK_SAMPLING, SamplingParams
from minivllm.server.parsers.reasoning import CLOSE, OPEN

if TYPE_CHECKING:
    import httpx

    from minivllm.frontend.llm_engine import LLMEngine

SECONDS_BETWEEN_LOOKS = 0.05
"""How soon Ctrl-C takes effect while nothing comes."""
TIMEOUT_SECONDS = 600.0
ALWAYS_SENT = ("temperature", "top_p")


@dataclass(kw_only=True)
class RemoteGeneration(Generation):
    """An answer whose tokens the server counts: which ones they are, it does not tell."""

    metrics: RequestMetrics
    num_counted: int = 0

    @property
    def num_output_tokens(self) -> int:
        return self.num_counted

    def record(self) -> dict[str, Any]:
        values = super().record()
        del values["token_ids"]
        return values


class _EngineElsewhere:
    """Stands where a session has its engine. Whatever asks it for something gets told why it is not here."""

    client = None

    def __init__(self, url: str) -> None:
        self._url = url

    def __getattr__(self, name: str) -> NoReturn:
        raise RequestError(f"That needs the engine itself, but the model runs on the server at {self._url}.")


class RemoteSession(ChatSession):
    """A conversation by /v1/chat/completions.
    Tokens are counted by /tokenize, which servers other than OpenAI's have.

    url: where the server's /v1 is. model: one that it serves; "" for its first. params: the settings to begin
    with, given how the server samples by default. context_size: of servers that do not
    tell theirs [tokens]. Raises ConfigError or ModelError.
    """

    def __init__(
        self,
        url: str,
        model: str,
        params: Callable[[Mapping[str, Any]], SamplingParams],
        system: str | None = None,
        *,
        api_key: str | None = None,
        context_size: int | None = None,
    ) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise ConfigError("chat --url needs httpx: pip install httpx.")
        self.url = server_root(url)
        super().__init__(cast("LLMEngine", _EngineElsewhere(self.url)), model, params({}), system)
        self._headers = key_header(api_key)
        self._context_size = context_size
        self._models = {entry["id"]: entry for entry in served_models(self.url, self._headers)}
        self.model = model or next(iter(self._models))
        self.switch_model(self.model)
        self.params = params(self._default_sampling())

    def switch_model(self, model: str) -> None:
        """Talk to another model of the server. Raises RequestError if it serves none of this name."""
        if model not in self._models:
            raise RequestError(
                f"The server at {self.url} does not serve {model!r}; it has: {', '.join(self._models)}."
            )
        if self._context_size is None and not isinstance(self._models[model].get("max_model_len"), int):
            raise RequestError(
                f"The server at {self.url} does not say how long the context of {model} is: give it with "
                "--max-model-len, in tokens."
            )
        self.model = model
        self.last_generation = None

    def _default_sampling(self) -> Mapping[str, Any]:
        """How the server samples where a request says nothing; FALLBACK_SAMPLING if it does not tell."""
        told = self._models[self.model].get("default_sampling_params")
        if not isinstance(told, dict):
            return FALLBACK_SAMPLING
        return {name: value for name, value in told.items() if name in SamplingParams.__struct_fields__}

    @property
    def max_model_len(self) -> int:
        return self._context_size or int(self._models[self.model]["max_model_len"])

    @property
    def description(self) -> str:
        return f"at {self.url}"

    @property
    def has_chat_template(self) -> bool:
        return True

    @property
    def can_switch_thinking(self) -> bool:
        """The server refuses the switch, with a sentence, if the model's template has none."""
        return True

    def engine_stats(self) -> SchedulerStats:
        """The server's, for all its clients. Raises RequestError where it does not tell."""
        return engine_stats(self.url, self._headers)

    def num_text_tokens(self, text: str) -> int:
        return len(self._tokenize({"prompt": text, "add_special_tokens": False}))

    def prompt_token_ids(self, messages: list[Message]) -> list[int]:
        return self._tokenize(
            {
                "messages": self.conversation(messages),
                "add_generation_prompt": True,
                **self._template_fields(),
            }
        )

    def _template_fields(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"chat_template_kwargs": {"enable_thinking": self.thinking}}

    def num_context_tokens(self) -> int:
        """As the server counts them; of one that does not, what the last answer took."""
        try:
            return super().num_context_tokens()
        except RequestError:
            return 0 if self.last_generation is None else self.last_generation.num_context_tokens

    def _tokenize(self, body: dict[str, Any]) -> list[int]:
        import httpx

        try:
            answer = httpx.post(
                f"{self.url}/tokenize",
                json={"model": self.model, **body},
                headers=self._headers,
                timeout=60,
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from None
        if answer.status_code == 404:
            raise RequestError(
                f"The server at {self.url} has no /tokenize, so its tokens cannot be counted from here."
            )
        if answer.status_code != 200:
            raise RequestError(error_message(answer.text))
        return [int(token) for token in answer.json()["tokens"]]

    def _body(self, messages: list[Message], max_tokens: int | None) -> dict[str, Any]:
        """The settings that differ from a server's neutral ones, under OpenAI's names where it has one."""
        from minivllm.cli.conversation.slash_commands import SETTINGS

        neutral = SamplingParams()
        given = {name: getattr(self.params, name) for name in SETTINGS if name != "max_tokens"}
        body: dict[str, Any] = {
            name: value
            for name, value in given.items()
            if name in ALWAYS_SENT or value != getattr(neutral, name)
        }
        if "logit_bias" in body:
            body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
        if max_tokens is None:
            max_tokens = self.params.max_tokens
        if max_tokens is not None:
            body["max_completion_tokens"] = max_tokens
        return body | {
            **self._template_fields(),
            "model": self.model,
            "messages": self.conversation(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _generate(
        self,
        messages: list[Message],
        on_text: Callable[[str], None],
        is_interrupted: Callable[[], bool],
        max_tokens: int | None = None,
    ) -> Generation:
        body = self._body(messages, max_tokens)
        generation = asyncio.run(self._follow_answer(body, on_text, is_interrupted))
        if generation.interrupted:  # the server's own count would have come at the end
            with suppress(RequestError):
                generation.num_prompt_tokens = len(self.prompt_token_ids(messages))
                generation.num_counted = self.num_text_tokens(generation.text)
        return generation

    async def _follow_answer(
        self, body: dict[str, Any], on_text: Callable[[str], None], is_interrupted: Callable[[], bool]
    ) -> RemoteGeneration:
        """Read the stream beside looking for Ctrl-C, which closes the connection; the server then aborts.

        An answer that breaks off keeps what has arrived. Raises RequestError if that is nothing.
        """
        generation = RemoteGeneration(
            metrics=RequestMetrics(arrival_time=time.monotonic(), num_prompt_tokens=0)
        )
        reading = asyncio.create_task(self._read_stream(body, generation, on_text))
        while not reading.done() and not is_interrupted():
            await asyncio.wait({reading}, timeout=SECONDS_BETWEEN_LOOKS)
        if reading.done():
            try:
                reading.result()
            except RequestError as error:
                generation.fail(error)
        else:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            generation.interrupt()
        return generation

    async def _read_stream(
        self, body: dict[str, Any], generation: RemoteGeneration, on_text: Callable[[str], None]
    ) -> None:
        import httpx

        try:
            async with (
                httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, headers=self._headers) as client,
                client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    raise RequestError(error_message((await response.aread()).decode(errors="replace")))
                await self._take_in(response, generation, on_text)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from None
        except RequestError:  # a ValueError too
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(
                f"The answer of the server at {self.url} is broken: {error}. Try again."
            ) from None
        generation.metrics.finished_time = time.monotonic()
        generation.finish_reason = generation.finish_reason or str(FinishReason.STOP)

    async def _take_in(
        self, response: httpx.Response, generation: RemoteGeneration, on_text: Callable[[str], None]
    ) -> None:
        """Show reasoning between the tags that stand around it in a model's own text;
        only the answer is kept."""
        is_reasoning, metrics = False, generation.metrics
        async with aclosing(stream_events(response)) as events:
            async for event in events:
                if event.get("error"):
                    raise RequestError(error_message(json.dumps(event)))
                if usage := event.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    generation.num_prompt_tokens = metrics.num_prompt_tokens = int(usage["prompt_tokens"])
                    generation.num_counted = metrics.num_generation_tokens = int(usage["completion_tokens"])
                    generation.num_cached_tokens = metrics.num_cached_tokens = int(
                        details.get("cached_tokens") or 0
                    )
                for choice in event.get("choices") or ():
                    delta = choice["delta"]
                    thought, text = (
                        delta.get("reasoning_content") or delta.get("reasoning"),
                        delta.get("content"),
                    )
                    if thought or text:
                        metrics.last_token_time = time.monotonic()
                        metrics.first_token_time = metrics.first_token_time or metrics.last_token_time
                    if thought:
                        on_text(thought if is_reasoning else OPEN + thought)
                        is_reasoning = True
                    if text:
                        on_text(CLOSE + text if is_reasoning else text)
                        is_reasoning = False
                        generation.text += text
                    generation.finish_reason = choice.get("finish_reason") or generation.finish_reason
                    generation.stop_reason = choice.get("stop_reason") or generation.stop_reason


def check_engine_args(args: EngineArgs) -> None:
    """Raises RequestError naming the flags that would have to reach an engine which runs already."""
    given, plain = asdict(args), asdict(EngineArgs())
    changed = [
        name for name in plain if given[name] != plain[name] and name not in ("model", "max_model_len")
    ]
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise RequestError(
            f"With --url the engine is the server's, which has its own settings: leave out {flags}."
        )
