"""``minivllm generate``: complete prompts in one batch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from minivllm.cli.engine.engine_start import EngineHost, Generation, engine_log
from minivllm.cli.engine.options import (
    SamplingOptions,
    TextArgument,
    model_defaults,
    with_options,
)
from minivllm.cli.terminal.terminal_text import ControlCharacterFilter, counted, dim, printable
from minivllm.cli.terminal.typed import prompt_text, read_standard_input
from minivllm.config import EngineArgs
from minivllm.errors import RequestError
from minivllm.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine

MAX_TOKENS = 256
"""Length of a completion if no flag says otherwise: a text without an end must not fill the whole context."""


@with_options
def generate(
    sampling: SamplingOptions,
    args: EngineArgs,
    text: TextArgument = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="A prompt (may be repeated: all run in one batch); - reads it from stdin."
        ),
    ] = None,
    as_chat: Annotated[
        bool,
        typer.Option(
            "--chat/--no-chat", help="Send each prompt as a user message through the chat template."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt and line.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show everything the engine logs.")
    ] = False,
) -> None:
    """Complete one or many prompts in one batch.

    Without -p, standard input is the prompt.
    A completion ends after 256 tokens unless --max-tokens says otherwise.

    Example: minivllm generate -p "The capital of France is" -p "Water boils at" --max-tokens 8 --json
    """
    if text is not None:
        prompt = [text, *(prompt or ())]
    sampling.params({"max_tokens": MAX_TOKENS})  # wrong values are reported before a model is loaded
    if not prompt and sys.stdin.isatty():
        raise RequestError('There is no prompt: give one with -p "…", or pipe it in.')
    if args.executor == "external_launcher" and os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # all ranks have the same to say  # noqa: SIM115
    texts = [prompt_text(text) for text in prompt] if prompt else [read_standard_input()]

    def params(engine: LLMEngine) -> SamplingParams:
        return sampling.params({"max_tokens": MAX_TOKENS, **model_defaults(engine)})

    with engine_log(verbose) as log, EngineHost(args, log, params) as host:
        running = host.engine
        if as_chat and not running.tokenizer.has_chat_template:
            raise RequestError(f"{args.model} has no chat template, so --chat cannot work; leave it out.")
        batch = Batch(running, texts, as_chat, as_json)
        batch.submit(
            msgspec.structs.replace(host.params(), output_kind=OutputKind.DELTA),
            may_shorten=sampling.max_tokens is None,
        )
        with ExitStack() as until_first_print:
            until_first_print.enter_context(log.status(f"Completing {counted(len(texts), 'prompt')}"))
            batch.run(until_first_print.close)
    if batch.failed:
        raise typer.Exit(RequestError.exit_code)


class Batch:
    """Prompts that run together; results are printed in the order of the prompts, as soon as that allows."""

    def __init__(self, engine: LLMEngine, texts: list[str], as_chat: bool, as_json: bool) -> None:
        self._engine = engine
        self._texts = texts
        self._as_chat = as_chat
        self._as_json = as_json
        self._generations = [Generation() for _ in texts]
        self._errors: dict[int, str] = {}
        self._num_printed = 0
        self._before_print: Callable[[], None] = lambda: None
        self._stream = ControlCharacterFilter() if len(texts) == 1 and not as_json else None

    @property
    def failed(self) -> bool:
        """True if a prompt could not be completed."""
        return bool(self._errors)

    def submit(self, params: SamplingParams, may_shorten: bool) -> None:
        """Hand all prompts to the engine. One that it refuses gets an error in its place; the others go on.

        may_shorten: max_tokens is a default, so a prompt that leaves less of the context gets what is left.
        """
        max_model_len = self._engine.client.config.scheduler.max_model_len
        for index, text in enumerate(self._texts):
            try:
                ids = self._token_ids(text)
                room = max_model_len - len(ids)
                own = params
                if may_shorten and params.max_tokens is not None and 1 <= room < params.max_tokens:
                    own = msgspec.structs.replace(
                        params, max_tokens=room, min_tokens=min(params.min_tokens, room)
                    )
                self._engine.add_request(str(index), {"prompt_token_ids": ids}, own)
            except RequestError as error:
                self._errors[index] = str(error)

    def _token_ids(self, text: str) -> list[int]:
        if not self._as_chat:
            return self._engine.tokenizer.encode(text)
        return self._engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])

    def run(self, before_print: Callable[[], None]) -> None:
        """Step the engine until every prompt is completed, printing results;
        ``before_print`` is called before each."""
        self._before_print = before_print
        self._print_finished()
        while self._num_printed < len(self._texts):
            for output in self._engine.step():
                index = int(output.request_id)
                try:
                    new_text = self._generations[index].add(output)
                except RequestError as error:
                    self._errors[index] = str(error)
                    continue
                if self._stream is not None and new_text:
                    self._before_print()
                    print(self._stream.feed(new_text), end="", flush=True)
            self._print_finished()

    def _print_finished(self) -> None:
        while self._num_printed < len(self._texts):
            index = self._num_printed
            if index not in self._errors and self._generations[index].finish_reason is None:
                return
            self._num_printed += 1
            self._print_result(index)

    def _print_result(self, index: int) -> None:
        self._before_print()
        generation, error = self._generations[index], self._errors.get(index)
        if self._as_json:
            result = {"error": error} if error is not None else generation.record()
            print(json.dumps({"index": index, "prompt": self._texts[index], **result}), flush=True)
        elif error is not None:
            print(f"minivllm: prompt {index}: {printable(error)}", file=sys.stderr, flush=True)
        elif self._stream is not None:
            print(flush=True)
        else:
            print(dim(f"[{index}] {printable(self._texts[index])}", sys.stdout))
            print(printable(generation.text), flush=True)
