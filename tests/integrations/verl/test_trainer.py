"""A whole run of verl's trainer with the tree engine against one without: losses, weights, computed tokens."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make verl-test", allow_module_level=True)

from tests.integrations.verl.common import ROOT, environment, num_distinct
from tests.integrations.verl.script import EOS, FIRST_WORD, VOCAB, response_of
from tests.integrations.words import word_tokenizer
from tests.models import build

# Two runs of about ten processes each.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow, pytest.mark.timeout(2000)]

RUN = "tests.integrations.verl.trainer_run"
NUM_STEPS, NUM_RANKS, PROMPTS_PER_STEP, ROLLOUTS_PER_PROMPT = 2, 2, 4, 4
PASSES_PER_STEP = 3
"""Old log-probabilities, those of the reference, and the update."""
TOLERANCE = 1e-5
BEGINNING = [4, 5, 6, 7, 8]
PROMPTS = [
    (*BEGINNING, *np.random.default_rng(number).integers(FIRST_WORD, VOCAB, 7).tolist())
    for number in range(NUM_STEPS * PROMPTS_PER_STEP)
]
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
SETTINGS = {
    "data.train_batch_size": PROMPTS_PER_STEP,
    "data.shuffle": False,
    "data.dataloader_num_workers": 0,
    "data.max_prompt_length": 32,
    "data.max_response_length": 32,
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
    **{f"{part}.strategy": "fsdp2" for part in (ACTOR, REF)},
    **{f"{part}.fsdp_config.use_torch_compile": False for part in (ACTOR, REF)},
    **{f"+{part}.fsdp_config.mixed_precision.param_dtype": "fp32" for part in (ACTOR, REF)},
    **{f"+{part}.fsdp_config.mixed_precision.reduce_dtype": "fp32" for part in (ACTOR, REF)},
    f"{ACTOR}.ppo_mini_batch_size": PROMPTS_PER_STEP,
    f"{ACTOR}.use_dynamic_bsz": True,
    # Two flat micro-batches on each rank, but one of distinct tokens.
    f"{ACTOR}.ppo_max_token_len_per_gpu": 100,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.entropy_coeff": 0.01,
    # Plain descent: an update is as exact as its gradient, while Adam's first update is the gradient's sign.
    f"{ACTOR}.optim.optimizer": "SGD",
    f"{ACTOR}.optim.lr": 0.05,
    f"{ACTOR}.optim.weight_decay": 0,
    f"{ROLLOUT}.name": "scripted",
    f"{ROLLOUT}.n": ROLLOUTS_PER_PROMPT,
    f"{ROLLOUT}.calculate_log_probs": False,
    f"{ROLLOUT}.agent.num_workers": 1,
    # One server for all ranks, which counts the requests for a prompt.
    f"{ROLLOUT}.tensor_model_parallel_size": NUM_RANKS,
    "algorithm.adv_estimator": "grpo",
    "reward.num_workers": 1,
    "reward.custom_reward_function.path": f"{RUN.replace('.', '/')}.py",
    "reward.custom_reward_function.name": "reward_of",
    "trainer.n_gpus_per_node": NUM_RANKS,
    "trainer.device": "cpu",
    "trainer.logger": "[file]",
    "trainer.total_training_steps": NUM_STEPS,
    "trainer.val_before_train": False,
    "trainer.resume_mode": "disable",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "+ray_kwargs.ray_init.address": "local",
    "+ray_kwargs.ray_init.num_gpus": NUM_RANKS,
    "+ray_kwargs.ray_init.include_dashboard": False,
    # Bundles of three for each rank, and one for each actor.
    "ray_kwargs.ray_init.num_cpus": 14,
    "hydra.output_subdir": "null",
}


VARIABLES = "+ray_kwargs.ray_init.runtime_env.env_vars"
CHOICE = {f"{VARIABLES}.VERL_ENGINE_VENDOR": "treering", f"{VARIABLES}.TREERING_VERL_GROUPS": "whole_mini_batches"}
"""The lines of the documentation."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What verl logged and what ranks saved, without Treering and with it."""
    inputs = tmp_path_factory.mktemp("inputs")
    save_inputs(inputs)
    settings: dict[str, dict[str, Any]] = {"stock": SETTINGS, "tree": {**SETTINGS, **CHOICE}}
    return {name: run(inputs, tmp_path_factory.mktemp(name), own) for name, own in settings.items()}


def save_inputs(folder: Path) -> None:
    from datasets import Dataset

    build("llama", vocab_size=VOCAB, eos_token_id=EOS).save_pretrained(folder / "model")
    tokenizer = word_tokenizer(VOCAB)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": " ".join(f"w{token}" for token in prompt)}],
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, prompt in enumerate(PROMPTS)
    ]
    Dataset.from_list(rows).to_parquet(str(folder / "rows.parquet"))


def run(inputs: Path, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    files = {
        "data.train_files": inputs / "rows.parquet",
        "data.val_files": inputs / "rows.parquet",
        "actor_rollout_ref.model.path": inputs / "model",
        "hydra.run.dir": folder,
    }
    env = environment(
        VERL_USE_EXTERNAL_MODULES=RUN,
        VERL_FILE_LOGGER_PATH=str(folder / "metrics.jsonl"),
        TREERING_TEST_FOLDER=str(folder),
        RAY_USAGE_STATS_ENABLED="0",
        # Ray would start a process for each CPU, which verl's actors do not use.
        RAY_enable_worker_prestart="0",
        RAY_prestart_worker_first_driver="0",
    )
    words = [f"{name}={value}" for name, value in {**settings, **files}.items()]
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *words]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=950)
    if done.returncode:
        pytest.fail((folder / "log").read_text()[-5000:])
    logged = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ranks = [[torch.load(folder / f"step{step}-rank{r}.pt") for r in range(NUM_RANKS)] for step in range(NUM_STEPS + 1)]
    return {
        "metrics": logged,
        "weights": [of_step[0]["weights"] for of_step in ranks],
        "tokens": [sum(sum(rank["tokens"]) for rank in of_step) for of_step in ranks[1:]],
    }


def test_losses_of_each_step_are_those_of_stock_verl(runs: dict[str, dict[str, Any]]) -> None:
    names = {"loss", "pg_loss", "kl_loss", "entropy_loss", "entropy", "grad_norm"}
    for stock, ours in zip(runs["stock"]["metrics"], runs["tree"]["metrics"], strict=True):
        for name in (f"actor/{name}" for name in names):
            assert ours[name] == pytest.approx(stock[name], rel=TOLERANCE, abs=TOLERANCE), name
    assert runs["stock"]["metrics"][1]["actor/kl_loss"] > 0


def test_weights_that_the_rollouts_get_are_those_of_stock_verl(runs: dict[str, dict[str, Any]]) -> None:
    stock, ours = runs["stock"]["weights"], runs["tree"]["weights"]
    for step in range(1, NUM_STEPS + 1):
        for name, before in stock[0].items():
            update, error = stock[step][name] - before, ours[step][name] - stock[step][name]
            assert update.norm() > 0
            # An update in each step, and the rounding of the weights in each.
            assert error.norm() <= step * (TOLERANCE * update.norm() + 2**-23 * before.norm()), name


def test_each_distinct_token_of_a_step_is_computed_once_in_each_pass(runs: dict[str, dict[str, Any]]) -> None:
    for step, computed in enumerate(runs["tree"]["tokens"]):
        prompts = PROMPTS[step * PROMPTS_PER_STEP :][:PROMPTS_PER_STEP]
        rows = [[*prompt, *response_of(prompt, k)] for prompt in prompts for k in range(ROLLOUTS_PER_PROMPT)]
        # Groups are whole, so ranks share only the beginning of all prompts.
        distinct = num_distinct(rows) + (NUM_RANKS - 1) * len(BEGINNING)
        assert computed == PASSES_PER_STEP * distinct
        assert computed < PASSES_PER_STEP * sum(map(len, rows)) <= runs["stock"]["tokens"][step]
        ratio = sum(map(len, rows)) / distinct
        assert runs["tree"]["metrics"][step]["actor/tree/token_ratio"] == pytest.approx(ratio, rel=0.1)
