"""Which worker does what in the steps of a trace:
a row for each of them in a Perfetto file, and a line in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

MICROSECONDS_PER_STEP = 1000
"""Width of a step in a Perfetto file, which knows only time."""
FIRST_PROCESS = 2
"""Of the workers; the scheduler's is 1."""


class Tick(Protocol):
    """The part of a ``TraceStep`` that is used here."""

    @property
    def step(self) -> int: ...
    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def stages(self) -> Sequence[int | None]: ...


def rank_events(steps: Sequence[Tick], pp: int, tp: int) -> Iterator[dict[str, Any]]:
    """A process of the Perfetto file for every worker of ``pp`` stages with ``tp`` workers each,
    and what it computes in each tick."""
    scheduled = {step.step: step.num_scheduled_tokens for step in steps}
    for rank in range(pp * tp):
        process, stage = FIRST_PROCESS + rank, rank // tp
        name, does = rank_text(rank, pp, tp).split(": ", 1)
        yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
        yield {"name": "process_labels", "ph": "M", "pid": process, "args": {"labels": does}}
        yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
        for step in steps:
            number = step.stages[stage] if step.stages else step.step
            requests = {} if number is None else scheduled[number]
            if requests:
                yield {
                    "name": f"step {number}: {sum(requests.values())} tokens",
                    "cat": "rank",
                    "ph": "X",
                    "ts": step.step * MICROSECONDS_PER_STEP,
                    "dur": MICROSECONDS_PER_STEP,
                    "pid": process,
                    "tid": 0,
                    "args": {"step": number, "does": does, **requests},
                }


def rank_text(rank: int, pp: int, tp: int) -> str:
    """ "rank 1 (stage 0 of 2, part 1 of 2): …", all that it does in a step."""
    stage, part = divmod(rank, tp)
    place = [f"stage {stage} of {pp}"] * (pp > 1) + [f"part {part} of {tp}"] * (tp > 1)
    does = "embeds the tokens" if stage == 0 else f"receives the residual stream from rank {rank - tp}"
    whose = "its heads and columns of the layers" if tp > 1 else "the layers"
    does += f", computes {whose} of its stage" if pp > 1 else f", computes {whose}"
    if tp > 1:
        does += " and adds up with the other parts twice in each"
    if stage < pp - 1:
        return f"rank {rank} ({', '.join(place)}): {does}, sends the stream to rank {rank + tp}"
    answers = " and answers the engine core" if part == 0 else " as the first part does"
    return f"rank {rank} ({', '.join(place)}): {does}, makes logits, samples{answers}"
