"""When requests reach a server: as places get free (closed loop), or at times that nothing delays (open loop)."""

from __future__ import annotations

import random
from dataclasses import replace

from minivllm.cli.bench.workloads import Workload
from minivllm.errors import ConfigError

FORMS = {
    "poisson:RATE": "independent, RATE per second",
    "gamma:RATE:SHAPE": "RATE per second, gamma-distributed gaps: below SHAPE 1 burstier than Poisson, above steadier",
    "burst:SIZE:SECONDS": "SIZE at once, every SECONDS",
    "trace": "the times that the workload itself gives",
}
_NUM_FIELDS = {"poisson": 1, "gamma": 2, "burst": 2, "trace": 0}


def arrive(workload: Workload, text: str, seed: int = 0) -> Workload:
    """The same requests in the same order at the times that ``text`` names (see FORMS), which depend on ``seed`` alone.

    Turns of a conversation go on waiting for the turn before. Raises ConfigError for what is none of the forms.
    """
    name, *fields = text.split(":")
    try:
        numbers = [float(field) for field in fields]
    except ValueError:
        raise _unknown(text) from None
    if _NUM_FIELDS.get(name) != len(numbers) or not all(0 < number < 1e9 for number in numbers):
        raise _unknown(text)
    if name == "trace":
        return workload
    source = random.Random(f"arrivals/{seed}")
    moment, num_arrived, tasks = 0.0, 0, []
    for task in workload.tasks:
        if task.after is not None:
            tasks.append(task)
            continue
        if name == "burst":
            moment = num_arrived // max(1, int(numbers[0])) * numbers[1]
        elif num_arrived:
            shape = 1.0 if name == "poisson" else numbers[1]
            moment += source.gammavariate(shape, 1.0 / (numbers[0] * shape))
        tasks.append(replace(task, arrival=moment))
        num_arrived += 1
    return Workload(workload.name, tasks)


def _unknown(text: str) -> ConfigError:
    forms = "; ".join(f"{form} ({meaning})" for form, meaning in FORMS.items())
    return ConfigError(f"--arrivals is {text!r}, but must be, with numbers above 0: {forms}.")
