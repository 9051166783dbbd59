"""Jobs driven in a folder, and sample and score stores written by hand."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rewarden.collect.sample_store import read_samples
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder

NUM_PROMPTS = 5


@dataclass(frozen=True)
class Desk:
    policy: Path
    prompts: Path


def run(cfg, folder: Path, **how):
    """Drive a job in a folder to its end; `resume` and the keys of Drive as keywords."""
    resume = how.pop("resume", "auto")
    keys = {**getattr(type(cfg), "drive_defaults", {}), "view": "off", **how}
    recipe = cfg.model_dump(mode="json")
    return drive(
        cfg.build(Ranks.single("cpu")), RunFolder(folder), Ranks.single("cpu"), resume=resume, cfg=Drive(**keys), recipe=recipe
    )


def write_store(folder: Path, texts, *, prompts=None, ended=None, tokens=None) -> Path:
    """A finished sample store with these [P][N] texts, written here and not by `sample_n`."""
    folder.mkdir(parents=True, exist_ok=True)
    num, flat = len(texts[0]), [text for row in texts for text in row]
    rows = prompts or [{"id": f"p{p}", "prompt": [{"role": "user", "content": f"question {p}"}]} for p in range(len(texts))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {"format": 1, "num_prompts": len(texts), "num_generations": num, "policy": "a policy"}
    (folder / "samples.json").write_text(json.dumps(facts))
    columns = {
        "prompt": [place // num for place in range(len(flat))],
        "index": [place % num for place in range(len(flat))],
        "text": flat,
        "num_tokens": tokens or [len(text.split()) for text in flat],
        "logp": [-1.0] * len(flat),
        "ended": ended or ["eos"] * len(flat),
        "seed": list(range(len(flat))),
    }
    pq.write_table(pa.table(columns), folder / "samples.parquet", row_group_size=7)
    return folder


def write_scores(folder: Path, samples: Path, name: str, score, **facts) -> Path:
    """A finished score store of one scorer, [P][N] values or [P][N][K] members, None where there is no score."""
    table = np.array(score, dtype=np.float32)
    table = table[:, :, None] if table.ndim == 2 else table
    num_ok = int(np.isfinite(table).all(axis=2).sum())
    (folder / "scores").mkdir(parents=True, exist_ok=True)
    np.save(folder / "scores" / f"{name}.npy", table)
    status = {"ok": num_ok, "not_applicable": table.shape[0] * table.shape[1] - num_ok}
    known = {"samples": read_samples(samples).fingerprint, "shape": list(table.shape), "status": status, "aggregate": None}
    (folder / "scores" / f"{name}.json").write_text(json.dumps(known | facts))
    return folder
