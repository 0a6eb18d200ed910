import gzip
import json

import numpy as np
import pytest

from treering.data import Trajectory, append_trajectories
from treering.errors import DataWarning, InputError
from treering.schedule.predict import LengthPredictor
from treering.schedule.rollout_logs import _counted, read_log
from treering.schedule.traces import predicted_steps


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def line(prompt, length, epoch=0, **more):
    return {"prompt": prompt, "epoch": epoch, "length": length, **more}


def shape(steps):
    return [list(zip(step.prompts, step.lengths.tolist(), strict=True)) for step in steps]


def test_rollouts_of_one_epoch_and_step_are_a_step(tmp_path):
    rows = [
        line("b", 5, epoch=1, step=1),
        line("a", 1, epoch=0, step=2),
        line("a", 2, epoch=0, step=1),
        line(7, 3, epoch=0, step=1),
        line("a", 4, epoch=0, step=1),
    ]
    steps = read_log(write(tmp_path / "log.jsonl", rows), num_rollouts=1)
    assert shape(steps) == [[("a", 2), ("a", 4), (7, 3)], [("a", 1)], [("b", 5)]]


def test_without_steps_an_epoch_is_cut_in_file_order_and_groups_stay_whole(tmp_path):
    rows = [line("a", 1), line("b", 2), line("c", 3), line("a", 4), line("c", 5), line("d", 6), line("b", 7, epoch=1)]
    file = write(tmp_path / "log.jsonl", rows)
    expected = [[("a", 1), ("a", 4)], [("b", 2), ("c", 3), ("c", 5)], [("d", 6)], [("b", 7)]]
    assert shape(read_log(file, num_rollouts=2)) == expected
    whole = [[("a", 1), ("a", 4), ("b", 2), ("c", 3), ("c", 5), ("d", 6)], [("b", 7)]]
    assert shape(read_log(file)) == whole


def test_prompt_tokens_are_kept_and_packed_files_read(tmp_path):
    file = tmp_path / "log.jsonl.gz"
    with gzip.open(file, "wt") as stream:
        stream.write(json.dumps(line("a", 4, prompt_tokens=9)) + "\n\n" + json.dumps(line("a", 5)) + "\n")
    [step] = read_log(file)
    assert step.num_prompt_tokens.tolist() == [9, 0]
    assert shape([step]) == [[("a", 4), ("a", 5)]]


def trajectory(task, mask, epoch, step):
    tokens = np.arange(len(mask), dtype=np.int32)
    return Trajectory(task_id=task, tokens=tokens, loss_mask=np.array(mask, bool), epoch=epoch, step=step)


def test_a_run_is_read_from_its_own_rollouts(tmp_path):
    folder = tmp_path / "run" / "rollouts"
    append_trajectories(folder / "epoch-000.jsonl", [trajectory("a", [0, 0, 1, 1, 1], 0, 1)])
    # An observation between two turns is not sampled, and a rollout without sampled tokens took no time.
    later = [trajectory("b", [0, 1, 0, 0, 1], 1, 3), trajectory("a", [0, 1], 1, 2), trajectory("a", [0, 0], 1, 2)]
    append_trajectories(folder / "epoch-001.jsonl", later)
    for path in (tmp_path / "run", folder):
        steps = read_log(path)
        assert shape(steps) == [[("a", 3)], [("a", 1)], [("b", 2)]]
        assert [step.num_prompt_tokens.tolist() for step in steps] == [[2], [1], [1]]
    assert shape(read_log(folder / "epoch-000.jsonl")) == [[("a", 3)]]


def steps_of(tmp_path, rows):
    return read_log(write(tmp_path / "log.jsonl", rows))


def test_a_step_is_predicted_from_the_steps_before_it(tmp_path):
    rows = [line("a", length, epoch=epoch) for epoch, length in enumerate([100, 200, 300])]
    rows += [line("b", 10, epoch=2), line("b", 30, epoch=2), line("b", 50, epoch=3)]
    steps = steps_of(tmp_path, rows)
    fresh = predicted_steps(steps, LengthPredictor(guess=7.0))
    # b is new in epoch 2 and predicted like a.
    assert [step.forecast.lengths.tolist() for step in fresh] == [[7.0], [100.0], [200.0] * 3, [20.0]]
    assert [step.forecast.prompts.tolist() for step in fresh] == [[0], [0], [0, 1, 1], [1]]
    late = predicted_steps(steps, LengthPredictor(guess=7.0), staleness=1)
    assert [step.forecast.lengths.tolist() for step in late] == [[7.0], [7.0], [100.0] * 3, [200.0]]


def test_later_steps_never_change_a_prediction(tmp_path):
    random = np.random.default_rng(0)
    rows = [
        line(int(p), int(n), epoch=e)
        for e in range(6)
        for p, n in zip(range(5), random.integers(1, 99, 5), strict=True)
    ]
    other = rows[:15] + [{**row, "length": 100 - row["length"]} for row in rows[15:]]
    first, second = (predicted_steps(steps_of(tmp_path, log), LengthPredictor(guess=50.0)) for log in (rows, other))
    for at in range(4):
        assert np.array_equal(first[at].forecast.lengths, second[at].forecast.lengths)
    assert not np.array_equal(first[4].forecast.lengths, second[4].forecast.lengths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a line must be one JSON object"),
        ("[1]", "a trajectory is a JSON object, got [1]"),
        ('{"epoch": 0, "length": 3}', "must have a prompt, or a task_id"),
        ('{"prompt": "a", "epoch": 0}', "length must be an integer of at least 0, got None"),
        ('{"prompt": "a", "epoch": 0, "length": 1.5}', "length must be an integer of at least 0, got 1.5"),
        ('{"prompt": "a", "epoch": 0, "length": true}', "length must be an integer of at least 0, got True"),
        ('{"prompt": "a", "length": 3}', "epoch must be an integer of at least 0, got None"),
        ('{"prompt": "a", "epoch": 0, "length": 3, "step": -1}', "step must be an integer of at least 0, got -1"),
        ('{"prompt": "a", "epoch": 0, "length": 3, "prompt_tokens": "x"}', "prompt_tokens must be an integer"),
        ('{"prompt": "a", "epoch": -1, "length": 3}', "epoch must be an integer of at least 0, got -1"),
        (f'{{"prompt": "a", "epoch": {2**31}, "length": 3}}', f"epoch must be at most {2**31 - 1}, got {2**31}"),
        (
            f'{{"prompt": "a", "epoch": 0, "length": 3, "step": {2**63}}}',
            f"step must be at most {2**31 - 1}, got {2**63}",
        ),
        (f'{{"prompt": "a", "epoch": 0, "length": {10**30}}}', "length must be at most"),
        ('{"prompt": "a", "epoch": 1' + "0" * 5000 + ', "length": 3}', "a line must be one JSON object"),
        ('{"prompt": 1.5, "epoch": 0, "length": 3}', "a prompt must be text or an integer, got 1.5"),
        ('{"prompt": true, "epoch": 0, "length": 3}', "a prompt must be text or an integer, got True"),
        ('{"task_id": "a", "epoch": 0, "messages": []}', "log token ids"),
        ('{"task_id": "a", "epoch": 0, "tokens": [1, 2], "loss_mask": [1]}', "for each of 2 tokens"),
        ('{"task_id": "a", "epoch": 0, "tokens": [1], "loss_mask": [2]}', "for each of 1 tokens"),
        ('{"task_id": "a", "epoch": 0, "tokens": [1], "loss_mask": [[]]}', "for each of 1 tokens"),
    ],
)
def test_a_bad_line_is_named_with_its_rule(tmp_path, text, message):
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(line("a", 1)) + "\n" + text + "\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_log(file)
    assert str(caught.value).startswith(f"{file}:2: ")
    assert message in str(caught.value)


def test_a_path_without_rollouts_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match=r"rollouts/epoch-\*\.jsonl, found none"):
        read_log(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="must have a rollout"):
        read_log(tmp_path / "empty.jsonl")
    write(tmp_path / "none.jsonl", [line("a", 0)])
    with pytest.raises(InputError, match="must have a rollout"):
        read_log(tmp_path / "none.jsonl")


def test_rollouts_of_other_formats_are_counted_by_their_tokens(tmp_path):
    def output(ids, *generated):
        said = {"type": "message", "role": "assistant", "content": "x", "prompt_token_ids": ids}
        return {**said, "generation_token_ids": list(generated)}

    def rollout(*items):
        asked = {"input": [{"role": "user", "content": "Hi"}]}
        return {"responses_create_params": asked, "response": {"output": [*items]}, "_ng_task_index": 4}

    file = write(tmp_path / "log.jsonl", [rollout(output([1, 2], 3, 4), output([1, 2, 9], 5))])
    with pytest.raises(InputError, match=r"log\.jsonl:1: a rollout needs an epoch or a step .* got neither"):
        read_log(file)
    dump = write(tmp_path / "verl.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 3}])
    with pytest.raises(InputError, match=r"verl\.jsonl:1: a rollout needs tokens .* got messages only"):
        read_log(dump, format="verl")
    labels = {"prompt_id": "a", "input_ids": [1, 2, 3], "labels": [-100, 2, 3], "step": 2}
    [step] = read_log(write(tmp_path / "own.jsonl", [labels, {**labels, "labels": [-100, -100, 3]}]))
    assert (shape([step]), step.num_prompt_tokens.tolist()) == ([[("a", 2), ("a", 1)]], [1, 2])


def test_a_token_that_branches_of_a_rollout_share_counts_once():
    def branch(*tokens):
        mask = np.array([False, *[True] * (len(tokens) - 1)])
        return Trajectory(task_id="a", step=1, tokens=np.array(tokens, np.int32), loss_mask=mask)

    # The sampled tokens are 2 3, then 4 after 2, then 5 6 after 2 4.
    row = _counted([branch(1, 2, 3), branch(1, 2, 4), branch(1, 2, 4, 5, 6)], "log.jsonl:1")
    assert (row.prompt, row.step, row.length, row.num_prompt_tokens) == ("a", 1, 5, 1)


def test_a_torn_last_line_of_a_run_is_left_out_with_a_warning_and_one_elsewhere_is_refused(tmp_path):
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    file = write(folder / "epoch-000.jsonl", [line("a", 3), line("b", 4)])
    whole = file.read_text()
    file.write_text(whole + '{"prompt": "c", "ep')
    with pytest.warns(DataWarning, match=f"{file}:3: the last line is torn"):
        assert shape(read_log(tmp_path / "run")) == [[("a", 3), ("b", 4)]]
    with pytest.raises(InputError, match=f"{file}:3: a line must be one JSON object"):
        read_log(file)
    file.write_text('{"prompt": "c", "ep\n' + whole)
    with pytest.raises(InputError, match=f"{file}:1: a line must be one JSON object"):
        read_log(tmp_path / "run")
