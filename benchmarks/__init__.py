"""Benchmarks: `python -m benchmarks [name…] [--quick]`. Each module here but `timing` is one, and exposes `run(quick)`."""
