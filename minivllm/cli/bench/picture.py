"""A report as a PNG: bars of medians, or lines where the cases are points of a sweep."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench.statistics import median
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.cli.bench.report import Measurement, Report


def draw(report: Report) -> bytes:
    """One panel for every metric that can be better or worse. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install 'minivllm[bench]', or leave it out.") from None
    shown = [one for one in report.measurements if one.better != "neither" and one.samples] or [
        one for one in report.measurements if one.samples
    ]
    metrics = list(dict.fromkeys((one.metric, one.unit, one.better) for one in shown))
    figure = Figure(figsize=(7, 2.6 * max(1, len(metrics))), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (metric, unit, better) in enumerate(metrics, 1):
        axes = figure.add_subplot(len(metrics), 1, place)
        own = [one for one in shown if one.metric == metric]
        if any(one.x is not None for one in own):
            _lines(axes, own)
            axes.set_ylabel(unit)
        else:
            _bars(axes, own)
            axes.set_xlabel(unit)
        axes.set_title(metric if better == "neither" else f"{metric} ({better} is better)", fontsize=9)
        axes.tick_params(labelsize=8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _bars(axes: Any, measurements: list[Measurement]) -> None:
    sides = list(dict.fromkeys(one.side for one in measurements))
    cases = list(dict.fromkeys(one.case for one in measurements))
    height = 0.8 / len(sides)
    for number, side in enumerate(sides):
        own = [one for one in measurements if one.side == side]
        places = [cases.index(one.case) + (number - (len(sides) - 1) / 2) * height for one in own]
        axes.barh(places, [median(one.samples) for one in own], height=height * 0.9, label=side)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    if len(sides) > 1:
        axes.legend(fontsize=8)


def _lines(axes: Any, measurements: list[Measurement]) -> None:
    for side in dict.fromkeys(one.side for one in measurements):
        points = sorted((one.x, median(one.samples)) for one in measurements if one.side == side and one.x is not None)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=side)
    axes.legend(fontsize=8)
