"""Prompts files: forms, ids, limits, rewards on text, and errors with line numbers."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.data.conftest import CHAT_TEMPLATE, save_tokenizer
from tests.rl.rollouts import rollout_of
from treering.errors import ConfigError, InputError
from treering.rl.tasks.prompts_file import PromptsFile
from treering.rl.tasks.task import Prompt, prompt_id_of
from treering.rl.tasks.text_reward import WeightedReward

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"chat_template": "SYSTEM " + CHAT_TEMPLATE, "eos_token": "<|endoftext|>"}
    return save_tokenizer(tmp_path_factory.mktemp("chat"), SPECIAL, **settings)


@pytest.fixture(scope="module")
def markerless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without chat markers, whose end of text is an object with settings."""
    end = {"content": "</s>", "lstrip": False}
    return save_tokenizer(tmp_path_factory.mktemp("markerless"), ["</s>"], eos_token=end)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def write(file: Path, *records: object) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def measured(prompt: Prompt, text: str) -> float:
    return float(len(text)) + (prompt.answer is None)


OWN = f"{__name__}:measured"


def text_of(task: PromptsFile, prompt: Prompt, tokenizer: Path) -> str:
    return Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(
        prompt.tokens.tolist(), skip_special_tokens=False
    )


HI = "<|im_start|>user\nHi?<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "record", "expected"),
    [
        ("plain", {"prompt": "Hi?"}, f"{HI}<|im_start|>assistant\n"),
        ("plain", {"question": "Hi?"}, f"{HI}<|im_start|>assistant\n"),
        ("plain", {"prompt": "Hi?", "question": "no"}, f"{HI}<|im_start|>assistant\n"),
        (
            "plain",
            {"prompt": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi?"}]},
            f"<|im_start|>system\nBe<|im_end|>\n{HI}<|im_start|>assistant\n",
        ),
        ("hf", {"prompt": "Hi?"}, f"SYSTEM {HI}<|im_start|>assistant\n"),
        ("raw", {"prompt": "Hi?"}, "Hi?"),
        ("raw", {"prompt": [{"role": "user", "content": "a "}, {"role": "user", "content": "b"}]}, "a b"),
    ],
)
def test_a_prompt_ends_where_the_policy_begins(
    file: Path, tokenizer: Path, template: str, record: object, expected: str
) -> None:
    task = PromptsFile(write(file, record), tokenizer=tokenizer, reward=OWN, template=template)  # type: ignore[arg-type]
    assert text_of(task, task.prompts[0], tokenizer) == expected
    assert task.prompts[0].tokens.dtype == np.int32


def test_prompts_take_the_template_of_their_tokenizer_where_it_has_one(
    file: Path, tokenizer: Path, markerless: Path
) -> None:
    write(file, {"prompt": "the agent"})
    task = PromptsFile(file, tokenizer=tokenizer, reward=OWN)
    assert text_of(task, task.prompts[0], tokenizer).startswith("SYSTEM ")
    assert task.form_note == f"chats are rendered by the chat template of {tokenizer}"
    with pytest.raises(ConfigError, match="are single tokens, and"):
        PromptsFile(file, tokenizer=markerless, reward=OWN)
    assert PromptsFile(file, tokenizer=markerless, reward=OWN, template="raw").form_note is None


def test_every_field_of_a_prompt_is_a_column_as_it_stands_and_its_answer_one_too(file: Path, tokenizer: Path) -> None:
    first = {"prompt": "a", "answer": 3, "unit": {"name": "kg", "factors": [0.5]}, "level": 1.5, "id": "x"}
    second = {"prompt": "b", "reward_model": {"ground_truth": "4"}, "answer": None, "data_source": "sums"}
    prompts = PromptsFile(write(file, first, second), tokenizer=tokenizer, reward=OWN).prompts
    assert [prompt.columns for prompt in prompts] == [first, {**second, "answer": "4"}]
    again = pickle.loads(pickle.dumps(prompts[0].columns))
    assert again == first


def test_answers_and_names_are_those_of_the_file(file: Path, tokenizer: Path) -> None:
    write(
        file,
        {"prompt": "a", "answer": "x", "prompt_id": "first"},
        {"prompt": "b", "answer": 18, "task_id": 0},
        {"prompt": "c", "answer": 0.5, "id": "third", "prompt_id": None, "other": 1},
        {"prompt": "d"},
    )
    prompts = PromptsFile(file, tokenizer=tokenizer, reward=OWN).prompts
    assert [prompt.answer for prompt in prompts] == ["x", "18", "0.5", None]
    assert [prompt.prompt_id for prompt in prompts] == ["first", 0, "third", prompt_id_of(prompts[3].tokens)]


def test_limits_leave_out_what_is_too_long_or_too_much(file: Path, tokenizer: Path) -> None:
    write(file, *({"prompt": "z" * length} for length in (5, 30, 6, 31, 7)))

    def lengths(**limits: int) -> tuple[list[int], int]:
        task = PromptsFile(file, tokenizer=tokenizer, reward=OWN, template="raw", **limits)
        return [prompt.tokens.size for prompt in task.prompts], task.num_overlong

    assert lengths() == ([5, 30, 6, 31, 7], 0)
    assert lengths(max_prompt_tokens=30) == ([5, 30, 6, 7], 1)
    assert lengths(max_prompt_tokens=29) == ([5, 6, 7], 2)
    assert lengths(max_prompt_tokens=29, max_prompts=2) == ([5, 6], 1)
    assert lengths(max_prompts=9) == lengths()


def test_prompts_with_equal_tokens_are_kept_once_and_counted(file: Path, tokenizer: Path) -> None:
    write(file, {"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "a", "answer": "2"})
    task = PromptsFile(file, tokenizer=tokenizer, reward=OWN)
    assert ([prompt.answer for prompt in task.prompts], task.num_duplicates) == (["1", None], 1)


def test_a_closing_stop_string_is_not_part_of_the_text(file: Path, markerless: Path) -> None:
    task = PromptsFile(write(file, {"prompt": "a"}), tokenizer=markerless, reward=OWN, template="plain")
    ids = PromptsFile(write(file, {"prompt": "abc<|im_end|>"}), tokenizer=markerless, reward=OWN, template="raw")
    assert task.reward(task.prompts[0], rollout_of(ids.prompts[0].tokens)).reward == 3 + 1


def test_a_folder_without_settings_ends_texts_only_at_the_chat_marker(
    file: Path, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    task = PromptsFile(write(file, {"prompt": "a"}), tokenizer=tmp_path / "bare", reward=OWN)
    assert task.stop_tokens == (2,)
    (tmp_path / "bare" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is a JSON object"):
        PromptsFile(file, tokenizer=tmp_path / "bare", reward=OWN)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "a line must be a JSON object, got list"),
        ("{", "a line must be one JSON object"),
        ("{}", "needs prompt or question, got the keys none; add one"),
        ('{"text": "a", "id": 3}', "got the keys text, id; rename text, if that is the prompt"),
        ('{"prompt": 3}', "must be text, got 3"),
        ('{"question": ["a"]}', r"a question must be text, got \['a'\]"),
        ('{"prompt": ""}', "a prompt must hold text, got ''"),
        ('{"prompt": []}', "at least one message"),
        ('{"prompt": [{"content": "a"}]}', r"messages\[0\] needs a role"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', "ends before the policy's turn"),
        ('{"prompt": "a", "answer": [1]}', r"an answer must be text or a number, got \[1\]"),
        ('{"prompt": "a", "answer": true}', "an answer must be text or a number, got True"),
        ('{"prompt": "a", "id": 1.5}', "id is text or an integer, got 1.5"),
        ('{"prompt": "a", "prompt_id": ""}', "prompt_id is text or an integer, got ''"),
        ('{"prompt": "a", "task_id": true}', "task_id is text or an integer, got True"),
        ('{"prompt": "b", "id": "good"}', "distinct ids, got 'good' again"),
        ('{"prompt": "\\ud800"}', "valid Unicode"),
        ('{"prompt": "a", "answer": "\\ud83d"}', "must be valid Unicode"),
        ('{"prompt": "a", "prompt_id": "\\ud83d"}', "must be valid Unicode"),
    ],
)
def test_a_bad_line_is_named(file: Path, tokenizer: Path, line: str, message: str) -> None:
    good = '{"prompt": "a", "id": "good"}\n\n'
    file.write_text(f"{good}{line}\n{good}")
    with pytest.raises(InputError, match=rf"prompts\.jsonl:3: .*{message}"):
        PromptsFile(file, tokenizer=tokenizer, reward=OWN)


def test_answers_are_checked_against_the_reward_by_line(file: Path, tokenizer: Path) -> None:
    write(file, {"prompt": "a", "answer": "1"}, {"prompt": "b"})
    with pytest.raises(InputError, match=r"prompts\.jsonl:2: the reward exact_answer needs an answer, got None"):
        PromptsFile(file, tokenizer=tokenizer, reward="exact_answer")


def test_settings_that_cannot_be_are_refused(file: Path, tmp_path: Path, tokenizer: Path) -> None:
    write(file, {"prompt": "a" * 20})
    with pytest.raises(ConfigError, match="one of auto, plain, hf, raw, got 'chatml'"):
        PromptsFile(file, tokenizer=tokenizer, reward=OWN, template="chatml")  # type: ignore[arg-type]
    for name in ("max_prompts", "max_prompt_tokens"):
        with pytest.raises(ConfigError, match=f"{name} is at least 1, got 0"):
            PromptsFile(file, tokenizer=tokenizer, reward=OWN, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least one prompt that fits, got 0 and 1 of more than max_prompt_tokens=3"):
        PromptsFile(file, tokenizer=tokenizer, reward=OWN, max_prompt_tokens=3)
    with pytest.raises(InputError, match="cannot be read"):
        PromptsFile(tmp_path / "none.jsonl", tokenizer=tokenizer, reward=OWN)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("0.1234567890123456789", "0.1234567890123456789"),
        ("2.50", "2.50"),
        ("1" + "0" * 400, "1" + "0" * 400),
        ("-12345678901234567890", "-12345678901234567890"),
    ],
)
def test_an_answer_that_is_a_number_keeps_its_digits(file: Path, tokenizer: Path, written: str, answer: str) -> None:
    file.write_text(f'{{"prompt": "a", "answer": {written}}}\n')
    [prompt] = PromptsFile(file, tokenizer=tokenizer, reward=OWN).prompts
    assert prompt.answer == answer


@pytest.mark.parametrize(
    "fields",
    [
        {"reward_model": {"style": "rule", "ground_truth": "Basel"}},
        {"ground_truth": "Basel"},
        {"answer": "Basel", "ground_truth": "Basel"},
    ],
)
def test_answers_of_verl_are_read(file: Path, tokenizer: Path, fields: dict[str, object]) -> None:
    record = {"data_source": "x", "prompt": [{"role": "user", "content": "Where?"}], "extra_info": {"index": 0}}
    write(file, {**record, **fields})
    [prompt] = PromptsFile(file, tokenizer=tokenizer, reward="exact_answer").prompts
    assert prompt.answer == "Basel"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"solution": "4"}, "needs an answer, got None; .*; if solution is the answer, rename it to answer"),
        ({"label": "4"}, "if label is the answer, rename it"),
        ({"answer": "4", "ground_truth": "5"}, "answer and ground_truth hold different answers"),
        ({"ground_truth": ["4", "four"]}, "an answer must be text or a number"),
    ],
)
def test_an_answer_of_no_certain_meaning_is_refused(file: Path, tokenizer: Path, fields: object, rule: str) -> None:
    assert isinstance(fields, dict)
    write(file, {"prompt": "2+2?", **fields})
    with pytest.raises(InputError, match=rf"prompts\.jsonl:1: .*{rule}"):
        PromptsFile(file, tokenizer=tokenizer, reward="exact_answer")


def test_a_json_array_and_a_table_of_prompts_are_those_of_its_lines(tmp_path: Path, tokenizer: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra treering[datasets] is not installed")
    pyarrow = pytest.importorskip("pyarrow")
    records = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    write(tmp_path / "p.jsonl", *records)
    (tmp_path / "p.json").write_text(json.dumps(records, indent=1))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "p.parquet")
    files = [tmp_path / name for name in ("p.jsonl", "p.json", "p.parquet")]
    found = [PromptsFile(file, tokenizer=tokenizer, reward="exact_answer").prompts for file in files]
    keys = [[(one.prompt_id, one.answer, one.tokens.tolist()) for one in prompts] for prompts in found]
    assert keys[0] == keys[1] == keys[2]


def test_errors_name_a_prompt_without_an_id_by_file_and_line(file: Path, tokenizer: Path) -> None:
    write(file, {"prompt": "a", "answer": "1"}, {"prompt": "b c d e", "answer": "2"})
    task = PromptsFile(file, tokenizer=tokenizer, reward=OWN, template="raw")
    assert [prompt.where for prompt in task.prompts] == [f"{file}:1", f"{file}:2"]
    assert task.prompts[1].name == f"{task.prompts[1].prompt_id!r} ({file}:2)"
    assert Prompt(prompt_id="q", tokens=np.array([1], np.int32)).name == "'q'"


@pytest.mark.parametrize(
    ("opening", "text", "answer"),
    [
        ("<think>\n", "so 4", ""),
        ("<think>\n", "so 4</think>5", "5"),
        ("[THINK]", "so 4", ""),
        ("[THINK]", "so 5[/THINK]4", "4"),
        ("", "[THINK]so 5[/THINK]4", "4"),
        ("", "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4", "4"),
        ("", "It is 4", "It is 4"),
        ("<think></think>", "It is 4", "It is 4"),
    ],
)
def test_ready_rewards_read_the_answer_and_your_own_the_whole_response(
    file: Path, tmp_path: Path, opening: str, text: str, answer: str
) -> None:
    special = [*SPECIAL, "[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    template = CHAT_TEMPLATE.replace("assistant\\n'", f"assistant\\n' + {opening!r}")
    folder = save_tokenizer(tmp_path / "thinks", special, chat_template=template)
    write(file, {"prompt": "2+2?", "answer": "4"})
    parts = [WeightedReward(name="exact_answer"), WeightedReward(name=OWN, weight=0.0)]
    task = PromptsFile(file, tokenizer=folder, reward=parts)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(f"{text}<|im_end|>").ids
    score = task.reward(task.prompts[0], rollout_of(tokens))
    plain = text
    for token in special:
        plain = plain.replace(token, "")
    assert score.numbers == {"exact_answer": float(answer.endswith("4")), "measured": float(len(plain))}
