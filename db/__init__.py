"""The tuned-config database: every attempt, and the winner of each problem.

Where a line belongs::

    uuid7.py      ids that sort by time and never collide between machines
    trial.py      Trial, Gpu, Environment: the records and their rules
    certificate.py  Certificate: the final round that chose a winner
    rate.py       Rate: one calibrated speed of a GPU's part
    lines.py      trials as JSON lines, full or slim
    sqlite.py     SQLite files: safe journal modes, damage, network filesystems, read-only opening
    models.py     the tables (SQLAlchemy 2)
    migrations/   changes of the tables (Alembic), one file each
    engine.py     opening a database: checked, migrated, ready for transactions
    store.py      reading and writing, for the tuner and the command line
    statements.py the statements of the store, in batches
    query.py      what queries ask, and what stored texts mean, as the ops declare it
    reader.py     winners as people ask for them: typed, local and shipped side by side
    snapshot.py   winners that a dispatcher loads once: read-only, standard library only, never raises
    shipped/      winners that travel with the package, one file of JSON lines per GPU
    cli.py        ``cutekernels db``
    listing.py    its tables, within 80 columns
    html_report.py  ``cutekernels db report``

Nothing here imports torch. All but the query, the reader and what prints them know no ops either: problems and configs
are text to them. Nothing heavy is imported in this file, so that a dispatcher's snapshot loads no SQLAlchemy.
"""

from cutekernels import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
