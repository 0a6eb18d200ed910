"""The configuration of `treering train`: defaults equal those of its records, contradictions are refused by name."""

import re
from pathlib import Path

import pytest

from treering.config import RlConfig, load
from treering.config.engine import DraftOptions, EngineConfig
from treering.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = "rl.num_steps=20"
PROMPTS = ("task.kind=prompts", "task.file=p.jsonl", "task.tokenizer=t")
JUDGE = ("task.judge.url=http://127.0.0.1:8000/v1", "task.judge.model=m")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(RlConfig, None, overrides)
    return str(caught.value)


def test_an_end_is_all_that_a_configuration_needs() -> None:
    config = load(RlConfig, None, [STEPS])
    assert (config.task.kind, config.history.drafts, config.rl.layout) == ("sums", "on", "tree")
    assert config.run.dir == Path("runs/train")
    assert "neither rl.num_epochs nor rl.num_steps" in refusal()


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("rl.grup_size=3", "rl.group_size"),
        ("group_size=3", "rl.group_size"),
        ("rl.temperature=1.0", "sampling.temperature"),
        ("rl.learning_rate=1.0", "optim.learning_rate"),
        ("histroy=3", "history"),
        ("engine.max_batches=3", "engine.max_batch"),
        ("rl.max_new_tokens=3", "sampling.max_tokens"),
        ("task.judge.mode=m", "task.judge.model"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(override: str, near: str) -> None:
    key = override.partition("=")[0]
    assert f"unknown key '{key}'; did you mean '{near}'?" in refusal(STEPS, override)


def test_a_name_of_another_library_is_refused_with_ours() -> None:
    assert "did you mean 'rl.group_size' (Rollouts per prompt and step)?" in refusal(STEPS, "rl.num_generations=8")
    for theirs, ours in {"rl.batch_size": "rl.prompts_per_step", "rl.beta": "rl.kl", "task.path": "task.file"}.items():
        assert f"unknown key '{theirs}'; did you mean '{ours}' (" in refusal(STEPS, f"{theirs}=1")


def test_the_limits_of_a_batch_and_of_a_rollout_are_distinguished() -> None:
    message = refusal(STEPS, "rl.max_tokens=512")
    assert "did you mean 'rl.max_batch_tokens' (Most unique tokens per micro-batch)" in message
    assert "'sampling.max_tokens' (Most tokens of a rollout, including those of an environment)" in message


def test_a_prompts_file_needs_no_tokenizer_with_a_model_folder() -> None:
    config = load(RlConfig, None, [STEPS, "task.kind=prompts", "task.file=p", "model.path=m"])
    assert config.task.tokenizer is None


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["task.file=p.jsonl"], 'kind = "sums" has no file, which belong to "prompts"'),
        (["task.reward=exact_answer"], 'kind = "sums" has no reward'),
        ([*PROMPTS, "task.max_terms=3"], 'kind = "prompts" has no max_terms, which belong to "sums"'),
        (["task.stop_tokens=[3]"], 'kind = "sums" has no stop_tokens'),
        (["task.kind=prompts"], "file is not set; set task.file"),
        (["task.kind=prompts", "task.file=p"], "needs a tokenizer, and a random model has none; set task.tokenizer"),
        ([*PROMPTS, "warmup.num_steps=3"], 'task.kind = "prompts" has none; set warmup.num_steps = 0'),
        (["optim.warmup_steps=20"], "warmup_steps must be below num_steps = 20, got 20"),
        (["optim.min_learning_rate=1e-9"], 'got schedule = "constant"'),
        (["rl.objective=distill"], 'rl.objective = "distill" needs a teacher'),
        (["teacher.path=m"], 'rl.objective = "grpo" with teacher.weight = None'),
        (["teacher.path=m", "teacher.weight=1", "runtime.workers=2"], "got runtime.workers = 2"),
        (["teacher.path=m", "rl.objective=distill", "rl.entropy_coefficient=0"], "no entropy bonus, got entropy_"),
        (["rl.normalizer=0"], "rl.normalizer: one of token_mean, .*, or a number above 0, got 0; a number is"),
        (["rl.entropy_coefficient=-1"], "rl.entropy_coefficient: expected greater than or equal to 0"),
        (
            ["rl.objective=ppo"],
            "rl.objective: an objective of rollouts must be one of .*, got 'ppo'; it needs a value head",
        ),
        (["rl.layout=packed", "rl.normalizer=tree_mean"], 'one tree per task, got layout = "packed"'),
        (["model.path=m", "model.num_layers=2"], "has its own shape.*num_layers"),
        (["rl.group_size=1"], "rl.group_size: expected greater than or equal to 2"),
        (["rl.clip=[2.0, 0.2]"], "rl.clip.0: expected less than or equal to 1"),
        (["sampling.top_p=0"], "sampling.top_p: expected greater than 0"),
        (["history.min_acceptance=0"], "history.min_acceptance: expected greater than 0"),
        (["rl.staleness=1"], "got rl.staleness = 1 without any; set runtime.workers=1 or more"),
        (["runtime.trainer_ranks=2"], "runtime.workers is 0; set runtime.workers=1 or more, or start"),
        (["schedule=two_tier"], "schedule"),
        (["task.kind=verifiers", "task.tokenizer=t"], "needs a taskset, and task.env is not set"),
        (["task.kind=verifiers", "task.env=x"], '"verifiers" needs a tokenizer, and a random model has none'),
        (["task.env=x"], 'kind = "sums" has no env, which belong to "environment" or "verifiers"'),
        (["task.kind=environment"], "task.env is not set"),
        ([*PROMPTS, "task.reward=judge"], r"set task\.judge\.url and task\.judge\.model"),
        ([*PROMPTS, *JUDGE], r'task\.judge belongs to the reward "judge"'),
        ([*PROMPTS, *JUDGE, "task.reward=judge", "task.judge.pattern=score"], r"task\.judge\.pattern: a regular expr"),
        ([*PROMPTS, "task.reward=[]"], r"a name, or an array of tables with name and weight, got \[\]"),
        ([*PROMPTS, "task.reward=3"], "weight, got 3"),
        ([*PROMPTS, 'task.reward=[{nam = "a"}]'], "unknown key 'nam'; did you mean 'name'"),
        (["task.kind=chess"], "task.kind: expected 'sums', 'prompts', .* got 'chess'"),
        (["eval.every=2"], "an evaluation needs held-out data, and every is set without"),
        (["eval.share=0.5", 'eval.file="p.jsonl"'], "remove one of them"),
        (["eval.share=0.5", "eval.num_samples=4"], "at temperature = 0 all rollouts of a prompt are equal"),
        (['eval.file="p.jsonl"'], "reads no prompts file, got eval.file"),
        (["eval.share=0.5", "engine.kind=vllm"], 'engine.kind = "vllm"; remove \\[eval\\]'),
    ],
)
def test_settings_that_contradict_are_refused(overrides: list[str], rule: str) -> None:
    message = refusal(STEPS, *overrides)
    assert "1 problem: " in message
    assert re.search(rule, message), message


def test_drafts_need_a_source_and_each_one_once() -> None:
    assert DraftOptions(drafts="off", sources=()).sources == ()
    with pytest.raises(ConfigError, match="sources is empty; name one, or set drafts"):
        DraftOptions(sources=())
    with pytest.raises(ConfigError, match="must be distinct"):
        DraftOptions(sources=("own", "own"))


def test_the_engine_s_settings_are_those_of_the_engine() -> None:
    import inspect

    from treering.engine.torch_engine import TorchEngine

    parameters = inspect.signature(TorchEngine.__init__).parameters
    assert set(EngineConfig.model_fields) - {"kind", "verification"} == set(parameters) - {
        "self", "model", "drafter", "version", "decode", "costs", "max_prefill", "seed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.kind=vllm", "engine.backend=plain"], 'engine.kind = "vllm" has its own kernels'),
        (["engine.kind=vllm", "sampling.top_k=5"], 'rl.old_logprobs = "recomputed"'),
        (["engine.kind=vllm", "sampling.min_p=0.1"], 'rl.old_logprobs = "recomputed"'),
        (["engine.verification=exact"], 'only for engine.kind = "vllm"'),
        (["engine.kind=vllm", "rl.rehearse=on"], r"got \('rejection', 'on'\)"),
        (
            ["engine.kind=vllm", "rl.rehearse=on", "engine.verification=exact", "history.drafts=off"],
            r"got \('exact', 'off'\); set both",
        ),
    ],
)
def test_settings_of_the_other_engine_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RlConfig, None, [STEPS, *settings])


def test_vllm_takes_cuts_where_the_trainer_computes_the_log_probs_of_the_policy() -> None:
    settings = ["engine.kind=vllm", "engine.verification=exact", "sampling.top_p=0.9", "rl.old_logprobs=recomputed"]
    config = load(RlConfig, None, [STEPS, *settings])
    assert (config.engine.kind, config.rl.old_logprobs) == ("vllm", "recomputed")


@pytest.mark.parametrize("name", ["gsm8k", "sums"])
def test_each_example_is_a_valid_configuration(name: str) -> None:
    config = load(RlConfig, EXAMPLES / name / "config.toml")
    assert config.run.dir == Path("runs") / name


@pytest.mark.parametrize("value", ["[true]", "[-1]", "[1.5]", "3"])
def test_stop_tokens_are_texts_and_ids(value: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.stop_tokens"):
        load(RlConfig, None, [STEPS, *PROMPTS, f"task.stop_tokens={value}"])
