"""An eye joined to a model of text answers as LLaVA of transformers does with the weights of both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from minivllm import SamplingParams
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import ConfigError, ModelError, RequestError
from minivllm.executor.nodes.messages import settings_of
from tests.gguf_models import write_gguf
from tests.multimodal.conftest import core_of, engine
from tests.multimodal.models import expected, make_tokenizer, picture, prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def eye(parts: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(parts["eye"], tmp_path / "eye"))


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_the_eye_has_no_language_model(parts: dict[str, Path]) -> None:
    sizes = [
        sum(file.stat().st_size for file in parts[name].glob("*.safetensors")) for name in ("eye", "both")
    ]
    assert sizes[0] < sizes[1] / 2


@pytest.mark.parametrize("model_impl", ("minivllm", "transformers"))
def test_tokens_are_those_of_llava(parts: dict[str, Path], model_impl: str) -> None:
    with engine(parts["text"], eye=str(parts["eye"]), model_impl=model_impl) as llm:
        for text, images in (
            ("<s>Look at <image> and say", [picture(0)]),
            ("<s><image><image>Which is older?", [picture(1, 20, 90), picture(2, 64, 64)]),
        ):
            (output,) = llm.generate(prompt(text, *images), GREEDY)
            assert output.outputs[0].token_ids == expected(parts["both"], text, images, 5)[0]


def test_so_are_those_of_a_gguf_file(parts: dict[str, Path], tmp_path: Path) -> None:
    write_gguf(parts["text"], tmp_path / "text.gguf", "llama")
    text = "<s>Look at <image> and say"
    tokens = make_tokenizer()(text)["input_ids"]
    with engine(tmp_path / "text.gguf", eye=str(parts["eye"]), tokenizer=str(parts["text"])) as llm:
        given = {"prompt_token_ids": tokens, "multi_modal_data": {"image": picture(0)}}
        (output,) = llm.generate(given, GREEDY)
        assert output.outputs[0].token_ids == expected(parts["both"], text, [picture(0)], 5)[0]


def test_texts_are_answered_as_without_an_eye(parts: dict[str, Path]) -> None:
    """A placeholder in a text is a token like others."""
    texts = ["<s>Only words.", "<s>Words about <image>."]
    answers = []
    for arguments in ({}, {"eye": str(parts["eye"])}):
        with engine(parts["text"], **arguments) as llm:
            outputs = llm.generate(texts, GREEDY)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_chat_template_of_texts_gets_placeholders_before_the_text(parts: dict[str, Path]) -> None:
    images = [{"type": "image_pil", "image_pil": picture(seed)} for seed in (1, 2)]
    said = {"type": "text", "text": "Is <image> one? </s>"}
    with_logprobs = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
    with engine(parts["text"], eye=str(parts["eye"])) as llm:
        answers = []
        for content in ([*images, said], [images[0], said, images[1]], [*images[::-1], said]):
            (output,) = llm.chat([[{"role": "user", "content": content}]], with_logprobs)
            assert output.prompt == "<s>user: <image><image>Is <image> one? </s></s>assistant: "
            # What the user wrote is text: letters, no third image, no end of the turn.
            assert output.prompt_token_ids.count(2) == 2 * 49
            assert output.prompt_token_ids.count(1) == 1
            answers.append(output.outputs[0].cumulative_logprob)
        assert answers[1] == pytest.approx(answers[0], abs=1e-4)
        assert answers[2] != pytest.approx(answers[0], abs=1e-2), "swapped pictures would not show"
        assert core_of(llm).encodings.num_encoded_units == 2  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="beside images only texts are read"):
            llm.chat([[{"role": "user", "content": [images[0], {"type": "sound"}]}]], GREEDY)


def test_an_eye_that_does_not_go_with_the_model_is_refused(parts: dict[str, Path], eye: Path) -> None:
    def refused(model: Path, words: str, **arguments: Any) -> None:
        with pytest.raises(ModelError, match=words):
            resolve(EngineArgs(model=str(model), device="cpu", eye=str(eye), **arguments))

    refused(parts["both"], "has an image encoder: leave eye out")
    refused(parts["text"], "started with limit_mm_per_prompt", limit_mm_per_prompt={"image": 0})
    change(eye / "config.json", text_config={"hidden_size": 96})
    refused(parts["text"], r"embeddings of 96 numbers .* those of the model have 64")
    change(
        eye / "config.json", text_config={"hidden_size": 64}, image_token_index=10**6, image_token_id=10**6
    )
    refused(parts["text"], "Images stand at token 1000000")
    change(eye / "config.json", model_type="gemma3")
    refused(parts["text"], "It is of type 'gemma3'")
    (eye / "preprocessor_config.json").unlink()
    change(eye / "config.json", model_type="llava")
    refused(parts["text"], "no preprocessor_config.json")
    (eye / "config.json").write_text("{")
    refused(parts["text"], "not readable as JSON")
    (eye / "config.json").unlink()
    refused(parts["text"], "must be a directory with config.json")
    with pytest.raises(ConfigError, match="eye is empty"):
        EngineArgs(eye="")


def test_weights_that_are_missing_and_another_tokenizer_are_refused(
    parts: dict[str, Path], eye: Path
) -> None:
    change(eye / "config.json", image_token="<picture>")
    with pytest.raises(ModelError, match="'<picture>', but this model's tokenizer has '<image>' there"):
        engine(parts["text"], eye=str(eye)).__enter__()
    (eye / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        engine(parts["text"], eye=str(eye)).__enter__()


def test_another_eye_is_another_model(parts: dict[str, Path], eye: Path) -> None:
    """For connectors, which must not load blocks that another eye has filled, and for nodes."""
    transfer = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(eye.parent / "blocks")},
    }

    def names(**arguments: Any) -> tuple[str, str]:
        args = EngineArgs(model=str(parts["text"]), device="cpu", kv_transfer_config=transfer, **arguments)
        config, _ = resolve(args)
        assert config.kv_transfer is not None
        return config.kv_transfer.fingerprint, settings_of(config)["the model's files"]

    without, first, copied = names(), names(eye=str(parts["eye"])), names(eye=str(eye))
    assert first == copied
    data = bytearray((eye / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (eye / "model.safetensors").write_bytes(data)
    other = names(eye=str(eye))
    for place in range(2):
        assert len({without[place], first[place], other[place]}) == 3
