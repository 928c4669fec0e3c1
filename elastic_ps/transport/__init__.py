"""How bytes travel between workers and parameter servers; `base` has the interface."""
