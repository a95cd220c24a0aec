"""Graphs of steps and images, on a CPU: the recorder replays what CUDA would.

The graphs are those of steps that read text. A step in which a token stands for a part of an image runs outside
them; what follows in the answer replays them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.batch.step_inputs import StepInputs
from minivllm.device.buffers import StagingBuffer
from minivllm.graphs.step_graphs import GraphChoice, StepHidden
from minivllm.worker.model_runner import ModelRunner
from tests.attention.backends import choose_as_on_a_gpu
from tests.attention.random_batches import CPU
from tests.multimodal.conftest import core_of, engine
from tests.multimodal.models import expected, picture, prompt
from tutorials.recorded_graphs import RecordedGraphs

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS: list[tuple[str, list[Any]]] = [
    ("<s>Look at <image> and say", [picture(0)]),
    ("<s>Only words, words, words, words and nothing else but words", []),
    ("<s>a<image>b c<image>d", [picture(1, 20, 90), picture(2, 64, 64)]),
    ("<s>Words.", []),
]
KINDS = ("clip", "smolvlm", "gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3.5")
IN_SPACE = ("qwen2.5-vl", "qwen3-vl", "qwen3.5")
"""Their tokens have three positions."""
SETTINGS = {"max_num_batched_tokens": 40, "max_num_seqs": 5}

WithGraphs = Callable[..., Any]


def runner_of(llm: LLM) -> ModelRunner:
    return core_of(llm).executor.worker.runner  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def with_graphs(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> WithGraphs:
    """An engine whose steps are recorded and replayed; also without recording, in the mode "none"."""
    backend = choose_as_on_a_gpu(monkeypatch)

    @contextmanager
    def make(kind: str, mode: str = "full_and_piecewise", **settings: Any) -> Iterator[LLM]:
        with engine(directories[kind], attention_backend=backend, **SETTINGS, **settings) as llm:
            if mode != "none":
                with torch.inference_mode():
                    runner_of(llm).capture_graphs(mode, RecordedGraphs())  # type: ignore[arg-type]
            yield llm

    return make


class Watch:
    """Notes of each step whether some of its tokens stand for an image, and which graph it replayed."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = runner_of(llm)
        graphs, paged = runner.graphs, runner.paged_model
        assert graphs is not None
        self.steps: Counter[tuple[bool, str]] = Counter()
        self.after_images = 0
        """Steps of single tokens in a full graph, some of them after images."""
        forward, replay = paged.forward, graphs.forward

        def plain(inputs: StepInputs, *others: Any) -> Any:
            self.note(inputs, "none")
            return forward(inputs, *others)

        def replayed(inputs: StepInputs, choice: GraphChoice) -> StepHidden:
            self.note(inputs, choice.kind)
            return replay(inputs, choice)

        monkeypatch.setattr(paged, "forward", plain)
        monkeypatch.setattr(graphs, "forward", replayed)

    def note(self, inputs: StepInputs, kind: str) -> None:
        places = [
            range(item.offset + first, item.offset + first + count)
            for row in inputs.rows
            for item in row.request.data.images
            for first, count in item.runs
            if item.offset + first < row.start + row.count and row.start < item.offset + first + count
        ]
        self.steps[bool(places), kind] += 1
        self.after_images += kind == "full" and any(row.request.data.images for row in inputs.rows)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate([prompt(text, *images) for text, images in PROMPTS], GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_only_steps_of_text_replay_and_all_answers_are_those_of_transformers(
    with_graphs: WithGraphs, directories: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [expected(directories[kind], text, images, NUM_TOKENS)[0] for text, images in PROMPTS]
    with with_graphs(kind) as llm:
        watch = Watch(llm, monkeypatch)
        assert answers(llm) == tokens
        assert {graph for sees, graph in watch.steps if sees} == {"none"}
        assert watch.after_images >= 3
        before = sum(watch.steps.values())
        assert answers(llm) == tokens
        assert sum(watch.steps.values()) > before


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_replays_what_it_replays_without_images(
    with_graphs: WithGraphs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also right after steps with images: equal graphs for equal texts, in an engine that takes none."""
    texts = [{"prompt": text} for text, images in PROMPTS if not images]
    seen, replays = [], []
    for limit in (0, 8):
        with with_graphs(kind, limit_mm_per_prompt={"image": limit}, enable_prefix_caching=False) as llm:
            graphs = runner_of(llm).graphs
            if limit:
                answers(llm)
                graphs.num_replays.clear()
            seen.append([output.outputs[0].token_ids for output in llm.generate(texts, GREEDY)])
            replays.append(graphs.num_replays)
    assert seen[0] == seen[1]
    assert replays[0] == replays[1] and {choice.kind for choice in replays[0]} == {"full", "piecewise"}


@pytest.mark.parametrize("kind", ("smolvlm", "qwen2.5-vl", "qwen3-vl"))
def test_drafts_after_images_are_verified_in_graphs(
    with_graphs: WithGraphs, directories: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, images = "<s>one two one two one two <image> one two one two one", [picture(0)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "verification_cost": 0.0,
    }
    with with_graphs(kind, speculative_config=config) as llm:
        watch = Watch(llm, monkeypatch)
        (output,) = llm.generate(prompt(text, *images), params)
        assert output.outputs[0].token_ids == expected(directories[kind], text, images, 24)[0]
        assert llm.get_metrics().num_draft_tokens > 0
        assert watch.steps[False, "verify"] > 0
        assert {graph for sees, graph in watch.steps if sees} == {"none"}


@pytest.mark.parametrize("kind", IN_SPACE)
def test_positions_in_space_that_moved_are_refused(with_graphs: WithGraphs, kind: str) -> None:
    """The table of angles is read by them, so a graph would read the old ones."""
    with with_graphs(kind) as llm:
        builder = runner_of(llm).paged_model._builder
        assert builder._buffer.host["positions"].shape[1] == 3
        shapes = {name: array.shape for name, array in builder._buffer.host.items()}
        moved = StagingBuffer(shapes, CPU)
        kept = {name: builder._buffer.device[name] for name in shapes if name != "positions"}
        moved.device.update(kept)
        builder._buffer = moved
        with pytest.raises(RuntimeError, match="moved since it was captured"):
            llm.generate("<s>Words.", GREEDY)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_never_takes_a_step_with_images(with_graphs: WithGraphs, kind: str) -> None:
    """Should a step with images choose a graph, its features would be left out: it is refused."""
    with with_graphs(kind) as llm:
        runner = runner_of(llm)
        graphs, images = runner.graphs, runner._images
        assert graphs is not None and images is not None
        with torch.inference_mode(), images.everywhere():
            for choice in (GraphChoice("full", 1), GraphChoice("piecewise", 8)):
                inputs = runner.paged_model.build([], choice.num_tokens)
                inputs = replace(inputs, tokens=inputs.tokens._replace(images=images.rows(inputs)))
                with pytest.raises(RuntimeError, match="moved since it was captured"):
                    graphs.forward(inputs, choice)
