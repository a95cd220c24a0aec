import asyncio

from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.server.client_programs.conversation import (
    CALL,
    CALL_FACTS,
    CITY,
    HELLO,
    KEY,
    MODEL,
    ROME,
    URL,
    City,
    asked,
    city_facts,
    did,
    weather,
)

PROVIDER = OpenAIProvider(base_url=URL, api_key=KEY)
FINAL = (
    'say:<tool_call>\n{"name": "final_result", "arguments": {"name": "Rome", "people": '
    "2800000}}\n</tool_call>"
)


def final(city: str) -> str:
    """Facts about a city; also what the model says next."""
    return FINAL


async def streamed(agent: Agent) -> str:
    async with agent.run_stream(HELLO) as result:
        return "".join([text async for text in result.stream_text(delta=True)])


for prefix, make in (("", OpenAIChatModel), ("responses ", OpenAIResponsesModel)):
    model = make(MODEL, provider=PROVIDER)
    assert Agent(model).run_sync(HELLO).output == "Hello there."
    did(f"{prefix}chat")
    assert asyncio.run(streamed(Agent(model))) == "Hello there."
    did(f"{prefix}stream")
    asked.clear()
    assert Agent(model, tools=[weather]).run_sync(CALL).output == "It is sunny." and asked == ["Rome"]
    did(f"{prefix}tools")
    for output in (NativeOutput(City), PromptedOutput(City)):
        assert Agent(model, output_type=output).run_sync(CITY).output == ROME
        assert Agent(model, output_type=output, tools=[city_facts]).run_sync(CALL_FACTS).output == ROME
    did(f"{prefix}tools+format")
    # One output tool and no text: the tool has to be called.
    agent = Agent(model, output_type=ToolOutput(City), tools=[final])
    assert agent.run_sync(CALL.replace("weather", "final")).output == ROME
    did(f"{prefix}format by a tool")
