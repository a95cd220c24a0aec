"""The official JSON-Schema-Test-Suite:
nothing that it judges invalid can be written, whatever the spelling."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm.errors import RequestError
from minivllm.structured_output.schemas.patterns import FORMATS
from tests.structured_output.small_vocabulary import EOS, SmallVocabulary

VERSION = "4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests of the suite, from the source distribution of the jsonschema package."""
    directory = tmp_path_factory.mktemp("suite")
    command = [
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        "jsonschema",
        "--dest",
        str(directory),
        "--quiet",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *command, f"jsonschema=={VERSION}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    archive = directory / f"jsonschema-{VERSION}.tar.gz"
    if not archive.exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"No package index gives the source distribution of jsonschema {VERSION}: {last}")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == SHA256
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return directory / f"jsonschema-{VERSION}" / "json" / "tests"


def cases(suite: Path, draft: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """(name, schema, its instances), those of optional keywords included, and of formats that are enforced;
    others are annotations."""
    for file in sorted((suite / draft).rglob("*.json")):
        if file.parent.name == "format" and file.stem not in FORMATS:
            continue
        for group in json.loads(file.read_text()):
            yield f"{file.relative_to(suite)}: {group['description']}", group["schema"], group["tests"]


def orders(value: Any) -> Iterator[Any]:
    """The value with the keys of its outermost objects in all orders, up to a few."""
    if isinstance(value, dict) and 1 < len(value) <= 4:
        for keys in itertools.permutations(value):
            yield {key: value[key] for key in keys}
    elif isinstance(value, list) and len(value) == 1:
        yield from ([one] for one in orders(value[0]))
    else:
        yield value


def spellings(value: Any) -> set[str]:
    """Texts that json.loads reads as the value."""
    texts = set()
    for ordered in orders(value):
        compact = json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
        texts |= {
            compact,
            json.dumps(ordered),
            json.dumps(ordered, indent=1),
            json.dumps(ordered, ensure_ascii=False),
        }
        texts |= {escaped(compact), compact.replace("/", "\\/")}
    if isinstance(value, float) and value.is_integer():
        texts.add(str(int(value)))
    assert all(json.loads(text) == value for text in texts)
    return texts


def escaped(text: str) -> str:
    """Every letter inside of strings as \\uXXXX."""
    pieces = text.split('"')
    if "\\" in text:
        return text
    for index in range(1, len(pieces), 2):
        units = pieces[index].encode("utf-16-be")
        pieces[index] = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return '"'.join(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_invalid_can_be_written(suite: Path, vocabulary: SmallVocabulary, draft: str) -> None:
    byte_ids = {text[0]: token for token, text in vocabulary.bytes.items() if len(text) == 1}
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    wrong: list[str] = []
    for name, schema, instances in cases(suite, draft):
        if isinstance(schema, bool):
            continue
        try:
            grammar = vocabulary.grammar(json={"$schema": DRAFTS[draft], **schema})
        except RequestError as error:
            counts["schemas refused"] += 1
            sentence = str(error)
            assert sentence[0].isupper(), sentence
            assert sentence.endswith("."), sentence
            assert "\n" not in sentence
            assert len(sentence) < 600
            reasons[reason(sentence)] += 1
            continue
        counts["schemas accepted"] += 1
        for instance in instances:
            kind = "valid" if instance["valid"] else "invalid"
            counts[f"{kind} instances"] += 1
            for text in spellings(instance["data"]):
                tokens = [*(byte_ids[byte] for byte in text.encode()), *EOS]
                if grammar.valid_drafts(tokens) == tokens:
                    counts[f"{kind} instances reachable"] += 1
                    if not instance["valid"]:
                        wrong.append(f"{name}: {instance['description']}: {text}")
                    break
    print(f"\n{draft}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    for why, count in reasons.most_common():
        print(f"{count:5} {why}")
    assert not wrong, "\n".join(wrong)
    assert counts["schemas accepted"] > 0.5 * counts["schemas refused"]
    assert counts["valid instances reachable"] > 0.7 * counts["valid instances"]


def reason(sentence: str) -> str:
    """What refusals have in common: the sentence without paths and values."""
    words = sentence.split(" ")
    return " ".join(word for word in words[:14] if not word.startswith(("$", "'$.")))
