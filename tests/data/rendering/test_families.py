"""What the templates of model families do to contents, calls and their positions."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.data.rendering.chat_folder import said, shown, with_template
from tests.data.rendering.test_template import DUMPING
from treering.data import Renderer, ToolCall, Trajectory
from treering.data.rendering.encoder import Encoder, Script, Span
from treering.data.rendering.template import ChatTemplate
from treering.errors import InputError

# Like Mistral Nemo: turns have no opening, and the system's text appears only in the last question of a prompt.
LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ messages[0].content if loop.last }}{{ m.content }}[/I]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# Like Qwen3-Coder: arguments are written one by one.
PARAMETERS = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}<f={{ c.function.name }}>"
    "{% for k, v in c.function.arguments | items %}<p={{ k }}>{{ v }}</p>{% endfor %}</f>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Like Gemma 4: calls before the text, another role name, and tool results as JSON.
CALLS_FIRST = (
    "{% for m in messages %}<{{ 'model' if m.role == 'assistant' else m.role }}>{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.content | tojson if m.role == 'tool' else m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
# Like templates of vision models: a content is a list of parts.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def call(arguments) -> ToolCall:
    return ToolCall(name="find", arguments=arguments)


def test_a_system_text_that_only_prompts_have_makes_a_branch_of_each_turn(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, LATE_SYSTEM)
    chat = said("system", "Be kind."), said("user", "1"), said("assistant", "one"), said("user", "2")
    assert shown(folder, *chat, said("assistant", "two")) == [
        ("[I]Be kind.1[/I]one</s>", "one</s>"),
        ("[I]1[/I]one</s>[I]Be kind.2[/I]two</s>", "two</s>"),
    ]


def test_arguments_that_a_template_takes_apart_are_all_found_and_broken_ones_named(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, PARAMETERS)
    question, answer = said("user", " 1 \n"), said("tool", "r")
    turn = said("assistant", "so\n", tool_calls=(call('{"x":1.50, "y": "ä"}'),))
    assert shown(folder, question, turn, answer)[0][1] == "so<f=find><p=x>1.5</p><p=y>ä</p></f><end>"
    with pytest.raises(InputError, match=r"or repair the call of 'find' in messages\[1\]; arguments must be a JSON"):
        shown(folder, question, said("assistant", "", tool_calls=(call('{"x":'),)), answer)


def test_a_call_before_the_text_and_a_tools_answer_as_json_are_no_losses(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, CALLS_FIRST)
    turn = said("assistant", "so", tool_calls=(call('{"x":1}'),))
    [(text, trained)] = shown(folder, said("user", "1"), turn, said("tool", 'a\n"b"'), said("assistant", "A"))
    assert text == '<user>1<end><model>find{"x":1}so<end><tool>"a\\n\\"b\\""<end><model>A<end>'
    assert trained == 'find{"x":1}so<end>A<end>'


def test_the_text_of_a_call_does_not_stand_for_the_call(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    turn = said("assistant", "I find 1 now.", tool_calls=(call({"x": 1}),))
    with pytest.raises(InputError, match="the call of 'find'"):
        shown(folder, said("user", "1"), turn)


def test_the_tools_in_a_prompt_do_not_stand_for_an_untrained_call(tokenizer_dir, tmp_path):
    folder = with_template(
        tokenizer_dir, tmp_path, "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    turn = said("assistant", "so", tool_calls=(call({}),), trained=False)
    with pytest.raises(InputError, match=r"the call of 'find' in messages\[1\]"):
        shown(folder, said("user", "1"), turn, said("user", "2"), said("assistant", "A"), tools=({"name": "find"},))


def test_broken_arguments_stay_as_the_model_wrote_them(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, DUMPING)
    [(_, trained)] = shown(folder, said("user", "1"), said("assistant", "", tool_calls=(call('{"x": "ä'),)))
    assert trained == 'find {"x": "ä<end>'


def test_a_template_that_wants_parts_gets_parts(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, PARTS)
    chat = said("system", ""), said("user", "1"), said("assistant", "one")
    assert shown(folder, *chat) == [("<system><end><user>1<end><assistant>one<end>", "one<end>")]


@pytest.mark.parametrize("index", [1, 2], ids=["before", "after the last turn"])
def test_a_role_that_says_the_same_as_a_dropped_text_does_not_stand_for_it(tokenizer_dir, tmp_path, index):
    folder = with_template(
        tokenizer_dir,
        tmp_path,
        "{% for m in messages %}<{{ m.role }}>{{ m.content if m.role != 'note' }}{% endfor %}",
    )
    chat = [said("user", "1"), said("assistant", "one")]
    chat.insert(index, said("note", "note"))
    with pytest.raises(InputError, match=rf"the text 'note' in messages\[{index}\]"):
        shown(folder, *chat)


def test_a_further_turn_takes_two_further_renders(tokenizer_dir, monkeypatch):
    counts = []
    for num_turns in (3, 4):
        renderer, renders = Renderer(tokenizer=tokenizer_dir, template="hf"), []
        original = ChatTemplate._render
        monkeypatch.setattr(
            ChatTemplate, "_render", lambda *a, f=original, r=renders, **k: (r.append(1), f(*a, **k))[1]
        )
        chat = (said("user", "What is it, then?"), said("assistant", "That is what it is.")) * num_turns
        renderer.render([Trajectory(task_id=1, messages=chat)])
        monkeypatch.undo()
        counts.append(len(renders))
    assert counts[1] - counts[0] == 2


def spaced(folder, scheme, **special) -> Tokenizer:
    """A tokenizer like SentencePiece's, which writes a space before a text, or before each stretch of it."""
    words = {"▁": 0, "a": 1, "▁a": 2, "b": 3, "▁b": 4}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[("▁", "a"), ("▁", "b")]))
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([AddedToken(word, special=True, **special) for word in ("<s>", "<e>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("scheme", ["always", "first", "never", "legacy"])
def test_cuts_never_change_the_tokens(tmp_path, scheme, is_normalized):
    tokenizer = spaced(tmp_path, scheme, normalized=is_normalized)
    encoder = Encoder(tmp_path)
    text = "a<s>b a<e><s>b<e>a"
    [found] = encoder.encode([[Script(text=text, spans=(Span(4, 10),))]])
    assert found.tokens.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert found.turn_ends.size == 1
    for text in () if is_normalized else ("ab a<s>ba b<e>a", "<s>a b<e><s>b<e>ab", "abab a"):
        whole = tokenizer.encode(text, add_special_tokens=False)
        for cut in {start for start, stop in whole.offsets if 0 < start < stop}:
            [found] = encoder.encode([[Script(text=text, cuts=(cut,), spans=(Span(cut, len(text)),))]])
            assert found.tokens.tolist() == whole.ids
            assert found.loss_mask.tolist() == [start >= cut for start, _ in whole.offsets]
