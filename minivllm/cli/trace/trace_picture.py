"""The scheduler's heat strip as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence

from minivllm.cli.trace.command import PREEMPTED_COLOUR, TraceStep, cell_colour, short_count, shown_rows
from minivllm.errors import ConfigError


def draw_heat_strip(steps: Sequence[TraceStep], num_requests: int) -> bytes:
    """A row per request, a column per step, in each cell the number of tokens; most of very many rows are left out.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise ConfigError("--save needs matplotlib: pip install 'minivllm[bench]', or leave it out.") from None
    most = max((count for step in steps for count in step.num_scheduled_tokens.values()), default=1)
    rows = shown_rows(num_requests)
    figure = Figure(figsize=(max(4.0, 0.42 * len(steps) + 1), 0.42 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for column, step in enumerate(steps):
        for row, number in enumerate(rows):
            request_id = f"R{number}"
            count = step.num_scheduled_tokens.get(request_id)
            if request_id in step.preempted:
                text, colour = "x", PREEMPTED_COLOUR
            elif count is not None:
                text, colour = short_count(count), cell_colour(step, request_id, most)
            else:
                continue
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, max(1, len(steps)) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), ["…" if number is None else f"R{number}" for number in rows])
    marked = range(0, len(steps), max(1, len(steps) // 20))
    axes.set_xticks(marked, [str(steps[place].step) for place in marked])
    axes.set_xlabel("step of the scheduler")
    axes.set_title("tokens computed per step: blue prompt, orange decode, red preempted", fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
