"""The requests of a program, recorded, and sent again as a client of an ordinary engine would send them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.lang.engines import Engine, Settings
from minivllm.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from minivllm.lang import Outcome, Program
    from minivllm.multimodal.files.decoding import Picture
    from minivllm.multimodal.prompt_images import PromptImages
    from minivllm.processing.outputs import RequestOutput
    from minivllm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Asked:
    """A request of a program."""

    token_ids: list[int]
    """Its prompt."""
    params: SamplingParams
    sampled: list[int]
    """Token ids of its answer."""
    after: frozenset[int]
    """The requests, by number, that had finished when it was sent."""

    @property
    def computed(self) -> list[int]:
        """Tokens that an engine without a cache computes: all but the last sampled one."""
        return [*self.token_ids, *self.sampled[:-1]]


class Recorder:
    """An engine for one call of a program that keeps its requests, in the order in which they were sent."""

    def __init__(self, engine: Engine) -> None:
        self.frontend = engine.frontend
        self._engine = engine
        self._asked: dict[int, Asked] = {}
        self._num_sent = 0

    @property
    def asked(self) -> list[Asked]:
        return [self._asked[number] for number in sorted(self._asked)]

    async def complete(
        self,
        token_ids: list[int],
        params: SamplingParams,
        settings: Settings,
        pictures: Sequence[Picture] = (),
    ) -> RequestOutput:
        number, after = self._num_sent, frozenset(self._asked)
        self._num_sent += 1
        output = await self._engine.complete(token_ids, params, settings, pictures)
        self._asked[number] = Asked(list(token_ids), params, list(output.outputs[0].token_ids), after)
        return output

    async def read_images(self, images: PromptImages, sources: list[Any]) -> list[Picture]:
        return await self._engine.read_images(images, sources)


def tree_size(asked: Sequence[Asked]) -> int:
    """Tokens of the tree of all texts, in which every beginning counts once."""
    nodes: dict[tuple[int, int], int] = {}
    for one in asked:
        node = 0
        for token in one.computed:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


async def record(
    engine: Engine, calls: Sequence[tuple[Program[..., Any], Any]]
) -> list[tuple[Recorder, Outcome[Any]]]:
    """Call programs, all at once, each with one argument. Raises the first error of one."""
    from minivllm.lang import run_batch

    async def call(program: Program[..., Any], argument: Any) -> tuple[Recorder, Outcome[Any]]:
        recorder = Recorder(engine)
        [outcome] = await run_batch(recorder, program, [argument])
        if outcome.error is not None:
            raise outcome.error
        return recorder, outcome

    return await asyncio.gather(*(call(program, argument) for program, argument in calls))


async def send_plainly(engine: Engine, calls: Sequence[Sequence[Asked]]) -> None:
    """Send the requests of all calls again, each after those that it waited for.

    The whole text is tokenised anew for each request, and log-probabilities of given texts are computed from
    the beginning of the prompt, since other engines have no ``prompt_logprobs_start``. Answers have the same
    lengths.
    """
    await asyncio.gather(*(_send_call(engine, asked) for asked in calls))


async def _send_call(engine: Engine, asked: Sequence[Asked]) -> None:
    finished = [asyncio.Event() for _ in asked]

    async def send(number: int) -> None:
        one = asked[number]
        for other in one.after:
            await finished[other].wait()
        await engine.complete(_whole_text(engine.frontend.tokenizer, one.token_ids), _plain(one), Settings())
        finished[number].set()

    await asyncio.gather(*map(send, range(len(asked))))


def _whole_text(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    return tokenizer.encode(tokenizer.decode(token_ids, skip_special_tokens=False), add_special_tokens=False)


def _plain(one: Asked) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(one.sampled),
        ignore_eos=True,
        prompt_logprobs=one.params.prompt_logprobs,
        allowed_token_ids=one.params.allowed_token_ids,
        output_kind=OutputKind.FINAL_ONLY,
    )
