"""Pixels that do not come end the requests that need them, and no others."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from minivllm import SamplingParams
from minivllm.engine_process.process import EngineProcess
from minivllm.multimodal import encodings
from minivllm.multimodal.encodings import ANSWER_SECONDS
from tests.multimodal.conftest import core_of, engine
from tests.multimodal.models import expected, picture, prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def last_outputs(frontend: Any) -> dict[str, Any]:
    last: dict[str, Any] = {}
    while frontend.has_unfinished_requests():
        last |= {output.request_id: output for output in frontend.step()}
    return last


def test_requests_without_pixels_end_and_others_are_served(directories: dict[str, Path]) -> None:
    """A request whose image is in the prefix cache needs no pixels of it, so it ends well."""
    directory, clock = directories["clip"], Clock()
    text = "<s><image>and a text that fills the block after it"
    with engine(directory, encoder_cache_bytes=1) as llm:
        core, frontend = core_of(llm), llm.llm_engine
        assert core.encodings is not None and frontend.images is not None
        llm.generate([prompt(text, picture(0)), prompt(text, picture(1))], GREEDY)
        core.encodings.clock = clock
        questions: list[bytes] = []
        core.ask_for_pixels(questions.extend)
        frontend.add_request("a", prompt("<s>other<image>", picture(0)), GREEDY)
        frontend.add_request("b", prompt("<s>another<image>", picture(0)), GREEDY)
        frontend.add_request("cached", prompt(text, picture(0)), GREEDY)
        clock.now += 1
        frontend.add_request("late", prompt("<s><image>", picture(2)), GREEDY)
        lost, late = questions
        clock.now += ANSWER_SECONDS - 1.5
        core.end_unanswered()
        assert core.pixel_seconds_left == pytest.approx(0.5)
        assert core.encodings.num_held_pixels == 2
        clock.now += 0.5
        core.end_unanswered()
        assert core.encodings.num_held_pixels == 1
        core.take_pixels(frontend.images.pixels(lost))  # too late: it is dropped
        assert core.encodings.num_held_pixels == 1
        core.take_pixels(frontend.images.pixels(late))
        last = last_outputs(frontend)
        assert (
            last["a"].error
            == last["b"].error
            == ("The pixels of an image did not arrive within 30 s: send it again.")
        )
        assert last["cached"].error is None
        assert last["cached"].outputs[0].token_ids == expected(directory, text, [picture(0)], 4)[0]
        assert last["late"].outputs[0].token_ids == expected(directory, "<s><image>", [picture(2)], 4)[0]
        # The image is asked for anew by the next request with it.
        frontend.add_request("again", prompt("<s>other<image>", picture(0)), GREEDY)
        assert questions[2:] == [lost]
        core.take_pixels(frontend.images.pixels(lost))
        again = last_outputs(frontend)["again"]
        assert again.outputs[0].token_ids == expected(directory, "<s>other<image>", [picture(0)], 4)[0]
        del last, again


def test_an_abandoned_question_is_withdrawn(directories: dict[str, Path]) -> None:
    clock = Clock()
    with engine(directories["clip"]) as llm:
        core, frontend = core_of(llm), llm.llm_engine
        assert core.encodings is not None
        core.encodings.clock = clock
        core.ask_for_pixels(lambda digests: None)
        frontend.add_request("a", prompt("<s><image>", picture(0)), GREEDY)
        frontend.abort_request(["a"])
        assert core.encodings.num_held_pixels == 1
        clock.now += ANSWER_SECONDS
        core.step()
        assert core.encodings.num_held_pixels == 0 and core.pixel_seconds_left is None


def test_answers_to_earlier_questions_give_later_ones_the_whole_time(directories: dict[str, Path]) -> None:
    """Many images are resized one after the other: the last one may take longer than the time of one."""
    clock = Clock()
    with engine(directories["clip"]) as llm:
        core, frontend = core_of(llm), llm.llm_engine
        assert core.encodings is not None and frontend.images is not None
        core.encodings.clock = clock
        questions: list[bytes] = []
        core.ask_for_pixels(questions.extend)
        for number in range(4):
            frontend.add_request(str(number), prompt("<s><image>", picture(number)), GREEDY)
        assert len(questions) == 4
        for number in (0, 2):
            clock.now += ANSWER_SECONDS - 5
            core.take_pixels(frontend.images.pixels(questions[number]))
            core.end_unanswered()
            if number == 0:
                assert core.pixel_seconds_left == ANSWER_SECONDS
        # The second was not waiting for the third: its time goes on.
        assert core.pixel_seconds_left == 5
        clock.now += 5
        core.end_unanswered()
        core.take_pixels(frontend.images.pixels(questions[3]))
        last = last_outputs(frontend)
        assert {name for name, output in last.items() if output.error is not None} == {"1"}
        del last


def test_a_stalled_engine_process_wakes_up_to_end_them(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The busy loop waits for messages, and none comes."""
    monkeypatch.setattr(encodings, "ANSWER_SECONDS", 0.2)
    process = object.__new__(EngineProcess)
    process._inputs = queue.SimpleQueue()
    process._paused = process._has_worked = False
    with engine(directories["clip"]) as llm:
        core, frontend = core_of(llm), llm.llm_engine
        core.ask_for_pixels(lambda digests: None)
        frontend.add_request("a", prompt("<s><image>", picture(0)), GREEDY)
        assert core.step() == [] and not core.has_work()
        waiting = threading.Thread(target=process._take_in, args=(core,), daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()
        assert "did not arrive within" in str(last_outputs(frontend)["a"].error)
