"""`treering bench`: what is printed, written and refused; what is measured is tested in `tests/benchmarks`."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import benchmarks.draft.bench
import benchmarks.draft.drafters.arctic
import benchmarks.engine.bench
import benchmarks.tree.bench
import numpy as np
import pytest
from benchmarks.tree.cases import star
from rich.console import Console

from treering.cli import bench, bench_progress
from treering.data import Message, Trajectory, write_trajectories
from treering.errors import InputError, TreeringError, UnsupportedError


def test_the_command_prints_one_json_object_and_writes_the_same_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.tree.bench, "published_cases", lambda: [star(prompt=9, response=4, group=3)])
    monkeypatch.setattr(benchmarks.tree.bench, "find_peers", list)
    bench.run(name="tree", json_output=True, out=tmp_path / "tree.json", runs=1, only="star")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((tmp_path / "tree.json").read_text())
    assert [case["flat_tokens"] for case in json.loads(printed.out)["cases"]] == [39]
    assert "make peers" in " ".join(printed.err.split())


def test_the_table_shows_each_case_with_its_share_of_the_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    numbers = count(1)
    cases = [
        {"case": name, "flat_tokens": 1234, "unique_tokens": 617, "flop_bound": 2.0, "baseline": "one_by_one"}
        | {"baseline_s": 1.5 * next(numbers), "tree_s": 1.0, "speedup": 1.5, "grad_error": 3e-7}
        | {"baselines": {"one_by_one": 1.5}, "peers": {"other": {"speedup": 1.25, "seconds": 1.2}}}
        for name in ("star", "caterpillar")
    ]
    report = {
        "cases": cases,
        "environment": {"cpu": "a cpu", "threads": 1, "runs": 5},
        "partitions": [],
        "sets": [],
        "notes": [],
    }
    monkeypatch.setattr(benchmarks.tree.bench, "measure", lambda **_: report)
    bench.run(name="tree", json_output=False, out=None)
    printed = capsys.readouterr()
    row = next(line for line in printed.out.splitlines() if "caterpillar" in line)
    assert row.split()[1:] == ["1,234", "617", "2.00x", "3.000", "1.000", "1.50x", "75%", "3e-07"]
    assert printed.out.count("other: 1.25x in 1.200 s") == 2
    assert "about 45 minutes" in printed.err


def set_report() -> dict[str, Any]:
    def result(name: str, gated: bool, overhead: float | None) -> dict[str, Any]:
        counts = {"num_tasks": 2, "num_tasks_of_set": 8, "num_branches": 14, "flat_tokens": 24302, "flop_bound": 2.5}
        counts |= {"unique_tokens": 8779, "sharing": 0.64, "mean_segment": 351.2, "token_bound": 2.77, "gated": gated}
        figures = {"baseline": "padded_batch", "baseline_s": 30.5, "tree_s": 12.25, "speedup": 2.49, "grad_error": 4e-7}
        memory = {"saved_bytes": 2_000_000, "tokens_at_peak": 20, "flat_saved_bytes": 9_900_000}
        bound = {"flop_bound_share": 0.996, "flat_tokens_at_peak": 90, "overhead": overhead}
        return {"set": name, "counts": counts} | figures | memory | bound

    facts = {"threads": 2, "max_tokens": 16384, "model": {"name": "qwen3-8x512"}}
    sets = [result("toolbench", True, None), result("text", False, None), result("no_sharing", False, 0.021)]
    environment = {"cpu": "a cpu", "threads": 1, "runs": 5, "sets": facts}
    return {"cases": [], "partitions": [], "sets": sets, "environment": environment, "notes": ["nothing else"]}


def test_the_tables_of_sets_show_the_gate_the_memory_and_the_overhead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(benchmarks.tree.bench, "measure", lambda **_: set_report())
    bench.run(name="tree", json_output=False, out=None)
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    shared = ["padded_batch", "30.50", "12.25", "2.49x", "2.50x", "100%", "100", "110", "4e-07"]
    assert ["toolbench", "*", *shared] in rows
    assert ["text", *shared] in rows
    assert ["no_sharing", *shared[:3], "+2.1%", *shared[4:]] in rows
    sample = ["2", "of", "8", "14", "24,302", "8,779", "0.64", "351", "2.77x"]
    assert ["toolbench", "*", *sample] in rows
    assert "qwen3-8x512, 2 threads" in printed.out
    assert "nothing else" in printed.err
    assert "make peers" not in printed.err


def test_options_of_the_tree_benchmark_reach_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(benchmarks.tree.bench, "measure", lambda **options: given.update(options) or set_report())
    bench.run(name="tree", json_output=True, out=None)
    assert set(given) == {"on_progress"}
    bench.run(name="tree", json_output=True, out=None, runs=2, only="star, math", full=True, tokenizer=Path("a"))
    del given["on_progress"]
    assert given == {"num_runs": 2, "only": ["star", "math"], "sample_tokens": None, "tokenizer": Path("a")}
    monkeypatch.setattr("benchmarks.engine.bench.measure", lambda **_: pytest.fail("measured"))
    for option in ({"only": "star"}, {"full": True}, {"tokenizer": Path("a")}):
        with pytest.raises(InputError, match=f"--{next(iter(option))} belongs to `treering bench tree`"):
            bench.run(name="engine", json_output=True, out=None, **option)


def test_progress_off_a_terminal_is_a_line_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(bench_progress.time, "monotonic", lambda: now)
    with bench_progress.BenchProgress(Console(stderr=True)) as progress:
        for seconds, words, done in (
            (500.0, "a case", None),
            (1000.0, "math", 0.0),
            (1060.0, "math: one_by_one done", 0.1),
            (1120.0, "math: tree done", 0.2),
            (1150.0, "text", 0.25),
            (1300.0, "text: tree done", 0.9),
        ):
            now = seconds
            progress.tell(words, done)
    # The share grew by 0.1 a minute from 1000 s on; from 1300 s on 0.1 is left of what took 300 s for 0.9.
    assert capsys.readouterr().err.splitlines() == [
        "math, 0%",
        "math: tree done, 20%, about 8 min left",
        "text: tree done, 90%, less than a minute left",
    ]


def engine_report() -> dict[str, Any]:
    def speed(side: str, num_threads: int, cache: str | None, tokens_per_s: float) -> dict[str, Any]:
        return {"setting": {"side": side, "num_threads": num_threads, "cache": cache}, "tokens_per_s": tokens_per_s}

    def drafted(tokens_per_s: float, ratio: float, num_differing: int) -> dict[str, Any]:
        rates = {"tokens_per_forward": 3.25, "acceptance": 0.75, "drafted_per_forward": 4.5}
        ratios = {"ratio": ratio, "ratio_to_each": 1.25 * ratio}
        return {"tokens_per_s": tokens_per_s, "num_differing": num_differing} | ratios | rates

    each = {"each_tokens_per_s": 4800.0, "each_ratio": 1.25}
    plain = {"generate_tokens_per_s": 1500.0, "plain_tokens_per_s": 6000.0, "num_rollouts": 128} | each
    controls = {"another": drafted(5400, 0.9, 1), "none": drafted(6600, 1.1, 0)}
    pairs = {"ratio": 0.985, "low": 0.91, "high": 1.046, "num_pairs": 15, "drafted_per_forward": 0.25}
    flip = {"num_rollouts": 128, "num_differing": 3, "num_compared": 4321, "batch_size": 16, "change": "batch"}
    facts = {"num_parameters": 1_540_000, "prompt_length": 32, "response_length": 64}
    return {
        "speed": [
            {"batch_size": 16, "ratio": 2.4}
            | {"generate": speed("generate", 2, "static", 3210.4), "engine": speed("engine", 1, None, 7704.9)}
        ],
        "drafting": [
            {"batch_size": 4, "drafting": drafted(12000, 2.0, 0), "controls": {}} | plain,
            {"batch_size": 8, "drafting": drafted(9000, 1.5, 0), "controls": controls} | plain,
        ],
        "controls": {"creative": pairs | {"num_differing": 2, "num_rollouts": 96}},
        "flips": [{"dtype": "bfloat16", "backend": "plain on cpu"} | flip],
        "environment": {
            "cpu": "a cpu",
            "runs": 5,
            "speed": facts,
            "drafting": facts | {"accuracy": 0.41, "num_prompts": 16, "group_size": 8},
        },
    }


def test_the_engines_tables_show_every_row_and_a_loss_like_a_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("benchmarks.engine.bench.measure", lambda **_: engine_report())
    bench.run(name="engine", json_output=False, out=None)
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["16", "3,210", "static", "cache,", "2", "threads", "7,705", "1", "thread", "2.40x"] in rows
    rates = ["3.25", "75%", "4.50"]
    assert ["4", "own", "1,500", "6,000", "12,000", "2.00x", *rates, "0/128"] in rows
    assert ["8", "own", "1,500", "6,000", "9,000", "1.50x", *rates, "0/128"] in rows
    assert ["4", "4,800", "6,000", "1.25x", "12,000", "2.50x"] in rows
    assert ["8", "another", "1,500", "6,000", "5,400", "0.90x", *rates, "1/128"] in rows
    assert ["8", "none", "1,500", "6,000", "6,600", "1.10x", *rates, "0/128"] in rows
    assert ["creative", "0.98x", "0.91x", "1.05x", "15", "0.25", "2/96"] in rows
    assert ["bfloat16", "plain", "on", "cpu", "batch", "of", "16", "3", "of", "128", "3", "in", "4,321"] in rows
    assert "1.54 M" in printed.out
    assert "a cpu, median of 5" in printed.out


def test_the_engines_json_is_alone_on_stdout_and_the_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        benchmarks.engine.bench, "measure", lambda **settings: given.update(settings) or engine_report()
    )
    bench.run(name="engine", json_output=True, out=tmp_path / "engine.json", runs=3)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == engine_report() == json.loads((tmp_path / "engine.json").read_text())
    assert given["num_runs"] == 3
    assert "minutes" in printed.err


def test_bad_arguments_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmarks.tree.bench, "measure", lambda **_: pytest.fail("measured"))
    with pytest.raises(InputError, match="--runs must be at least 1, got 0"):
        bench.run(name="tree", json_output=True, out=None, runs=0)
    with pytest.raises(InputError, match="--out needs an existing folder"):
        bench.run(name="tree", json_output=True, out=tmp_path / "absent" / "tree.json")


def test_a_package_without_its_repository_says_where_benchmarks_are(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="benchmarks come with the repository"):
        bench.load_benchmark("engine", checkout=tmp_path)


def draft_report(*, control: str | None = None, predicted: bool = False) -> dict[str, Any]:
    def row(drafter: str, history: str, tokens: float, **more: Any) -> dict[str, Any]:
        rates = {"tokens_per_step": tokens, "drafted_per_step": 4.5, "precision": 0.75, "us_per_row": 3.25}
        more |= {"predicted_speedup": 1.5} if predicted else {}
        return {"drafter": drafter, "history": history, "bytes_per_token": 24.4} | rates | more

    rows = [
        row("none", "none", 1.0),
        row("arctic", "siblings", 3.5, config={"scope": "global", "draft": "tree", "depth": 64}),
        row("treering", "siblings", 4.25, ratio_to_best_arctic=1.2143),
    ]
    if control is not None:
        rows.append(row("treering", "earlier", 2.0, control=control))
    facts = {"cpu": "a cpu", "num_sampled_tokens": 12345, "num_rollouts": 73, "num_tasks": 8}
    bins = [{"num_drafted": 1234, "estimate": 0.521, "accepted": 0.498}]
    tables = {"none": [], "siblings": bins}
    report = {"file": "rollouts.jsonl", "drafters": rows, "notes": ["one was left out"], "environment": facts}
    return report | {"reliability": tables}


def test_the_draft_tables_show_each_history_the_best_drafter_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(
        benchmarks.draft.bench, "measure", lambda **_: draft_report(control="shuffled_age", predicted=True)
    )
    bench.run(name="draft", json_output=False, out=None, file=Path("rollouts.jsonl"))
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    rates = ["4.50", "75%", "3.2", "24", "1.50x"]
    ours, theirs = ["treering", "4.25", *rates], ["arctic", "global", "tree", "64", "3.50", *rates]
    assert rows.index(["history:", "siblings"]) < rows.index(ours) < rows.index(theirs)
    assert ["history:", "earlier,", "shuffled", "age"] in rows
    assert rows.index(theirs) < rows.index(["treering", "/", "best", "Arctic:", "1.214"])
    assert rows.index(theirs) < rows.index(["estimates", "of", "treering,", "history:", "siblings"])
    assert ["0.521", "0.498", "1,234"] in rows
    assert "estimates of treering, history: none" not in printed.out
    assert "12,345 sampled tokens of 73 rollouts, 8 tasks" in printed.out
    assert "one was left out" in printed.err
    monkeypatch.setattr("benchmarks.draft.bench.measure", lambda **_: draft_report())
    bench.run(name="draft", json_output=False, out=None, file=Path("rollouts.jsonl"))
    assert "speedup" not in capsys.readouterr().out


def test_options_of_the_draft_benchmark_reach_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("benchmarks.draft.bench.measure", lambda **options: given.update(options) or draft_report())
    file = Path("rollouts.jsonl")
    bench.run(name="draft", json_output=True, out=None, file=file)
    assert set(given) == {"on_progress", "on_note", "file"}
    options: dict[str, Any] = {"tokenizer": Path("a"), "max_draft": 3, "siblings": "before", "cost": Path("c")}
    options |= {"batch": 2, "file": file, "match_drafts": 4.5}
    bench.run(name="draft", json_output=True, out=None, drafters="naive, treering", limit_tokens=0, **options)
    del given["on_progress"], given["on_note"]
    assert given == options | {"drafters": ["naive", "treering"], "limit_tokens": None}
    with pytest.raises(InputError, match="got no file: name a trajectory file"):
        bench.run(name="draft", json_output=True, out=None)
    for option in ({"runs": 3}, {"only": "star"}, {"full": True}):
        with pytest.raises(InputError, match=f"--{next(iter(option))} belongs to .*, got it for draft: leave it out"):
            bench.run(name="draft", json_output=True, out=None, file=file, **option)  # type: ignore[arg-type]
    monkeypatch.setattr("benchmarks.engine.bench.measure", lambda **_: pytest.fail("measured"))
    others = {"file": file, "drafters": "naive", "max_draft": 3, "limit_tokens": 0, "siblings": "before", "batch": 2}
    others |= {"match_drafts": 4.5}
    for name, value in others.items():
        words = "FILE" if name == "file" else f"--{name.replace('_', '-')}"
        with pytest.raises(InputError, match=f"{words} belongs to `treering bench draft`"):
            bench.run(name="engine", json_output=True, out=None, **{name: value})


@pytest.mark.parametrize("is_installed", [True, False])
def test_bad_input_of_the_draft_benchmark_is_refused_with_nothing_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, is_installed: bool
) -> None:
    monkeypatch.setattr(benchmarks.draft.drafters.arctic, "is_installed", lambda: is_installed)
    file, messages, costs = (tmp_path / name for name in ("rollouts.jsonl", "messages.jsonl", "costs.json"))
    write_trajectories(file, [Trajectory(task_id="a", tokens=np.array([1, 2], np.int32))])
    write_trajectories(messages, [Trajectory(task_id="a", messages=(Message(role="assistant", content="x"),))])
    costs.write_text('{"num_tokens": [1], "seconds": [NaN]}')
    for options, words in (
        ({"file": tmp_path / "absent.jsonl"}, "absent.jsonl"),
        ({"file": messages}, "--tokenizer"),
        ({"file": messages, "tokenizer": tmp_path / "none"}, "none"),
        ({"drafters": "arctic,best"}, "got best"),
        ({"max_draft": 65}, "at most 64"),
        ({"match_drafts": float("nan")}, "got nan"),
        ({"cost": costs}, "seconds of a pass are finite"),
    ):
        given: dict[str, Any] = {"file": file} | options
        with pytest.raises(TreeringError, match=words):
            bench.run(name="draft", json_output=True, out=None, **given)
        assert capsys.readouterr() == ("", "")


def test_the_draft_benchmark_announces_the_wait_for_arctic_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rollouts.jsonl"
    write_trajectories(file, [Trajectory(task_id="a", tokens=np.array([1, 2], np.int32))])
    monkeypatch.setattr(benchmarks.draft.drafters.arctic, "is_installed", lambda: False)
    bench.run(name="draft", json_output=True, out=None, file=file, drafters="naive")
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match="got arctic alone"):
        bench.run(name="draft", json_output=True, out=None, file=file, drafters="arctic")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(benchmarks.draft.drafters.arctic, "is_installed", lambda: True)
    monkeypatch.setattr(benchmarks.draft.drafters.arctic, "replay_arctic", lambda *_: [])
    bench.run(name="draft", json_output=True, out=None, file=file, drafters="arctic")
    assert capsys.readouterr().err.splitlines() == [benchmarks.draft.bench.LONG]
