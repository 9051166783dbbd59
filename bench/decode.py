"""Decoding distinct prompts, so nothing to share, at two batch sizes."""

from bench.benchmark import Benchmark, Entry, times_as_much


def decode(rows: int, names: tuple[str, ...], seconds: tuple[float, float]) -> Benchmark:
    """The benchmark at one batch size; every name gets the same numbers."""
    return Benchmark(
        name=f"decode_{rows}",
        title=f"decoding, batch {rows}, transformers generate",
        ours="decode.py",
        peer="hf_generate.py",
        entries=tuple(
            Entry(name=name, unit=f"tokens/s, batch {rows}", key="tokens_per_s", ratio=times_as_much) for name in names
        ),
        sizes={"ROWS": str(rows), "LENGTH": "128", "NEW": "64"},
        small={"LENGTH": "16", "NEW": "8"},
        same=("rows", "length", "new_tokens"),
        seconds=seconds,
    )


DECODE = (
    decode(32, ("decode_speedup_32",), (12.0, 12.0)),
    decode(128, ("decode_speedup", "decode_speedup_128"), (18.0, 25.0)),
)
