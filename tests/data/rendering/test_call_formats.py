"""Tool calls are read in the format that the chat template writes, and in no other."""

import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.data.rendering.chat_folder import said, with_template
from treering.data.rendering.call_formats import FORMATS, DescribedFormat, PlainFormat, find_call_format
from treering.data.rendering.template import ChatTemplate
from treering.data.trajectory import ToolCall
from treering.errors import InputError, UnsupportedError

BAR = "\uff5c"
XML = "{% for k, v in c.function.arguments | items %}"
AS_TEXT = "{{ v | tojson if v is not string else v }}"
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
OBJECT = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
# Gemma's own notation, for values that are not objects.
GEMMA = (
    f"call:{NAME}{{% raw %}}{{{{% endraw %}}{XML}{{{{ ',' if not loop.first }}}}{{{{ k }}}}:"
    "{% if v is string %}MARK{{ v }}MARK{% else %}{{ v | tojson }}{% endif %}{% endfor %}}"
)
PYTHON = (
    f"{NAME}({XML}{{{{ ', ' if not loop.first }}}}{{{{ k }}}}="
    "{% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{% endfor %})"
)
BEGIN, END = "{% if loop.first %}", "{% if loop.last %}"
CALLS = {
    "Hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "Qwen3-Coder": f"<tool_call>\n<function={NAME}>\n{XML}<parameter={{{{ k }}}}>\n{AS_TEXT}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "GLM": f"<tool_call>{NAME}\n{XML}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{AS_TEXT}</arg_value>\n{{% endfor %}}"
    "</tool_call>",
    "invoke": f'<x:tool_call>\n<invoke name="{NAME}">\n{XML}<parameter name="{{{{ k }}}}">{AS_TEXT}</parameter>\n'
    "{% endfor %}</invoke>\n</x:tool_call>",
    "harmony": f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "Gemma 4": f"<|tool_call>{GEMMA.replace('MARK', '<|{{ chr }}|>')}<tool_call|>".replace("{{ chr }}", '"'),
    "FunctionGemma": f"<start_function_call>{GEMMA.replace('MARK', '<escape>')}<end_function_call>",
    "LFM2": f"{BEGIN}<|tool_call_start|>[{{% else %}}, {{% endif %}}{PYTHON}{END}]<|tool_call_end|>{{% endif %}}",
    "OLMo 3": f"{BEGIN}<function_calls>{{% endif %}}{{{{ '\n' }}}}{PYTHON}{END}\n</function_calls>{{% endif %}}",
    "DeepSeek": f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>{NAME}<{BAR}tool▁sep{BAR}>{ARGUMENTS}"
    f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
    "Mistral": f'{BEGIN}[TOOL_CALLS] [{{% else %}}, {{% endif %}}{{"name": "{NAME}", "arguments": {ARGUMENTS}, '
    f'"id": "{{{{ c.id }}}}"}}{END}]{{% endif %}}',
    "Mistral, one call each": f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGUMENTS}",
    "Cohere": f'{BEGIN}<|START_ACTION|>[{{% else %}},{{% endif %}}\n{{"tool_call_id": "{{{{ loop.index0 }}}}", '
    f'"tool_name": "{NAME}", "parameters": {ARGUMENTS}}}{END}\n]<|END_ACTION|>{{% endif %}}',
    "Command R": f'{BEGIN}Action: ```json\n[{{% else %}},{{% endif %}}{{"tool_name": "{NAME}", "parameters": '
    f"{ARGUMENTS}}}{END}]```{{% endif %}}",
    "Kimi K2": f"<|tool_calls_section_begin|><|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{ARGUMENTS}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "Phi-4, Granite 3": f"{BEGIN}<|tool_call|>[{{% else %}}, {{% endif %}}{OBJECT}{END}]<|/tool_call|>{{% endif %}}",
    "Hunyuan, MiniMax": f"{BEGIN}<tool_calls>\n{{% endif %}}{OBJECT}\n{END}</tool_calls>{{% endif %}}",
    "InternLM": f'<|action_start|><|plugin|>\n{{"name": "{NAME}", "parameters": {ARGUMENTS}}}<|action_end|>',
    "functionary": f"<function={NAME}>{ARGUMENTS}</function>",
    "Llama 4": f"{BEGIN}[{{% else %}}, {{% endif %}}{PYTHON}{END}]{{% endif %}}",
    "Llama 3": f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}{{{{ "\n" if not loop.last }}}}',
    "lines of JSON": f'{OBJECT}{{{{ "\n" if not loop.last }}}}',
}
"""What a template writes for each call, by the name of its format."""

PARAMETERS = {
    "text": {"type": "string", "description": "What."},
    "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "places": {"type": "array"},
    "more": {},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "track",
        "description": "Track it.",
        "parameters": {"type": "object", "properties": PARAMETERS},
    },
}
VALUES = {
    "text": 'a "b"\n{d}, [e] </x> ]',
    "code": "75001",
    "count": -3,
    "share": 1.5,
    "flag": True,
    "places": [1, "two", None],
    "more": {"a": [{"b": "c"}]},
}


def template_of(tokenizer_dir: Path, folder: Path, calls: str) -> ChatTemplate:
    folder.mkdir(exist_ok=True)
    text = (
        "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return ChatTemplate(with_template(tokenizer_dir, folder, text))


def written(template: ChatTemplate, *calls: ToolCall) -> str:
    """Return what the template writes for a turn of these calls."""
    whole = template.text([said("user", "Hi"), said("assistant", "", tool_calls=calls)])
    return whole.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


def read(call_format: Any, text: str) -> tuple[str, list[tuple[str, Any]]]:
    rest, calls = call_format.split(text, [TOOL])
    return rest, [(call.name, call.arguments) for call in calls]


def track(number: int, **arguments: Any) -> ToolCall:
    return ToolCall(name="track", arguments=arguments, id=f"functions.track:{number}")


def test_every_format_has_a_template() -> None:
    assert list(CALLS) == list(FORMATS)


@pytest.mark.parametrize("name", CALLS)
def test_a_templates_form_is_found_and_reads_back_what_it_writes(
    tokenizer_dir: Path, tmp_path: Path, name: str
) -> None:
    template = template_of(tokenizer_dir, tmp_path, CALLS[name])
    call_format = find_call_format(template, {})
    assert call_format is FORMATS[name]
    for key, value in VALUES.items():
        assert read(call_format, written(template, track(0, **{key: value}))) == ("", [("track", {key: value})])
    assert read(call_format, written(template, track(0, **VALUES))) == ("", [("track", VALUES)])
    assert read(call_format, written(template, track(0)))[1] == [("track", {})]
    two = written(template, track(0, count=1), track(1, count=2))
    rest, calls = read(call_format, f"So.\n{two}<|im_end|>")
    assert calls == [("track", {"count": 1}), ("track", {"count": 2})]
    assert rest.replace("<|im_end|>", "").strip() == "So."
    # A call that is cut off does not count.
    half = written(template, track(0, text="long"))
    half = half[: half.index("long") + 2]
    assert read(call_format, half) == (half, [])


def test_a_call_in_another_form_is_text(tokenizer_dir: Path, tmp_path: Path) -> None:
    """Forms that begin a line or a list with any JSON or Python are tried last."""
    names = CALLS.keys() - {"Llama 3", "Llama 4", "lines of JSON", "Mistral", "Mistral, one call each"}
    for i, name in enumerate(names):
        text = written(template_of(tokenizer_dir, tmp_path / str(i), CALLS[name]), track(0, count=1))
        assert {other for other in names if read(FORMATS[other], text)[1]} == {name}


@pytest.mark.parametrize(
    ("calls", "shown"),
    [("", "<|im_end|>"), (f"CALL {NAME} WITH {ARGUMENTS}", "CALL find_it"), (f"<my>\n{OBJECT}\n</my>", "<my>")],
    ids=["dropped", "unknown", "tags that stay"],
)
def test_a_form_that_nobody_reads_is_refused(tokenizer_dir: Path, tmp_path: Path, calls: str, shown: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"writes a call of find_it as '{shown}".replace("|", r"\|")) as found:
        find_call_format(template_of(tokenizer_dir, tmp_path, calls), {})
    assert "leave out tools=, and read the calls from reply.text" in str(found.value)
    assert len(str(found.value)) <= 300


def test_ends_inside_strings_end_no_call() -> None:
    inside = {"text": "</tool_call> <tool_call> </parameter> <|tool_call_end|> <tool_call|>"}
    tagged = f'<tool_call>{{"name": "track", "arguments": {json.dumps(inside)}}}</tool_call>'
    assert read(FORMATS["Hermes"], tagged) == ("", [("track", inside)])
    assert read(FORMATS["LFM2"], f"<|tool_call_start|>[track(text='{inside['text']}')]<|tool_call_end|>") == (
        "",
        [("track", inside)],
    )
    gemma = f'<|tool_call>call:track{{text:<|"|>{inside["text"]}<|"|>}}<tool_call|>'
    assert read(FORMATS["Gemma 4"], gemma) == ("", [("track", inside)])


def test_the_schema_decides_the_type_of_a_text_and_without_one_it_is_json_or_python() -> None:
    def value(key: str, text: str) -> Any:
        [(_, found)] = read(
            FORMATS["GLM"], f"<tool_call>track<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
        )[1]
        return found[key]

    assert [value("code", text) for text in ("75001", "null", "None", "true")] == ["75001", None, None, "true"]
    assert [value("flag", text) for text in ("True", "true", "7")] == [True, True, "7"]
    assert [value("share", text) for text in ("3", "x")] == [3, "x"]
    assert [value("unknown", text) for text in ("3", "x", "[1]", "{'a': 1}")] == [3, "x", [1], {"a": 1}]


def test_an_id_that_the_model_writes_is_kept() -> None:
    for name, text in (
        ("Mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]'),
        ("Mistral, one call each", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"),
    ):
        assert [call.id for call in FORMATS[name].split(text)[1]] == ["abcdefghi"]


def test_the_plain_form_reads_tags_or_lines_with_arguments() -> None:
    assert read(PlainFormat(), '{"name": "f", "arguments": {}}') == ("", [("f", {})])
    assert read(PlainFormat(), 'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b') == ("a  b", [("f", {})])
    # The last takes minutes if the end is searched for each beginning.
    texts = ('{"name": "f", "parameters": {}}', 'x {"name": "f", "arguments": {}}', '{"name": "f"}', "plain text")
    for text in (*texts, "<tool_call>\nbroken\n</tool_call>", "<tool_call> " * 20_000):
        assert read(PlainFormat(), text) == (text, [])


RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) WITH ",
            "close_pattern": r";\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def test_a_tokenizers_own_response_template_comes_first(tokenizer_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    template = template_of(tokenizer_dir, tmp_path, f"CALL {NAME} WITH {ARGUMENTS};")
    settings = {"response_template": RESPONSE}
    call_format = find_call_format(template, settings)
    assert isinstance(call_format, DescribedFormat)
    text = written(template, track(0, **VALUES))
    assert read(call_format, f"So. {text}<|im_end|>") == ("So.", [("track", VALUES)])
    assert read(call_format, text[:-9]) == (text[:-9], [])
    # A format that does not read what the template writes is skipped.
    other = template_of(tokenizer_dir, tmp_path / "other", CALLS["GLM"])
    assert find_call_format(other, settings) is FORMATS["GLM"]


SCHEMA = {
    "x-regex": r"^(?P<content>.*?)(?P<tool_calls>(?:CALL \w+ WITH .+?;)*)(?:<\|im_end\|>)?$",
    "type": "object",
    "properties": {
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"(CALL \w+ WITH .+?;)",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "x-regex": r"CALL (\w+)"},
                    "arguments": {"type": "object", "x-regex": r"WITH (.+);$", "x-parser": "json"},
                },
            },
        },
    },
}


def test_a_response_schema_is_read_by_a_transformers_that_knows_it(tokenizer_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers.utils.chat_parsing_utils")
    template = template_of(tokenizer_dir, tmp_path, f"CALL {NAME} WITH {ARGUMENTS};")
    call_format = find_call_format(template, {"response_schema": SCHEMA})
    assert isinstance(call_format, DescribedFormat)
    text = written(template, track(0, count=1), track(1, text="x"))
    assert read(call_format, f"So. {text}") == ("So. ", [("track", {"count": 1}), ("track", {"text": "x"})])


def trl_templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    return sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja")) if spec and spec.origin else []


@pytest.mark.parametrize("file", trl_templates() or [None], ids=lambda file: file.stem if file else "absent")
def test_templates_that_trl_ships_are_read_or_refused(tokenizer_dir: Path, tmp_path: Path, file: Path | None) -> None:
    if file is None:
        pytest.skip("TRL is not installed")
    template = ChatTemplate(with_template(tokenizer_dir, tmp_path, file.read_text(encoding="utf-8")))
    call = ToolCall(name="track", arguments={"text": "Oslo 7", "code": "75001", "count": 3}, id="call00001")
    try:
        call_format = find_call_format(template, {})
    except UnsupportedError:
        chat = [said("user", "Hi"), said("assistant", "", tool_calls=(call,))]
        with suppress(InputError):
            assert "75001" not in template.text(chat, [TOOL])
        return
    whole = template.text([said("user", "Hi"), said("assistant", "", tool_calls=(call,))], [TOOL])
    assert read(call_format, whole.rpartition("Hi")[2])[1] == [("track", call.arguments)]
