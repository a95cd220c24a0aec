"""``minivllm chat``: talk with a model, or have one prompt answered."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.engine.engine_start import EngineHost, ProgressHandler, engine_log
from minivllm.cli.engine.prompts import prompt_text, read_standard_input
from minivllm.cli.options.engine_options import EngineOptions, ModelArgument, with_model_option
from minivllm.cli.options.option_groups import with_option_groups
from minivllm.cli.options.sampling_options import FALLBACK, SamplingOptions, model_defaults
from minivllm.errors import RequestError
from minivllm.messages import FinishReason

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2"


@with_option_groups
@with_model_option
def chat(
    sampling: SamplingOptions,
    engine: EngineOptions,
    model: ModelArgument = DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this one prompt and exit; - reads it from stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print answers as they are instead of rendering Markdown.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With -p or a pipe: print one JSON object.")] = False,
    url: Annotated[
        str | None, typer.Option("--url", help="Talk to the model of a server, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of that server.", envvar="MINIVLLM_API_KEY")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show everything the engine logs.")] = False,
) -> None:
    """Talk with a model, or have one prompt answered.

    Without MODEL it fetches a small default model the first time. Type /help inside for the commands. A prompt given
    by -p or a pipe is answered once. With --url the model is one that a server runs, by default its first.

    Example: minivllm chat -p "Why is the sky blue?" --temperature 0
    """
    if url is not None:
        from minivllm.cli.chat.chat_remote import check_engine_options

        check_engine_options(engine)
    args = engine.engine_args(model)
    if args.compile_in_background is None and args.speculative_config is None:
        args = replace(args, compile_in_background=True)
    sampling.params({"max_tokens": None, **FALLBACK})  # wrong values are reported before a model is loaded
    interactive = prompt is None and sys.stdin.isatty()
    if interactive and as_json:
        raise RequestError("--json answers one prompt: give it with -p, or pipe it in.")
    question = None if interactive else read_standard_input() if prompt is None else prompt_text(prompt)

    def params(started: LLMEngine) -> SamplingParams:
        return sampling.params({"max_tokens": None, **model_defaults(started)})

    if url is not None:
        from minivllm.cli.chat.chat_remote import RemoteSession

        with engine_log(verbose) as log:
            wanted = "" if model == DEFAULT_MODEL else model
            fixed = sampling.params({"max_tokens": None, **FALLBACK})
            session: ChatSession = RemoteSession(
                url, wanted, fixed, system, api_key=api_key, context_size=engine.max_model_len
            )
            _converse(session, question, raw, as_json, log)
        return
    with engine_log(verbose) as log, EngineHost(args, log, params) as host:
        session = ChatSession(host.engine, model, host.params(), system, host)
        _converse(session, question, raw, as_json, log)


def _converse(session: ChatSession, question: str | None, raw: bool, as_json: bool, log: ProgressHandler) -> None:
    if question is None:
        _talk(session, raw, log)
    else:
        _answer_once(session, question, raw, as_json, log)


def _talk(session: ChatSession, raw: bool, log: ProgressHandler) -> None:
    from minivllm import __version__
    from minivllm.cli.chat.chat_terminal import ChatTerminal, notice
    from minivllm.cli.engine.env import default_history_path

    notice(
        f"minivllm {__version__} · {session.model} · {session.description} · "
        f"context {session.max_model_len:,} tokens · /help lists the commands"
    )
    _mention_missing_template(session)
    ChatTerminal(session, log, default_history_path(), raw=raw).run()


def _answer_once(session: ChatSession, question: str, raw: bool, as_json: bool, log: ProgressHandler) -> None:
    """Answer ``question`` on stdout, statistics on stderr. Ctrl-C exits with 130 after what was said so far."""
    from minivllm.cli.chat.chat_terminal import InterruptFlag, notice, stream_answer

    _mention_missing_template(session)
    if as_json:
        with InterruptFlag() as interrupt, log.status("Answering"):
            generation = session.ask(question, lambda text: None, lambda: interrupt.is_set)
        print(json.dumps(generation.record()), flush=True)
    else:
        generation = stream_answer(
            lambda on_text, is_interrupted: session.ask(question, on_text, is_interrupted),
            log,
            waiting="Answering",
            raw=raw,
        )
        notice(generation.statistics_line(session.max_model_len))
        if generation.finish_reason == FinishReason.LENGTH and generation.num_context_tokens >= session.max_model_len:
            notice(
                f"The context is full ({generation.num_context_tokens:,} of {session.max_model_len:,} tokens) and the "
                "answer was cut; start with a larger --max-model-len."
            )
    if generation.interrupted:
        raise typer.Exit(130)


def _mention_missing_template(session: ChatSession) -> None:
    from minivllm.cli.chat.chat_terminal import notice

    if not session.has_chat_template:
        notice(f"{session.model} has no chat template: it continues your text instead of answering it.")
