"""OpenAI's `POST /v1/completions`: a text or token ids in, text out, token ids beside it if asked for."""

from collections.abc import Sequence
from typing import Any

from treering.data.unicode import valid_text
from treering.engine.rollout import Rollout
from treering.engine.stop_strings import Decode
from treering.errors import InputError, UnsupportedError
from treering.rl.tasks.text_tokens import TextTokens
from treering.serving.fields import Fields
from treering.serving.sampling_params import Asked
from treering.serving.tokens import completion, logprobs_of, token_ids
from treering.types import TokenIds

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions."""


def take_prompt(fields: Fields, texts: TextTokens | None) -> tuple[TokenIds, bool]:
    """Takes the prompt out of a body, and whether token ids are to be sent back.

    Raises:
        InputError: a prompt of another type, several prompts, or a text that is no Unicode or meets no tokenizer.
    """
    prompt: str | list[Any] = fields.take_any("prompt", (str, list), [])
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise UnsupportedError(f"a call has one prompt, got {len(prompt)}; send a call for each")
    has_ids = fields.take("return_token_ids", bool, False)
    if isinstance(prompt, list):
        return token_ids(prompt, "prompt"), has_ids
    tokens = need(texts).encode(valid_text(prompt, "prompt"), adds_special=True)
    if tokens.size == 0:
        raise InputError(f"a prompt holds at least one token, got the text {prompt!r}; send one")
    return tokens, has_ids


def need(texts: TextTokens | None) -> TextTokens:
    """The server's tokenizer.

    Raises:
        InputError: it has none.
    """
    if texts is None:
        raise InputError(
            "this server has no tokenizer, and reads and writes token ids alone; use /inference/v1/generate"
        )
    return texts


def answer(
    request_id: str,
    model: str,
    context: TokenIds,
    rollouts: Sequence[Rollout],
    asked: Asked,
    texts: TextTokens,
    has_ids: bool,
) -> dict[str, Any]:
    """The body of the answer."""
    choices = [_choice(i, context, rollout, asked, texts, has_ids) for i, rollout in enumerate(rollouts)]
    return completion(request_id, "text_completion", model, context, rollouts, choices)


def _choice(
    index: int, context: TokenIds, rollout: Rollout, asked: Asked, texts: TextTokens, has_ids: bool
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": text_of(rollout, asked, texts.decode),
        "finish_reason": rollout.finish_reason,
        "logprobs": None,
    }
    if asked.has_logprobs:
        choice["logprobs"] = {"tokens": token_texts(rollout, texts), "token_logprobs": logprobs_of(rollout, asked)}
    if has_ids:
        choice |= ids_of(context, rollout)
    return choice


def token_texts(rollout: Rollout, texts: TextTokens) -> list[str]:
    """The text of each sampled token; of a special one, which text leaves out, its name.

    Example: the tokens of "4 apples" and an end are "4", " apples" and "<|im_end|>".
    """
    tokens = rollout.tokens
    return [texts.decode(tokens[i : i + 1]) or texts.text_of(int(tokens[i])) or "" for i in range(tokens.size)]


def ids_of(context: TokenIds, rollout: Rollout) -> dict[str, Any]:
    """What `return_token_ids` adds to a choice: vLLM's two keys, and the policy version of every sampled token."""
    return {
        "prompt_token_ids": context.tolist(),
        "token_ids": rollout.tokens.tolist(),
        "policy_versions": rollout.versions.tolist(),
    }


def text_of(rollout: Rollout, asked: Asked, decode: Decode) -> str:
    """The text of an answer, without the stop token or stop string that ended it.

    Example: the tokens of "4 END" with the stop string "END" are the text "4 ".
    """
    tokens = rollout.tokens
    if rollout.finish_reason == "stop" and tokens.size and tokens[-1] in asked.sampling.stop_tokens:
        return decode(tokens[:-1])
    text = decode(tokens)
    if rollout.finish_reason != "stop":
        return text
    ends = [text.find(stop) for stop in asked.sampling.stop_strings if stop in text]
    return text[: min(ends)] if ends else text
