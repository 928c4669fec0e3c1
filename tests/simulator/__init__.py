"""A simulator that owns time, the network and each thread's turn, in the manner of FoundationDB's.

A whole job (parameter servers, standbys, workers, each of several threads) runs in one process, with the
program's own code. One thread runs at a time; at every lock, queue, message and file the *world* decides by
a seeded random number who goes on. Time is virtual: it moves when everybody waits. Messages are late, lost
or come twice; processes are killed, frozen, replaced while they live; disks are full. A seed gives the same
schedule again. Afterwards `judge` holds what happened against the histories and the values of the model.

`python -m tests.simulator --help`
"""
