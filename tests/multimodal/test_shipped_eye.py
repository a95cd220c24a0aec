"""The eye in ``tutorials/eye`` describes canvases that it was not trained on, through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.conversation.slash_commands import run_command
from tutorials.eye_training.marks import rate_answers, read_answer, read_sheet
from tutorials.eye_training.scenes import WHAT, Scene

FOLDER = Path(__file__).parents[2] / "tutorials" / "eye"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(
        str(smollm2_path),
        eye=str(FOLDER),
        device="cpu",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        num_gpu_blocks_override=64,
    ) as llm:
        yield llm


def test_an_answer_is_read_as_it_was_meant() -> None:
    scenes = [
        Scene("flower"),
        Scene("white"),
        Scene("white", ((8, "red"),)),
        Scene("grass", ((1, "white"), (0, "pink")), is_stacked=True),
        Scene("black", ((2, "blue"), (2, "green"))),
    ]
    assert [scene.caption for scene in scenes] == [
        "A photo of a flower.",
        "An empty white canvas.",
        "A red eight on a white canvas.",
        "A white one above a pink zero on a photo of grass.",
        "A blue two left of a green two on a black canvas.",
    ]
    right = rate_answers(scenes, [scene.caption for scene in scenes])
    assert {name: len(found) for name, found in right.items()} == {
        "digit": 5,
        "colour": 5,
        "ground": 3,
        "photographs": 1,
        "blank": 1,
    }
    assert all(map(all, right.values()))
    wrong = rate_answers(scenes, ["A red seven on a photo of a cat."] * len(scenes))
    assert [sum(found) for found in wrong.values()] == [0, 1, 0, 0, 0]
    assert read_answer("I see nothing.") == ([], [], None)


def test_unseen_canvases_are_described(llm: LLM) -> None:
    unseen = read_sheet(FOLDER / "unseen")
    messages = []
    for _, image in unseen:
        parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": WHAT[0]}]
        messages.append([{"role": "user", "content": parts}])
    outputs = llm.chat(messages, GREEDY, use_tqdm=False)
    rated = rate_answers([scene for scene, _ in unseen], [output.outputs[0].text for output in outputs])
    shares = {name: sum(found) / len(found) for name, found in rated.items()}
    measured = json.loads((FOLDER / "unseen" / "marks.json").read_text())
    for name, share in shares.items():
        # Of so few canvases; the marks are those of many.
        assert share >= measured[name] - 0.12, f"{name}: {shares}"
    assert shares["colour"] >= 0.8 and shares["ground"] >= 0.8


def test_the_chat_sends_a_picture(llm: LLM, tmp_path: Path) -> None:
    session = ChatSession(llm.llm_engine, "smollm2", GREEDY)
    answers = []
    unseen = [(scene, image) for scene, image in read_sheet(FOLDER / "unseen") if len(scene.digits) == 1]
    for scene, image in unseen[:2]:
        image.save(tmp_path / "canvas.png")
        told, _ = run_command(session, f"/image {tmp_path / 'canvas.png'}")
        assert told == "canvas.png (16 tokens) goes with your next message."
        answer = session.ask(WHAT[0], lambda piece: None, lambda: False).text
        answers.append((scene.digits[0][1], read_answer(answer).colours))
        run_command(session, "/clear")
    assert all(said == [colour] for colour, said in answers), answers
