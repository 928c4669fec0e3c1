"""Decisions without I/O, threads, clocks or randomness; the time is an argument where one is needed."""
