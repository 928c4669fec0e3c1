"""Breaks a running job on purpose, and proves from the recorded histories that nothing was lost.

`faults` are what may be done to a job, `schedule` decides which and when from a seed, `runner` does it to
a job on this machine, `history` checks what both sides have recorded, `report` tells people and programs.
"""
