"""Prompts in words: what guessing tokens is worth where answers repeat their prompt, and where not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from minivllm.bench.reports.figures import Figure
from minivllm.bench.sides.drive import Answer, Room, Task
from minivllm.errors import ConfigError
from minivllm.tokenizer.tokenizer import load_tokenizer

NUM_PROMPTS = 16
"""Different prompts of each kind; later repetitions begin again."""
NEW_TOKENS = 128
"""That a request generates; those after the end of its answer do not count."""

_NAMES = (
    "Amara",
    "Bruno",
    "Chiara",
    "Dmitri",
    "Elena",
    "Farid",
    "Greta",
    "Hiro",
    "Irene",
    "Jonas",
    "Kavya",
    "Luis",
)
_PLACES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Tunis", "Riga", "Perth", "Lima", "Turin", "Accra")
_WARES = ("lamps", "maps", "kettles", "violins", "ladders", "mirrors", "bicycles", "compasses")
_STORES = ("Inventory", "Stock", "Depot", "Shelf", "Warehouse")
_THEMES = (
    "a lighthouse keeper",
    "an old clock",
    "a lost letter",
    "a garden in winter",
    "a night train",
    "two rivers",
)


def _edit(source: random.Random) -> str:
    seller, other = source.sample(_NAMES, 2)
    place, wares = source.choice(_PLACES), source.choice(_WARES)
    text = (
        f"{seller} opened a small workshop in {place} in the spring. For the first year nobody came, and "
        f"{seller} "
        f"repaired {wares} that no one had asked for. Then the museum ordered forty {wares}, and {seller} "
        "hired two "
        "neighbours to help. By the autumn the workshop had moved to a larger house near the harbour of "
        f"{place}, and "
        f"people came from other towns to see how the {wares} were made."
    )
    return f"Replace the name {seller} by {other} and repeat the text without any other change.\n\n{text}"


def _extraction(source: random.Random) -> str:
    people = source.sample(_NAMES, 6)
    lines = [
        f"{name} lives in {source.choice(_PLACES)}, sells {source.choice(_WARES)}, and answers mail at "
        f"{name.lower()}.{source.randrange(100, 1000)}@example.com."
        for name in people
    ]
    return (
        "List every name with its place and address, one per line, in the words of the text.\n\n"
        + "\n".join(lines)
    )


def _repair(source: random.Random) -> str:
    items = source.choice(_WARES)
    code = (
        f"class {source.choice(_STORES)}:\n"
        "    def __init__(self, path):\n"
        "        self.path = path\n"
        f"        self.{items} = {{}}\n"
        "        self.changed = False\n"
        "\n"
        "    def add(self, name, amount):\n"
        "        if amount < 0:\n"
        '            raise ValueError("amount must not be negative")\n'
        f"        self.{items}[name] = self.{items}.get(name, 0) + amount\n"
        "        self.changed = True\n"
        "\n"
        "    def remove(self, name, amount)\n"
        f"        if self.{items}.get(name, 0) < amount:\n"
        "            raise KeyError(name)\n"
        f"        self.{items}[name] = self.{items}[name] - amount\n"
        "        self.changed = True\n"
        "\n"
        "    def total(self):\n"
        f"        return sum(self.{items}.values())\n"
    )
    return f"A colon is missing in this code. Write the whole code again, repaired.\n\n```python\n{code}```"


def _story(source: random.Random) -> str:
    return f"Write a story about {source.choice(_THEMES)} in {source.choice(_PLACES)}."


PROMPTS: dict[str, Callable[[random.Random], str]] = {
    "edit": _edit,
    "extraction": _extraction,
    "repair": _repair,
    "story": _story,
}
"""kind -> a prompt. All but the last are answered by much of the prompt itself."""


@dataclass(frozen=True)
class TextCase:
    """Decoding of one request at a time whose prompt is text of a kind.

    Tokens per step do not depend on the machine: they bound what speculation can be worth.

    encode: from a prompt to token ids. end_ids: tokens that end an answer; what an engine generates after
    one, being told to go on, is not the answer to anything and does not count.
    """

    kind: str
    encode: Callable[[str], list[int]]
    new_tokens: int
    end_ids: frozenset[int] = frozenset()
    x: float | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.new_tokens} tokens"

    @property
    def room(self) -> Room:
        longest = max(len(self._prompt(number)) for number in range(NUM_PROMPTS)) + self.new_tokens
        return Room(longest, 1, longest)

    def tasks(self, vocab_size: int, repetition: int) -> list[Task]:
        return [Task(self._prompt(repetition), self.new_tokens)]

    def figures(self, tasks: Sequence[Task], answer: Answer) -> list[Figure]:
        """Speed of the answer's tokens after those of the first step, and how many of them a step brought."""
        record = answer.records[0]
        ends = [index for index, token in enumerate(record.token_ids) if token in self.end_ids]
        times = record.times[: ends[0] + 1] if ends else record.times
        later = [moment for moment in times if moment > times[0]]
        if not later:
            return []
        return [
            Figure("speed", "tok/s", "higher", [len(later) / (times[-1] - times[0])]),
            Figure("tokens per step", "tokens", "higher", [len(later) / len(set(later))]),
        ]

    def _prompt(self, repetition: int) -> list[int]:
        return self.encode(PROMPTS[self.kind](random.Random(f"{self.kind}/{repetition % NUM_PROMPTS}")))


def text_cases(texts: Sequence[str], model: str) -> list[TextCase]:
    """ "text:edit", "text:edit:128" (new tokens) -> cases, read by the model's tokenizer.
    Raises ConfigError."""
    wanted: list[tuple[str, int]] = []
    for text in texts:
        _, kind, *tokens = text.split(":")
        numbers = [int(number) for number in tokens or [str(NEW_TOKENS)] if number.isdecimal()]
        if kind not in PROMPTS or len(tokens) > 1 or not numbers or numbers[0] < 2:
            known = ", ".join(PROMPTS)
            raise ConfigError(
                f"The case {text!r} must be text:KIND[:TOKENS], 2 tokens or more, of a kind of: {known}."
            )
        wanted.append((kind, numbers[0]))
    tokenizer = load_tokenizer(model)

    def encode(text: str) -> list[int]:
        if not tokenizer.has_chat_template:
            return tokenizer.encode(text)
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])

    end_ids = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    return [TextCase(kind, encode, new_tokens, end_ids) for kind, new_tokens in wanted]
