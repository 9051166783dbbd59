"""Side-by-side measurements against peers: `make bench`. See docs/benchmarks.md."""
