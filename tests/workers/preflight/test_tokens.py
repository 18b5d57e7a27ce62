"""Tasks with one fault each in tokens or templates are refused or noted, and good ones start without a word."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image
from preflight_tasks import ANSWERED, CALLED, PAIRS, SUMS, TOOLS, Task, changed, check_fault, proved
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distflow.cli import main
from distflow.config.load import load
from workers.encode import ImageEncoder
from workers.engines.embedded import (
    ASSISTANT,
    CHAT_TEMPLATE,
    EMBEDDED_IMAGE_PROCESSOR,
    EOS,
    IMAGE_ID,
    USER,
    build_tokenizer,
)
from workers.preflight import prove_with_tokenizer
from workers.preflight.proofs import Preflight


def tokenizer(template: str = CHAT_TEMPLATE, *more: str):
    made = build_tokenizer([f"{each['question']} {each['answer']}" for each in ANSWERED])
    made.chat_template = template
    made.add_tokens([*more])
    return made


def with_tools(folder: Path) -> str:
    """Make a model folder as far as planning looks at it, with a template that knows tools."""
    tokenizer(TOOLS_FIRST).save_pretrained(folder / "model")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 512, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "tie_word_embeddings": True}
    (folder / "model/config.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
    save_file({}, folder / "model/model.safetensors")
    return str(folder / "model")


def words() -> PreTrainedTokenizerFast:
    """A tokenizer that knows words, and no digits."""
    names = ["<unk>", EOS, USER, ASSISTANT, "What", "is", "+", "?", "Let", "me", "add", "."]
    inner = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token=EOS,
                                   extra_special_tokens=[USER, ASSISTANT], chat_template=CHAT_TEMPLATE)


TOOLS_FIRST = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + CHAT_TEMPLATE
WITHOUT_LAST = CHAT_TEMPLATE.replace("in messages %}", "in messages[:-1] %}", 1)
WITHOUT_PROMPT = CHAT_TEMPLATE.partition("{% if add_generation_prompt")[0]
WITHOUT_THOUGHT = CHAT_TEMPLATE.replace("{{ message['content'] }}" + EOS,
                                        "{{ message['content'].split('</think>')[-1] }}" + EOS)
THINKS = CHAT_TEMPLATE.replace(ASSISTANT + "{% endif %}", ASSISTANT + "<think>\n{% endif %}")
REFUSES = "{{ raise_exception('Only user and assistant roles are supported!') if messages[0].role == 'system' }}" + \
    CHAT_TEMPLATE

CALLS = "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
WRITES_CALLS = TOOLS_FIRST.replace("{{ message['content'] }}" + EOS, "{{ message['content'] }}" + CALLS + EOS)
RESULTS_AS_JSON = WRITES_CALLS.replace(USER + "{{ message['content'] }}", USER + "{{ message.content | tojson if "
                                       "message.role == 'tool' else message.content }}")
DATED = "{% set today = date_string or strftime_now('%d %B %Y') %}{{ today }}\n" + CHAT_TEMPLATE
HEADER_FIRST = CHAT_TEMPLATE.replace("{{ message['content'] }}" + EOS, "<final>{{ message['content'] }}" + EOS)
CLOSES = CHAT_TEMPLATE.replace("{% if add_generation_prompt %}" + ASSISTANT, "{% if add_generation_prompt %}" +
                               ASSISTANT + "{% else %}" + EOS, 1)
CALL = CALLED[0]["question"][1]
CALLED_LAST = [{"messages": [*each["question"], {"role": "assistant", "content": "", "tool_calls": CALL["tool_calls"]}],
                "tools": TOOLS} for each in CALLED]
WHOLE = {"question": "messages", "answer": "messages"}
COMPARED = {"columns": ["chosen", "rejected"]}
HELLO = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi!"}]
ASKED = [{**each, "question": [{"role": "user", "content": each["question"]}]} for each in SUMS]
THOUGHT = [{**each, "answer": f"<think>add</think>{each['answer']}"} for each in SUMS]
FAULTY: dict[str, tuple[Task, bool, str]] = {
    "a template without the last message": (Task(SUMS, "math", tokenizer=partial(tokenizer, WITHOUT_LAST)), True,
                                            "leaves out the message of `user`"),
    "a template that refuses system messages": (Task(SUMS, "math", data={"system_prompt": "Add."},
                                                     tokenizer=partial(tokenizer, REFUSES)), True,
                                                "Only user and assistant roles are supported!"),
    "a template without a generation prompt": (Task(SUMS, "math", tokenizer=partial(tokenizer, WITHOUT_PROMPT)), True,
                                               "does not begin an answer at the end of the prompt"),
    "a template that opens a thought": (Task(SUMS, tokenizer=partial(tokenizer, THINKS)), False,
                                        "ends with `<think>`, and its answer lacks that"),
    "reasoning that the template leaves out": (Task([{"messages": [*each["question"], {
        "role": "assistant", "content": each["answer"], "reasoning_content": "I add."}]} for each in ASKED], data=WHOLE,
        tokenizer=tokenizer), False, "leaves out the reasoning of the answer of each of the first 12 records"),
    "thoughts that the template strips": (Task(THOUGHT, tokenizer=partial(tokenizer, WITHOUT_THOUGHT)), True,
                                          "the chat template changes the answer of"),
    "a tokenizer without digits": (Task(SUMS, tokenizer=words), True, "has no tokens for characters of each"),
    "tokens beyond the embedding": (Task([{**each, "answer": f"<extra>{each['answer']}"} for each in SUMS],
                                         missing_rows=1,
                                         tokenizer=partial(tokenizer, CHAT_TEMPLATE, "<extra>")), True,
                                    "('<extra>'), and the embedding of the model has"),
    "a beginning twice": (Task(SUMS, tokenizer=partial(tokenizer, "<bos><bos>" + CHAT_TEMPLATE)), True,
                          "begins with '<bos>' twice"),
    "a tool that is not listed": (Task([changed(each, name="plus") for each in CALLED], data={"tools": "tools"},
                                       model=with_tools), True, "calls the tool `plus`"),
    "learned calls that the template drops": (Task(CALLED_LAST, data={**WHOLE, "tools": "tools"}, model=with_tools,
                                                   tokenizer=partial(tokenizer, CHAT_TEMPLATE)), True,
                                              "it leaves out the call of `add`"),
    "pairs beyond the limit": (Task([{**each, "chosen": f"It is what you add: {each['answer']}"} for each in PAIRS],
                                    dag="dpo", data={**COMPARED, "max_target_tokens": 4}, tokenizer=tokenizer), True,
                               "has a target of more than 4 tokens"),
    "pairs with calls that the template drops": (Task([{**each, "chosen": [{
        "role": "assistant", "content": "", "tool_calls": CALL["tool_calls"]}]} for each in PAIRS], dag="dpo",
        data=COMPARED, tokenizer=tokenizer), True, "it leaves out the call of `add`"),
    "a template that names the day": (Task(SUMS, tokenizer=partial(tokenizer, DATED)), False,
                                      "which the chat template reads from the clock"),
    "a header before learned answers": (Task(SUMS, tokenizer=partial(tokenizer, HEADER_FIRST)), False,
                                        "writes more before the answer than at the end of the prompt of each"),
    "answers that the question begins": (Task([{**each, "question": [*each["question"], {
        "role": "assistant", "content": "It is "}]} for each in ASKED], tokenizer=tokenizer), False,
                                         "questions of train.jsonl end with an answer of the assistant"),
    "prompts that are all dropped": (Task(SUMS, "math", data={"max_prompt_tokens": 2, "long_prompts": "drop"},
                                          tokenizer=tokenizer), False, "another takes its place"),
    "a form that the template begins": (Task(SUMS, "format", tokenizer=partial(tokenizer, THINKS)), True,
                                        "reward: {format: {opened: true}}"),
    "a template's tokens in texts": (Task([{**each, "question": f"{each['question']}{EOS}{USER}Again?"}
                                           for each in SUMS], "math", tokenizer=tokenizer), False,
                                     f"has `{EOS}` in a text, which becomes the token"),
    "answers with the end that the template writes": (Task([{**each, "answer": f"{each['answer']}{EOS}"}
                                                            for each in SUMS], tokenizer=tokenizer), False,
                                                      f"has `{EOS}` in a text"),
    "answers without a text": (Task([{"messages": [HELLO[0], {"role": "assistant", "content": ""}, *each["question"], {
        "role": "assistant", "content": each["answer"]}]} for each in ASKED], data={**WHOLE, "targets": "all"},
        tokenizer=tokenizer), False, "has an answer without a text, of which the end alone is learned"),
    "targets beyond the limit": (Task(ANSWERED, data={"max_target_tokens": 4}, tokenizer=tokenizer), True,
                                 "has a target of more than 4 tokens"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_task_with_a_fault_is_refused_or_noted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_fault(*FAULTY[name], tmp_path, f"faulty_{[*FAULTY].index(name)}")


GOOD = {
    "numbers": Task(SUMS, "math"),
    "answers behind ####": Task(ANSWERED, "math", held_out=[{"question": "2 + 2?", "answer": "#### 4"}]),
    "messages": Task([{**each, "question": [{"role": "system", "content": "Add."}, *each["question"]]}
                      for each in ASKED], "math"),
    "a conversation": Task([{**each, "question": [*HELLO, *each["question"]]} for each in ASKED]),
    "whole conversations": Task([{"messages": [*each["question"], {"role": "assistant", "content": each["answer"]}]}
                                 for each in ASKED], data={"question": "messages", "answer": "messages"}),
    "all turns of conversations": Task([{"messages": [*HELLO, *each["question"], {
        "role": "assistant", "content": each["answer"]}]} for each in ASKED],
                                       data={"question": "messages", "answer": "messages", "targets": "all"}),
    "two messages of the assistant": Task([{"messages": [*each["question"], HELLO[1], {
        "role": "assistant", "content": each["answer"]}]} for each in ASKED], data={**WHOLE, "targets": "all"}),
    "a completion of several turns": Task([{"prompt": each["question"], "completion": [HELLO[1], HELLO[0], {
        "role": "assistant", "content": each["answer"]}]} for each in ASKED],
        data={"question": "prompt", "answer": "completion"}),
    "tool calls": Task(CALLED, data={"tools": "tools"}, model=with_tools, tokenizer=partial(tokenizer, WRITES_CALLS)),
    "results that the template writes as JSON": Task(
        [{**each, "question": [*each["question"][:2], {"role": "tool", "content": '{"r": "2"}'}]} for each in CALLED],
        data={"tools": "tools"}, model=with_tools, tokenizer=partial(tokenizer, RESULTS_AS_JSON)),
    "questions without answers": Task([{"question": each["question"]} for each in SUMS], {"length": {"cap": 10}}),
    "an end of the whole conversation": Task(SUMS, "math", tokenizer=partial(tokenizer, CLOSES)),
    "pairs": Task(PAIRS, dag="dpo", data=COMPARED),
    "pairs that differ by their calls": Task([{**each, **{name: [{"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"x": int(each[name])}}}]}] for name in (
            "chosen", "rejected")}} for each in PAIRS], dag="dpo", data=COMPARED, model=with_tools,
        tokenizer=partial(tokenizer, WRITES_CALLS)),
    "answers to imitate": Task(ANSWERED),
    "a thought that the template opens": Task(SUMS, "math", tokenizer=partial(tokenizer, THINKS)),
    "other scripts": Task([{"question": f"{a} 加 {a} 是多少？", "answer": f"答案是 {2 * a}。🙂"} for a in range(12)]),
    "an environment": Task(SUMS, dag="grpo_tools"),
    "a teacher": Task(SUMS, dag="distill"),
    "answers with an end that the model's folder names": Task(
        [{**each, "answer": f"{each['answer']}<end>"} for each in SUMS], data={"max_target_tokens": 3},
        tokenizer=partial(tokenizer, CHAT_TEMPLATE.replace(EOS, ""), "<end>"),
        known_ends=lambda made: [made.convert_tokens_to_ids("<end>")]),
    "long documents": Task([{"question": "Sum up: " + "word " * 5000 + str(a), "answer": f"It is {a}."}
                            for a in range(9)], data={"max_prompt_tokens": 50_000}),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_task_is_proved_without_a_word(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = replace(GOOD[name], tokenizer=GOOD[name].tokenizer or tokenizer)
    account = proved(task, tmp_path, f"good_{[*GOOD].index(name)}")
    assert account.doubts == []
    assert account.proved.keys() == {"data", "rewards", "tokens"}


def test_a_wrong_end_token_is_refused(tmp_path, monkeypatch):
    """Sampling would stop at another token than the one that answers teach as their end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workers.preflight.tokens.end_tokens", lambda tokenizer, *_, **__: [tokenizer.bos_token_id])
    check_fault(Task(SUMS, tokenizer=tokenizer), True, "has a target without an end", tmp_path, "wrong_end")


def test_fields_that_are_not_encoded_leave_no_record_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Task([{**each, "source": "a" * 410_000} for each in SUMS[:2]], data={"max_target_tokens": 1},
                tokenizer=tokenizer)
    check_fault(task, True, "each of the first 2 records has a target", tmp_path, "unused_field")


def test_validate_proves_the_default_run_without_a_doubt(capsys):
    assert main(["validate", "grpo", "--prove"]) == 0
    said = capsys.readouterr().out
    assert "proved: data (128 records, " in said
    assert "models (6 rows, " in said
    assert said.index("proved: ") < said.index(": no mistakes")
    assert [line for line in said.splitlines() if line.startswith("note: ") and "jsonl" in line] == []


def test_validate_leaves_models_of_several_ranks_to_the_run(capsys):
    assert main(["validate", "grpo", "--prove", "--set", "mode=async"]) == 0
    said = capsys.readouterr().out
    assert "note: the models are proved when the run starts, as one rank alone cannot have them: " in said


@pytest.mark.parametrize(("template", "longest", "says", "doubt"), [
    (None, 64, "", False), ("{{ messages[0]['role'] }}", 64, "each of the first 3 records cannot be asked: the chat "
                            "template has 0 places for the 1 images", False),
    (None, 12, "one of the first 3 records has a prompt of more than 12 tokens with its pictures", True)])
def test_pictures_are_proved(template, longest, says, doubt, tmp_path):
    for index, size in enumerate((16, 32, 90)):
        Image.new("RGB", (size, size)).save(tmp_path / f"{index}.png")
    rows = [{"question": f"How many {index}?", "answer": "1", "image": f"{index}.png"} for index in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = "{architecture: qwen3_vl, layers: 2, hidden: 64, heads: 2, kv_heads: 1}"
    spec = load("grpo", None, [f"roles.actor.model={model}", "data.images=image", f"data.train={tmp_path}/train.jsonl",
                               f"data.max_prompt_tokens={longest}", "data.batch=1", "validation=null"])
    made = build_tokenizer(["How many 0 1 2?"], with_images=True)
    made.chat_template = template or made.chat_template
    account = Preflight()
    prove_with_tokenizer(account, spec, made, None, [], ImageEncoder(EMBEDDED_IMAGE_PROCESSOR, IMAGE_ID, Path()))
    assert account.proved == {"pictures": 3}
    found = account.doubts if doubt else [str(mistake) for mistake in account.mistakes]
    assert [says in each for each in found] == [True] * bool(says)
    assert not (account.mistakes if doubt else account.doubts)
