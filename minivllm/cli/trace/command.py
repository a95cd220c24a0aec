"""``minivllm trace``: what the scheduler decides, step by step, without a model.

The real scheduler and KV cache manager run against a worker that answers every finished prompt with one
token.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.cli.engine.options import with_options
from minivllm.cli.terminal.terminal_text import counted
from minivllm.cli.trace.prefixes import MOST_NODES, print_tree
from minivllm.cli.trace.ranks import MICROSECONDS_PER_STEP, rank_events, rank_text
from minivllm.config import SchedulerConfig
from minivllm.errors import ConfigError
from minivllm.plugins.points import POLICIES
from minivllm.scheduler.policy import make_policy

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from minivllm.kv_cache.manager import KVCacheManager
    from minivllm.simulation.steps import TraceStep


MOST_TOKENS = 10_000_000
"""Of all requests together; more would not fit into memory or patience."""
MOST_STEPS, MOST_ROWS = 160, 40
"""That a picture shows."""
MOST_RANKS = 64
"""Stages, and workers of each."""

_PROMPT_COLOURS = ("#bee9e8", "#8cc7e3", "#5fa8d3", "#2f6f97")
_DECODE_COLOUR = "#f4a259"
PREEMPTED_COLOUR = "#e5383b"
LOADING_COLOUR = "#b8a1d9"
STAGE_COLOUR = "#c9d6a3"


def _numbers(help_text: str) -> Any:
    """A flag whose value is ``3,5,12``; an empty text is an empty list."""
    return typer.Option(parser=lambda given: given, metavar="N,N,…", help=help_text)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests R1, R2, … and the limits they run under. Raises ConfigError for impossible ones.

    priorities, arrivals: all 0 if empty.
    Without prefix_len no requests share a prefix; families: all 1 if empty.
    """

    budget: Annotated[int, typer.Option(help="Tokens per step (max_num_batched_tokens).")] = 10
    prompt_lens: Annotated[Sequence[int], _numbers("Prompt length of each request.")] = (3, 5, 12)
    max_tokens: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 3
    max_num_seqs: Annotated[int, typer.Option(help="Requests that may run at the same time.")] = 64
    block_size: Annotated[int, typer.Option(help="Tokens per KV cache block.")] = 16
    num_blocks: Annotated[
        int | None,
        typer.Option(help="KV cache blocks, the null block included; few of them show preemption."),
    ] = None
    policy: Annotated[
        str, typer.Option(help=f"{', '.join(POLICIES.known)}, or your own: package.module:Class.")
    ] = "fcfs"
    priorities: Annotated[Sequence[int], _numbers("Priority of each request; low first.")] = ()
    arrivals: Annotated[Sequence[int], _numbers("Step before which each request arrives.")] = ()
    prefix_len: Annotated[
        int,
        typer.Option(
            help="Tokens that all prompts of a family begin with, at most those of the shortest one."
        ),
    ] = 0
    families: Annotated[Sequence[int], _numbers("Family of each request, with --prefix-len.")] = ()
    threshold: Annotated[
        int,
        typer.Option(help="Most tokens of one request per step (long_prefill_token_threshold); 0 is no cap."),
    ] = 0
    load_steps: Annotated[
        int,
        typer.Option(
            help="Full blocks are saved to a second tier too, and take so many steps to come back; 0 is no "
            "such tier."
        ),
    ] = 0

    pp: Annotated[
        int,
        typer.Option(
            "--pp",
            help="Stages of a pipeline (pipeline_parallel_size), which take a step's time each: see the "
            "bubbles.",
        ),
    ] = 1
    tp: Annotated[
        int, typer.Option("--tp", help="Workers that divide every layer of a stage (tensor_parallel_size).")
    ] = 1

    def __post_init__(self) -> None:
        for name in ("prompt_lens", "priorities", "arrivals", "families"):
            object.__setattr__(self, name, _read_numbers(name, getattr(self, name)))
        if not self.prompt_lens:
            raise ConfigError("prompt-lens is empty, but must hold at least one length.")
        lows = {
            "budget": 1,
            "max_tokens": 1,
            "max_num_seqs": 1,
            "block_size": 1,
            "threshold": 0,
            "load_steps": 0,
        }
        numbers = [(name, getattr(self, name), low) for name, low in lows.items()]
        numbers += [("prompt_lens", length, 1) for length in self.prompt_lens]
        numbers += [("arrivals", step, 0) for step in self.arrivals]
        for name, value, low in numbers:
            if not low <= value <= MOST_TOKENS:
                raise ConfigError(
                    f"{name.replace('_', '-')} is {value}, but must be at least {low} and at most "
                    f"{MOST_TOKENS}."
                )
        for name, size in (("pp", self.pp), ("tp", self.tp)):
            if not 1 <= size <= MOST_RANKS:
                raise ConfigError(f"{name} is {size}, but must be at least 1 and at most {MOST_RANKS}.")
        if (total := sum(self.prompt_lens) + len(self.prompt_lens) * self.max_tokens) > MOST_TOKENS:
            raise ConfigError(
                f"The requests have {total:,} tokens in all, but at most {MOST_TOKENS:,} are simulated."
            )
        shortest = min(self.prompt_lens)
        if not 0 <= self.prefix_len <= shortest:
            raise ConfigError(
                f"prefix-len is {self.prefix_len}, but must be at least 0 and at most {shortest}, the "
                "shortest prompt."
            )
        if self.families and not self.prefix_len:
            raise ConfigError("families are given, but nothing that they share: give --prefix-len too.")
        has_priorities = make_policy(self.policy).uses_priority
        given = (("priorities", self.priorities), ("arrivals", self.arrivals), ("families", self.families))
        for name, values in given:
            if values and len(values) != len(self.prompt_lens):
                raise ConfigError(
                    f"{name} has {counted(len(values), 'value')}, but prompt-lens has "
                    f"{len(self.prompt_lens)}: "
                    "give one for each."
                )
        if any(self.priorities) and not has_priorities:
            raise ConfigError(
                f"priorities are given, but policy {self.policy!r} has none: use policy 'priority'."
            )
        needed = 1 + max(self._num_blocks_of(length) for length in self.prompt_lens)
        if self.num_blocks is not None and self.num_blocks < needed:
            raise ConfigError(
                f"num-blocks is {self.num_blocks}, but the longest request alone needs {needed} with the "
                "null block."
            )

    def blocks(self) -> int:
        """Size of the pool: as given, and no more than is enough for all requests together."""
        enough = 1 + sum(self._num_blocks_of(length) for length in self.prompt_lens)
        return enough if self.num_blocks is None else min(self.num_blocks, enough)

    def _num_blocks_of(self, prompt_len: int) -> int:
        return -(-(prompt_len + self.max_tokens - 1) // self.block_size)

    def prompt(self, number: int) -> int | list[int]:
        """Token ids of the request of this number, from 1 on, or its length where nothing is shared."""
        length = self.prompt_lens[number - 1]
        if not self.prefix_len:
            return length
        family = self.families[number - 1] if self.families else 1
        # Negative families are allowed, but no negative tokens: what the numbers are does not matter.
        first = 2 * len(self.prompt_lens) + sorted({*self.families, family}).index(family)
        return [first] * self.prefix_len + [number] * (length - self.prefix_len)


def _read_numbers(name: str, given: str | Sequence[int]) -> Sequence[int]:
    try:
        return [int(part) for part in given.split(",") if given.strip()] if isinstance(given, str) else given
    except ValueError:
        raise ConfigError(
            f"{name.replace('_', '-')} is {given!r}, but must be whole numbers with commas between, such as "
            "3,5,12."
        ) from None


def simulate(**workload: Any) -> Iterator[dict[str, Any]]:
    """The JSON lines of a workload, see Workload and TraceStep.
    Raises ConfigError for values that cannot work."""
    return (step.as_dict() for step in simulated_steps(Workload(**workload)))


def simulated_steps(workload: Workload) -> Iterator[TraceStep]:
    """Decisions of every step until all requests are done."""
    return simulated(workload)[0]


def simulated(workload: Workload) -> tuple[Iterator[TraceStep], KVCacheManager]:
    """Decisions of every step until all requests are done, and the cache that they are taken for."""
    from minivllm.kv_cache.group_manager import FullAttentionManager
    from minivllm.kv_cache.manager import KVCacheManager
    from minivllm.scheduler.scheduler import Scheduler
    from minivllm.simulation.steps import Arrival, scheduled_steps
    from minivllm.simulation.tier import SimulatedTier

    config = SchedulerConfig(
        max_num_seqs=workload.max_num_seqs,
        max_num_batched_tokens=workload.budget,
        max_model_len=max(workload.prompt_lens) + workload.max_tokens,
        long_prefill_token_threshold=workload.threshold,
        policy=workload.policy,
        num_stages=workload.pp,
    )
    blocks = FullAttentionManager(workload.blocks(), workload.block_size)
    tier = SimulatedTier(workload.block_size, workload.load_steps) if workload.load_steps else None
    manager = KVCacheManager([blocks], config.max_model_len)
    scheduler = Scheduler(config, manager, connector=tier)
    zeros = [0] * len(workload.prompt_lens)
    requests = zip(workload.arrivals or zeros, workload.priorities or zeros)
    arrivals = [
        Arrival(f"R{number}", workload.prompt(number), workload.max_tokens, step, priority)
        for number, (step, priority) in enumerate(requests, 1)
    ]
    return scheduled_steps(scheduler, arrivals, workload.pp, tier), manager


def has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def heat_strip(
    steps: Sequence[TraceStep], num_requests: int, columns: int | None = None, is_coloured: bool = True
) -> Text:
    """A picture of the steps: a row per request, a column per step, in each cell the number of tokens.

    Blue cells compute prompts, or again what a preemption lost (darker is more); orange ones decode. "…"
    stands for steps and requests that are left out. columns: width of the window [cells], into which long
    strips are broken. is_coloured: without colours a plus stands before the tokens of cells that decode.
    """
    from rich.text import Text

    plus = "" if is_coloured else "+"
    counts = [
        (plus if request_id in step.decoding else "") + short_count(count)
        for step in steps
        for request_id, count in step.num_scheduled_tokens.items()
    ]
    most = max((count for step in steps for count in step.num_scheduled_tokens.values()), default=1)
    longest_count = max(map(len, counts), default=1)
    width = 1 + max(longest_count, len(str(max((step.step for step in steps), default=0))))
    num_stages = max((len(step.stages) for step in steps), default=0)
    label_width = (
        max(len(f"R{num_requests}"), len(f"stage {num_stages - 1}") if num_stages else 0, len("step")) + 1
    )
    cells: list[TraceStep | None] = []
    for step, before in zip(steps, [None, *steps]):
        cells += [None, step] if before is not None and before.step + 1 < step.step else [step]
    fitting = len(cells) if columns is None else max(1, (columns - label_width) // width)
    strip = Text()
    for start in range(0, len(cells), max(1, fitting)):
        part = cells[start : start + fitting]
        strip.append("\n\n" if start else "")
        numbers = "".join(("…" if step is None else str(step.step)).rjust(width) for step in part)
        strip.append("step".ljust(label_width) + numbers, style="bold")
        for number in shown_rows(num_requests):
            strip.append("\n" + ("…" if number is None else f"R{number}").ljust(label_width))
            if number is None:
                continue
            for shown in part:
                strip.append(*_cell(shown, f"R{number}", most, width, plus))
        for stage in range(num_stages):
            strip.append(f"\nstage {stage}".ljust(label_width + 1), style="bold")
            for shown in part:
                strip.append(*_stage_cell(shown, stage, width))
    strip.append("\n\n" + " " * label_width)
    legend = [
        ("3 prompt", _PROMPT_COLOURS[1]),
        ("+1 decode", _DECODE_COLOUR),
        ("x preempted", PREEMPTED_COLOUR),
    ]
    if any(step.loading for step in steps):
        legend.append(("~ loading", LOADING_COLOUR))
    if num_stages:
        legend.append(("0 step that a stage computes", STAGE_COLOUR))
    if not is_coloured:
        return strip.append(" " + "   ".join(entry for entry, _ in legend))
    for entry, colour in legend:
        strip.append(f" {entry.partition(' ')[2]} ", style=f"black on {colour}").append(" ")
    return strip


def _cell(step: TraceStep | None, request_id: str, most: int, width: int, plus: str) -> tuple[str, str]:
    """Text and style of one request in one step; None is steps left out.
    plus: stands before tokens of a decode."""
    count = None if step is None else step.num_scheduled_tokens.get(request_id)
    if step is None:
        return "…".rjust(width), "dim"
    if request_id in step.preempted:
        return "x".rjust(width), f"black on {PREEMPTED_COLOUR}"
    if request_id in step.loading:
        return "~".rjust(width), f"black on {LOADING_COLOUR}"
    if count is None:
        return "·".rjust(width), "dim"
    text = (plus if request_id in step.decoding else "") + short_count(count)
    return text.rjust(width), f"black on {cell_colour(step, request_id, most)}"


def _stage_cell(step: TraceStep | None, stage: int, width: int) -> tuple[str, str]:
    """Which step a stage computes in a tick; a dot for a bubble."""
    if step is None:
        return "…".rjust(width), "dim"
    number = step.stages[stage]
    return (
        ("·".rjust(width), "dim")
        if number is None
        else (str(number).rjust(width), f"black on {STAGE_COLOUR}")
    )


def short_count(count: int) -> str:
    """At most five characters: 9999, 12k, 1.2M."""
    if count < 10_000:
        return str(count)
    return f"{count // 1000}k" if count < 1_000_000 else f"{count / 1_000_000:.1f}M"


def shown_rows(num_requests: int) -> list[int | None]:
    """Numbers of the requests that a picture shows, in order; None where some are left out."""
    numbers: list[int | None] = list(range(1, num_requests + 1))
    if num_requests <= MOST_ROWS:
        return numbers
    return [*numbers[: MOST_ROWS * 3 // 4], None, *numbers[-MOST_ROWS // 4 :]]


def cell_colour(step: TraceStep, request_id: str, most: int) -> str:
    """Of a request that is scheduled in this step. most: tokens of the darkest cell."""
    if request_id in step.decoding:
        return _DECODE_COLOUR
    count = step.num_scheduled_tokens[request_id]
    return _PROMPT_COLOURS[(count - 1) * len(_PROMPT_COLOURS) // most]


def folded(steps: Sequence[TraceStep], run: int = 8) -> list[TraceStep]:
    """``steps`` without the middle of long runs in which the same is computed for the same requests.

    What is still longer than MOST_STEPS loses its middle as well. The steps' numbers tell the gaps.
    """

    def is_alike(one: TraceStep, other: TraceStep) -> bool:
        alike = one.num_scheduled_tokens == other.num_scheduled_tokens and one.decoding == other.decoding
        alike = alike and one.loading == other.loading
        return alike and not (one.preempted or other.preempted or one.finished)

    kept: list[TraceStep] = []
    start = 0
    for index in range(1, len(steps) + 1):
        if index < len(steps) and is_alike(steps[start], steps[index]) and not steps[index].finished:
            continue
        group = steps[start:index]
        kept += group if len(group) <= run else [*group[: run - 2], group[-1]]
        start = index
    return kept if len(kept) <= MOST_STEPS else [*kept[: MOST_STEPS * 3 // 4], *kept[-MOST_STEPS // 4 :]]


def perfetto_trace(steps: Sequence[TraceStep], pp: int = 1, tp: int = 1) -> dict[str, Any]:
    """The steps in Chrome's trace event format, which ui.perfetto.dev opens:
    a track per request, 1 ms per step.

    With several workers also a process for each of them, with the steps that it computes.
    """
    events: list[dict[str, Any]] = []
    for step in steps:
        start = step.step * MICROSECONDS_PER_STEP
        for request_id, count in step.num_scheduled_tokens.items():
            kind = "decode" if request_id in step.decoding else "prompt"
            events.append(
                {
                    "name": f"{kind} {count}",
                    "cat": kind,
                    "ph": "X",
                    "ts": start,
                    "dur": MICROSECONDS_PER_STEP,
                    "pid": 1,
                    "tid": int(request_id[1:]),
                    "args": {"step": step.step, "tokens": count},
                }
            )
        for request_id in step.loading:
            events.append(
                {
                    "name": "load",
                    "cat": "load",
                    "ph": "X",
                    "ts": start,
                    "dur": MICROSECONDS_PER_STEP,
                    "pid": 1,
                    "tid": int(request_id[1:]),
                    "args": {"step": step.step},
                }
            )
        for request_id in step.preempted:
            events.append(
                {"name": "preempted", "ph": "i", "ts": start, "pid": 1, "tid": int(request_id[1:]), "s": "t"}
            )
        total = sum(step.num_scheduled_tokens.values())
        events.append(
            {"name": "tokens per step", "ph": "C", "ts": start, "pid": 1, "args": {"tokens": total}}
        )
    for track in sorted({event["tid"] for event in events if "tid" in event}):
        events.append(
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": f"R{track}"}}
        )
    if pp * tp > 1:
        events.append({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "scheduler"}})
        events += rank_events(steps, pp, tp)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@with_options
def trace(
    workload: Workload,
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Draw a heat strip instead of JSON lines; what repeats is left out."),
    ] = False,
    perfetto: Annotated[Path | None, typer.Option(help="Also write a file for ui.perfetto.dev.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also save the heat strip as a PNG.")] = None,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree", help="Draw the prefix cache as a tree instead of JSON lines, after the last step."
        ),
    ] = False,
    tree_after: Annotated[
        int | None, typer.Option(min=0, help="With --tree: after this step, when some of them are in use.")
    ] = None,
) -> None:
    """Show what the scheduler decides, step by step, without a model.

    Example: minivllm trace --budget 10 --prompt-lens 3,5,12 --max-tokens 3 --plot

    The prefix cache as a tree: minivllm trace --prompt-lens 40,40,40 --prefix-len 32 --families 1,1,2 --tree

    A pipeline of two stages with two workers each: minivllm trace --pp 2 --tp 2 --plot --perfetto ranks.json
    """
    if tree_after is not None and not tree:
        raise ConfigError("--tree-after says when to draw the tree: give --tree too.")
    from minivllm.kv_cache.tree.prefix_tree import prefix_tree

    decisions, manager = simulated(workload)
    steps, cached = [], None
    for step in decisions:
        steps.append(step)
        if step.step == tree_after:
            cached = prefix_tree(manager, [1], MOST_NODES)
    if tree_after is not None and cached is None:
        raise ConfigError(f"--tree-after is {tree_after}, but the last step is {len(steps) - 1}.")
    if perfetto is not None:
        _write("--perfetto", perfetto, json.dumps(perfetto_trace(steps, workload.pp, workload.tp)).encode())
    if save is not None:
        _write("--save", save, draw_heat_strip(folded(steps), len(workload.prompt_lens)))
    if plot:
        from rich.console import Console

        console = Console()
        columns = console.width if console.is_terminal else None
        strip = heat_strip(folded(steps), len(workload.prompt_lens), columns, has_colours(console))
        console.print(strip, no_wrap=True, crop=False, overflow="ignore")
        for rank in range(workload.pp * workload.tp if workload.pp * workload.tp > 1 else 0):
            print(rank_text(rank, workload.pp, workload.tp))
    if tree:
        print_tree(cached or prefix_tree(manager, [1], MOST_NODES))
    if not (plot or tree):
        for step in steps:
            print(json.dumps(step.as_dict()))


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written ({error.strerror}); name a file.") from None


def draw_heat_strip(steps: Sequence[TraceStep], num_requests: int) -> bytes:
    """A row per request, a column per step, in each cell the number of tokens;
    most of very many rows are left out.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise ConfigError(
            "--save needs matplotlib: pip install 'minivllm[bench]', or leave it out."
        ) from None
    most = max((count for step in steps for count in step.num_scheduled_tokens.values()), default=1)
    rows = shown_rows(num_requests)
    num_stages = max((len(step.stages) for step in steps), default=0)
    height = len(rows) + num_stages
    figure = Figure(figsize=(max(4.0, 0.42 * len(steps) + 1), 0.42 * height + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for column, step in enumerate(steps):
        for row, number in enumerate(rows):
            request_id = f"R{number}"
            count = step.num_scheduled_tokens.get(request_id)
            if request_id in step.preempted:
                text, colour = "x", PREEMPTED_COLOUR
            elif request_id in step.loading:
                text, colour = "~", LOADING_COLOUR
            elif count is not None:
                text, colour = short_count(count), cell_colour(step, request_id, most)
            else:
                continue
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
        for stage, number in enumerate(step.stages):
            if number is not None:
                place = len(rows) + stage
                axes.add_patch(
                    Rectangle((column - 0.5, place - 0.5), 1, 1, facecolor=STAGE_COLOUR, edgecolor="white")
                )
                axes.text(column, place, str(number), ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, max(1, len(steps)) - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
    labels = ["…" if number is None else f"R{number}" for number in rows]
    axes.set_yticks(range(height), [*labels, *(f"stage {stage}" for stage in range(num_stages))])
    marked = range(0, len(steps), max(1, len(steps) // 20))
    axes.set_xticks(marked, [str(steps[place].step) for place in marked])
    axes.set_xlabel("step of the scheduler")
    axes.set_title(
        "tokens computed per step: blue prompt, orange decode, red preempted, violet loading", fontsize=9
    )
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
