from benchmarks.pipe.schedules import cases, command_of, measure

from treering.cli.simulate.cases import SimulateOptions


def test_each_case_is_a_command_of_its_own():
    commands = [command_of(options) for options in cases()]
    # Four sizes with three laws, staleness 0 and three stabilities of each law; two sizes with five controls.
    assert len(commands) == len(set(commands)) == 4 * (3 + 1 + 3 * 3) + 2 * 5
    assert "treering simulate --rollouts 1024 --slots 64 --staleness 0 --seeds 5" in commands


def test_a_case_reports_every_policy_under_the_command_that_a_user_would_type():
    options = SimulateOptions(num_workers=2, num_slots=4, num_rollouts=8, num_seeds=2, lengths="constant:50")
    report = measure(options)
    assert report["command"] == "treering simulate --workers 2 --rollouts 8 --slots 4 --lengths constant:50 --seeds 2"
    by_policy = {row["policy"]: row for row in report["policies"]}
    assert {"sync", "fifo", "histopipe"} <= by_policy.keys()
    assert report["lower_bound_s"] == by_policy["histopipe"]["bound_s"]
    assert by_policy["sync"]["speedup_over_sync"] == 1.0
