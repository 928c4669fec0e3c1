"""Decisions without I/O, threads, clocks or randomness. The time is an argument."""
