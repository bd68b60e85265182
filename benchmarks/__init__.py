"""Runnable measurements: `python -m benchmarks SUITE [--quick] [--json]`."""
