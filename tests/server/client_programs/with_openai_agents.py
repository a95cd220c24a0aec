import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

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

set_tracing_disabled(True)


async def streamed(agent: Agent, text: str) -> str:
    result = Runner.run_streamed(agent, text)
    pieces = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    return "".join(pieces)


async def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    for prefix, make in (("", OpenAIChatCompletionsModel), ("responses ", OpenAIResponsesModel)):
        model = make(model=MODEL, openai_client=client)
        plain = Agent(name="a", instructions="Be brief.", model=model)
        assert (await Runner.run(plain, HELLO)).final_output == "Hello there."
        did(f"{prefix}chat")
        assert await streamed(plain, HELLO) == "Hello there."
        did(f"{prefix}stream")
        with_tool = plain.clone(tools=[function_tool(weather)])
        asked.clear()
        assert (await Runner.run(with_tool, CALL)).final_output == "It is sunny." and asked == ["Rome"]
        assert await streamed(with_tool, CALL) == "It is sunny."
        did(f"{prefix}tools")
        assert (await Runner.run(plain.clone(output_type=City), CITY)).final_output == ROME
        did(f"{prefix}format")
        both = plain.clone(output_type=City, tools=[function_tool(city_facts)])
        assert (await Runner.run(both, CALL_FACTS)).final_output == ROME
        settings = ModelSettings(
            parallel_tool_calls=False, store=False, include_usage=True, metadata={"run": "7"}
        )
        assert (await Runner.run(both.clone(model_settings=settings), CALL_FACTS)).final_output == ROME
        did(f"{prefix}tools+format")


asyncio.run(main())
