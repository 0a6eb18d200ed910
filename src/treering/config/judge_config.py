"""The [task.judge] section of `treering train`: a language model that scores responses."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from treering.config.record import Config
from treering.config.values import FilePath, Positive


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
