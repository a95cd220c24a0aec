"""Random lives of requests with images, without a model: what a step computes is encoded, and bytes agree."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from minivllm.config import ImagesConfig, SchedulerConfig
from minivllm.kv_cache.blocks.hashing import extend_block_hashes
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import EngineRequest, FeatureLines, ImageItem, ModelRunnerOutput, SchedulerOutput
from minivllm.multimodal.encodings import Encodings
from minivllm.multimodal.items import PixelTensors
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from tests.scheduler.simulated_worker import SimulatedWorker, make_engine_request, reference_generation

MAX_MODEL_LEN, BLOCK_SIZE, UNIT = 64, 4, 3
SHAPE = (1, 2, 2)


class Worker(SimulatedWorker):
    """It also keeps the units of images that it was told to encode."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(BLOCK_SIZE, max_num_seqs)
        self.units: dict[bytes, set[int]] = {}
        self.next_unit: dict[bytes, int] = {}
        self.num_late = 0
        """Images whose first units are not encoded, since the prefix cache has them."""
        self.num_again = 0
        """And which are encoded from an earlier unit on later."""
        self.num_embeds: dict[bytes, int] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for digest in step.forget:
            self.units.pop(digest, None)
        for sent in step.encode:
            assert len(sent.pixels) == sent.shape[0] * 4 and sent.pixels == digest_pixels(
                sent.digest, sent.shape[0]
            )
            known = self.units.setdefault(sent.digest, set())
            is_again = bool(known) and sent.first < min(known)
            assert not known or is_again or sent.first == self.next_unit[sent.digest], "a unit is left out"
            self.next_unit[sent.digest] = sent.first + sent.shape[0]
            known |= set(range(sent.first, self.next_unit[sent.digest]))
            self.num_late += sent.first > 0 and len(known) == sent.shape[0]
            self.num_again += is_again
            self.num_embeds[sent.digest] = sent.num_embeds
            if sent.lines is not None:
                name, num_units = sent.digest[:2]
                assert len(known) == num_units and sent.num_embeds >= placeholders_in_lines(name, num_units)
                self.num_embeds[sent.digest] = placeholders_in_lines(name, num_units)
        result = super().execute(step)
        for request_id, count in step.num_scheduled_tokens.items():
            known = self.requests[request_id]
            end = known.num_computed_tokens
            self._check_images(known.data, end - count, end)
        return result

    def _check_images(self, data: EngineRequest, start: int, end: int) -> None:
        for item in data.images:
            number = 0
            for first, count in item.runs:
                begin, stop = item.offset + first, item.offset + first + count
                assert not item.sees_itself or not begin < end < stop, "a run that sees itself is cut"
                for position in range(max(begin, start), min(stop, end)):
                    unit = (number + position - begin) // item.unit_embeds
                    needed = {unit} if item.lines is None else set(range(item.num_units))
                    assert needed <= self.units.get(item.digest, set()), "a token without its embedding"
                number += count


def placeholders_in_lines(name: int, num_units: int) -> int:
    return num_units * UNIT + name % 4 - 2


def digest_pixels(digest: bytes, num_units: int) -> bytes:
    return digest[:1] * (4 * num_units)


def random_images(chance: Random, kind: str) -> tuple[list[int], list[ImageItem]]:
    """A prompt: texts of a few tokens, and images of one to three units with markers between them. Of the kind
    "lines", they are one run of more or fewer placeholders than there are embeddings."""
    prompt = [chance.randrange(5) for _ in range(chance.randint(1, 6))]
    items = []
    for _ in range(chance.choice((0, 1, 1, 2))):
        name, num_units = chance.randrange(6), 1 + chance.randrange(3)
        digest = bytes([name, num_units]) * 16
        span, runs = [0], []
        for _ in range(num_units):
            runs.append((len(span), UNIT))
            span += [4] * UNIT + [1]
        lines = None
        if kind == "lines":
            lines = FeatureLines((1, num_units), (0, 0), (1, 1))
            runs = [(1, placeholders_in_lines(name, num_units))]
            span = [0, *[4] * runs[0][1], 1]
        items.append(
            ImageItem(
                digest,
                len(prompt),
                len(span),
                runs,
                UNIT,
                SHAPE,
                num_units,
                sees_itself=kind == "sees itself",
                lines=lines,
            )
        )
        prompt += span + [chance.randrange(5) for _ in range(chance.randint(0, 3))]
    return prompt, items


def run(seed: int, num_requests: int, *, kind: str, depth: int) -> tuple[Encodings, Worker]:
    chance = Random(seed)
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=chance.choice((4 + UNIT, 12, 40)),
        max_model_len=MAX_MODEL_LEN,
    )
    images = ImagesConfig(
        family="llava",
        placeholder=4,
        unit_embeds=UNIT,
        unit_shape=SHAPE,
        least_unit_shape=SHAPE,
        most_embeds=3 * UNIT + 1,
        bytes_per_embed=8,
        most_in_prompt=2,
        least_batched_tokens=0,
        max_num_batched_embeds=chance.choice((UNIT, 4 * UNIT)),
        encoder_cache_bytes=8 * (1 + chance.choice((3, 4, 12)) * UNIT),
        pixel_bytes=chance.choice((1, 24, 1000)),
    )
    manager = KVCacheManager(
        [FullAttentionManager(chance.choice((20, 30, 60)), BLOCK_SIZE)],
        MAX_MODEL_LEN,
        enable_prefix_caching=True,
    )
    encodings = Encodings(images)
    questions: list[bytes] = []
    encodings.ask = questions.extend
    scheduler = Scheduler(
        config, manager, admission=(encodings,), encodings=encodings, async_scheduling=depth > 1
    )
    worker, in_flight = Worker(4), deque[tuple[SchedulerOutput, ModelRunnerOutput]]()
    given: dict[str, EngineRequest] = {}
    tokens: dict[str, list[int]] = {}
    aborted: set[str] = set()
    while len(given) < num_requests or scheduler.has_requests() or in_flight:
        if len(given) < num_requests and len(scheduler.requests) < 8 and chance.random() < 0.5:
            prompt, items = random_images(chance, kind)
            if given and chance.random() < 0.4:  # a question about the images of another request
                other = chance.choice(list(given.values()))
                prompt, items = [*other.prompt_token_ids, chance.randrange(5)], other.images
                prompt = prompt if len(prompt) < MAX_MODEL_LEN - 8 else prompt[:-1]
            sent = make_engine_request(str(len(given)), prompt, chance.randint(1, 6))
            sent = EngineRequest(
                **{name: getattr(sent, name) for name in sent.__struct_fields__} | {"images": items}
            )
            given[sent.request_id], tokens[sent.request_id] = sent, []
            request = Request(sent)
            extend_block_hashes(request, BLOCK_SIZE)
            scheduler.add_request(request)
            if items:
                encodings.want(request, manager.get_computed_blocks(request)[1])
        if questions and chance.random() < 0.6:
            digest = questions.pop(chance.randrange(len(questions)))
            num_units = digest[1]
            data = digest_pixels(digest, num_units)
            assert encodings.take_pixels(PixelTensors(digest, (num_units, *SHAPE), data)) is None
        if given and chance.random() < 0.05:
            request_id = chance.choice(list(given))
            aborted.add(request_id)
            scheduler.abort_requests([request_id])
        while len(in_flight) < depth and scheduler.has_requests():
            step = scheduler.schedule()
            if not step.num_scheduled_tokens and step.is_empty:
                take(scheduler, step, ModelRunnerOutput(), tokens)
                break
            in_flight.append((step, worker.execute(step)))
        if in_flight:
            take(scheduler, *in_flight.popleft(), tokens)
        scheduler.check_integrity()
        held = sum(worker.num_embeds[digest] for digest in worker.units)
        assert encodings.num_bytes >= 8 * held
        assert encodings.num_bytes <= images.encoder_cache_bytes
    held = sum(worker.num_embeds[digest] for digest in worker.units)
    unsent = sum(
        encodings._cache[digest].num_embeds for digest in encodings._cache if digest not in worker.units
    )
    assert encodings.num_bytes == 8 * (held + unsent)
    for digest in list(questions):  # of requests that are gone
        encodings.take_pixels(PixelTensors(digest, (digest[1], *SHAPE), digest_pixels(digest, digest[1])))
    assert encodings.num_held_pixels == 0 and not encodings.is_missing
    for request_id, sent in given.items():
        if request_id not in aborted:
            assert tokens[request_id] == reference_generation(sent, MAX_MODEL_LEN)[0]
    return encodings, worker


def take(
    scheduler: Scheduler, step: SchedulerOutput, result: ModelRunnerOutput, tokens: dict[str, list[int]]
) -> None:
    for output in scheduler.update_from_output(step, result):
        tokens[output.request_id] += output.new_token_ids


@pytest.mark.parametrize("kind", ("runs", "sees itself", "lines"))
@pytest.mark.parametrize("depth", (1, 2))
@pytest.mark.parametrize(
    ("num_seeds", "num_requests"), [(12, 25), pytest.param(100, 50, marks=pytest.mark.slow)]
)
def test_every_token_has_its_embedding_and_bytes_agree(
    kind: str, depth: int, num_seeds: int, num_requests: int
) -> None:
    num_units = num_late = num_again = 0
    for seed in range(num_seeds):
        encodings, worker = run(seed, num_requests, kind=kind, depth=depth)
        num_units += encodings.num_encoded_units
        num_late += worker.num_late
        num_again += worker.num_again
    assert num_units > num_seeds * num_requests // 4
    assert (num_late > 0) == (num_again > 0) == (kind != "lines")
