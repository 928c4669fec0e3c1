"""What a starter (the operator, the local launcher, mpirun) and a process of a job say to each other."""
