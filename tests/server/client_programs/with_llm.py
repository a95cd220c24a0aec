import os
import tempfile
from pathlib import Path

import llm

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

home = Path(tempfile.mkdtemp())
os.environ.update(LLM_USER_PATH=str(home), OPENAI_API_KEY=KEY)
(home / "extra-openai-models.yaml").write_text(
    f"- {{model_id: mine, model_name: {MODEL}, api_base: '{URL}', supports_schema: true, supports_tools: "
    f"true}}\n"
)

model = llm.get_model("mine")
assert model.prompt(HELLO, stream=False).text() == "Hello there."
did("chat")
assert "".join(model.prompt(HELLO)) == "Hello there."
did("stream")
assert model.chain(CALL, tools=[weather]).text() == "It is sunny." and asked == ["Rome"]
did("tools")
assert City.model_validate_json(model.prompt(CITY, schema=City).text()) == ROME
did("format")
assert City.model_validate_json(model.chain(CALL_FACTS, tools=[city_facts], schema=City).text()) == ROME
did("tools+format")
