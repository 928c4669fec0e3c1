"""Extras that stand on the public interface alone: networks, data sets, the zoo, an engine with hooks."""
