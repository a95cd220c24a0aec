"""What every client program talks about: the model says whatever follows the last ``say:``.

A program is called with the server's URL;
it fails with a traceback, or prints what it did, one word per line.
"""

from __future__ import annotations

import sys

from pydantic import BaseModel

URL = f"{sys.argv[1]}/v1"
KEY = "unused"
MODEL = "scripted"
HELLO = "say:Hello there."
CITY = 'say:{"name": "Rome", "people": 2800000}'
CALL = 'say:<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SUNNY = "say:It is sunny."


class City(BaseModel):
    name: str
    people: int


ROME = City(name="Rome", people=2_800_000)
asked: list[str] = []


def weather(city: str) -> str:
    """The weather in a city; also what the model says next."""
    asked.append(city)
    return SUNNY


def city_facts(city: str) -> str:
    """Facts about a city; also what the model says next."""
    asked.append(city)
    return CITY


CALL_FACTS = CALL.replace("weather", "city_facts")


def tool_schema(name: str, description: str) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "strict": True, "parameters": parameters},
    }


def did(what: str) -> None:
    print(what, flush=True)
