import numpy as np
from benchmarks.draft.histories import Plan, aged_plans, plans

from tests.benchmarks.draft.recordings import recording


def sources(plan: Plan) -> dict[int, list[int]]:
    return {int(rollout): plan.sources(number).tolist() for number, rollout in enumerate(plan.order)}


def pools(plan: Plan) -> dict[int, list[int]]:
    return {int(rollout): plan.pools[wave].tolist() for rollout, wave in zip(plan.order, plan.waves, strict=True)}


def test_siblings_are_the_samples_of_earlier_waves_or_all_others() -> None:
    found = recording([("a", [1], "1"), ("b", [2], "1"), ("a", [3], "1"), ("a", [4], "1")])
    before = plans(found)["siblings"]
    assert sources(before) == {0: [], 1: [], 2: [0], 3: [0, 2]}
    assert pools(before) == {0: [], 1: [], 2: [0, 1], 3: [0, 1, 2]}
    assert before.order.tolist() == [0, 1, 2, 3]
    others = plans(found, siblings="others")["siblings"]
    assert sources(others) == pools(others) == {0: [2, 3], 1: [], 2: [0, 3], 3: [0, 2]}
    assert others.prompts.tolist() == [0, 1, 2, 3]
    for siblings in ("before", "others"):
        none = plans(found, siblings=siblings)["none"]  # type: ignore[arg-type]
        assert sources(none) == pools(none) == {0: [], 1: [], 2: [], 3: []}
        assert "earlier" not in plans(found, siblings=siblings)  # type: ignore[arg-type]


def test_with_few_rows_later_tasks_see_what_ran_in_the_wave_before() -> None:
    found = recording([(task, [1], "1") for task in "abcabc"])
    plan = plans(found, num_rows=2)["siblings"]
    assert pools(plan) == {0: [], 1: [], 2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 2], 5: [0, 1, 2, 3, 4]}
    assert sources(plan) == {0: [], 1: [], 2: [], 3: [0], 4: [1], 5: [2]}


def test_earlier_is_every_tasks_previous_generation_and_siblings_stay_in_their_own() -> None:
    tasks = ["a", "a", "b", "a", "a", "b", "a"]
    found = recording([(task, [i], "1") for i, task in enumerate(tasks)], epochs=[0, 0, 0, 1, 1, 2, 2])
    earlier = plans(found)["earlier"]
    assert sources(earlier) == {3: [0, 1], 4: [0, 1], 5: [2], 6: [3, 4]}
    assert pools(earlier) == {3: [0, 1, 2], 4: [0, 1, 2], 5: [2, 3, 4], 6: [2, 3, 4]}
    assert [versions.tolist() for versions in earlier.versions] == [[0, 0, 0], [0, 0, 0], [0, 1, 1]]
    others = plans(found, siblings="others")
    assert sources(others["siblings"]) == {0: [1], 1: [0], 2: [], 3: [4], 4: [3], 5: [], 6: []}
    assert sources(others["earlier"]) == sources(earlier)
    assert sources(plans(found)["siblings"]) == {0: [], 1: [0], 2: [], 3: [], 4: [3], 5: [], 6: []}
    assert pools(plans(found)["siblings"])[6] == []


def test_in_a_wrong_task_each_tasks_rollouts_are_stored_as_those_of_another() -> None:
    found = recording([(task, [i], "1") for i, task in enumerate("aaabbbccc")])
    right, wrong = plans(found)["siblings"], plans(found)["wrong_task"]
    assert wrong.order.tolist() == right.order.tolist()
    assert pools(wrong) == pools(right)
    seen = {}
    for rollout, own in sources(wrong).items():
        assert len(own) == rollout % 3
        other = set(found.tasks[own].tolist())
        assert other != {int(found.tasks[rollout])}
        if other:
            seen[int(found.tasks[rollout])] = other.pop()
    assert sorted(seen.values()) == [0, 1, 2]


def test_a_wrong_task_whose_rollouts_have_their_own_history_gives_one_of_equal_rank() -> None:
    found = recording([(task, [i], "1") for i, task in enumerate("aaabbbccc")])
    all_plans = plans(found, siblings="others")
    right, wrong = sources(all_plans["siblings"]), sources(all_plans["wrong_task"])
    seen = {}
    for rollout, own in wrong.items():
        (other,) = set(found.tasks[own].tolist())
        assert other != int(found.tasks[rollout])
        seen[int(found.tasks[rollout])] = other
        assert own == right[3 * other + rollout % 3]
    assert sorted(seen.values()) == [0, 1, 2]


def test_a_wrong_task_of_lone_samples_has_the_earlier_ones_of_another() -> None:
    found = recording([(task, [1], "1") for task in "abcabc"], epochs=[0, 0, 0, 1, 1, 1])
    all_plans = plans(found)
    assert set(all_plans) == {"none", "earlier", "wrong_task"}
    wrong = sources(all_plans["wrong_task"])
    assert set(wrong) == {3, 4, 5}
    assert sorted(wrong.values()) == [[0], [1], [2]]
    assert all(own != [rollout - 3] for rollout, own in wrong.items())


def test_one_task_has_no_wrong_one_and_lone_samples_have_no_siblings() -> None:
    assert set(plans(recording([("a", [1], "1"), ("a", [2], "1")]))) == {"none", "siblings"}
    assert set(plans(recording([("a", [1], "1"), ("b", [2], "1")]))) == {"none"}


def test_ages_are_shuffled_over_the_same_rollouts() -> None:
    tasks = "ab" * 8
    found = recording([(task, [i], "1") for i, task in enumerate(tasks)], epochs=[i // 2 for i in range(16)])
    true, shuffled = aged_plans(found)
    assert sources(true) == sources(shuffled) == {i: list(range(max(i - 6, i % 2), i, 2)) for i in range(4, 16)}
    assert (true.control, shuffled.control) == ("true_age", "shuffled_age")
    for pool, own, others in zip(true.pools, true.versions, shuffled.versions, strict=True):
        assert own.tolist() == found.generations[pool].tolist()
        for task in (0, 1):
            is_task = found.tasks[pool] == task
            assert sorted(own[is_task]) == sorted(others[is_task])
    assert np.concatenate(true.versions).tolist() != np.concatenate(shuffled.versions).tolist()
    assert aged_plans(recording([("a", [1], "1"), ("a", [2], "1")], epochs=[0, 1])) == ()
    assert aged_plans(recording([("a", [1], "1")])) == ()
