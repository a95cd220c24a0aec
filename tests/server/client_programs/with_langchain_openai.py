from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

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

TOOLS = [tool_schema("weather", "The weather."), tool_schema("city_facts", "Facts.")]
for prefix, options in (("", {}), ("responses ", {"use_responses_api": True})):
    model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, stream_usage=True, **options)
    assert model.invoke(HELLO).text == "Hello there."
    did(f"{prefix}chat")
    whole = None
    for chunk in model.stream(HELLO):
        whole = chunk if whole is None else whole + chunk
    assert whole.text == "Hello there." and whole.usage_metadata["output_tokens"] > 1
    did(f"{prefix}stream")
    with_tools = model.bind_tools(TOOLS)
    first = with_tools.invoke(CALL)
    assert first.tool_calls[0]["args"] == {"city": "Rome"}
    back = ToolMessage(SUNNY, tool_call_id=first.tool_calls[0]["id"])
    assert with_tools.invoke([HumanMessage(CALL), first, back]).text == "It is sunny."
    whole, *more = with_tools.stream(CALL)
    for chunk in more:
        whole += chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Rome"}]
    back = ToolMessage(SUNNY, tool_call_id=whole.tool_calls[0]["id"])
    assert with_tools.invoke([HumanMessage(CALL), whole, back]).text == "It is sunny."
    did(f"{prefix}tools")
    assert model.with_structured_output(City).invoke(CITY) == ROME
    assert model.with_structured_output(City, method="function_calling").invoke(CITY) == ROME
    did(f"{prefix}format")
    both = model.with_structured_output(City, tools=TOOLS, strict=True, include_raw=True)
    first = both.invoke(CALL_FACTS)["raw"]
    back = ToolMessage(CITY, tool_call_id=first.tool_calls[0]["id"])
    assert both.invoke([HumanMessage(CALL_FACTS), first, back])["parsed"] == ROME
    did(f"{prefix}tools+format")
# Its own check of lengths would fetch a tokenizer of OpenAI's.
embeddings = OpenAIEmbeddings(model=MODEL, base_url=URL, api_key=KEY, check_embedding_ctx_length=False)
assert len(embeddings.embed_documents(["a", "b"])) == 2
did("embeddings")
