"""The engine with text at both ends: prompts in, ``RequestOutput``s out, one ``step()`` at a time.

``LLM`` loops over it for a list of prompts; a chat streams from it.
It owns no scheduling: everything below the client works on token ids.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineArgs
from minivllm.engine_process.protocol.pixels import PixelAnswers
from minivllm.errors import EngineDeadError, RequestError
from minivllm.messages import LoRARequest, SchedulerStats
from minivllm.processing.input_processor import InputProcessor, PreparedRequest, Prompt
from minivllm.processing.output_processor import OutputProcessor
from minivllm.processing.outputs import RequestOutput
from minivllm.profiling.spans import span
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer.detokenizer import TokenDecoder

if TYPE_CHECKING:
    from minivllm.engine_process.protocol.clients import AsyncEngineClient, EngineClient
    from minivllm.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class TextFrontend(InputProcessor):
    """The text side of an engine: prompts become requests (``prepare``),
    tokens become text (``output_processor``).

    eos_token_ids: all ids that end a sequence, of the model's configuration and of its tokenizer.
    """

    def __init__(self, client: EngineClient | AsyncEngineClient, tokenizer: Tokenizer | None) -> None:
        # Fine-tunes change the tokenizer's end of a turn, and often leave the base model's in config.json.
        end = None if tokenizer is None else tokenizer.eos_token_id
        ends = (
            client.eos_token_ids
            if end is None or end >= client.model_vocab_size
            else (*client.eos_token_ids, end)
        )
        self.eos_token_ids = tuple(dict.fromkeys(ends))
        super().__init__(
            client.config,
            tokenizer,
            model_vocab_size=client.model_vocab_size,
            eos_token_ids=self.eos_token_ids,
        )
        if self.images is not None:
            client.serve_pixels(PixelAnswers(self.images.pixels))
        self.output_processor = OutputProcessor(
            None if tokenizer is None else TokenDecoder(tokenizer.backend)
        )

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError for a model that has none."""
        if self._tokenizer is None:
            raise RequestError("This model has no tokenizer: give prompt_token_ids instead of text.")
        return self._tokenizer


class LLMEngine(TextFrontend):
    """Requests may be added, stepped and aborted in any order, from one thread.
    Leaving it as a context closes it."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(client, tokenizer)
        self.client = client
        self._closed = False

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
        """Load the model and its tokenizer, if it has one. Raises ConfigError or ModelError."""
        from minivllm.data_parallel.client import make_client

        client = make_client(args)
        try:
            return cls(
                client, load_model_tokenizer(args, client.config.model_path, client.config.load_format)
            )
        except BaseException:
            client.close()
            raise

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> str:
        """Submit one prompt; its outputs carry the returned id:
        ``request_id``, or one that is made if it is None.

        params, options: as ``prepare`` takes them. Raises RequestError.
        """
        return self.submit(self.prepare(request_id, prompt, params, **options)).request_id

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

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; outputs of the requests that have something to say."""
        self._check_open()
        outputs = self.client.get_outputs()
        with span("frontend"):
            processed = self.output_processor.process_outputs(outputs)
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
        """True while a request waits for output.
        The core may still have aborted ones to clean up; a step does it."""
        return self.output_processor.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        self._check_open()
        return self.client.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are still using the cache."""
        self._check_open()
        return self.client.reset_prefix_cache()

    def add_lora(self, lora: LoRARequest) -> None:
        """Load an adapter before it is needed. Raises RequestError, in a sentence, if it cannot be served."""
        self._check_open()
        self.check_lora(lora)
        self.client.call("add_lora", lora.name, lora.path)

    def remove_lora(self, name: str) -> bool:
        """Forget an adapter; False if it is not known.
        Raises RequestError while unfinished requests use it."""
        self._check_open()
        return bool(self.client.call("remove_lora", name))

    def list_loras(self) -> list[LoRARequest]:
        """All known adapters, least recently used first."""
        self._check_open()
        return [LoRARequest(name, lora_path=path) for name, path in self.client.call("list_loras")]

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


def load_model_tokenizer(args: EngineArgs, model_path: str, load_format: str) -> Tokenizer | None:
    """The tokenizer the user named, else the model's own;
    None for a model directory that comes without one."""
    from minivllm.gguf.gguf_file import find_gguf
    from minivllm.hub.fetch import resolve_model
    from minivllm.tokenizer.tokenizer import load_tokenizer

    logger.info("Reading the tokenizer …")
    if args.tokenizer is not None:
        return load_tokenizer(resolve_model(args.tokenizer, weights=False))
    path = Path(model_path)
    if find_gguf(path, load_format) is None and not any((path / name).is_file() for name in TOKENIZER_FILES):
        logger.warning(
            "%s has no tokenizer: only prompts of token ids are served, and no text comes back.", path
        )
        return None
    return load_tokenizer(path, load_format)
