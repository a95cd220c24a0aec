"""A processor's batch follows the slots: every row it is given belongs to the request it believes it does."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minivllm.messages import EngineRequest
from minivllm.sampling.custom_processors import ProcessorStage
from minivllm.sampling.logits_processors import BatchUpdate, LogitsProcessor
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.sampling_state import SamplingState
from minivllm.sampling_params import SamplingParams

NUM_SLOTS, VOCABULARY = 6, 32


class Mirror(LogitsProcessor):
    """Follows the updates step by step, strictly,
    and writes what it believes of every row into its logits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.rows: list[tuple[int, list[int]] | None] = []

    @classmethod
    def concerns(cls, params: SamplingParams) -> bool:
        return params.extra_args is not None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate) -> None:
        assert update.removed or update.added or update.moved
        for row in update.removed:
            assert self.rows[row] is not None
            self.rows[row] = None
        for added in update.added:
            if added.row == len(self.rows):
                self.rows.append(None)
            assert self.rows[added.row] is None
            self.rows[added.row] = ((added.params.extra_args or {})["name"], added.output_token_ids)  # type: ignore[assignment]
        for one, other in update.moved:
            self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        del self.rows[update.batch_size :]
        assert None not in self.rows

    def apply(self, logits: Tensor) -> Tensor:
        for row in range(len(logits)):
            name, output = self.rows[row]  # type: ignore[misc]
            logits[row, 0], logits[row, 1] = name, len(output)
        return logits


def request(**params: object) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(**params),
        seed=0,
        eos_token_ids=[],
        bad_words_token_ids=[],
        max_tokens=16,
        arrival_time=0.0,
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_belong_to_the_requests_whatever_comes_goes_and_is_asked_for(data: st.DataObject) -> None:
    mirror = Mirror(VOCABULARY, torch.device("cpu"))
    stage = ProcessorStage(mirror, NUM_SLOTS)
    names: dict[int, int | None] = {}
    lengths: dict[int, int] = {}
    for number in range(1, data.draw(st.integers(1, 30)) + 1):
        action = data.draw(st.sampled_from(["add", "add unconcerned", "remove", "append", "apply", "apply"]))
        free = [slot for slot in range(NUM_SLOTS) if slot not in names]
        if action.startswith("add") and free:
            slot = data.draw(st.sampled_from(free))
            lengths[slot] = data.draw(st.integers(0, 3))
            names[slot] = number if action == "add" else None
            stage.add(
                slot, request(extra_args={"name": number} if action == "add" else None), [7] * lengths[slot]
            )
        elif names and action == "remove":
            slot = data.draw(st.sampled_from(sorted(names)))
            del names[slot], lengths[slot]
            stage.remove(slot)
        elif names and action == "append":
            slot = data.draw(st.sampled_from(sorted(names)))
            lengths[slot] += 1
            stage.append(slot, 9)
        elif names and action == "apply":
            asked = data.draw(st.lists(st.sampled_from(sorted(names)), min_size=1, unique=True))
            slots = np.array(asked)
            concerned = [slot for slot in asked if names[slot] is not None]
            assert slots[stage.touches(slots)].tolist() == concerned
            if concerned:
                logits = torch.full((len(asked), VOCABULARY), -1.0)
                stage.apply(logits, slots)
                believed = [
                    (-1, -1) if names[slot] is None else (names[slot], lengths[slot]) for slot in asked
                ]
                assert [tuple(row) for row in logits[:, :2].int().tolist()] == believed


class Raise(Mirror):
    """Adds 10 to all logits, which changes nothing but for the repetition penalty behind it."""

    def apply(self, logits: Tensor) -> Tensor:
        return logits + 10.0


def test_custom_processors_come_before_penalties() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((1, VOCABULARY), generator=generator)
    logits[0, 5] = (
        logits.amax() + 0.5
    )  # token 5 was said: of a logit above 10 a penalty of 1.2 takes 2 at least
    chosen = []
    for is_raised in (False, True):
        state = SamplingState(NUM_SLOTS, VOCABULARY, "cpu")
        if is_raised:
            state.add_processor(Raise(VOCABULARY, torch.device("cpu")))
        state.add(3, request(temperature=0.0, repetition_penalty=1.2, extra_args={"name": 1}), [5])
        slots, positions = np.array([3]), np.array([3])
        chosen.append(int(Sampler(state)(logits, slots, positions).token_ids))
        state = SamplingState(NUM_SLOTS, VOCABULARY, "cpu")
        state.add(3, request(temperature=0.0, repetition_penalty=1.2), [5])
        shifted = logits + (10.0 if is_raised else 0.0)
        assert chosen[-1] == int(Sampler(state)(shifted, slots, positions).token_ids)
    assert chosen[0] == 5 != chosen[1]
