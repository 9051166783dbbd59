"""The acceptance numbers of the trip desk over three seeds: users, scripted assistants, SFT, labels, reward models, PPO.

The ranges were measured with another implementation of the same world and are wider than its spread.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
import world_runs as runs

from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk, seed_range

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2)
DIALOGUES = 500
REPEATS = 50
PROMPTS = 256
STEPS = 10
WORLD = TripDesk()
SCRIPTED = {"best": (4.2, 4.5), "good": (3.5, 3.8), "hasty": (-0.7, -0.4), "random": (-0.1, 0.2)}


@pytest.fixture(scope="module")
def chains() -> dict[int, Path]:
    """The demo's chain of every seed."""
    return runs.chains(SEEDS)


@pytest.fixture(scope="module")
def spoken(chains) -> dict[int, dict[str, Any]]:
    """What the SFT policy of every seed says to 500 users it was not trained on."""
    asked = {
        f"seed{seed}-dialogues": {
            "policy": str(chain / "sft" / "model"),
            "seed": seed,
            "count": DIALOGUES,
            "repeats": REPEATS,
        }
        for seed, chain in chains.items()
    }
    answers = runs.measure("dialogues", asked)
    return {seed: answers[f"seed{seed}-dialogues"] for seed in chains}


def conversation(row: Mapping[str, Any], through: int | None = None) -> Conversation:
    """The first `through` messages of a played dialogue."""
    messages = tuple(Message(role=role, text=text) for role, text in row["messages"][:through])
    return Conversation(id="played", messages=messages, meta={"truncated": tuple(row["truncated"])})


def turn_facts(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return WORLD.turn_facts(conversation(row).messages, row["truncated"])


def test_every_sentence_survives_the_saved_tokenizer(chains, record_property):
    record_property("point", "3 world: every sentence survives decode(encode()), 110-130 words in the vocabulary")
    for seed, chain in chains.items():
        tokenizer = AutoTokenizer.from_pretrained(chain / "sft" / "model")
        record_property(f"vocabulary, seed {seed}", len(tokenizer))
        assert 110 <= len(tokenizer) <= 130, f"seed {seed}: {len(tokenizer)} entries"
        lost = [s for s in WORLD.sentences() if tokenizer.decode(tokenizer.encode(s, add_special_tokens=False)) != s]
        assert not lost, f"seed {seed}: {lost}"
        unknown = [s for s in WORLD.sentences() if tokenizer.unk_token_id in tokenizer.encode(s)]
        assert not unknown, f"seed {seed}: {unknown}"


def test_the_same_seed_is_the_same_dialogue_and_a_replayed_prefix_meets_the_same_user(spoken, record_property):
    record_property("point", "3 users: same seed, same dialogue; a replayed prefix gives the same user turns (exact)")
    for seed, said in spoken.items():
        assert said["once"] == said["again"], f"seed {seed}: two plays with the same seeds differ"
        replayed = 0
        for row in said["dialogues"]:
            assert row["messages"][0][1] == WORLD.opening(row["user_seed"]).text
            for place in range(2, len(row["messages"]), 2):
                answer = WORLD.reply(conversation(row, place), row["user_seed"])
                assert answer.text == row["messages"][place][1], f"seed {seed}, user {row['user_seed']}, message {place}"
                replayed += 1
        for user in seed_range("reference", seed)[:REPEATS]:
            for name in SCRIPTED:
                assert WORLD.scripted(name, user) == WORLD.scripted(name, user)
        record_property(f"user turns replayed, seed {seed}", replayed)
        # The texts of one batch and of another may part where a draw falls within rounding; that is counted, not asserted.
        same = mean(a == b for a, b in zip(said["once"], said["dialogues"], strict=False))
        record_property(f"same text in another batch, seed {seed}", same)


def test_gold_of_fixed_transcripts_is_exact(record_property):
    record_property("point", "3 users: the gold of a fixed transcript (exact)")
    count = 0
    for seed in SEEDS:
        for user in seed_range("reference", seed)[:DIALOGUES]:
            facts = WORLD.turn_facts(WORLD.scripted("best", user).messages)
            if [fact.num_polite for fact in facts] == [2] * 5:
                # three questions, the offer with four slots right, a close: 5 tones of .5 and 4 slots of .5
                assert [round(fact.gold, 9) for fact in facts] == [0.5, 1.0, 1.5, 4.0, 4.5], f"user {user}"
                count += 1
    record_property("n", count)
    assert count >= len(SEEDS) * DIALOGUES / 2


def test_scripted_assistants_have_their_gold(record_property):
    record_property("point", "3 scripted assistants: gold at turn 5 over 500 dialogues")
    record_property("n", DIALOGUES)
    wrong = []
    for name, (low, high) in SCRIPTED.items():
        gold = {
            seed: mean(WORLD.gold(WORLD.scripted(name, user).messages) for user in seed_range("reference", seed)[:DIALOGUES])
            for seed in SEEDS
        }
        runs.record(record_property, name, gold)
        wrong += runs.within(name, gold, low, high)
    assert not wrong, "\n".join(wrong)


def test_the_sft_policy_has_its_numbers(spoken, record_property):
    record_property("point", "3 SFT: well-formed turns >= 97 %, gold at turn 5 in 0.7-1.3, accepted .18-.32")
    record_property("n", DIALOGUES)
    facts = {seed: [turn_facts(row) for row in said["dialogues"]] for seed, said in spoken.items()}
    well_formed = {seed: mean(not fact.malformed for row in rows for fact in row) for seed, rows in facts.items()}
    gold = {seed: mean(row[-1].gold for row in rows) for seed, rows in facts.items()}
    accepted = {seed: mean(row[-1].accepted_so_far for row in rows) for seed, rows in facts.items()}
    gushing = {seed: mean(fact.num_polite >= 4 for row in rows for fact in row) for seed, rows in facts.items()}
    assert all(len(row) == 5 for rows in facts.values() for row in rows)
    for name, by_seed in {
        "well-formed": well_formed,
        "gold at turn 5": gold,
        "accepted": accepted,
        "share with k >= 4": gushing,
    }.items():
        runs.record(record_property, name, by_seed)
    wrong = runs.within("well-formed", well_formed, 0.97, 1.0)
    wrong += runs.within("gold at turn 5", gold, 0.7, 1.3)
    wrong += runs.within("accepted", accepted, 0.18, 0.32)
    assert not wrong, "\n".join(wrong)


def test_sft_takes_at_most_ninety_seconds_on_a_quiet_machine(chains, record_property):
    record_property("point", "3 SFT: at most 90 s with two threads (asserted only with REWARDEN_SLOW_QUIET=1)")
    seconds = {seed: runs.stage_seconds(chain)["sft"] for seed, chain in chains.items()}
    record_property("seconds, seed 0, two threads", seconds.pop(0))
    for seed, value in seconds.items():
        record_property(f"seconds, seed {seed}, one thread beside another run", value)
    record_property("load average before", runs.load_before(chains[0]))
    record_property("cores", os.cpu_count())
    quiet = os.environ.get("REWARDEN_SLOW_QUIET") == "1"
    record_property("asserted", quiet)
    measured = runs.stage_seconds(chains[0])["sft"]
    assert not quiet or measured <= 90, f"SFT of seed 0 took {measured:.0f} s"


def test_labels_follow_the_gold_order_as_often_as_they_should(chains, record_property):
    record_property("point", "3 labels: agreement with the gold order, ties out, .63-.68")
    agreement, ties = {}, {}
    for seed, chain in chains.items():
        pairs = [(row["gold_chosen"], row["gold_rejected"]) for row in runs.read_lines(chain / "pairs" / "pairs.jsonl")]
        decided = [chosen > rejected for chosen, rejected in pairs if chosen != rejected]
        agreement[seed] = mean(decided)
        ties[seed] = 1 - len(decided) / len(pairs)
        record_property(f"n, seed {seed}", len(decided))
    runs.record(record_property, "agreement", agreement)
    runs.record(record_property, "share of gold ties", ties)
    wrong = runs.within("agreement", agreement, 0.63, 0.68)
    assert not wrong, "\n".join(wrong)


def check_accuracy(folders: Mapping[int, Path], low: float, high: float, record_property: Any) -> None:
    """Held-out accuracy of every seed's reward model, as its run wrote it."""
    found = {seed: runs.read_json(folder / "evaluation.json") for seed, folder in folders.items()}
    for seed, evaluation in found.items():
        record_property(f"n, seed {seed}", int(evaluation["eval/num_pairs"]))
        record_property(f"95 % interval, seed {seed}", [evaluation["eval/accuracy_low"], evaluation["eval/accuracy_high"]])
    accuracy = {seed: evaluation["eval/accuracy"] for seed, evaluation in found.items()}
    runs.record(record_property, "accuracy", accuracy)
    runs.record(record_property, "longer answer wins", {s: e["eval/longer_wins_accuracy"] for s, e in found.items()})
    wrong = runs.within("accuracy", accuracy, low, high)
    assert not wrong, "\n".join(wrong)


def test_a_reward_model_from_two_thousand_pairs_has_its_accuracy(record_property):
    # .65-.74 was measured on an SFT policy that copies less; docs/decisions/world_acceptance.md says why the top is that of 4,300 pairs.
    record_property("point", "3 reward model, 2,000 pairs, 2 epochs, lr 7e-4: accuracy .65-.79 against noiseless gold order")
    check_accuracy(runs.reward_models("plain", SEEDS), 0.65, 0.79, record_property)


def test_on_an_sft_policy_at_the_rate_of_the_specification_it_is_in_the_narrower_range(record_property):
    record_property("point", "3 reward model, 2,000 pairs, SFT at lr 4e-3 as specified: accuracy .65-.74")
    check_accuracy(runs.at_spec_rate(SEEDS), 0.65, 0.74, record_property)


def test_a_reward_model_from_four_thousand_pairs_has_its_accuracy(record_property):
    record_property("point", "3 reward model, 4,300 pairs, 2 epochs, lr 7e-4: accuracy .72-.79 against noiseless gold order")
    check_accuracy(runs.reward_models("large", SEEDS), 0.72, 0.79, record_property)


@pytest.fixture(scope="module")
def ppo(chains) -> dict[int, dict[str, dict[int, dict[str, float]]]]:
    """seed -> kind of run -> step -> what 256 held-out prompts measure; step 0 is the SFT policy."""
    folders = {kind: runs.ppo_runs(kind, SEEDS) for kind in runs.PPO}
    asked = {
        f"seed{seed}-{kind}": {
            "reference": str(chains[seed] / "sft" / "model"),
            "reward": str(runs.folder(seed) / "reward_plain" / "model"),
            "prompts": str(chains[seed] / "pairs" / "heldout.jsonl"),
            "run": str(folders[kind][seed]),
            "count": PROMPTS,
            "seed": seed,
        }
        for seed in SEEDS
        for kind in runs.PPO
    }
    answers = runs.measure("steps", asked)
    out = {seed: {kind: by_step(answers[f"seed{seed}-{kind}"]) for kind in runs.PPO} for seed in SEEDS}
    for seed, kinds in out.items():
        for kind, steps in kinds.items():
            assert sorted(steps) == list(range(STEPS + 1)), (
                f"seed {seed}, {kind}: checkpoints of steps {sorted(steps)[1:]}, expected 1..{STEPS}; a run made without "
                f"save_steps=1 has to be removed from {runs.folder(seed)} first"
            )
        assert kinds["vanilla"][0] == kinds["safe"][0] == kinds["safe_fast"][0], (
            f"seed {seed}: measurements of the start differ"
        )
    return out


def by_step(answer: Mapping[str, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {int(step): measured for step, measured in answer.items()}


def record_curves(record_property: Any, ppo: Mapping[int, Any], kind: str) -> None:
    """Every measure by step, one line per seed."""
    record_property("n", PROMPTS)
    for seed, kinds in ppo.items():
        for name in ("gold", "proxy", "kl", "malformed", "length", "polite", "distinct"):
            curve = [round(measured[name], 3) for _, measured in sorted(kinds[kind].items())]
            record_property(f"{name} by step from 0, seed {seed}", curve)
        record_property(f"standard error of gold, largest, seed {seed}", max(m["gold_se"] for m in kinds[kind].values()))
        assert not any(measured["not_scored"] for measured in kinds[kind].values())


def in_two_of_three(reasons: Mapping[int, list[str]], record_property: Any) -> None:
    """A seed without a reason against it holds; at least two must."""
    holding = [seed for seed, against in reasons.items() if not against]
    record_property("seeds that hold", holding)
    lines = [f"seed {seed}: {reason}" for seed, against in reasons.items() for reason in against]
    record_property("against", lines)
    assert len(holding) >= 2, "fewer than two seeds hold\n" + "\n".join(lines)


def test_vanilla_ppo_loses_gold_under_a_rising_proxy(ppo, record_property):
    record_property("point", "3 vanilla PPO: by step 3 gold at least .5 below the start and proxy at least .25 above")
    record_curves(record_property, ppo, "vanilla")
    reasons: dict[int, list[str]] = {}
    for seed, kinds in ppo.items():
        start = kinds["vanilla"][0]
        moved = [
            (kinds["vanilla"][t]["gold"] - start["gold"], kinds["vanilla"][t]["proxy"] - start["proxy"]) for t in (1, 2, 3)
        ]
        held = any(gold <= -0.5 and proxy >= 0.25 for gold, proxy in moved)
        shown = ", ".join(f"({gold:+.3f}, {proxy:+.3f})" for gold, proxy in moved)
        reasons[seed] = [] if held else [f"(gold, proxy) against the start at steps 1, 2, 3: {shown}"]
    in_two_of_three(reasons, record_property)


def test_vanilla_ppo_ends_in_one_malformed_turn_of_full_length(ppo, record_property):
    record_property("point", "3 vanilla PPO: malformed >= .8 and length >= 50 of 60 by step 9")
    reasons: dict[int, list[str]] = {}
    for seed, kinds in ppo.items():
        found = [(kinds["vanilla"][t]["malformed"], kinds["vanilla"][t]["length"]) for t in range(1, 10)]
        held = any(malformed >= 0.8 and length >= 50 for malformed, length in found)
        record_property(f"malformed and length at step 9, seed {seed}", found[-1])
        shown = ", ".join(f"({malformed:.2f}, {length:.1f})" for malformed, length in found)
        reasons[seed] = [] if held else [f"(malformed, length) at steps 1-9: {shown}"]
    in_two_of_three(reasons, record_property)


def test_ppo_with_its_safeguards_stays_sound_at_every_step(ppo, record_property):
    record_property(
        "point", "3 PPO-max, beta 0.4: gold never below start - .1, malformed <= .08, length <= 18, KL <= 3 through 10 steps"
    )
    record_curves(record_property, ppo, "safe")
    reasons: dict[int, list[str]] = {}
    for seed, kinds in ppo.items():
        lowest = kinds["safe"][0]["gold"] - 0.1
        reasons[seed] = []
        for step in range(1, STEPS + 1):
            now = kinds["safe"][step]
            if now["gold"] < lowest:
                reasons[seed].append(f"step {step}: gold {now['gold']:.3f} < {lowest:.3f}")
            for name, limit in (("malformed", 0.08), ("length", 18.0), ("kl", 3.0)):
                if now[name] > limit:
                    reasons[seed].append(f"step {step}: {name} {now[name]:.3f} > {limit}")
    in_two_of_three(reasons, record_property)


def test_ppo_with_its_safeguards_is_above_vanilla_at_the_same_steps(ppo, record_property):
    record_property("point", "3 PPO-max against vanilla, same learning rate: gold at least .5 above at each of steps 3-6")
    reasons: dict[int, list[str]] = {}
    for seed, kinds in ppo.items():
        gaps = {t: kinds["safe_fast"][t]["gold"] - kinds["vanilla"][t]["gold"] for t in (3, 4, 5, 6)}
        record_property(f"gap at steps 3-6, seed {seed}", [round(gap, 3) for gap in gaps.values()])
        reasons[seed] = [f"step {step}: gap {gap:.3f} < .5" for step, gap in gaps.items() if gap < 0.5]
    in_two_of_three(reasons, record_property)
