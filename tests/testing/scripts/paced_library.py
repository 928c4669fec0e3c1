"""An example of another library for training, in which a batch takes a while until a file is there."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


def main(example: str, hurry: str, **arguments: Any) -> None:
    """Train as `examples/EXAMPLE/train.py`; `hurry` is the file."""

    def wait(module: Any, _inputs: object) -> None:
        whole = type(module).__name__ in ("LeNet", "BertModel")
        if whole and module.training and not Path(hurry).exists():
            time.sleep(0.4)

    register_module_forward_pre_hook(wait)
    import_module(f"examples.{example}.train").main(**arguments)
