from collections.abc import Iterable

import instructor
import openai

from tests.server.client_programs.conversation import CITY, HELLO, KEY, MODEL, ROME, URL, City, did

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
plain = {"model": MODEL, "messages": [{"role": "user", "content": HELLO}], "response_model": None}
assert (
    instructor.from_openai(client).chat.completions.create(**plain).choices[0].message.content
    == "Hello there."
)
did("chat")
options = {"model": MODEL, "messages": [{"role": "user", "content": CITY}], "max_retries": 0}
MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS")
for mode in MODES:
    wrapped = instructor.from_openai(client, mode=instructor.Mode[mode])
    # The result is of a class of the client's own, below City.
    assert wrapped.chat.completions.create(response_model=City, **options).model_dump() == ROME.model_dump()
    did(f"format by {mode}")
    *_, last = wrapped.chat.completions.create_partial(response_model=City, **options)
    assert last.model_dump() == ROME.model_dump()
    did(f"stream by {mode}")
calls = 'say:<tool_call>\n{"name": "City", "arguments": {"name": "Rome", "people": 2800000}}\n</tool_call>'
wrapped = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
options["messages"] = [{"role": "user", "content": f"{calls}\n{calls.removeprefix('say:')}"}]
assert [one.people for one in wrapped.chat.completions.create(response_model=Iterable[City], **options)] == [
    2800000
] * 2
did("several calls")
