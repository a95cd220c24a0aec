"""Chat templates render as transformers renders them, and reach nothing but the conversation."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from minivllm.errors import ModelError
from minivllm.tokenizer.chat_template import render_chat
from minivllm.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.small_tokenizers import byte_level_bpe

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{%- set ns = namespace(last=-1, names=dict(a=1)) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {{- bos_token ~ message.content | trim }}
    {% generation %}{{ message.reasoning_content or '-' }}|{{ message.thinking or '-' }}{% endgeneration %}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
    {%- if 'name' in message %}{{ message.name }}{% endif %}
{% endfor %}
{{ ns.last }} {{ ns.names }} {{ documents is none }} {{ pad_token is defined }} {{ extra | tojson }}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% else %}{{ tools }}{% endif %}
{%- if add_generation_prompt %}{{ eos_token }}{% endif %}"""
CALLS = [{"type": "function", "function": {"name": "é<b>", "arguments": {"x": [1, 2.5, None, True]}}}]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello <b>&amp; 'you'"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n", "name": None}],
    [
        {"role": "user", "content": "漢字"},
        {"role": "assistant", "content": "", "reasoning": "because", "tool_calls": CALLS},
        {"role": "user", "content": "again", "name": "Ann"},
    ],
]


@pytest.mark.parametrize("template", [CHATML, BLOCKS], ids=["chatml", "every construct"])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_a_conversation_reads_as_transformers_writes_it(template: str, tools: list | None) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=template
    )
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            wanted = theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False, extra={"ü": 1}
            )
            given = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "extra": {"ü": 1}}
            ours = render_chat(template, messages, tools=tools, add_generation_prompt=prompt, variables=given)
            assert ours == wanted


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.format.__globals__.os }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{% set x = namespace(__class__=1) %}",
        "{% set x = namespace() %}{% set x.__class__ = 1 %}",
        "{{ ('%s' | format(messages)).__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        render_chat(template, CONVERSATIONS[0], tools=None, add_generation_prompt=True, variables={})


def test_objects_reach_a_template_by_name_only() -> None:
    shown = render_chat(
        "{{ x }}", CONVERSATIONS[0], tools=None, add_generation_prompt=True, variables={"x": open}
    )
    assert shown == "<builtin_function_or_method>"


PARTS_ONLY = (
    "{% for message in messages %}{{ message['role'] ~ ':' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""As models that see bring it: a content that is a text is lost without a word."""


@pytest.mark.parametrize("given", [True, False], ids=["given", "the model's"])
def test_a_template_that_reads_parts_only_gets_parts(given: bool) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(), chat_template=CHATML if given else PARTS_ONLY
    )
    ours, template = Tokenizer(theirs, "test"), PARTS_ONLY if given else None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    wanted = theirs.apply_chat_template(
        parts, chat_template=PARTS_ONLY, add_generation_prompt=True, tokenize=False
    )
    assert "Hi <b>" in wanted
    assert ours.render_chat(messages, chat_template=template) == wanted
    assert ours.render_chat(parts, chat_template=template) == wanted
    messages.append({"role": "assistant", "content": "Well"})
    ends = ours.render_chat(
        messages, add_generation_prompt=False, continue_final_message=True, chat_template=template
    )
    assert ends == wanted + "Well"
    image = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    ends = ours.render_chat(image, False, continue_final_message=True, chat_template=template)
    assert ends == "user:a<image>"


def test_a_template_that_reads_texts_gets_texts() -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), chat_template=CHATML)
    text = Tokenizer(theirs, "test").render_chat([{"role": "user", "content": "Hi"}], False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_template_may_come_with_the_image_processor(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), eos_token="<|end|>").save_pretrained(tmp_path)
    assert not load_tokenizer(tmp_path).has_chat_template
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": CHATML}))
    text = load_tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}], False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    for broken in ("{", "[]", "{}", '{"chat_template": 1}'):
        file.write_text(broken)
        with pytest.raises(ModelError, match="chat_template"):
            load_tokenizer(tmp_path)
