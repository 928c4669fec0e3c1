"""The description of a job, shared by the operator, the command line and the processes."""
