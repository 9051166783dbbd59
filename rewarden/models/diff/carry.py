"""The small files around the weights: config, tokenizer, card; carried over, and changed only where they must be."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.models.diff.manifest import MANIFEST
from rewarden.models.diff.sums import SUM_FILE
from rewarden.models.diff.write import file_sha256
from rewarden.models.folder import CARD, find, read_object

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
CONFIG = ("config.json", "generation_config.json")
PLAIN = frozenset({".json", ".model", ".txt", ".jinja", ".py", ".md", ".tiktoken", ""})
OWN = frozenset({MANIFEST, SUM_FILE})


def carry(source: str, target: Path, *, without: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Copy the small files of a checkpoint; returns name -> SHA-256, and the names of what was left behind.

    Of a folder these are all text-like files, of a hub id the usual ones. Weights and their index never count.
    """
    carried: dict[str, str] = {}
    left: list[str] = []
    for name, file in _small_files(source, left).items():
        if name not in without and name not in OWN:
            shutil.copyfile(file, target / name)
            carried[name] = file_sha256(target / name)
    return carried, left


def _small_files(source: str, left: list[str]) -> dict[str, Path]:
    if not Path(source).is_dir():
        found = {name: find(source, name) for name in (*CONFIG, CARD, *TOKENIZER)}
        return {name: file for name, file in found.items() if file is not None}
    files = {}
    for file in sorted(Path(source).iterdir()):
        if file.name.startswith(".") or file.name.endswith((".safetensors", ".bin", ".index.json")):
            continue
        if file.is_file() and file.suffix in PLAIN:
            files[file.name] = file
        else:
            left.append(file.name)
    return files


def has_tokenizer(path: str) -> bool:
    """Whether a checkpoint holds any tokenizer file."""
    return any(find(path, name) is not None for name in TOKENIZER)


def carry_tokenizer(source: str, target: Path) -> None:
    """Copy tokenizer files only, replacing those in `target`.

    Errors: ConfigError when there are none.
    """
    if not has_tokenizer(source):
        raise ConfigError(f"{source} holds no tokenizer ({', '.join(TOKENIZER[:3])}, ...); give a folder that does")
    for name in TOKENIZER:
        (target / name).unlink(missing_ok=True)
        if (file := find(source, name)) is not None:
            shutil.copyfile(file, target / name)


def read_config(path: str) -> dict[str, Any]:
    """The content of a checkpoint's config.json.

    Errors: ConfigError when it is missing or damaged.
    """
    file = find(path, "config.json")
    if file is None:
        raise ConfigError(f"{path} has no config.json; copy it from the checkpoint's source")
    return read_object(file)


def moss_template(path: str) -> str:
    """moss_zh where the tokenizer files know the role token of the Chinese models, else moss_en."""
    for name in ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "tokenizer.json"):
        file = find(path, name)
        if file is not None and "<|MOSS|>" in file.read_text(encoding="utf-8"):
            return "moss_zh"
    return "moss_en"


def card_text(card: Mapping[str, Any]) -> str:
    """The text of `rewarden.json`."""
    return json.dumps(card, indent=2, ensure_ascii=False) + "\n"
