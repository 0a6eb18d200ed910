"""The [task] and [warmup] sections of `treering train`. Loading them opens no file and imports no torch."""

import re
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from treering.config.problems import describe
from treering.config.record import Config
from treering.config.values import Count, CountOrAuto, FilePath, Positive, TemplateDate, TokenizerPath
from treering.errors import ConfigError

_GENERATED = ("max_prompts", "max_terms", "max_number")
_CHAT = ("tokenizer", "template", "date", "stop_tokens")
_FROM_FILE = (*_CHAT, "file", "reward", "max_prompts", "max_prompt_tokens", "judge")
_EPISODES = ("episode_timeout", "max_turn_tokens", "max_failed")
_OF_ENVIRONMENT = (*_CHAT, *_EPISODES, "env")
_OF_VERIFIERS = (*_CHAT, *_EPISODES, "env", "verifiers", "renderer", "python", "max_prompts")
_SETTINGS = MappingProxyType(
    {"sums": _GENERATED, "prompts": _FROM_FILE, "environment": _OF_ENVIRONMENT, "verifiers": _OF_VERIFIERS}
)


def _pattern(value: str | None) -> str | None:
    try:
        num_groups = 1 if value is None else re.compile(value).groups
    except re.error as error:
        raise ValueError(f"a regular expression, got {value!r} ({error})") from error
    if num_groups != 1:
        raise ValueError(f"a regular expression with one group, the score, got {value!r} with {num_groups}")
    return value


class JudgeConfig(Config):
    """Judge behind any OpenAI-compatible URL, for the reward "judge"."""

    url: str | None = Field(
        default=None, description="URL up to and including the version, such as http://127.0.0.1:8000/v1."
    )
    model: str | None = Field(default=None, description="Name of the model at that URL.")
    template: str = Field(
        default="Question:\n{prompt}\n\nAnswer:\n{response}\n\nHow good is the answer, from 0 to 10? Reply with JSON: "
        '{"score": NUMBER}',
        description="Question to the judge; {prompt}, {response} and {COLUMN} of the prompts file are filled in.",
    )
    pattern: Annotated[str | None, AfterValidator(_pattern)] = Field(
        default=None,
        description='Regular expression with one group, whose last match is the score; none: "score" of a JSON reply.',
    )
    parameters: dict[str, Any] = Field(
        default={"temperature": 0.0}, description="Parameters of every request, named as in OpenAI's protocol."
    )
    time_limit_s: Positive = Field(
        default=60.0, exclude=True, description="Seconds for each attempt; a run has runtime.reward_time_limit_s."
    )
    num_retries: Annotated[int, Field(ge=0)] = Field(
        default=3, exclude=True, description="Retries, after 1, 2, 4, ... seconds."
    )
    cache: FilePath = Field(
        default=Path("runs/judge"),
        exclude=True,
        description="Folder that stores replies, so that nothing is asked twice; relative to the current folder.",
    )


class RewardConfig(Config):
    """One of several rewards; their weighted sum is the reward of a response."""

    name: str = Field(description="Name, as for task.reward.")
    weight: float = Field(default=1.0, description="Factor of this reward.")


def _several(value: object) -> object:
    """Return several rewards as a tuple, with one error instead of one for each side of a union."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"a name, or an array of tables with name and weight, got {value!r}")
    try:
        return tuple(each if isinstance(each, RewardConfig) else RewardConfig.model_validate(each) for each in value)
    except ValidationError as error:
        raise ValueError(f"tables with name and weight: {'; '.join(describe(error, RewardConfig))}") from error


class EpisodeOptions(Config):
    """How episodes of an environment run.

    Example: `EpisodeOptions(max_rows=16)` has 32 episodes in flight.
    """

    episode_timeout: Positive = Field(
        default=600.0, description="Environment: seconds after which an episode is dropped."
    )
    max_turn_tokens: Count = Field(
        default=512,
        description="Environment: most tokens of a turn; sampling.max_tokens then bounds a context with its turn.",
    )
    max_failed: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5, description="Environment: share of a step's episodes that may fail; above it the run stops."
    )
    max_rows: Count = Field(default=16, exclude=True, description="Most rollouts that the engine runs at a time.")
    episodes_in_flight: CountOrAuto = Field(
        default="auto",
        exclude=True,
        description="Most episodes that run at a time. auto: twice the rows, so that others sample while some wait.",
    )
    episode_order: Literal["longest_first", "in_order"] = Field(
        default="longest_first",
        exclude=True,
        description="Which episodes start first. longest_first: those with the most tokens and waiting in earlier "
        "epochs; in_order: in the step's order.",
    )

    @property
    def num_in_flight(self) -> int:
        """Most episodes that run at a time."""
        return 2 * self.max_rows if self.episodes_in_flight == "auto" else self.episodes_in_flight


class TaskConfig(EpisodeOptions):
    """Prompts and rewards."""

    kind: Literal["sums", "prompts", "environment", "verifiers"] = Field(
        default="sums",
        description="sums: chained sums. prompts: a file of prompts. environment: episodes of your own class. "
        "verifiers: episodes of a taskset of verifiers v1.",
    )
    env: str | None = Field(
        default=None,
        description="Environment: class, as file.py:Name or package.module:Name, looked up like task.reward. "
        "Verifiers: id of a taskset installed for task.python.",
    )
    verifiers: dict[str, Any] = Field(
        default={},
        description="Verifiers: settings of its environment, passed on unchecked, such as taskset.split.",
    )
    renderer: dict[str, Any] = Field(
        default={},
        description="Verifiers: settings of its renderer of chats, passed on unchecked, such as name and "
        "thinking_retention; none: by the model's name.",
    )
    python: str | None = Field(
        default=None,
        description="Verifiers: path of the Python interpreter with verifiers and the taskset; none: the running one.",
    )
    max_terms: Annotated[int, Field(ge=2)] = Field(
        default=5, description="Sums: most numbers in a sum; the fewest are 3, or 2 with max_terms = 2."
    )
    max_number: Count = Field(default=99, description="Sums: largest number.")
    file: FilePath | None = Field(
        default=None,
        description="Prompts: JSON Lines, JSON or Parquet, plain, gzip or zstandard, or a folder of them; file and "
        "tokenizer are looked up next to the configuration, in the current folder, then in the real-data folder "
        "(TREERING_DATA, default ../shared/data).",
    )
    tokenizer: TokenizerPath = None
    template: Literal["auto", "plain", "hf", "raw"] = Field(
        default="auto",
        description="Prompts: how they become text. hf: by the tokenizer's chat template. plain: by the plain form. "
        "raw: unchanged. auto: hf if the tokenizer has a template, else plain if it knows the markers.",
    )
    date: TemplateDate = None
    reward: Annotated[str | tuple[RewardConfig, ...], BeforeValidator(_several)] = Field(
        default="exact_answer",
        description="Prompts: exact_answer, contains_answer, math_verify (for LaTeX; needs treering[math]), judge, "
        "file.py:function or package.module:function, looked up next to the configuration, then in the current folder; "
        'or several with weights, [{name = "exact_answer"}, {name = "rewards.py:short", weight = 0.2}].',
    )
    judge: JudgeConfig = Field(default_factory=JudgeConfig, description='Prompts: settings of the reward "judge".')
    max_prompts: Count | None = Field(
        default=None,
        description="Prompts to keep from the start of the file, or distinct sums to draw; none: all, or 64 sums.",
    )
    max_prompt_tokens: Count | None = Field(
        default=None, description="Most tokens of a prompt; longer ones are dropped and counted; none: no limit."
    )
    stop_tokens: Annotated[tuple[str | Annotated[int, Field(ge=0)], ...], Field(strict=False)] = Field(
        default=(),
        description="Prompts: texts or ids of tokens that end a response, in addition to those of the tokenizer, its "
        "chat template (if it renders the prompts) and the model folder (eos_token_id).",
    )

    @property
    def num_sums(self) -> int:
        """Number of sums to draw."""
        return 64 if self.max_prompts is None else self.max_prompts

    @property
    def uses_judge(self) -> bool:
        """Whether one of the rewards is "judge"."""
        return "judge" in ([self.reward] if isinstance(self.reward, str) else [each.name for each in self.reward])

    @property
    def runs_episodes(self) -> bool:
        """Whether the task is an environment, the user's or one of verifiers."""
        return self.kind in ("environment", "verifiers")

    @property
    def _given(self) -> set[str]:
        return {name for name in self.model_fields_set if getattr(self, name) is not None}

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        if self.uses_judge and None in (self.judge.url, self.judge.model):
            raise ConfigError('the reward "judge" needs a model to ask; set task.judge.url and task.judge.model')
        if not self.uses_judge and self.judge != JudgeConfig():
            raise ConfigError('task.judge belongs to the reward "judge"; add it to task.reward, or remove the section')
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        own = _SETTINGS[self.kind]
        foreign = sorted({name for names in _SETTINGS.values() for name in names if name not in own} & self._given)
        if foreign:
            owners = [f'"{kind}"' for kind, names in _SETTINGS.items() if not set(foreign).isdisjoint(names)]
            raise ConfigError(
                f'kind = "{self.kind}" has no {", ".join(foreign)}, which belong to '
                f"{' or '.join(owners)}; remove them, or set another kind"
            )
        if self.runs_episodes and self.env is None:
            needed = "a class of your own" if self.kind == "environment" else "a taskset"
            raise ConfigError(f'kind = "{self.kind}" needs {needed}, and task.env is not set; set it')
        if self.runs_episodes and self.template == "raw":
            raise ConfigError('an environment needs turns, and template = "raw" has none; set "auto", "hf" or "plain"')
        if self.kind == "prompts" and self.file is None:
            raise ConfigError('kind = "prompts" needs a prompts file, and file is not set; set task.file')
        return self


class WarmupConfig(Config):
    """Supervised training before the first rollout, on 64 solutions per step; the task's prompts are not used."""

    num_steps: Annotated[int, Field(ge=0)] = Field(default=0, description="Optimizer steps; 0: no warm-up.")
    learning_rate: Positive = Field(
        default=1e-3, description="AdamW's learning rate, falling to a tenth over these steps."
    )
