"""Prefill and decode servers, each with an image encoder: answers are those of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.multimodal.models import expected, picture, reference
from tests.multimodal.test_server import message, url_of
from tests.server.test_disaggregated import Disaggregated


@pytest.mark.slow
def test_the_decode_server_loads_what_the_prefill_server_saw(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    directory = directories["smolvlm"]
    running = Disaggregated(directory, tmp_path / "log", "1P1D", "--block-size", "16")
    try:
        with running.client() as client:
            for seed in (0, 1, 0):
                image = picture(seed, 60, 60)
                asked: Any = [message(url_of(image), text="What is it, and where was it seen?")]
                answer = client.chat.completions.create(
                    model="tiny",
                    messages=asked,
                    temperature=0.0,
                    max_tokens=6,
                    extra_body={"ignore_eos": True},
                )
                text = "user:<image>What is it, and where was it seen?</s>assistant:"
                tokens, _ = expected(directory, text, [image], 6)
                _, processor = reference(directory)
                assert answer.choices[0].message.content == processor.tokenizer.decode(
                    tokens, skip_special_tokens=True
                )
        loaded = 'minivllm_kv_transfer_loaded_bytes_total{engine="0",tier="LookupBufferConnector"}'
        assert running.metric(re.escape(loaded), running.urls["decode 1"]) > 0
        assert running.stop() == 0
    finally:
        running.process.kill()
