"""The statistics of all benchmarks: medians, percentiles that know their limits, and an interval for a ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

P90_MIN_SAMPLES, P99_MIN_SAMPLES = 10, 100
"""Below these counts a percentile would be one of the few largest values by another name."""

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """What a table shows of a sample; None where there are too few values to tell."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the samples lie, linear between neighbours. Raises ValueError for none."""
    if not samples:
        raise ValueError("There is no percentile of nothing.")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low, part = math.floor(place), place - math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * part


def median(samples: Sequence[float]) -> float:
    """The middle value. Raises ValueError for none."""
    return percentile(samples, 0.5)


def summarize(samples: Sequence[float]) -> Summary:
    """p50 of any sample, p90 of at least 10 values, p99 of at least 100."""
    return Summary(
        len(samples),
        median(samples) if samples else None,
        percentile(samples, 0.9) if len(samples) >= P90_MIN_SAMPLES else None,
        percentile(samples, 0.99) if len(samples) >= P99_MIN_SAMPLES else None,
    )


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of the medians, and its 95 % percentile bootstrap interval (Efron 1979): (ratio, low, high).

    Both samples are drawn again, with replacement and independently, 2000 times. Raises ValueError for an empty one.
    """
    import numpy as np

    source = np.random.default_rng(seed)

    def medians(samples: Sequence[float]) -> np.ndarray:
        values = np.asarray(samples, dtype=np.float64)
        # In parts, so that thousands of samples do not need gigabytes.
        part = max(1, 2**22 // len(values))
        drawn = [
            np.median(values[source.integers(len(values), size=(min(part, RESAMPLES - done), len(values)))], axis=1)
            for done in range(0, RESAMPLES, part)
        ]
        return np.concatenate(drawn)

    ratio = _ratio(median(numerator), median(denominator))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = medians(numerator) / medians(denominator)
    ratios = ratios[~np.isnan(ratios)]
    if not len(ratios):
        return ratio, ratio, ratio
    tail = (1.0 - CONFIDENCE) / 2
    # "lower" and "higher" take values that were drawn: between an infinite and a finite one lies nothing.
    low = float(np.quantile(ratios, tail, method="lower"))
    return ratio, low, float(np.quantile(ratios, 1 - tail, method="higher"))


def _ratio(numerator: float, denominator: float) -> float:
    if denominator:
        return numerator / denominator
    return math.inf if numerator else 1.0


def knee(loads: Sequence[float], gains: Sequence[float]) -> int:
    """Index of the knee of a curve that rises and flattens: the point farthest above the line between its ends.

    loads ascend. (Satopää et al. 2011, "Finding a Kneedle in a Haystack", on unsmoothed points.) The last point of a
    curve that never flattens. Raises ValueError for fewer than two points or loads that do not ascend.
    """
    if len(loads) != len(gains) or len(loads) < 2 or any(a >= b for a, b in pairwise(loads)):
        raise ValueError("A knee needs at least two points with ascending loads.")
    width, height = loads[-1] - loads[0], max(gains) - gains[0]
    if height <= 0:
        return 0
    above = [(gain - gains[0]) / height - (load - loads[0]) / width for load, gain in zip(loads, gains)]
    best = max(range(len(above)), key=above.__getitem__)
    # Rounding must not make a straight line have a knee.
    return best if above[best] > 1e-9 else len(loads) - 1
