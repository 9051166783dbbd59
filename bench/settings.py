"""What `make bench` can be told, all by environment variables, and where things lie."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.benchmark import Benchmark
from rewarden.errors import ConfigError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Paths and knobs of one call.

    BENCH_PAIRS (5): interleaved pairs. BENCH_ONLY: names of benchmarks or results, with commas. BENCH_SMALL=1: small sizes.
    BENCH_SIZES: other sizes, such as PROMPTS=16,STEPS=1. BENCH_THREADS (2): threads of each side. BENCH_TIMEOUT (3600): seconds
    one run may take. Other than the standard sizes go to results.small.json. Pythons and folders: `our_python`, REWARDEN_PEERS,
    REWARDEN_SHARED.
    """

    our_python: Path
    peers: Path
    scripts: Path
    results: Path
    pairs: int
    threads: int
    timeout_s: float
    sizes: Mapping[str, str]
    small: bool

    @property
    def peer_python(self) -> Path:
        """The interpreter of the peers' environment."""
        return self.peers / "bin" / "python"

    def sizes_of(self, benchmark: Benchmark) -> dict[str, str]:
        """The sizes in force for a benchmark; unknown keys of BENCH_SIZES concern others."""
        known = {*benchmark.sizes, *benchmark.only_ours}
        asked = {key: value for key, value in self.sizes.items() if key in known}
        return {**benchmark.sizes, **(benchmark.small if self.small else {}), **asked}

    def peer_script(self, benchmark: Benchmark) -> Path:
        """The peer's script: ours to keep, or from the shared folder."""
        own = FOLDER / "peers" / benchmark.peer
        return own if own.exists() else self.scripts / benchmark.peer


def read_settings(environ: Mapping[str, str], our_python: Path) -> Settings:
    """The settings that the environment asks for.

    Errors: ConfigError for a number or size that cannot be read.
    """
    sizes = dict(_size(part) for part in environ.get("BENCH_SIZES", "").split(",") if part.strip())
    small = environ.get("BENCH_SMALL", "") not in ("", "0")
    return Settings(
        our_python=our_python,
        peers=Path(environ.get("REWARDEN_PEERS") or ROOT / ".venv-peers"),
        scripts=Path(environ.get("REWARDEN_SHARED") or ROOT.parent / "shared") / "bench" / "peers",
        results=FOLDER / ("results.small.json" if small or sizes else "results.json"),
        pairs=_whole(environ, "BENCH_PAIRS", 5),
        threads=_whole(environ, "BENCH_THREADS", 2),
        timeout_s=_whole(environ, "BENCH_TIMEOUT", 3600),
        sizes=sizes,
        small=small,
    )


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    raw = environ.get(name) or str(default)
    if not raw.isdecimal() or int(raw) < 1:
        raise ConfigError(f"{name} is {raw!r}; give a whole number of at least 1, such as {name}={default}")
    return int(raw)


def _size(part: str) -> tuple[str, str]:
    name, _, value = (piece.strip() for piece in part.partition("="))
    if not name.isupper() or not value.isdecimal():
        raise ConfigError(f"BENCH_SIZES has {part!r}; write NAME=NUMBER with commas between, such as PROMPTS=16,STEPS=1")
    return name, value


def chosen(benchmarks: Sequence[Benchmark], only: str) -> list[Benchmark]:
    """The benchmarks that BENCH_ONLY names, by their own name or that of a result; all when it is empty.

    Errors: ConfigError naming what is unknown and all that is known.
    """
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    names = {benchmark.name: {benchmark.name, *(entry.name for entry in benchmark.entries)} for benchmark in benchmarks}
    known = [name for benchmark in benchmarks for name in (benchmark.name, *(entry.name for entry in benchmark.entries))]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"BENCH_ONLY names {unknown[0]!r}; use one or several of {', '.join(dict.fromkeys(known))}")
    return [benchmark for benchmark in benchmarks if not wanted or names[benchmark.name] & set(wanted)]


def check_places(settings: Settings, benchmarks: Sequence[Benchmark], known: Sequence[Benchmark]) -> None:
    """Refuse to start when something that will be needed is absent.

    Errors: ConfigError, one line.
    """
    unused = {*settings.sizes} - {key for benchmark in known for key in (*benchmark.sizes, *benchmark.only_ours)}
    if unused:
        keys = sorted({key for benchmark in known for key in (*benchmark.sizes, *benchmark.only_ours)})
        raise ConfigError(f"BENCH_SIZES sets {min(unused)}, which no benchmark reads; use one of {', '.join(keys)}")
    if not (settings.peers / "installed").exists() or not os.access(settings.peer_python, os.X_OK):
        raise ConfigError(f"no peers in {settings.peers}: run `make peers` once (it uses the network), then `make bench` again")
    for benchmark in benchmarks:
        if not (script := settings.peer_script(benchmark)).exists():
            raise ConfigError(f"no {script}: set REWARDEN_SHARED to the folder that holds bench/peers")
