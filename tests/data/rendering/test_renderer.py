from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from treering.data import Message, Renderer, ToolCall, Trajectory
from treering.data import render as render_as
from treering.data.rendering import encoder
from treering.errors import ConfigError, DataWarning, InputError

render = partial(render_as, template="plain")
content = st.text(st.sampled_from("abc \n\täö12+={}[]"), max_size=12)
roles = st.sampled_from(["system", "user", "assistant", "tool"])
conversations = st.lists(st.builds(Message, role=roles, content=content | st.none()), min_size=1, max_size=6)
shares_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def message(role: str, content: str | None, *calls: ToolCall) -> Message:
    return Message(role=role, content=content, tool_calls=calls)


def chat(*messages: Message, **fields) -> Trajectory:
    return Trajectory(task_id="t", messages=messages, **fields)


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def trained_text(folder: Path, rendered) -> str:
    return load(folder).decode(rendered.tokens[rendered.loss_mask].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("folder", ["tokenizer_dir", "markerless_dir"])
@shares_fixture
@given(messages=conversations)
def test_a_chat_has_the_tokens_of_its_whole_text(request, folder, messages):
    directory = request.getfixturevalue(folder)
    messages = [message for message in messages if message.content]
    if not messages:
        return
    text = "".join(f"<|im_start|>{m.role}\n{m.content or ''}<|im_end|>\n" for m in messages)
    [rendered] = render([chat(*messages)], directory)
    assert rendered.tokens.tolist() == load(directory).encode(text, add_special_tokens=False).ids


def test_long_records_are_tokenized_in_batches_to_the_same_tokens(tokenizer_dir, monkeypatch):
    chats = [chat(*(message("user", f"{n} {i} " + "ab " * i) for i in range(5))) for n in range(3)]
    whole = render(chats, tokenizer_dir)
    monkeypatch.setattr(encoder, "_BATCH_CHARS", 9)
    for one, other in zip(whole, render(chats, tokenizer_dir), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


@shares_fixture
@given(messages=conversations)
def test_a_raw_token_is_trained_iff_its_first_character_is_an_assistants(tokenizer_dir, messages):
    text = "".join(m.content or "" for m in messages)
    if not text:
        return
    writers = [m.role for m in messages for _ in m.content or ""]
    encoding = load(tokenizer_dir).encode(text, add_special_tokens=False)
    [rendered] = render([chat(*messages, format="raw")], tokenizer_dir)
    assert rendered.tokens.tolist() == encoding.ids
    assert rendered.loss_mask.tolist() == [writers[start] == "assistant" for start, _ in encoding.offsets]


def test_the_mask_of_a_chat_covers_assistant_text_and_its_end_marker_only(tokenizer_dir):
    call = ToolCall(name="f", arguments={"x": "ä"})
    messages = (message("user", "12?"), message("assistant", "a tool", call), message("tool", "42"))
    [rendered] = render([chat(*messages, message("assistant", "42"))], tokenizer_dir)
    turn = 'a tool{"name":"f","arguments":{"x":"ä"}}<|im_end|>'
    assert trained_text(tokenizer_dir, rendered) == f"{turn}42<|im_end|>"
    first = load(tokenizer_dir).decode(rendered.tokens[: rendered.turn_ends[0]].tolist(), skip_special_tokens=False)
    assert first == f"<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n{turn}"
    assert rendered.turn_ends[1] == rendered.tokens.size - 1
    prompt = "<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.num_prompt_tokens == len(load(tokenizer_dir).encode(prompt, add_special_tokens=False).ids)


def test_adjacent_raw_turns_end_separately_and_empty_ones_not_at_all(markerless_dir):
    messages = (message("user", "1+"), message("assistant", "2\n"), message("assistant", ""), message("assistant", "3"))
    [rendered] = render([chat(*messages, format="raw")], markerless_dir)
    decoded = [load(markerless_dir).decode(rendered.tokens[:end].tolist()) for end in rendered.turn_ends]
    assert decoded == ["1+2\n", "1+2\n3"]


def test_a_turn_in_which_no_token_starts_does_not_count(tokenizer_dir):
    messages = (message("user", "t"), message("assistant", "he"), message("assistant", "12"))
    [rendered] = render([chat(*messages, format="raw")], tokenizer_dir)
    assert load(tokenizer_dir).decode(rendered.tokens[:1].tolist()) == "the"
    assert rendered.turn_ends.tolist() == [rendered.tokens.size]


def test_given_tokens_are_used_as_they_are_and_trained_runs_are_turns():
    tokens = np.array([9, 8, 7, 6, 5], np.int32)
    mask = np.array([False, True, True, False, True])
    trajectory = Trajectory(task_id=3, tokens=tokens, loss_mask=mask, reward=1.0, advantage=-2.0, logprobs=-np.ones(5))
    [rendered] = render([trajectory])
    assert rendered.tokens.tolist() == [9, 8, 7, 6, 5]
    assert (rendered.turn_ends.tolist(), rendered.num_prompt_tokens) == ([3, 5], 1)
    assert (rendered.task_id, rendered.reward, rendered.advantage) == (3, 1.0, -2.0)
    assert rendered.logprobs.tolist() == [-1.0] * 5


def test_rendering_keeps_the_order_of_messages_and_tokens_mixed(tokenizer_dir):
    given_tokens = Trajectory(task_id="g", tokens=np.array([4], np.int32))
    texts = [chat(message("user", "one")), given_tokens, chat(message("user", "two")), chat(message("user", "one"))]
    rendered = render(texts, tokenizer_dir)
    assert [r.task_id for r in rendered] == ["t", "g", "t", "t"]
    assert rendered[0].tokens.tolist() == rendered[3].tokens.tolist() != rendered[2].tokens.tolist()


def test_a_stored_truncation_or_padding_never_cuts_or_stretches(tokenizer_dir, tmp_path):
    tokenizer = load(tokenizer_dir)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    trajectory = chat(message("user", "the tool answers"))
    assert render([trajectory], tmp_path)[0].tokens.tolist() == render([trajectory], tokenizer_dir)[0].tokens.tolist()


def test_messages_without_any_text_are_refused_by_task(tokenizer_dir):
    with pytest.raises(InputError, match="only empty messages in task 't'"):
        render([chat(message("user", None), format="raw")], tokenizer_dir)


@pytest.mark.parametrize(("content", "rule"), [(None, "holds tokenizer.json"), ("{}", "must be readable")])
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path, content, rule):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=rule):
        render([chat(message("user", "hello"))], tmp_path)


@pytest.mark.parametrize("format", ["chat", "raw"])
def test_plain_and_raw_text_begin_as_the_tokenizer_begins_a_text(tokenizer_dir, tmp_path, format):
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(["<bos>"])
    begin = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", begin)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    messages = (Message(role="user", content="2+2="), Message(role="assistant", content="4"))
    trajectory = Trajectory(task_id=1, messages=messages, format=format)
    [without], [found] = (render([trajectory], folder) for folder in (tokenizer_dir, tmp_path))
    assert found.tokens.tolist() == [begin, *without.tokens]
    assert found.loss_mask.tolist() == [False, *without.loss_mask]
    assert found.turn_ends.tolist() == [end + 1 for end in without.turn_ends]
    prompt = Renderer(tokenizer=tmp_path, template="plain").prompt(messages[:1], is_raw=format == "raw")
    assert prompt.tolist() == found.tokens[: prompt.size].tolist()
    assert prompt[0] == begin
    written = Trajectory(task_id=1, messages=(Message(role="user", content="<bos>4"),), format="raw")
    with pytest.warns(DataWarning, match="text of special tokens"):
        [own] = render([written], tmp_path)
    assert own.tokens.tolist() == [begin, *tokenizer.encode("4", add_special_tokens=False).ids]
