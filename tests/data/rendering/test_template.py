import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from treering.data import Message, ToolCall, Trajectory, render
from treering.errors import ConfigError, InputError

CONVERSATION = tuple(
    Message(role=role, content=content)
    for role, content in [("system", "12"), ("user", "a?"), ("assistant", "b\n"), ("tool", "c"), ("assistant", "d")]
)
REWRITING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}[cut]{% else %}{{ m['content'] }}"
    "{% endif %}{% endfor %}"
)
DROPPING = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"
CALLING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['name'] }}({{ c['function']['arguments']['x'] }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(folder: Path, target: Path, template: str | None) -> Path:
    shutil.copy(folder / "tokenizer.json", target / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if template is None else {"chat_template": template})
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def test_a_chat_template_in_the_plain_form_gives_the_plain_tokens_masks_and_turns(tokenizer_dir):
    trajectory = Trajectory(task_id=1, messages=CONVERSATION)
    [plain], [templated] = (render([trajectory], tokenizer_dir, template) for template in ("plain", "hf"))
    assert templated.tokens.tolist() == plain.tokens.tolist()
    assert templated.loss_mask.tolist() == plain.loss_mask.tolist()
    assert templated.turn_ends.tolist() == plain.turn_ends.tolist()


def test_raw_text_never_passes_through_the_template(tokenizer_dir):
    trajectory = Trajectory(task_id=1, messages=CONVERSATION, format="raw")
    [plain], [templated] = (render([trajectory], tokenizer_dir, template) for template in ("plain", "hf"))
    assert templated.tokens.tolist() == plain.tokens.tolist()


def test_a_template_sees_tool_calls_and_their_text_is_trained(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, CALLING)
    call = ToolCall(name="f", arguments={"x": "y"})
    messages = (CONVERSATION[1], Message(role="assistant", content=None, tool_calls=(call,)))
    [rendered] = render([Trajectory(task_id=1, messages=messages)], folder, "hf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(rendered.tokens.tolist()) == "<user>a?<assistant>f(y)"
    assert tokenizer.decode(rendered.tokens[rendered.loss_mask].tolist()) == "f(y)"


@pytest.mark.parametrize(
    ("template", "error", "rule"),
    [
        (REWRITING, InputError, "must only append when a message is added"),
        (DROPPING, InputError, r"drops 'lookup' of messages\[5\]"),
        (REFUSING, InputError, "refuses the first 6 messages .*roles must alternate"),
        (None, ConfigError, "needs a chat template"),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused(tokenizer_dir, tmp_path, template, error, rule):
    folder = with_template(tokenizer_dir, tmp_path, template)
    calling = Message(role="assistant", content="e", tool_calls=(ToolCall(name="lookup", arguments={}),))
    with pytest.raises(error, match=rule):
        render([Trajectory(task_id=1, messages=(*CONVERSATION, calling))], folder, "hf")
