"""``POST /v1/completions``."""

from collections.abc import Iterable, Sequence
from typing import Any

from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import CompletionOutput, PositionLogprobMap, RequestOutput
from minivllm.sampling_params import PoolingParams, StructuredOutputs
from minivllm.server.answers.constraints import forced_answer
from minivllm.server.answers.ending import ending
from minivllm.server.answers.logprobs import TextOffsets, TokenNames, completion_logprobs
from minivllm.server.bodies.errors import invalid, unsupported
from minivllm.server.bodies.fields import as_prompt, prompt_list
from minivllm.server.endpoints.completion_run import CompletionRun
from minivllm.server.protocol import completions as protocol
from minivllm.server.service.service import Service

DEFAULT_MAX_TOKENS = 16


class TextRun(CompletionRun):
    """Completions of texts."""

    id_prefix = "cmpl"
    _object_name = "text_completion"

    def __init__(self, service: Service, request: protocol.CompletionRequest) -> None:
        super().__init__(service, request)
        self._request = request
        self._prompts = prompt_list(request.prompt)
        self._offsets: dict[int, TextOffsets] = {}
        if request.max_tokens == 0:
            if not request.echo:
                raise invalid("max_tokens", "is 0, but must be at least 1 unless echo is true.")
            self.pooling = PoolingParams()  # the prompt is computed, and nothing generated
        if request.stream and request.echo and request.logprobs is not None and (request.n or 1) > 1:
            raise unsupported("n", "must be 1 where stream, echo and logprobs come together.")
        schema, structure = forced_answer(request)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        echoed = request.logprobs if request.echo else None
        counts = [count for count in (echoed, request.prompt_logprobs) if count is not None]
        self.params = request.sampling_params(
            service.engine.get_default_sampling_params(),
            n=request.n or 1,
            best_of=request.best_of,
            max_tokens=max(1, max_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=max(counts, default=None),
            structured_outputs=structure if schema is None else StructuredOutputs(json=schema),
            output_kind=request.output_kind,
        )
        self._num_completions = len(self._prompts) * self.params.num_sequences

    def _prepare(self) -> Sequence[PreparedRequest]:
        adds = self._request.add_special_tokens is not False
        return [
            self._prepared(f"{self._id}-{number}", as_prompt(one), add_special_tokens=adds)
            for number, one in enumerate(self._prompts)
        ]

    def _chunk_choices(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterable[dict[str, Any]]:
        choice = self._choice(number, output, completion)
        if choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"):
            yield choice

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """The new part of one completion; the first time with the prompt before it, if that is wanted."""
        index = number * self.params.n + completion.index
        text, token_ids = completion.text, list(completion.token_ids)
        positions: list[PositionLogprobMap | None] = list(completion.logprobs or [])
        decoder, starts = self._service.token_decoder, list[int]()
        is_new = index not in self._offsets
        if is_new:
            self._offsets[index] = TextOffsets(decoder, skip_special_tokens=self.params.skip_special_tokens)
        offsets = self._offsets[index]
        if self._request.echo and is_new:
            prompt = self._prompt_text(output)
            starts = offsets.add_prompt(output.prompt_token_ids, prompt)
            text = prompt + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*(output.prompt_logprobs or []), *positions]
        logprobs = None
        if self._request.logprobs is not None and token_ids:
            starts += map(offsets.add, token_ids[len(starts) :])
            logprobs = completion_logprobs(
                token_ids,
                positions,
                starts,
                TokenNames(decoder, bool(self._request.return_tokens_as_token_ids)),
            )
        end = ending(completion) if self.pooling is None else {"finish_reason": "length"}
        told = self._told_tokens(completion) | (self._told_prompt(output) if is_new else {})
        return {"index": index, "text": text, "logprobs": logprobs, **end, **told}

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        engine = self._service.engine
        return engine.tokenizer.decode(output.prompt_token_ids, False) if engine.has_tokenizer else ""
