"""Prompts and parameters in, ``EngineRequest``s out; whatever cannot work is refused here, in a sentence.

Nothing is cut or ignored silently. Ids inside the engine are made here; a caller's request id is only echoed,
because a key that strangers choose is a key they can collide.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm.config import EngineConfig
from minivllm.errors import ContextLengthError, MinivllmError, ModelError, RequestError
from minivllm.messages import EngineRequest, ImageItem, LoRARequest
from minivllm.multimodal.chat_parts import take_images
from minivllm.multimodal.files.decoding import Picture
from minivllm.multimodal.prompt_images import PromptImages
from minivllm.processing.beam_search_params import BeamSearchParams
from minivllm.sampling.logits_processors import load_logits_processors
from minivllm.sampling_params import FALLBACK_SAMPLING, OutputKind, PoolingParams, SamplingParams
from minivllm.stop_conditions.stop_regex import compile_stop_patterns
from minivllm.stop_conditions.stop_strings import FirstStop, StopAutomaton, StopMatcher
from minivllm.structured_output.schemas.json_schema import sound_schema
from minivllm.tokenizer.chat_messages import checked_messages
from minivllm.tokenizer.valid_text import check_text, shown

if TYPE_CHECKING:
    from minivllm.tokenizer.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""A text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; the dictionaries also take ``"cache_salt"``.
With both ids and text the ids count and the text is only echoed. ``"multi_modal_data": {"image": …}`` brings
one image or a list, each of PIL or the bytes of a file, and ``"mm_processor_kwargs"`` choices of the model's
image processor."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
IMAGE_KEYS = ("multi_modal_data", "mm_processor_kwargs")
GENERATION_CONFIG = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_IN_GENERATION_CONFIG = (*_SAMPLING, "max_new_tokens")
MAX_STOP_STRING_LENGTH = 1024
MAX_BAD_WORD_LENGTH = 1024
MAX_ADAPTER_TEXT_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request, ready to be submitted: one sequence per completion, in order of their index.

    request_id: the caller's, echoed. internal_id: unique in this frontend.
    stops: what ends the text, besides tokens.
    """

    request_id: str
    internal_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    sequences: list[EngineRequest]
    stops: StopMatcher | None = None
    pictures: Sequence[Picture] = ()
    """Of the prompt: found by the engine's questions as long as they are kept here."""


class InputProcessor:
    """Tokenizes and validates, in any thread.
    Raises RequestError for everything that is the caller's mistake."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        model_vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.config = config
        self._max_model_len = config.scheduler.max_model_len
        self._logits_processors = load_logits_processors(config.logits_processors)
        self._tokenizer = tokenizer
        self._vocab_size = model_vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._numbers = itertools.count()
        self._default_params: SamplingParams | None = None
        self.images = (
            None
            if config.images is None
            else PromptImages(
                config.images, config.images_path, tokenizer, is_joined=config.eye_path is not None
            )
        )
        """None where the model reads text only."""

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
        """Check everything and build the requests of all ``params.n`` sequences, without submitting them.

        request_id: echoed; None takes the internal one. params: None takes the model's defaults. priority:
        lower goes first, with scheduling_policy "priority". arrival_time: time.monotonic() [seconds] if the
        request waited before this call. cache_salt: separates the prefix cache of tenants, like the prompt's
        field of that name. lora: the adapter to use. pooling: the output carries an ``embedding`` instead of
        tokens.
        """
        if cache_salt is not None:
            prompt = {**({"prompt": prompt} if isinstance(prompt, str) else prompt), "cache_salt": cache_salt}
        params = self.get_default_sampling_params() if params is None else params
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        pictures = self._read_pictures(prompt)
        text, token_ids, cache_salt = self._read_prompt(prompt, pictures)
        items: list[ImageItem] = []
        if self.images is not None:
            token_ids, items = self.images.expand(token_ids, pictures)
            last = items[-1].offset + items[-1].length if items else 0
            if params.prompt_logprobs is not None and params.prompt_logprobs_start < last:
                raise RequestError(
                    "prompt_logprobs of a prompt with images are given after the last image only: leave them "
                    f"out, or let them begin at prompt_logprobs_start {last} or later."
                )
        self._check_params(params)
        self._check_priority(priority)
        self.check_lora(lora)
        if pooling is not None and not isinstance(pooling, PoolingParams):
            raise RequestError(f"The pooling parameters are {shown(pooling)}, but must be a PoolingParams.")
        max_tokens = self._resolve_max_tokens(len(token_ids), params, is_pooling=pooling is not None)
        if params.prompt_logprobs_start > len(token_ids):
            raise RequestError(
                f"prompt_logprobs_start is {params.prompt_logprobs_start}, but the prompt has "
                f"{len(token_ids)} tokens: "
                "it must be at most that."
            )
        stops = self._stop_matcher(params)
        bad_words = self._bad_words_token_ids(params.bad_words)
        thinking = None
        if params.thinking_budget is not None:
            thinking = self._tag_token_ids("<think>"), self._tag_token_ids("</think>")
        if request_id is not None:
            check_text("request_id", request_id)

        number = next(self._numbers)
        internal_id = f"r{number}"
        seed = self._derive_seed(number) if params.seed is None else params.seed
        sequences = [
            EngineRequest(
                request_id=internal_id if params.num_sequences == 1 else f"{internal_id}-{index}",
                prompt_token_ids=token_ids,
                sampling_params=_sequence_params(params, index),
                max_tokens=max_tokens,
                seed=(seed + index + 2**63) % 2**64 - 2**63,  # within 64 bits
                arrival_time=arrival_time,
                eos_token_ids=self._eos_token_ids,
                bad_words_token_ids=bad_words,
                thinking_token_ids=thinking,
                priority=priority,
                cache_salt=cache_salt,
                lora=lora,
                pooling=pooling,
                images=items,
            )
            for index in range(params.num_sequences)
        ]
        return PreparedRequest(
            request_id=internal_id if request_id is None else request_id,
            internal_id=internal_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time=arrival_time,
            sequences=sequences,
            stops=stops,
            pictures=pictures,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        parse_special_tokens: bool = False,
        measures_images: bool = False,
    ) -> dict[str, Any]:
        """A conversation as a prompt, by the model's chat template.

        add_generation_prompt: open the assistant's turn. continue_final_message: leave the last turn open
        instead. chat_template: takes the place of the model's. chat_template_kwargs: further names the
        template knows. add_special_tokens: also put around it what the tokenizer puts around texts.
        parse_special_tokens: special tokens that stand in the messages count as such instead of as text.
        measures_images: files of images are not decoded, which is enough for ``expanded``.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message contradict each other: a turn is opened or "
                "continued."
            )
        tokenizer = self._require_tokenizer("A conversation")
        if not tokenizer.has_chat_template and chat_template is None:
            raise RequestError("This model has no chat template: give a text prompt instead of messages.")
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise RequestError(
                f"messages is {shown(messages)}, but must be a list of at least one message such as "
                '{"role": "user", "content": "Hello"}.'
            )
        messages, pictures = take_images(
            messages, self.images, self.config.no_images, measures=measures_images
        )
        messages = checked_messages(messages)
        text, token_ids = tokenizer.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            max_characters=self._max_characters(tokenizer),
            edit=str if self.images is None else partial(self.images.written, pictures=pictures),
            **dict(chat_template_kwargs or {}),
        )
        self._check_num_characters(text, tokenizer)
        prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": token_ids}
        return {**prompt, "multi_modal_data": {"image": pictures}} if pictures else prompt

    def expanded(self, prompt: Mapping[str, Any]) -> list[int]:
        """The token ids of what ``render_chat`` returned, with a span for each image."""
        token_ids: list[int] = prompt["prompt_token_ids"]
        pictures = prompt.get("multi_modal_data", {}).get("image", [])
        return token_ids if self.images is None else self.images.lay_out(token_ids, pictures)[0]

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's defaults where it brings them (generation_config.json), else FALLBACK_SAMPLING."""
        if self._default_params is None:
            self._default_params = default_sampling_params(self.config.model_path)
        return self._default_params

    @cached_property
    def _tokens_of_the_model(self) -> int | None:
        """max_new_tokens of generation_config.json, which means "at most"."""
        value = _generation_config(self.config.model_path)[1].get("max_new_tokens")
        return value if isinstance(value, int) else None

    def _read_prompt(
        self, prompt: Prompt, pictures: Sequence[Picture]
    ) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, cache salt), all of them valid."""
        fields: Mapping[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(fields, Mapping):
            raise RequestError(
                f"The prompt is {shown(prompt)}, but must be a text or a dictionary "
                'such as {"prompt": "Hello"} or {"prompt_token_ids": [1, 2, 3]}.'
            )
        for key in fields:
            if key not in (*PROMPT_KEYS, *IMAGE_KEYS):
                known = ", ".join((*PROMPT_KEYS, *IMAGE_KEYS))
                raise RequestError(f"{shown(key)} is not a field of a prompt; known are: {known}.")
        text, token_ids, cache_salt = (fields.get(key) for key in PROMPT_KEYS)
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
            if not cache_salt:
                raise RequestError(
                    "cache_salt is empty, but must have at least one character or be left out."
                )
        if text is not None:
            check_text("prompt", text)
        if token_ids is not None:
            self._check_token_ids("prompt_token_ids", token_ids)
            token_ids = list(token_ids)
        elif text is None:
            raise RequestError('The prompt has neither "prompt" nor "prompt_token_ids": give one of them.')
        elif not text:
            raise RequestError(
                "prompt is empty, but must have at least one character. To start from nothing, give the "
                "model's "
                "beginning-of-sequence id as prompt_token_ids."
            )
        else:
            tokenizer = self._require_tokenizer("A text prompt")
            if self.images is not None and pictures:
                text = self.images.written(text, pictures)
            self._check_num_characters(text, tokenizer)
            token_ids = tokenizer.encode(text)
            self._check_token_ids("prompt.tokens", token_ids)
        if not token_ids:
            raise RequestError("The prompt has no tokens, but must have at least one.")
        return text, token_ids, cache_salt

    def _read_pictures(self, prompt: Prompt) -> list[Picture]:
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        data = fields.get("multi_modal_data")
        if not data:
            return []
        if not isinstance(data, Mapping) or set(data) != {"image"}:
            raise RequestError(
                f'multi_modal_data is {shown(data)}, but must be a dictionary such as {{"image": image}}.'
            )
        if self.images is None:
            raise RequestError(f"The prompt has images: at most 0 per prompt. {self.config.no_images}")
        return self.images.read(data["image"], fields.get("mm_processor_kwargs"))

    def _max_characters(self, tokenizer: Tokenizer) -> int | None:
        """A text of more characters cannot fit, whatever they are; None where that cannot be told."""
        longest = tokenizer.max_characters_per_token
        return None if longest is None else longest * self._max_model_len

    def _check_num_characters(self, text: str, tokenizer: Tokenizer) -> None:
        """Refuse what is far too long without tokenizing it."""
        limit = self._max_characters(tokenizer)
        if limit is not None and len(text) > limit:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters, but max_model_len is {self._max_model_len}: so many "
                "tokens "
                f"are never more than {limit} characters. Shorten it."
            )

    def _check_token_ids(self, name: str, token_ids: Any) -> None:
        if not isinstance(token_ids, (list, tuple)):
            raise RequestError(f"{name} is {shown(token_ids)}, but must be a list of token ids.")
        if set(map(type, token_ids)) <= {int} and (
            not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)
        ):
            return
        for position, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{name}.{position} is {shown(token)}, but must be a whole number from 0 to "
                    f"{self._vocab_size - 1} (the model's vocabulary)."
                )

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams, *, is_pooling: bool) -> int:
        """params.max_tokens, or what the prompt leaves of the context; never more than fits. 0 for a vector.

        More than fits is refused, but for the number of the model's generation_config.json,
        which no caller chose.
        """
        limit, num_generated = self._max_model_len, 0 if is_pooling else 1
        if num_prompt_tokens + num_generated > limit:
            asked = f" and max_tokens is {params.max_tokens}" if num_generated and params.max_tokens else ""
            reason = ", so that one can be generated" if num_generated else ""
            raise ContextLengthError(
                f"The prompt has {num_prompt_tokens} tokens{asked}, but max_model_len is {limit}: a prompt "
                "may have at "
                f"most {limit - num_generated} tokens{reason}. Shorten it."
            )
        if is_pooling:
            return 0
        room = limit - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room and max_tokens == self._tokens_of_the_model:
            max_tokens = room
        if max_tokens > room:
            raise ContextLengthError(
                f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}, but max_model_len is {limit}: shorten the prompt, or ask "
                "for at "
                f"most {room} tokens."
            )
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but must be at most {max_tokens}: the prompt has "
                f"{num_prompt_tokens} of the {limit} tokens of max_model_len."
            )
        return max_tokens

    def _check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model, which SamplingParams does not know."""
        if isinstance(params, BeamSearchParams):
            raise RequestError(
                "A beam search cannot stream and takes no part in sampling, since its best sequence is known "
                "at the "
                "end only: call LLM.beam_search."
            )
        if not isinstance(params, SamplingParams):
            raise RequestError(f"The sampling parameters are {shown(params)}, but must be a SamplingParams.")
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or [])
        self._check_token_ids("logprob_token_ids", params.logprob_token_ids or [])
        for token in params.logit_bias or ():
            if token >= self._vocab_size:
                raise RequestError(
                    f"logit_bias has the token id {token}, but the model's vocabulary ends with "
                    f"{self._vocab_size - 1}."
                )
        if params.num_sequences > params.n and params.output_kind is not OutputKind.FINAL_ONLY:
            raise RequestError(
                f"best_of is {params.best_of} and n is {params.n}, but which ones are best is known at the "
                "end only: "
                'use output_kind="final_only", or leave best_of out of a stream.'
            )
        if params.structured_outputs is not None:
            # What can be told without compiling:
            # a tokenizer and an end are there, and the schema is one to be kept to.
            self._require_tokenizer("structured_outputs")
            if not self._eos_token_ids:
                raise RequestError(
                    "structured_outputs need an end-of-sequence token, but this model has none."
                )
            if params.structured_outputs.json is not None:
                sound_schema(json.loads(params.structured_outputs.source))
        self._check_processors(params)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._vocab_size:
                raise RequestError(
                    f"{name} is {count}, but the model's vocabulary has only {self._vocab_size} tokens."
                )

    def _stop_matcher(self, params: SamplingParams) -> StopMatcher | None:
        for name, stops in (("stop", params.stop), ("stop_regex", params.stop_regex)):
            if stops:
                self._require_tokenizer(name)
            for index, stop in enumerate(stops):
                check_text(f"{name}.{index}", stop, MAX_STOP_STRING_LENGTH)
        matchers: list[StopMatcher] = [StopAutomaton(params.stop)] if params.stop else []
        matchers += compile_stop_patterns(params.stop_regex)
        return FirstStop(matchers) if len(matchers) > 1 else matchers[0] if matchers else None

    def _check_processors(self, params: SamplingParams) -> None:
        """There are logits processors to read extra_args, and none of them objects."""
        if params.extra_args and not self._logits_processors:
            raise RequestError(
                "extra_args are for custom logits processors, but the engine was started without "
                "logits_processors."
            )
        for processor in self._logits_processors:
            try:
                processor.validate_params(params)
            except ValueError as error:
                raise RequestError(f"{processor.__name__}: {error}") from None

    def _tag_token_ids(self, tag: str) -> list[int]:
        return self._require_tokenizer("thinking_budget").encode(tag, add_special_tokens=False)

    def _check_priority(self, priority: int) -> None:
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            raise RequestError(
                f"priority is {shown(priority)}, but must be a whole number; lower goes first."
            )
        if priority != 0 and not self.config.scheduler.has_priorities:
            raise RequestError(
                f"priority is {priority}, but the engine's scheduling policy has no priorities: "
                'start it with scheduling_policy="priority", or leave priority at 0.'
            )

    def check_lora(self, lora: LoRARequest | None) -> None:
        """Everything about an adapter that can be told without its files. Raises RequestError."""
        if lora is None:
            return
        if not isinstance(lora, LoRARequest):
            raise RequestError(
                f"The adapter is {shown(lora)}, but must be a LoRARequest(lora_name, lora_int_id, lora_path)."
            )
        if type(lora.lora_int_id) is not int or lora.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id is {shown(lora.lora_int_id)}, but must be a whole number of at least 1. The "
                "order is "
                "LoRARequest(lora_name, lora_int_id, lora_path)."
            )
        for name in ("lora_name", "lora_path"):
            check_text(name, getattr(lora, name), MAX_ADAPTER_TEXT_LENGTH)
            if not getattr(lora, name):
                raise RequestError(f"{name} is empty, but must have at least one character.")
        if self.config.lora is None:
            raise RequestError(
                f"The adapter {lora.name!r} needs an engine that is started with enable_lora=True."
            )

    def _bad_words_token_ids(self, bad_words: Sequence[str]) -> list[list[int]]:
        """Every bad word as the ids it has at the start of a text and after a space, each sequence once."""
        sequences: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(bad_words):
            tokenizer = self._require_tokenizer("bad_words")
            check_text(f"bad_words.{index}", word, MAX_BAD_WORD_LENGTH)
            for variant in (word, " " + word.lstrip()):
                token_ids = tokenizer.encode(variant, add_special_tokens=False)
                self._check_token_ids(f"bad_words.{index}.tokens", token_ids)
                if token_ids:
                    sequences[tuple(token_ids)] = None
        return [list(token_ids) for token_ids in sequences]

    def _derive_seed(self, number: int) -> int:
        """Seed of the number-th request without one of its own:
        fixed by the engine's seed, 64 well-mixed bits."""
        digest = hashlib.blake2b(f"{self.config.seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, but this model has none: give prompt_token_ids.")
        return self._tokenizer


def default_sampling_params(model_path: str) -> SamplingParams:
    """Defaults from the generation_config.json beside a model (a directory or a ``.gguf`` file), and
    FALLBACK_SAMPLING where that does not say how to sample.

    An explicit ``do_sample: false`` means greedy.
    Raises ModelError if the file is broken or holds impossible values.
    """
    path, values = _generation_config(model_path)
    given = {name: values.get(name) for name in _IN_GENERATION_CONFIG}
    if values.get("do_sample") is None and all(
        value is None for name, value in given.items() if name in _SAMPLING
    ):
        given |= FALLBACK_SAMPLING
    given["max_tokens"] = given.pop("max_new_tokens")
    if values.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams.from_dict({name: value for name, value in given.items() if value is not None})
    except MinivllmError as error:
        raise ModelError(f"{path} cannot be used: {error}") from None


def _generation_config(model_path: str) -> tuple[Path, dict[str, Any]]:
    """The path and the entries of the generation_config.json beside a model; no entries if there is none."""
    path = Path(model_path)
    path = (path if path.is_dir() else path.parent) / GENERATION_CONFIG
    if not path.is_file():
        return path, {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}, but must hold a JSON object.")
    return path, values


def _sequence_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one sequence. Only the first one computes prompt logprobs: they are the same for all, and
    a sequence that computes them cannot use the prefix cache."""
    if params.num_sequences == 1:
        return params
    prompt_logprobs, start = (
        (params.prompt_logprobs, params.prompt_logprobs_start) if index == 0 else (None, 0)
    )
    # The best ones are told by the log-probabilities of their tokens.
    logprobs = 0 if params.num_sequences > params.n and params.logprobs is None else params.logprobs
    return msgspec.structs.replace(
        params,
        n=1,
        best_of=None,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=start,
        logprobs=logprobs,
    )
