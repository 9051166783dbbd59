import json
import math

import pytest
import torch

from rewarden.algos import sft
from rewarden.algos.rows import encode_rows
from rewarden.algos.sft import SFT
from rewarden.data.sources import Data, load_conversations
from rewarden.errors import DataError
from rewarden.models.load import Model, load_tokenizer
from rewarden.runtime.ranks import Ranks
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message

CPU = torch.device("cpu")


def config(files, **changes) -> SFT:
    fields = {
        "model": Model(model_name_or_path=str(files.policy)),
        "data": Data(path=str(files.dialogues)),
        "eval_data": Data(path=str(files.heldout)),
        "optim": {"learning_rate": 4e-3},
        "train_batch_size": 8,
    }
    return SFT(**{**fields, **changes})


def test_the_loss_is_the_mean_cross_entropy_of_assistant_tokens_and_their_end(world_files):
    """Against torch's cross_entropy on labels written from the token strings, not from spans."""
    cfg = config(world_files)
    job = sft.build(cfg, Ranks.single("cpu"))
    tokenizer = load_tokenizer(cfg.model)
    template = load_template(tokenizer, "chat")
    rows = encode_rows(load_conversations(cfg.data).rows[:4], template, None, "error").rows
    model = job.parts["policy"].model
    total = count = 0.0
    for row in rows:
        labels, inside = [], False
        for word in tokenizer.convert_ids_to_tokens(list(row.token_ids)):
            labels.append(tokenizer.convert_tokens_to_ids(word) if inside else -100)
            inside = (inside or word == "<|assistant|>") and word != "<|end|>"
        ids = torch.tensor([row.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
        count += sum(label != -100 for label in labels)
    batch = sft.prepare(rows, CPU)
    term = sft.loss(model, batch)["nll"]
    assert int(batch.counts()["nll"]) == count
    assert float((term.value_BT.detach() * term.mask_BT).sum()) / count == pytest.approx(total / count, abs=1e-5)


def test_an_epoch_visits_every_row_once_and_learns(world_files):
    cfg = config(world_files, num_train_epochs=3)
    job = sft.build(cfg, Ranks.single("cpu"))
    ticks = list(job.train(job.start))
    assert len(ticks) == job.steps == 3 * math.ceil(48 / 8)
    per_epoch = [sum(t.report["num_tokens"] for t in ticks[i : i + 6]) for i in (0, 6, 12)]
    assert per_epoch[0] == per_epoch[1] == per_epoch[2]
    assert ticks[-1].report["eval/nll"] < ticks[0].report["loss/nll"] - 0.5
    assert ticks[0].report["loss/nll"] == pytest.approx(math.log(116), abs=1.5)


def test_stopping_and_going_on_takes_the_same_batches(world_files):
    cfg = config(world_files)
    job = sft.build(cfg, Ranks.single("cpu"))
    whole = [tick.report["num_tokens"] for tick in job.train(job.start)]
    again = sft.build(cfg, Ranks.single("cpu"))
    later = [tick.report["num_tokens"] for tick in again.train(sft.State(step=3))]
    assert later == whole[3:]


def row(*texts, **meta):
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[i % 2], text=text) for i, text in enumerate(texts))
    return Conversation(id="r", messages=messages, meta={"where": "file:7", **meta})


@pytest.fixture
def template(world_files):
    return load_template(load_tokenizer(Model(model_name_or_path=str(world_files.policy))), "chat")


def test_long_rows_are_dropped_cut_or_refused_and_counted(template):
    short, long = row("I see.", "Of course."), row("I see.", "Of course. Of course. Of course. Of course.")
    dropped = encode_rows([short, long], template, 10, "drop")
    assert [len(r.token_ids) for r in dropped.rows] == [10]
    assert dropped.dropped == {"longer than 10 tokens dropped": 1}
    cut = encode_rows([short, long], template, 10, "truncate")
    assert [len(r.token_ids) for r in cut.rows] == [10, 10]
    assert cut.dropped == {"cut at 10 tokens": 1}
    with pytest.raises(DataError, match=r"file:7: 19 tokens; at most max_length=10"):
        encode_rows([short, long], template, 10, "error")


def test_a_row_cut_before_its_answer_is_dropped_and_counted(template):
    out = encode_rows([row("I see.", "Of course.")], template, 4, "truncate")
    assert not out.rows
    assert out.dropped == {"cut at 4 tokens": 1, "without a target token dropped": 1}


def test_only_the_completion_of_a_prompt_completion_row_is_a_target(template):
    texts = ("I see.", "Of course.", "I see.", "Thank you.")
    all_turns = sft.prepare(encode_rows([row(*texts)], template, None, "error").rows, CPU)
    last_only = sft.prepare(encode_rows([row(*texts, prompt_messages=3)], template, None, "error").rows, CPU)
    assert int(all_turns.target_BT.sum()) == 8
    assert int(last_only.target_BT.sum()) == 4
    assert not bool((last_only.target_BT & ~all_turns.target_BT).any())


def test_rows_beyond_the_models_positions_are_dropped_and_counted_at_the_start(world_files, tmp_path):
    """They would stop the run at the step that meets them."""
    turn = {"role": "assistant", "content": "Where?"}
    long = {"messages": [{"role": "user", "content": "cheap " * 400}, turn]}
    short = {"messages": [{"role": "user", "content": "Hello"}, turn]}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (short, long)))
    job = sft.build(config(world_files, data=Data(path=str(file)), max_length=None), Ranks.single("cpu"))
    assert any("1 longer than 320 tokens dropped" in note for note in job.notes)
    assert len(list(job.train(job.start))) == 1


def test_held_out_rows_of_which_none_is_left_are_an_error(world_files, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Hello", "completion": "Where?"}) + "\n")
    with pytest.raises(DataError, match=r"no held-out row is left .*longer than 20 tokens dropped"):
        sft.build(config(world_files, data=Data(path=str(file)), max_length=20), Ranks.single("cpu"))


def lora(files, dropout):
    return Model(model_name_or_path=str(files.policy), lora_r=4, lora_dropout=dropout)


def test_dropout_acts_only_where_it_is_switched_on(world_files):
    def losses(**changes):
        torch.manual_seed(0)
        job = sft.build(config(world_files, max_steps=2, **changes), Ranks.single("cpu"))
        return [tick.report["loss/nll"] for tick in job.train(job.start)], job.parts["policy"].model

    plain, _ = losses(model=lora(world_files, 0.0))
    off, _ = losses(model=lora(world_files, 0.0), disable_dropout=False)
    on, model = losses(model=lora(world_files, 0.5), disable_dropout=False)
    assert plain == off  # this architecture has no dropout of its own
    assert on[1] != plain[1]
    assert not model.training


def test_a_dropout_that_would_do_nothing_is_refused(world_files):
    with pytest.raises(ValueError, match=r"lora_dropout is 0.5, but dropout is off"):
        config(world_files, model=lora(world_files, 0.5))
