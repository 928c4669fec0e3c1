"""Carries bytes between workers and parameter servers; `base` has the interface."""
