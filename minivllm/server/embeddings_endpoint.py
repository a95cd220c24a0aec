"""``POST /v1/embeddings`` and ``POST /v1/score``: pooling requests, many of which make one answer."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np

from minivllm.frontend.input_processor import PreparedRequest
from minivllm.sampling_params import OutputKind, PoolingParams, SamplingParams
from minivllm.server.errors import ApiError, unsupported
from minivllm.server.protocol.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    PoolingFields,
    Score,
    ScoreList,
    ScoreRequest,
)
from minivllm.server.protocol.prompts import as_prompt, prompt_list
from minivllm.server.service import Service, new_id


async def embed(service: Service, request: EmbeddingRequest) -> EmbeddingList:
    """Raises ApiError, RequestError or EngineDeadError."""
    if request.dimensions is not None:
        raise unsupported(
            "dimensions", "cannot be chosen: vectors are as long as the model's hidden states. Leave it out."
        )
    inputs = prompt_list(request.input)
    run = _PoolingRun(service, request, PoolingParams(pooling=request.pooling, normalize=request.normalize))
    vectors = await run.vectors(inputs)
    data = [
        Embedding(
            object="embedding",
            index=index,
            embedding=_base64_of(vector) if request.encoding_format == "base64" else vector,
        )
        for index, vector in enumerate(vectors)
    ]
    return EmbeddingList(object="list", data=data, model=run.model, usage=run.usage())


async def score(service: Service, request: ScoreRequest) -> ScoreList:
    """Raises ApiError, RequestError or EngineDeadError."""
    left, right = prompt_list(request.text_1), prompt_list(request.text_2)
    if len(left) not in (1, len(right)):
        message = (
            f"text_1 has {len(left)} texts and text_2 has {len(right)}: give one text_1, or as many as text_2 has."
        )
        raise ApiError(400, message, param="text_1", code="invalid_value")
    run = _PoolingRun(service, request, PoolingParams(pooling=request.pooling))
    vectors = await run.vectors([*left, *right])
    compared = vectors[len(left) :]
    pairs = zip(vectors[: len(left)] * (len(compared) // len(left)), compared)
    data = [
        Score(object="score", index=index, score=math.fsum(x * y for x, y in zip(one, other)))
        for index, (one, other) in enumerate(pairs)
    ]
    return ScoreList(
        id=new_id("score"), object="list", created=int(time.time()), model=run.model, data=data, usage=run.usage()
    )


class _PoolingRun:
    """Texts as vectors, as many at a time as the engine runs: a long list does not take all places of the queue."""

    def __init__(self, service: Service, request: PoolingFields, pooling: PoolingParams) -> None:
        self._service = service
        self._request = request
        self._pooling = pooling
        self._served = service.models.find(request.model)
        self._id = new_id("embd")
        self._num_prompt_tokens = 0
        self.model = self._served.name

    async def vectors(self, inputs: Sequence[str | list[int]]) -> list[list[float]]:
        """One vector per input, in their order."""
        vectors: dict[int, list[float]] = {}

        def prepare() -> list[PreparedRequest]:
            return [self._prepare(number, given) for number, given in enumerate(inputs)]

        places = min(len(inputs), self._service.engine.config.scheduler.max_num_seqs)
        async with aclosing(self._service.run(places, prepare)) as outputs:
            async for prepared, number, output in outputs:
                if output.embedding is not None:
                    vectors[number] = output.embedding
                    self._num_prompt_tokens += len(prepared.prompt_token_ids)
        return [vectors[number] for number in range(len(inputs))]

    def usage(self) -> EmbeddingUsage:
        return EmbeddingUsage(prompt_tokens=self._num_prompt_tokens, total_tokens=self._num_prompt_tokens)

    def _prepare(self, number: int, given: str | list[int]) -> PreparedRequest:
        request = self._request
        return self._service.engine.prepare(
            f"{self._id}-{number}",
            as_prompt(given, request.cache_salt),
            SamplingParams(temperature=0.0, max_tokens=1, output_kind=OutputKind.FINAL_ONLY),
            priority=request.priority or 0,
            lora=self._served.lora,
            pooling=self._pooling,
        )


def _base64_of(vector: Sequence[float]) -> str:
    """float32, little-endian, in base64: what official clients ask for unless told otherwise."""
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
