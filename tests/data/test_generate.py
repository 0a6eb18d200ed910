from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treering.data import DATA_VARIABLE, AgentSpec, data_folder, generate_trajectories
from treering.data.formats.codec import encode
from treering.errors import ConfigError

specs = st.builds(
    AgentSpec,
    num_tasks=st.integers(1, 3),
    num_trials=st.integers(1, 5),
    vocab_size=st.integers(7, 40),
    num_system_tokens=st.integers(1, 9),
    num_task_tokens=st.integers(1, 9),
    num_turns=st.integers(1, 5),
    num_action_tokens=st.integers(1, 6),
    num_observation_tokens=st.integers(1, 6),
    restart_probability=st.floats(0, 1),
    seed=st.integers(0, 99),
)


def sharing_per_task(spec: AgentSpec) -> float:
    flat, prefixes = 0, set()
    for trajectory in generate_trajectories(spec):
        ids = trajectory.tokens.tolist()
        flat += len(ids)
        # A token of a prefix tree is the path that leads to it.
        path = hash(trajectory.task_id)
        for token in ids:
            path = hash((path, token))
            prefixes.add(path)
    return 1 - len(prefixes) / flat


@settings(deadline=None)
@given(specs)
def test_every_spec_gives_all_trials_of_all_tasks_inside_the_vocabulary(spec):
    trajectories = list(generate_trajectories(spec))
    assert [(t.task_id, t.trial) for t in trajectories] == [
        (f"generated-{task}", trial) for task in range(spec.num_tasks) for trial in range(spec.num_trials)
    ]
    prompt = spec.num_system_tokens + spec.num_task_tokens + 4
    for trajectory in trajectories:
        assert 0 <= trajectory.tokens.min() <= trajectory.tokens.max() < spec.vocab_size
        assert trajectory.loss_mask.any()
        assert not trajectory.loss_mask[:prompt].any()


def test_the_agent_writes_an_actions_tokens_and_its_closing_marker_but_not_the_opening_one():
    for trajectory in generate_trajectories(AgentSpec()):
        tokens, mask = trajectory.tokens, trajectory.loss_mask
        opens = np.flatnonzero(tokens == 0)
        assert not mask[opens].any()
        assert (mask[1:] & ~mask[:-1]).nonzero()[0].tolist() == opens.tolist()
        ends = np.append(mask[:-1] & ~mask[1:], mask[-1])
        assert (tokens[ends] == 2).all()


def test_equal_specs_give_equal_trajectories_and_another_seed_others():
    first, again, other = (
        [encode(t) for t in generate_trajectories(spec)] for spec in (AgentSpec(), AgentSpec(), AgentSpec(seed=1))
    )
    assert first == again != other


@pytest.mark.parametrize("seed", range(8))
def test_sharing_lies_where_real_agent_sets_lie(seed):
    assert 0.3 < sharing_per_task(AgentSpec(num_tasks=8, seed=seed)) < 0.75


def test_what_follows_an_id_is_predictable_so_a_model_can_learn():
    followers: dict[int, set[int]] = {}
    for trajectory in generate_trajectories(AgentSpec()):
        for before, after in np.stack([trajectory.tokens[:-1], trajectory.tokens[1:]], axis=1).tolist():
            followers.setdefault(before, set()).add(after)
    # Four likely followers and the marker that closes a turn.
    assert max(len(ids) for before, ids in followers.items() if before >= 3) <= 5


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_tasks": 0}, "num_tasks must be an integer >= 1, got 0"),
        ({"vocab_size": 6}, r"vocab_size must lie in \[7, .* got 6"),
        ({"restart_probability": 1.5}, "restart_probability lies in .* got 1.5"),
    ],
)
def test_an_impossible_spec_is_refused(change, rule):
    with pytest.raises(ConfigError, match=rule):
        replace(AgentSpec(), **change)


def test_the_variable_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert data_folder() == tmp_path


def test_without_the_variable_it_is_the_shared_folder_next_to_the_current_one(tmp_path, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert data_folder() is None
    (tmp_path / "shared" / "data").mkdir(parents=True)
    folder = data_folder()
    assert folder is not None
    assert folder.resolve() == (tmp_path / "shared" / "data").resolve()
