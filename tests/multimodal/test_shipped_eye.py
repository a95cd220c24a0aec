"""The eye in ``tutorials/eye`` describes canvases that it was not trained on, through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.conversation.slash_commands import run_command
from tutorials.eye_training.marks import MARKS, rate_answers, read_answer, read_sheet
from tutorials.eye_training.scenes import WHAT, WHICH_COLOUR, WHICH_DIGIT, Scene

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


def test_its_readme_states_the_marks() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, share in json.loads((FOLDER / "unseen" / "marks.json").read_text()).items():
        assert f"| {share:.3f} | {MARKS[name]:.2f} |" in readme


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


@pytest.mark.slow
def test_the_engine_answers_as_llava_of_transformers(smollm2_path: Path) -> None:
    """With the weights of both, in float32."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, LlavaForConditionalGeneration
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    text = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    config = AutoConfig.from_pretrained(FOLDER)
    config.text_config = text.config
    both = LlavaForConditionalGeneration(config).eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    stored = {name: tensor.float() for name, tensor in load_file(FOLDER / "model.safetensors").items()}
    for part in ("vision_tower", "multi_modal_projector"):
        tensors = {
            name.removeprefix(f"{part}."): one for name, one in stored.items() if name.startswith(part)
        }
        getattr(both.model, part).load_state_dict(tensors)
    processor = SiglipImageProcessorPil.from_pretrained(FOLDER)
    images = [image for _, image in read_sheet(FOLDER / "unseen")][:6]
    settings = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 64}
    with LLM(str(smollm2_path), eye=str(FOLDER), device="cpu", dtype="float32", **settings) as llm:  # type: ignore[arg-type]
        for question, image in zip((*WHAT, WHICH_DIGIT, WHICH_COLOUR), images):
            parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": question}]
            (output,) = llm.chat([[{"role": "user", "content": parts}]], GREEDY, use_tqdm=False)
            ids = torch.tensor([output.prompt_token_ids])
            with torch.inference_mode():
                answer = both.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    pixel_values=processor(image, return_tensors="pt")["pixel_values"],
                    max_new_tokens=20,
                    do_sample=False,
                    eos_token_id=2,
                )
            assert answer[0, ids.shape[1] :].tolist() == output.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("division", ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"))
def test_several_workers_answer_as_one(smollm2_path: Path, division: str) -> None:
    images = [image for _, image in read_sheet(FOLDER / "unseen")][:4]
    messages = []
    for image in images:
        parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": WHAT[0]}]
        messages.append([{"role": "user", "content": parts}])
    settings: dict[str, Any] = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    answers = []
    for workers in (1, 3 if division == "tensor_parallel_size" else 2):  # it has 3 heads of keys and values
        settings |= {"num_gpu_blocks_override": 64, "dtype": "float32", division: workers}
        with LLM(str(smollm2_path), eye=str(FOLDER), device="cpu", **settings) as llm:
            outputs = llm.chat(messages, GREEDY, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


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
