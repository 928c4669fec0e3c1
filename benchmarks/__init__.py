"""Benchmarks, each beside a competitor. A regular package comes before one of this name in a wheel."""
