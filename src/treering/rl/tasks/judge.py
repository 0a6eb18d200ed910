"""A judge: a language model behind an OpenAI-compatible URL that scores each distinct response once."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from treering.config.rl_task import JudgeConfig
from treering.data.rendering.thoughts import answer_part
from treering.errors import InputError, StateError, plural
from treering.files.writing import write_text

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key sent in requests; without it requests have none."""

_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
"""HTTP statuses of servers that may answer later."""
_NUM_REQUESTS = 16
"""Most requests at a time."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Judge(JudgeConfig):
    """Reward for groups, called as TRL calls rewards.

    Replies are stored on disk by question, so that a resumed run and a second run get the same ones.

    Example: with the template "Is {response} a colour? 0 or 1" and the pattern "([01])", a model that replies "1, it
    is." gives the score 1.0.
    """

    url: str
    model: str

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | Exception]:
        """Return the score of each completion, or the error that left it without one.

        Only the text after a completion's thought is judged; a completion without any gets 0 and no request.
        """
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        answers = [answer_part(_text_of(completion)) for completion in completions]
        questions = [
            self._question({**row, "prompt": _text_of(prompt), "response": answer}) if answer.strip() else None
            for row, prompt, answer in zip(rows, prompts, answers, strict=True)
        ]
        # Ask equal questions once.
        unique = list(dict.fromkeys(question for question in questions if question is not None))
        with ThreadPoolExecutor(_NUM_REQUESTS) as threads:
            scores = dict(zip(unique, threads.map(self._score, unique), strict=True))
        return [0.0 if question is None else scores[question] for question in questions]

    def _question(self, values: Mapping[str, Any]) -> str:
        def fill(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise InputError(
                    f"task.judge.template may use {{prompt}}, {{response}} and columns, got {match[0]}; use one of "
                    f"{', '.join(values)}"
                )
            return str(values[match[1]])

        return _PLACEHOLDER.sub(fill, self.template)

    def _score(self, question: str) -> float | Exception:
        try:
            return _number(self._reply(question), self.pattern)
        except (InputError, StateError, OSError) as error:
            return error

    def _reply(self, question: str) -> str:
        body = {
            **self.parameters,
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
        }
        data = json.dumps(body, sort_keys=True).encode()
        file = self.cache / f"{blake2b(data, digest_size=16).hexdigest()}.json"
        # A damaged file is asked for again.
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads(file.read_bytes())["reply"])
        reply = self._ask(data)
        write_text(file, json.dumps({"reply": reply}))
        return reply

    def _ask(self, data: bytes) -> str:
        """Return the reply; retry temporary failures after 1, 2, 4, ... seconds."""
        for attempt in range(self.num_retries + 1):
            is_last = attempt == self.num_retries
            try:
                return self._attempt(data)
            except HTTPError as error:
                if is_last or error.code not in _AGAIN:
                    text = error.read(200).decode(errors="replace")
                    raise StateError(
                        f"the judge at {self.url} refused with {error.code}: {text}; correct task.judge"
                    ) from error
            except (OSError, HTTPException) as error:
                if is_last:
                    raise StateError(
                        f"the judge at {self.url} must answer within runtime.reward_time_limit_s = "
                        f"{self.time_limit_s:g}, and it failed {plural(self.num_retries + 1, 'time')}, at last with "
                        f"{type(error).__name__}: {error}; start it, or correct task.judge.url"
                    ) from error
            time.sleep(2.0**attempt)
        raise AssertionError

    def _attempt(self, data: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = Request(f"{self.url.rstrip('/')}/chat/completions", data, headers)
        with urlopen(request, timeout=self.time_limit_s) as response:
            answer = response.read()
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise StateError(f"a judge must answer with choices, got {answer!r:.200}; check task.judge.url") from error
        # A reply that only thinks, or was cut before its text, has no content.
        if not isinstance(text, str):
            raise StateError(f"a judge must answer with text, got {answer!r:.200}; raise its max_tokens")
        return text


def _number(reply: str, pattern: str | None) -> float:
    answer = answer_part(reply)
    try:
        if pattern is not None:
            return float(re.findall(pattern, answer)[-1])
        return float(json.loads(answer[answer.index("{") : answer.rindex("}") + 1])["score"])
    except (ValueError, LookupError, TypeError) as error:
        wanted = 'a JSON object with a number "score"' if pattern is None else f"a number that {pattern} finds"
        raise InputError(
            f"a judge's reply must have {wanted}, got {reply!r:.100}; ask for it in the template"
        ) from error


def _text_of(value: Any) -> str:
    """Return a text as is, or join the text parts of a chat's messages."""
    if isinstance(value, str):
        return value
    texts = []
    for message in value:
        content = message.get("content") or ""
        texts.append(content if isinstance(content, str) else "".join(part.get("text") or "" for part in content))
    if len(texts) == 1:
        return str(texts[0])
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(value, texts, strict=True))
