"""``/image FILE`` in the chat: what goes to the model is what ``LLM.chat`` sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.cli.chat.chat_remote import RemoteSession
from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.conversation.slash_commands import run_command
from minivllm.errors import RequestError
from minivllm.frontend.async_llm import AsyncLLM
from tests.multimodal.models import make_tokenizer, picture, text_config
from tests.server.serving import serve_in_thread

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 64,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def llm(directories: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(directories["smolvlm"]), **SETTINGS) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, path in enumerate(paths):
        picture(seed, 60, 30).save(path)
    return paths


def ask(session: ChatSession, text: str) -> str:
    return session.ask(text, lambda piece: None, lambda: False).text


def expected(llm: LLM, pictures: list[int], text: str) -> str:
    parts = [{"type": "image_pil", "image_pil": picture(seed, 60, 30)} for seed in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return llm.chat([messages], GREEDY, use_tqdm=False)[0].outputs[0].text


def test_an_image_goes_with_the_next_message_and_stays_in_the_conversation(
    llm: LLM, files: list[Path], tmp_path: Path
) -> None:
    session = ChatSession(llm.llm_engine, "smolvlm", GREEDY)
    answers = []
    for seed, path in enumerate(files):
        told, _ = run_command(session, f"/image {path}")
        assert told == f"{path.name} ({session.images[-1].num_tokens} tokens) goes with your next message."
        assert f"image {path.name}" in run_command(session, "/tokens")[0]
        answers.append(ask(session, "What is it?"))
        assert answers[-1] == expected(llm, [seed], "What is it?") and session.images == []
        assert len(session.messages[0].images) == 1
        assert "[1 image besides]" in run_command(session, "/tokens")[0]
        if seed == 0:
            run_command(session, f"/save {tmp_path / 'chat.json'}")
            run_command(session, "/clear")
    assert answers[0] != answers[1], "swapped pictures would not show"

    run_command(session, f"/load {tmp_path / 'chat.json'}")
    assert session.regenerate(lambda piece: None, lambda: False).text == answers[0]
    run_command(session, f"/export {tmp_path / 'chat.md'}")
    assert "*[image]*\n\nWhat is it?" in (tmp_path / "chat.md").read_text()


def test_a_message_that_is_edited_keeps_its_images(llm: LLM, files: list[Path]) -> None:
    session = ChatSession(llm.llm_engine, "smolvlm", GREEDY)
    run_command(session, f"/image {files[0]}")
    ask(session, "What is it?")
    images = session.messages[-2].images
    session.undo()
    run_command(session, f"/image {files[1]}")
    answer = session.ask("And this?", lambda piece: None, lambda: False, images).text
    assert answer == expected(llm, [0, 1], "And this?")


def test_what_cannot_be_sent(llm: LLM, tmp_path: Path, files: list[Path]) -> None:
    session = ChatSession(llm.llm_engine, "smolvlm", GREEDY)
    (tmp_path / "notes.png").write_text("no image")
    for name, reason in (
        ("", "needs a file name, for example /image cat.png"),
        (str(tmp_path), "it is a directory"),
        (str(tmp_path / "notes.png"), "cannot be sent: .* formats PNG, JPEG, WEBP"),
    ):
        with pytest.raises(RequestError, match=reason):
            run_command(session, f"/image {name}".strip())
    limit = 8
    for _ in range(limit):
        run_command(session, f"/image {files[0]}")
    with pytest.raises(RequestError, match=f"one image too many: at most {limit} images per request"):
        run_command(session, f"/image {files[0]}")
    assert len(session.images) == limit and session.messages == []
    long = ChatSession(llm.llm_engine, "smolvlm", GREEDY, system="word " * (session.max_model_len - 40))
    with pytest.raises(RequestError, match=r"takes .* tokens, but of the context's .* only .* are free"):
        run_command(long, f"/image {files[0]}")
    run_command(session, "/clear")
    assert session.images == []


def test_a_model_that_reads_text_only_says_so(files: list[Path], tmp_path: Path) -> None:
    LlamaForCausalLM(text_config()).save_pretrained(tmp_path / "text")
    make_tokenizer().save_pretrained(tmp_path / "text")
    with LLM(str(tmp_path / "text"), **SETTINGS) as llm:  # type: ignore[arg-type]
        session = ChatSession(llm.llm_engine, "text", GREEDY)
        with pytest.raises(RequestError, match="at most 0 images"):
            run_command(session, f"/image {files[0]}")


def test_a_chat_with_a_server_sends_images_too(
    llm: LLM, directories: dict[str, Path], files: list[Path]
) -> None:
    from minivllm.config import EngineArgs

    engine = AsyncLLM.from_args(EngineArgs(model=str(directories["smolvlm"]), **SETTINGS))  # type: ignore[arg-type]
    with serve_in_thread(lambda: engine) as running:
        session = RemoteSession(running.url, "", lambda told: GREEDY)
        told, _ = run_command(session, f"/image {files[1]}")
        assert "tokens) goes with your next message" in told
        assert ask(session, "What is it?") == expected(llm, [1], "What is it?")
