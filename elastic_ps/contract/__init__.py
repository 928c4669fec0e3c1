"""The contract between a process of a job and its starter: operator, local launcher or mpirun."""
