"""What tests share.

A rig is a part of the product, started inside the test's process and told what a test wants:

| module | the rig | what is real in it |
| --- | --- | --- |
| `harness` | a whole job: parameter servers and workers as threads | all but the processes |
| `transports` | two ends of each transport, and the relay between them | all |
| `mortal` | workers and servers as processes that kill themselves at a given moment | all |
| `service` | a parameter server and a worker that is played message by message | the server |
| `coordinator` | shard 0's coordinator, with shards that only take notes | the coordinator |
| `shard` | a shard that is told what a coordinator would tell it | the shard |
| `rounds` | a machine of workers that push, vanish and are committed | the rules of the modes |
| `state` | what workers do to a job's state, a line each | the job's state |
| `store` | checkpoints of a small model, whole and broken | the store |
| `simulation` | a cluster in a few lines: state in, plan applied, state out | the operator's decisions |
| `api_server` | an API server on localhost, without schemas and rights | the operator's I/O |
| `operator_process` | an operator beside a real cluster, and jobs that sleep | all but the training |
| `fake_programs` | a server and a worker that count and do not train | the launcher |

The oracles say what is right: `oracle` replays the recorded rounds with plain torch, and
`histories` compares what both sides have recorded. `trained`, `gan`, `optimizers`, `trainers`, `trl_trainers`
and `lightning` are models and scripts to train; `scripts/` are scripts that `mpirun` or a launcher starts.

What breaks things: `faulty_api` (an API server in trouble), `talking` (a server that says what no server
would), `watched` (a connection on which calls are noted, late, or fail), `impatient` (a client that does not
wait), `forked` (a child that has open what the test has open), `jitter` (threads that are late).

Tools: `polling` (wait with a deadline), `inside` (what no script may reach), `machine` (what a test says of
the machine), `tiers` (what runs with each change, what each night), `virtual`
(time that passes at once), `addresses`, `certificates`, `datafiles`, `templates`, `devices`, `launching`,
`mpirun`, `relays`, `recorded_job`, `tutorial`.
"""
