"""A conversation with one engine: messages, settings, and the turns that extend it. Knows no terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from minivllm.cli.generation import Generation
from minivllm.errors import RequestError
from minivllm.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message; ``interrupted`` marks an answer that the user cut short."""

    role: Literal["user", "assistant"]
    content: str
    interrupted: bool = False


class SavedChat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file format of /save and /load."""

    format: Literal["minivllm-chat-1"]
    model: str
    system: str | None
    sampling: SamplingParams
    messages: list[Message]

    def __post_init__(self) -> None:
        roles = [message.role for message in self.messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("user and assistant messages do not alternate")


class ChatSession:
    """Messages so far, and the engine that continues them.

    The whole conversation is sent again with every turn; the engine's prefix cache makes the repeated part free.

    model: name to show. system: system prompt; None leaves it to the chat template.
    """

    def __init__(self, engine: LLMEngine, model: str, params: SamplingParams, system: str | None = None) -> None:
        self.engine = engine
        self.model = model
        self.params = params
        self.system = system
        self.messages: list[Message] = []
        self.last_generation: Generation | None = None
        self._num_requests = 0

    @property
    def max_model_len(self) -> int:
        """Size of the context [tokens]."""
        return self.engine.client.config.scheduler.max_model_len

    @property
    def has_chat_template(self) -> bool:
        return bool(self.engine.tokenizer.has_chat_template)

    def prompt_token_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of ``messages`` as the model was trained to see them, ready for the answer.

        Without a chat template the texts simply follow each other, one per line.
        """
        if not self.has_chat_template:
            texts = [] if self.system is None else [self.system]
            return list(self.engine.tokenizer.encode("\n".join([*texts, *(message.content for message in messages)])))
        conversation = [] if self.system is None else [{"role": "system", "content": self.system}]
        conversation += [{"role": message.role, "content": message.content} for message in messages]
        return list(self.engine.tokenizer.apply_chat_template(conversation, add_generation_prompt=True))

    def ask(self, text: str, on_text: Callable[[str], None], is_interrupted: Callable[[], bool]) -> Generation:
        """Send a user message and stream the answer.

        on_text: called with each new piece of the answer. is_interrupted: asked before every engine step; True aborts
        the request and keeps what was said so far. Raises RequestError if the message cannot be sent; then the
        conversation is as it was.
        """
        generation = self._generate([*self.messages, Message(role="user", content=text)], on_text, is_interrupted)
        answer = Message(role="assistant", content=generation.text, interrupted=generation.interrupted)
        self.messages += [Message(role="user", content=text), answer]
        self.last_generation = generation
        return generation

    def regenerate(self, on_text: Callable[[str], None], is_interrupted: Callable[[], bool]) -> Generation:
        """Answer the last user message again, in place of its old answer. Raises RequestError if there is none."""
        if not self.messages:
            raise RequestError("Nothing was asked yet, so there is no answer to generate again.")
        before = list(self.messages)
        self.undo()
        try:
            return self.ask(before[-2].content, on_text, is_interrupted)
        except RequestError:
            self.messages = before
            raise

    def undo(self) -> None:
        """Forget the last exchange (a user message and its answer)."""
        if not self.messages:
            raise RequestError("The conversation is empty: there is nothing to undo.")
        del self.messages[-2:]

    def drop(self, count: int) -> None:
        """Forget the ``count`` oldest exchanges."""
        exchanges = len(self.messages) // 2
        if not 1 <= count <= exchanges:
            raise RequestError(f"Cannot drop {count} exchanges: the conversation has {exchanges}.")
        del self.messages[: 2 * count]

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages.clear()
        self.last_generation = None

    def num_context_tokens(self) -> int:
        """Tokens of the conversation so far, as the next turn would repeat them."""
        return len(self.prompt_token_ids(self.messages)) if self.messages or self.system else 0

    def save(self, path: Path) -> None:
        """Write the conversation as JSON. Raises RequestError if ``path`` cannot be written or is another file."""
        if path.exists() and not _is_saved_chat(path):
            raise RequestError(f"{path} exists and is not a saved chat, so it is left alone; choose another name.")
        saved = SavedChat(
            format="minivllm-chat-1",
            model=self.model,
            system=self.system,
            sampling=self.params,
            messages=self.messages,
        )
        unfinished = path.with_name(path.name + ".part")
        try:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n")
            os.replace(unfinished, path)
        except OSError as error:
            raise RequestError(f"Cannot write {path}: {error.strerror or error}.") from None

    def load(self, path: Path) -> None:
        """Replace messages, system prompt and sampling by a saved chat's. Raises RequestError, changing nothing."""
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=SavedChat)
        except OSError as error:
            raise RequestError(f"Cannot read {path}: {error.strerror or error}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} is not a saved chat: {error}.") from None
        self.messages = list(saved.messages)
        self.system = saved.system
        self.params = saved.sampling
        self.last_generation = None

    def _generate(
        self, messages: list[Message], on_text: Callable[[str], None], is_interrupted: Callable[[], bool]
    ) -> Generation:
        prompt_token_ids = self.prompt_token_ids(messages)
        request_id = f"chat-{self._num_requests}"
        self._num_requests += 1
        params = self._params_for(prompt_token_ids, first=len(messages) == 1)
        generation = Generation(num_prompt_tokens=len(prompt_token_ids))
        self.engine.add_request(request_id, {"prompt_token_ids": prompt_token_ids}, params)
        while generation.finish_reason is None:
            if is_interrupted():
                for output in self.engine.abort_request([request_id]):
                    on_text(generation.add(output))
                generation.interrupt()
                break
            for output in self.engine.step():
                if output.request_id == request_id:
                    on_text(generation.add(output))
        return generation

    def _params_for(self, prompt_token_ids: list[int], first: bool) -> SamplingParams:
        """The settings of this turn: an answer may fill what is left of the context, and never more."""
        room = self.max_model_len - len(prompt_token_ids)
        if room < 1:
            advice = (
                "shorten it, or start with a larger --max-model-len"
                if first
                else "/drop forgets the oldest exchange, /clear all of them"
            )
            raise RequestError(
                f"The {'message' if first else 'conversation'} takes {len(prompt_token_ids):,} of the context's "
                f"{self.max_model_len:,} tokens, so no answer fits: {advice}."
            )
        max_tokens = room if self.params.max_tokens is None else min(room, self.params.max_tokens)
        changes: dict[str, Any] = {"max_tokens": max_tokens, "output_kind": OutputKind.DELTA}
        if self.params.min_tokens > max_tokens:
            changes["min_tokens"] = max_tokens
        return msgspec.structs.replace(self.params, **changes)


def _is_saved_chat(path: Path) -> bool:
    try:
        msgspec.json.decode(path.read_bytes(), type=SavedChat)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
