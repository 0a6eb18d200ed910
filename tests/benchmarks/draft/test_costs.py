import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.draft.costs import read_costs, seconds_at, speedup

from treering.errors import InputError
from treering.history.budget.costs import VerifyCosts


def costs(num_tokens: list[int], seconds: list[float]) -> VerifyCosts:
    return VerifyCosts(num_tokens=np.array(num_tokens), seconds=np.array(seconds))


def test_costs_are_linear_in_between_and_go_on_with_the_last_slope() -> None:
    found = costs([2, 4, 8], [1.0, 2.0, 6.0])
    assert [seconds_at(found, n) for n in (1, 2, 3, 6, 8, 10)] == [1.0, 1.0, 1.5, 4.0, 6.0, 8.0]
    assert seconds_at(costs([4], [0.5]), 99) == 0.5


def test_a_speedup_is_tokens_per_step_over_what_a_step_costs_more() -> None:
    row = {"tokens_per_step": 3.0, "drafted_per_step": 1.0, "us_per_row": 0.0}
    found = costs([2, 4], [1.0, 1.5])
    assert speedup(found, row, 2) == pytest.approx(2.0)
    # Drafting takes 0.25 s a row: the step takes 1.5 + 2 x 0.25.
    assert speedup(found, row | {"us_per_row": 250_000.0}, 2) == pytest.approx(1.5)
    assert speedup(found, {"tokens_per_step": 1.0, "drafted_per_step": 0.0, "us_per_row": 0.0}, 2) == 1.0


def test_files_that_are_no_costs_are_refused_with_their_name(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"num_tokens": [1, 8], "seconds": [0.5, 1]}))
    assert (read_costs(file).num_tokens.tolist(), read_costs(file).seconds.tolist()) == ([1, 8], [0.5, 1.0])
    for text in (
        "{",
        "[1]",
        "7",
        '{"costs": 7}',
        '{"costs": {"num_tokens": [1]}}',
        '{"num_tokens": [1]}',
        '{"num_tokens": [1, 2], "seconds": ["a", 1]}',
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=r"costs\.json.*the lists num_tokens and seconds"):
            read_costs(file)
    for sizes, seconds in (([1, 2], [1]), ([2, 1], [1, 2]), ([], []), ([1, 2], [2, 1]), ([0], [1])):
        file.write_text(json.dumps({"num_tokens": sizes, "seconds": seconds}))
        with pytest.raises(InputError, match=r"costs\.json"):
            read_costs(file)
    file.write_text(json.dumps({"num_tokens": [1.5], "seconds": [1]}))
    with pytest.raises(InputError, match=r"costs\.json: num_tokens are whole numbers"):
        read_costs(file)
    with pytest.raises(InputError, match="absent"):
        read_costs(tmp_path / "absent")


@pytest.mark.parametrize("seconds", ["[0.5, Infinity]", "[0.5, NaN]", "[NaN, 0.5]", "[Infinity, Infinity]"])
def test_seconds_that_are_no_numbers_are_refused_when_they_are_read(tmp_path: Path, seconds: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(f'{{"num_tokens": [1, 8], "seconds": {seconds}}}')
    with pytest.raises(InputError, match=r"costs\.json: seconds of a pass are finite, got .*(inf|nan).*; measure"):
        read_costs(file)


def test_a_report_that_has_costs_is_read_as_they_are(tmp_path: Path) -> None:
    curve = {"num_tokens": [1, 8], "seconds": [0.5, 1.0]}
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"speed": [], "costs": curve}))
    found = read_costs(file)
    assert {"num_tokens": found.num_tokens.tolist(), "seconds": found.seconds.tolist()} == curve
    file.write_text(json.dumps({"speed": []}))
    with pytest.raises(InputError, match=r"engine\.json.*by itself or under costs"):
        read_costs(file)


def test_the_two_points_of_the_readme_are_costs(tmp_path: Path) -> None:
    text = Path(__file__).parents[3].joinpath("benchmarks", "README.md").read_text(encoding="utf-8")
    file = tmp_path / "costs.json"
    file.write_text(text.split("**Costs.**")[1].split("```json\n")[1].split("```")[0])
    # 10 ms of a pass, and 0.1 ms of each token.
    assert [seconds_at(read_costs(file), n) for n in (1, 51, 201)] == pytest.approx([0.0101, 0.0151, 0.0301])
