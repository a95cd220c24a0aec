"""``minivllm trace`` shows the articles' example, and refuses what cannot work with a sentence."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.cli.commands import app
from minivllm.cli.trace.command import Workload, folded, heat_strip, perfetto_trace, simulate, simulated_steps
from minivllm.errors import ConfigError

ARTICLE = {"budget": 10, "prompt_lens": [3, 5, 12], "max_tokens": 3}
PREEMPTING = {"budget": 10, "prompt_lens": [3, 5, 12], "max_tokens": 9, "block_size": 8, "num_blocks": 4}


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from minivllm.cli.main import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, "trace", *arguments], capture_output=True, text=True
    )


def test_the_articles_example_is_reproduced() -> None:
    scheduled = [step["num_scheduled_tokens"] for step in simulate(**ARTICLE)]
    assert scheduled[:3] == [
        {"R1": 3, "R2": 5, "R3": 2},
        {"R1": 1, "R2": 1, "R3": 8},
        {"R1": 1, "R2": 1, "R3": 2},
    ]
    assert scheduled[3:] == [{"R3": 1}, {"R3": 1}]


def test_the_command_prints_json_lines_without_importing_torch() -> None:
    done = run_command("--budget", "10", "--prompt-lens", "3,5,12", "--max-tokens", "3")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert lines[0] == {"step": 0, "num_scheduled_tokens": {"R1": 3, "R2": 5, "R3": 2}}
    assert lines[-1]["finished"] == ["R3"]
    check = "import sys; from minivllm.cli.trace.command import simulate; "
    check += "list(simulate(budget=4, prompt_lens=[3], max_tokens=2))"
    assert (
        subprocess.run([sys.executable, "-c", check + "; assert 'torch' not in sys.modules"]).returncode == 0
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt-lens", "3,x"], "prompt-lens is '3,x'"),
        (["--prompt-lens", ""], "prompt-lens is empty"),
        (["--prompt-lens", "3,0"], "prompt-lens is 0"),
        (["--budget", "0"], "budget is 0"),
        (["--max-tokens", "0"], "max-tokens is 0"),
        (["--policy", "lifo"], "policy is 'lifo'"),
        (["--priorities", "1,2", "--policy", "priority"], "priorities has 2 values"),
        (["--priorities", "1,2,3"], "policy 'fcfs' has none"),
        (["--arrivals", "0"], "arrivals has 1 value, but"),
        (["--prefix-len", "4"], "prefix-len is 4, but must be at least 0 and at most 3"),
        (["--families", "1,1,2"], "give --prefix-len too"),
        (["--families", "1,2", "--prefix-len", "2"], "families has 2 values"),
        (["--tree-after", "2"], "give --tree too"),
        (["--tree", "--tree-after", "99"], "the last step is 4"),
        (["--num-blocks", "1"], "num-blocks is 1"),
        (["--perfetto", "/"], "cannot be written"),
    ],
)
def test_impossible_flags_give_a_sentence_and_exit_code_2(
    arguments: list[str], said: str, capsys, monkeypatch
) -> None:
    from minivllm.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["trace", *arguments])
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_few_blocks_show_preemption_and_everyone_finishes() -> None:
    lines = list(simulate(**PREEMPTING))
    assert any("preempted" in line for line in lines)
    assert sorted(request_id for line in lines for request_id in line.get("finished", [])) == [
        "R1",
        "R2",
        "R3",
    ]


def test_a_prompt_that_does_not_fit_beside_the_others_waits_instead_of_starting_again_and_again() -> None:
    preempted = [request_id for line in simulate(**PREEMPTING) for request_id in line.get("preempted", [])]
    assert preempted == ["R2"], "an answer grew; R3's prompt of two blocks found one free, and waited"


def test_huge_counts_are_left_out_of_the_picture_and_exact_in_json() -> None:
    flags = [
        "trace",
        "--prompt-lens",
        "1000000," + "1," * 500 + "20000",
        "--budget",
        "20000",
        "--max-tokens",
        "2",
    ]
    lines = [json.loads(line) for line in CliRunner().invoke(app, flags).output.splitlines()]
    assert sum(line["num_scheduled_tokens"].get("R1", 0) for line in lines) == 1_000_001
    strip = CliRunner().invoke(app, [*flags, "--plot"]).output.splitlines()
    assert len(strip) < 60 and max(map(len, strip)) < 1000
    assert "20k" in strip[1] and "20000" not in strip[1] and "…" in strip[0]
    assert "R500" in "\n".join(strip) and "R100 " not in "\n".join(strip)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt-lens", "1000000000000"], "at most 10000000"),
        (["--prompt-lens", "9000000,9000000"], "18,000,006 tokens in all, but at most 10,000,000"),
        (["--arrivals", "0,0,100000000000"], "arrivals is 100000000000"),
    ],
)
def test_what_nobody_could_wait_for_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["trace", *arguments])
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)


def test_a_pool_that_is_larger_than_all_requests_is_not_built() -> None:
    assert list(simulate(**ARTICLE, num_blocks=10**12)) == list(simulate(**ARTICLE))


def test_priorities_and_arrivals_decide_the_order() -> None:
    lines = list(simulate(**ARTICLE, policy="priority", priorities=[2, 1, 0]))
    assert lines[0]["num_scheduled_tokens"] == {"R3": 10}
    lines = list(simulate(**ARTICLE, arrivals=[2, 0, 0]))
    assert lines[0]["num_scheduled_tokens"] == {"R2": 5, "R3": 5}
    assert "R1" in lines[2]["num_scheduled_tokens"]


def test_the_threshold_caps_every_request() -> None:
    assert all(
        count <= 4
        for line in simulate(**ARTICLE, threshold=4)
        for count in line["num_scheduled_tokens"].values()
    )


def test_an_idle_gap_before_an_arrival_is_shown_as_empty_steps() -> None:
    lines = list(simulate(budget=8, prompt_lens=[2, 2], max_tokens=1, arrivals=[0, 3]))
    assert [line["num_scheduled_tokens"] for line in lines] == [{"R1": 2}, {}, {}, {"R2": 2}]


def test_the_heat_strip_has_a_row_per_request_and_a_cell_per_step() -> None:
    steps = list(simulated_steps(Workload(**PREEMPTING)))
    rows = heat_strip(steps, 3).plain.splitlines()[:4]
    assert rows[0].split() == ["step", *(str(step.step) for step in steps)]
    for number, row in enumerate(rows[1:], 1):
        request_id = f"R{number}"
        expected = [
            "x" if request_id in step.preempted else str(step.num_scheduled_tokens.get(request_id, "·"))
            for step in steps
        ]
        assert row.split() == [request_id, *expected]


def test_the_perfetto_file_holds_every_scheduled_token() -> None:
    steps = list(simulated_steps(Workload(**PREEMPTING)))
    events = json.loads(json.dumps(perfetto_trace(steps)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["args"]["tokens"] for event in spans) == sum(
        sum(step.num_scheduled_tokens.values()) for step in steps
    )
    assert {event["cat"] for event in spans} == {"prompt", "decode"}


LOADING = {"budget": 16, "prompt_lens": [8, 8], "max_tokens": 9, "block_size": 4, "num_blocks": 7}


def test_what_a_preempted_request_had_comes_back_from_a_second_tier_after_so_many_steps() -> None:
    lines = list(simulate(**LOADING, load_steps=2))
    assert [line["loading"] for line in lines if "loading" in line] == [["R2"], ["R2"]]
    again = [line["num_scheduled_tokens"] for line in lines[lines.index(lines[-1]) - 3 :]]
    assert again == [{"R2": 1}] * 4
    recomputed = sum(sum(line["num_scheduled_tokens"].values()) for line in simulate(**LOADING))
    assert sum(sum(line["num_scheduled_tokens"].values()) for line in lines) == recomputed - 4, (
        "one block was lost"
    )


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_without_colours_signs_tell_prompts_decodes_and_preemptions_apart(variables: dict[str, str]) -> None:
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in PREEMPTING.items() if isinstance(value, int)
    ]
    flags.append("--prompt-lens=" + ",".join(map(str, PREEMPTING["prompt_lens"])))
    output = CliRunner().invoke(app, ["trace", "--plot", *flags], env=variables).output
    *rows, _, legend = output.splitlines()
    steps = list(simulated_steps(Workload(**PREEMPTING)))
    for number, row in enumerate(rows[1:], start=1):
        name, *cells = row.split()
        assert name == f"R{number}"
        for cell, step in zip(cells, steps, strict=True):
            is_scheduled = name in step.num_scheduled_tokens and name not in step.preempted
            assert (cell == "x") == (name in step.preempted)
            assert cell.startswith("+") == (name in step.decoding and is_scheduled)
            assert not is_scheduled or int(cell) == step.num_scheduled_tokens[name]
    assert legend.strip() == "3 prompt   +1 decode   x preempted"


def test_loads_are_in_the_heat_strip_and_in_the_perfetto_file() -> None:
    steps = list(simulated_steps(Workload(**LOADING, load_steps=3)))
    strip = heat_strip(steps, 2).plain
    assert strip.splitlines()[2].split().count("~") == 3 and "loading" in strip
    assert "loading" not in heat_strip(list(simulated_steps(Workload(**LOADING))), 2).plain
    loads = [event for event in perfetto_trace(steps)["traceEvents"] if event.get("cat") == "load"]
    assert [event["tid"] for event in loads] == [2, 2, 2]
    assert sum("~" in row for row in heat_strip(folded(steps), 2).plain.splitlines()) == 1


def test_too_small_a_pool_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="the longest request alone needs 4"):
        simulate(**{**PREEMPTING, "num_blocks": 3})


def test_the_heat_strip_is_saved_as_a_picture_and_the_steps_for_perfetto(tmp_path: Path) -> None:
    picture, events = tmp_path / "steps.png", tmp_path / "steps.json"
    result = CliRunner().invoke(app, ["trace", "--save", str(picture), "--perfetto", str(events), "--plot"])
    assert result.exit_code == 0
    assert "R3" in result.output
    from matplotlib.image import imread

    height, width, _ = imread(picture).shape
    assert width > 300 and height > 200
    assert json.loads(events.read_text())["traceEvents"]


def test_a_picture_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "--save", str(tmp_path / "none" / "steps.png")])
    assert isinstance(result.exception, ConfigError)
    assert "--save" in str(result.exception) and "cannot be written" in str(result.exception)


def test_steps_travel_through_the_stages_of_a_pipeline() -> None:
    """Every stage computes each step one tick behind the stage before,
    and what is finished comes from the last one."""
    alone = {"prompt_lens": [3], "max_tokens": 2}
    assert [line["stages"] for line in simulate(**alone, pp=3)] == [
        [0, None, None],
        [None, 0, None],
        [None, None, 0],
        [3, None, None],
        [None, 3, None],
        [None, None, 3],
    ]
    lines = list(simulate(prompt_lens=[4] * 6, max_tokens=9, budget=16, pp=2))
    for before, line in pairwise(lines):
        assert line["stages"][1] == before["stages"][0]
        assert (line["stages"][0] == line["step"]) == bool(line["num_scheduled_tokens"])
    bubbles = sum(stage is None for line in lines[2:-2] for stage in line["stages"])
    assert bubbles <= 2, "there is enough to do for both"
    for line in lines:
        for request_id in line.get("finished", ()):
            assert request_id in lines[line["stages"][1]]["num_scheduled_tokens"]
    done = sorted(request_id for line in lines for request_id in line.get("finished", ()))
    assert done == [f"R{number}" for number in range(1, 7)]
    one = [line["num_scheduled_tokens"] for line in simulate(prompt_lens=[4] * 6, max_tokens=9, budget=16)]
    total = sum(count for step in one for count in step.values())
    assert total == sum(count for line in lines for count in line["num_scheduled_tokens"].values())


def test_every_worker_has_a_row_in_perfetto_and_a_line_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    flags = ["trace", "--pp", "2", "--tp", "2", "--prompt-lens", "3,5", "--plot", "--perfetto", str(path)]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.exception
    for said in ("stage 0", "stage 1", "rank 0 (stage 0 of 2, part 0 of 2): embeds the tokens", "rank 3"):
        assert said in result.output
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == 5 and names[1] == "scheduler"
    busy = {
        pid: [(e["args"]["step"], e["ts"]) for e in events if e["pid"] == pid and e["ph"] == "X"]
        for pid in names
    }
    assert busy[2] == busy[3] and busy[4] == busy[5] == [(step, ts + 1000) for step, ts in busy[2]]


def test_too_many_workers_are_refused() -> None:
    for name in ("pp", "tp"):
        with pytest.raises(ConfigError, match=f"{name} is 0, but must be at least 1"):
            Workload(**{name: 0})


FAMILIES = [
    "--prompt-lens",
    "40,40,40,60",
    "--prefix-len",
    "32",
    "--families",
    "1,1,2,2",
    "--block-size",
    "8",
]


def test_the_prefix_cache_is_drawn_as_a_tree() -> None:
    """Of two families with two requests each; a family has its prefix once."""
    done = run_command(*FAMILIES, "--budget", "64", "--arrivals", "0,3,5,9", "--tree")
    assert done.stdout.splitlines() == [
        "prefix cache",
        "├── 32 tokens, 4 blocks, unused for 1 step",
        "│   ├── 24 tokens, 3 blocks, unused for 1 step",
        "│   └── 8 tokens, 1 block, unused for 5 steps",
        "└── 32 tokens, 4 blocks, unused for 7 steps",
        "    ├── 8 tokens, 1 block, unused for 7 steps",
        "    └── 8 tokens, 1 block, unused for 10 steps",
    ]
    arrivals = ["--budget", "64", "--arrivals", "0,1,2,3", "--max-tokens", "6"]
    done = run_command(*FAMILIES, *arrivals, "--tree", "--tree-after", "3")
    assert [line.lstrip("│├└─ ") for line in done.stdout.splitlines()] == [
        "prefix cache",
        *("32 tokens, 4 blocks, 2 requests", "8 tokens, 1 block, 1 request", "8 tokens, 1 block, 1 request"),
        *(
            "32 tokens, 4 blocks, 2 requests",
            "8 tokens, 1 block, 1 request",
            "24 tokens, 3 blocks, 1 request",
        ),
    ]


def test_a_policy_serves_a_family_while_its_prefix_is_cached() -> None:
    """Two families take turns, and the cache has room for one of them."""
    workload = {
        "prompt_lens": [330] * 6, "prefix_len": 320, "families": [1, 2] * 3, "block_size": 8, "num_blocks": 43,
        "max_num_seqs": 1, "max_tokens": 2, "budget": 400, "arrivals": [0, 1, 1, 1, 1, 1],
    }  # fmt: skip

    def order(policy: str) -> tuple[list[str], int]:
        steps = list(simulated_steps(Workload(**workload, policy=policy)))
        names = [name for step in steps for name in step.num_scheduled_tokens]
        return list(dict.fromkeys(names)), sum(step.num_tokens for step in steps)

    assert order("fcfs") == (["R1", "R2", "R3", "R4", "R5", "R6"], 6 * 331)
    assert order("response-ratio") == (["R1", "R3", "R5", "R2", "R4", "R6"], 2 * 331 + 4 * 11)
