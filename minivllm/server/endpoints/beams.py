"""``use_beam_search``: the likeliest sequences of prompts, found in rounds of one-token requests."""

from collections.abc import Callable, Sequence
from typing import Any

from minivllm.frontend.beam_search import BeamSearch
from minivllm.processing.beam_search_params import BeamSearchParams
from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.sampling_params import OutputKind, SamplingParams
from minivllm.server.bodies.errors import unsupported
from minivllm.server.bodies.fields import RequestFields, SamplingFields
from minivllm.server.service.service import Service

WITHOUT_EFFECT = {"temperature", "top_p", "top_k", "min_p", "seed"}
"""They choose among tokens at random, which a search does not."""
UNDERSTOOD = {"ignore_eos", "skip_special_tokens"}


def check_beams(request: RequestFields) -> None:
    """Raises ApiError 400 for what a search cannot do."""
    if not request.use_beam_search:
        if request.length_penalty is not None:
            raise unsupported("length_penalty", "has a meaning with use_beam_search: true only.")
        return
    for name in ("stream", "logprobs", "prompt_logprobs", "response_format", "tools", "echo"):
        if getattr(request, name, None):
            raise unsupported(name, "does not go with use_beam_search.")
    neutral = SamplingParams()
    for name in SamplingFields.model_fields:
        value = getattr(request, name)
        if name not in WITHOUT_EFFECT | UNDERSTOOD and value and value != getattr(neutral, name, None):
            raise unsupported(name, "does not go with use_beam_search.")


async def search_beams(
    service: Service,
    request: RequestFields,
    params: SamplingParams,
    prepare: Callable[[], Sequence[PreparedRequest]],
) -> list[RequestOutput]:
    """The outputs of all prompts, each with its n likeliest sequences. prepare: makes their requests."""
    client = service.engine.client
    prompts: list[PreparedRequest] = []
    searches: list[BeamSearch] = []
    asked: list[BeamSearch] = []

    def next_round() -> list[PreparedRequest]:
        if not prompts:
            prompts.extend(prepare())
            for one in prompts:
                beams = BeamSearchParams(
                    beam_width=params.num_sequences,
                    n=params.n,
                    max_tokens=one.sequences[0].max_tokens,
                    length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
                    ignore_eos=params.ignore_eos,
                )
                searches.append(BeamSearch(beams, client.eos_token_ids, client.model_vocab_size))
        asked[:] = [search for search in searches if not search.done]
        return [
            extended(prompt, beam.token_ids, search.num_logprobs)
            for prompt, search in zip(prompts, searches)
            if not search.done
            for beam in search.beams
        ]

    def extended(prompt: PreparedRequest, token_ids: list[int], num_logprobs: int) -> PreparedRequest:
        first = prompt.sequences[0]
        return service.engine.prepare(
            prompt.request_id,
            {"prompt_token_ids": [*prompt.prompt_token_ids, *token_ids]},
            SamplingParams(
                temperature=0.0, max_tokens=1, logprobs=num_logprobs, output_kind=OutputKind.FINAL_ONLY
            ),
            priority=first.priority,
            cache_salt=first.cache_salt,
            lora=first.lora,
        )

    def finish(outputs: Sequence[RequestOutput]) -> None:
        rest = iter(outputs)
        for search in asked:
            found = [next(rest).outputs[0].logprobs or [] for _ in search.beams]
            search.advance([logprobs[0] for logprobs in found])

    await service.run_in_rounds(params.num_sequences, next_round, finish)
    return [_output(service, prompt, search, params) for prompt, search in zip(prompts, searches)]


def _output(
    service: Service, prompt: PreparedRequest, search: BeamSearch, params: SamplingParams
) -> RequestOutput:
    def text(token_ids: list[int], reason: str) -> str:
        kept: Any = token_ids[:-1] if reason == "stop" else token_ids
        return (
            service.engine.tokenizer.decode(kept, params.skip_special_tokens)
            if service.engine.has_tokenizer
            else ""
        )

    outputs = [
        CompletionOutput(
            index=index,
            text=text(one.token_ids, one.finish_reason),
            token_ids=one.token_ids,
            cumulative_logprob=one.cumulative_logprob,
            finish_reason=one.finish_reason,
        )
        for index, one in enumerate(search.sequences)
    ]
    metrics = RequestMetrics(arrival_time=prompt.arrival_time, num_prompt_tokens=len(prompt.prompt_token_ids))
    metrics.num_generation_tokens = sum(len(one.token_ids) for one in outputs)
    return RequestOutput(
        request_id=prompt.request_id,
        prompt=prompt.prompt,
        prompt_token_ids=prompt.prompt_token_ids,
        outputs=outputs,
        finished=True,
        metrics=metrics,
    )
