"""The model on a worker: its tensors in flat memory, its values, and its hyperparameters."""
