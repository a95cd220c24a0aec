"""``minivllm env --program --images``: the program of a step with images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.cli.commands import app
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import ConfigError, ModelError
from minivllm.multimodal.spans.families import deeper_levels
from tests.models.region_ledger import regions_of


def program_of(model: Path, *flags: str) -> list[str]:
    result = CliRunner().invoke(app, ["env", str(model), "--program", *flags])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_steps_with_images_have_one_more_piece_after_the_embedding(directories: dict[str, Path]) -> None:
    plain = program_of(directories["smolvlm"])
    seeing = program_of(directories["smolvlm"], "--images")
    number = next(number for number, line in enumerate(seeing) if " Overlay " in line)
    assert " Embed " in seeing[number - 1]
    assert "stream, features, is_image" in seeing[number]
    without = seeing[:number] + seeing[number + 1 :]
    assert [line.split() for line in without] == [line.split() for line in plain]


def test_deeper_features_are_added_after_the_first_layers(directories: dict[str, Path]) -> None:
    plain = program_of(directories["qwen3-vl"])
    seeing = program_of(directories["qwen3-vl"], "--images")
    added = [line for line in seeing if "x, deep." in line]
    assert [line.split("deep.")[1][0] for line in added] == ["0", "1"]
    assert not any("deep." in line or " Overlay " in line for line in plain)


@pytest.mark.parametrize("stages", (1, 2, 4))
def test_the_first_stage_has_the_layers_that_deeper_features_are_added_after(
    directories: dict[str, Path], stages: int
) -> None:
    args = {"model": str(directories["qwen3-vl"]), "device": "cpu", "pipeline_parallel_size": stages}
    if stages < 4:
        config, _ = resolve(EngineArgs(**args))
        assert config.images is not None and config.images.deeper_levels == 2
        return
    with pytest.raises(ConfigError, match=r"after the first 2 layers .* only 1 of them .* is 4: lower it"):
        resolve(EngineArgs(**args))
    config, _ = resolve(EngineArgs(**args, limit_mm_per_prompt={"image": 0}))
    assert config.images is None


@pytest.mark.parametrize("listed", ([0, 0], [0, 3], "all", None))
def test_deeper_levels_that_the_encoder_has_not_are_refused(listed: object) -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"depth": 3, "deepstack_visual_indexes": listed}}
    with pytest.raises(ModelError, match=r"x/config.json: vision_config.deepstack_visual_indexes is"):
        deeper_levels(config, "x")
    assert deeper_levels({"model_type": "qwen3_vl", "vision_config": {}}, "x") == 3


def test_steps_with_images_have_two_more_regions(directories: dict[str, Path]) -> None:
    """One more "first", and one "between" for all levels. Those of a text have the names and the number that
    they have in an engine that reads text only."""
    counts = []
    for limit in (0, 8):
        (regions,) = regions_of(directories["qwen3-vl"], limit_mm_per_prompt={"image": limit})
        counts.append(Counter(name.rpartition(" ")[0] for name in regions))
    text, seeing = counts
    assert seeing - text == {"first +single": 1, "between +single": 1}
    assert not text - seeing
