"""A conversation with one engine: messages, settings, and the turns that extend it. Knows no terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from minivllm.cli.conversation.attachments import ImageFile, TextFile, image_url
from minivllm.cli.conversation.engine_insight import EngineInsight
from minivllm.cli.engine.engine_start import EngineHost, Generation
from minivllm.cli.terminal.terminal_text import counted, format_bytes
from minivllm.cli.terminal.typed import read_typed_file, write_typed_file
from minivllm.errors import RequestError
from minivllm.sampling_params import OutputKind, SamplingParams
from minivllm.server.parsers.reasoning import OPEN

SUMMARY_REQUEST = (
    "Summarize our conversation so far in a few sentences. Keep names, numbers, decisions and open questions."
)
SUMMARY_SHARE = 8
"""A summary may take one part in so many of the context."""
EXPORT_TITLE = "# Chat with "
MOST_CHAT_BYTES = 16 * 2**20
MOST_BYTES_PER_TOKEN = 64
"""A file with more than so many for each token of the context cannot fit, whatever is in it."""

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.messages import SchedulerStats
    from minivllm.processing.input_processor import Prompt


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str
    interrupted: bool = False
    """The user cut this answer short."""
    images: list[str] = []
    """Data URLs of the images before the text."""


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

    The whole conversation is sent again with every turn;
    the engine's prefix cache makes the repeated part free.

    model: name to show. system: system prompt; None leaves it to the chat template. thinking: what the
    template's enable_thinking is set to; None leaves it alone. attachments, images: files that go with the
    next message. host: starts another model; None where that is impossible.
    """

    def __init__(
        self,
        engine: LLMEngine,
        model: str,
        params: SamplingParams,
        system: str | None = None,
        host: EngineHost | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.params = params
        self.system = system
        self.messages: list[Message] = []
        self.last_generation: Generation | None = None
        self.thinking: bool | None = None
        self.attachments: list[TextFile] = []
        self.images: list[ImageFile] = []
        self.insight = EngineInsight(engine)
        self._host = host
        self._num_requests = 0

    def switch_model(self, model: str) -> None:
        """Talk to another model; the messages stay, settings become the new model's.

        Raises MinivllmError if that is not possible; then the old model goes on.
        """
        if self._host is None:
            raise RequestError("This engine was not started by the chat, so its model cannot be switched.")
        before = self.engine
        try:
            self.engine = self._host.switch(model)
        except BaseException:
            if self._host.engine is not before:  # the old one had to be loaded again
                self._follow(self._host.engine)
            raise
        self.model = model
        self.params = self._host.params()
        self.thinking = None
        self._follow(self.engine)

    def _follow(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.insight = EngineInsight(engine)
        self.last_generation = None

    @property
    def max_model_len(self) -> int:
        """Size of the context [tokens]."""
        return self.engine.client.config.scheduler.max_model_len

    @property
    def description(self) -> str:
        """Where the model runs, in a few words."""
        config = self.engine.client.config
        return f"{config.device} {config.dtype}"

    def engine_stats(self) -> SchedulerStats:
        """The counters of the engine so far."""
        return self.engine.stats()

    def num_text_tokens(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.engine.tokenizer.encode(text, add_special_tokens=False))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.engine.tokenizer.has_chat_template)

    def prompt_token_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of ``messages`` as the model was trained to see them, ready for the answer.

        Without a chat template the texts simply follow each other, one per line. Raises RequestError for
        images that the model does not take.
        """
        if not self.has_chat_template:
            texts = [] if self.system is None else [self.system]
            return list(
                self.engine.tokenizer.encode("\n".join([*texts, *(message.content for message in messages)]))
            )
        if any(message.images for message in messages):
            return list(self.engine.expanded(self._rendered(messages)))
        return list(
            self.engine.tokenizer.apply_chat_template(
                self.conversation(messages), add_generation_prompt=True, **self._template_names()
            )
        )

    def _template_names(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    def _rendered(self, messages: list[Message]) -> dict[str, Any]:
        """The prompt of a conversation with images. Raises RequestError."""
        return self.engine.render_chat(
            self.conversation(messages), chat_template_kwargs=self._template_names()
        )

    def conversation(self, messages: list[Message]) -> list[dict[str, Any]]:
        """The system prompt, if there is one, and ``messages``, as chat templates and servers take them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [{"role": message.role, "content": _content(message)} for message in messages]

    @property
    def can_switch_thinking(self) -> bool:
        """True if the chat template knows enable_thinking."""
        return self.has_chat_template and "enable_thinking" in str(self.engine.tokenizer.chat_template)

    def ask(
        self,
        text: str,
        on_text: Callable[[str], None],
        is_interrupted: Callable[[], bool],
        images: Sequence[str] = (),
    ) -> Generation:
        """Send a user message and stream the answer.

        on_text: called with each new piece of the answer.
        is_interrupted: asked before every engine step; True aborts the request and keeps its text so far.
        images: data URLs that go with the message besides the attached images.
        Raises RequestError if the message cannot be sent; then the conversation is as it was.
        """
        text = "\n\n".join([*(attachment.as_markdown() for attachment in self.attachments), text])
        message = Message(role="user", content=text, images=[*images, *(image.url for image in self.images)])
        generation = self._extend([*self.messages, message], on_text, is_interrupted)
        self.attachments = []
        self.images = []
        return generation

    def _extend(
        self, messages: list[Message], on_text: Callable[[str], None], is_interrupted: Callable[[], bool]
    ) -> Generation:
        """Have ``messages`` answered; they and the answer become the conversation."""
        generation = self._generate(messages, on_text, is_interrupted)
        answer = Message(role="assistant", content=generation.text, interrupted=generation.interrupted)
        self.messages = [*messages, answer]
        self._note(generation)
        return generation

    def _note(self, generation: Generation) -> None:
        generation.bandwidth_share = self.insight.bandwidth_share(generation)
        self.last_generation = generation

    def regenerate(self, on_text: Callable[[str], None], is_interrupted: Callable[[], bool]) -> Generation:
        """Answer the last user message again, in place of its old answer.
        Raises RequestError if there is none."""
        if not self.messages:
            raise RequestError("Nothing was asked yet, so there is no answer to generate again.")
        return self._extend(self.messages[:-1], on_text, is_interrupted)

    def compact(self, on_text: Callable[[str], None], is_interrupted: Callable[[], bool]) -> Generation:
        """Put a summary by the model in place of the older exchanges, all but the last if there are several.

        Of a conversation that is too long to be summarized at once, the oldest part is. Changes nothing if it
        is interrupted. Raises RequestError if there is nothing to gain.
        """
        exchanges = len(self.messages) // 2
        if exchanges == 0:
            raise RequestError("The conversation is empty: there is nothing to compact.")
        request = Message(role="user", content=SUMMARY_REQUEST)
        before = self.num_context_tokens()
        room = max(1, self.max_model_len // SUMMARY_SHARE)
        for count in range(max(1, exchanges - 1), 0, -1):
            old = self.messages[: 2 * count]
            if len(self.prompt_token_ids([*old, request])) + room <= self.max_model_len:
                break
        else:
            raise RequestError(
                f"Not even the oldest exchange leaves the {room:,} tokens that a summary takes: /drop "
                "forgets it."
            )
        generation = self._generate([*old, request], on_text, is_interrupted, max_tokens=room)
        if generation.interrupted:
            return generation
        if not generation.text.strip():
            raise RequestError(
                "The model's summary is empty, so the conversation stays as it is; /drop forgets more."
            )
        kept = self.messages
        self.messages = [
            request,
            Message(role="assistant", content=generation.text),
            *self.messages[2 * count :],
        ]
        if self.num_context_tokens() >= before:
            self.messages = kept
            raise RequestError(
                "The summary is no shorter than what it stands for, so the conversation stays as it is."
            )
        self._note(generation)
        return generation

    def undo(self) -> None:
        """Forget the last exchange (a user message and its answer)."""
        if not self.messages:
            raise RequestError("The conversation is empty: there is nothing to undo.")
        del self.messages[-2:]

    def drop(self, count: int) -> None:
        """Forget the ``count`` oldest exchanges."""
        exchanges = len(self.messages) // 2
        if not 1 <= count <= exchanges:
            raise RequestError(f"Cannot drop {counted(count, 'exchange')}: the conversation has {exchanges}.")
        del self.messages[: 2 * count]

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages.clear()
        self.attachments.clear()
        self.images.clear()
        self.last_generation = None

    def num_context_tokens(self) -> int:
        """Tokens of the conversation so far, as the next turn would repeat them."""
        return len(self.prompt_token_ids(self.messages)) if self.messages or self.system else 0

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, images included.
        Raises RequestError if ``path`` cannot be written or is another file."""
        if os.path.lexists(path) and not _is_saved_chat(path):
            raise RequestError(
                f"{path} exists and is not a saved chat, so it is left alone; choose another name."
            )
        saved = SavedChat(
            format="minivllm-chat-1",
            model=self.model,
            system=self.system,
            sampling=self.params,
            messages=self.messages,
        )
        content = msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n"
        if len(content) > MOST_CHAT_BYTES:
            raise RequestError(
                f"The chat has {format_bytes(len(content))}, its images included, but a saved chat may have "
                f"at most {format_bytes(MOST_CHAT_BYTES)}: /drop forgets the oldest exchange."
            )
        write_typed_file(path, content)

    def export(self, path: Path) -> None:
        """Write the conversation as Markdown.
        Raises RequestError if ``path`` cannot be written or is another file."""
        if os.path.lexists(path) and not _is_exported_chat(path):
            raise RequestError(
                f"{path} exists and is not an exported chat, so it is left alone; choose another name."
            )
        parts = [f"{EXPORT_TITLE}{self.model}"]
        if self.system is not None:
            parts.append(f"**System:** {self.system}")
        for message in self.messages:
            mark = " (interrupted)" if message.interrupted else ""
            who = "You" if message.role == "user" else self.model
            images = "*[image]*\n\n" * len(message.images)
            parts.append(f"## {who}{mark}\n\n{images}{message.content.strip()}")
        write_typed_file(path, ("\n\n".join(parts) + "\n").encode())

    def attach_image(self, path: Path) -> ImageFile:
        """Send an image file with the next message.
        Raises RequestError if it is no image, cannot fit, or if the model reads none."""
        if not self.has_chat_template:
            raise RequestError(f"{self.model} has no chat template, so its messages take no images.")
        url = image_url(path)
        urls = [image.url for image in self.images]
        counts = []
        for images in (urls, [*urls, url]):
            message = Message(role="user", content="", images=images)
            try:
                counts.append(len(self.prompt_token_ids([*self.messages, message])))
            except RequestError as error:
                raise RequestError(f"{path} cannot be sent: {error}") from None
        used, needed = counts
        if needed >= self.max_model_len:
            raise RequestError(
                f"{path} takes {counted(needed - used, 'token')}, but of the context's "
                f"{self.max_model_len:,} only {max(0, self.max_model_len - used):,} are free: /drop or "
                "/compact make room."
            )
        self.images.append(ImageFile(name=path.name, url=url, num_tokens=needed - used))
        return self.images[-1]

    def attach(self, path: Path) -> TextFile:
        """Have a text file go with the next message. Raises RequestError if it is none or cannot fit."""
        content = read_typed_file(path, self.max_model_len * MOST_BYTES_PER_TOKEN)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            raise RequestError(f"{path} is not UTF-8 text, so it cannot go into a message.") from None
        tokens = self.num_text_tokens(text)
        attachment = TextFile(name=path.name, text=text, num_tokens=tokens)
        used = self.num_context_tokens() + sum(other.num_tokens for other in self.attachments)
        if used + tokens >= self.max_model_len:
            free = max(0, self.max_model_len - used)
            remedy = "/drop or /compact make room" if used else "start with a larger --max-model-len"
            raise RequestError(
                f"{path} has {counted(tokens, 'token')}, but of the context's {self.max_model_len:,} only "
                f"{free:,} are "
                f"free: {remedy}, or take a smaller file."
            )
        self.attachments.append(attachment)
        return attachment

    def load(self, path: Path) -> None:
        """Replace messages, system prompt and sampling by a saved chat's.
        Raises RequestError, changing nothing."""
        saved = _read_saved_chat(path)
        self.messages = list(saved.messages)
        self.system = saved.system
        self.params = saved.sampling
        self.last_generation = None

    def _generate(
        self,
        messages: list[Message],
        on_text: Callable[[str], None],
        is_interrupted: Callable[[], bool],
        max_tokens: int | None = None,
    ) -> Generation:
        prompt_token_ids = self.prompt_token_ids(messages)
        prompt: Prompt = {"prompt_token_ids": prompt_token_ids}
        if any(message.images for message in messages):
            prompt = self._rendered(messages)
        request_id = f"chat-{self._num_requests}"
        self._num_requests += 1
        params = self._params_for(prompt_token_ids, first=len(messages) == 1)
        if max_tokens is not None:
            params = msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=0)
        with self.insight.recording():
            return self._answer(request_id, prompt, prompt_token_ids, params, on_text, is_interrupted)

    def _answer(
        self,
        request_id: str,
        prompt: Prompt,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_text: Callable[[str], None],
        is_interrupted: Callable[[], bool],
    ) -> Generation:
        generation = Generation(num_prompt_tokens=len(prompt_token_ids))
        self.engine.add_request(request_id, prompt, params)
        if self.has_chat_template and self.engine.tokenizer.decode(prompt_token_ids[-8:]).rstrip().endswith(
            OPEN
        ):
            on_text(OPEN)  # the template began the model's thoughts, and the caller shows them as such
        while generation.finish_reason is None:
            if is_interrupted():
                for output in self.engine.abort_request([request_id]):
                    on_text(generation.add(output))
                generation.interrupt()
                break
            for output in self.engine.step():
                if output.request_id == request_id:
                    num_shown = len(generation.text)
                    try:
                        generation.add(output)
                    except RequestError as error:
                        generation.fail(error)
                    on_text(generation.text[num_shown:])
        return generation

    def _params_for(self, prompt_token_ids: list[int], first: bool) -> SamplingParams:
        """The settings of this turn: an answer may fill what is left of the context, and never more."""
        room = self.max_model_len - len(prompt_token_ids)
        if room < 1:
            advice = (
                "shorten it, or start with a larger --max-model-len"
                if first
                else "/drop forgets the oldest exchange, /compact puts a summary in place of all but the last"
            )
            raise RequestError(
                f"The {'message' if first else 'conversation'} takes {len(prompt_token_ids):,} of the "
                "context's "
                f"{self.max_model_len:,} tokens, so no answer fits: {advice}."
            )
        max_tokens = room if self.params.max_tokens is None else min(room, self.params.max_tokens)
        changes: dict[str, Any] = {"max_tokens": max_tokens, "output_kind": OutputKind.DELTA}
        if self.params.min_tokens > max_tokens:
            changes["min_tokens"] = max_tokens
        return msgspec.structs.replace(self.params, **changes)


def _content(message: Message) -> str | list[dict[str, Any]]:
    if not message.images:
        return message.content
    images = [{"type": "image_url", "image_url": {"url": url}} for url in message.images]
    return [*images, {"type": "text", "text": message.content}]


def _read_saved_chat(path: Path) -> SavedChat:
    try:
        return msgspec.json.decode(read_typed_file(path, MOST_CHAT_BYTES), type=SavedChat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{path} is not a saved chat: {str(error).removesuffix('.')}.") from None


def _is_saved_chat(path: Path) -> bool:
    try:
        return bool(_read_saved_chat(path))
    except RequestError:
        return False


def _is_exported_chat(path: Path) -> bool:
    try:
        return read_typed_file(path, MOST_CHAT_BYTES).startswith(EXPORT_TITLE.encode())
    except RequestError:
        return False
