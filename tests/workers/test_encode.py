"""Questions with images become prompts with a token for each patch of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from reported import reported
from tokenizers_of_kinds import KINDS
from transformers import GenerationConfig

from distflow.config.load import load
from distflow.config.run import Data
from distflow.data.dataset import open_images, open_records
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import Metrics, recording
from planners import plan as make_plan
from workers.encode import ImageEncoder, dataloader, encode_prompts, encoder
from workers.engines.embedded import (
    CHAT_TEMPLATE,
    EMBEDDED_IMAGE_PROCESSOR,
    EOS,
    IMAGE,
    IMAGE_ID,
    USER,
    build_tokenizer,
)
from workers.roles import build_roles

PAIR = {"chosen", "rejected"}
DATA = Data(train="x", images="picture", max_prompt_tokens=30)


@pytest.fixture
def tokenizer():
    made = build_tokenizer(["before after two of them"], with_images=True)
    assert made.convert_tokens_to_ids(IMAGE) == IMAGE_ID
    return made


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 90, 200)).save(file, "PNG")
    return file.getvalue()


def seen(tokenizer, question: str, value, folder: Path = Path()):
    prompts, images = ImageEncoder(EMBEDDED_IMAGE_PROCESSOR, IMAGE_ID, folder).prompts(tokenizer, DATA,
                                                                             [{"question": question, "picture": value}])
    return tokenizer.decode(prompts.values), images


@pytest.mark.parametrize(("question", "expected"), [
    ("after", "<|user|>" + IMAGE * 2 + IMAGE * 4 + "after<|assistant|>"),
    ("before <image> of <image>", "<|user|>before " + IMAGE * 2 + " of " + IMAGE * 4 + "<|assistant|>")])
def test_images_are_where_the_question_says(tokenizer, question, expected):
    text, images = seen(tokenizer, question, [png(32, 16), {"bytes": png(32, 32), "path": None}])
    assert text == expected
    assert images.lengths.tolist() == [2]
    assert images.values.lengths.tolist() == [16, 32]
    assert images.values.values.lengths.tolist() == [32] * 48
    assert images.values.values.values.unique(dim=0).tolist() == [[9, 90, 200]]
    assert images.values.values.values.dtype == torch.uint8


def test_images_are_where_messages_say(tokenizer):
    """Images come before the first message of the user unless a message says where; lists of parts stay as they are."""
    asked = [{"role": "user", "content": "after"}, {"role": "assistant", "content": "two"},
             {"role": "user", "content": "of <image>"}]
    assert seen(tokenizer, asked, [png(32, 16)])[0] == \
        f"<|user|>after<|assistant|>two<eos><|user|>of {IMAGE * 2}<|assistant|>"
    asked[2] = {"role": "user", "content": "of"}
    assert seen(tokenizer, asked, [png(32, 16)])[0].startswith(f"<|user|>{IMAGE * 2}after<|assistant|>two")
    asked[2] = {"role": "user", "content": [{"type": "text", "text": "of "}, {"type": "image"}]}
    assert seen(tokenizer, asked, [png(32, 16)])[0].endswith(f"<|user|>of {IMAGE * 2}<|assistant|>")


def test_a_question_may_have_no_image(tokenizer):
    text, images = seen(tokenizer, "after", None)
    assert text == "<|user|>after<|assistant|>"
    assert images.lengths.tolist() == [0]


@pytest.mark.parametrize(("question", "value", "says"), [
    ("<image> <image>", [png(16, 16)], "says <image> 2 times and has 1 images"),
    ("after", [png(64, 64)] * 2, r"2 images has 3. tokens, more than data.max_prompt_tokens \(30\)"),
    ("after", 7, "field `picture` must be the path of an image"),
    ("after", "none.png", "`none.png` cannot be read as an image"),
    ("after", b"text", "4 bytes cannot be read as an image"),
])
def test_bad_images_are_refused(tokenizer, question, value, says):
    with pytest.raises(InvalidInput, match=says):
        seen(tokenizer, question, value)


def test_a_template_without_places_is_refused(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}question{% endfor %}"
    with pytest.raises(InvalidInput, match="the chat template has 0 places for the 1 images"):
        seen(tokenizer, "after", png(16, 16))


def test_paths_are_relative_to_the_data(tokenizer, tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some/one.png").write_bytes(png(16, 16))
    for value in ("some/one.png", ["some/one.png"], {"bytes": None, "path": "some/one.png"}):
        assert seen(tokenizer, "after", value, tmp_path)[1].lengths.tolist() == [1]
    assert open_images({"picture": Image.new("L", (3, 4))}, "picture", tmp_path)[0].size == (3, 4)


TALK = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "of"}, {"role": "assistant", "content": "them"}]


def encoded(record, **settings):
    tokenizer = build_tokenizer(["one? two of them before after"])
    columns = encoder(tokenizer, Data(train="x", **settings))([record])
    return tokenizer, {name: columns[name].rows[0] for name in columns}


@pytest.mark.parametrize("settings", [{}, {"answer": "messages"}])
def test_the_last_answer_of_a_conversation_is_imitated(settings):
    tokenizer, columns = encoded({"messages": TALK}, question="messages", **settings)
    assert tokenizer.decode(columns["prompts"]) == "<|user|>one?<|assistant|>two<eos><|user|>of<|assistant|>"
    assert tokenizer.decode(columns["targets"]) == "them<eos>"
    assert "target_mask" not in columns


def test_all_answers_of_a_conversation_are_imitated():
    tokenizer, columns = encoded({"messages": TALK}, question="messages", targets="all")
    assert tokenizer.decode(columns["targets"]) == "two<eos><|user|>of<|assistant|>them<eos>"
    assert tokenizer.decode(columns["targets"][columns["target_mask"]]) == "two<eos>them<eos>"


THINKING = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '|' if thinks else '-' }}" \
           "{{ effort or '' }}"


@pytest.mark.parametrize(("own", "prompt"), [
    ({}, "one|"), ({"thinks": False}, "one-"), ('{"thinks": false, "effort": "low"}', "one-low"),
    ({"thinks": None, "effort": "low"}, "one|low"), ("", "one|"), (None, "one|")])
def test_a_records_own_variables_reach_the_template(own, prompt, tmp_path):
    """trl#6315, NeMo-Gym#672: they were ignored, so that all records were asked alike."""
    tokenizer = build_tokenizer(["one two low | -"])
    tokenizer.chat_template = THINKING
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "one", "answer": "two", "chat_template_kwargs": own}))
    data = Data(train="x", chat_template_kwargs={"thinks": True})
    records = open_records(tmp_path / "a.jsonl", data).get([0])
    columns = encoder(tokenizer, data)(records)
    assert tokenizer.decode(columns["prompts"].rows[0]) == prompt


@pytest.mark.parametrize("own", ["{", ["thinks"], {"tools": []}, {"chat_template": "x"}])
def test_variables_that_are_none_are_refused(own, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "one", "answer": "two", "chat_template_kwargs": own}))
    with pytest.raises(InvalidInput, match="a.jsonl:1: field `chat_template_kwargs` must have variables"):
        open_records(tmp_path / "a.jsonl", Data(train="x")).get([0])


def test_a_text_that_is_none_is_mended_and_counted():
    with recording(Metrics()):
        tokenizer, columns = encoded({"question": "one \ud83d?", "answer": "two \ude00"})
        counted = reported()
    assert tokenizer.decode(columns["prompts"]) == "<|user|>one \ufffd?<|assistant|>"
    assert tokenizer.decode(columns["targets"]) == "two \ufffd<eos>"
    assert counted["data/texts_mended"] == 1


def test_a_template_that_refuses_a_record_is_an_error_with_its_reason():
    tokenizer = KINDS["refuses_system"]()
    with pytest.raises(InvalidInput, match="cannot render a record with messages of system, user: System role"):
        encode_prompts(tokenizer, Data(train="x", system_prompt="Be brief."), [{"question": "one?", "answer": "two"}])


def test_a_template_that_fails_on_a_record_is_an_error_with_its_reason():
    tokenizer, data = KINDS["chatml"](), Data(train="x")
    tokenizer.chat_template = "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    asked = [{"role": "user", "content": "one?"}, call, {"role": "tool", "content": "1"}]
    with pytest.raises(InvalidInput, match="messages of user, assistant, tool: can only concatenate str"):
        encode_prompts(tokenizer, data, [{"question": asked, "answer": "two"}])


@pytest.mark.parametrize(("value", "too_long"), [
    ([], False), ([png(64, 64)], False), ([png(640, 640)], False), ([png(64, 64)] * 2, True)])  # the third is shrunk
def test_a_record_with_too_large_a_picture_is_passed_over(tokenizer, value, too_long):
    encoder = ImageEncoder(EMBEDDED_IMAGE_PROCESSOR, IMAGE_ID, Path())
    record = {"question": "after", "picture": value}
    assert encoder.too_long(tokenizer, DATA, record) == too_long
    if not too_long:
        assert len(encoder.prompts(tokenizer, DATA, [record])[0].values) <= DATA.max_prompt_tokens


def test_a_picture_that_would_fill_the_memory_is_passed_over(tokenizer, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    record = {"question": "after", "picture": png(64, 64)}
    assert ImageEncoder(EMBEDDED_IMAGE_PROCESSOR, IMAGE_ID, Path()).too_long(tokenizer, DATA, record)


def test_answers_of_pairs_are_tokens_with_their_calls_and_thoughts_by_the_chat_template():
    """TRL's `chosen` and `rejected` are messages with all that these have."""
    data, tokenizer = Data(train="x", columns={"chosen": "chosen", "rejected": "rejected"}), KINDS["chatml"]()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.thinking }}{{ m.content }}{% for call in m.tool_calls "
        "or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    asked, call = [{"role": "user", "content": "2 + 2?"}], {"function": {"name": "add", "arguments": {"a": 2}}}
    called, thought = ({"role": "assistant", **each} for each in (
        {"content": "", "tool_calls": [call]}, {"content": "4", "thinking": "Two and two. "}))
    for chosen, rejected in (([called], [thought]), ([*asked, called], [*asked, thought])):
        record = {"question": asked, "answer": "4", "chosen": chosen, "rejected": rejected}
        columns = encoder(tokenizer, data, PAIR, asks=False)([record])
        assert tokenizer.decode(columns["prompts"].rows[0]) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>" \
            "assistant\n"
        assert tokenizer.decode(columns["chosen"].rows[0]) == '{"name": "add", "arguments": {"a": 2}}<|im_end|>'
        assert tokenizer.decode(columns["rejected"].rows[0]) == "Two and two. 4<|im_end|>"


def test_a_pair_has_both_answers_whatever_they_weigh():
    data, tokenizer = Data(train="x", columns={"chosen": "chosen", "rejected": "rejected"}), KINDS["chatml"]()
    chosen, rejected = ([{"role": "assistant", "content": text, **more}] for text, more in (
        ("4", {}), ("5", {"weight": 0})))
    record = {"question": "2 + 2?", "chosen": chosen, "rejected": rejected}
    columns = encoder(tokenizer, data, PAIR, asks=False)([record])
    assert tokenizer.decode(columns["rejected"].rows[0]) == "5<|im_end|>"


def test_answers_of_pairs_lose_what_is_over_their_limit_and_are_counted():
    data = Data(train="x", columns={"chosen": "chosen", "rejected": "rejected"}, max_target_tokens=3)
    with recording(Metrics()):
        columns = encoder(build_tokenizer(["one"]), data, PAIR, asks=False)([
            {"question": "one", "answer": "one", "chosen": "one one one", "rejected": "one"}])
        assert reported()["data/targets_cut"] == 1
    assert [len(columns[name].rows[0]) for name in ("chosen", "rejected")] == [3, 2]


def test_a_loader_learns_the_ends_that_its_model_names(alone, model, tmp_path):
    """As GLM's, whose template writes no end, and whose next turn is one."""
    tokenizer = build_tokenizer(["Why? One. Two."])
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message['content'] }}" + EOS, "{{ message['content'] }}")
    ends = tokenizer.convert_tokens_to_ids([EOS, USER])
    for part in (model, tokenizer, GenerationConfig(eos_token_id=ends)):
        part.save_pretrained(tmp_path)
    turns = [{"role": role, "content": text} for text in ("One.", "Two.")
             for role, text in (("user", "Why?"), ("assistant", text))]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    spec = load("sft", None, [f"roles.actor.model={tmp_path}", f"data.train={tmp_path / 'train.jsonl'}", "ranks=1",
                              "data.targets=all", "data.batch=1", "validation=null"])
    batch = dataloader(spec, build_roles(spec, make_plan(spec, 1), {"actor"}, set(), "cpu")["actor"], 0).next()
    assert tokenizer.decode(batch["targets"].values[batch["target_mask"].values]) == f"One.{USER}Two.{EOS}"
