"""A worker from joining to leaving: its membership, its records, its gradients and steps."""
