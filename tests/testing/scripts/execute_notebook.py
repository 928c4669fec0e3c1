"""Execute a notebook in the current folder, and write the outputs of its cells into it. No port is opened."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

file = Path(sys.argv[1])
notebook = nbformat.read(file, as_version=4)
sockets = Config(KernelManager={"transport": "ipc"})  # files beside the notebook
NotebookClient(notebook, config=sockets, startup_timeout=600).execute()
nbformat.write(notebook, file)
