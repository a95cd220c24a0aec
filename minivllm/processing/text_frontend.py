"""The text side that every frontend shares: tokenizer, chat template, default parameters, preparing requests.

``LLMEngine`` steps an engine by hand, ``AsyncLLM`` streams from one; both turn prompts into requests here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineArgs, EngineConfig
from minivllm.errors import MinivllmError, ModelError, RequestError
from minivllm.messages import LoRARequest
from minivllm.processing.input_processor import InputProcessor, PreparedRequest, Prompt
from minivllm.processing.output_processor import OutputProcessor
from minivllm.sampling_params import PoolingParams, SamplingParams
from minivllm.tokenizer.detokenizer import TokenDecoder

if TYPE_CHECKING:
    from minivllm.tokenizer.tokenizer import Tokenizer

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


class TextFrontend:
    """Turns text into requests (``prepare``) and tokens into text (``output_processor``) for one engine.

    model_vocab_size: width of the logits. eos_token_ids: all ids that end a sequence.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        model_vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._input_processor = InputProcessor(
            config, tokenizer, model_vocab_size=model_vocab_size, eos_token_ids=eos_token_ids
        )
        self.output_processor = OutputProcessor(None if tokenizer is None else TokenDecoder(tokenizer.backend))
        self._default_params: SamplingParams | None = None

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError for a model that has none."""
        if self._tokenizer is None:
            raise RequestError("This model has no tokenizer: give prompt_token_ids instead of text.")
        return self._tokenizer

    def prepare(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
        pooling: PoolingParams | None = None,
    ) -> PreparedRequest:
        """Tokenize and validate without submitting, to check many prompts before the first one starts.

        params: None takes the model's defaults. priority: lower goes first, with scheduling_policy "priority".
        arrival_time: time.monotonic() [seconds] if the request waited before this call. cache_salt: separates the
        prefix cache of tenants, like the prompt's field of that name. lora: the adapter to use. pooling: the output
        carries an ``embedding`` instead of tokens. Any thread may call this. Raises RequestError.
        """
        if cache_salt is not None:
            prompt = {**({"prompt": prompt} if isinstance(prompt, str) else prompt), "cache_salt": cache_salt}
        return self._input_processor.process(
            prompt,
            self.get_default_sampling_params() if params is None else params,
            request_id=request_id,
            priority=priority,
            arrival_time=arrival_time,
            lora=lora,
            pooling=pooling,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special_tokens: bool = False,
    ) -> dict[str, Any]:
        """A conversation as a prompt, by the model's chat template. Raises RequestError.

        parse_special_tokens: special tokens that stand in the messages count as such instead of as text.
        """
        return self._input_processor.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            parse_special_tokens=parse_special_tokens,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults where it brings them (generation_config.json), else those of SamplingParams."""
        if self._default_params is None:
            self._default_params = default_sampling_params(self.config.model_path)
        return self._default_params


def load_model_tokenizer(args: EngineArgs, model_path: str, load_format: str) -> Tokenizer | None:
    """The tokenizer the user named, else the model's own; None for a model directory that comes without one."""
    from minivllm.gguf.gguf_file import find_gguf
    from minivllm.hub.fetch import resolve_model
    from minivllm.tokenizer.tokenizer import load_tokenizer

    logger.info("Reading the tokenizer …")
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
