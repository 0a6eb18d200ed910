"""Images of records in the formats of datasets; bad ones are refused with file and line."""

import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from tests.data.images.vlm_folder import as_bytes, as_uri, image
from treering.data import read_trajectories
from treering.data.image import MAX_BYTES
from treering.errors import DataWarning, InputError

RED, BLUE = as_bytes(image(0)), as_bytes(image(1))
SAID = {"role": "assistant", "content": "Basel"}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def user_text(text):
    return {"role": "user", "content": text}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a b.png").write_bytes(RED)
    (tmp_path / "set.jsonl").write_text("")
    return tmp_path


def read(folder, record, name="set.jsonl"):
    (folder / name).write_text(json.dumps(record) + "\n")
    return read_trajectories(folder / name)


def images_of(trajectory):
    return [(i, one.at, one.source.read()) for i, said in enumerate(trajectory.messages) for one in said.images]


TEXT = {"type": "text", "text": "Where?"}
PARTS = {
    "openai_uri": {"type": "image_url", "image_url": {"url": as_uri(RED), "detail": "high"}},
    "openai_file": {"type": "image_url", "image_url": {"url": "shots/a b.png"}},
    "openai_text": {"type": "image_url", "image_url": "shots/a b.png"},
    "responses": {"type": "input_image", "image_url": as_uri(RED)},
    "qwen_path": {"type": "image", "image": "shots/a b.png"},
    "qwen_uri": {"type": "image", "image": as_uri(RED)},
    "hub_path": {"type": "image", "path": "shots/a b.png"},
    "anthropic": {"type": "image", "source": {"type": "base64", "data": as_uri(RED).split(",")[1]}},
}


@pytest.mark.parametrize("name", PARTS)
def test_each_format_of_a_part_is_its_image_at_its_position(folder, name):
    record = {"task_id": 1, "messages": [user({"type": "text", "text": "Look:"}, PARTS[name], TEXT), SAID]}
    (one,) = read(folder, record)
    assert images_of(one) == [(0, 5, RED)]
    assert one.messages[0].content == "Look:Where?"
    assert one.messages[0].stretches == ("Look:", "Where?")


def test_columns_fill_the_parts_in_order(folder):
    part = {"type": "image"}
    talk = [user(part, TEXT), {"role": "assistant", "content": "a"}, user(TEXT, part), SAID]
    images = [{"bytes": list(RED)[:0] and None, "path": "shots/a b.png"}, as_uri(BLUE)]
    (one,) = read(folder, {"task_id": 1, "messages": talk, "images": images})
    assert images_of(one) == [(0, 0, RED), (2, 6, BLUE)]
    (one,) = read(folder, {"task_id": 1, "prompt": talk[:3], "completion": talk[3:], "images": images})
    assert images_of(one) == [(0, 0, RED), (2, 6, BLUE)]
    pair = {"prompt": talk[:3], "chosen": talk[3:], "rejected": [{**SAID, "content": "Bern"}], "images": images}
    assert [images_of(side) for side in read(folder, pair | {"task_id": 1})] == [[(0, 0, RED), (2, 6, BLUE)]] * 2


def test_columns_without_parts_stand_before_the_first_users_text(folder):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}, SAID]
    with pytest.warns(DataWarning, match="before the first user's text, as TRL"):
        (one,) = read(folder, {"task_id": 1, "messages": talk, "images": [as_uri(RED), as_uri(BLUE)]})
    assert images_of(one) == [(1, 0, RED), (1, 0, BLUE)]


TAGGED = {
    "one_text": ([user_text("First <image> then <image>?")], [(0, 6, RED), (0, 12, BLUE)], "First  then ?"),
    "a_later_turn": (
        [user_text("Hi"), SAID, user_text("<image>\n<image>Where?")],
        [(2, 0, RED), (2, 1, BLUE)],
        "Hi",
    ),
    "system_and_user": (
        [{"role": "system", "content": "As in <image>."}, user_text("<image>")],
        [(0, 6, RED), (1, 0, BLUE)],
        "As in .",
    ),
    "tool": ([user_text("Look"), {"role": "tool", "content": "<image><image>"}], [(1, 0, RED), (1, 0, BLUE)], "Look"),
    "text_parts": ([user({"type": "text", "text": "a<image>b"}, "c<image>")], [(0, 1, RED), (0, 3, BLUE)], "abc"),
    "tag_and_part": ([user({"type": "image"}, "a<image>b")], [(0, 0, RED), (0, 1, BLUE)], "ab"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.filterwarnings("error::treering.errors.DataWarning")
def test_images_stand_where_their_tags_are_in_order(folder, name):
    talk, placed, text = TAGGED[name]
    images = [as_uri(RED), as_uri(BLUE)]
    for record in ({"messages": [*talk, SAID]}, {"prompt": talk, "completion": [SAID]}):
        (one,) = read(folder, {"task_id": 1, "images": images, **record})
        assert images_of(one) == placed
        assert one.messages[0].content == text


def test_a_text_without_images_may_speak_of_the_tag(folder):
    text = "What does <image> do in HTML, and <|image_1|>?"
    (one,) = read(folder, {"task_id": 1, "messages": [user_text(text), {**SAID, "content": text}], "images": []})
    assert [said.content for said in one.messages] == [text, text]
    assert images_of(one) == []


def test_parquet_with_bytes_is_read(folder):
    part = {"type": "image", "text": None}
    rows = [
        {
            "task_id": "a",
            "messages": [user(part, {"type": "text", "text": "Where?"})],
            "images": [{"bytes": content, "path": "x.png"}],
        }
        for content in (RED, BLUE)
    ]
    for row in rows:
        row["messages"].append({"role": "assistant", "content": [{"type": "text", "text": "Basel"}]})
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "set.parquet")
    assert [images_of(one) for one in read_trajectories(folder / "set.parquet")] == [[(0, 0, RED)], [(0, 0, BLUE)]]


def test_equal_questions_on_two_images_are_two_tasks(folder):
    lines = [
        {"messages": [user({"type": "image", "image": as_uri(content)}, TEXT), SAID]} for content in (RED, BLUE, RED)
    ]
    (folder / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.warns(DataWarning, match="no task is named"):
        first, second, third = read_trajectories(folder / "set.jsonl")
    assert first.task_id == third.task_id != second.task_id


def image(value, **fields):
    return {"messages": [user({"type": "image", "image": value, **fields}), SAID], "task_id": 1}


REFUSED = {
    "network": (image("https://example.org/a.png"), "images of the network are not fetched"),
    "ftp": (image("ftp://example.org/a.png"), "images of the network are not fetched"),
    "other_host": (image("file://host/a.png"), "name a local file"),
    "not_base64": (image("data:image/png;base64,@@@"), "is base64, and this one is not"),
    "plain_uri": (image("data:image/png,abc"), "write its bytes in base64"),
    "text_uri": (image("data:text/plain;base64,aaaa"), "begins with data:image"),
    "number": (image(3), "is an image: a path"),
    "two": (image("a.png", url="b.png"), "are two; keep one"),
    "resized": (image("a.png", max_pixels=100), "max_pixels changes what the processor sees"),
    "video": ({"messages": [user({"type": "video", "video": "a.mp4"}), SAID], "task_id": 1}, "of type 'video'"),
    "sound": ({"messages": [user({"type": "input_audio"}), SAID], "task_id": 1}, "of type 'input_audio'"),
    "videos": ({"messages": [user(TEXT), SAID], "task_id": 1, "videos": ["a.mp4"]}, "videos changes what is trained"),
    "few": (
        {"messages": [user({"type": "image"}), SAID], "task_id": 1, "images": []},
        "got 0 images and 1 placeholder;",
    ),
    "many": (
        {"messages": [user({"type": "image"}), SAID], "task_id": 1, "images": ["a.png", "b.png"]},
        "got 2 images and 1 placeholder;",
    ),
    "tag_too_many": (
        {"messages": [user_text("<image><image>"), SAID], "task_id": 1, "images": ["a.png"]},
        "got 1 image and 2 placeholders;",
    ),
    "tag_in_the_answer_only": (
        {"messages": [user_text("Draw."), {**SAID, "content": "Here: <image>"}], "task_id": 1, "images": ["a.png"]},
        "of the assistant has an image",
    ),
    "tag_beside_a_image_of_a_part": (
        {"messages": [user({"type": "image", "image": "a.png"}, "<image> Where?"), SAID], "task_id": 1},
        "got 0 images and 1 placeholder;",
    ),
    "numbered_tag": (
        {"messages": [user_text("<|image_1|>\nWhere?"), SAID], "task_id": 1, "images": ["a.png"]},
        r"is written <image> in the text of a message, in the order of images, got <\|image_1\|>",
    ),
    "numbered_tag_too_many": (
        {"messages": [user_text("<image> and <|image_2|>"), SAID], "task_id": 1, "images": ["a.png"]},
        r"is written <image> .* got <\|image_2\|>",
    ),
    **{
        f"tag_{tag}": (
            {"messages": [user_text(f"Look: {tag} Where?"), SAID], "task_id": 1, "images": ["a.png"]},
            rf"is written <image> .* got {re.escape(tag)}",
        )
        for tag in ("<Image>", "<image/>", "< image >", "<img>", "[IMG]", "[image]")
    },
    **{
        f"tag_in_a_result_{name}": (
            {"messages": [user_text("Look."), *result, SAID], "task_id": 1, "images": ["a.png"]},
            "is written <image> .* got <image> in another spelling or in a tool's result",
        )
        for name, result in {
            "text": [user({"type": "tool_result", "content": "See <image>"})],
            "parts": [user({"type": "tool_result", "content": [{"type": "text", "text": "See <image>"}]})],
            "item": [{"type": "function_call_output", "call_id": "c", "output": "See <image>"}],
        }.items()
    },
    "columns": ({"messages": [user({"type": "image"}), SAID], "task_id": 1, "images": ["a"], "image": "a"}, "has both"),
    "text_prompt": ({"prompt": "a", "completion": "b", "images": ["a.png"]}, "images changes what is trained"),
    "tokens": ({"tokens": [1, 2], "task_id": 1, "images": ["a.png"]}, "images changes what is trained"),
    "assistant": (
        {"messages": [user(TEXT), {**SAID, "content": [{"type": "image", "image": "a.png"}, TEXT]}], "task_id": 1},
        "of the assistant has an image",
    ),
    "raw": ({**image("a.png"), "format": "raw"}, "cannot hold images"),
    "own_part": (
        {"messages": [user({"type": "image_source", "image_source": "a.png"}), SAID], "task_id": 1},
        "is an image as",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}], "images": ["a.png"]},
        "images changes what is trained",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_line(folder, name):
    record, rule = REFUSED[name]
    with pytest.raises(InputError, match=rule) as caught:
        read(folder, record)
    assert str(caught.value).startswith(f"{folder}/set.jsonl:1: ")
    assert str(caught.value).count("set.jsonl:1") == 1


def outside(folder):
    target = folder.parent / "secret.png"
    target.write_bytes(RED)
    (folder / "link.png").symlink_to(target)
    (folder / "inner.png").symlink_to(folder / "shots" / "a b.png")
    return target


def test_files_outside_of_the_folder_are_refused_once_links_are_followed(folder):
    target = outside(folder)
    for name in ("../secret.png", str(target), "link.png", "shots/../../secret.png", f"file://{target}"):
        (one,) = read(folder, image(name))
        with pytest.raises(InputError, match=r"set.jsonl:1: messages\[0\].content\[0\].image: .*inside of the folder"):
            images_of(one)
    (one,) = read(folder, image("inner.png"))
    assert images_of(one) == [(0, 0, RED)]


def test_files_that_hold_no_image_are_refused(folder):
    (folder / "empty.png").write_bytes(b"")
    (folder / "huge.png").write_bytes(b"")
    with open(folder / "huge.png", "r+b") as stream:
        stream.truncate(MAX_BYTES + 1)
    for name, rule in (
        ("missing.png", "No such file"),
        ("shots", "a folder, pipe or device"),
        ("empty.png", "is empty"),
        ("huge.png", "at most"),
        ("nul\0.png", "no null character"),
    ):
        (one,) = read(folder, image(name))
        with pytest.raises(InputError, match=rule):
            images_of(one)
