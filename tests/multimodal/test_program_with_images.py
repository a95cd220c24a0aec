"""``minivllm env --program --images``: the program of a step with images."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from minivllm.cli.commands import app


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
