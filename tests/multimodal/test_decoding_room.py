"""Few pictures are decoded at a time, beside the event loop, and requests beyond a bound are refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.errors import EngineDeadError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.multimodal.files import decoding
from minivllm.multimodal.files.decoding_room import BYTES_PER_PIXEL, DecodingRoom
from minivllm.multimodal.prompt_images import PromptImages
from minivllm.server.service import service
from tests.multimodal.conftest import engine
from tests.multimodal.models import engine_args, picture, prompt
from tests.multimodal.test_server import GREEDY, message, url_of
from tests.server.serving import Served, serve_in_thread

LARGE = 10
"""Pixels of a picture that fills the room of these tests."""


class Threads:
    """Threads that each take a place for a picture, and keep it until they are told to leave."""

    def __init__(self) -> None:
        self.room = DecodingRoom(most_at_once=2, most_bytes=LARGE * BYTES_PER_PIXEL)
        self.inside: list[str] = []
        self._leave: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._changed = threading.Condition()

    def come(self, name: str, num_pixels: int) -> None:
        """Returns when it is inside, or waits."""
        self._leave[name] = threading.Event()
        self._threads[name] = threading.Thread(target=self._stay, args=(name, num_pixels), daemon=True)
        before = self.room.num_waiting
        self._threads[name].start()
        self.wait_for(lambda: name in self.inside or self.room.num_waiting > before)

    def _stay(self, name: str, num_pixels: int) -> None:
        with self.room.taken(num_pixels):
            self._note(lambda: self.inside.append(name))
            self._leave[name].wait(20)
            self._note(lambda: self.inside.remove(name))

    def _note(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
            self._threads[name].join(20)
            assert not self._threads[name].is_alive()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = threading.Event()
        for _ in range(2000):
            if condition():
                return
            deadline.wait(0.01)
        raise AssertionError(f"inside: {self.inside}, waiting: {self.room.num_waiting}")


def test_two_pictures_are_inside_and_the_third_waits() -> None:
    threads = Threads()
    for name in "abcd":
        threads.come(name, 1)
    assert threads.inside == ["a", "b"] and threads.room.num_waiting == 2
    threads.leave("b")
    threads.wait_for(lambda: threads.inside == ["a", "c"])
    assert threads.room.num_waiting == 1
    threads.leave("a")
    threads.wait_for(lambda: threads.inside == ["c", "d"])
    threads.leave("c", "d")


def test_the_bytes_of_all_pictures_are_bounded_and_a_large_one_is_not_overtaken() -> None:
    threads = Threads()
    threads.come("small", 1)
    threads.come("large", LARGE)
    threads.come("later", 1)
    assert threads.inside == ["small"] and threads.room.num_waiting == 2
    threads.leave("small")
    threads.wait_for(lambda: threads.inside == ["large"])
    assert threads.room.num_waiting == 1
    threads.leave("large")
    threads.wait_for(lambda: threads.inside == ["later"])
    threads.leave("later")


def test_a_picture_beyond_the_bound_gets_in_alone() -> None:
    threads = Threads()
    threads.come("huge", 5 * LARGE)
    assert threads.inside == ["huge"]
    threads.leave("huge")


def test_an_error_gives_the_place_back_and_an_interrupted_wait_leaves_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = DecodingRoom(most_at_once=1, most_bytes=LARGE * BYTES_PER_PIXEL)
    with pytest.raises(OSError), room.taken(1):
        raise OSError
    with room.taken(1), monkeypatch.context() as patched:

        def interrupted(condition: Callable[[], bool]) -> bool:
            assert not condition()
            raise KeyboardInterrupt

        patched.setattr(room._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), room.taken(1):
            pass
    assert room.num_waiting == 0
    with room.taken(LARGE):
        pass


def test_reading_and_resizing_share_the_room(directories: dict[str, Path]) -> None:
    """Neither goes on while two other pictures are inside; each does with one."""
    with engine(directories["clip"]) as llm, ThreadPoolExecutor(1) as pool:
        images = llm.llm_engine.images
        assert images is not None
        read = images.read_one(picture(0), {}, "The image")
        works: list[Callable[[], Any]] = [
            lambda: images.read_one(picture(1), {}, "The image"),
            partial(images.pixels, read.digest),
        ]
        for work in works:
            with images._room.taken(1):
                with images._room.taken(1):
                    result: Future[Any] = pool.submit(work)
                    wait_until(lambda: images._room.num_waiting == 1)
                    assert not result.done()
                assert getattr(result.result(20), "error", None) is None
        del works, read, result


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("It did not happen within 20 s.")


@pytest.fixture(scope="module")
def frontend(directories: dict[str, Path]) -> AsyncLLM:
    """Ended with the server."""
    return AsyncLLM.from_args(engine_args(directories["clip"], max_model_len=256))


@pytest.fixture(scope="module")
def server(frontend: AsyncLLM) -> Iterator[Served]:
    with serve_in_thread(lambda: frontend) as running:
        yield running


def test_images_beyond_the_bound_are_refused_while_texts_are_answered(
    server: Served, frontend: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_READING_IMAGES", 3)
    images = frontend.images
    assert images is not None

    def ask(*content: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        body = {"messages": [*content], **({} if path == "/tokenize" else GREEDY)}
        return httpx.post(f"{server.url}{path}", json=body, timeout=60)

    with ThreadPoolExecutor(3) as pool:
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(images._room.taken(1))
            answers = [pool.submit(ask, message(url_of(picture(number)))) for number in range(2)]
            wait_until(lambda: images._room.num_waiting == 2)
            answers.append(pool.submit(ask, message(url_of(picture(2)))))
            wait_until(lambda: frontend._image_threads._work_queue.qsize() == 1)
            refused = ask(message(url_of(picture(3))))
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            error = refused.json()["error"]
            assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
            assert "3 requests with images wait for these to be decoded. Try again in" in error["message"]
            for path in ("/v1/chat/completions", "/tokenize"):
                assert ask({"role": "user", "content": "Hello"}, path=path).status_code == 200
            counted = ask(message(url_of(picture(3))), path="/tokenize")
            assert counted.status_code == 200, "counting decodes nothing"
            assert not any(answer.done() for answer in answers)
        assert [answer.result(60).status_code for answer in answers] == [200] * 3
    assert ask(message(url_of(picture(3)))).status_code == 200
    wait_until(lambda: images.num_kept == 0)


def test_a_client_that_leaves_gives_its_place_back(
    server: Served, frontend: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_READING_IMAGES", 2)
    images = frontend.images
    assert images is not None
    url = f"{server.url}/v1/chat/completions"
    body = {"messages": [message(url_of(picture(20)))], **GREEDY}
    with images._room.taken(1), images._room.taken(1):
        for _ in range(4):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=0.5)
    wait_until(lambda: httpx.post(url, json=body, timeout=60).status_code == 200)
    wait_until(lambda: images.num_kept == 0)


def test_a_search_of_beams_takes_no_images_and_says_so(server: Served) -> None:
    body = {"messages": [message(url_of(picture(0)))], "use_beam_search": True, "n": 2, "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "use_beam_search"


class Recorder:
    """Names of the threads that decode, hash and resize."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[str, set[str]] = {}
        for owner, name in ((decoding, "_decoded"), (decoding, "_digest"), (PromptImages, "_process")):
            monkeypatch.setattr(owner, name, self._recorded(name, getattr(owner, name)))

    def _recorded(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            self.threads.setdefault(name, set()).add(threading.current_thread().name)
            return work(*args)

        return recorded


def test_the_loop_of_a_server_neither_decodes_nor_hashes_nor_resizes(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    for path in ("/v1/chat/completions", "/v1/responses"):
        image = url_of(picture(10 + len(path)))
        part = {"type": "input_image", "image_url": image}
        body = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 16}
        if path == "/v1/chat/completions":
            body = {"messages": [message(image)], **GREEDY}
        assert httpx.post(f"{server.url}{path}", json=body, timeout=60).status_code == 200
    assert set(recorder.threads) == {"_decoded", "_digest", "_process"}
    for name, threads in recorder.threads.items():
        prefix = "images" if name == "_process" else "prompt-images"
        assert all(thread.startswith(prefix) for thread in threads), recorder.threads


def test_the_loop_of_a_stream_goes_on_while_images_wait(directories: dict[str, Path]) -> None:
    """A prompt is read while no picture may be decoded: the loop takes its turns all the same."""

    async def main() -> None:
        args = EngineArgs(
            model=str(directories["clip"]), device="cpu", dtype="float32", enforce_eager=True,
            num_gpu_blocks_override=64, block_size=16, max_num_seqs=4, max_model_len=256,
        )  # fmt: skip
        async with await asyncio.to_thread(AsyncLLM.from_args, args) as llm:
            assert llm.images is not None
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            outputs: list[Any] = []

            async def read_all() -> None:
                async for output in llm.generate(prompt("<s><image>", picture(0)), params):
                    outputs.append(output)

            with llm.images._room.taken(1), llm.images._room.taken(1):
                reader = asyncio.create_task(read_all())
                turns = 0
                while not llm.images._room.num_waiting or turns < 100:
                    await asyncio.sleep(0.001)
                    turns += 1
                assert not reader.done() and outputs == []
            await reader
            assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 2
        with pytest.raises(EngineDeadError):
            await anext(llm.generate(prompt("<s><image>", picture(0)), params))

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_list_of_prompts_waits_instead_of_being_refused(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_READING_IMAGES", 0)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with engine(directories["clip"]) as llm:
        assert isinstance(llm, LLM)
        prompts = [prompt("<s><image>", picture(number)) for number in range(6)]
        assert len(llm.generate(prompts, params)) == 6
