"""Load the task of `treering train`: its prompts and rewards, and what a run needs to know of them."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treering.cli.hub import find_folder, locate, search_folders
from treering.config.rl_task import TaskConfig
from treering.data import Renderer
from treering.data.cache.folder import cache_folder
from treering.engine.stop_strings import Decode
from treering.errors import plural
from treering.integrations.verifiers.verifiers_environment import VerifiersEnvironment, VerifiersSettings
from treering.rl.environments.chat import BYTES_FOLDER, ChatTokens
from treering.rl.environments.environment import Environment, EnvironmentTask, find_environment
from treering.rl.tasks.judge import Judge
from treering.rl.tasks.prompts_file import PromptsFile
from treering.rl.tasks.sums import ChainedSums
from treering.rl.tasks.task import Task
from treering.rl.tasks.text_reward import TextReward, WeightedReward
from treering.rl.tasks.text_tokens import TextTokens, find_stop_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskSource:
    """A task and how it was loaded."""

    task: Task
    """Prompts and rewards."""
    tokenizer: Path | None = None
    """Folder of the tokenizer that made the ids; None without one."""
    renderer: Renderer | None = None
    """Renderer of chats; None for raw text and without a tokenizer."""
    decode: Decode | None = None
    """Tokens to text, for stop strings; None without a tokenizer."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    text_reward: TextReward | None = None
    """Reward of a response's text, for a file of prompts."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids at which rollouts stop."""
        return self.task.stop_tokens

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts in order; equal only if ids, tokens and answers are equal."""
        total = hashlib.sha256()
        for prompt in self.task.prompts:
            total.update(f"{prompt.prompt_id!r} {prompt.answer!r} {prompt.tokens.size}\n".encode())
            total.update(prompt.content)
            if self.runs_episodes:
                total.update(repr(prompt.columns["data"]).encode())
        return total.hexdigest()

    def try_reward(self, time_limit_s: float) -> None:
        """Call a custom reward once on the first prompt, so that a mistake shows before the model loads.

        Raises:
            InputError: the reward raises, returns something else, or takes longer than `time_limit_s`.
        """
        if self.text_reward is not None:
            self.text_reward.try_on(self.task.prompts[0], time_limit_s)

    @property
    def columns_digest(self) -> str | None:
        """SHA-256 of the prompt columns that a custom reward may read; None without such a reward."""
        if self.text_reward is None or not self.text_reward.is_own:
            return None
        total = hashlib.sha256()
        for prompt in self.task.prompts:
            total.update(repr(sorted(prompt.columns.items())).encode())
        return total.hexdigest()

    @property
    def has_images(self) -> bool:
        """Whether a prompt has images."""
        return any(prompt.images for prompt in self.task.prompts)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(prompt.tokens.size for prompt in self.task.prompts)

    @property
    def room_factor(self) -> int:
        """Rollouts that an engine has room for per running one: waiting episodes keep their cache."""
        return 2 if self.runs_episodes else 1

    @property
    def runs_episodes(self) -> bool:
        """Whether the task is an environment."""
        return isinstance(self.task, EnvironmentTask)

    def close(self) -> None:
        """Stop what the environment has started."""
        if isinstance(self.task, EnvironmentTask) and isinstance(self.task.environment, Environment):
            self.task.environment.close()


def load_task(
    config: TaskConfig,
    *,
    config_dir: Path,
    shell_dir: Path = Path(),
    model: Path | None = None,
) -> TaskSource:
    """Generate or read the prompts of a configuration in the folder `config_dir`, for the policy in the folder `model`.

    Custom rewards and environments are looked up there, then in `shell_dir`.

    Raises:
        ConfigError, InputError: bad settings or files.
    """
    folders, tokenizer = search_folders(config_dir), model
    if config.tokenizer is not None:
        tokenizer = find_folder(config.tokenizer, folders, setting="task.tokenizer", wanted="tokenizer")
    if config.kind == "prompts":
        assert tokenizer is not None, "the configuration checks it"
        return _from_file(config, folders, (config_dir, shell_dir), tokenizer, model)
    if config.runs_episodes:
        return _of_environment(config, (config_dir, shell_dir), tokenizer or BYTES_FOLDER, model)
    return TaskSource(task=draw_sums(config))


def draw_sums(config: TaskConfig) -> ChainedSums:
    """Return the prompts of a task of kind sums."""
    return ChainedSums(
        config.num_sums,
        min_terms=min(3, config.max_terms),
        max_terms=config.max_terms,
        max_number=config.max_number,
    )


def _from_file(
    config: TaskConfig, folders: Sequence[Path], code_dirs: tuple[Path, Path], tokenizer: Path, model: Path | None
) -> TaskSource:
    assert config.file is not None, "the configuration checks it"
    judge = Judge(**{**dict(config.judge), "cache": code_dirs[1] / config.judge.cache}) if config.uses_judge else None
    reward: str | list[WeightedReward]
    if isinstance(config.reward, str):
        reward = config.reward
    else:
        reward = [WeightedReward(name=each.name, weight=each.weight) for each in config.reward]
    task = PromptsFile(
        locate(config.file, folders),
        tokenizer=tokenizer,
        reward=reward,
        folders=code_dirs,
        judge=judge,
        template=config.template,
        max_prompts=config.max_prompts,
        max_prompt_tokens=config.max_prompt_tokens,
        date=config.date,
        model=model,
        stop_tokens=config.stop_tokens,
        cache=cache_folder(),
    )
    left_out = {
        f"more than {config.max_prompt_tokens} tokens": task.num_overlong,
        "the same tokens as an earlier one": task.num_duplicates,
    }
    note = task.form_note
    end = "rollouts stop only at sampling.max_tokens: no end-of-turn token is known; set task.stop_tokens"
    if stops := [*map(str, task.stops), *(f"the text {text}" for text in task.stop_strings)]:
        end = f"rollouts stop at {', '.join(stops)}"
    notes = [
        plural(count, f"prompt has {why} and is dropped", f"prompts have {why} and are dropped")
        for why, count in left_out.items()
        if count
    ]
    return TaskSource(
        task=task,
        tokenizer=tokenizer,
        renderer=task.renderer,
        decode=TextTokens(tokenizer).decode,
        notes=(*([note] if note else []), *notes, *task.notes, end),
        text_reward=task.text_reward,
    )


def _of_environment(
    config: TaskConfig, code_dirs: tuple[Path, Path], tokenizer: Path, model: Path | None
) -> TaskSource:
    assert config.template != "raw", "the configuration checks it"
    chat = ChatTokens(tokenizer, config.template, config.date)
    stops = find_stop_tokens(chat.text, chat.renderer, model=model, named=config.stop_tokens)
    task = EnvironmentTask(
        _environment(config, code_dirs, tokenizer),
        chat,
        config,
        stop_tokens=tuple(stop.token_id for stop in stops),
    )
    what = "single bytes, because there is no tokenizer" if tokenizer == BYTES_FOLDER else f"the tokens of {tokenizer}"
    listed = ", ".join(map(str, stops)) or "task.max_turn_tokens only; set task.stop_tokens for a token"
    return TaskSource(
        task=task,
        tokenizer=tokenizer,
        renderer=chat.renderer,
        decode=chat.text.decode,
        notes=(f"chats are read as {what}; turns stop at {listed}",),
    )


def _environment(config: TaskConfig, code_dirs: tuple[Path, Path], tokenizer: Path) -> Environment:
    assert config.env is not None, "the configuration checks it"
    if config.kind == "environment":
        return find_environment(config.env, code_dirs)
    return VerifiersEnvironment(
        VerifiersSettings(
            env=config.env,
            tokenizer=str(tokenizer),
            settings=config.verifiers,
            renderer=config.renderer,
            python=config.python or sys.executable,
            max_tasks=config.max_prompts,
        )
    )
