"""Parts of `scripts/benchmark.py`: the textbook step, this project's under a stopwatch, the machine's limits."""
