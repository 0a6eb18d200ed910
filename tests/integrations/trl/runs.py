"""Short runs of TRL's trainers on tiny models, with and without shared prefixes, and comparisons of them.

Completions are made up, the same on both sides: a sampled token could flip at a near-tie of two log-probs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import VOCAB, build

pytest.importorskip("trl", reason="TRL is not installed: make trl-test")

from datasets import Dataset
from transformers import TrainerCallback
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.integrations.words import EOS, PAD, word_tokenizer
from treering.integrations.trl import share_prefixes
from treering.ranks.sharded_state import as_whole

_ASSISTANT = "{% generation %}{{ m['content'] }} <eos>{% endgeneration %}"
_TEMPLATE = (
    "{% for m in messages %}w2 {% if m['role'] == 'assistant' %}"
    + _ASSISTANT
    + "{% else %}{{ m['content'] }}{% endif %} {% endfor %}{% if add_generation_prompt %}w2 {% endif %}"
)
COMMON = {
    "learning_rate": 0.01,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
    "seed": 3,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_steps": 3,
}
ROLLOUTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "temperature": 0.9,
}


def tokenizer() -> Any:
    made = word_tokenizer(VOCAB)
    made.chat_template = _TEMPLATE
    return made


@cache
def saved(family: str = "qwen3", seed: int = 0, **overrides: Any) -> str:
    """Return the folder of a tiny model and its tokenizer, made once a process; trainers load their reference here."""
    folder = mkdtemp(prefix="treering-trl-")
    model = build(family, seed, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, **overrides)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}


def model_and_options(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model that `saved` makes for a case, and the run's options: "lora" is an adapter's configuration."""
    options = dict(case)
    model = options.pop("model", {})
    if options.pop("lora", False):
        from peft import LoraConfig

        options["trainer_options"] = {"peft_config": LoraConfig(**LORA, task_type="CAUSAL_LM")}
    return model, options


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(3, VOCAB)}" for _ in range(count))


def prompts(num: int = 8) -> Dataset:
    rng = random.Random(5)
    system = words(rng, 4)
    return Dataset.from_list([{"prompt": f"{system} {words(rng, 5 + i % 3)}"} for i in range(num)])


def preferences(num: int = 12) -> Dataset:
    rng = random.Random(6)
    tasks = [words(rng, 6) for _ in range(3)]
    rows = []
    for i in range(num):
        shared = words(rng, 2)
        chosen, rejected = f"{shared} {words(rng, 3)}", f"{shared} {words(rng, 1 + i % 3)}"
        rows.append({"prompt": tasks[i % 3], "chosen": f" {chosen}", "rejected": f" {rejected}"})
    return Dataset.from_list(rows)


def unpaired(num: int = 12) -> Dataset:
    rows = enumerate(preferences(num))
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
            for i, row in rows
        ]
    )


def conversations(num: int = 16) -> Dataset:
    rng = random.Random(7)
    tasks = [(words(rng, 5), words(rng, 3)) for _ in range(4)]
    rows = []
    for i in range(num):
        system, question = tasks[i % 4]
        turns = [("system", system), ("user", question), ("assistant", words(rng, 2 + i % 3)), ("user", words(rng, 2))]
        turns.append(("assistant", words(rng, 3)))
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return Dataset.from_list(rows)


def completions(prompt_ids: list[list[int]]) -> list[list[int]]:
    """Return completions, some beginning alike and some ending early, that depend only on prompt and row."""
    made = []
    for index, ids in enumerate(prompt_ids):
        rng = random.Random(hash((tuple(ids), index)))
        head = [3 + (ids[-1] + k + index % 2) % (VOCAB - 3) for k in range(2)]
        tail = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 6))]
        made.append([*head, *tail, *([EOS] if index % 3 else [])])
    return made


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def episodes(texts: list[str], trainer: Any) -> dict[str, Any]:
    """Return rollouts of several turns: between two answers stands the environment's text, with mask 0."""
    prompt_ids = trainer._tokenize_prompts(texts)[0]
    answers = completions(prompt_ids)
    said = [[3 + len(ids) % 5, 4, 5] for ids in answers]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [[*ids, *words, *ids[:2]] for ids, words in zip(answers, said, strict=True)],
        "logprobs": None,
        "env_mask": [[*[1] * len(ids), 0, 0, 0, *[1] * len(ids[:2])] for ids in answers],
    }


def logprob_errors(trainer: Any, prompts: Any, answers: Any, logprobs: Any, masks: Any = None) -> list[float]:
    """Return the greatest distance of each answer's log-probs from the trainer's own; masks leave tokens out."""
    errors = []
    masks = masks or [[1] * len(answer) for answer in answers]
    for prompt, answer, found, mask in zip(prompts, answers, logprobs, masks, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            expected, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), len(answer)
            )
        errors.append(float((expected[0] - torch.tensor(found))[torch.tensor(mask).bool()].abs().max()))
    return errors


def made_up(prompt_ids: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    return completions(prompt_ids), None


def trainer_of(
    trainer: Any, config: Any, defaults: dict[str, Any], data: Any, model: str, out: Path, **given: Any
) -> Any:
    """Return a trainer of TRL on the rows that `data()` gives; `trainer_options` are passed to it."""
    extra = given.pop("trainer_options", {})
    args = config(**{"output_dir": str(out), **COMMON, **defaults, **given})
    return trainer(model, args=args, **{"train_dataset": data(), **extra})


def grpo(model: str, out: Path, trainer: Any = GRPOTrainer, config: Any = GRPOConfig, **options: Any) -> Any:
    extra = {"reward_funcs": reward, **options.pop("trainer_options", {})}
    made = trainer_of(trainer, config, ROLLOUTS, prompts, model, out, trainer_options=extra, **options)
    # RLOO asks only for tokens.
    made._generate_single_turn = made_up if trainer is not RLOOTrainer else lambda ids, *_, **__: completions(ids)
    return made


def rloo(model: str, out: Path, **options: Any) -> Any:
    # Its loss is over whole sequences with one sign each, so rounding moves its small gradient more than the others'.
    return grpo(model, out, RLOOTrainer, RLOOConfig, **{"learning_rate": 1e-3, **options})


def distillation(model: str, out: Path, **options: Any) -> Any:
    extra = {"teacher_model": saved(seed=1), **options.pop("trainer_options", {})}
    defaults = {name: value for name, value in ROLLOUTS.items() if name != "num_generations"}
    made = trainer_of(
        DistillationTrainer, DistillationConfig, defaults, prompts, model, out, trainer_options=extra, **options
    )
    made._generate_single_turn = lambda ids, *_, **__: completions(ids)
    return made


FOUR_ROWS = {"per_device_train_batch_size": 4}
sft = partial(trainer_of, SFTTrainer, SFTConfig, {**FOUR_ROWS, "max_length": 64}, conversations)
dpo = partial(trainer_of, DPOTrainer, DPOConfig, FOUR_ROWS, preferences)
kto = partial(trainer_of, KTOTrainer, KTOConfig, FOUR_ROWS, unpaired)


@dataclass
class Recorder(TrainerCallback):
    """Callback that records the gradients of each optimizer step, and each log."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        inner = getattr(model, "module", model)
        given = {n: p.grad for n, p in inner.named_parameters() if p.grad is not None}
        self.gradients.append({name: as_whole(grad).clone() for name, grad in given.items()})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


@dataclass(frozen=True, kw_only=True)
class Run:
    gradients: list[dict[str, Tensor]]
    logs: list[dict[str, float]]
    handle: Any
    trainer: Any


def train(
    make: Callable[..., Any],
    model: str,
    out: Path,
    *,
    shared: dict[str, Any] | None = None,
    change: Callable[[Any], None] | None = None,
    **options: Any,
) -> Run:
    """Train; `shared` are the options of `share_prefixes`, None for the stock trainer; `change` gets the model."""
    torch.manual_seed(0)
    trainer = make(model, out, **options)
    if change is not None:
        change(trainer.model)
    recorder = Recorder()
    trainer.add_callback(recorder)
    handle = None if shared is None else share_prefixes(trainer, **shared)
    trainer.train()
    return Run(gradients=recorder.gradients, logs=recorder.logs, handle=handle, trainer=trainer)


def misplaced(stock: Callable[..., Any], is_wrong: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Replace `TreePatch._batch` by a wrong tree, in which every row reads the state of the token before its own."""

    def batch(self: Any, args: Any, kwargs: Any) -> Any:
        found = stock(self, args, kwargs)
        if found is not None and is_wrong():
            found.indices[:, 1:] = found.indices[:, :-1].copy()
        return found

    return batch


def apart(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> float:
    """Return the largest relative distance of the gradients of a step: L2 over all parameters."""
    assert len(one) == len(other)
    worst = 0.0
    for ours, theirs in zip(one, other, strict=True):
        assert ours.keys() == theirs.keys()
        square = sum(float((ours[name] - grad).double().square().sum()) for name, grad in theirs.items())
        norm = sum(float(grad.double().square().sum()) for grad in theirs.values())
        worst = max(worst, (square / norm) ** 0.5)
    return worst


def rewards_are_tied(log: dict[str, float]) -> bool:
    """Return whether policy and reference are equal, as in the first step; rounding then orders rewards.

    The rewards are 0 up to rounding in float32 of sums of about ten log-probs, times a beta of 0.1.
    """
    return max(abs(log["rewards/chosen"]), abs(log["rewards/rejected"])) <= 1e-6


TIMES = ("step_time", "runtime", "per_second", "total_flos", "sampling")


def metrics_apart(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest difference of each metric, relative if it is above 1, without times and our own metrics."""
    found: dict[str, float] = {}
    for ours, theirs in zip(one, other, strict=True):
        for name, value in theirs.items():
            if any(part in name for part in TIMES) or value is None:
                continue
            if name == "rewards/accuracies" and rewards_are_tied(theirs):
                continue
            assert name in ours, name
            found[name] = max(found.get(name, 0.0), abs(ours[name] - value) / max(1.0, abs(value)))
    return found
