"""``POST /v1/embeddings`` and ``POST /v1/score``: pooling requests, many of which make one answer."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import RequestOutput
from minivllm.sampling_params import OutputKind, PoolingParams, SamplingParams
from minivllm.server.protocol import completions as protocol
from minivllm.server.service.service import Service, new_id
from minivllm.server.wire.errors import invalid, unsupported
from minivllm.server.wire.fields import as_prompt, prompt_list

T = TypeVar("T")


async def embed(service: Service, request: protocol.EmbeddingRequest) -> protocol.EmbeddingList:
    """Raises ApiError, RequestError or EngineDeadError."""
    if request.dimensions is not None:
        raise unsupported(
            "dimensions", "cannot be chosen: vectors are as long as the model's hidden states. Leave it out."
        )
    inputs = prompt_list(request.input)
    run = _PoolingRun(service, request, PoolingParams(pooling=request.pooling, normalize=request.normalize))
    # Each vector is written when it comes: all at the end would take the event loop's time in one piece.
    write: Callable[[list[float]], Any] = _base64_of if request.encoding_format == "base64" else _json_of
    written = await run.vectors(inputs, write)
    data = [
        protocol.Embedding(object="embedding", index=index, embedding=vector) for index, vector in enumerate(written)
    ]
    return protocol.EmbeddingList(object="list", data=data, model=run.model, usage=run.usage())


async def score(service: Service, request: protocol.ScoreRequest) -> protocol.ScoreList:
    """Raises ApiError, RequestError or EngineDeadError."""
    left, right = prompt_list(request.text_1), prompt_list(request.text_2)
    if len(left) not in (1, len(right)):
        why = f"has {len(left)} texts and text_2 has {len(right)}: give one text_1, or as many as text_2 has."
        raise invalid("text_1", why)
    run = _PoolingRun(service, request, PoolingParams(pooling=request.pooling))
    vectors = await run.vectors([*left, *right], np.asarray)
    compared = vectors[len(left) :]
    pairs = zip(vectors[: len(left)] * (len(compared) // len(left)), compared)
    data = [
        protocol.Score(object="score", index=index, score=float(one @ other))
        for index, (one, other) in enumerate(pairs)
    ]
    return protocol.ScoreList(
        id=new_id("score"), object="list", created=int(time.time()), model=run.model, data=data, usage=run.usage()
    )


class _PoolingRun:
    """Texts as vectors, a few at a time."""

    def __init__(self, service: Service, request: protocol.PoolingFields, pooling: PoolingParams) -> None:
        self._service = service
        self._request = request
        self._pooling = pooling
        self._served = service.models.find(request.model)
        self._id = new_id("embd")
        self._num_prompt_tokens = 0
        self.model = self._served.name

    async def vectors(self, inputs: Sequence[str | list[int]], convert: Callable[[list[float]], T]) -> list[T]:
        """One vector per input, in their order, each as ``convert`` makes it."""
        vectors: dict[int, T] = {}

        def finish(number: int, prepared: PreparedRequest, output: RequestOutput) -> None:
            vectors[number] = convert(output.embedding or [])
            self._num_prompt_tokens += len(prepared.prompt_token_ids)

        await self._service.run_in_turn(len(inputs), lambda number: self._prepare(number, inputs[number]), finish)
        return [vectors[number] for number in range(len(inputs))]

    def usage(self) -> protocol.EmbeddingUsage:
        return protocol.EmbeddingUsage(prompt_tokens=self._num_prompt_tokens, total_tokens=self._num_prompt_tokens)

    def _prepare(self, number: int, given: str | list[int]) -> PreparedRequest:
        request = self._request
        return self._service.engine.prepare(
            f"{self._id}-{number}",
            as_prompt(given),
            SamplingParams(temperature=0.0, max_tokens=1, output_kind=OutputKind.FINAL_ONLY),
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            lora=self._served.lora,
            pooling=self._pooling,
        )


def _json_of(vector: Sequence[float]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(vector))


def _base64_of(vector: Sequence[float]) -> str:
    """float32, little-endian, in base64: what official clients ask for unless told otherwise."""
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
