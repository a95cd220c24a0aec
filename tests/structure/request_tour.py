"""Two requests on their way through a real engine,
and what every station of the tour in minivllm/README.md sees.

``python tests/structure/request_tour.py`` prints it, and with ``--write`` puts it into the README,
station by station.

The model has random layers, but an embedding and a head made by hand: after every word of ``ANSWERS`` the
next one is likeliest by far, so that the sampled ids are the same on every machine. Attention is computed by
the reference, uncompiled; the query tiles are those that compiled attention prepares from the same rows.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from minivllm import EngineArgs, SamplingParams, register_attention
from minivllm.attention import AttentionBackend, AttentionContext, FlexAttention, SdpaAttention, StepRows
from minivllm.batch.step_inputs import StepInputBuilder, StepInputs
from minivllm.engine.resolve import resolve
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput
from minivllm.models.decoder import Decoder
from minivllm.models.mixers import attention as attention_module
from minivllm.processing.input_processor import PreparedRequest
from minivllm.program.fuse import Plan
from minivllm.program.printed import Line, sections
from minivllm.simulation.program_plan import planned_programs
from minivllm.specs.caches import LayerCache

TOUR = Path(__file__).parents[2] / "minivllm" / "README.md"
BEGIN, END = "<!-- tour: {} -->", "<!-- end of tour -->"

SHARED = "Once upon a time a small engine lived in a little house by the sea and"
PROMPTS = (f"{SHARED} every morning", f"{SHARED} at night the lamp")
ANSWERS = ("morning it served many guests in turn.<|eos|>", "lamp burned low.<|eos|>")
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SETTINGS: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 12, "num_gpu_blocks_override": 9}


def words_of(text: str) -> list[str]:
    """The tokens of a text: a word with the space before it, a sign, the end of the sequence."""
    return re.findall(r"<\|eos\|>| ?\w+|[.]", text)


VOCABULARY = list(
    dict.fromkeys(["<|eos|>", *words_of(" ".join(PROMPTS)), *words_of(" " + " ".join(ANSWERS))])
)


def save_model(directory: Path) -> Path:
    """A checkpoint as Hugging Face has them: config.json, weights, tokenizer."""
    size, heads, kv_heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    inner, kv_size = SHAPE["intermediate_size"], size // heads * kv_heads
    shapes = {
        "self_attn.q_proj": (size, size),
        "self_attn.k_proj": (kv_size, size),
        "self_attn.v_proj": (kv_size, size),
    }
    shapes |= {"self_attn.o_proj": (size, size), "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size)}
    shapes |= {"mlp.down_proj": (size, inner)}
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.norm.weight": torch.ones(size),
        "model.embed_tokens.weight": torch.eye(len(VOCABULARY), size),
    }
    for layer in range(SHAPE["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, shape in shapes.items():
            weights[f"{name}.{part}.weight"] = 0.05 * torch.randn(shape, generator=generator)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = torch.ones(size)
    head = weights["lm_head.weight"] = torch.zeros(len(VOCABULARY), size)
    for answer in ANSWERS:
        for word, following in pairwise(words_of(" " + answer)):
            head[VOCABULARY.index(following), VOCABULARY.index(word)] = 1.0
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": len(VOCABULARY)}))

    tokenizer = Tokenizer(
        models.WordLevel(
            {word.replace(" ", "Ġ"): index for index, word in enumerate(VOCABULARY)}, unk_token="<|eos|>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    return directory


@dataclass
class Step:
    """One step of the engine, as the stations saw it."""

    output: SchedulerOutput
    block_ids: dict[str, list[int]]
    rows: StepRows | None = None
    tiles: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    free_after: list[int] = field(default_factory=list)
    texts: dict[str, tuple[str, str | None]] = field(default_factory=dict)


@dataclass
class Record:
    """All that is told. margin: by how much the likeliest token led, at least. plans: of the model's program
    for one rank, and for two."""

    requests: list[EngineRequest] = field(default_factory=list)
    hashes: dict[str, list[str]] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    free_at_first: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    margin: float = float("inf")
    plans: list[Plan] = field(default_factory=list)


class WatchedAttention:
    """The reference, and beside it the tiles that compiled attention would read."""

    decode_batches: Sequence[int] = ()

    def __init__(self, context: AttentionContext, record: Record) -> None:
        self._reference: AttentionBackend = SdpaAttention(context)
        self._compiled, self._record = FlexAttention(context), record

    def prepare(self, rows: StepRows) -> Any:
        if self._record.steps:
            step = self._record.steps[-1]
            step.rows = rows
            step.tiles = list(self._describe(rows))
        return self._reference.prepare(rows)

    def _describe(self, rows: StepRows) -> list[str]:
        described = []
        for part in self._compiled.prepare(rows).parts:
            [lists], [bounds] = part.tiles.lists.values(), part.tiles.bounds.values()
            copied = part.tiles.step_blocks
            tokens = np.arange(part.begin, part.begin + part.tiles.num_tiles)
            if part.tiles.tile_tokens is not None:
                tokens = part.tiles.tile_tokens.numpy()
            for tile, own in enumerate(tokens.reshape(-1, part.kind.size)):
                positions = rows.positions[own[bounds.high[tile].numpy() >= 0]].tolist()
                if not positions:  # padding
                    continue
                partial, full = (
                    []
                    if blocks is None or count is None
                    else blocks[tile].flatten()[: int(count[tile])].tolist()
                    for count, blocks in (lists[:2], lists[2:])
                )
                if copied is not None:
                    full, partial = copied[full].flatten().tolist(), copied[partial].flatten().tolist()
                size = "1 query   " if part.kind.size == 1 else f"{part.kind.size} queries"
                described.append(
                    f"tile of {size}  positions {span(positions):7} wholly visible {full!s:7} partial "
                    f"{partial}"
                )
        return described

    def attend(
        self, metadata: Any, cache: LayerCache, spec: Any, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        o = self._reference.attend(metadata, cache, spec, q, sinks)
        if self._record.steps:
            shapes = {"q": q, "K cache of a layer": cache.k, "o": o}
            self._record.steps[-1].shapes |= {name: shape(tensor) for name, tensor in shapes.items()}
        return o


def follow() -> Record:
    """Serve both requests: the second comes when the first has its first token."""
    record = Record()
    register_attention("watched", lambda context: WatchedAttention(context, record))
    with tempfile.TemporaryDirectory(prefix="minivllm-tour-") as folder, ExitStack() as watching:
        args = EngineArgs(
            model=str(save_model(Path(folder))),
            device="cpu",
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            attention_backend="watched",
            async_scheduling=False,
            **SETTINGS,
        )
        # What stands in the text is what a CPU without products of bfloat16 does,
        # whose query tiles are smaller.
        watching.enter_context(patch("torch.cpu._is_avx512_bf16_supported", lambda: False))
        engine = watching.enter_context(LLMEngine.from_args(args))
        watch(engine, record, watching)
        params = SamplingParams(temperature=0.0, max_tokens=16, seed=0, stop=["in vain"])
        record.free_at_first = free_blocks(engine)
        for number, prompt in enumerate(PROMPTS):
            prepared = engine.prepare(None, prompt, params)
            engine.submit(prepared)
            note_request(engine, record, prepared)
            for _ in range(2 if number == 0 else 20):
                if not engine.has_unfinished_requests():
                    break
                outputs = engine.step()
                step = record.steps[-1]
                for output in outputs:
                    completion = output.outputs[0]
                    step.texts[output.request_id] = completion.text, completion.finish_reason
                step.free_after = free_blocks(engine)
        core(engine).scheduler.check_integrity()
        record.plans = plans(Path(folder))
    return record


def plans(directory: Path) -> list[Plan]:
    """Of the model, for one rank and for two. Its vocabulary is as small as two ranks can divide."""
    (directory / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 128}))
    args = EngineArgs(model=str(directory), device="cpu", dtype="float32", max_model_len=64)
    layouts = (replace(args, tensor_parallel_size=ranks) for ranks in (1, 2))
    return [plan for layout in layouts for plan in planned_programs(*resolve(layout))]


def core(engine: LLMEngine) -> Any:
    """The engine core, which lives in this very process."""
    return engine.client.core  # type: ignore[attr-defined]


def free_blocks(engine: LLMEngine) -> list[int]:
    return [block.block_id for block in core(engine).scheduler.kv_cache_manager.pools[0].free_queue]


def note_request(engine: LLMEngine, record: Record, prepared: PreparedRequest) -> None:
    [sent] = prepared.sequences
    record.requests.append(sent)
    request = core(engine).scheduler.requests[sent.request_id]
    record.hashes[sent.request_id] = [digest.hex()[:8] for digest in request.block_hashes]
    record.known[sent.request_id] = (
        f"status {request.status.name}, known tokens {request.num_tokens}, computed "
        f"{request.num_computed_tokens}"
    )


def watch(engine: LLMEngine, record: Record, watching: ExitStack) -> None:
    """Look on at every station; nothing is changed."""
    scheduler, executor = core(engine).scheduler, core(engine).executor

    def executing(execute: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(output: SchedulerOutput, *rest: Any) -> Any:
            tables = scheduler.kv_cache_manager
            blocks = {name: list(tables.get_block_ids(name)[0]) for name in output.num_scheduled_tokens}
            record.steps.append(Step(output, blocks))
            return execute(output, *rest)

        return execute_model

    def updating(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(output: SchedulerOutput, results: ModelRunnerOutput) -> Any:
            if output.num_scheduled_tokens:
                record.steps[-1].sampled = dict(results.sampled_token_ids)
            return update(output, results)

        return update_from_output

    def building(build: Callable[..., StepInputs]) -> Callable[..., StepInputs]:
        def watched_build(*arguments: Any, **named: Any) -> StepInputs:
            inputs = build(*arguments, **named)
            step, count = record.steps[-1], inputs.num_tokens
            step.names = [row.request.data.request_id for row in inputs.rows]
            tensors = {"token ids": inputs.token_ids, "positions": inputs.tokens.positions}
            tensors["cache slots"] = inputs.slots[0]
            step.tokens = {name: tensor[:count].tolist() for name, tensor in tensors.items()}
            return inputs

        return watched_build

    def running(forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def watched_forward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
            o, residual = forward(*arguments, **named)
            record.steps[-1].shapes["residual stream"] = shape(residual)
            return o, residual

        return watched_forward

    def heading(logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched_logits(*arguments: Any, **named: Any) -> Tensor:
            result, rows = logits(*arguments, **named), arguments[2]
            record.steps[-1].shapes |= {
                "rows with logits": str(rows.unique().tolist()),
                "logits": shape(result),
            }
            best = result.topk(2).values
            record.margin = min(record.margin, float((best[:, 0] - best[:, 1]).min()))
            return result

        return watched_logits

    def storing(write_kv: Callable[..., None]) -> Callable[..., None]:
        def watched_write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
            record.steps[-1].shapes |= {"k": shape(k), "v": shape(v)}
            write_kv(k_cache, v_cache, k, v, slots)

        return watched_write

    for owner, name, wrapped in (
        (executor, "execute_model", executing),
        (scheduler, "update_from_output", updating),
        (StepInputBuilder, "build", building),
        (Decoder, "forward", running),
        (Decoder, "logits", heading),
        (attention_module, "write_kv", storing),
    ):
        watching.enter_context(patch.object(owner, name, wrapped(getattr(owner, name))))


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def stations(record: Record) -> dict[str, str]:
    """What each station of the tour prints, by the name of its marker."""
    return {
        "request": "\n".join(_requests(record)),
        "queue": "\n".join(_queue(record)),
        "schedule": "\n".join(_schedule(record)),
        "inputs": "\n".join(_inputs(record)),
        "tiles": "\n".join(_tiles(record)),
        "shapes": "\n".join(_shapes(record)),
        "program": "\n".join(_program(record)),
        "blocks": "\n".join(_blocks(record)),
        "text": "\n".join(_texts(record)),
    }


def _requests(record: Record) -> list[str]:
    lines = []
    for prompt, request in zip(PROMPTS, record.requests):
        ids, params = request.prompt_token_ids, request.sampling_params
        lines += [
            f"{request.request_id}  prompt            {prompt!r}",
            f"    prompt_token_ids  {ids}   ({len(ids)} tokens)",
            f"    max_tokens {request.max_tokens}, seed {request.seed}, eos_token_ids "
            f"{request.eos_token_ids}, "
            f"temperature {params.temperature}, stop {params.stop}",
        ]
    return lines


def _queue(record: Record) -> list[str]:
    return [
        f"{name}  {record.known[name]}, block hashes {' '.join(digest + '…' for digest in digests)}"
        for name, digests in record.hashes.items()
    ]


def _schedule(record: Record) -> list[str]:
    lines = []
    for number, step in enumerate(record.steps, 1):
        output = step.output
        changes = [
            f"{new.request.request_id} is new: {new.num_computed_tokens} tokens computed, blocks "
            f"{new.block_ids[0]}"
            for new in output.new_requests
        ]
        changes += [
            f"{known.request_id} gets {'block' if len(known.new_block_ids[0]) == 1 else 'blocks'} "
            f"{', '.join(map(str, known.new_block_ids[0]))}"
            for known in output.cached_requests
        ]
        changes += [f"{name} has finished" for name in output.finished_request_ids]
        lines.append(f"step {number}  {output.num_scheduled_tokens!s:18}  {'; '.join(changes)}".rstrip())
    return lines


def _inputs(record: Record) -> list[str]:
    lines = []
    for number, step in enumerate(record.steps[:3], 1):
        assert step.rows is not None
        rows = " · ".join(
            f"{name} in batch slot {slot}, {count} from position {start}"
            for name, slot, start, count in zip(
                step.names, step.rows.slots, step.rows.starts, step.rows.counts
            )
        )
        lines.append(f"step {number}  {rows}")
        lines += [
            f"        {name:12} {' '.join(f'{value:2}' for value in values)}"
            for name, values in step.tokens.items()
        ]
    return lines


def _tiles(record: Record) -> list[str]:
    return [
        f"step {number}  {tile}" for number, step in enumerate(record.steps[:3], 1) for tile in step.tiles
    ]


def _shapes(record: Record) -> list[str]:
    step = record.steps[2]
    names = ("residual stream", "q", "k", "v", "K cache of a layer", "o", "rows with logits", "logits")
    return [*(f"{name:18}  {step.shapes[name]}" for name in names), f"sampled             {step.sampled}"]


def _program(record: Record) -> list[str]:
    """The program fused for one rank and for two, in lines of two columns: the same items side by side."""
    one, two = ([line for section in sections(plan) for line in section.lines] for plan in record.plans)
    lines = [f"{'one rank':47} two ranks"]
    rest = iter(one)
    for line in two:
        exchanges = line.is_seam and line.what != "Attend"
        lines.append(f"{'' if exchanges else _item(next(rest)):47} {_item(line)}".rstrip())
    assert next(rest, None) is None
    return lines


def _item(line: Line) -> str:
    """A piece or a seam, and what it gives, if that is one register."""
    what = f"— {line.what} —" if line.is_seam else line.what
    single = re.fullmatch(r"\w+ \[[^\]]*\]", line.gives)
    return f"{line.region:8} {what:15} {line.gives if single else ''}"


def _blocks(record: Record) -> list[str]:
    lines = [f"before  free {record.free_at_first}"]
    for number, step in enumerate(record.steps, 1):
        held = ", ".join(f"{name} {blocks}" for name, blocks in step.block_ids.items())
        ended = [name for name, (_, reason) in step.texts.items() if reason is not None]
        end = f", and free {step.free_after} after {' and '.join(ended)} has ended" if ended else ""
        lines.append(f"step {number}  {held}{end}")
    return lines


def _texts(record: Record) -> list[str]:
    name = record.requests[0].request_id
    lines = []
    for number, step in enumerate(record.steps, 1):
        if name in step.texts:
            text, reason = step.texts[name]
            token = step.sampled[name][0]
            end = "" if reason is None else f'   finish_reason "{reason}"'
            lines.append(f"step {number}  token {token:2} {VOCABULARY[token]!r:10} text {text!r}{end}")
    return lines


def written(readme: str) -> dict[str, str]:
    """What stands in the README, by the name of the marker."""
    marker = BEGIN.replace("{}", r"([\w ]+)")
    return {
        name: text for name, text in re.findall(rf"{marker}\n```text\n(.*?)\n```\n{END}", readme, re.DOTALL)
    }


def write(printed: dict[str, str]) -> None:
    """Put every station's print between its markers."""
    readme = TOUR.read_text(encoding="utf-8")
    for name, text in printed.items():
        before, rest = readme.split(BEGIN.format(name))
        _, after = rest.split(END, 1)
        readme = f"{before}{BEGIN.format(name)}\n```text\n{text}\n```\n{END}{after}"
    TOUR.write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    printed = stations(follow())
    if "--write" in sys.argv[1:]:
        write(printed)
    else:
        for name, text in printed.items():
            print(f"-- {name}\n{text}\n")
