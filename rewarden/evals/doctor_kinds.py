"""Every finding the doctor can make: its code, how bad it is, what it is, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The worst first. error: training would stop at it or learn something wrong. warning: rows are lost, or the data are likely
not what was meant. note: worth knowing."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding."""

    severity: Severity
    means: str
    do: str


def _error(means: str, do: str) -> Kind:
    return Kind("error", means, do)


def _warning(means: str, do: str) -> Kind:
    return Kind("warning", means, do)


def _note(means: str, do: str) -> Kind:
    return Kind("note", means, do)


MEND = "mend the row, or leave it out with on_bad_row: drop"
LEFT_OUT = "nothing, if it may be lost; otherwise mend the row"

KINDS: dict[str, Kind] = {
    # What cannot be read.
    "broken_json": _error("the line or element is not JSON", "mend or remove it; training stops there"),
    "repeated_key": _error("an object gives one key twice, so one of its values would be lost", "keep one of them"),
    "not_utf8": _error("bytes that are not UTF-8", "save the file as UTF-8"),
    "half_character": _error("half of a character (a lone surrogate), which no tokenizer takes", "write the text anew"),
    "damaged_file": _error("the file is damaged or cut off; what stood behind is lost", "copy the file again"),
    "no_rows": _error("the file holds no rows", "remove it or give another"),
    "no_array": _error("the JSON file holds no array of rows", "write a JSON array, or {'data': [...]}"),
    "byte_order_mark": _note("the file begins with a byte order mark, which is skipped", "save without it"),
    "blank_line": _note("blank lines, which are skipped", "nothing"),
    "file_of_another_split": _note("files of the folder that belong to another split and were not read", "see --split"),
    # Rows without the form of their type.
    "missing_column": _error("the row lacks a column of its type", f"{MEND}; columns of other names: --columns"),
    "column_named_where": _error("a column is named 'where', a name that Rewarden fills itself", "--columns place=where"),
    "not_an_object": _error("the row is no object with columns", MEND),
    "not_text": _error("a number, null or list stands where text should", "quote it in the file, or remove the row"),
    "no_messages": _error("a list of messages is empty or no list", MEND),
    "not_a_message": _error("a message has no role and content", MEND),
    "unknown_role": _error("a role that is none of system, user, assistant (or human, gpt, prompter)", MEND),
    "roles_do_not_alternate": _error("the roles are not user and assistant in turn", "join or remove turns, or drop the row"),
    "bad_prompt": _error("the prompt is neither text nor messages", MEND),
    "bad_answer": _error("an answer is neither text nor messages", MEND),
    "prompt_not_from_user": _error("the prompt does not end with the user", MEND),
    "answer_not_from_assistant": _error("an answer does not end with the assistant", MEND),
    "bad_margin": _error("a margin that is no finite number", "use a number or null"),
    "bad_preference": _error("a preference that is no probability (AlpacaFarm: 1 to 2)", "use a number in range"),
    "bad_label": _error("a label that is neither true nor false", "use true (good) or false"),
    "bad_rank": _error("a rank that is no integer", "use an integer or null"),
    "bad_tree": _error("a message tree whose replies are no messages", MEND),
    "not_turns": _error("the row or side is no list of strings", MEND),
    "not_a_transcript": _error("text that does not start with 'Human:' among HH transcripts", MEND),
    "ends_with_assistant": _error("a prompt that ends with the assistant", "drop_last_assistant: true takes the turn off"),
    "ends_with_system": _error("a prompt that is a system message alone", "add a user message"),
    "nothing_usable": _error("no row can be used", "see the other findings"),
    # Rows that are left out.
    "prompts_differ": _warning("the two sides answer different prompts; the pair is left out", LEFT_OUT),
    "chosen_equals_rejected": _warning("the label says nothing; the pair is left out", "remove the row"),
    "consecutive_same_role": _warning("two turns of one role in a row; left out", LEFT_OUT),
    "chosen_consecutive_same_role": _warning("two turns of one role in a row on the chosen side; left out", LEFT_OUT),
    "rejected_consecutive_same_role": _warning("two turns of one role in a row on the rejected side; left out", LEFT_OUT),
    "starts_with_assistant": _warning("a transcript that starts with the assistant; left out", LEFT_OUT),
    "ends_with_human": _warning("a transcript without an answer at its end; left out", LEFT_OUT),
    "chosen_ends_with_human": _warning("the chosen side has no answer at its end; left out", LEFT_OUT),
    "rejected_ends_with_human": _warning("the rejected side has no answer at its end; left out", LEFT_OUT),
    "ends_with_user": _warning("a dialogue without an answer at its end; left out of fine-tuning", LEFT_OUT),
    "no_preference": _warning("a pair that nobody labeled; left out", LEFT_OUT),
    "no_outputs": _warning("an empty list of outputs; left out", LEFT_OUT),
    "lengths_differ": _warning("the two sides have different numbers of turns; left out", LEFT_OUT),
    "no_turns": _warning("an empty list of turns; left out", LEFT_OUT),
    "empty_turn": _warning("a turn without text; left out", LEFT_OUT),
    "rank_missing": _warning("replies without a rank give no pair", LEFT_OUT),
    "ranks_equal": _warning("replies of equal rank give no pair", LEFT_OUT),
    "deleted": _warning("a deleted message; left out with all below it", "nothing"),
    "review_failed": _warning("a message that failed review; left out with all below it", "nothing"),
    "repeated_user_turns": _warning("the same user turns as an earlier row; left out", LEFT_OUT),
    # Rows that are kept.
    "empty_answer": _warning(
        "an answer without text: left out of fine-tuning, since it teaches to stop at once; kept in pairs", "remove the row"
    ),
    "chosen_empty": _warning("the better answer has no text", "check the label"),
    "chosen_empty_final_assistant": _warning("the chosen answer has no text", "check the label"),
    "rejected_empty_final_assistant": _warning("the rejected answer has no text", "nothing, if people judged it so"),
    "chosen_empty_turn_inside": _warning("an earlier turn of the chosen side has no text", LEFT_OUT),
    "rejected_empty_turn_inside": _warning("an earlier turn of the rejected side has no text", LEFT_OUT),
    "empty_prompt": _warning("a prompt without text", "remove the row"),
    "inline_role_marker": _warning(
        "'Human:' or 'Assistant:' inside a turn: kept in pairs, left out of fine-tuning when the assistant wrote it", LEFT_OUT
    ),
    "20_or_more_turns": _note("a long dialogue", "see truncation"),
    "replacement_char": _warning("U+FFFD: a character was lost before the file was written", "mend from the source"),
    "nul_character": _warning("a NUL character", "remove it"),
    "control_character": _warning("control characters", "remove them"),
    "byte_order_mark_in_text": _warning("a byte order mark inside a text", "remove it"),
    "mojibake": _warning("UTF-8 that was read as Latin-1 or Windows-1252 ('Ã©' for 'é')", "decode the source as UTF-8"),
    "template_text": _warning(
        "special tokens of a chat template in the text: the rows were rendered for some model, or hold its ends of turn",
        "take the text apart into messages, and remove the tokens",
    ),
    "answer_repeats_prompt": _warning("an answer that is its prompt again", "check the columns"),
    "very_long_row": _warning("a row far longer than the others", "check it; it may be several rows in one"),
    "repeated_id": _warning("an id that an earlier row has; the later one is called ID~2", "make the ids unique"),
    "duplicate_row": _warning("the same row again", "remove it, or its weight doubles"),
    "mixed_types": _warning("rows of another type than most", "one file a type: training reads all rows as the first"),
    "ignored_column": _note("columns that are kept as meta and not used in training", "nothing, or rename them"),
    "misspelt_column": _warning("an unused column whose name is close to one that is read", "rename it with --columns"),
    "tools_not_read": _warning("a column `tools`, which is not rendered", "put it into the text, or drop it"),
    "images_not_read": _warning("a column `images`, which is not read", "text only"),
    "chat_template_kwargs_not_read": _warning("a column `chat_template_kwargs`, which is not read", "drop it"),
    "synthetic_message": _note("messages written by a model", "nothing"),
    "assistant_without_rank": _note("answers without a rank, which are in no pair", "nothing"),
    "last_assistant_turn_dropped": _note("a last assistant turn taken off a prompt", "nothing"),
    # Labels and splits.
    "tie": _note("pairs labeled as ties; they count half, and pull both answers together", "nothing"),
    "preference_below_half": _note("pairs whose rejected side is the better one by `preference`", "swap the sides"),
    "negative_margin": _warning("a margin below 0 says that the rejected answer is better", "swap the sides, or use 0"),
    "margin_on_some_rows": _note("rows without a margin among rows with one; theirs is 0", "fill them"),
    "opposite_labels": _warning("the same two answers to the same prompt, labeled the other way round", "label noise: decide"),
    "one_label_only": _warning("all labels are the same, so nothing can be told apart", "add rows with the other label"),
    "length_bias": _warning(
        "one of the longer and the shorter answer is chosen far more often than not; a reward model may learn only that",
        "compare at equal length, and watch eval/margin_length_correlation",
    ),
    "prompt_in_both_splits": _warning(
        "a first prompt (case and punctuation aside) of the evaluation data is in the training data too",
        "split by prompt: holdout_prompts",
    ),
    # The model's folder.
    "vocabulary_beyond_embeddings": _error(
        "the tokenizer has ids for which the model has no embedding", "remove the added tokens, or resize the embeddings"
    ),
    "embedding_mismatch": _error("an embedding has another number of rows than config.json says", "copy both together"),
    "pad_without_id": _error(
        "the pad token has no id that the model embeds", "remove pad_token; padding needs none here, masks are explicit"
    ),
    "weights_unreadable": _warning("the weights were not looked at", "see the example"),
    "eos_is_not_end_of_turn": _warning(
        "the model's config stops at other tokens than the one that ends a turn; elsewhere generation would run on",
        "add the end of turn to eos_token_id in generation_config.json",
    ),
    "bos_missing": _warning("the tokenizer puts a BOS in front of text, the template does not", "write bos_token first"),
    "bos_twice_elsewhere": _note(
        "template and tokenizer each write a BOS; here there is one, but tokenizer(text) gives two",
        "elsewhere, tokenize templated text with add_special_tokens=False",
    ),
    "no_chat_template": _error("the tokenizer has no chat template", "--template moss_en, alpaca or hh, or add one"),
    "no_eos_token": _error("the tokenizer has no eos token, which a plain format needs", "set eos_token"),
    "no_end_of_turn": _error("no special token ends an answer, so a policy could not stop", "mend the template"),
    "no_generation_prompt": _error("the template has no generation prompt", "add add_generation_prompt to the template"),
    "generation_prompt_ends_turn": _error(
        "the generation prompt ends in an end of turn, so a policy would learn to stop at once", "mend the template"
    ),
    "generation_prompt_not_a_prefix": _error(
        "the generation prompt does not lead into the training render", "use a template that renders an answer as sampled"
    ),
    "template_unusable": _error("the template cannot render a plain conversation", "use another template"),
    "thinking_prompt": _note("the generation prompt fits only answers that begin with a thought", "see the rows"),
    "unstable_history": _warning(
        "the template shows earlier turns otherwise once a later one is added", "use one that keeps them as they are"
    ),
    # Rows as tokens.
    "refused_by_template": _error("the template cannot render the row; training stops there", "mend the row or template"),
    "prompt_not_a_prefix": _warning("the prompt as sampled is no prefix of the row as trained", "drop the row"),
    "merged_seam": _warning(
        "the first token of an answer also holds the end of the generation prompt; it is not learned", "nothing, if few"
    ),
    "double_bos": _error("the row begins with two BOS tokens", "take one out of the template"),
    "special_token_in_text": _warning(
        "a special token of the model spelled in a text; here it stays text, elsewhere it would end a turn", "remove it"
    ),
    "prompt_ends_in_eos": _warning("the prompt's text already ends in an end-of-turn token", "remove it"),
    "answer_ends_in_eos": _warning("an answer's text already ends in an end-of-turn token; another follows", "remove it"),
    "unknown_token": _warning("text that the vocabulary cannot spell", "use another tokenizer, or normalize the text"),
    "longer_than_max_length": _warning("longer than max_length: dropped or cut by overlength", "raise max_length"),
    "nothing_within_max_length": _warning("no token to learn lies within max_length", "raise max_length, or drop"),
    "longer_than_the_model": _warning("longer than the positions the model has", "set max_length, or drop the row"),
    "prompt_longer_than_max_prompt_length": _warning("the prompt is longer than max_prompt_length; left out", "raise it"),
}
"""By code. A row that the reader refuses is an error whatever its code."""
