"""Prompts from a file of records, as text or chat messages, with a reward on the text of the response."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date as Date
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from treering.data.cache.arrays import ArrayWriter
from treering.data.cache.build import kept_warnings
from treering.data.cache.dataset import DatasetFacts
from treering.data.cache.key import code_digest
from treering.data.cache.open import open_built, unchanged
from treering.data.formats.fields import placed
from treering.data.formats.pictures import BEFORE_TEXT
from treering.data.rendering.rendered_trajectory import RenderedTrajectory
from treering.data.rendering.renderer import Renderer
from treering.data.rendering.script import TURN_END
from treering.engine.rollout import Rollout
from treering.errors import ConfigError, InputError
from treering.rl.tasks.prompt_lines import PromptLine, prompt_lines
from treering.rl.tasks.rewards.judge import Judge
from treering.rl.tasks.rewards.weighted import TextReward, WeightedReward
from treering.rl.tasks.score import Score
from treering.rl.tasks.stop_tokens import find_stop_tokens
from treering.rl.tasks.stored_prompts import PromptWriter, prompt_of
from treering.rl.tasks.task import Prompt, Task, prompt_id_of
from treering.rl.tasks.text_tokens import TextTokens, end_of_turn
from treering.types import PromptId

PromptTemplate = Literal["auto", "plain", "hf", "raw"]
"""raw: the text unchanged, for base models. The others are those of `Renderer`."""


class PromptsFile(Task):
    """The prompts of a file: JSON Lines, a JSON array, Parquet or a dataset's folder, read as trajectories are.

    Fields: `prompt` (text or a list of OpenAI messages) or `question` (text); optional `answer`, or verl's
    `reward_model.ground_truth` or `ground_truth` (text or a number); the id in `prompt_id`, `task_id` or `id`, else a
    hash of the tokens. `tools` are JSON schemas for the chat template. Every field of a prompt is in its `columns`, for
    rewards of your own, and its answer as `answer`. Pictures stand in messages or in the columns `images` or `image`
    as in trajectories. Other fields that would change a prompt are refused.

    Tokens and pictures are kept in a cache as those of trajectories are, so that the next start reads the records and
    renders none.

    Example: the line `{"question": "2+2?", "answer": "#### 4"}` with template "raw" becomes the tokens of "2+2?", and
    the response "It is 4" gets 1.0 from the reward "exact_answer".
    """

    def __init__(
        self,
        path: Path,
        *,
        tokenizer: Path,
        reward: str | Sequence[WeightedReward],
        folders: Sequence[Path] = (Path(),),
        judge: Judge | None = None,
        template: PromptTemplate = "auto",
        max_prompts: int | None = None,
        max_prompt_tokens: int | None = None,
        date: Date | None = None,
        model: Path | None = None,
        stop_tokens: Sequence[str | int] = (),
        cache: Path | None = None,
    ) -> None:
        """Reads the file.

        Args:
            path: the file.
            tokenizer: a Hugging Face tokenizer folder.
            reward: "exact_answer", "contains_answer", "math_verify", "file.py:function" or "package.module:function",
                or several of them with weights; see `rewards.bound.SIGNATURES`.
            folders: where such files and modules are looked up.
            judge: the reward "judge"; None if there is none.
            template: how a prompt becomes text; see `PromptTemplate`.
            max_prompts: how many prompts to keep from the start of the file; None keeps all.
            max_prompt_tokens: longer prompts are left out and counted; None keeps all.
            date: what chat templates that write today's date write; None is today.
            model: the policy's folder, which names tokens that end a turn; None if there is none.
            stop_tokens: texts or ids of further such tokens.
            cache: folder of caches, see `treering.data.cache.folder.cache_folder`; None keeps nothing.

        Raises:
            ConfigError: an unknown reward or one of another signature, an unknown template or stop token, a folder
                without a tokenizer, or a limit below 1.
            InputError: a bad line, as "FILE:LINE: rule, value, fix", no prompt that fits, or a bad file of the model.
        """
        if template not in get_args(PromptTemplate):
            raise ConfigError(
                f"a template is one of {', '.join(get_args(PromptTemplate))}, got {template!r}; choose one"
            )
        for name, limit in (("max_prompts", max_prompts), ("max_prompt_tokens", max_prompt_tokens)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} is at least 1, got {limit}; None sets no limit")
        self.text_reward = TextReward(reward, folders, judge)
        """The reward of a text."""
        self._is_raw = template == "raw"
        self._tokens = TextTokens(tokenizer)
        self._renderer = Renderer(tokenizer=tokenizer, template="plain" if template == "raw" else template, date=date)
        chat = self._renderer.chat_template
        turn = None if chat is None else end_of_turn(chat)
        self.stops = find_stop_tokens(self._tokens, end_of_turn=turn, model=model, named=stop_tokens)
        """The tokens that end a turn, with their origin."""
        self._cache = cache
        self._folder = path if path.is_dir() else path.parent
        self._kept = _Kept(max_prompts=max_prompts, max_tokens=max_prompt_tokens)
        self.form_in_words: str | None = None
        """One sentence on how the prompts have become text; None for raw text."""
        self.notes: tuple[str, ...] = ()
        """Sentences on what was read with a reservation."""
        names: dict[str, None] = {}
        self._prompts = self._read(path, names)
        self.text_reward.bind(names)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """In file order, each made when it is asked for, so that they take no memory."""
        return self._prompts

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the tokenizer, including added tokens."""
        return self._tokens.vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids of `stops`: of tokenizer, chat template, model and settings; see `find_stop_tokens`."""
        return tuple(stop.token_id for stop in self.stops)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """<|im_end|> for the plain form if the tokenizer has no single token for it, else nothing."""
        is_plain = not self._is_raw and self._renderer.chat_template is None
        return (TURN_END,) if is_plain and not self._tokens.has_turn_end else ()

    @property
    def num_overlong(self) -> int:
        """Prompts left out because of their length."""
        return self._kept.num_overlong

    @property
    def num_duplicates(self) -> int:
        """Prompts without an id left out because an earlier one has the same tokens and pictures."""
        return self._kept.num_duplicates

    @property
    def reward_name(self) -> str:
        """The reward as it was given, such as "package.module:function"."""
        return self.text_reward.name

    @property
    def rewards_groups(self) -> bool:
        """Whether a reward takes a whole group, or is a coroutine."""
        return self.text_reward.takes_groups

    def reward(self, prompt: Prompt, rollout: Rollout) -> Score:
        """The reward of the response's text, without special tokens, a final stop token and final stop strings."""
        [score] = self.reward_group(prompt, [rollout])
        if isinstance(score, Exception):
            raise score
        return score

    def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score | Exception]:
        """As `reward`, of the rollouts of a group; coroutines run at the same time."""
        return self.text_reward.scores(prompt, [self._text(rollout) for rollout in rollouts])

    def _text(self, rollout: Rollout) -> str:
        ends = rollout.tokens[-1:].tolist()
        text = self._tokens.decode(rollout.tokens[:-1] if set(ends) & set(self.stop_tokens) else rollout.tokens)
        for stop in self.stop_strings:
            text = text.removesuffix(stop)
        return text

    def _read(self, path: Path, names: dict[str, None]) -> Sequence[Prompt]:
        """The prompts; adds the names of their columns to `names`, in order."""
        options = {"prompts": code_digest(Path(__file__).parent), "is_raw": self._is_raw, **self._kept.extent}
        with unchanged(path):
            tokens = open_built(path, self._renderer, options, partial(self._build, path), folder=self._cache)
            self.form_in_words, self.notes = tokens.facts.form, tuple(tokens.facts.notes)
            # Warnings of reading are those of the build, and have been given.
            with PromptWriter(tokens) as writer, kept_warnings():
                for row, line in zip(range(tokens.num_rows), prompt_lines(path), strict=False):
                    with placed(line.where):
                        self._check_answer(line)
                        prompt = prompt_of(tokens, row, line.prompt_id, line.answer, line.columns)
                        is_kept = self._kept.takes(prompt, has_id=line.prompt_id is not None)
                    if is_kept:
                        writer.add(row, prompt)
                        names |= dict.fromkeys(prompt.columns)
                self._kept.check(path)
                return writer.prompts()

    def _build(self, path: Path, draft: Path) -> DatasetFacts:
        """Writes the tokens of all lines up to the last prompt that is kept; refuses what `_read` would refuse."""
        kept, num_lines, num_unplaced = replace(self._kept, ids=set()), 0, 0
        with kept_warnings() as said:
            with ArrayWriter(draft) as writer:
                for line in prompt_lines(path):
                    if kept.is_full:
                        break
                    with placed(line.where):
                        self._check_answer(line)
                        prompt, is_unplaced = self._rendered(line)
                        kept.takes(prompt, has_id=line.prompt_id is not None)
                    writer.add([_row(prompt, num_lines)])
                    num_lines, num_unplaced = num_lines + 1, num_unplaced + is_unplaced
            kept.check(path)
            self._renderer.warn()
        return DatasetFacts(
            source=str(path),
            num_trajectories=num_lines,
            num_rejected=0,
            warnings=tuple(said),
            notes=(f"{BEFORE_TEXT} ({num_unplaced} prompts)",) if num_unplaced else (),
            form=self._renderer.form_in_words,
            tokenizer=str(self._renderer.tokenizer),
            picture_files=writer.picture_files,
        )

    def _check_answer(self, line: PromptLine) -> None:
        try:
            self.text_reward.check_answer(line.answer)
        except InputError as error:
            if line.answer is not None or line.likely_answer is None:
                raise
            raise InputError(f"{error}; if {line.likely_answer} is the answer, rename it to answer") from error

    def _rendered(self, line: PromptLine) -> tuple[Prompt, bool]:
        chat, is_unplaced = line.chat(self._folder)
        assert chat.messages is not None, "a prompt has messages"
        seen = self._renderer.seen_prompt(chat.messages, chat.tools, is_raw=self._is_raw)
        prompt_id = prompt_id_of(seen.tokens, seen.pictures) if line.prompt_id is None else line.prompt_id
        return Prompt(prompt_id=prompt_id, tokens=seen.tokens, pictures=seen.pictures), is_unplaced


@dataclass(slots=True, kw_only=True)
class _Kept:
    """Which prompts of a file are kept, in its order; others are counted."""

    max_prompts: int | None
    max_tokens: int | None
    ids: set[PromptId] = field(default_factory=set)
    num_overlong: int = 0
    num_duplicates: int = 0

    @property
    def extent(self) -> dict[str, Any]:
        """What says how far a file is read."""
        is_whole = self.max_prompts is None
        return {"max_prompts": self.max_prompts, "max_prompt_tokens": None if is_whole else self.max_tokens}

    @property
    def is_full(self) -> bool:
        """Whether no further prompt is kept."""
        return len(self.ids) == self.max_prompts

    def takes(self, prompt: Prompt, *, has_id: bool) -> bool:
        """Whether a prompt is short enough and new."""
        if self.max_tokens is not None and prompt.tokens.size > self.max_tokens:
            self.num_overlong += 1
            return False
        if prompt.prompt_id not in self.ids:
            self.ids.add(prompt.prompt_id)
            return True
        if has_id:
            raise InputError(f"prompts have distinct ids, got {prompt.prompt_id!r} again; rename one")
        self.num_duplicates += 1
        return False

    def check(self, path: Path) -> None:
        """Refuses a file of which nothing is kept."""
        if not self.ids:
            raise InputError(
                f"{path}: a prompts file holds at least one prompt that fits, got 0 and {self.num_overlong} of more "
                f"than max_prompt_tokens={self.max_tokens}; check the file, or raise the limit"
            )


def _row(prompt: Prompt, index: int) -> RenderedTrajectory:
    return RenderedTrajectory(
        task_id=0,
        tokens=prompt.tokens,
        loss_mask=np.zeros(prompt.tokens.size, np.bool_),
        turn_ends=np.zeros(0, np.int32),
        index=index,
        pictures=prompt.pictures,
    )
