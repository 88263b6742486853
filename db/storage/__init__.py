"""Storage: tuned configs as rows. Knows neither ops nor torch: problems and configs are text.

Where a line belongs::

    uuid7.py      ids that sort by time and never collide between machines
    trial.py      Trial, Gpu, Environment: the records and their rules
    certificate.py  Certificate: the final round that chose a winner
    rate.py       Rate: one calibrated speed of a GPU's part
    lines.py      trials as JSON lines, full or slim
    lock.py       winners and rates, frozen and hashed in a file
    sqlite.py     SQLite files: safe journal modes, damage, network filesystems, read-only opening
    models.py     the tables (SQLAlchemy 2)
    migrations/   changes of the tables (Alembic), one file each
    engine.py     opening a database: checked, migrated, ready for transactions
    leases.py     which process is at a task
    store.py      reading and writing, for the tuner and the command line
    statements.py the statements of the store, in batches
    snapshot.py   winners that a dispatcher loads once: read-only, standard library only, never raises

A row has four forms from the tuner to a call::

    Trial -- store --> row of a table -- the snapshot's query --> TunedConfig --> dispatch
      ^                                                             ^    ^
      +-- lines: exports, shipped winners (full or slim JSON) ------+    +-- lock: its values but the source
"""
