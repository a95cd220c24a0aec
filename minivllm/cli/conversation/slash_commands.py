"""The slash commands of ``minivllm chat``: each changes or shows the session, none touches the terminal."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, get_type_hints

import msgspec

from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.terminal.terminal_text import counted
from minivllm.cli.terminal.typed import typed_path
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams

NUMBER, WHOLE_NUMBER, SWITCH = "a number such as 0.7", "a whole number such as 40", "true or false"
TOKEN_IDS = "a JSON list of token ids such as [2, 7]"
TEXTS = 'a text as it is, or JSON such as ["END", "STOP"]; one that begins with [ { or " has to be JSON: "[1"'
SETTINGS = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": WHOLE_NUMBER,
    "min_p": NUMBER,
    "seed": WHOLE_NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "stop": TEXTS,
    "stop_regex": TEXTS,
    "stop_token_ids": TOKEN_IDS,
    "include_stop_str_in_output": SWITCH,
    "ignore_eos": SWITCH,
    "min_tokens": WHOLE_NUMBER,
    "max_tokens": WHOLE_NUMBER,
    "logit_bias": 'JSON with token ids and what is added to them, such as {"50": -3}',
    "allowed_token_ids": TOKEN_IDS,
    "bad_words": TEXTS,
    "skip_special_tokens": SWITCH,
}
"""Settings of /set: every sampling parameter that matters in a conversation, and the form of its value."""


class Next(Enum):
    """The next action of the chat after a command."""

    PROMPT = auto()
    REGENERATE = auto()
    EDIT = auto()
    COMPACT = auto()
    TRACE = auto()
    LEAVE = auto()


@dataclass(frozen=True)
class Command:
    """usage: as typed. purpose: one line of /help. run: from the session and the text after the name to what
    the user is told. following: what the chat does then."""

    usage: str
    purpose: str
    run: Callable[[ChatSession, str], str] = lambda session, argument: ""
    following: Next = Next.PROMPT

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def is_command(line: str) -> bool:
    """A single line whose first word is a slash and a name;
    a path such as /usr/bin is an ordinary message."""
    word = line.split(maxsplit=1)[0] if line[:1] == "/" else ""
    return len(word) > 1 and "/" not in word[1:] and "\n" not in line.strip()


def run_command(session: ChatSession, line: str) -> tuple[str, Next]:
    """Run a command line; returns what to tell the user and what comes next.
    Raises RequestError with advice."""
    word, _, argument = line.strip().partition(" ")
    name = ALIASES.get(word.lower(), word.lower())
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
        advice = f"did you mean {near[0]}?" if near else "/help lists the commands."
        raise RequestError(f"There is no command {word}; {advice}")
    command, argument = COMMANDS[name], argument.strip()
    if argument and command.usage == name and name not in ("/help", "/bye"):
        raise RequestError(f"{name} takes nothing after it, but got {argument!r}.")
    if not argument and name in _EXAMPLES:
        raise RequestError(f"{name} needs a file name, for example {name} {_EXAMPLES[name]}.")
    return command.run(session, argument), command.following


def _help(session: ChatSession, argument: str) -> str:
    lines = [f"{command.usage:<15} {command.purpose}" for command in COMMANDS.values()]
    lines += [
        "",
        'Enter sends, Alt-Enter starts a new line, """ begins and ends a text of several lines,',
        "Ctrl-G opens your editor, Ctrl-C stops an answer, Ctrl-D leaves.",
        "A message that should begin with a slash is sent with a space before it.",
    ]
    return "\n".join(lines)


def _system(session: ChatSession, argument: str) -> str:
    if not argument:
        shown = "the chat template's own" if session.system is None else repr(session.system)
        return f"System prompt: {shown}."
    session.system = None if argument == "-" else argument
    return "System prompt removed." if argument == "-" else "System prompt set."


def _set(session: ChatSession, argument: str) -> str:
    name, equals, text = (part.strip() for part in argument.partition("="))
    if not equals or not name:
        raise RequestError(
            f"Write /set name=value, for example /set temperature=0.2; names: {', '.join(SETTINGS)}."
        )
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known are: {', '.join(SETTINGS)}."
        raise RequestError(f"There is no setting {name!r}; {advice}")
    value = _value(name, text)
    session.params = msgspec.structs.replace(session.params, **{name: value})
    return f"{name} = {_shown(name, getattr(session.params, name))}"


def _value(name: str, text: str) -> Any:
    """The value of a setting from ``text``: JSON, or for texts the text itself. Raises RequestError."""
    if text.lower() in ("none", "default", ""):
        # As if never set: the field's own default, which for max_tokens is the rest of the context.
        return None if name == "max_tokens" else getattr(SamplingParams(), name)
    allowed = SETTINGS[name]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if allowed is not TEXTS or text[0] in '[{"':
            raise RequestError(f"{name} is {text}, but must be {allowed}.") from None
        value = text
    if allowed is TEXTS and not isinstance(value, list):
        value = [value if isinstance(value, str) else text]
    try:
        return msgspec.convert(value, get_type_hints(SamplingParams)[name], str_keys=True)
    except msgspec.ValidationError:
        raise RequestError(f"{name} is {text}, but must be {allowed}.") from None


def _shown(name: str, value: Any) -> str:
    if name == "max_tokens" and value is None:
        return "what is left of the context"
    return json.dumps(value)


def _show(session: ChatSession, argument: str) -> str:
    plain = SamplingParams(max_tokens=None)
    lines = [
        f"model        {session.model} ({session.description})",
        f"context      {_context(session)}, {counted(len(session.messages) // 2, 'exchange')}",
        f"system       {'(chat template)' if session.system is None else session.system}",
    ]
    for name in SETTINGS:
        value = getattr(session.params, name)
        if name in ("temperature", "max_tokens") or value != getattr(plain, name):
            lines.append(f"{name:<12} {_shown(name, value)}")
    return "\n".join(lines)


def _edit(session: ChatSession, argument: str) -> str:
    if not session.messages:
        raise RequestError("Nothing was asked yet, so there is no message to edit.")
    return "Change your last message and send it: it is answered in place of the old one."


def _undo(session: ChatSession, argument: str) -> str:
    session.undo()
    return f"Last exchange forgotten; {len(session.messages) // 2} left."


def _clear(session: ChatSession, argument: str) -> str:
    session.clear()
    return "Conversation cleared."


def _drop(session: ChatSession, argument: str) -> str:
    if argument and not argument.isdecimal():
        raise RequestError(f"/drop takes how many exchanges to forget, but got {argument!r}.")
    count = int(argument or 1)
    session.drop(count)
    forgotten = "The oldest exchange is" if count == 1 else f"The {count:,} oldest exchanges are"
    return f"{forgotten} forgotten; {_context(session)}."


def _context(session: ChatSession) -> str:
    used, size = session.num_context_tokens(), session.max_model_len
    return f"{used:,} of {size:,} tokens are in use {meter(used, size)}"


def meter(used: int, size: int, width: int = 20) -> str:
    """A bar of ``width`` cells, filled as far as the context is; not empty while anything is in it."""
    filled = min(width, -(-used * width // size))
    return "█" * filled + "░" * (width - filled)


def _save(session: ChatSession, argument: str) -> str:
    path = typed_path(argument)
    session.save(path)
    return f"{counted(len(session.messages), 'message')} saved to {path}."


def _load(session: ChatSession, argument: str) -> str:
    session.load(typed_path(argument))
    return f"{counted(len(session.messages), 'message')} loaded, with settings; {_context(session)}."


def _export(session: ChatSession, argument: str) -> str:
    path = typed_path(argument)
    session.export(path)
    return f"{counted(len(session.messages), 'message')} exported to {path}."


def _read(session: ChatSession, argument: str) -> str:
    attachment = session.attach(typed_path(argument))
    return f"{attachment.name} ({counted(attachment.num_tokens, 'token')}) goes with your next message."


def _image(session: ChatSession, argument: str) -> str:
    image = session.attach_image(typed_path(argument))
    return f"{image.name} ({counted(image.num_tokens, 'token')}) goes with your next message."


def _model(session: ChatSession, argument: str) -> str:
    if not argument:
        return f"The model is {session.model}; /model NAME talks to another one."
    before = session.model
    session.switch_model(argument)
    size = f"context {session.max_model_len:,} tokens"
    if not session.has_chat_template:
        size += "; it has no chat template: it continues your text instead of answering it"
    return f"{session.model} takes over from {before}; {size}. Settings are the new model's."


def _think(session: ChatSession, argument: str) -> str:
    if argument not in ("on", "off", ""):
        raise RequestError(f"/think is followed by on or off, but got {argument!r}.")
    if not session.can_switch_thinking:
        raise RequestError(
            f"{session.model} cannot switch thinking on or off: its chat template has no such switch."
        )
    if argument:
        session.thinking = argument == "on"
    state = {None: "left to the chat template", True: "on", False: "off"}[session.thinking]
    return f"Thinking is {state}."


def _trace(session: ChatSession, argument: str) -> str:
    if not session.insight.is_possible:
        raise RequestError("The engine runs in another process, where its steps cannot be seen from here.")
    if session.last_generation is None:
        raise RequestError("Nothing was asked yet, so there are no steps to draw.")
    return ""


def _stats(session: ChatSession, argument: str) -> str:
    stats = session.engine_stats()
    lines = []
    if session.last_generation is not None:
        lines.append(f"last answer   {session.last_generation.statistics_line(session.max_model_len)}")
    queried, hit = stats.prefix_cache_queried_tokens, stats.prefix_cache_hit_tokens
    share = f" ({hit / queried:.0%})" if queried else ""
    copied = f", {stats.prefix_cache_copied_tokens:,} by copying" if stats.prefix_cache_copied_tokens else ""
    lines += [
        f"prefix cache  {hit:,} of {queried:,} prompt tokens reused{share}{copied}",
        f"KV cache      {stats.kv_cache_usage:.1%} in use",
        f"requests      {stats.num_running:,} running, {stats.num_waiting:,} waiting",
        f"engine        {counted(stats.num_steps, 'step')}, {counted(stats.num_computed_tokens, 'token')} "
        f"computed, {counted(stats.num_preemptions, 'preemption')}",
    ]
    if stats.num_draft_tokens:
        accepted, drafted = stats.num_accepted_tokens, stats.num_draft_tokens
        lines.append(
            f"speculation   {accepted:,} of {drafted:,} drafted tokens accepted ({accepted / drafted:.0%})"
        )
    return "\n".join(lines)


def _tokens(session: ChatSession, argument: str) -> str:
    lines = [f"Of the context, {_context(session)}."]
    lines += [f"{file.num_tokens:>7,}  next       file {file.name}" for file in session.attachments]
    lines += [f"{image.num_tokens:>7,}  next       image {image.name}" for image in session.images]
    for message in session.messages:
        count = session.num_text_tokens(message.content)
        beginning = " ".join(message.content.split())
        beginning = beginning if len(beginning) <= 50 else beginning[:49] + "…"
        mark = " [interrupted]" if message.interrupted else ""
        if message.images:
            mark += f" [{counted(len(message.images), 'image')} besides]"
        lines.append(f"{count:>7,}  {message.role:<9}  {beginning}{mark}")
    return "\n".join(lines)


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("/help", "show this list", _help),
        Command("/system TEXT", "set the system prompt; alone shows it, /system - removes it", _system),
        Command("/set k=v", "change a sampling parameter, for example /set temperature=0.2", _set),
        Command("/show", "show model, context and settings", _show),
        Command("/regen", "generate the last answer again", following=Next.REGENERATE),
        Command("/edit", "change your last message and have it answered again", _edit, Next.EDIT),
        Command("/undo", "forget the last exchange", _undo),
        Command("/clear", "forget the whole conversation", _clear),
        Command("/drop N", "forget the N oldest exchanges (1 if not given)", _drop),
        Command("/compact", "put a summary in place of the older exchanges", following=Next.COMPACT),
        Command("/read FILE", "send a text file along with the next message", _read),
        Command("/image FILE", "send an image along with the next message", _image),
        Command("/save FILE", "save the conversation as JSON", _save),
        Command("/load FILE", "continue a saved conversation", _load),
        Command("/export FILE", "write the conversation as Markdown", _export),
        Command("/model NAME", "talk to another model; alone names the present one", _model),
        Command("/think on|off", "let the model think before it answers, or not", _think),
        Command("/trace", "draw how the scheduler cut the last answer into steps", _trace, Next.TRACE),
        Command(
            "/stats", "show what the engine did so far; with --url, for all clients of the server", _stats
        ),
        Command("/tokens", "show how many tokens each message takes", _tokens),
        Command("/bye", "leave", following=Next.LEAVE),
    )
}
ALIASES = {"/exit": "/bye", "/quit": "/bye", "/?": "/help"}
_EXAMPLES = {
    "/save": "chat.json",
    "/load": "chat.json",
    "/export": "chat.md",
    "/read": "notes.txt",
    "/image": "cat.png",
}
"""Commands that do not go without a file, each with the name of one."""
FILE_COMMANDS = ("/save", "/load", "/export", "/read", "/image", "/model")
"""Commands that a path can follow."""
