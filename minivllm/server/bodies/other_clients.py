"""Fields that clients of other servers send:
those without effect here, and advice for those that would have one."""

import logging
from contextvars import ContextVar
from functools import cache

logger = logging.getLogger(__name__)

is_strict: ContextVar[bool] = ContextVar("is_strict", default=False)
"""True where every unknown field is refused, those without effect too."""

LABELS = frozenset(
    {
        # Who asks and in which conversation: web interfaces, agents, tracing.
        *(
            "chat_id",
            "session_id",
            "conversation_id",
            "thread_id",
            "message_id",
            "parent_id",
            "user_id",
            "id",
        ),
        *("trace_id", "trace_name", "generation_name", "tags", "request_tags", "title", "client_metadata"),
        *("litellm_call_id", "litellm_session_id", "litellm_metadata", "litellm_trace_id"),
        *("background_tasks", "model_item", "session"),
        # How a model is kept in memory, cached or reached: Ollama, LM Studio, llama.cpp, OpenRouter.
        *("keep_alive", "ttl", "cache_prompt", "cache_control", "id_slot", "slot_id", "timings_per_token"),
        *("provider", "route", "usage", "request_timeout", "timeout"),
    }
)
"""Of whole requests: they do not change what is generated."""
PART_LABELS = frozenset({"cache_control"})
"""Of parts of messages, of tools and functions."""
MESSAGE_LABELS = PART_LABELS | {
    "id",
    "timestamp",
    "created_at",
    "reasoning_details",
    "thinking_blocks",
    "model",
}

ADVICE = {
    "options": "send its values as fields of the body, such as temperature, seed and max_tokens",
    "num_ctx": "the operator sets the context with --max-model-len",
    "num_predict": "max_tokens is its name here",
    "n_predict": "max_tokens is its name here",
    "max_new_tokens": "max_tokens is its name here",
    "repeat_penalty": "repetition_penalty is its name here",
    "guided_json": "structured_outputs.json is its name here",
    "guided_regex": "structured_outputs.regex is its name here",
    "guided_choice": "structured_outputs.choice is its name here",
    "guided_grammar": "structured_outputs.grammar is its name here",
    "grammar": "structured_outputs.grammar is its name here",
    "json_schema": "response_format is its name here",
    "format": "response_format is its name here",
    "system": "send a message with the role system",
    "thinking": "reasoning_effort, or enable_thinking, is its name here",
    "reasoning": "reasoning_effort is its name here",
    "response_schema": "response_format is its name here",
    "stop_sequences": "stop is its name here",
}
"""Fields of other servers that would change the answer, and what to do about them."""


def is_ignored(name: str, labels: frozenset[str]) -> bool:
    """True for a field that may be left out of a body, which is logged once."""
    if name not in labels or is_strict.get():
        return False
    _log(name)
    return True


@cache
def _log(name: str) -> None:
    logger.info("The field %r of a request has no effect here. (--strict refuses such fields.)", name)
