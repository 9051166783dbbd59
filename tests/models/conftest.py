"""Fixtures around tiny models."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import build_model, build_tokenizer, random_rows


@pytest.fixture
def rows() -> list[list[int]]:
    return random_rows([9, 3, 17, 1, 17, 6, 2, 30])


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny model and its tokenizer with transformers alone; give the folder."""

    def save(kind: str = "llama", name: str | None = None, **changes: object) -> Path:
        folder = tmp_path / (name or kind)
        build_model(kind, **changes).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        return folder

    return save
