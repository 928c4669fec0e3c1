"""The handwritten digits that scikit-learn ships: 1,797 real images of 8 x 8 pixels.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from elastic_ps.errors import UsageError


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The digits as (training set, test set); every fifth image is for the test, always the same.

    Records are (image, label): float32 of shape (1, 8, 8) in 0 to 1, and int64.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    installed = find_spec("sklearn")
    if installed is None or installed.origin is None:
        text = (
            "the digits are part of scikit-learn, which is not installed: pip install 'elastic-ps[examples]'"
        )
        raise UsageError(text)
    # `load_digits` reads the same file, but to import it takes each process of a job two seconds.
    file = Path(installed.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
    held_out = torch.arange(len(labels)) % 5 == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )
