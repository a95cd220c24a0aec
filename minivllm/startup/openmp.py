"""How OpenMP's threads wait for one another, which has to be settled before torch is imported.

torch carries GNU's libgomp, whose threads spin for many milliseconds at the end of every parallel loop before
they sleep. Where other programs want the cores, a thread that spins keeps the very thread it waits for from
running: beside two foreign processes that spin on two cores, decode fell to a seventh. Threads that sleep at
once keep half of their speed there, but on idle cores each of the hundreds of loops of a step pays for waking
them: a quarter to a third of the speed. So a thread spins for as long as the usual gap between two loops
takes, and then sleeps.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger(__name__)

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Either of them is the user's choice, and stays."""

SPIN_COUNT = 6000
"""Turns of libgomp's waiting loop, about 0.3 ms at 140 cycles a turn:
`bench model --under-load 2` measures it."""


def choose_wait_policy() -> None:
    """Have threads spin for a short time only before they sleep, unless the user chose otherwise.

    libgomp reads this when it is loaded: in a process that has imported torch already, nothing can be
    changed. Child processes inherit the setting.
    """
    if any(name in os.environ for name in SETTINGS):
        return
    if "torch" in sys.modules:
        logger.info(
            "torch was imported before the engine was made, so its threads spin while they wait, which is "
            "slow where "
            "other programs are busy: set GOMP_SPINCOUNT in the environment, or import torch afterwards."
        )
        return
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def wait_policy() -> str:
    """What is settled, in words."""
    found = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return f"they wait as {found[0]} says" if found else "they spin while they wait"
