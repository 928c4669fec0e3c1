"""The version: a release changes it here, and `make manifests` writes it to the files that repeat it."""

__version__ = "0.1.0"
