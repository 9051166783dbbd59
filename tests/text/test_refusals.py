"""Templates, tokenizers and conversations that are refused, in words; and what a fingerprint covers."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from rewarden.errors import ConfigError, DataError
from rewarden.text.render import load_template
from rewarden.types import Message


@pytest.fixture(scope="module")
def templates(families):
    return {"chatml": load_template(families["chatml"])}


def answers(rollout):
    return [rollout.token_ids[s.start : s.stop] for s in rollout.spans if s.role == "assistant"]


def test_a_template_without_a_generation_prompt_is_refused(build):
    source = build.CHATML.split("{% if add_generation_prompt")[0]
    with pytest.raises(
        ConfigError, match=r"has no generation prompt: add_generation_prompt leaves out '<\|im_start\|>assistant"
    ):
        load_template(build.chatml(source))


def test_a_generation_prompt_that_ends_a_turn_is_refused(build):
    # Report 3: a prompt that already ends in eos teaches the policy to stop at once.
    source = build.CHATML.replace("m['role'] + '\n'", "m['role'] + '<|im_end|>'").replace("assistant\n", "assistant<|im_end|>")
    with pytest.raises(ConfigError, match="learn to stop at once"):
        load_template(build.chatml(source))


def test_a_template_without_an_end_of_turn_is_refused(build):
    with pytest.raises(ConfigError, match=r"puts nothing after an answer, not a special token"):
        load_template(build.chatml(build.CHATML.replace("'<|im_end|>'", "''")))
    with pytest.raises(ConfigError, match=r"puts '###.* after an answer"):
        load_template(build.chatml(build.CHATML.replace("'<|im_end|>'", "'###'")))


def test_the_templates_own_words_are_in_the_error(build, talk):
    template = load_template(build.chatml(build.NO_SYSTEM))
    with pytest.raises(
        DataError, match=r"f\.jsonl:9: the chat template refuses .*: System role not supported \(roles: system, user\)"
    ):
        template.start(talk("Hello", system="Be kind", where="f.jsonl:9"))
    assert template.start(talk("Hello")).token_ids


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('only tools, please') }}", "only tools, please"),
        ("{% for m in messages %}{{ m.content }", "unexpected '}'"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("Hello{{ bos_token }}", "leaves out message 0"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "prints message 0 twice"),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", "rewrites message texts"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "in another order"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_words(build, source, words):
    with pytest.raises(ConfigError) as caught:
        load_template(build.chatml(source))
    assert words in str(caught.value)


def test_a_system_message_that_the_template_leaves_out_is_refused(build, talk):
    template = load_template(
        build.chatml("{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}" + build.CHATML)
    )
    with pytest.raises(DataError, match=r"leaves out message 0 \(system\)"):
        template.render(talk("Hello", "Yes", system="Be kind"))


def test_no_chat_template_and_unknown_kinds_are_refused(build):
    tokenizer = build.chatml()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat_template; set `template` to one of the plain formats"):
        load_template(tokenizer)
    with pytest.raises(ConfigError, match="'chatt' is unknown; use one of chat, moss_en, moss_zh, alpaca, hh"):
        load_template(tokenizer, "chatt")


def test_several_chat_templates_need_a_default_one(build):
    tokenizer = build.chatml()
    tokenizer.chat_template = {"tool_use": build.CHATML, "rag": build.CHATML}
    with pytest.raises(ConfigError, match="none is named 'default'"):
        load_template(tokenizer)
    tokenizer.chat_template = {"tool_use": "x", "default": build.CHATML}
    assert load_template(tokenizer).fingerprint == load_template(build.chatml()).fingerprint


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ("", "has no messages"),
        ("a", "message 0 has role 'assistant' where 'user' is due"),
        ("uu", "message 1 has role 'user' where 'assistant' is due"),
        ("uaa", "message 2 has role 'assistant' where 'user' is due"),
        ("uas", "message 2 has role 'system' where 'user' is due"),
        ("sau", "message 1 has role 'assistant' where 'user' is due"),
    ],
)
def test_roles_that_do_not_alternate_are_refused(templates, talk, roles, words):
    names = {"u": "user", "a": "assistant", "s": "system"}
    messages = tuple(Message(role=names[letter], text="Yes") for letter in roles)
    with pytest.raises(DataError, match=f"d.json:1: .*{words}"):
        templates["chatml"].render(replace(talk(where="d.json:1"), messages=messages))


def test_only_a_conversation_that_waits_for_the_assistant_can_be_started(templates, talk):
    with pytest.raises(DataError, match="ends with the assistant, so there is nothing to answer"):
        templates["chatml"].start(talk("Hello", "Yes"))


def test_private_use_characters_in_a_text_do_not_disturb_the_search(templates, talk):
    template = templates["chatml"]
    assert template.decode(answers(template.render(talk("Hello", "a\U000f0001b")))[0]) == "a\U000f0001b"
    with pytest.raises(DataError, match=r"beyond U\+FFFFF"):
        template.render(talk("Hello", "\U00100000"))


def test_a_date_in_a_template_stands_still(build, talk):
    source = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y') }}\n" + build.CHATML
    template = load_template(build.chatml(source))
    rollout = template.start(talk("Hello"))
    assert template.tokenizer.decode(rollout.token_ids).startswith("26 Jul 2024|2024\n<|im_start|>user\nHello")


def test_the_fingerprint_changes_with_template_and_tokenizer_only(build, families, tmp_path):
    first = load_template(build.chatml()).fingerprint
    families["chatml"].save_pretrained(tmp_path)
    assert load_template(AutoTokenizer.from_pretrained(tmp_path)).fingerprint == first
    others = [
        load_template(build.chatml(build.NO_SYSTEM)),
        load_template(build.added(build.chatml(), "<think>")),
        load_template(build.chatml(), "hh"),
        load_template(build.chatml(), "moss_en"),
    ]
    assert len({first, *(template.fingerprint for template in others)}) == 5
    padded = build.chatml()
    padded(["Hello", "Hello there, how are you"], padding=True, truncation=True, max_length=4)
    assert load_template(padded).fingerprint == first


def test_padding_or_truncation_set_on_the_tokenizer_changes_nothing(build, talk):
    tokenizer = build.chatml()
    template = load_template(tokenizer)
    expected = template.render(talk("Hello there", "Yes"))
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=100)
    assert template.render(talk("Hello there", "Yes")) == expected


def test_a_tokenizer_without_a_fast_backend_is_refused():
    class Slow:
        chat_template = "x"

    with pytest.raises(ConfigError, match="Slow has no fast backend"):
        load_template(Slow())
