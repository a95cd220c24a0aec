"""``LLM``: many prompts in, all their completions out. The offline entry point, in vLLM's shape."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from minivllm.config import EngineArgs
from minivllm.errors import EngineDeadError, RequestError
from minivllm.frontend.beam_search import BeamSearch, BeamSearchOutput, run_searches
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.messages import LoRARequest, SchedulerStats
from minivllm.processing.beam_search_params import BeamSearchParams
from minivllm.processing.input_processor import PreparedRequest, Prompt
from minivllm.processing.outputs import EmbeddingOutput, PositionLogprobMap, RequestOutput
from minivllm.sampling_params import OutputKind, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from minivllm.tokenizer.tokenizer import Tokenizer

Value = TypeVar("Value")
Message = Mapping[str, Any]
"""``{"role": "user", "content": "Hello"}``"""
_NO_LOGPROBS = "The engine gave no logprobs, which a beam search is made of."


class LLM:
    """A loaded model that completes lists of prompts. A context manager: leaving it frees the model.

    ``LLM(model="smollm2", max_model_len=2048)`` takes every field of ``EngineArgs`` by name; an unknown name
    raises ConfigError. ``engine`` puts an existing engine in the place of a loaded one, which the LLM then
    owns. A model that is not compiled yet is compiled first, which is said on standard error (a warning of
    the logger "minivllm").
    """

    def __init__(
        self, model: str | None = None, *, engine: LLMEngine | None = None, **engine_args: Any
    ) -> None:
        if engine is None:
            if model is not None:
                engine_args["model"] = model
            engine = LLMEngine.from_args(EngineArgs.from_kwargs(**engine_args))
        self.llm_engine = engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in their order, whatever order they finish in.

        prompts: one or a list, each a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. A model
        that sees also takes ``{"prompt": text, "multi_modal_data": {"image": image}}``, with one placeholder
        for each image. sampling_params: one for all or one per prompt; None takes the model's defaults.
        use_tqdm: a progress bar on stderr if that is a terminal. priority: one for all or one per prompt.
        lora_request: the adapter, one for all or one per prompt;
        adapters are loaded when they are first named.

        Raises RequestError before anything runs if one of the prompts cannot be served. If the engine gives
        up on a request later on, its output has finish_reason "error" and says why; the others are unharmed.
        If an exception or Ctrl-C ends the call, all its requests are aborted.
        """
        return self._run(self._prepare(prompts, sampling_params, lora_request, priority), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        parse_special_tokens: bool = False,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists),
        by the chat template.

        Images come as parts of a message's content: ``{"type": "image_url", "image_url": {"url":
        "data:…"}}``, or ``{"type": "image_pil", "image_pil": image}``.
        add_generation_prompt: open the assistant's turn. chat_template_kwargs: further names the template
        knows. parse_special_tokens: special tokens in the messages count; otherwise they are text, and only
        the template's own ones count. chat_template: takes the place of the model's, which need not have one
        then.
        Raises RequestError as ``generate`` does, and where there is no chat template.
        """
        conversations: Any = messages
        if isinstance(messages, Mapping) or not messages or isinstance(messages[0], (Mapping, str)):
            conversations = [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            with _naming("Conversation", index, len(conversations)):
                prompt = self.llm_engine.render_chat(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                    parse_special_tokens=parse_special_tokens,
                )
            prompts.append(prompt)
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences instead of sampled ones: see BeamSearchParams.
        Outputs in the order of the prompts.

        prompts, lora_request: as in ``generate``. Raises RequestError before anything runs if one of the
        prompts cannot be served, and if the engine gives up on one later on.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is of type {type(params).__name__}, but must be a BeamSearchParams.")
        prepared = self._prepare(prompts, SamplingParams(max_tokens=params.max_tokens), lora_request)
        if any(request.pictures for request in prepared):
            raise RequestError("A beam search takes no images yet: leave them out, or sample.")
        ends, width = self.llm_engine.eos_token_ids, self.llm_engine.client.model_vocab_size
        searches = [BeamSearch(params, ends, width) for _ in prepared]

        def extend(asked: list[tuple[int, list[int], int]]) -> list[PositionLogprobMap]:
            requests = []
            for index, token_ids, num_logprobs in asked:
                sequence = prepared[index].sequences[0]
                prompt = {"prompt_token_ids": [*sequence.prompt_token_ids, *token_ids]}
                one = SamplingParams(
                    temperature=0.0, max_tokens=1, logprobs=num_logprobs, output_kind=OutputKind.FINAL_ONLY
                )
                salt, lora = sequence.cache_salt, sequence.lora
                requests.append(self.llm_engine.prepare(None, prompt, one, cache_salt=salt, lora=lora))
            outputs = self._run(requests, show_progress=False)
            return [_required(output.outputs[0].logprobs, output, _NO_LOGPROBS)[0] for output in outputs]

        run_searches(searches, extend)
        if self.llm_engine.has_tokenizer:
            for sequence in itertools.chain.from_iterable(search.sequences for search in searches):
                sequence.text = self.get_tokenizer().decode(sequence.token_ids, skip_special_tokens=True)
        return [
            BeamSearchOutput(request.prompt, request.prompt_token_ids, search.sequences)
            for request, search in zip(prepared, searches)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingOutput]:
        """One vector per prompt, from the model's final hidden states;
        the outputs come in the order of the prompts.

        pooling_params: None takes the last token's state, scaled to length 1. The other arguments as in
        ``generate``. Raises RequestError before anything runs if one of the prompts cannot be served, and if
        the engine gives up on one later on.
        """
        pooling = PoolingParams() if pooling_params is None else pooling_params
        params = SamplingParams(temperature=0.0, max_tokens=1)
        outputs = self._run(self._prepare(prompts, params, lora_request, pooling=pooling), use_tqdm)
        return [
            EmbeddingOutput(
                output.prompt,
                output.prompt_token_ids,
                _required(output.embedding, output, "The engine gave no vector."),
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """How alike prompts are: the cosine of their vectors, -1 to 1, of one with each of many,
        or pair by pair.

        pooling_params: see ``embed``; the vectors are always scaled to length 1.
        Raises RequestError as ``embed`` does.
        """
        left, right = _as_list(data_1), _as_list(data_2)
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise RequestError(
                f"data_1 has {len(left)} prompts and data_2 has {len(right)}, but there must be one, or as "
                "many, in "
                "data_1."
            )
        pooling = msgspec.structs.replace(pooling_params or PoolingParams(), normalize=True)
        outputs = self.embed([*left, *right], pooling, use_tqdm, lora_request)
        pairs = zip(outputs[: len(left)], outputs[len(left) :])
        return [math.fsum(x * y for x, y in zip(one.embedding, other.embedding)) for one, other in pairs]

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.llm_engine.get_default_sampling_params()

    def get_metrics(self) -> SchedulerStats:
        """The engine core's counters: running and waiting requests, cache use and hits,
        preemptions, steps."""
        return self.llm_engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are still using the cache."""
        return self.llm_engine.reset_prefix_cache()

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter before it is needed. Raises RequestError, in a sentence, if it cannot be served."""
        self.llm_engine.add_lora(lora_request)

    def remove_lora(self, name: str) -> bool:
        """Forget an adapter; False if it is not known.
        Raises RequestError while unfinished requests use it."""
        return self.llm_engine.remove_lora(name)

    def list_loras(self) -> list[LoRARequest]:
        """All known adapters, least recently used first."""
        return self.llm_engine.list_loras()

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the model: level 1 keeps the weights in host memory, level 2 drops them.

        The KV cache goes in both, and requests are refused until ``wake_up``.
        """
        self.llm_engine.client.call("sleep", level)

    def wake_up(self) -> None:
        """Undo ``sleep``. Raises ModelError, and goes on sleeping,
        if dropped weights cannot be read again."""
        self.llm_engine.client.call("wake_up")

    def update_weights(self, path: str) -> None:
        """Replace the weights by those of a directory of safetensors files, and forget all cached prefixes.

        Raises ModelError, and changes nothing, for weights of another architecture.
        """
        self.llm_engine.client.call("update_weights", path)

    def start_profile(self, directory: str) -> None:
        """Let the workers record what PyTorch runs, until ``stop_profile``. Raises RequestError."""
        self.llm_engine.client.call("start_profile", directory)

    def stop_profile(self) -> list[str]:
        """Paths of the traces, one per worker; ui.perfetto.dev opens them."""
        return list(self.llm_engine.client.call("stop_profile"))

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Call adapter_shapes, memory_bytes or weight_checksums on every worker; their results."""
        return list(self.llm_engine.client.call("collective_rpc", method, list(args)))

    def close(self) -> None:
        self.llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None = None,
        pooling: PoolingParams | None = None,
    ) -> list[PreparedRequest]:
        """Check all prompts and load their adapters,
        so that what cannot be served is refused before anything runs."""
        prompt_list = _as_list(prompts)
        params_list = _one_per_prompt("sampling_params", params, len(prompt_list), SamplingParams)
        priorities = _one_per_prompt("priority", priority, len(prompt_list), int)
        adapters = _one_per_prompt("lora_request", lora_request, len(prompt_list), LoRARequest)
        prepared = []
        for index, (prompt, one, value, lora) in enumerate(
            zip(prompt_list, params_list, priorities, adapters)
        ):
            with _naming("Prompt", index, len(prompt_list)):
                one = self.get_default_sampling_params() if one is None else one
                if isinstance(one, SamplingParams):  # outputs in between are not read, so none are built
                    one = msgspec.structs.replace(one, output_kind=OutputKind.FINAL_ONLY)
                prepared.append(
                    self.llm_engine.prepare(
                        None, prompt, one, priority=0 if value is None else value, lora=lora, pooling=pooling
                    )
                )
        for lora in dict.fromkeys(lora for lora in adapters if lora is not None):
            self.llm_engine.add_lora(lora)
        return prepared

    def _run(self, prepared: Sequence[PreparedRequest], show_progress: bool) -> list[RequestOutput]:
        """Submit all and step until all have finished."""
        finished: dict[str, RequestOutput] = {}
        wanted = {request.request_id for request in prepared}
        try:
            with _progress_bar(len(prepared), show_progress) as advance:
                for request in prepared:
                    self.llm_engine.submit(request)
                while len(finished) < len(wanted):
                    for output in self.llm_engine.step():
                        if output.finished and output.request_id in wanted:
                            finished[output.request_id] = output
                            advance(output)
        except BaseException:
            # A dead engine has nothing left to abort, and must not hide why it died.
            with suppress(EngineDeadError):
                self.llm_engine.abort_request(wanted - finished.keys())
            raise
        return [finished[request.request_id] for request in prepared]


def _required(value: Value | None, output: RequestOutput, missing: str) -> Value:
    """The requested value. Raises RequestError if the engine gave up on the request."""
    if not value:
        raise RequestError(output.error or missing)
    return value


@contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Prompts done, and tokens per second over the whole call; to be called with every finished output."""
    if not show or not sys.stderr.isatty():
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("Prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), rate)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total, rate="")
        num_tokens = 0

        def advance(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed = progress.tasks[task].elapsed or 0.0
            progress.update(task, advance=1, rate=f"{num_tokens / elapsed:,.0f} tok/s" if elapsed > 0 else "")

        yield advance


@contextmanager
def _naming(what: str, index: int, count: int) -> Iterator[None]:
    """Say which of many a RequestError is about."""
    try:
        yield
    except RequestError as error:
        raise error if count == 1 else RequestError(f"{what} {index}: {error}") from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}, but must be one prompt or a list of prompts."
        )
    return list(prompts)


def _one_per_prompt(name: str, value: Any, num_prompts: int, kind: type) -> list[Any]:
    """Spread one value over all prompts, or check that a list has one for each."""
    if value is None or isinstance(value, kind):
        return [value] * num_prompts
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(
            f"{name} is {value!r}, but must be a {kind.__name__} or a list with one per prompt."
        )
    if len(value) != num_prompts:
        raise RequestError(
            f"{name} has {len(value)} entries, but must have one for each of the {num_prompts} prompts."
        )
    return cast("list[Any]", list(value))
