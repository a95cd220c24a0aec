"""How OpenMP's threads wait for one another, which has to be settled before torch is imported.

torch carries GNU's libgomp, whose threads spin for milliseconds at the end of every parallel loop before they sleep. On
idle cores that gains nothing that could be measured. Where other programs want the cores, a thread that spins keeps the
very thread it waits for from running: with two foreign processes that spin on two cores, decode fell to an eighth, and
with threads that sleep at once to two fifths.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger(__name__)

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Either of them is the user's choice, and stays."""


def choose_wait_policy() -> None:
    """Have threads sleep while they wait, unless the user chose otherwise.

    libgomp reads this when it is loaded: in a process that has imported torch already, nothing can be changed. Child
    processes inherit the setting.
    """
    if any(name in os.environ for name in SETTINGS):
        return
    if "torch" in sys.modules:
        logger.info(
            "torch was imported before the engine was made, so its threads spin while they wait, which is slow where "
            "other programs are busy: set OMP_WAIT_POLICY=passive in the environment, or import torch afterwards."
        )
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"


def wait_policy() -> str:
    """What is settled, in words."""
    found = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return f"they wait as {found[0]} says" if found else "they spin while they wait"
