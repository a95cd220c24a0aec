"""``response_format``: the form of an answer, under OpenAI's names."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from minivllm.server.bodies.body import Body

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ResponseFormatText(Body):
    type: Literal["text"]


class ResponseFormatJsonObject(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """schema: what the answer must follow. strict is always the case."""

    name: FunctionName
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormatJsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[
    ResponseFormatText | ResponseFormatJsonObject | ResponseFormatJsonSchema, Field(discriminator="type")
]
