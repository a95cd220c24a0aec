import json

import litellm

from tests.server.client_programs.conversation import (
    CALL,
    CALL_FACTS,
    CITY,
    HELLO,
    KEY,
    MODEL,
    ROME,
    SUNNY,
    URL,
    City,
    did,
    tool_schema,
)

litellm.suppress_debug_info = True
TARGET = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
TOOLS = [tool_schema("weather", "The weather."), tool_schema("city_facts", "Facts.")]


def chat(messages, **options):
    return litellm.completion(messages=messages, **TARGET, **options)


def say(text):
    return [{"role": "user", "content": text}]


assert chat(say(HELLO)).choices[0].message.content == "Hello there."
did("chat")
chunks = list(chat(say(HELLO), stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there."
assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 1
did("stream")
messages = say(CALL)
first = chat(messages, tools=TOOLS).choices[0].message
assert json.loads(first.tool_calls[0].function.arguments) == {"city": "Rome"}
messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": SUNNY}]
assert chat(messages, tools=TOOLS).choices[0].message.content == "It is sunny."
did("tools")
gathered = litellm.stream_chunk_builder(list(chat(say(CALL), tools=TOOLS, stream=True))).choices[0]
assert gathered.finish_reason == "tool_calls" and gathered.message.tool_calls[0].function.name == "weather"
messages[1] = gathered.message.model_dump()
messages[2]["tool_call_id"] = gathered.message.tool_calls[0].id
assert chat(messages, tools=TOOLS, stream=False).choices[0].message.content == "It is sunny."
did("stream of tools")
assert City.model_validate_json(chat(say(CITY), response_format=City).choices[0].message.content) == ROME
did("format")
messages = say(CALL_FACTS)
first = chat(messages, tools=TOOLS, response_format=City).choices[0].message
messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": CITY}]
last = chat(messages, tools=TOOLS, response_format=City).choices[0].message
assert City.model_validate_json(last.content) == ROME
did("tools+format")
assert litellm.responses(input=HELLO, **TARGET).output[0].content[0].text == "Hello there."
events = list(litellm.responses(input=HELLO, stream=True, **TARGET))
assert (
    "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello there."
)
did("responses")
assert len(litellm.embedding(input=["a", "b"], **TARGET).data) == 2
did("embeddings")
