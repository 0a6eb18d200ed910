from benchmarks.draft.histories import Plan, plans

from tests.benchmarks.draft.recordings import recording


def sources(plan: Plan) -> dict[int, list[int]]:
    return {int(rollout): plan.sources(number).tolist() for number, rollout in enumerate(plan.order)}


def pools(plan: Plan) -> dict[int, list[int]]:
    return {int(rollout): plan.pools[wave].tolist() for rollout, wave in zip(plan.order, plan.waves, strict=True)}


def test_siblings_are_the_samples_of_earlier_waves() -> None:
    found = recording([("a", [1], "1"), ("b", [2], "1"), ("a", [3], "1"), ("a", [4], "1")])
    before = plans(found)["siblings"]
    assert sources(before) == {0: [], 1: [], 2: [0], 3: [0, 2]}
    assert pools(before) == {0: [], 1: [], 2: [0, 1], 3: [0, 1, 2]}
    assert before.order.tolist() == [0, 1, 2, 3]
    none = plans(found)["none"]
    assert sources(none) == pools(none) == {0: [], 1: [], 2: [], 3: []}
    assert "earlier" not in plans(found)


def test_earlier_is_every_tasks_previous_generation_and_siblings_stay_in_their_own() -> None:
    tasks = ["a", "a", "b", "a", "a", "b", "a"]
    found = recording([(task, [i], "1") for i, task in enumerate(tasks)], epochs=[0, 0, 0, 1, 1, 2, 2])
    earlier = plans(found)["earlier"]
    assert sources(earlier) == {3: [0, 1], 4: [0, 1], 5: [2], 6: [3, 4]}
    assert pools(earlier) == {3: [0, 1, 2], 4: [0, 1, 2], 5: [2, 3, 4], 6: [2, 3, 4]}
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
        other = set(found.prompts[own].tolist())
        assert other != {int(found.prompts[rollout])}
        if other:
            seen[int(found.prompts[rollout])] = other.pop()
    assert sorted(seen.values()) == [0, 1, 2]


def test_recent_are_every_tasks_last_three_generations_where_some_task_has_two() -> None:
    found = recording([(task, [i], "1") for i, task in enumerate("ab" * 8)], epochs=[i // 2 for i in range(16)])
    recent = plans(found)["recent"]
    assert sources(recent) == {i: list(range(max(i - 6, i % 2), i, 2)) for i in range(2, 16)}
    assert "recent" not in plans(recording([("a", [1], "1"), ("a", [2], "1")], epochs=[0, 1]))
