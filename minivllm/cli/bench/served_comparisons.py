"""What the figures of a server mean beside others: itself without overload, the same engine without a server."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.cli.bench.figures import inter_token_latencies
from minivllm.cli.bench.report import Comparison, Measurement, Report
from minivllm.cli.bench.served_requests import ServedRecord
from minivllm.cli.bench.statistics import P99_MIN_SAMPLES, median, percentile, ratio_interval
from minivllm.errors import RequestError


def overload_note(usual: Sequence[ServedRecord], overloaded: Sequence[ServedRecord]) -> str:
    """What overload did to those who were let in, and how long the others waited to be told, in a sentence."""
    before, after = p99_itl(usual), p99_itl(overloaded)
    if before is None or after is None:
        told = f"p99 ITL needs {P99_MIN_SAMPLES} gaps in both runs: send more requests."
    else:
        told = f"p99 ITL of admitted requests: {after:.3g} ms, {after / before:.2f} × the {before:.3g} ms before."
    refused = [1e3 * record.refused_after for record in overloaded if record.refused_after is not None]
    if not refused:
        return f"{told} Nobody was told 429: raise the factor, or send more requests."
    slowest = percentile(refused, 0.99) if len(refused) >= P99_MIN_SAMPLES else max(refused)
    which = "p99" if len(refused) >= P99_MIN_SAMPLES else "longest"
    return f"{told} Time to 429: median {median(refused):.3g} ms, {which} {slowest:.3g} ms, {len(refused)} requests."


def p99_itl(records: Sequence[ServedRecord]) -> float | None:
    """[ms] of the requests that succeeded, None below 100 gaps or where all tokens came together."""
    good = [record for record in records if record.error is None and not record.cancelled]
    gaps = [1e3 * gap for record in good for gap in inter_token_latencies(record)]
    return percentile(gaps, 0.99) if len(gaps) >= P99_MIN_SAMPLES and any(gaps) else None


def against_in_process(
    report: Report, workload: str, measurements: Sequence[Measurement]
) -> tuple[list[Measurement], list[Comparison], str]:
    """The server beside the engine in process, as ``bench throughput --json`` measured it on the same workload.

    Returns its measurements, the comparisons, and a sentence. Raises RequestError for another workload.
    """
    theirs = {one.metric: one for one in report.measurements if one.case == workload and one.samples}
    if "output" not in theirs or "TTFT" not in theirs:
        raise RequestError(
            f"The report of --against has no throughput of {workload}: write one with "
            f"minivllm bench throughput --workload {workload} --json FILE."
        )
    ours = {one.metric: one for one in measurements if one.samples}
    if "TTFT" not in ours:
        raise RequestError("No request succeeded, so there is nothing to compare with the report of --against.")
    side, case = "in process", ours["output"].case
    beside, comparisons = [], []
    for metric in ("output", "TTFT", "ITL"):
        if metric in theirs and metric in ours:
            mine, other = ours[metric], theirs[metric]
            beside.append(
                Measurement(
                    case=case, side=side, metric=metric, unit=other.unit, better=other.better, samples=other.samples
                )
            )
            better, worse = (mine, other) if mine.better == "higher" else (other, mine)
            ratio, low, high = ratio_interval(better.samples, worse.samples)
            comparisons.append(
                Comparison(case=case, metric=metric, side=mine.side, against=side, ratio=ratio, low=low, high=high)
            )
    share = median(ours["output"].samples) / median(theirs["output"].samples)
    added = median(ours["TTFT"].samples) - median(theirs["TTFT"].samples)
    note = f"The server gives {share:.1%} of the output rate in process, and adds {added:.3g} ms to the median TTFT."
    return beside, comparisons, note
