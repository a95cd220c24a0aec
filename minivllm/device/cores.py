"""How processes that compute at the same time divide the cores of their host."""

from __future__ import annotations

import os


def share_of_cores(num_processes: int) -> dict[str, str]:
    """Environment variables that give one of so many processes its share of the cores: at least one thread.

    Empty for a single process, and where the user has set OMP_NUM_THREADS, which is then for each of them.
    """
    if "OMP_NUM_THREADS" in os.environ or num_processes == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_processes))}
