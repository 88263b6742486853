"""The tuner: an offline search of each op's configs per GPU, whose winners go to the tuned-config database.

Where a line belongs::

    job.py        a job file (TOML) -> tasks: reading and checking input, nothing else
    space.py      the valid configs of a task as parameters of an Optuna study, and the model's seeds
    study.py      which config next, and when to end: one task's Optuna study, ask and tell
    studies.py    Optuna's storage beside the database, kept equal to its rows
    studies_cli.py  ``cutekernels studies``: all of them, from the rows
    samplers.py   Optuna's samplers by name; what each cannot take
    search.py     one task on a GPU that is present: compile ahead, measure, race, final round, winner
    predict.py    one task for a GPU that is absent: compile the space, prune, rank by the op's model
    history.py    one task's rows in the database: earlier attempts, how an outcome becomes a trial
    runtime.py    the processes behind a search: the compile pool and the measuring workers
    worker.py     what runs inside the measuring process: load, verify, time
    ledger.py     rows gather for a second before they are written
    run.py        a whole job: ``tune()``, budgets, which path each task takes
    grid.py       ``tune grid``: points of each family, ordered by the regret they remove
    shards.py     parts of a job: a shard of n, one op's tasks, the queue of missed problems; expected costs
    fleet.py      GPUs share a job, and tasks share a GPU: seats, slots, lanes, tasks handed out
    turns.py      whose turn it is on a GPU: one is timed, or many prepare
    ray_fleet.py  the GPUs of a Ray cluster as a fleet
    departures.py where a prediction departs from the default, why, and whether it serves
    outlook.py    what a run would do: ``--list``, ``--dry-run``
    progress.py   bars and log lines, time left
    report.py     outcome of a run, as a table, JSON or CSV
    cli.py        ``cutekernels tune``
    jobs/         job files that come with the package

``search.py`` and ``predict.py`` see processes only through the ``Runtime`` protocol, so their tests use a fake one.
Nothing is imported here; ``from cutekernels.autotune.run import tune`` is the Python entry.
"""
