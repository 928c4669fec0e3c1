"""All that describes a job, for the operator, the command line and the processes alike."""
