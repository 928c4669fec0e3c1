"""Which records there are, in which order, where they are read from, and what becomes of their batches."""
