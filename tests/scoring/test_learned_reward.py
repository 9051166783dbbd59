"""The reward-model scorer: own tokenizer and template, order, batches, heads, too long."""

import math
import random
import statistics

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewarden.errors import ConfigError, ScoreError
from rewarden.scoring import Aggregate, LearnedReward, build_scorer
from rewarden.scoring.reward_model import sub_batches

KINDS = ["words", "bytes"]


def by_transformers(folder, conversation):
    """The heads' outputs for one text on its own, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    messages = [{"role": m.role, "content": m.text} for m in conversation.messages]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        return model.score(hidden[0, -1]).tolist()


@pytest.fixture
def talks(talk):
    rng = random.Random(0)
    words = ["a", "trip", "to", "the", "sea", "please", "yes", "no", "thanks", "where", "do", "you", "want"]

    def text():
        return " ".join(rng.choices(words, k=rng.randint(1, 15)))

    rows = [talk(*(text() for _ in range(rng.choice([2, 4, 6]))), id=str(i)) for i in range(23)]
    return [*rows, talk("hello", "", id="empty answer")]


def trunk(scorer):
    """The only module of a reward model of one trunk."""
    (module,) = scorer.members.modules()
    return module


def close(score, expected):
    return abs(score - expected) <= 1e-5 * (1 + abs(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_what_transformers_gives_the_text_alone(kind, reward_folder, talks):
    folder = reward_folder(kind)
    scores = LearnedReward(path=str(folder)).build().score(talks)
    expected = [by_transformers(folder, row)[0] for row in talks]
    assert all(close(score.value, number) for score, number in zip(scores, expected, strict=True))
    assert len({score.value for score in scores}) == len(talks)


def test_two_reward_models_with_different_tokenizers_read_the_same_conversations(reward_folder, talks):
    """The text decides: nothing of one model's tokens reaches the other."""
    words, letters = (LearnedReward(path=str(reward_folder(kind))).build() for kind in KINDS)
    alone = letters.score(talks)
    words.score(talks)
    assert letters.score(talks) == alone
    assert words.template.render(talks[0]).token_ids != letters.template.render(talks[0]).token_ids


@pytest.mark.parametrize("max_tokens", [1, 40, 300, 100_000])
def test_the_batch_a_text_is_in_does_not_change_its_score(max_tokens, reward_folder, talks):
    scorer = LearnedReward(path=str(reward_folder("bytes")), max_tokens=max_tokens).build()
    together = scorer.score(talks)
    alone = [scorer.score([row])[0] for row in talks]
    assert all(close(a.value, b.value) for a, b in zip(together, alone, strict=True))


def test_scores_come_back_in_the_order_of_the_conversations(reward_folder, talks):
    scorer = LearnedReward(path=str(reward_folder("words")), max_tokens=64).build()
    by_id = {row.id: score for row, score in zip(talks, scorer.score(talks), strict=True)}
    shuffled = random.Random(1).sample(talks, len(talks))
    assert scorer.score(shuffled) == [by_id[row.id] for row in shuffled]


def test_equal_texts_are_scored_once(reward_folder, talk):
    scorer = LearnedReward(path=str(reward_folder("words"))).build()
    scorer.score([talk("hello", "maybe")])  # the first call tries out how rows may be put together
    tokens_seen = []
    trunk(scorer).get_input_embeddings().register_forward_hook(lambda module, args, output: tokens_seen.append(args[0].numel()))
    twice = [talk("hello", "yes"), talk("hello", "no")]
    scores = scorer.score([talk("hello", "yes", id=str(i)) for i in range(9)] + twice[1:])
    assert sum(tokens_seen) == sum(len(scorer.template.render(row).token_ids) for row in twice)
    assert len({score.value for score in scores[:9]}) == 1


def test_heads_are_members_and_the_value_is_their_mean(reward_folder, talks):
    folder = reward_folder("words", num_heads=3)
    for row, score in zip(talks, LearnedReward(path=str(folder)).build().score(talks), strict=True):
        expected = by_transformers(folder, row)
        assert len(score.members) == 3
        assert all(close(member, number) for member, number in zip(score.members, expected, strict=True))
        assert close(score.value, math.fsum(expected) / 3)


def test_one_head_is_its_own_only_member(reward_folder, talk):
    score = LearnedReward(path=str(reward_folder("words"))).build().score([talk("hello", "yes")])[0]
    assert score.members == (score.value,)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers by an old name
def test_a_peft_folder_is_scored_with_its_adapter_and_its_own_head(reward_folder, talks, tmp_path):
    base = AutoModelForSequenceClassification.from_pretrained(reward_folder("words"))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["score"], task_type="SEQ_CLS")
    model = get_peft_model(base, config).eval()
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(reward_folder("words")).save_pretrained(tmp_path)
    scorer = LearnedReward(path=str(tmp_path)).build()
    for row, score in zip(talks, scorer.score(talks), strict=True):
        ids = torch.tensor([scorer.template.render(row).token_ids])
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0].item()
        assert close(score.value, expected)


def test_a_text_beyond_max_length_is_too_long_and_the_rest_is_untouched(reward_folder, talk):
    """[user]\\nhello[/]\\n[assistant]\\nyes[/]\\n has 4 special tokens, 4 line breaks and 8 letters: 16 tokens."""
    short, long = talk("hello", "yes"), talk("hello", "yes!")
    folder = str(reward_folder("bytes"))
    fits, too_long = LearnedReward(path=folder, max_length=16).build().score([short, long])
    assert fits == LearnedReward(path=folder).build().score([short])[0]
    assert (too_long.status, too_long.members) == ("too_long", ())
    assert math.isnan(too_long.value)


def test_a_text_beyond_the_models_positions_is_too_long(reward_folder, talk):
    scorer = LearnedReward(path=str(reward_folder("bytes", positions=20)), max_length=1000).build()
    statuses = [score.status for score in scorer.score([talk("hello", "yes"), talk("hello", "y" * 20)])]
    assert statuses == ["ok", "too_long"]


def test_only_too_long_texts_and_no_texts_at_all_are_fine(reward_folder, talk):
    scorer = LearnedReward(path=str(reward_folder("bytes")), max_length=4).build()
    assert [score.status for score in scorer.score([talk("hello", "yes")])] == ["too_long"]
    assert scorer.score([]) == []


def test_a_conversation_that_ends_with_the_user_is_refused(reward_folder, talk):
    scorer = LearnedReward(path=str(reward_folder("words"))).build()
    with pytest.raises(ScoreError, match=r"pairs.jsonl:7 .*ends with 'user'"):
        scorer.score([talk("hello", where="pairs.jsonl:7")])


def test_a_score_that_is_not_finite_stops_with_the_row_shown(reward_folder, talk):
    scorer = LearnedReward(path=str(reward_folder("words"))).build()
    with torch.no_grad():
        trunk(scorer).score.weight.fill_(math.nan)
    with pytest.raises(ScoreError, match=r"nan .*for row r7.*\n.*'hello'\n.*'yes'"):
        scorer.score([talk("hello", "yes", id="r7")])


def test_dropout_in_the_config_changes_nothing(reward_folder, talks):
    scorer = LearnedReward(path=str(reward_folder("words"))).build()
    assert trunk(scorer).config.attention_dropout == 0.1
    assert scorer.score(talks) == scorer.score(talks)


def test_nan_from_one_member_names_the_member_and_the_row(reward_folder, talk):
    scorer = LearnedReward(path=str(reward_folder("words", num_heads=3))).build()
    with torch.no_grad():
        trunk(scorer).score.weight[1].fill_(math.nan)
    with pytest.raises(ScoreError, match=r"member 1 \(of members 0 to 2\) gave nan for row r7.*\n.*'hello'\n.*'yes'"):
        scorer.score([talk("hello", "yes", id="r7")])


@pytest.mark.parametrize(
    ("aggregate", "rule"),
    [
        ({"rule": "worst_case"}, min),
        ({"rule": "median"}, statistics.median),
        ({"rule": "lower_bound", "coef": 2}, lambda m: statistics.fmean(m) - 2 * statistics.pstdev(m)),
        ({"rule": "lower_bound", "coef": 2, "ddof": 1}, lambda m: statistics.fmean(m) - 2 * statistics.stdev(m)),
        ({"rule": "variance_penalty", "coef": 2}, lambda m: statistics.fmean(m) - 2 * statistics.pvariance(m)),
    ],
)
def test_the_value_is_the_aggregate_of_the_members(reward_folder, talks, aggregate, rule):
    folder = str(reward_folder("words", num_heads=3))
    for score in build_scorer({"kind": "reward_model", "path": folder, "aggregate": aggregate}).score(talks):
        assert score.value == pytest.approx(rule(score.members), abs=1e-5)
        assert score.parts["std"] == pytest.approx(statistics.pstdev(score.members), abs=1e-5)


def test_members_without_moments_are_not_centered_and_a_note_says_so(reward_folder):
    folder = str(reward_folder("words", num_heads=3))
    (note,) = LearnedReward(path=folder, aggregate=Aggregate(rule="worst_case")).build().notes
    assert "3 members are not centered before worst_case" in note
    for quiet in (Aggregate(), Aggregate(rule="worst_case", center="none")):
        assert LearnedReward(path=folder, aggregate=quiet).build().notes == ()
    assert LearnedReward(path=str(reward_folder("words")), aggregate=Aggregate(rule="worst_case")).build().notes == ()


def test_every_rule_of_a_single_model_is_its_score(reward_folder, talks):
    folder = str(reward_folder("words"))
    plain = LearnedReward(path=folder).build().score(talks)
    for aggregate in (Aggregate(rule="worst_case"), Aggregate(rule="lower_bound", coef=3)):
        assert LearnedReward(path=folder, aggregate=aggregate).build().score(talks) == plain


def test_a_reference_answer_in_a_column_centers_each_member(reward_folder, talk):
    folder = str(reward_folder("words", num_heads=3))
    plain = LearnedReward(path=folder).build()
    centered = LearnedReward(path=folder, aggregate=Aggregate(rule="worst_case", center="reference")).build()
    row = talk("where", "to the sea", reference="no")
    (own,), (other,) = plain.score([row]), plain.score([talk("where", "no")])
    (score,) = centered.score([row])
    assert score.value == pytest.approx(min(a - b for a, b in zip(own.members, other.members, strict=True)), abs=1e-5)
    assert score.members == pytest.approx(own.members, abs=1e-5)  # raw, whatever the rule sees
    with pytest.raises(ScoreError, match=r"row r1: its column 'reference' is None; aggregate.center: reference needs"):
        centered.score([talk("where", "to the sea", id="r1")])


def test_a_reference_answer_that_is_too_long_leaves_no_score(reward_folder, talk):
    aggregate = Aggregate(rule="worst_case", center="reference")
    folder = str(reward_folder("bytes", num_heads=2))
    scorer = LearnedReward(path=folder, aggregate=aggregate, max_length=40).build()
    rows = [talk("hello", "yes", reference="no"), talk("hello", "yes", reference="no" * 30)]
    assert [score.status for score in scorer.score(rows)] == ["ok", "too_long"]


@pytest.mark.parametrize(
    ("heads", "aggregate", "message"),
    [
        (1, {"rule": "lower_bound", "coef": 1, "ddof": 1}, "ddof is 1 with 1 member"),
        (3, {"center": "group"}, "center is group, which needs all answers to a prompt together"),
        (3, {"center": "calibration"}, "center is calibration, and the reward model holds no moments"),
        (3, {"scale": True}, "scale is true, and the reward model holds no moments"),
    ],
)
def test_an_aggregate_that_the_model_does_not_allow_is_refused_before_the_first_score(reward_folder, heads, aggregate, message):
    raw = {"kind": "reward_model", "path": str(reward_folder("words", num_heads=heads)), "aggregate": aggregate}
    with pytest.raises(ConfigError, match=message):
        build_scorer(raw)


def test_a_recipe_entry_builds_it_and_it_keeps_no_gradients(reward_folder, talk):
    scorer = build_scorer({"kind": "reward_model", "path": str(reward_folder("words")), "max_length": 64})
    assert scorer.score([talk("hello", "yes")])[0].status == "ok"
    assert not any(parameter.requires_grad for parameter in trunk(scorer).parameters())


def test_sub_batches_are_longest_first_and_within_the_budget():
    rows = {(1,) * n for n in (2, 9, 3, 4, 1, 5)}
    groups = [[len(ids) for ids in group] for group in sub_batches(rows, max_tokens=8)]
    assert groups == [[9], [5], [4, 3], [2, 1]]
