"""``LLM``: many prompts in, all their completions out. The offline entry point, in vLLM's shape."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import msgspec

from minivllm.config import EngineArgs
from minivllm.errors import EngineDeadError, RequestError
from minivllm.frontend.beam_search import BeamSearch, BeamSearchOutput, run_searches
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.messages import LoRARequest, SchedulerStats
from minivllm.processing.input_processor import PreparedRequest, Prompt
from minivllm.processing.outputs import EmbeddingOutput, PositionLogprobMap, RequestOutput
from minivllm.sampling_params import BeamSearchParams, OutputKind, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from minivllm.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""``{"role": "user", "content": "Hello"}``"""


class LLM:
    """A loaded model that completes lists of prompts. A context manager: leaving it frees the model.

    ``LLM(model="smollm2", max_model_len=2048)`` takes every field of ``EngineArgs`` by name; an unknown name raises
    ConfigError. ``engine`` puts an existing engine in the place of a loaded one, which the LLM then owns. A model that
    is not compiled yet is compiled first, which is said on standard error (a warning of the logger "minivllm").
    """

    def __init__(self, model: str | None = None, *, engine: LLMEngine | None = None, **engine_args: Any) -> None:
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

        prompts: one or a list, each a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
        sampling_params: one for all or one per prompt; None takes the model's defaults.
        use_tqdm: a progress bar on stderr if that is a terminal. priority: one for all or one per prompt.
        lora_request: the adapter, one for all or one per prompt; adapters are loaded when they are first named.

        Raises RequestError before anything runs if one of the prompts cannot be served. If the engine gives up on a
        request later on, its output has finish_reason "error" and says why; the others are unharmed. If an exception
        or Ctrl-C ends the call, all its requests are aborted.
        """
        prompt_list = _as_list(prompts)
        params_list = _one_per_prompt("sampling_params", sampling_params, len(prompt_list), SamplingParams)
        priorities = _one_per_prompt("priority", priority, len(prompt_list), int)
        adapters = _one_per_prompt("lora_request", lora_request, len(prompt_list), LoRARequest)
        defaults = self.get_default_sampling_params() if None in params_list else None
        prepared = []
        for index, (prompt, params, value, lora) in enumerate(zip(prompt_list, params_list, priorities, adapters)):
            with _naming("Prompt", index, len(prompt_list)):
                prepared.append(self._prepare(prompt, defaults if params is None else params, value, lora))
        self._load_adapters(adapters)
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        parse_special_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists), by the chat template.

        add_generation_prompt: open the assistant's turn. chat_template_kwargs: further names the template knows.
        parse_special_tokens: special tokens in the messages count; otherwise they are text, and only the template's own
        ones count.
        Raises RequestError as ``generate`` does, and for a model without a chat template.
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
        """The likeliest sequences instead of sampled ones: see BeamSearchParams. Outputs in the order of the prompts.

        prompts, lora_request: as in ``generate``. Raises RequestError before anything runs if one of the prompts cannot
        be served, and if the engine gives up on one later on.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is a {type(params).__name__}, but must be a BeamSearchParams.")
        prompt_list = _as_list(prompts)
        adapters = _one_per_prompt("lora_request", lora_request, len(prompt_list), LoRARequest)
        client = self.llm_engine.client
        searches, prepared = [], []
        whole = SamplingParams(max_tokens=params.max_tokens)
        for index, (prompt, lora) in enumerate(zip(prompt_list, adapters)):
            with _naming("Prompt", index, len(prompt_list)):
                prepared.append(self._prepare(prompt, whole, None, lora))
            searches.append(BeamSearch(params, client.eos_token_ids, client.model_vocab_size))
        self._load_adapters(adapters)

        def extend(asked: list[tuple[int, list[int], int]]) -> list[PositionLogprobMap]:
            requests = []
            for index, token_ids, num_logprobs in asked:
                sequence = prepared[index].sequences[0]
                step: dict[str, Any] = {"prompt_token_ids": [*prepared[index].prompt_token_ids, *token_ids]}
                if sequence.cache_salt is not None:
                    step["cache_salt"] = sequence.cache_salt
                one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_logprobs)
                requests.append(self._prepare(step, one, None, adapters[index]))
            return [_next_logprobs(output) for output in self._run(requests, show_progress=False)]

        run_searches(searches, extend)
        return [self._beam_output(request, search) for request, search in zip(prepared, searches)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingOutput]:
        """One vector per prompt, from the model's final hidden states; the outputs come in the order of the prompts.

        pooling_params: None takes the last token's state, scaled to length 1. The other arguments as in ``generate``.
        Raises RequestError before anything runs if one of the prompts cannot be served, and if the engine gives up on
        one later on.
        """
        prompt_list = _as_list(prompts)
        adapters = _one_per_prompt("lora_request", lora_request, len(prompt_list), LoRARequest)
        pooling = PoolingParams() if pooling_params is None else pooling_params
        params = SamplingParams(temperature=0.0, max_tokens=1, output_kind=OutputKind.FINAL_ONLY)
        prepared = []
        for index, (prompt, lora) in enumerate(zip(prompt_list, adapters)):
            with _naming("Prompt", index, len(prompt_list)):
                prepared.append(self.llm_engine.prepare(None, prompt, params, lora=lora, pooling=pooling))
        self._load_adapters(adapters)
        return [_embedding(output) for output in self._run(prepared, use_tqdm)]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """How alike prompts are: the cosine of their vectors, -1 to 1, of one with each of many, or pair by pair.

        pooling_params: see ``embed``; the vectors are always scaled to length 1. Raises RequestError as ``embed`` does.
        """
        left, right = _as_list(data_1), _as_list(data_2)
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise RequestError(
                f"data_1 has {len(left)} prompts and data_2 has {len(right)}, but there must be one, or as many, in "
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
        """The engine core's counters: running and waiting requests, cache use and hits, preemptions, steps."""
        return self.llm_engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are still using the cache."""
        return self.llm_engine.reset_prefix_cache()

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter before it is needed. Raises RequestError, in a sentence, if it cannot be served."""
        self.llm_engine.add_lora(lora_request)

    def remove_lora(self, name: str) -> bool:
        """Forget an adapter; False if it is not known. Raises RequestError while unfinished requests use it."""
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
        """Undo ``sleep``. Raises ModelError, and goes on sleeping, if dropped weights cannot be read again."""
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
        self, prompt: Prompt, params: SamplingParams | None, priority: int | None, lora: LoRARequest | None
    ) -> PreparedRequest:
        if isinstance(params, SamplingParams):
            # Nobody reads what is between, so nothing is built for it.
            params = msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY)
        return self.llm_engine.prepare(None, prompt, params, priority=0 if priority is None else priority, lora=lora)

    def _load_adapters(self, adapters: Sequence[LoRARequest | None]) -> None:
        """Refuse adapters that cannot be served before anything runs."""
        for lora in dict.fromkeys(lora for lora in adapters if lora is not None):
            self.llm_engine.add_lora(lora)

    def _beam_output(self, prepared: PreparedRequest, search: BeamSearch) -> BeamSearchOutput:
        if self.llm_engine.has_tokenizer:
            for sequence in search.sequences:
                sequence.text = self.get_tokenizer().decode(sequence.token_ids, skip_special_tokens=True)
        return BeamSearchOutput(prepared.prompt, prepared.prompt_token_ids, search.sequences)

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


def _embedding(output: RequestOutput) -> EmbeddingOutput:
    if output.embedding is None:
        raise RequestError(output.error or "The engine gave no vector.")
    return EmbeddingOutput(output.prompt, output.prompt_token_ids, output.embedding, output.num_cached_tokens)


def _next_logprobs(output: RequestOutput) -> PositionLogprobMap:
    """Logprobs of the only token of a completion. Raises RequestError if the engine gave up on it."""
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        raise RequestError(output.error or "The engine gave no logprobs, which a beam search is made of.")
    return logprobs[0]


class _ProgressBar:
    """Prompts done, and tokens per second over the whole call."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task
        self._num_tokens = 0

    def __call__(self, output: RequestOutput) -> None:
        if self._progress is None or self._task is None:
            return
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._progress.tasks[self._task].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:,.0f} tok/s" if elapsed > 0 else ""
        self._progress.update(self._task, advance=1, rate=rate)


@contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[_ProgressBar]:
    if not show or not sys.stderr.isatty():
        yield _ProgressBar(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _ProgressBar(progress, progress.add_task("prompts", total=total, rate=""))


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
        raise RequestError(f"prompts is a {type(prompts).__name__}, but must be one prompt or a list of prompts.")
    return list(prompts)


def _one_per_prompt(name: str, value: Any, num_prompts: int, kind: type) -> list[Any]:
    """Spread one value over all prompts, or check that a list has one for each."""
    if value is None or isinstance(value, kind):
        return [value] * num_prompts
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is {value!r}, but must be a {kind.__name__} or a list with one per prompt.")
    if len(value) != num_prompts:
        raise RequestError(f"{name} has {len(value)} entries, but must have one for each of the {num_prompts} prompts.")
    return cast("list[Any]", list(value))
