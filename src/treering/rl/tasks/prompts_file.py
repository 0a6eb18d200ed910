"""A task from a file of prompts: its lines, prompts stored as arrays, and rewards that read their columns."""

import math
import mmap
import pickle
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date as Date
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, get_args, overload

import numpy as np

from treering.closing import Closing
from treering.data.cache.build_dataset import kept_warnings
from treering.data.cache.dataset import ArrayWriter, DatasetFacts, TokenDataset
from treering.data.cache.open import code_digest, open_built, unchanged
from treering.data.formats.codec import CONTEXT_KEYS, decode
from treering.data.formats.containers import read_records
from treering.data.formats.json_fields import is_blank, placed
from treering.data.formats.record_format import named_task
from treering.data.formats.record_images import BEFORE_TEXT, with_images
from treering.data.rendering.renderer import Renderer
from treering.data.trajectory import Message, RenderedTrajectory, Trajectory, valid_text
from treering.engine.protocol import Rollout
from treering.errors import ConfigError, InputError, StateError, plural
from treering.rl.tasks.judge import Judge
from treering.rl.tasks.task import Prompt, Score, Task, prompt_id_of
from treering.rl.tasks.text_reward import TextReward, WeightedReward
from treering.rl.tasks.text_tokens import TextTokens, find_stop_tokens
from treering.types import PromptId

_PROMPT_KEYS = (*CONTEXT_KEYS, "images", "image", "videos", "video", "audio", "documents", "chat_template_kwargs")
"""Keys other than the prompt that change it; the trajectory decoder reads or refuses them."""
_LIKELY_PROMPTS = ("messages", "problem", "query", "instruction", "input", "text")
_LIKELY_ANSWERS = ("solution", "label", "target", "final_answer", "expected_answer", "gold", "output", "response")
_ID_KEYS = ("prompt_id", "task_id", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A line whose chat is not yet read; `chat` reads it."""

    where: str
    """Place of the line, such as FILE:LINE."""
    record: Mapping[str, Any]
    """The line's object, unchanged."""
    answer: str | None
    """Reference answer, if there is one."""
    prompt_id: PromptId | None
    """None without an id."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """The record, with the answer also as `answer`."""
        is_elsewhere = self.answer is not None and self.record.get("answer") is None
        return {**self.record, "answer": self.answer} if is_elsewhere else self.record

    @property
    def likely_answer(self) -> str | None:
        """Name of a key that may hold the answer under another name."""
        return next((name for name in _LIKELY_ANSWERS if not is_blank(self.record.get(name))), None)

    def chat(self, folder: Path) -> tuple[Trajectory, bool]:
        """Return the messages and tools, and whether its images lack a placeholder in the messages.

        Args:
            folder: folder of local images.
        """
        key = "question" if self.record.get("prompt") is None else "prompt"
        value = self.record[key]
        if key == "question" and not isinstance(value, str):
            raise InputError(f"a question must be text, got {value!r}; quote it, or give messages as prompt")
        messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
        fields = {name: self.record.get(name) for name in _PROMPT_KEYS}
        notes: list[str] = []
        chat = with_images({**fields, "messages": messages}, folder, self.where, notes.append)
        trajectory = decode({**chat, "task_id": 0})
        _check(trajectory.messages or (), value)
        return trajectory, BEFORE_TEXT in notes


def prompt_lines(path: Path) -> Iterator[PromptLine]:
    """Yield the lines of a file or folder, in order."""
    for where, record in read_records(path, parse_float=_ExactFloat):
        with placed(where):
            line = _line(record, where)
        yield line


class _ExactFloat(float):
    """A number from JSON that keeps the digits it was written with."""

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def _line(record: object, where: str) -> PromptLine:
    if not isinstance(record, dict):
        raise InputError(f"a line must be a JSON object, got {type(record).__name__}; write one object per line")
    if record.get("prompt") is None and record.get("question") is None:
        likely = next((name for name in _LIKELY_PROMPTS if record.get(name) is not None), None)
        fix = "add one" if likely is None else f"rename {likely}, if that is the prompt"
        raise InputError(f"a line needs prompt or question, got the keys {', '.join(record) or 'none'}; {fix}")
    prompt_id = named_task(record, _ID_KEYS)
    return PromptLine(where=where, record=record, answer=_answer(_given_answer(record)), prompt_id=prompt_id)


def _check(messages: tuple[Message, ...], value: object) -> None:
    if messages[-1].is_trained:
        raise InputError(
            "a prompt ends before the policy's turn, got an assistant message at its end; drop that message"
        )
    if not any(message.content or message.images for message in messages):
        raise InputError(f"a prompt must hold text, got {value!r}; drop the line")


def _given_answer(record: Mapping[str, Any]) -> object:
    """Return the answer under `answer`, or under verl's `ground_truth` or `reward_model.ground_truth`."""
    inner = record.get("reward_model")
    values = {
        "answer": record.get("answer"),
        "ground_truth": record.get("ground_truth"),
        "reward_model.ground_truth": inner.get("ground_truth") if isinstance(inner, dict) else None,
    }
    given = {key: value for key, value in values.items() if value is not None}
    if len(given) > 1 and len(set(map(repr, given.values()))) > 1:
        raise InputError(f"{' and '.join(given)} hold different answers; keep one of them")
    return next(iter(given.values()), None)


def _answer(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return valid_text(value, "answer")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"an answer must be text or a number, got {value!r}; write it as text")
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        # JSON has no such numbers; a number too large for a Python float is read as infinity.
        raise InputError(f"an answer that is a number must be finite, got {value!r}; write it as text")
    return value.text if isinstance(value, _ExactFloat) else str(value)


_RELEASE_BYTES = 1 << 26


def prompt_of(
    tokens: TokenDataset,
    row: int,
    prompt_id: PromptId | None,
    answer: str | None,
    columns: Mapping[str, Any],
    where: str = "",
) -> Prompt:
    """Make the prompt of a row of tokens and images; without an id its content names it."""
    ids, images = tokens.tokens(row), tokens.placed(row)
    return Prompt(
        prompt_id=prompt_id_of(ids, images) if prompt_id is None else prompt_id,
        tokens=ids,
        images=images,
        answer=answer,
        columns=columns,
        where=where,
    )


class PromptWriter(Closing):
    """Writes the fields of prompts other than tokens, in a `with` statement; the result of `prompts` outlives it."""

    def __init__(self, tokens: TokenDataset) -> None:
        """Open a file without a name, which disappears with the last process that reads it.

        `tokens` holds the tokens and images of the prompts.
        """
        self._tokens = tokens
        self._ends, self._rows = array("q", [0]), array("q")
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise _cannot_write(error) from error

    def close(self) -> None:
        """Close the file; mapped data stays readable."""
        # A full disk refuses the same bytes again.
        with suppress(OSError):
            self._file.close()

    def add(self, row: int, prompt: Prompt) -> None:
        """Add the prompt of a row."""
        content = pickle.dumps((prompt.prompt_id, prompt.answer, prompt.columns, prompt.where), pickle.HIGHEST_PROTOCOL)
        try:
            self._file.write(content)
        except OSError as error:
            raise _cannot_write(error) from error
        self._ends.append(self._ends[-1] + len(content))
        self._rows.append(row)

    def prompts(self) -> Sequence[Prompt]:
        """Return all prompts, at least one; afterwards nothing can be added."""
        try:
            self._file.flush()
            content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _cannot_write(error) from error
        return _StoredPrompts(self._tokens, self._rows, content, self._ends)


class ChosenPrompts(Sequence[Prompt]):
    """Some of a sequence of prompts, each read on access."""

    def __init__(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> None:
        """Choose by `numbers`: indices into `prompts`, in the wanted order."""
        self._prompts, self._numbers = prompts, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        """Return a prompt, or the prompts of a slice."""
        if isinstance(index, slice):
            return ChosenPrompts(self._prompts, self._numbers[index])
        return self._prompts[self._numbers[index]]


class _StoredPrompts(Sequence[Prompt]):
    def __init__(self, tokens: TokenDataset, rows: "array[int]", content: mmap.mmap, ends: "array[int]") -> None:
        self._tokens, self._rows = tokens, rows
        self._content, self._ends, self._num_read = content, ends, 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        """Return a prompt, newly made, or the prompts of a slice."""
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return ChosenPrompts(self, numbers)
        content = self._content[self._ends[numbers] : self._ends[numbers + 1]]
        self._count(len(content))
        # Unpickling is safe: this process wrote the bytes, into a file that no other process can open.
        return prompt_of(self._tokens, self._rows[numbers], *pickle.loads(content))

    def _count(self, num_bytes: int) -> None:
        """Return pages that were read to the system now and then."""
        self._num_read += num_bytes
        if self._num_read > _RELEASE_BYTES:
            self._num_read = 0
            self._content.madvise(mmap.MADV_DONTNEED)


def _cannot_write(error: OSError) -> StateError:
    return StateError(
        "the folder of temporary files, which holds prompts while a run trains, cannot be written "
        f"({error.strerror or error}); free some space, or name another folder by TMPDIR"
    )


PromptTemplate = Literal["auto", "plain", "hf", "raw"]
"""raw: the text unchanged, for base models. The others are `Renderer`'s."""


class PromptsFile(Task):
    """Prompts of a file: JSON Lines, a JSON array, Parquet or a dataset's folder, read as trajectories are.

    Fields: `prompt` (text or a list of OpenAI messages) or `question` (text); optionally `answer`, or verl's
    `reward_model.ground_truth` or `ground_truth` (text or a number); the id in `prompt_id`, `task_id` or `id`, else a
    hash of the tokens. `tools` are JSON schemas for the chat template. A prompt's `columns` have all of its fields, for
    the user's rewards, and its answer as `answer`. Images are in messages or in the columns `images` or `image` as in
    trajectories. Other fields that would change a prompt are refused.

    Tokens and images are cached like those of trajectories, so the next start reads the records and renders nothing.

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
        """Read the file.

        Args:
            path: the file.
            tokenizer: a Hugging Face tokenizer folder.
            reward: "exact_answer", "contains_answer", "math_verify", "file.py:function" or "package.module:function",
                or several of them with weights; functions need one of `text_reward.SIGNATURES`.
            folders: where such files and modules are looked up.
            judge: the reward "judge", if the run has one.
            template: how a prompt becomes text; see `PromptTemplate`.
            max_prompts: prompts to keep from the start of the file; None keeps all.
            max_prompt_tokens: longer prompts are dropped and counted; None keeps all.
            date: today's date for chat templates that write it; None is today.
            model: the policy's folder, whose files name tokens that end a turn; None without one.
            stop_tokens: texts or ids of further tokens that end a turn.
            cache: folder of caches, see `treering.data.cache.folder.cache_folder`; None keeps nothing.

        Raises:
            ConfigError: an unknown reward or one with another signature, an unknown template or stop token, a folder
                without a tokenizer, or a limit below 1.
            InputError: a bad line, as "FILE:LINE: rule, value, fix", no prompt that fits, or a bad model file.
        """
        if template not in get_args(PromptTemplate):
            raise ConfigError(
                f"a template is one of {', '.join(get_args(PromptTemplate))}, got {template!r}; choose one"
            )
        for name, limit in (("max_prompts", max_prompts), ("max_prompt_tokens", max_prompt_tokens)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} is at least 1, got {limit}; None sets no limit")
        self.text_reward = TextReward(reward, folders, judge)
        """Reward of a text."""
        self._is_raw = template == "raw"
        self._tokens = TextTokens(tokenizer)
        self._renderer = Renderer(tokenizer=tokenizer, template="plain" if template == "raw" else template, date=date)
        self.renderer = None if self._is_raw else self._renderer
        """Renderer of chats; None for raw text."""
        self.stops = find_stop_tokens(self._tokens, self.renderer, model=model, named=stop_tokens)
        """Tokens that end a turn, with their origin."""
        self._cache = cache
        self._folder = path if path.is_dir() else path.parent
        self._kept = _Kept(max_prompts=max_prompts, max_tokens=max_prompt_tokens)
        self.form_note: str | None = None
        """One sentence on how the prompts became text; None for raw text."""
        self.notes: tuple[str, ...] = ()
        """Sentences on doubts about the file's content."""
        names: dict[str, None] = {}
        self._prompts = self._read(path, names)
        self.text_reward.bind(names)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts in file order, each made on access, so that they take no memory."""
        return self._prompts

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the tokenizer, including added tokens."""
        return self._tokens.vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of `stops`, from tokenizer, chat template, model and settings."""
        return tuple(stop.token_id for stop in self.stops)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """<|im_end|> for the plain form if the tokenizer has no single token for it, else nothing."""
        return () if self.renderer is None else self.renderer.stop_strings

    @property
    def num_overlong(self) -> int:
        """Prompts dropped because of their length."""
        return self._kept.num_overlong

    @property
    def num_duplicates(self) -> int:
        """Prompts without an id that were dropped because an earlier one has the same tokens and images."""
        return self._kept.num_duplicates

    @property
    def reward_name(self) -> str:
        """Name of the reward as given, such as "package.module:function"."""
        return self.text_reward.name

    @property
    def rewards_groups(self) -> bool:
        """Whether a reward takes a whole group, or is a coroutine."""
        return self.text_reward.takes_groups

    def reward(self, prompt: Prompt, rollout: Rollout) -> Score:
        """Return the reward of the response's text without special tokens, final stop token and final stop strings."""
        [score] = self.reward_group(prompt, [rollout])
        if isinstance(score, Exception):
            raise score
        return score

    def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score | Exception]:
        """Return the rewards of a group's rollouts as `reward` does; coroutines run concurrently."""
        ends = set(self.stop_tokens)
        tokens = [one.tokens[:-1] if ends & set(one.tokens[-1:].tolist()) else one.tokens for one in rollouts]
        texts = [self._without_stop_strings(self._tokens.decode(each)) for each in tokens]
        answers = [self._without_stop_strings(self._tokens.answer(each, prompt.tokens)) for each in tokens]
        return self.text_reward.scores(prompt, texts, answers)

    def _without_stop_strings(self, text: str) -> str:
        for stop in self.stop_strings:
            text = text.removesuffix(stop)
        return text

    def _read(self, path: Path, names: dict[str, None]) -> Sequence[Prompt]:
        """Return the prompts; add the names of their columns to `names`, in order."""
        options = {"prompts": code_digest(Path(__file__).parent), "is_raw": self._is_raw, **self._kept.extent}
        with unchanged(path):
            tokens = open_built(path, self._renderer, options, partial(self._build, path), folder=self._cache)
            self.form_note, self.notes = tokens.facts.form, tuple(tokens.facts.notes)
            # The build has already given the warnings of reading.
            with PromptWriter(tokens) as writer, kept_warnings():
                for row, line in zip(range(tokens.num_rows), prompt_lines(path), strict=False):
                    with placed(line.where):
                        self._check_answer(line)
                        prompt = prompt_of(tokens, row, line.prompt_id, line.answer, line.columns, line.where)
                        is_kept = self._kept.takes(prompt, has_id=line.prompt_id is not None)
                    if is_kept:
                        writer.add(row, prompt)
                        names |= dict.fromkeys(prompt.columns)
                self._kept.check(path)
                return writer.prompts()

    def _build(self, path: Path, draft: Path) -> DatasetFacts:
        """Write the tokens of all lines up to the last kept prompt; refuse everything that `_read` would refuse."""
        kept, num_lines, num_unplaced = replace(self._kept, ids=set()), 0, 0
        with kept_warnings() as caught:
            with ArrayWriter(draft) as writer:
                for line in prompt_lines(path):
                    if kept.is_full:
                        break
                    with placed(line.where):
                        self._check_answer(line)
                        prompt, is_unplaced = self._rendered(line)
                        kept.takes(prompt, has_id=line.prompt_id is not None)
                    row = RenderedTrajectory(
                        task_id=0,
                        tokens=prompt.tokens,
                        loss_mask=np.zeros(prompt.tokens.size, np.bool_),
                        turn_ends=np.zeros(0, np.int32),
                        index=num_lines,
                        images=prompt.images,
                    )
                    writer.add([row])
                    num_lines, num_unplaced = num_lines + 1, num_unplaced + is_unplaced
            kept.check(path)
            self._renderer.warn()
        return DatasetFacts(
            source=str(path),
            num_trajectories=num_lines,
            num_rejected=0,
            warnings=tuple(caught),
            notes=(f"{BEFORE_TEXT} ({plural(num_unplaced, 'prompt')})",) if num_unplaced else (),
            form=self._renderer.form_note,
            tokenizer=str(self._renderer.tokenizer),
            image_files=writer.image_files,
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
        prompt_id = prompt_id_of(seen.tokens, seen.images) if line.prompt_id is None else line.prompt_id
        return Prompt(prompt_id=prompt_id, tokens=seen.tokens, images=seen.images), is_unplaced


@dataclass(slots=True, kw_only=True)
class _Kept:
    """Choice of the prompts to keep, in file order; dropped ones are counted."""

    max_prompts: int | None
    max_tokens: int | None
    ids: set[PromptId] = field(default_factory=set)
    num_overlong: int = 0
    num_duplicates: int = 0

    @property
    def extent(self) -> dict[str, Any]:
        """Settings that decide how far a file is read."""
        is_whole = self.max_prompts is None
        return {"max_prompts": self.max_prompts, "max_prompt_tokens": None if is_whole else self.max_tokens}

    @property
    def is_full(self) -> bool:
        """Whether no further prompt is kept."""
        return len(self.ids) == self.max_prompts

    def takes(self, prompt: Prompt, *, has_id: bool) -> bool:
        """Return whether a prompt is short enough and new."""
        if self.max_tokens is not None and prompt.tokens.size > self.max_tokens:
            self.num_overlong += 1
            return False
        if prompt.prompt_id not in self.ids:
            self.ids.add(prompt.prompt_id)
            return True
        if has_id:
            raise InputError(f"prompts must have distinct ids, got {prompt.prompt_id!r} again; rename one")
        self.num_duplicates += 1
        return False

    def check(self, path: Path) -> None:
        """Refuse a file from which nothing is kept."""
        if not self.ids:
            raise InputError(
                f"{path}: a prompts file must hold at least one prompt that fits, got 0 and {self.num_overlong} of "
                f"more than max_prompt_tokens={self.max_tokens}; check the file, or raise the limit"
            )
