"""Has wheels built in an empty directory, since setuptools packs what an earlier build left in build/lib.

All else is in pyproject.toml.
"""

import tempfile

from setuptools import setup

with tempfile.TemporaryDirectory() as directory:
    setup(options={"build": {"build_base": directory}})
