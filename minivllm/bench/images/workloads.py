"""The workloads with images, and what an engine counts during them.

Pictures are noise and texts are random token ids, both seeded. No picture and no text comes twice, unless a
workload asks for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.bench.parts.parts import engine_core
from minivllm.bench.reports.figures import inter_token_latencies, time_to_first_token
from minivllm.bench.sides.drive import Record
from minivllm.engine_process.protocol.pixels import PixelAnswers
from minivllm.errors import ConfigError, ModelError
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from minivllm.multimodal.encodings import Encodings
    from minivllm.multimodal.items import PixelTensors
    from minivllm.multimodal.prompt_images import PromptImages
    from minivllm.processing.input_processor import PreparedRequest

PROMPT_TOKENS = 16
"""Of a text request, and of a question about an image."""


@dataclass(frozen=True)
class Asked:
    """The cost of one question about an image, up to its first token."""

    seconds: float
    """From the caller's picture to the token, decoding and resizing included."""
    encoded_units: int
    pixels_asked: int
    """Images whose pixels the core asked the frontend for."""
    computed_tokens: int


@dataclass
class Decoded:
    """Text requests that decoded together, alone or beside images."""

    gaps: list[float]
    """Between tokens of each text request [seconds]."""
    answered: int = 0
    """Images whose request ended before the texts did."""
    encoding_steps: list[int] = field(default_factory=list)
    """Of each of these images: steps in which some of its units were encoded."""


class SeeingEngine:
    """An engine in this process, its pictures and its counters.

    size: width and height of the pictures [pixels]. Raises ConfigError for an engine that sees no images or
    lives in another process.
    """

    def __init__(self, engine: LLMEngine, size: tuple[int, int]) -> None:
        encodings, images = engine_core(engine).encodings, engine.images
        if encodings is None or images is None:
            raise ConfigError(f"There is nothing to measure with images. {engine.client.config.no_images}")
        self.engine = engine
        self._encodings: Encodings = encodings
        self._images: PromptImages = images
        self._size = size
        self._source = random.Random("images")
        self._num_pictures = 0
        self._resized: dict[bytes, PixelTensors] = {}
        span = self._prepared([images.config.placeholder], 1, self.picture()).prompt_token_ids
        self._span = frozenset(span)
        self.span_tokens = len(span)
        """Tokens of the prompt that stand for a picture."""
        engine.client.serve_pixels(PixelAnswers(self._pixels))

    def picture(self) -> Any:
        """A new picture, as PIL holds it."""
        from PIL import Image

        self._num_pictures += 1
        width, height = self._size
        noise = np.random.default_rng(self._num_pictures).integers(0, 256, (height, width, 3))
        return Image.fromarray(noise.astype(np.uint8))

    def text(self) -> list[int]:
        """Random token ids, none of which belongs to an image."""
        found: list[int] = []
        while len(found) < PROMPT_TOKENS:
            token = self._source.randrange(self.engine.client.model_vocab_size)
            if token not in self._span:
                found.append(token)
        return found

    def ask(self, picture: Any) -> Asked:
        """Ask a new question about a picture, and nothing else meanwhile. Raises ModelError if it fails."""
        token_ids, before = [self._images.config.placeholder, *self.text()], self._counts()
        started = time.perf_counter()
        record = Record()
        records = {self.engine.submit(self._prepared(token_ids, 1, picture)).request_id: record}
        while self.engine.has_unfinished_requests():
            self._step(records, started)
        encoded, asked, computed = (after - count for after, count in zip(self._counts(), before))
        return Asked(time_to_first_token(record), encoded, asked, computed)

    def decode(self, streams: int, tokens: int, num_images: int = 0, pause: int = 0) -> Decoded:
        """Decode ``tokens`` tokens of each of ``streams`` text requests.

        num_images: questions about a new picture each that arrive meanwhile, one after another. pause: steps
        from an answer to the next of them. The pictures are resized before: a server does that in threads of
        another process. Raises ModelError if a request fails.
        """
        waiting = self._questions(num_images)
        texts: dict[str, Record] = {}
        for _ in range(streams):
            texts[self.engine.submit(self._prepared(self.text(), tokens)).request_id] = Record()
        steps_of: dict[str, int] = {}
        questions: dict[str, Record] = {}
        decoded = Decoded([])
        idle_steps, started = 0, time.perf_counter()
        while self.engine.has_unfinished_requests():
            all_decode = all(0 < len(record.token_ids) < tokens for record in texts.values())
            if waiting and not questions and all_decode and idle_steps >= pause:
                questions[self.engine.submit(waiting.pop(0)).request_id] = Record()
            before = self._encodings.num_encoded_units
            finished = self._step(texts | questions, started)
            for request_id in questions:
                steps_of[request_id] = steps_of.get(request_id, 0) + (
                    self._encodings.num_encoded_units > before
                )
            idle_steps = 0 if questions else idle_steps + all_decode
            for request_id in finished & questions.keys():
                del questions[request_id]
                if all_decode:
                    decoded.answered += 1
                    decoded.encoding_steps.append(steps_of[request_id])
        self._resized.clear()
        decoded.gaps = [gap for record in texts.values() for gap in inter_token_latencies(record)]
        return decoded

    def _questions(self, count: int) -> list[PreparedRequest]:
        """Questions about new pictures, whose pixels are at hand."""
        token_ids = [[self._images.config.placeholder, *self.text()] for _ in range(count)]
        prepared = [self._prepared(ids, 1, self.picture()) for ids in token_ids]
        for one in prepared:
            digest = one.sequences[0].images[0].digest
            self._resized[digest] = self._images.pixels(digest)
        return prepared

    def _prepared(self, token_ids: Sequence[int], max_tokens: int, picture: Any = None) -> PreparedRequest:
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=OutputKind.DELTA
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if picture is not None:
            prompt["multi_modal_data"] = {"image": picture}
        return self.engine.prepare(None, prompt, params)

    def _pixels(self, digest: bytes) -> PixelTensors:
        return self._resized.get(digest) or self._images.pixels(digest)

    def _step(self, records: dict[str, Record], started: float) -> set[str]:
        """Run a step and note its tokens; ids of the requests that it finished."""
        outputs = self.engine.step()
        moment = time.perf_counter() - started
        for output in outputs:
            if output.error is not None:
                raise ModelError(f"A request failed: {output.error}")
            token_ids = output.outputs[0].token_ids
            records[output.request_id].token_ids += token_ids
            records[output.request_id].times += [moment] * len(token_ids)
        return {output.request_id for output in outputs if output.finished}

    def _counts(self) -> tuple[int, int, int]:
        """(encoded units, images whose pixels were asked for, computed tokens) since the start."""
        computed = self.engine.stats().num_computed_tokens
        return self._encodings.num_encoded_units, self._encodings.num_questions, computed
