"""The records: which there are, their order, where they are read from, and what becomes of batches."""
