"""Injects faults into a running job, and checks from recorded histories that nothing was lost.

`faults` lists the faults and chooses them from a seed, `runner` injects them into a job on this machine,
`history` checks the records of both sides, and `report` has the result for programs.
"""
