"""Rewards of the user: where they are found, which signatures they have, and how several form one reward."""

import asyncio
import gc
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treering.errors import ConfigError, InputError
from treering.rl.tasks.ready_rewards import find_reward
from treering.rl.tasks.task import Prompt, Score
from treering.rl.tasks.text_reward import TextReward, WeightedReward, bind


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Restore the import path after a reward was found, and run in a temporary folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def prompt_with(**columns: Any) -> Prompt:
    return Prompt(prompt_id="p", tokens=np.array([1], np.int32), answer=columns.get("answer"), columns=columns)


def reward_of(source: str, *columns: str, **more: str) -> TextReward:
    """Return the bound reward `f` of a file with this source; further ones by name, with weight 1."""
    write(Path("own.py"), source)
    names = ["own.py:f", *more.values()]
    reward = TextReward([WeightedReward(name=name) for name in names] if more else names[0], [Path()])
    reward.bind(dict.fromkeys(["prompt", "answer", *columns]))
    return reward


def only(score: Score | Exception) -> float | None:
    assert isinstance(score, Score), score
    return score.reward


def test_a_file_is_looked_up_next_to_the_configuration_then_in_the_shells_folder(tmp_path: Path) -> None:
    conf, shell = tmp_path / "conf", tmp_path / "shell"
    write(shell / "a.py", "f = lambda prompt, text: 'shell'")
    write(shell / "b.py", "import beside\nf = lambda prompt, text: beside.WORD")
    write(shell / "beside.py", "WORD = 'beside'")
    folders = [conf, shell]
    assert find_reward("a.py:f", folders)(None, "") == "shell"
    write(conf / "a.py", "f = lambda prompt, text: 'conf'")
    assert find_reward("a.py:f", folders)(None, "") == "conf"
    assert find_reward("b.py:f", folders)(None, "") == "beside"
    assert find_reward(f"{shell / 'a.py'}:f", folders)(None, "") == "shell"
    with pytest.raises(ConfigError, match=rf"c\.py is not in {conf}, {shell}; check the path"):
        find_reward("c.py:f", [*folders, conf])


def test_a_module_of_these_folders_is_imported_by_its_dotted_name(tmp_path: Path) -> None:
    write(tmp_path / "conf" / "package_of_conf" / "inner.py", "def f(prompt, text):\n    return 'module'\n")
    write(
        tmp_path / "shell" / "module_of_shell.py", "def f(prompt, text):\n    import late_module as m\n    return m.X\n"
    )
    write(tmp_path / "shell" / "late_module.py", "X = 'late'")
    folders = [tmp_path / "conf", tmp_path / "shell"]
    assert find_reward("package_of_conf.inner:f", folders)(None, "") == "module"
    assert find_reward("module_of_shell:f", folders)(None, "") == "late"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(prompt, text:\n    pass", r"bad\.py:1: SyntaxError"),
        ("\nimport no_such_library", r"bad\.py:2: ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1\ny = z", r"bad\.py:2: NameError"),
        ("import sys\nsys.exit(3)", r"bad\.py:2: a task must not end the run, got SystemExit"),
        ("g = 1", r"bad\.py of 'bad\.py:f' has no such name"),
    ],
)
def test_code_that_cannot_be_imported_is_refused_with_file_and_line(source: str, message: str) -> None:
    write(Path("bad.py"), source)
    with pytest.raises(ConfigError, match=message):
        find_reward("bad.py:f")


def two(prompt: Any, text: Any) -> None: ...
def other_names(_prompt: Any, completion: Any) -> None: ...
def with_columns(prompt: Any, text: Any, unit: Any, *, level: Any = 3) -> None: ...
def with_any(prompt: Any, text: Any, **columns: Any) -> None: ...
def as_trl(completions: Any, **kwargs: Any) -> None: ...
def as_trl_with_columns(prompts: Any, completions: Any, answer: Any) -> None: ...
async def coroutine(prompt: Any, text: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "takes_group", "columns"),
    [
        (two, False, ()),
        (other_names, False, ()),
        (with_columns, False, ("unit",)),
        (with_any, False, ("answer", "unit")),
        (as_trl, True, ("prompt", "answer", "unit")),
        (as_trl_with_columns, True, ("answer",)),
        (coroutine, False, ()),
        (lambda *args: None, False, ()),
    ],
)
def test_a_signature_decides_how_a_function_is_called(
    function: Callable[..., object], takes_group: bool, columns: tuple[str, ...]
) -> None:
    bound = bind("f", function, ["prompt", "answer", "unit"])
    assert (bound.takes_group, bound.columns) == (takes_group, columns)
    assert bound.is_async == (function is coroutine)


@pytest.mark.parametrize(
    "function",
    [
        lambda text: 0,
        lambda: 0,
        lambda text, prompt: 0,
        lambda prompt, answer: 0,
        lambda answer, text: 0,
        lambda prompt, text, unknown: 0,
        lambda p, t: 0,
        lambda record, output: 0,
        lambda prompt, score: 0,
        lambda completion, solution: 0,
        lambda response, ground_truth=None: 0,
        lambda solution_str, ground_truth: 0,
        lambda prompt, label=1: 0,
        lambda x, /, y: 0,
        lambda sample, _: 0,
        lambda record, text, **columns: 0,
        lambda prompts, completions, unknown: 0,
    ],
)
def test_a_wrong_signature_is_refused_by_its_location_and_with_the_right_ones(function: Callable[..., object]) -> None:
    with pytest.raises(ConfigError) as caught:
        bind("f", function, ["prompt", "answer", "unit"])
    message = str(caught.value)
    assert message.startswith("def <lambda>(")
    assert f"own_rewards.py:{function.__code__.co_firstlineno} " in message
    right = "def reward(prompt, text), or def reward(prompts, completions)"
    columns = "needs unknown, and the prompts file has the columns prompt, answer, unit"
    assert (columns if "unknown" in inspect.signature(function).parameters else right) in message
    assert len(message.replace(__file__, "rewards.py")) <= 300


def test_columns_reach_a_reward_as_they_stand_in_the_file_and_none_where_a_prompt_has_none() -> None:
    reward = reward_of(
        "def f(prompt, text, unit, **others):\n    return {'reward': unit['n'], **others}\n", "unit", "x"
    )
    [score] = reward.scores(prompt_with(prompt="q", unit={"n": 2}, x=5), ["t"])
    assert score == Score(reward=2.0, numbers={"f/x": 5.0})


def test_trls_rewards_get_the_group_as_lists_and_chats_as_messages() -> None:
    reward = reward_of(
        "def f(prompts, completions, unit, **kwargs):\n"
        "    texts = [c if isinstance(c, str) else c[0]['role'] + c[0]['content'] for c in completions]\n"
        "    assert len(prompts) == len(unit) == len(texts)\n"
        "    return [None if t.endswith('z') else len(t) + u for t, u in zip(texts, unit)]\n",
        "unit",
    )
    assert reward.takes_groups
    assert [only(score) for score in reward.scores(prompt_with(prompt="q", unit=1), ["a", "bcz", "bcd"])] == [
        2,
        None,
        4,
    ]
    chat = prompt_with(prompt=[{"role": "user", "content": "q"}], unit=0)
    assert [only(score) for score in reward.scores(chat, ["a"])] == [len("assistanta")]


def test_trls_rewards_get_the_question_of_a_line_whose_prompt_is_null() -> None:
    reward = reward_of("def f(prompts, completions, **kwargs):\n    return [len(prompts[0])]\n")
    [score] = reward.scores(prompt_with(prompt=None, question="2+2?"), ["a"])
    assert only(score) == 4


@pytest.mark.parametrize(
    ("answer", "got"), [("[1.0]", "returned 1"), ("1.0", r"returned 1.0 \(float\)"), ("'ab'", "str")]
)
def test_a_group_reward_of_another_length_is_an_error_with_its_location(answer: str, got: str) -> None:
    scores = reward_of(f"\ndef f(completions, **kwargs):\n    return {answer}\n").scores(prompt_with(), ["a", "b"])
    for score in scores:
        with pytest.raises(InputError, match=rf"each of its 2 completions, and f at own\.py:2 .*{got}"):
            raise score  # type: ignore[misc]


def test_coroutines_of_a_group_run_at_the_same_time_in_one_loop_also_inside_of_a_loop() -> None:
    # Each call waits for the others: calls one by one would never end, and a second loop refuses the first one's
    # objects.
    reward = reward_of(
        "import asyncio\n"
        "barrier = asyncio.Barrier(3)\n"
        "async def f(prompt, text):\n"
        "    async with asyncio.timeout(60):\n"
        "        await barrier.wait()\n"
        "    if text == 'b':\n"
        "        raise ValueError('not b')\n"
        "    return len(text)\n"
    )
    assert reward.takes_groups

    async def inside() -> list[Score | Exception]:
        return reward.scores(prompt_with(), ["a", "b", "ccc"])

    for scores in (reward.scores(prompt_with(), ["a", "b", "ccc"]), asyncio.run(inside())):
        assert [str(score) if isinstance(score, Exception) else score.reward for score in scores] == [1, "not b", 3]


def test_several_rewards_are_summed_by_weight_without_those_that_abstain() -> None:
    write(
        Path("own.py"),
        "def short(prompt, text):\n    return None if text == 'no' else {'reward': 1 / len(text), 'size': len(text)}\n"
        "def ranked(completions, **kwargs):\n    return [sorted(completions).index(text) for text in completions]\n"
        "def silent(prompt, text):\n    return None\n",
    )
    parts = [("contains_answer", 1.0), ("own.py:short", 0.5), ("own.py:ranked", -2.0), ("own.py:silent", 9.0)]
    reward = TextReward([WeightedReward(name=name, weight=weight) for name, weight in parts], [Path()])
    reward.bind(["answer"])
    first, second = reward.scores(prompt_with(answer="yes"), ["yes", "no"])
    assert first == Score(
        reward=1.0 + 0.5 / 3 - 2.0, numbers={"contains_answer": 1.0, "short": 1 / 3, "short/size": 3.0, "ranked": 1.0}
    )
    assert second == Score(reward=0.0, numbers={"contains_answer": 0.0, "ranked": 0.0})
    silent = TextReward("own.py:silent", [Path()])
    silent.bind([])
    assert silent.scores(prompt_with(), ["a"]) == [Score(reward=None)]
    with pytest.raises(ConfigError, match="of different names, got exact_answer, exact_answer"):
        TextReward([WeightedReward(name="exact_answer")] * 2, [])
    with pytest.raises(ConfigError, match="got none"):
        TextReward([], [])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return undefined", r"^own\.py:3: NameError: name 'undefined'.*, text 'yes'"),
        ("return 'good'", r"^own\.py:2: a reward must be one finite number"),
        ("raise SystemExit(1)", r"^own\.py:3: a task must not end the run"),
        ("os._exit(0)", r"process crashed or ended.* \(reward own\.py:f, prompt 'p', text 'yes'\)"),
        ("os.kill(os.getpid(), 11)", r"process crashed or ended"),
    ],
)
def test_a_reward_is_tried_on_the_answer_of_a_prompt_before_a_run(body: str, message: str) -> None:
    reward = reward_of(f"import os\ndef f(prompt, text):\n    {body}\n")
    with pytest.raises(InputError, match=message):
        reward.try_on(prompt_with(answer="yes"))


def test_processes_that_a_reward_starts_in_its_trial_end_with_it_and_delay_nothing() -> None:
    reader, writer = os.pipe()
    # A pool's workers wait for more work, and keep the pipes of their parent.
    body = "if os.fork() == 0:\n        time.sleep(600)\n    return 1.0"
    reward_of(f"import os, time\ndef f(prompt, text):\n    {body}\n").try_on(prompt_with(answer="yes"), 20.0)
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_trial_calls_a_reward_once_in_a_copy_of_the_process_and_ready_ones_never(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f"open({str(log)!r}, 'a').write(f'{{os.getpid()}} {{text!r}}')"
    reward_of(f"import os\ndef f(prompt, text):\n    {body}\n").try_on(prompt_with())
    process, text = log.read_text().split()
    assert (int(process) != os.getpid(), text) == (True, "''")
    ready = TextReward("exact_answer", [])
    ready.bind([])
    ready.try_on(prompt_with())


@pytest.mark.parametrize(
    "body", ["raise ValueError('no number')", "raise KeyboardInterrupt", "os._exit(1)", "os.closerange(3, 99)"]
)
def test_what_an_empty_text_does_to_a_reward_without_an_answer_refuses_nothing_and_changes_no_process(
    body: str,
) -> None:
    reward_of(f"import os\ndef f(prompt, text):\n    {body}\n").try_on(prompt_with())
    with pytest.raises(InputError, match="NameError"):
        reward_of("def f(prompt, text):\n    return undefined\n").try_on(prompt_with())


@pytest.mark.parametrize("body", ["time.sleep(600)", "threading.Event().wait()", "asyncio.run(asyncio.sleep(600))"])
def test_a_reward_that_hangs_ends_its_trial_with_the_setting_that_bounds_it(body: str) -> None:
    reward = reward_of(f"import asyncio, threading, time\ndef f(prompt, text):\n    {body}\n")
    began_s = time.monotonic()
    with pytest.raises(
        InputError, match=r"own\.py:f took longer than runtime\.reward_time_limit_s = 0\.5 s in its trial call"
    ):
        reward.try_on(prompt_with(), 0.5)
    assert time.monotonic() - began_s < 60


def test_a_reward_is_collected_while_another_loop_runs_and_closes_its_own() -> None:
    reward = reward_of("async def f(prompt, text):\n    return 1.0\n")
    assert only(reward.scores(prompt_with(), ["a"])[0]) == 1.0
    loop = reward._runner.get_loop()

    async def collect() -> None:
        nonlocal reward
        del reward
        gc.collect()

    raised: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", raised.append)
        patch.setattr(sys, "excepthook", lambda *error: raised.append(error))
        asyncio.run(collect())
    assert (loop.is_closed(), raised) == (True, [])
