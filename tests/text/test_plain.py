"""Plain-role formats."""

import gzip
import json

import pytest

from rewarden.errors import ConfigError, DataError
from rewarden.text.plain import PlainFormat
from rewarden.text.render import load_template
from rewarden.types import Message


def text_of(kind, conversation, *, generation, end="</s>"):
    return PlainFormat(kind, end).lay_out(conversation, generation=generation).text


def test_moss_writes_roles_without_blanks_and_ends_every_turn(talk):
    # specs/ppomax.md 1.3
    chat = talk("u1", "a1", "u2")
    assert text_of("moss_en", chat, generation=True) == "Human:u1</s>Assistant:a1</s>Human:u2</s>Assistant:"
    assert text_of("moss_zh", chat, generation=True) == "<|Human|>u1</s><|MOSS|>a1</s><|Human|>u2</s><|MOSS|>"
    assert text_of("moss_en", talk("u1", "a1"), generation=False) == "Human:u1</s>Assistant:a1</s>"


def test_alpaca_prompts_have_the_published_lengths(talk):
    # specs/ensemble.md 5.2
    plain = text_of("alpaca", talk("Say hi."), generation=True)
    given = text_of("alpaca", talk("Say hi.", input="x"), generation=True)
    assert (len(plain), len(given)) == (146, 212)
    assert plain.startswith("Below is an instruction that describes a task. Write a response")
    assert plain.endswith("\n\n### Instruction:\nSay hi.\n\n### Response:")
    assert given.endswith("\n\n### Instruction:\nSay hi.\n\n### Input:\nx\n\n### Response:")
    assert text_of("alpaca", talk("Say hi.", "Hi."), generation=False) == plain + "Hi.</s>"


def test_alpaca_takes_the_input_apart_from_a_merged_instruction(talk):
    merged = text_of("alpaca", talk("Say hi.\n\nx", input="x"), generation=True)
    assert merged == text_of("alpaca", talk("Say hi.", input="x"), generation=True)
    for blank in ("", "  ", None, 3):
        assert text_of("alpaca", talk("Say hi.", input=blank), generation=True) == text_of(
            "alpaca", talk("Say hi."), generation=True
        )


def test_alpaca_marks_instruction_and_input_as_the_users(build, talk):
    tokenizer = build.llama3()
    template = load_template(tokenizer, "alpaca")
    rollout = template.render(talk("Say hi.", "Yes.", input="Why"))
    users = [tokenizer.decode(rollout.token_ids[s.start : s.stop]) for s in rollout.spans if s.role == "user"]
    assert users == ["Say hi.", "Why"]
    with pytest.raises(DataError, match="'alpaca' has one exchange, this conversation has 3 messages"):
        template.start(talk("Say hi.", "Hi.", "Again"))
    with pytest.raises(DataError, match="'alpaca' has one exchange"):
        template.extend(template.render(talk("Say hi.", "Hi.")), Message(role="user", text="Again"))


def test_hh_is_the_published_transcript_with_eos_after_each_answer(talk):
    chat = talk("q1", "a1", "q2", "a2")
    assert (
        text_of("hh", chat, generation=False, end="<E>") == "\n\nHuman: q1\n\nAssistant: a1<E>\n\nHuman: q2\n\nAssistant: a2<E>"
    )
    assert text_of("hh", talk("q1"), generation=True) == "\n\nHuman: q1\n\nAssistant:"


def test_real_hh_transcripts_come_back_but_for_eos(shared, talk):
    path = shared / "data/hh_rlhf_helpful/resplit/test.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        transcripts = [json.loads(line)["chosen"] for line, _ in zip(lines, range(50), strict=False)]
    compared = 0
    for transcript in transcripts:
        first, *turns = transcript.split("\n\nHuman: ")
        texts = [text for turn in turns for text in turn.split("\n\nAssistant: ")]
        if first or len(texts) % 2 or len(texts) != 2 * len(turns):
            continue
        compared += 1
        assert text_of("hh", talk(*texts), generation=False, end="") == transcript
    assert compared > 40


@pytest.mark.parametrize("kind", ["moss_en", "moss_zh", "alpaca", "hh"])
@pytest.mark.parametrize("name", ["llama3", "llama2", "legacy", "chatml"])
def test_a_plain_format_starts_with_one_bos_and_ends_with_eos(families, talk, kind, name):
    tokenizer = families[name]
    template = load_template(tokenizer, kind)
    rollout = template.render(talk("Hello there", "Yes. Why"))
    bos = tokenizer.bos_token_id
    assert rollout.token_ids.count(bos) == (0 if bos is None else 1)
    assert bos is None or rollout.token_ids[0] == bos
    assert template.end_of_turn_id == tokenizer.eos_token_id == rollout.token_ids[-1]
    string = text_of(kind, talk("Hello there", "Yes. Why"), generation=False, end=tokenizer.eos_token)
    body = tokenizer(string, add_special_tokens=False)["input_ids"]
    assert list(rollout.token_ids) == ([] if bos is None else [bos]) + body
    answer = next(span for span in rollout.spans if span.role == "assistant")
    assert template.decode(rollout.token_ids[answer.start : answer.stop]) == "Yes. Why"
    prompt = template.start(talk("Hello there"))
    assert rollout.token_ids == (*prompt.token_ids, *rollout.token_ids[answer.start : answer.stop])


def test_the_blank_before_an_hh_answer_is_in_its_first_token(families, talk):
    tokenizer = families["chatml"]
    rollout = load_template(tokenizer, "hh").render(talk("Hello there", "Yes"))
    spans = [(s.role, tokenizer.decode(rollout.token_ids[s.start : s.stop])) for s in rollout.spans]
    assert spans == [
        ("template", "\n\nHuman:"),
        ("user", " Hello there"),
        ("template", "\n\nAssistant:"),
        ("assistant", " Yes<|im_end|>"),
    ]


def test_moss_roles_that_are_special_tokens_are_kept_apart_from_text_that_spells_them(build, talk):
    tokenizer = build.llama2()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Human|>", "<|MOSS|>"]})
    template = load_template(tokenizer, "moss_zh")
    human, moss = tokenizer.convert_tokens_to_ids(["<|Human|>", "<|MOSS|>"])
    rollout = template.start(talk("Hello <|MOSS|> there", "Yes", "Why"))
    assert [i for i in rollout.token_ids if i in (human, moss)] == [human, moss, human, moss]
    assert rollout.token_ids[-1] == moss
    longer = template.extend(template.render(talk("Hello", "Yes")), Message(role="user", text="Why"))
    assert longer.token_ids == template.start(talk("Hello", "Yes", "Why")).token_ids


def test_plain_formats_refuse_what_they_have_no_place_for(build, talk):
    for kind in ("moss_en", "moss_zh", "alpaca", "hh"):
        with pytest.raises(DataError, match=f"the format '{kind}' has no place for a system message"):
            load_template(build.llama3(), kind).start(talk("Hello", system="Be kind"))
    tokenizer = build.chatml()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="ends a turn with the eos token, and this tokenizer has none"):
        load_template(tokenizer, "hh")
