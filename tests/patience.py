"""How long a test waits for the news of a death:
the promised second, and more on a machine that has no core free."""

from __future__ import annotations

import os

ERROR_SECONDS = 1.0
"""Until every caller has an error, where cores are free."""


def spare_seconds() -> float:
    """What everything may take longer where they are not."""
    return 4.0 * (os.getloadavg()[0] > 0.7 * (os.cpu_count() or 1))
