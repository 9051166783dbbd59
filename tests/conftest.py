"""Shared by all tests: shape checks switched on, one thread, no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("rewarden", "beartype.beartype")

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

SHARED = Path(os.environ.get("REWARDEN_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data, or a skip that says so."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"real data absent: {SHARED}/data (set REWARDEN_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real pretrained chat model, or a skip that says so."""
    folder = Path(os.environ.get("REWARDEN_SMOLLM2", Path(__file__).parents[1] / "models" / "smollm2"))
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"SmolLM2 absent: {folder} (run `make smollm2`, or set REWARDEN_SMOLLM2)")
    return folder
