"""Several workers and several engines see as one does: equal tokens, and no image is encoded or asked for more
often than it has to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.engine_process.protocol.pixels import PixelAnswers
from minivllm.messages import EngineRequest
from minivllm.multimodal.items import PixelTensors
from minivllm.request import Request
from tests.kv_transfer.lookup_pair import consumer, producer, unix, wait_for_blocks
from tests.kv_transfer.test_connectors import storage
from tests.multimodal.conftest import core_of, encoded_images, engine
from tests.multimodal.models import engine_args, expected, picture, prompt

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS: list[tuple[str, list[Any]]] = [
    ("<s>Look at <image> and say", [picture(0)]),
    ("<s>a<image>b c<image>d", [picture(1, 20, 90), picture(2, 64, 64)]),
    ("<s>Once more <image>, which is known.", [picture(0)]),
    ("<s>Only words, words, words, words", []),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "TP 2 and PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
KINDS = ("clip", "llava-onevision", "smolvlm", "gemma3", "mistral3", "internvl", "qwen3-vl", "qwen3.5")


def check(llm: LLM, directory: Path, asked: list[tuple[str, list[Any]]]) -> None:
    outputs = llm.generate([prompt(text, *images) for text, images in asked], GREEDY)
    for (text, images), output in zip(asked, outputs):
        assert output.outputs[0].token_ids == expected(directory, text, images, NUM_TOKENS)[0]


def counts(llm: LLM) -> tuple[int, int]:
    """(units that were encoded, images whose pixels were asked for) since the start."""
    encodings = core_of(llm).encodings
    assert encodings is not None
    return encodings.num_encoded_units, encodings.num_questions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_encode_what_one_does(
    directories: dict[str, Path], kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of the first stage does, and no other has an eye."""
    directory = directories[kind]
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "encoder_cache_bytes": 2**20}
    with engine(directory, **settings) as llm:
        check(llm, directory, PROMPTS)
        of_one = counts(llm)
        assert of_one[1] == 3, "three pictures, one of them twice"
    with engine(directory, **settings, **LAYOUTS[layout]) as llm:
        seeing = encoded_images(llm)
        assert len(seeing) == LAYOUTS[layout].get("tensor_parallel_size", 1)
        encoded: Counter[int] = Counter()
        for rank, images in enumerate(seeing):

            def encode(pixels: Tensor, rank: int = rank, plain: Any = images.eye.encode) -> Tensor:
                encoded[rank] += len(pixels)
                return plain(pixels)

            monkeypatch.setattr(images.eye, "encode", encode)
        for _ in range(2):  # the second time, embeddings or keys and values are there
            check(llm, directory, PROMPTS)
            assert counts(llm) == of_one
            assert encoded == {rank: of_one[0] for rank in range(len(seeing))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_see_through_a_joined_eye(parts: dict[str, Path], layout: str) -> None:
    with engine(parts["text"], eye=str(parts["eye"]), **LAYOUTS[layout]) as llm:
        check(llm, parts["both"], PROMPTS)
        assert counts(llm) == (3, 3)


class AskedFor:
    """Which image each engine of a data-parallel frontend has asked for."""

    def __init__(self, llm: LLM) -> None:
        self.by_engine: list[list[bytes]] = []
        clients: Any = llm.llm_engine.client
        source = llm.llm_engine.images
        assert source is not None
        for replica in clients._client._replicas:
            asked: list[bytes] = []
            self.by_engine.append(asked)

            def answer(digest: bytes, asked: list[bytes] = asked) -> PixelTensors:
                asked.append(digest)
                return source.pixels(digest)

            replica.client.serve_pixels(PixelAnswers(answer))

    @property
    def counts(self) -> list[int]:
        return [len(asked) for asked in self.by_engine]


@pytest.mark.parametrize("kind", ("smolvlm", "qwen3-vl", "joined eye"))
def test_an_image_is_asked_for_once_by_one_of_two_engines(
    directories: dict[str, Path], parts: dict[str, Path], kind: str
) -> None:
    """Questions come from both; further questions about an image go to the engine that holds it."""
    judge = served = directories.get(kind, parts["both"])
    more: dict[str, Any] = {"data_parallel_size": 2, "encoder_cache_bytes": 2**20}
    if kind == "joined eye":
        served, more["eye"] = parts["text"], str(parts["eye"])
    pictures = [picture(seed, 60, 60) for seed in range(6)]
    # The text comes last, so that all questions about an image begin with it.
    first, second = ([(f"<s><image>{text}", [one]) for one in pictures] for text in ("What?", "Where is it?"))
    with LLM(**vars(engine_args(served, **more))) as llm:
        asked = AskedFor(llm)
        check(llm, judge, first)
        assert sum(asked.counts) == len({*asked.by_engine[0], *asked.by_engine[1]}) == len(pictures)
        assert min(asked.counts) > 0, "all images went to one engine"
        before = asked.counts
        for one in second:
            check(llm, judge, [one])
        assert asked.counts == before


# Blocks that come from elsewhere: what they cover is neither encoded nor asked for.


@contextmanager
def prefilled(
    directory: Path,
    way: str,
    folder: Path,
    asked: list[tuple[str, list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> Iterator[LLM]:
    """An engine that can load what another one has computed of these prompts, through a connector."""
    if way == "SharedStorageConnector":
        with engine(directory, kv_transfer_config=storage(folder / "stored"), **settings) as first:
            check(first, directory, asked)
        with engine(directory, kv_transfer_config=storage(folder / "stored"), **settings) as second:
            yield second
        return
    address = unix(folder)
    with (
        engine(directory, kv_transfer_config=producer(address), **settings) as first,
        engine(directory, kv_transfer_config=consumer(address), **settings) as second,
    ):
        made: list[list[bytes]] = []
        core = core_of(first)
        make = core.make_request

        def noted(engine_request: EngineRequest) -> Request:
            request = make(engine_request)
            made.append(list(request.block_hashes))
            return request

        monkeypatch.setattr(core, "make_request", noted)
        check(first, directory, asked)
        wait_for_blocks(second, [key for keys in made for key in keys])
        yield second


@pytest.mark.parametrize("way", ("SharedStorageConnector", "LookupBufferConnector"))
@pytest.mark.parametrize("kind", ("clip", "smolvlm", "qwen3-vl"))
def test_an_engine_that_loads_blocks_encodes_only_an_image_that_reaches_into_the_last_one(
    directories: dict[str, Path], tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directories[kind]
    covered = ("<s>Look at <image> and say what it is, in a few words.", [picture(0)])
    reaching = ("<s>See <image>, and what I ask about is this: <image>.", [picture(1), picture(2)])
    with prefilled(directory, way, tmp_path, [covered, reaching], monkeypatch) as llm:
        check(llm, directory, [covered])
        assert counts(llm) == (0, 0)
        check(llm, directory, [reaching])
        num_units, num_questions = counts(llm)
        assert num_questions == 1
        assert num_units == (2 if kind == "smolvlm" else 1)
        other = covered[0], [picture(3)]
        check(llm, directory, [other])
        assert counts(llm)[1] == 2


@pytest.mark.parametrize("kind", ("clip", "qwen3-vl"))
def test_an_image_whose_blocks_turn_out_to_be_broken_is_asked_for_after_all(
    directories: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, asked = directories[kind], [("<s>Look at <image> and say what it is.", [picture(0)])]
    with prefilled(directory, "SharedStorageConnector", tmp_path, asked, monkeypatch) as llm:
        files = list((tmp_path / "stored").rglob("*.safetensors"))
        for file in files:
            file.write_bytes(file.read_bytes()[:-1])
        assert files
        check(llm, directory, asked)
        assert counts(llm) == (1, 1)
        (stats,) = llm.get_metrics().kv_transfer
        assert stats.num_failed_blocks > 0
