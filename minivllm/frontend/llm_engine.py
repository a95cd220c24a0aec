"""The engine with text at both ends: prompts in, ``RequestOutput``s out, one ``step()`` at a time.

``LLM`` loops over it for a list of prompts; a chat streams from it. It owns no scheduling: everything below the client
works on token ids.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineArgs
from minivllm.errors import EngineDeadError, MinivllmError, ModelError, RequestError
from minivllm.frontend.detokenizer import TokenDecoder
from minivllm.frontend.input_processor import InputProcessor, PreparedRequest, Prompt
from minivllm.frontend.output_processor import OutputProcessor
from minivllm.frontend.outputs import RequestOutput
from minivllm.messages import SchedulerStats
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine.client import EngineClient
    from minivllm.frontend.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
_NAME_IN_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}


class LLMEngine:
    """Requests may be added, stepped and aborted in any order, from one thread. Leaving it as a context closes it."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None = None) -> None:
        self.client = client
        self._tokenizer = tokenizer
        self._input_processor = InputProcessor(
            client.config,
            tokenizer,
            model_vocab_size=client.model_vocab_size,
            eos_token_ids=client.eos_token_ids,
        )
        self.output_processor = OutputProcessor(None if tokenizer is None else TokenDecoder(tokenizer.backend))
        self._default_params: SamplingParams | None = None
        self._closed = False

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
        """Load the model and its tokenizer, if it has one. Raises ConfigError or ModelError."""
        from minivllm.engine.client import make_client

        client = make_client(args)
        try:
            return cls(client, _load_tokenizer(args, client.config.model_path, client.config.load_format))
        except BaseException:
            client.close()
            raise

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError for a model that has none."""
        if self._tokenizer is None:
            raise RequestError("This model has no tokenizer: give prompt_token_ids instead of text.")
        return self._tokenizer

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> str:
        """Submit one prompt; its outputs carry the returned id: ``request_id``, or one that is made if it is None.

        params: None takes the model's defaults. priority: lower goes first, with scheduling_policy "priority".
        arrival_time: time.monotonic() [seconds] if the request waited before this call. Raises RequestError.
        """
        return self.submit(
            self.prepare(request_id, prompt, params, priority=priority, arrival_time=arrival_time)
        ).request_id

    def prepare(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> PreparedRequest:
        """Tokenize and validate without submitting, to check many prompts before the first one starts."""
        self._check_open()
        return self._input_processor.process(
            prompt,
            self.get_default_sampling_params() if params is None else params,
            request_id=request_id,
            priority=priority,
            arrival_time=arrival_time,
        )

    def submit(self, prepared: PreparedRequest) -> PreparedRequest:
        """Hand a prepared request to the engine core, once."""
        self._check_open()
        self.output_processor.add_request(prepared)
        try:
            for sequence in prepared.sequences:
                self.client.add_request(sequence)
        except BaseException:
            # All of its sequences or none: the ones already handed over must not run on unseen.
            with suppress(EngineDeadError):
                self.abort_request([prepared.internal_id])
            raise
        return prepared

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt for ``add_request``, by the model's chat template. Raises RequestError."""
        return self._input_processor.render_chat(
            messages, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
        )

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; outputs of the requests that have something to say."""
        self._check_open()
        processed = self.output_processor.process_outputs(self.client.get_outputs())
        if processed.sequence_ids_to_abort:
            self.client.abort(processed.sequence_ids_to_abort)
        return processed.request_outputs

    def abort_request(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests early; idempotent. Their last outputs come back, with finish_reason "abort"."""
        request_outputs, sequence_ids = self.output_processor.abort_requests(request_ids)
        if sequence_ids and not self._closed:
            self.client.abort(sequence_ids)
        return request_outputs

    def has_unfinished_requests(self) -> bool:
        """True while a request waits for output. The core may still have aborted ones to clean up; a step does it."""
        return self.output_processor.has_unfinished_requests()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults where it brings them (generation_config.json), else those of SamplingParams."""
        if self._default_params is None:
            self._default_params = default_sampling_params(self.client.config.model_path)
        return self._default_params

    def stats(self) -> SchedulerStats:
        self._check_open()
        return self.client.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are still using the cache."""
        self._check_open()
        return self.client.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and its memory; unfinished requests are dropped. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self.client.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("The engine is closed: make a new one.")


def _load_tokenizer(args: EngineArgs, model_path: str, load_format: str) -> Tokenizer | None:
    """The tokenizer the user named, else the model's own; None for a model directory that comes without one."""
    from minivllm.frontend.tokenizer import load_tokenizer
    from minivllm.models.fetch import resolve_model
    from minivllm.models.gguf_file import find_gguf

    if args.tokenizer is not None:
        return load_tokenizer(resolve_model(args.tokenizer, weights=False))
    path = Path(model_path)
    if find_gguf(path, load_format) is None and not any((path / name).is_file() for name in TOKENIZER_FILES):
        logger.warning("%s has no tokenizer: only prompts of token ids are served, and no text comes back.", path)
        return None
    return load_tokenizer(path, load_format)


def default_sampling_params(model_path: str) -> SamplingParams:
    """Defaults from the generation_config.json beside a model (a directory or a ``.gguf`` file), if there is one.

    An explicit ``do_sample: false`` means greedy. Raises ModelError if the file is broken or holds impossible values.
    """
    path = Path(model_path)
    path = (path if path.is_dir() else path.parent) / GENERATION_CONFIG
    if not path.is_file():
        return SamplingParams()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds a {type(values).__name__}, but must hold a JSON object.")
        given = {name: values.get(theirs) for name, theirs in _NAME_IN_GENERATION_CONFIG.items()}
        if values.get("do_sample") is False:
            given["temperature"] = 0.0
        return SamplingParams.from_dict({name: value for name, value in given.items() if value is not None})
    except (OSError, ValueError) as error:
        if isinstance(error, MinivllmError):
            raise ModelError(f"{path} cannot be used: {error}") from None
        raise ModelError(f"{path} is not readable as JSON: {error}.") from None
