"""What a template does, found by rendering a small conversation: how a turn ends, whether sampling leads into training."""

from collections.abc import Sequence
from dataclasses import replace

from rewarden.errors import DataError
from rewarden.text.encode import Encoder, extend
from rewarden.text.joint import Tokens
from rewarden.text.layout import UnusableTemplate
from rewarden.types import Conversation, Message, Rollout, Span

THINKS = "the generation prompt is a prefix only of answers that think ('<think>...')"
UNSTABLE = "earlier turns look different once a later one is added"
"""What the notes of `check_generation` begin with."""

THOUGHT = "<think>\nHello\n</think>\n\nYes"


def resolve_end_of_turn(encoder: Encoder, probe: Conversation) -> int:
    """The id of the token after an answer, whitespace aside. It need not be eos; many chat models end a turn otherwise.

    Errors: ConfigError when no special token follows, or not the same one everywhere.
    """
    layout, tokens = encoder.tokens(probe, generation=False)
    name, ends = encoder.form.name, []
    for number in range(1, len(probe.messages), 2):
        stop = layout.region(number).stop
        after = (index for index, end in enumerate(tokens.stops) if end > stop)
        index = next((i for i in after if layout.text[max(tokens.starts[i], stop) : tokens.stops[i]].strip()), None)
        if index is None or tokens.ids[index] not in encoder.joint.added_ids:
            shown = "nothing" if index is None else repr(layout.text[stop : stop + 20])
            raise UnusableTemplate(
                "no_end_of_turn",
                f"the template {name!r} puts {shown} after an answer, not a special token, so a policy could not end its turn; "
                "use a template that closes assistant messages with one (eos_token, <|im_end|>)",
            )
        ends.append(tokens.ids[index])
    if len(set(ends)) != 1:
        names = encoder.tokenizer.convert_ids_to_tokens(ends)
        raise UnusableTemplate(
            "no_end_of_turn", f"the template {name!r} ends answers in different ways: {names}; it must use one token"
        )
    return ends[0]


def check_generation(encoder: Encoder, probe: Conversation) -> tuple[str, ...]:
    """Refuse a template whose generation prompt does not lead into its training render; return lesser oddities as notes.

    Errors: ConfigError, with the first token that differs.
    """
    last = len(probe.messages) - 1
    opened = replace(probe, messages=probe.messages[:last])
    layout, prompt = encoder.tokens(opened, generation=True)
    bare, _ = encoder.tokens(opened, generation=False)
    full, whole = encoder.tokens(probe, generation=False)
    missing = full.text[len(layout.text) : full.region(last).start]
    if layout.text == bare.text and full.text.startswith(layout.text) and missing.strip():
        raise UnusableTemplate(
            "no_generation_prompt",
            f"the chat template has no generation prompt: add_generation_prompt leaves out {missing!r}; add it",
        )
    if prompt.ids[-1] in encoder.stop_ids:
        end = encoder.tokenizer.convert_ids_to_tokens(prompt.ids[-1])
        raise UnusableTemplate(
            "generation_prompt_ends_turn",
            f"the generation prompt ends in {end!r}, which ends a turn, so a policy would learn to stop at once; "
            "change the template",
        )
    notes = []
    if difference := first_difference(encoder, prompt.ids, whole.ids):
        if first_difference(encoder, prompt.ids, _thinking(encoder, opened, whole).ids):
            raise UnusableTemplate(
                "generation_prompt_not_a_prefix",
                f"the generation prompt of template {encoder.form.name!r} is no prefix of its training render: {difference}. "
                "Use a template that renders an answer as it is sampled",
            )
        notes.append(f"{THINKS}: {difference}")
    return (*notes, *_unstable_history(encoder, probe, prompt))


def first_difference(encoder: Encoder, part: Sequence[int], whole: Sequence[int]) -> str | None:
    """The first token in which `part` is no prefix of `whole`, in words; None if it is a prefix."""
    at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    if at == len(part):
        return None

    def shown(ids: Sequence[int]) -> str:
        return f"{encoder.tokenizer.convert_ids_to_tokens(ids[at])!r} (id {ids[at]})" if at < len(ids) else "nothing"

    return f"token {at} is {shown(part)} in the prompt and {shown(whole)} in the render"


def _thinking(encoder: Encoder, opened: Conversation, otherwise: Tokens) -> Tokens:
    """The render of an answer that begins by thinking, for templates whose generation prompt opens a thought."""
    thinking = replace(opened, messages=(*opened.messages, Message(role="assistant", text=THOUGHT)))
    try:
        return encoder.tokens(thinking, generation=False)[1]
    except DataError:
        return otherwise


def _unstable_history(encoder: Encoder, probe: Conversation, prompt: Tokens) -> list[str]:
    """A note when a conversation played turn by turn has other ids than the same conversation rendered at once."""
    if not encoder.form.many_turns:
        return []
    begun = replace(probe, messages=probe.messages[:1])
    answered = replace(probe, messages=probe.messages[:2])
    _, start = encoder.tokens(begun, generation=True)
    layout, tokens = encoder.tokens(answered, generation=False)
    spans = encoder.spans(tokens, layout, answered.messages, probe.id).spans
    answer = next(span for span in spans if span.role == "assistant")
    ids = tokens.ids[answer.start : answer.stop]
    at = len(start.ids)
    played = Rollout(
        conversation=answered,
        token_ids=start.ids + ids,
        spans=(
            Span(role="template", turn=0, start=0, stop=at),
            Span(role="assistant", turn=0, start=at, stop=at + len(ids), ended="eos"),
        ),
    )
    extended, _ = extend(encoder, played, probe.messages[2])
    difference = first_difference(encoder, extended.token_ids, prompt.ids)
    return [f"{UNSTABLE}: {difference}"] if difference else []
