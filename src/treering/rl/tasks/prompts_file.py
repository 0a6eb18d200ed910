"""A task from a file of prompts: its lines, prompts kept as arrays, and rewards of their columns."""

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
from treering.data.formats.record_pictures import BEFORE_TEXT, with_pictures
from treering.data.rendering.renderer import Renderer
from treering.data.trajectory import Message, RenderedTrajectory, Trajectory, valid_text
from treering.engine.protocol import Rollout
from treering.errors import ConfigError, InputError, StateError, plural
from treering.rl.tasks.judge import Judge
from treering.rl.tasks.task import Prompt, Score, Task, prompt_id_of
from treering.rl.tasks.text_reward import TextReward, WeightedReward
from treering.rl.tasks.text_tokens import TextTokens, find_stop_tokens
from treering.types import PromptId, TokenIds

_PROMPT_KEYS = (*CONTEXT_KEYS, "images", "image", "videos", "video", "audio", "documents", "chat_template_kwargs")
"""Keys beside the prompt that change it; the trajectory decoder reads or refuses them."""
_LIKELY_PROMPTS = ("messages", "problem", "query", "instruction", "input", "text")
_LIKELY_ANSWERS = ("solution", "label", "target", "final_answer", "expected_answer", "gold", "output", "response")
_ID_KEYS = ("prompt_id", "task_id", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A line without its chat, which `chat` reads.

    Example: `{"question": "2+2?", "answer": 4, "unit": "kg"}` has the answer "4", no id, and all three columns.
    """

    where: str
    """Its place, such as FILE:LINE."""
    record: Mapping[str, Any]
    """As it stands in the file."""
    answer: str | None
    """The reference answer; None without one."""
    prompt_id: PromptId | None
    """None if it has no id."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """Its record, with the answer as `answer`."""
        is_elsewhere = self.answer is not None and self.record.get("answer") is None
        return {**self.record, "answer": self.answer} if is_elsewhere else self.record

    @property
    def likely_answer(self) -> str | None:
        """A key that may hold the answer under another name."""
        return next((name for name in _LIKELY_ANSWERS if not is_blank(self.record.get(name))), None)

    def chat(self, folder: Path) -> tuple[Trajectory, bool]:
        """Its messages and tools, and whether its pictures have no part among the messages.

        Args:
            folder: of local pictures.

        Raises:
            InputError: a bad field.
        """
        key = "question" if self.record.get("prompt") is None else "prompt"
        value = self.record[key]
        if key == "question" and not isinstance(value, str):
            raise InputError(f"a question is text, got {value!r}; quote it, or give messages as prompt")
        messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
        fields = {name: self.record.get(name) for name in _PROMPT_KEYS}
        notes: list[str] = []
        chat = with_pictures({**fields, "messages": messages}, folder, self.where, notes.append)
        trajectory = decode({**chat, "task_id": 0})
        _check(trajectory.messages or (), value)
        return trajectory, BEFORE_TEXT in notes


def prompt_lines(path: Path) -> Iterator[PromptLine]:
    """The lines of a file or folder, in order.

    Raises:
        InputError: a bad line, as "FILE:LINE: rule, value, fix".

    Example: of a file with the line `{"prompt": "a", "id": 3}` it is one, with the id 3.
    """
    for where, record in read_records(path, parse_float=_ExactFloat):
        with placed(where):
            line = _line(record, where)
        yield line


class _ExactFloat(float):
    """A number of a JSON text with the digits that it was written with."""

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def _line(record: object, where: str) -> PromptLine:
    if not isinstance(record, dict):
        raise InputError(f"a line is a JSON object, got {type(record).__name__}; write one object per line")
    if record.get("prompt") is None and record.get("question") is None:
        likely = next((name for name in _LIKELY_PROMPTS if record.get(name) is not None), None)
        fix = "add one" if likely is None else f"rename {likely}, if that is the prompt"
        raise InputError(f"a line needs prompt or question, got the keys {', '.join(record) or 'none'}; {fix}")
    return PromptLine(where=where, record=record, answer=_answer(_given_answer(record)), prompt_id=_prompt_id(record))


def _check(messages: tuple[Message, ...], value: object) -> None:
    if messages[-1].is_trained:
        raise InputError("a prompt ends before the policy's turn, got an assistant message at its end; drop that one")
    if not any(message.content or message.pictures for message in messages):
        raise InputError(f"a prompt holds text, got {value!r}; drop the line")


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


_RELEASE_BYTES = 1 << 26


def prompt_of(
    tokens: TokenDataset,
    row: int,
    prompt_id: PromptId | None,
    answer: str | None,
    columns: Mapping[str, Any],
    where: str = "",
) -> Prompt:
    """The prompt of a row of tokens and pictures; without an id it is named by what it shows."""
    ids, pictures = tokens.tokens(row), tokens.placed(row)
    return Prompt(
        prompt_id=prompt_id_of(ids, pictures) if prompt_id is None else prompt_id,
        tokens=ids,
        pictures=pictures,
        answer=answer,
        columns=columns,
        where=where,
    )


class PromptWriter(Closing):
    """Writes what prompts have beside their tokens, in a `with` statement; what `prompts` gives may be read after it.

    Example: after `writer.add(2, prompt)`, `writer.prompts()[0]` has the tokens of row 2 and the prompt's columns.
    """

    def __init__(self, tokens: TokenDataset) -> None:
        """Opens a file without a name, which is gone with the last process that reads it.

        `tokens`: the tokens and pictures of prompts.
        """
        self._tokens = tokens
        self._ends, self._rows = array("q", [0]), array("q")
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise _cannot_write(error) from error

    def close(self) -> None:
        """Closes the file; what is mapped stays readable."""
        # What a full disk has refused is refused again.
        with suppress(OSError):
            self._file.close()

    def add(self, row: int, prompt: Prompt) -> None:
        """Adds the prompt of a row.

        Raises:
            StateError: the disk is full.
        """
        content = pickle.dumps((prompt.prompt_id, prompt.answer, prompt.columns, prompt.where), pickle.HIGHEST_PROTOCOL)
        try:
            self._file.write(content)
        except OSError as error:
            raise _cannot_write(error) from error
        self._ends.append(self._ends[-1] + len(content))
        self._rows.append(row)

    def prompts(self) -> Sequence[Prompt]:
        """All prompts, of which there is at least one; nothing can be added any more.

        Raises:
            StateError: the disk is full.
        """
        try:
            self._file.flush()
            content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _cannot_write(error) from error
        return _StoredPrompts(self._tokens, self._rows, content, self._ends)


class ChosenPrompts(Sequence[Prompt]):
    """Some of a sequence of prompts, each read when it is asked for.

    Example: `ChosenPrompts(prompts, range(0, len(prompts), 2))` is every second one.
    """

    def __init__(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> None:
        """`numbers`: places in `prompts`, in the order wanted."""
        self._prompts, self._numbers = prompts, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | Sequence[Prompt]:
        """A prompt, or those of a slice."""
        if isinstance(place, slice):
            return ChosenPrompts(self._prompts, self._numbers[place])
        return self._prompts[self._numbers[place]]


class _StoredPrompts(Sequence[Prompt]):
    def __init__(self, tokens: TokenDataset, rows: "array[int]", content: mmap.mmap, ends: "array[int]") -> None:
        self._tokens, self._rows = tokens, rows
        self._content, self._ends, self._num_read = content, ends, 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | Sequence[Prompt]:
        """A prompt, made anew, or those of a slice."""
        numbers = range(len(self))[place]
        if isinstance(numbers, range):
            return ChosenPrompts(self, numbers)
        content = self._content[self._ends[numbers] : self._ends[numbers + 1]]
        self._count(len(content))
        # The process has written it itself, into a file that no other can name.
        return prompt_of(self._tokens, self._rows[numbers], *pickle.loads(content))

    def _count(self, num_bytes: int) -> None:
        """Gives pages that were read back to the system now and then."""
        self._num_read += num_bytes
        if self._num_read > _RELEASE_BYTES:
            self._num_read = 0
            self._content.madvise(mmap.MADV_DONTNEED)


def _cannot_write(error: OSError) -> StateError:
    return StateError(
        f"prompts are kept in the folder of temporary files while a run trains, and it cannot be written "
        f"({error.strerror or error}); free some space, or name another folder by TMPDIR"
    )


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
        self.form = None if self._is_raw else self._renderer
        """How chats become text; None for raw text."""
        self.stops = find_stop_tokens(self._tokens, self.form, model=model, named=stop_tokens)
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
        return () if self.form is None else self.form.stop_strings

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
        tokens = [self._without_stop(rollout.tokens) for rollout in rollouts]
        texts = [self._without_stop_strings(self._tokens.decode(each)) for each in tokens]
        answers = [self._without_stop_strings(self._tokens.answer(each, prompt.tokens)) for each in tokens]
        return self.text_reward.scores(prompt, texts, answers)

    def _without_stop(self, tokens: TokenIds) -> TokenIds:
        return tokens[:-1] if set(tokens[-1:].tolist()) & set(self.stop_tokens) else tokens

    def _without_stop_strings(self, text: str) -> str:
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
                        prompt = prompt_of(tokens, row, line.prompt_id, line.answer, line.columns, line.where)
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
            notes=(f"{BEFORE_TEXT} ({plural(num_unplaced, 'prompt')})",) if num_unplaced else (),
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
