"""Prompts from a file of records, as text or chat messages, with a reward on the text of the response."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date
from pathlib import Path
from typing import Any, Literal, Self, get_args

from treering.data.formats.codec import CONTEXT_KEYS, decode
from treering.data.formats.containers import read_records
from treering.data.formats.fields import is_blank
from treering.data.formats.pictures import BEFORE_TEXT, with_pictures
from treering.data.rendering.renderer import Renderer
from treering.data.rendering.script import TURN_END
from treering.data.trajectory import Message
from treering.data.unicode import valid_text
from treering.engine.rollout import Rollout
from treering.errors import ConfigError, InputError
from treering.rl.tasks.rewards.judge import Judge
from treering.rl.tasks.rewards.weighted import TextReward, WeightedReward
from treering.rl.tasks.score import Score
from treering.rl.tasks.stop_tokens import find_stop_tokens
from treering.rl.tasks.stored_prompts import PromptWriter
from treering.rl.tasks.task import Prompt, Task, prompt_id_of
from treering.rl.tasks.text_tokens import TextTokens, end_of_turn
from treering.types import PromptId

PromptTemplate = Literal["auto", "plain", "hf", "raw"]
"""raw: the text unchanged, for base models. The others are those of `Renderer`."""

_PROMPT_KEYS = (*CONTEXT_KEYS, "images", "image", "videos", "video", "audio", "documents")
"""Keys beside the prompt that change it, with chat_template_kwargs; the trajectory decoder reads or refuses them."""
_LIKELY_PROMPTS = ("messages", "problem", "query", "instruction", "input", "text")
_LIKELY_ANSWERS = ("solution", "label", "target", "final_answer", "expected_answer", "gold", "output", "response")
_ID_KEYS = ("prompt_id", "task_id", "id")


class PromptsFile(Task):
    """The prompts of a file: JSON Lines, a JSON array, Parquet or a dataset's folder, read as trajectories are.

    Fields: `prompt` (text or a list of OpenAI messages) or `question` (text); optional `answer`, or verl's
    `reward_model.ground_truth` or `ground_truth` (text or a number); the id in `prompt_id`, `task_id` or `id`, else a
    hash of the tokens. `tools` are JSON schemas for the chat template. Every field of a prompt is in its `columns`, for
    rewards of your own, and its answer as `answer`. Pictures stand in messages or in the columns `images` or `image`
    as in trajectories. Other fields that would change a prompt are refused.

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
        self.num_overlong = 0
        """Prompts left out because of their length."""
        self.num_duplicates = 0
        """Prompts without an id left out because an earlier one has the same tokens and pictures."""
        self.num_unplaced = 0
        """Prompts whose pictures have no part in the messages, and stand before the first user's text."""
        names: dict[str, None] = {}
        self._prompts = self._read(path, max_prompts, max_prompt_tokens, names)
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
    def form_in_words(self) -> str | None:
        """One sentence on how the prompts have become text; None for raw text."""
        return self._renderer.form_in_words

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

    def _read(
        self, path: Path, max_prompts: int | None, max_prompt_tokens: int | None, names: dict[str, None]
    ) -> Sequence[Prompt]:
        """The prompts; adds the names of their columns to `names`, in order."""
        kept: set[PromptId] = set()
        with PromptWriter() as writer:
            for where, line in _parsed_lines(path):
                if max_prompts is not None and len(kept) == max_prompts:
                    break
                try:
                    prompt = self._prompt(line)
                    self.num_unplaced += line.has_unplaced
                    is_kept = self._is_kept(prompt, line, kept, max_prompt_tokens)
                except InputError as error:
                    raise _placed(where, error) from error
                if is_kept:
                    kept.add(prompt.prompt_id)
                    writer.add(prompt)
                    names |= dict.fromkeys(prompt.columns)
            if not kept:
                raise InputError(
                    f"{path}: a prompts file holds at least one prompt that fits, got 0 and {self.num_overlong} of "
                    f"more than max_prompt_tokens={max_prompt_tokens}; check the file, or raise the limit"
                )
            return writer.prompts()

    def _prompt(self, line: "_Line") -> Prompt:
        try:
            self.text_reward.check_answer(line.answer)
        except InputError as error:
            if line.answer is not None or line.likely_answer is None:
                raise
            raise InputError(f"{error}; if {line.likely_answer} is the answer, rename it to answer") from error
        seen = self._renderer.seen_prompt(line.messages, line.tools, is_raw=self._is_raw)
        prompt_id = prompt_id_of(seen.tokens, seen.pictures) if line.prompt_id is None else line.prompt_id
        return Prompt(
            prompt_id=prompt_id,
            tokens=seen.tokens,
            pictures=seen.pictures,
            answer=line.answer,
            columns=line.columns,
        )

    def _is_kept(self, prompt: Prompt, line: "_Line", kept: set[PromptId], limit: int | None) -> bool:
        """Whether a prompt is short enough and new; others are counted."""
        if limit is not None and prompt.tokens.size > limit:
            self.num_overlong += 1
            return False
        if prompt.prompt_id not in kept:
            return True
        if line.prompt_id is not None:
            raise InputError(f"prompts have distinct ids, got {prompt.prompt_id!r} again; rename one")
        self.num_duplicates += 1
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A parsed line; `prompt_id` is None if it has no id."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    answer: str | None
    likely_answer: str | None
    prompt_id: PromptId | None
    columns: Mapping[str, Any]
    has_unplaced: bool


class _ExactFloat(float):
    """A number of a JSON text with the digits that it was written with."""

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def _parsed_lines(path: Path) -> Iterator[tuple[str, _Line]]:
    # Pictures lie beside their file, or inside of a folder of files.
    folder = path if path.is_dir() else path.parent
    for where, record in read_records(path, parse_float=_ExactFloat):
        try:
            yield where, _line(record, folder, where)
        except InputError as error:
            raise _placed(where, error) from error
        except (RecursionError, OverflowError) as error:
            raise InputError(f"{where}: a line that cannot be read ({error}); repair it") from error


def _placed(where: str, error: InputError) -> InputError:
    """The error with its place, which that of a picture names itself."""
    return error if str(error).startswith(f"{where}: ") else InputError(f"{where}: {error}")


def _line(record: object, folder: Path, where: str) -> _Line:
    if not isinstance(record, dict):
        raise InputError(f"a line is a JSON object, got {type(record).__name__}; write one object per line")
    key = "question" if record.get("prompt") is None else "prompt"
    value = record.get(key)
    if value is None:
        likely = next((name for name in _LIKELY_PROMPTS if record.get(name) is not None), None)
        fix = "add one" if likely is None else f"rename {likely}, if that is the prompt"
        raise InputError(f"a line needs prompt or question, got the keys {', '.join(record) or 'none'}; {fix}")
    if key == "question" and not isinstance(value, str):
        raise InputError(f"a question is text, got {value!r}; quote it, or give messages as prompt")
    messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
    fields = {name: record.get(name) for name in (*_PROMPT_KEYS, "chat_template_kwargs")}
    notes: list[str] = []
    chat = with_pictures({**fields, "messages": messages}, folder, where, notes.append)
    trajectory = decode({**chat, "task_id": "prompt"})
    decoded = trajectory.messages
    assert decoded is not None, "messages were given"
    if decoded[-1].is_trained:
        raise InputError("a prompt ends before the policy's turn, got an assistant message at its end; drop that one")
    if not any(message.content or message.pictures for message in decoded):
        raise InputError(f"a prompt holds text, got {value!r}; drop the line")
    answer = _answer(_given_answer(record))
    is_elsewhere = answer is not None and record.get("answer") is None
    return _Line(
        messages=decoded,
        tools=trajectory.tools,
        answer=answer,
        likely_answer=next((name for name in _LIKELY_ANSWERS if not is_blank(record.get(name))), None),
        prompt_id=_prompt_id(record),
        columns={**record, "answer": answer} if is_elsewhere else record,
        has_unplaced=BEFORE_TEXT in notes,
    )


def _given_answer(record: Mapping[str, Any]) -> object:
    """The answer under `answer`, or as verl has it, under `ground_truth`, also inside of `reward_model`."""
    inner = record.get("reward_model")
    places = {
        "answer": record.get("answer"),
        "ground_truth": record.get("ground_truth"),
        "reward_model.ground_truth": inner.get("ground_truth") if isinstance(inner, dict) else None,
    }
    given = {key: value for key, value in places.items() if value is not None}
    if len(given) > 1 and len(set(map(repr, given.values()))) > 1:
        raise InputError(f"{' and '.join(given)} hold different answers; keep one of them")
    return next(iter(given.values()), None)


def _answer(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return valid_text(value, "answer")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"an answer is text or a number, got {value!r}; write it as text")
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        # JSON has no such numbers, and a number that is too large for Python's floats reads as one.
        raise InputError(f"an answer that is a number is finite, got {value!r}; write it as text")
    return value.text if isinstance(value, _ExactFloat) else str(value)


def _prompt_id(record: Mapping[str, Any]) -> PromptId | None:
    key = next((key for key in _ID_KEYS if record.get(key) is not None), None)
    value = None if key is None else record[key]
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool) and value != ""):
        return valid_text(value, str(key)) if isinstance(value, str) else value
    raise InputError(f"{key} is text or an integer, got {value!r}; correct it or drop it")
