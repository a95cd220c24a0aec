"""``POST /v1/embeddings``, ``/v1/score`` and ``/v1/rerank``:
pooling requests, many of which make one answer."""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from minivllm.messages import LoRARequest
from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import RequestOutput
from minivllm.sampling_params import OutputKind, PoolingParams, SamplingParams
from minivllm.server.bodies.errors import invalid, named_in, unsupported
from minivllm.server.bodies.fields import as_prompt, prompt_list
from minivllm.server.bodies.ids import new_id
from minivllm.server.protocol import completions as protocol
from minivllm.server.service.service import Service

T = TypeVar("T")


async def embed(service: Service, request: protocol.EmbeddingRequest) -> protocol.EmbeddingList:
    """Raises ApiError, RequestError or EngineDeadError."""
    if request.dimensions is not None:
        raise unsupported(
            "dimensions", "cannot be chosen: vectors are as long as the model's hidden states. Leave it out."
        )
    # Each vector is written when it comes: all at the end would take the event loop's time in one piece.
    write: Callable[[list[float]], Any] = _base64_of if request.encoding_format == "base64" else _json_of
    served, inputs = service.models.find(request.model), prompt_list(request.input)

    def name(number: int) -> str:
        return "input" if len(inputs) == 1 else f"input.{number}"

    written, usage = await _vectors(
        service, request, served.lora, inputs, write, name, normalize=request.normalize
    )
    data = [
        protocol.Embedding(object="embedding", index=index, embedding=vector)
        for index, vector in enumerate(written)
    ]
    return protocol.EmbeddingList(object="list", data=data, model=served.name, usage=usage)


async def score(service: Service, request: protocol.ScoreRequest) -> protocol.ScoreList:
    """Raises ApiError, RequestError or EngineDeadError."""
    left, right = prompt_list(request.text_1), prompt_list(request.text_2)
    if len(left) not in (1, len(right)):
        why = f"has {len(left)} texts and text_2 has {len(right)}: give one text_1, or as many as text_2 has."
        raise invalid("text_1", why)
    served = service.models.find(request.model)

    def name(number: int) -> str:
        return "text_1" if number < len(left) else "text_2"

    vectors, usage = await _vectors(service, request, served.lora, [*left, *right], np.asarray, name)
    compared = vectors[len(left) :]
    pairs = zip(vectors[: len(left)] * (len(compared) // len(left)), compared)
    data = [
        protocol.Score(object="score", index=index, score=float(one @ other))
        for index, (one, other) in enumerate(pairs)
    ]
    return protocol.ScoreList(
        id=new_id("score"), object="list", created=int(time.time()), model=served.name, data=data, usage=usage
    )


async def rerank(service: Service, request: protocol.RerankRequest) -> protocol.RerankResponse:
    """Raises ApiError, RequestError or EngineDeadError."""
    served = service.models.find(request.model)

    def name(number: int) -> str:
        return "query" if number == 0 else f"documents.{number - 1}"

    texts = [request.query, *request.documents]
    (query, *vectors), usage = await _vectors(service, request, served.lora, texts, np.asarray, name)
    results = []
    for index, (vector, document) in enumerate(zip(vectors, request.documents)):
        result = protocol.RerankResult(index=index, relevance_score=float(query @ vector))
        if request.return_documents is not False:
            result["document"] = protocol.RerankedDocument(text=document)
        results.append(result)
    results.sort(key=lambda result: -result["relevance_score"])
    return protocol.RerankResponse(
        id=new_id("rerank"), model=served.name, results=results[: request.top_n or None], usage=usage
    )


async def _vectors(
    service: Service,
    request: protocol.PoolingFields,
    lora: LoRARequest | None,
    inputs: Sequence[str | list[int]],
    convert: Callable[[list[float]], T],
    name: Callable[[int], str],
    *,
    normalize: bool = True,
) -> tuple[list[T], protocol.EmbeddingUsage]:
    """One vector per input, in their order, each as ``convert`` makes it, and how many tokens they took.

    name: the field that the input of a number came in.
    """
    answer_id = new_id("embd")
    vectors: dict[int, T] = {}
    num_tokens = 0

    def prepare(number: int) -> PreparedRequest:
        with named_in(name(number)):
            return service.engine.prepare(
                f"{answer_id}-{number}",
                service.cut_prompt(
                    as_prompt(inputs[number]), request.truncate_prompt_tokens, service.max_model_len, True
                ),
                SamplingParams(temperature=0.0, output_kind=OutputKind.FINAL_ONLY),
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                lora=lora,
                pooling=PoolingParams(pooling=request.pooling, normalize=normalize),
            )

    def finish(number: int, output: RequestOutput) -> None:
        nonlocal num_tokens
        vectors[number] = convert(output.embedding or [])
        num_tokens += len(output.prompt_token_ids)

    await service.run_in_turn(len(inputs), prepare, finish)
    usage = protocol.EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return [vectors[number] for number in range(len(inputs))], usage


def _json_of(vector: Sequence[float]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(vector))


def _base64_of(vector: Sequence[float]) -> str:
    """float32, little-endian, in base64: what official clients ask for unless told otherwise."""
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
