"""The tuned-config database: every attempt, and the winner of each problem.

Where a line belongs::

    uuid7.py      ids that sort by time and never collide between machines
    trial.py      Trial, Gpu, Environment: the records, their rules, their text form (JSON lines)
    sqlite.py     SQLite files: safe journal modes, damage, network filesystems, read-only opening
    models.py     the tables (SQLAlchemy 2)
    migrations/   changes of the tables (Alembic), one file each
    engine.py     opening a database: checked, migrated, ready for transactions
    store.py      reading and writing, for the tuner and the command line
    snapshot.py   winners that a dispatcher loads once: read-only, standard library only, never raises
    shipped/      winners that travel with the package, one JSON-lines file per GPU
    cli.py        ``cutekernels db``

This package knows neither ops nor torch: problems and configs are text here, which the reader parses against the
op's dataclasses. Nothing is imported in this file, so that a dispatcher's snapshot loads no SQLAlchemy.
"""
