"""The scheduler's heat strip as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence

from minivllm.cli.trace import PREEMPTED_COLOUR, TraceStep, cell_colour
from minivllm.errors import ConfigError


def draw_heat_strip(steps: Sequence[TraceStep], num_requests: int) -> bytes:
    """A row per request, a column per step, in each cell the number of tokens.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise ConfigError("--save needs matplotlib: pip install 'minivllm[bench]', or leave it out.") from None
    most = max((count for step in steps for count in step.num_scheduled_tokens.values()), default=1)
    figure = Figure(figsize=(max(4.0, 0.42 * len(steps) + 1), 0.42 * num_requests + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for column, step in enumerate(steps):
        for row in range(num_requests):
            request_id = f"R{row + 1}"
            count = step.num_scheduled_tokens.get(request_id)
            if request_id in step.preempted:
                text, colour = "x", PREEMPTED_COLOUR
            elif count is not None:
                text, colour = str(count), cell_colour(step, request_id, most)
            else:
                continue
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, max(1, len(steps)) - 0.5)
    axes.set_ylim(num_requests - 0.5, -0.5)
    axes.set_yticks(range(num_requests), [f"R{row + 1}" for row in range(num_requests)])
    axes.set_xlabel("step of the scheduler")
    axes.set_title("tokens computed per step: blue prompt, orange decode, red preempted", fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
