"""Hundreds of requests over 32 streams against a real engine process:
right texts, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.soak import engine_args, soak


@pytest.mark.slow
def test_aborts_errors_and_preemptions_change_no_text_and_leave_nothing_behind(
    tiny_model: Callable[..., Path],
) -> None:
    findings = soak(engine_args(str(tiny_model("llama"))), num_requests=600, vocab_size=384)
    assert findings.wrong == []
    assert findings.kinds.total() == 600 and min(findings.kinds.values()) > 20
    assert findings.num_preemptions > 20
    # Less than before is a connection of the start that has been closed since.
    assert {name: count for name, count in findings.left_over.items() if count > 0} == {}
