"""The handwritten digits that scikit-learn ships: 1,797 real images of 8 x 8 pixels.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from elastic_ps.errors import UsageError


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The digits as (training set, test set); every fifth image is for the test, always the same.

    Records are (image, label): float32 of shape (1, 8, 8) in 0 to 1, and int64.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        text = (
            "the digits are part of scikit-learn, which is not installed: pip install 'elastic-ps[examples]'"
        )
        raise UsageError(text) from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )
