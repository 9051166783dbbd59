"""Rendering with chat templates: joint tokenisation, spans, prefixes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rewarden.errors import ConfigError, DataError
from rewarden.text.render import load_template

NAMES = ("chatml", "llama3", "llama2", "legacy", "world", "thinking")
# Families whose tokens give any text back exactly; a world's vocabulary has only its own words.
EXACT = ("chatml", "llama3", "legacy")
SEARCH = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

spelled = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<s>", "</s>", "<|end|>", "<|user|>", "<unk>", "[INST]"])
pieces = st.one_of(
    st.sampled_from(["Hello", " Yes", "why?", "\n", "\n\n", "  ", ":", "user\n", "é漢", "🙂", "\t", "Ünï", "x"]),
    spelled,
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Co"]), max_size=6),
)
anything = st.lists(pieces, max_size=5).map("".join)
# Templates of the Llama families trim, and whitespace at the start may join the end of the generation prompt; both have own tests.
trimmed = anything.map(str.strip)


@pytest.fixture(scope="module")
def templates(families):
    return {name: load_template(tokenizer) for name, tokenizer in families.items()}


def shown(template, rollout, role, turn=None):
    """The tokens of all spans of a role, as words."""
    spans = [span for span in rollout.spans if span.role == role and turn in (None, span.turn)]
    return [template.tokenizer.convert_ids_to_tokens(list(rollout.token_ids[s.start : s.stop])) for s in spans]


def answers(rollout):
    return [rollout.token_ids[s.start : s.stop] for s in rollout.spans if s.role == "assistant"]


@pytest.mark.parametrize("name", NAMES)
@SEARCH
@given(texts=st.lists(anything, min_size=1, max_size=4), system=st.none() | anything)
def test_spans_cover_the_tokens_once_and_in_order(templates, talk, name, texts, system):
    rollout = templates[name].render(talk(*texts, system=system))
    assert [span.start for span in rollout.spans] == [0, *(span.stop for span in rollout.spans[:-1])]
    assert rollout.spans[-1].stop == len(rollout.token_ids)
    assert all(span.start < span.stop for span in rollout.spans)
    assert [(s.role, s.turn) for s in rollout.spans if s.role == "assistant"] == [
        ("assistant", i) for i in range(len(texts) // 2)
    ]
    assert rollout.stop == "turns"


@pytest.mark.parametrize("name", EXACT)
@SEARCH
@given(texts=st.lists(trimmed, min_size=2, max_size=4))
def test_decoding_an_assistant_span_gives_the_content_back(templates, talk, name, texts):
    template = templates[name]
    conversation = talk(*texts)
    rollout = template.render(conversation)
    contents = [message.text for message in conversation.messages if message.role == "assistant"]
    assert [template.decode(ids) for ids in answers(rollout)] == contents
    assert all(ids[-1] == template.end_of_turn_id for ids in answers(rollout))


@pytest.mark.parametrize("name", NAMES)
@SEARCH
@given(texts=st.lists(trimmed, min_size=2, max_size=4), system=st.none() | trimmed)
def test_the_generation_prompt_is_a_token_prefix_of_the_render(templates, talk, name, texts, system):
    template = templates[name]
    conversation = talk(*texts, system=system)
    before = template.facts["merged_seam"]
    whole = template.render(conversation)
    last = max(i for i, message in enumerate(conversation.messages) if message.role == "assistant")
    prompt = template.start(talk(*[m.text for m in conversation.messages[:last] if m.role != "system"], system=system))
    if template.facts["merged_seam"] == before:
        assert whole.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    start = next(span.start for span in reversed(whole.spans) if span.role == "assistant")
    assert len(prompt.token_ids) <= start
    assert prompt.stop == "open"
    assert prompt.spans[-1].role == "template"


@pytest.mark.parametrize("name", NAMES)
@SEARCH
@given(texts=st.lists(st.sampled_from(["Hello there", "Yes. Why?", "a  b\n\nc", "1 2 3"]), min_size=1, max_size=5))
def test_rendering_is_one_tokenisation_of_one_string(families, templates, talk, name, texts):
    tokenizer = families[name]
    rows = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    string = tokenizer.apply_chat_template(rows, tokenize=False)
    assert list(templates[name].render(talk(*texts)).token_ids) == tokenizer(string, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2", "legacy"])
@SEARCH
@given(texts=st.lists(anything, min_size=2, max_size=3), word=spelled)
def test_text_that_spells_a_special_token_stays_text(families, templates, talk, name, texts, word):
    template = templates[name]
    conversation = talk(texts[0] + word, texts[1] + word, *texts[2:])
    plain = talk("Hello", "Yes", *["Why"] * len(texts[2:]))
    special = set(template.tokenizer.all_special_ids) - {template.tokenizer.unk_token_id}
    kept = [i for i in template.render(conversation).token_ids if i in special]
    assert kept == [i for i in template.render(plain).token_ids if i in special]


def test_a_spelled_end_of_turn_is_kept_letter_by_letter(templates, talk):
    template = templates["chatml"]
    before = template.facts["spelled_special"]
    rollout = template.render(talk("Hello <|im_end|>", "Yes<|im_start|>"))
    assert "".join(shown(template, rollout, "user")[0]) == "HelloĠ<|im_end|>"
    assert len(shown(template, rollout, "user")[0]) > 5
    assert template.decode(answers(rollout)[0]) == "Yes<|im_start|>"
    assert rollout.token_ids.count(template.end_of_turn_id) == 2
    assert template.facts["spelled_special"] == before + 2


def test_an_end_of_turn_that_is_not_marked_special_stays_text_too(build, talk):
    tokenizer = build.added(build.chatml(build.CHATML.replace("im_end", "done")), "<|done|>")
    template = load_template(tokenizer)
    rollout = template.render(talk("Hello <|done|> there", "Yes"))
    assert tokenizer.convert_ids_to_tokens(template.end_of_turn_id) == "<|done|>"
    assert rollout.token_ids.count(template.end_of_turn_id) == 2


def test_a_vocabulary_that_can_spell_a_special_token_by_itself_keeps_it_as_text(build, talk):
    # A Unigram model holds "</s>" among its pieces; a BPE model may have merges that make it.
    template = load_template(build.llama2())
    assert template.render(talk("Hello </s>", "Yes")).token_ids.count(2) == 1
    tokenizer = build.llama2()
    vocab = {
        word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "▁", "<", "/", "s", ">", "</", "s>", *"[INST]HeloYW hy"])
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "/"), ("s", ">"), ("</", "s>")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=build.LLAMA2
    )
    rollout = load_template(tokenizer).render(talk("He</s>lo", "Yes"))
    assert rollout.token_ids.count(2) == 1
    assert shown(load_template(tokenizer), rollout, "user")[0][-5:] == ["e", "</", "s>", "l", "o"]


def test_a_tokenizer_for_which_runs_are_not_the_joint_tokenisation_is_refused_for_that_row(build, talk):
    template = load_template(build.llama2())
    joint = template._encoder.joint
    # Runs that begin with a blank mark, as this tokenizer would give them without the care that is taken of it.
    joint.__dict__["_later_run"] = joint._first_run
    assert template.render(talk("Hello", "Yes")).token_ids
    with pytest.raises(DataError, match=r"x\.jsonl:3: the text spells a special token, and this tokenizer gives other ids"):
        template.render(talk("Hello </s>", "Yes", where="x.jsonl:3"))


def test_the_end_of_turn_comes_from_the_template_not_from_eos(families, templates):
    # REFUEL fault B-40: taking eos makes every Llama 3 turn look unfinished.
    tokenizer, template = families["llama3"], templates["llama3"]
    assert tokenizer.convert_ids_to_tokens(template.end_of_turn_id) == "<|eot_id|>"
    assert tokenizer.eos_token == "<|end_of_text|>"
    assert template.stop_ids == {template.end_of_turn_id, tokenizer.eos_token_id}


def test_pad_equal_to_eos_leaves_the_end_of_turn_in_the_answer(families, templates, talk):
    tokenizer, template = families["chatml"], templates["chatml"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == template.end_of_turn_id
    rollout = template.render(talk("Hello", "Yes"))
    assert answers(rollout)[0][-1] == tokenizer.pad_token_id


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_there_is_one_bos_where_template_and_tokenizer_each_add_one(families, templates, talk, name):
    tokenizer, template = families[name], templates[name]
    rows = [{"role": "user", "content": "Hello"}]
    twice = tokenizer(tokenizer.apply_chat_template(rows, tokenize=False))["input_ids"]
    assert twice.count(tokenizer.bos_token_id) == 2
    for rollout in (template.start(talk("Hello")), template.render(talk("Hello", "Yes"))):
        assert rollout.token_ids[0] == tokenizer.bos_token_id
        assert rollout.token_ids.count(tokenizer.bos_token_id) == 1


def test_headers_separators_and_the_generation_prompt_are_template(templates, talk):
    template = templates["chatml"]
    rollout = template.render(talk("Hello", "Yes.", "Why", "Yes"))
    assert shown(template, rollout, "assistant") == [["Yes", ".", "<|im_end|>"], ["Yes", "<|im_end|>"]]
    assert shown(template, rollout, "user") == [["Hello"], ["Wh", "y"]]
    assert ["".join(words) for words in shown(template, rollout, "template")] == [
        "<|im_start|>userĊ",
        "<|im_end|>Ċ<|im_start|>assistantĊ",
        "Ċ<|im_start|>userĊ",
        "<|im_end|>Ċ<|im_start|>assistantĊ",
        "Ċ",
    ]
    assert [span.turn for span in rollout.spans] == [0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_a_blank_that_the_template_puts_before_an_answer_is_the_policys_to_write(templates, talk):
    template = templates["llama2"]
    rollout = template.render(talk("Hello", "Yes", system="Be kind"))
    assert shown(template, rollout, "assistant") == [["▁Yes", "▁", "</s>"]]
    assert "".join(shown(template, rollout, "system")[0]) == "Be▁kind"
    prompt = template.start(talk("Hello", system="Be kind"))
    assert rollout.token_ids == (*prompt.token_ids, *answers(rollout)[0])
    assert template.decode(answers(rollout)[0]) == "Yes"


def test_an_empty_answer_is_its_end_of_turn_alone(templates, talk):
    for name in ("chatml", "llama3", "world"):
        template = templates[name]
        before = template.facts["empty_assistant"]
        assert answers(template.render(talk("Hello", ""))) == [(template.end_of_turn_id,)]
        assert template.facts["empty_assistant"] == before + 1


@pytest.mark.parametrize("text", ["  Yes  ", "\n\nYes", "Yes\n", "\t Yes. Why \n "])
def test_templates_that_trim_keep_the_offsets_right(templates, talk, text):
    template = templates["llama3"]
    rollout = template.render(talk(f" {text}", text, "Why"))
    assert template.decode(answers(rollout)[0]) == text.strip()
    assert "".join(shown(template, rollout, "user")[0]) == text.strip().replace(" ", "Ġ")


@pytest.mark.parametrize("text", ["  Yes  ", " Yes", "Yes \n\n ", " "])
def test_templates_that_do_not_trim_keep_all_whitespace_of_a_user(templates, talk, text):
    rollout = templates["chatml"].render(talk(text, "Yes"))
    assert "".join(shown(templates["chatml"], rollout, "user")[0]).endswith(text.lstrip().replace(" ", "Ġ").replace("\n", "Ċ"))


def test_a_template_that_trims_one_role_only_keeps_the_whitespace_of_the_other(build, talk):
    source = build.CHATML.replace("m['content'] +", "(m['content'] | trim if m['role'] == 'user' else m['content']) +")
    template = load_template(build.chatml(source))
    rollout = template.render(talk(" Why ", "Yes  ", " Hello"))
    assert shown(template, rollout, "user") == [["Wh", "y"], ["Hello"]]
    assert template.decode(answers(rollout)[0]) == "Yes  "


def test_a_token_across_the_seam_is_template_and_counted(smollm2, talk):
    from transformers import AutoTokenizer

    template = load_template(AutoTokenizer.from_pretrained(smollm2))
    rollout = template.render(talk("Hello", " Yes"))
    assert shown(template, rollout, "assistant") == [["ĠYes", "<|im_end|>"]]
    assert shown(template, rollout, "template")[1][-1] == "Ċ"
    assert template.facts["merged_seam"] == 0
    rollout = template.render(talk("Hello", "  Yes"))
    assert shown(template, rollout, "template")[1][-1] == "ĊĠ"
    assert shown(template, rollout, "assistant") == [["ĠYes", "<|im_end|>"]]
    assert template.facts["merged_seam"] == 1
    with pytest.raises(DataError, match=r"a\.json:2: the prompt of message 1 is no prefix.*'Ċ'.*'ĊĠ'"):
        template.check_prefix(talk("Hello", "  Yes", where="a.json:2"))
    template.check_prefix(talk("Hello", "Yes", "Why", "Yes"))


def test_a_generation_prompt_that_tokenises_otherwise_is_refused_with_the_first_token_that_differs(build):
    # Without splitting at blanks this vocabulary has "INST]▁" as one piece, which no prompt that ends in "]" can contain.
    with pytest.raises(
        ConfigError, match=r"no prefix of its training render: token \d+ is 'I' .* and 'INST\]▁' .* in the render"
    ):
        load_template(build.llama2(False))
    assert load_template(build.llama2(False), generates=False).end_of_turn_id == 2


def test_a_prompt_that_opens_a_thought_the_training_render_lacks_is_refused(build):
    source = build.CHATML.replace(
        "{{ '<|im_start|>assistant\n' }}{% endif %}", "{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    tokenizer = build.added(build.chatml(source), "<think>")
    source = source.replace("m['content']", "m['content'].split('</think>')[-1]")
    tokenizer.chat_template = source
    with pytest.raises(
        ConfigError, match=r"token \d+ is '<think>' \(id 405\) in the prompt and 'Yes' \(id \d+\) in the render"
    ):
        load_template(tokenizer)


def test_a_prompt_that_opens_a_thought_is_taken_when_answers_think(build, talk):
    source = build.THINKING.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    source = source.replace("and loop.last", "and loop.last and thought")
    template = load_template(build.added(build.chatml(source), "<think>", "</think>"))
    assert "only of answers that think" in template.notes[0]
    rollout = template.render(talk("Hello", "<think>\nWhy\n</think>\n\nYes"))
    prompt = template.start(talk("Hello"))
    assert shown(template, prompt, "template")[-1][-2:] == ["<think>", "Ċ"]
    assert rollout.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    # Report 6: the tokens that the generation prompt adds are not the answer's.
    assert answers(rollout)[0] == rollout.token_ids[len(prompt.token_ids) : -1]
    assert template.decode(answers(rollout)[0]) == "Why\n</think>\n\nYes"


def test_thoughts_that_the_template_drops_from_earlier_turns_are_not_looked_for(templates, talk):
    template = templates["thinking"]
    thought = "<think>\nHello\n</think>\n\nYes"
    rollout = template.render(talk("Hello", thought, "Why", thought))
    assert [template.decode(ids) for ids in answers(rollout)] == ["Yes", thought]
    assert (
        template.render(talk("Hello", thought)).token_ids
        != rollout.token_ids[: len(template.render(talk("Hello", thought)).token_ids)]
    )


def test_an_empty_thought_that_the_template_adds_is_template(templates, talk):
    template = templates["thinking"]
    rollout = template.render(talk("Hello", "Yes"))
    assert shown(template, rollout, "assistant") == [["Yes", "<|im_end|>"]]
    assert shown(template, rollout, "template")[1][-6:] == ["<think>", "Ċ", "Ċ", "</think>", "Ċ", "Ċ"]


def test_a_thought_in_the_generation_prompt_only_is_noted_and_earlier_turns_are_found_where_they_are(build, talk):
    # The prompt carries an empty thought, the last answer too, earlier answers do not: turn by turn differs from all at once.
    source = build.THINKING.replace("assistant\n' }}{% endif", "assistant\n<think>\n\n</think>\n\n' }}{% endif")
    template = load_template(build.added(build.chatml(source), "<think>", "</think>"))
    assert len(template.notes) == 1
    assert template.notes[0].startswith("earlier turns look different once a later one is added: token ")
    rollout = template.render(talk("Hello", "Yes.", "Why", "Yes"))
    assert shown(template, rollout, "assistant") == [["Yes", ".", "<|im_end|>"], ["Yes", "<|im_end|>"]]
    template.check_prefix(talk("Hello", "Yes"))
    with pytest.raises(DataError, match="the prompt of message 1 is no prefix of the conversation: token"):
        template.check_prefix(talk("Hello", "Yes.", "Why", "Yes"))


def test_a_template_without_a_generation_marker_still_has_answers(templates, talk):
    # Report 5: masks that rely on {% generation %} are all zero for most templates.
    for name, template in templates.items():
        assert "{% generation" not in template.tokenizer.chat_template, name
        assert len(answers(template.render(talk("Hello", "Yes", "Why", "")))) == 2
