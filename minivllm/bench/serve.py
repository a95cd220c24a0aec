"""``minivllm bench serve``: what clients of an OpenAI-compatible server experience under load."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from minivllm.bench.engines import WORKLOAD_HELP, knee_note, parse_loads
from minivllm.bench.reports.figures import (
    P99_MIN_SAMPLES,
    Figure,
    error_figures,
    inter_token_latencies,
    latency_figures,
    median,
    percentile,
    rate_figures,
    time_per_output_token,
    time_to_first_token,
)
from minivllm.bench.reports.report import (
    Comparison,
    Measurement,
    OutputOptions,
    Report,
    compared,
    make_report,
    publish,
    read_report,
)
from minivllm.bench.requests.workloads import ARRIVAL_FORMS, arrive, make_workload
from minivllm.bench.sides.drive import Record, Task
from minivllm.cli.engine.openai_server import (
    error_message,
    key_header,
    served_models,
    server_root,
    stream_events,
)
from minivllm.cli.engine.options import with_options
from minivllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import httpx


_WORDS = (
    "one",
    "day",
    "the",
    "old",
    "sea",
    "was",
    "calm",
    "and",
    "a",
    "red",
    "boat",
    "went",
    "far",
    "out",
    "to",
    "it",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server that is measured."""

    url: Annotated[str, typer.Option(help="Where the server's /v1 is.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="Name to ask for. [default: the first of /v1/models]")] = (
        None
    )
    api_key: Annotated[str | None, typer.Option(help="Bearer key.", envvar="MINIVLLM_API_KEY")] = None
    endpoint: Annotated[
        str,
        typer.Option(
            help="completions sends token ids; chat sends a word for each, for servers without ids."
        ),
    ] = "completions"
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for full lengths; not every server knows ignore_eos.")
    ] = True
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds without a byte that end a request.")] = (
        600.0
    )

    def found(self) -> Target:
        """With the address as requests need it, and without a model's name the first one that the server has.

        Raises ConfigError for what cannot be measured,
        and what served_models raises for a server that is not there.
        """
        if importlib.util.find_spec("httpx") is None:
            raise ConfigError("Measuring a server needs httpx: pip install 'minivllm[bench]'.")
        if self.endpoint not in ("completions", "chat"):
            raise ConfigError(f"--endpoint is {self.endpoint!r}, but must be completions or chat.")
        root = server_root(self.url)
        model = served_models(root, key_header(self.api_key))[0]["id"] if self.model is None else self.model
        return replace(self, url=root, model=model)

    def path(self) -> str:
        return "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"

    def body(self, task: Task) -> dict[str, Any]:
        """A greedy, streamed request for ``task``. A chat takes no token ids: it gets a word for each."""
        body: dict[str, Any] = {
            "max_tokens": task.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "completions":
            body["prompt"] = task.prompt
        else:
            text = " ".join(_WORDS[token % len(_WORDS)] for token in task.prompt)
            body["messages"] = [{"role": "user", "content": text}]
        if self.model is not None:
            body["model"] = self.model
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


@dataclass
class ServedRecord(Record):
    """The outcome of a request to a server, which reports the number of tokens, but not the tokens.

    num_chunks: pieces of text that arrived. cancelled: the client left on purpose.
    refused_after: how long it took
    to be told 429, from when the request was due [seconds].
    """

    num_prompt_tokens: int = 0
    num_chunks: int = 0
    cancelled: bool = False
    refused_after: float | None = None


def token_times(chunk_times: Sequence[float], num_tokens: int) -> list[float]:
    """When each token came, the first with the first chunk and the last with the last one,
    the others evenly between.

    A chunk may carry several tokens, and a token may come without text: only their number is known for sure.
    """
    if not chunk_times or num_tokens < 1:
        return []
    last = len(chunk_times) - 1
    if num_tokens == 1:
        return [chunk_times[0]]
    return [chunk_times[round(number * last / (num_tokens - 1))] for number in range(num_tokens)]


@dataclass(frozen=True)
class LoadGenerator:
    """Sends tasks and writes down what came back.

    concurrency: closed loop, the next request is due when one of so many places is free. None: open loop, a
    request is due at its arrival, however busy the server is. cancel_rate: share of requests whose client
    leaves at a random place of the answer. Needs httpx.
    """

    target: Target
    _: KW_ONLY
    concurrency: int | None = None
    cancel_rate: float = 0.0
    seed: int = 0
    on_end: Callable[[], None] = lambda: None

    async def run(self, tasks: Sequence[Task]) -> tuple[list[ServedRecord], float]:
        """All records, and the time from the start to the last end [seconds]."""
        import httpx

        records = [ServedRecord() for _ in tasks]
        ended = [asyncio.Event() for _ in tasks]
        source = random.Random(f"cancel/{self.seed}")
        leave_after = [
            source.randrange(max(1, task.max_tokens)) if source.random() < self.cancel_rate else None
            for task in tasks
        ]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=self.target.url,
            headers=key_header(self.target.api_key),
            timeout=self.target.timeout,
            limits=limits,
            trust_env=False,
        ) as client:
            start = time.perf_counter()

            async def one(index: int) -> None:
                task = tasks[index]
                due = 0.0
                if task.after is not None:
                    await ended[task.after].wait()
                    due = time.perf_counter() - start
                if self.concurrency is None or task.after is not None:
                    due += task.arrival
                    await asyncio.sleep(due - (time.perf_counter() - start))
                else:
                    due = time.perf_counter() - start
                records[index].arrival = due
                await self._send(client, task, records[index], start, leave_after[index])
                ended[index].set()
                self.on_end()

            if self.concurrency is None:
                await asyncio.gather(*(one(index) for index in range(len(tasks))))
            else:
                waiting = iter(range(len(tasks)))

                async def place() -> None:
                    for index in waiting:
                        await one(index)

                await asyncio.gather(*(place() for _ in range(self.concurrency)))
            return records, time.perf_counter() - start

    async def _send(
        self,
        client: httpx.AsyncClient,
        task: Task,
        record: ServedRecord,
        start: float,
        leave_after: int | None,
    ) -> None:
        """One request. Whatever goes wrong is written into its record, by class."""
        import httpx

        chunk_times: list[float] = []
        usage: dict[str, Any] | None = None
        try:
            async with client.stream("POST", self.target.path(), json=self.target.body(task)) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    if response.status_code == 429:
                        record.refused_after = time.perf_counter() - start - record.arrival
                    record.error = f"HTTP {response.status_code}: {error_message(text)}"
                    return
                if leave_after == 0:
                    record.cancelled = True
                    return
                async with aclosing(stream_events(response)) as events:
                    async for event in events:
                        if event.get("error"):
                            record.error = f"stream error: {error_message(json.dumps(event))}"
                            return
                        usage = event.get("usage") or usage
                        if any(_has_text(choice) for choice in event.get("choices") or ()):
                            chunk_times.append(time.perf_counter() - start)
                            if leave_after is not None and len(chunk_times) >= leave_after:
                                record.cancelled = True
                                return
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}"
            return
        except (ValueError, AttributeError, TypeError) as error:
            record.error = f"broken stream: {type(error).__name__}: {error}"
            return
        if usage is None:
            record.error = (
                "no usage: the stream ended without counting its tokens, and chunks are not tokens."
            )
            return
        record.num_chunks = len(chunk_times)
        record.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
        # Tokens of an answer without any text came when it ended.
        chunk_times = chunk_times or [time.perf_counter() - start]
        record.times = token_times(chunk_times, int(usage.get("completion_tokens") or 0))


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(
        delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls")
    )


NUM_WARMUP_REQUESTS = 2


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The requests, and their arrival times."""

    workload: Annotated[str, typer.Option(help=WORKLOAD_HELP)] = "random:64:32:256"
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Closed loop: requests at a time; the next is sent when one ends. [default: 8]"
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Open loop, in place of --concurrency: "
            + "; ".join(f"{a} ({b})" for a, b in ARRIVAL_FORMS.items())
        ),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            help="Open loop as well: Poisson arrivals at one rate after the other, ascending (0.5,1,2,4); "
            "shows the "
            "rate from which on more load adds only latency."
        ),
    ] = None
    repeats: Annotated[
        int, typer.Option(min=1, help="With --rates: how often each is sent, with fresh prompts.")
    ] = 1
    overload: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Then send the workload again, so many times as fast as the server managed in the closed "
            "loop: "
            "latencies of admitted requests, and the time until the others get 429.",
        ),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            help="Limits in ms that a request must keep to count for goodput, such as ttft:500,tpot:50."
        ),
    ] = None
    cancel_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests whose client leaves early.")
    ] = 0.0
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random token ids below this.")] = 1000
    seed: Annotated[int, typer.Option(help="Of lengths, contents, arrivals and cancellations.")] = 0


@with_options
def serve(
    load: LoadOptions,
    output: OutputOptions,
    target: Target,
    against: Annotated[
        Path | None,
        typer.Option(
            help="JSON of bench throughput on the same workload: the cost of the server against the engine."
        ),
    ] = None,
) -> None:
    """Measure an OpenAI-compatible server under load: TTFT, TPOT, ITL, E2E, rates, goodput, errors by class.

    TTFT counts from the time when a request was due, even if it was sent later. The server's usage counts
    tokens, since a chunk may hold several. A failed request counts as failed only.

    Example: minivllm bench serve --url http://127.0.0.1:8000 --arrivals poisson:2 --slo ttft:500,tpot:50

    A curve: minivllm bench serve --rates 0.5,1,2,4 --slo ttft:500,tpot:50 --png curve.png

    Overload: minivllm bench serve --workload random:512:16:64 --concurrency 8 --overload 10

    Against the engine in process: minivllm bench throughput --workload fixed:32:128:64 --json a.json, then
    with a server of the same model minivllm bench serve --workload fixed:32:128:64 --concurrency 32 --against
    a.json
    """
    if sum(given is not None for given in (load.concurrency, load.arrivals, load.rates)) > 1:
        raise ConfigError(
            "--concurrency (closed loop), --arrivals and --rates (open loop) exclude each other: give one of "
            "them."
        )
    if load.overload is not None and (load.arrivals or load.rates) is not None:
        raise ConfigError(
            "--overload measures a closed loop first, so it excludes --arrivals and --rates: give "
            "--concurrency."
        )
    if load.rates is not None and against is not None:
        raise ConfigError("--against compares one load with another: leave out --rates.")
    slo = parse_slo(load.slo)
    in_process = None if against is None else read_report(against)
    runs = loads_of(load)
    tasks = [
        run.tasks() for run in runs
    ]  # what is wrong with the workload is said before the server is asked
    target = target.found()
    warm_up(target, load)
    found: dict[tuple[str, str], Measurement] = {}
    elapsed: list[float] = []
    notes: list[str] = []
    for run, own in zip(runs, tasks):
        records, seconds = send(target, run, own, show=True)
        elapsed.append(seconds)
        for one in served_measurements(target, run, records, seconds, slo):
            if found.setdefault((one.case, one.metric), one) is not one:
                found[one.case, one.metric].samples.extend(one.samples)
        notes += [note if run.rate is None else f"{run.rate:g}/s: {note}" for note in notes_on(records)]
    measurements = sorted(found.values(), key=lambda one: one.x or 0.0)
    if load.rates is not None:
        notes.insert(0, knee_note(target.model or "server", "rate", measurements))
    comparisons: list[Comparison] = []
    if in_process is not None:
        beside, comparisons, note = against_in_process(in_process, load.workload, measurements)
        measurements += beside
        notes.append(note)
    if load.overload is not None:
        rate = load.overload * sum(record.error is None for record in records) / sum(elapsed)
        if rate == 0:
            raise RequestError(f"No request succeeded, so there is no rate to overload. {' '.join(notes)}")
        # Fresh prompts, so that no cache answers for the overloaded engine.
        over = Load(
            load, arrivals=f"poisson:{rate:.6g}", repetition=1, label=f"{load.overload:g} × that rate"
        )
        overloaded, their_seconds = send(target, over, over.tasks(), show=True)
        measurements += served_measurements(target, over, overloaded, their_seconds, slo)
        notes += [*notes_on(overloaded), overload_note(records, overloaded)]
    configuration = {
        **asdict(load),
        "concurrency": runs[0].concurrency,
        "against": None if against is None else str(against),
        "target": {name: value for name, value in asdict(target).items() if name != "api_key"},
        "num_requests": sum(map(len, tasks)),
        "seconds": sum(elapsed),
    }
    publish(make_report("serve", configuration, measurements, comparisons, notes), output)


def warm_up(target: Target, load: LoadOptions) -> None:
    """Send a few requests one by one, whatever becomes of them."""
    warmup = Load(load, concurrency=1, repetition=-1)
    send(
        target,
        warmup,
        [replace(task, arrival=0.0, after=None) for task in warmup.tasks()[:NUM_WARMUP_REQUESTS]],
    )


@dataclass(frozen=True)
class Load:
    """One run of the workload. repetition: which contents it has.
    label: how the run is called, if not by its load.

    rate: place of the run on the axis of a sweep over rates [requests/s].
    """

    options: LoadOptions
    concurrency: int | None = None
    arrivals: str | None = None
    repetition: int = 0
    label: str | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.options.workload} at {self.rate:g}/s"
        return f"{self.options.workload}, {self.label or self.arrivals or f'{self.concurrency} at a time'}"

    def tasks(self) -> list[Task]:
        options = self.options
        tasks = make_workload(options.workload, options.vocab_size, options.seed, self.repetition)
        return tasks if self.arrivals is None else arrive(tasks, self.arrivals, options.seed)


def loads_of(load: LoadOptions) -> list[Load]:
    """One run, or with ``rates`` one of each rate and repeat:
    with prompts of its own, so that no prefix cache answers for the engine."""
    if load.rates is None:
        concurrency = None if load.arrivals is not None else load.concurrency or 8
        return [Load(load, concurrency=concurrency, arrivals=load.arrivals)]
    rates = parse_loads("--rates", load.rates) * load.repeats
    return [
        Load(load, arrivals=f"poisson:{rate:.6g}", repetition=run, rate=rate)
        for run, rate in enumerate(rates)
    ]


def send(
    target: Target, load: Load, tasks: Sequence[Task], show: bool = False
) -> tuple[list[ServedRecord], float]:
    """All records, and the time from the start to the last end [seconds]. show: a progress bar."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (show and console.is_terminal)) as progress:
        bar = progress.add_task(f"{len(tasks)} requests", total=len(tasks))
        generator = LoadGenerator(
            target,
            concurrency=load.concurrency,
            cancel_rate=load.options.cancel_rate if show else 0.0,
            seed=load.options.seed,
            on_end=lambda: progress.advance(bar),
        )
        return asyncio.run(generator.run(tasks))


def served_measurements(
    target: Target, run: Load, records: Sequence[ServedRecord], seconds: float, slo: dict[str, float]
) -> list[Measurement]:
    """The figures of one run."""
    return [
        Measurement(
            run.name, target.model or "server", one.metric, one.unit, one.better, one.samples, run.rate
        )
        for one in served_figures(records, seconds, slo)
    ]


def parse_slo(text: str | None) -> dict[str, float]:
    """ "ttft:500,tpot:50" -> limits [ms]. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in ("ttft", "tpot", "e2e") or not 0 < limits[name] < float("inf"):
            raise ConfigError(
                f"--slo is {text!r}, but must be limits in ms of ttft, tpot or e2e: ttft:500,tpot:50."
            )
    return limits


def served_figures(records: Sequence[ServedRecord], seconds: float, slo: dict[str, float]) -> list[Figure]:
    """Latencies and rates of the requests that succeeded, goodput under ``slo`` [ms], errors by class.

    Requests that were cancelled on purpose are counted, and stand for nothing else.
    """
    asked = [record for record in records if not record.cancelled]
    good = [record for record in asked if record.error is None]
    num_output, num_prompt = sum(len(r.times) for r in good), sum(r.num_prompt_tokens for r in good)
    figures = [
        *latency_figures(good),
        *rate_figures(len(good), num_prompt, num_output, seconds),
    ]
    if slo:
        kept = sum(keeps(record, slo) for record in good)
        figures.append(Figure("goodput", "req/s", "higher", [kept / seconds]))
        figures.append(Figure("within the SLO", "share", "higher", [kept / len(asked)] if asked else []))
    if len(asked) < len(records):
        figures.append(Figure("cancelled", "count", "neither", [float(len(records) - len(asked))]))
    refused = [1e3 * record.refused_after for record in records if record.refused_after is not None]
    if refused:
        figures.append(Figure("time to 429", "ms", "lower", refused))
    return figures + error_figures(records)


def keeps(record: ServedRecord, slo: dict[str, float]) -> bool:
    """True if a request that succeeded stayed within every limit [ms]."""
    if not record.times:
        return False
    found = {"ttft": time_to_first_token(record), "e2e": record.times[-1] - record.arrival}
    found["tpot"] = time_per_output_token(record) if len(record.times) > 1 else 0.0
    return all(1e3 * found[name] <= limit for name, limit in slo.items())


def notes_on(records: Sequence[ServedRecord]) -> list[str]:
    """Notes besides the figures: a sentence for every class of error,
    and one on chunks that are not tokens."""
    notes = []
    examples = {
        record.error.partition(":")[0]: record.error for record in records if record.error is not None
    }
    counts = Counter(record.error.partition(":")[0] for record in records if record.error is not None)
    notes += [f"{counts[name]} × {error}" for name, error in examples.items()]
    good = [record for record in records if record.error is None and not record.cancelled]
    num_tokens, num_chunks = sum(len(r.times) for r in good), sum(r.num_chunks for r in good)
    if num_chunks and num_tokens != num_chunks:
        notes.append(
            f"{num_tokens:,} tokens came in {num_chunks:,} chunks: ITL shares each gap among its tokens."
        )
    return notes


def overload_note(usual: Sequence[ServedRecord], overloaded: Sequence[ServedRecord]) -> str:
    """The effect of overload on admitted requests, and the time until the others were refused,
    in a sentence."""
    before, after = p99_itl(usual), p99_itl(overloaded)
    if before is None or after is None:
        told = f"p99 ITL needs {P99_MIN_SAMPLES} gaps in both runs: send more requests."
    else:
        told = (
            f"p99 ITL of admitted requests: {after:.3g} ms, {after / before:.2f} × the {before:.3g} ms "
            "before."
        )
    refused = [1e3 * record.refused_after for record in overloaded if record.refused_after is not None]
    if not refused:
        return f"{told} Nobody was told 429: raise the factor, or send more requests."
    slowest = percentile(refused, 0.99) if len(refused) >= P99_MIN_SAMPLES else max(refused)
    which = "p99" if len(refused) >= P99_MIN_SAMPLES else "longest"
    return (
        f"{told} Time to 429: median {median(refused):.3g} ms, {which} {slowest:.3g} ms, {len(refused)} "
        "requests."
    )


def p99_itl(records: Sequence[ServedRecord]) -> float | None:
    """[ms] of the requests that succeeded, None below 100 gaps or where all tokens came together."""
    good = [record for record in records if record.error is None and not record.cancelled]
    gaps = [1e3 * gap for record in good for gap in inter_token_latencies(record)]
    return percentile(gaps, 0.99) if len(gaps) >= P99_MIN_SAMPLES and any(gaps) else None


def against_in_process(
    report: Report, workload: str, measurements: Sequence[Measurement]
) -> tuple[list[Measurement], list[Comparison], str]:
    """The server beside the engine in process,
    as ``bench throughput --json`` measured it on the same workload.

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
        raise RequestError(
            "No request succeeded, so there is nothing to compare with the report of --against."
        )
    case = ours["output"].case
    beside = [
        structs.replace(theirs[metric], case=case, side="in process", x=None)
        for metric in ("output", "TTFT", "ITL")
        if metric in theirs and metric in ours
    ]
    comparisons = compared(ours, {one.metric: one for one in beside})
    share = median(ours["output"].samples) / median(theirs["output"].samples)
    added = median(ours["TTFT"].samples) - median(theirs["TTFT"].samples)
    note = (
        f"The server gives {share:.1%} of the output rate in process, and adds {added:.3g} ms to the median "
        "TTFT."
    )
    return beside, comparisons, note
