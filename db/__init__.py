"""The tuned-config database: every attempt ever measured, and which of them wins.

Where a line belongs::

    uuid7.py      ids that sort by time and never collide between machines
    trial.py      Trial, Gpu, Environment: the records, their rules, their text form (JSON lines)
    sqlite.py     what is particular to SQLite files: safe journal modes, damage, network filesystems, read-only opening
    models.py     the tables (SQLAlchemy 2)
    migrations/   how the tables came to be (Alembic), one file per change
    engine.py     opening a database: checked, migrated, ready for transactions
    store.py      reading and writing it: what the tuner and the command line use
    snapshot.py   what a dispatcher loads once: read-only, standard library only, never raises
    shipped/      winners that travel with the package, one JSON-lines file per GPU
    cli.py        ``cutekernels db``

This package knows neither ops nor torch: problems and configs are text here, and whoever reads them parses them
against the op's dataclasses. Nothing is imported here, so that a dispatcher's snapshot loads no SQLAlchemy.
"""
