"""The end of `treering inspect`: what can be gained and why, rewards, and the next command."""

import numpy as np
import pytest

from tests.data.cache.datasets import dataset_of
from treering.cli.inspect.file_report import measure
from treering.cli.inspect.inspect_options import InspectOptions
from treering.cli.inspect.run_inspect import next_command, training_line, verdict
from treering.data import RenderedTrajectory
from treering.types import find_shape


def rendered(task, tokens, num_prompt, index=0, reward=None):
    mask = np.arange(len(tokens)) >= num_prompt
    return RenderedTrajectory(
        task_id=task,
        tokens=np.array(tokens, np.int32),
        loss_mask=mask,
        turn_ends=np.array([len(tokens)], np.int32),
        index=index,
        reward=reward,
    )


def report_of(*rows):
    return measure(dataset_of(rows, source="dir/set.jsonl"), find_shape("qwen3-8b"))


def following(report, **options):
    return next_command([report], InspectOptions(files=[], **options))


PROMPT = list(range(80))


def test_a_large_gain_is_reported_with_the_share_and_the_gain_from_prompts(tmp_path):
    # 80 of 200 tokens are computed once instead of twice; 10 of them are the prompt.
    report = report_of(rendered("a", [*PROMPT, *[1] * 20], 10, 0), rendered("a", [*PROMPT, *[2] * 20], 10, 1))
    words = verdict(report, "qwen3-8b")
    assert words.startswith(
        f"set: trees can train it at most {report.flop_bound:.2f}x as fast (qwen3-8b), because 40% of"
    )
    assert "sharing prompts alone would give 1.05x by tokens" in words
    assert following(report, tokenizer="m q") == "treering init dir/set.jsonl --model 'm q'"
    for no_model in (None, str(tmp_path)):
        assert following(report, tokenizer=no_model, why=True) == "treering init dir/set.jsonl --model MODEL"
    read_as = {"template": "plain", "format": "chat"}
    told = "treering init dir/set.jsonl --model MODEL --template plain --format chat"
    assert following(report, **read_as) == told


def test_prompts_are_named_where_they_are_nearly_all():
    report = report_of(rendered("a", [*PROMPT, 1, 2], 80, 0), rendered("a", [*PROMPT, 3, 4], 80, 1))
    assert "nearly all of them in prompts." in verdict(report, "qwen3-8b")


def test_tasks_of_their_own_are_the_reason_for_little_and_a_common_one_is_the_advice():
    report = report_of(rendered("a", [*PROMPT, 1], 80, 0), rendered("b", [*PROMPT, 2], 80, 1))
    words = verdict(report, "qwen3-8b")
    assert "at most 1.00x" in words
    assert "each of its 2 trajectories is its own task" in words
    assert f"as one task they would give {report.whole_set.flop_bound:.2f}x" in words
    assert following(report, tokenizer="m") == "treering inspect dir/set.jsonl --tokenizer m --why"
    assert following(report, why=True) == "treering inspect dir/set.jsonl --drafts"
    assert following(report, template="hf") == "treering inspect dir/set.jsonl --template hf --why"
    apart = report_of(rendered("a", [1] * 9, 3, 0), rendered("b", [2] * 9, 3, 1))
    assert "as one task" not in verdict(apart, "qwen3-8b")


def test_rewards_are_counted_by_trajectory_and_groups_of_one_reward_by_task():
    # The first trajectory becomes two sequences, as with a template that rewrites history.
    trajectories = [
        rendered("a", [1, 2], 1, 0, reward=1.0),
        rendered("a", [1, 2, 3], 1, 0, reward=1.0),
        rendered("a", [1, 4], 1, 1, reward=0.0),
        rendered("b", [5, 6], 1, 2, reward=0.5),
        rendered("b", [5, 7], 1, 3, reward=0.5),
        rendered("c", [8, 9], 1, 4, reward=0.5),
        rendered("d", [8, 9], 1, 5),
    ]
    rewards = report_of(*trajectories).rewards
    values = [1.0, 0.0, 0.5, 0.5, 0.5]
    assert (rewards.num_rewards, rewards.mean) == (5, pytest.approx(sum(values) / 5))
    assert rewards.spread == pytest.approx((sum((one - 0.5) ** 2 for one in values) / 5) ** 0.5)
    assert (rewards.groups, rewards.equal_groups) == (2, 1)
    assert "In 1 of 2 tasks all rewards are the same" in verdict(report_of(*trajectories), "qwen3-8b")


def test_trained_tokens_and_copies_are_said_by_their_rows():
    rows = [("a", [1, 2, 3, 4], 2), ("b", [1, 2, 3, 4], 2), ("a", [1, 2, 3, 4], 3), ("a", [1, 2, 3, 5], 2)]
    report = report_of(*(rendered(task, tokens, prompt, i) for i, (task, tokens, prompt) in enumerate(rows)))
    # The third row trains other tokens of the same text.
    assert (report.trained_tokens, report.copies) == (7, ((2, 1),))
    assert training_line(report) == "set: 7 of its 16 tokens are trained; 1 of 4 rows is a copy: 2 (of 1)."
    alike = report_of(*(rendered("a", [1, 2], 1, i) for i in range(7)))
    said = "6 of 7 rows are copies: 2 (of 1), 3 (of 1), 4 (of 1), 5 (of 1), 6 (of 1), ...."
    assert training_line(alike).endswith(said)
    assert training_line(report_of(rendered("a", [1, 2], 1))).endswith("; no row is a copy of another.")
