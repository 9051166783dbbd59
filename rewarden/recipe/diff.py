"""The commands `rewarden diff make | recover | check` and `rewarden import`; nothing heavy is loaded for their help."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rewarden.errors import ConfigError

diff_app = typer.Typer(
    help="Weight diffs: publish, recover and check what a tuned model adds to its base.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Raw = Annotated[str, typer.Argument(help="The base model: a folder or a cached hub id; safetensors or .bin.")]
Rule = Annotated[str | None, typer.Option(help="For published diffs, which have no manifest: moss or alpaca_farm.")]
Sum = Annotated[
    str | None,
    typer.Option(
        "--sum", help="Expected integrity sum: a number, or moss_en_reward, moss_en_sft, moss_en_policy, moss_zh_reward."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16; auto is the tuned model's, for published diffs float32.")
]
Template = Annotated[
    str | None,
    typer.Option(help="How conversations become text: chat, moss_en, moss_zh, alpaca or hh; not given: by the source."),
]
Tokenizer = Annotated[str | None, typer.Option(help="Folder of the tokenizer, where the checkpoint holds none.")]


@diff_app.command()
def make(
    raw: Raw,
    tuned: Annotated[str, typer.Argument(help="The tuned model.")],
    diff: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    rule: Annotated[
        str, typer.Option(help="exact loses no bit; moss and alpaca_farm write what the published scripts read.")
    ] = "exact",
) -> None:
    """Write the difference between a tuned model and its base, with a manifest of hashes."""
    from rewarden.models.diff import make_diff

    with _writing(diff):
        manifest = make_diff(raw, tuned, diff, rule=rule, report=_say)
    _say(f"{diff}: rule {manifest.rule}, {len(manifest.tensors)} tensors ({manifest.modes()}), sum {manifest.total:.4f}")


@diff_app.command()
def recover(
    raw: Raw,
    diff: Annotated[str, typer.Argument(help="The diff.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    rule: Rule = None,
    dtype: Dtype = "auto",
    check: Annotated[
        str, typer.Option(help="manifest (every hash), sum (the published sum) or off; auto is the best there is.")
    ] = "auto",
    expected: Sum = None,
    template: Template = None,
    tokenizer: Tokenizer = None,
    keep_names: Annotated[
        bool, typer.Option("--keep-names", help="Leave a reward_head as it is; otherwise a Rewarden reward model is written.")
    ] = False,
) -> None:
    """Add a diff to its base and write the tuned model."""
    from rewarden.models.diff import recover as recover_model

    _check_template(template)
    with _writing(out):
        done = recover_model(
            raw,
            diff,
            out,
            rule=rule,
            dtype=dtype,
            check=check,
            expected=expected,
            template=template,
            tokenizer=tokenizer,
            keep_names=keep_names,
            report=_say,
        )
    for note in done.notes:
        _say(note)
    _say(f"{out}: {done.num_tensors} tensors by rule {done.rule}; {done.checked}; base sha256 {done.base_sha256[:16]}")


@diff_app.command()
def check(
    diff: Annotated[str, typer.Argument(help="The diff.")],
    raw: Annotated[str | None, typer.Option(help="The base model: check that it is the right one, and the result.")] = None,
    rule: Rule = None,
    expected: Sum = None,
) -> None:
    """Check a diff, and with --raw its base and what they give, without writing anything."""
    from rewarden.models.diff import check_diff

    for line in check_diff(diff, raw, rule=rule, expected=expected).lines:
        print(line)


def import_model(
    checkpoint: Annotated[str, typer.Argument(help="A reward checkpoint of MOSS-RLHF or AlpacaFarm (with a reward_head).")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    backbone: Annotated[
        str | None, typer.Option(help="Where AlpacaFarm's backbone lies, if the path in its config leads nowhere.")
    ] = None,
    template: Template = None,
    tokenizer: Tokenizer = None,
    dtype: Annotated[str, typer.Option(help="auto keeps every bit; or float32, bfloat16, float16.")] = "auto",
) -> None:
    """Turn a reward checkpoint of MOSS-RLHF or AlpacaFarm into a Rewarden reward model."""
    from rewarden.models.diff import import_reward

    _check_template(template)
    with _writing(out):
        notes = import_reward(
            checkpoint, out, backbone=backbone, template=template, tokenizer=tokenizer, dtype=dtype, report=_say
        )
    for note in notes:
        _say(note)
    _say(f"{out}: a Rewarden reward model")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _check_template(template: str | None) -> None:
    """Errors: ConfigError for a word that no template has."""
    from rewarden.text.render import KINDS

    if template is not None and template not in KINDS:
        raise ConfigError(f"template {template!r} is unknown; use one of {', '.join(KINDS)}")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """One command per output folder; a full or closed disk in words."""
    from rewarden.models.diff.write import LOCK, draft_of, refuse_existing
    from rewarden.runtime.disk import writing
    from rewarden.runtime.lock import FolderLock

    refuse_existing(out)
    draft = draft_of(out)
    with writing(out):
        draft.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(draft / LOCK)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()
            if draft.is_dir() and not any(draft.iterdir()):
                draft.rmdir()
