"""Migrations of the tables: one file in ``versions/`` per change, numbered ``0001``, ``0002``, ...

To add one: write ``versions/NNNN_<what>.py`` and raise :data:`HEAD`. Numbers sort as text, so a database whose
number is greater than HEAD is newer than this package. Standard library only: the snapshot reads HEAD.
"""

HEAD = "0004"
READABLE = ("0001", "0002", "0003", HEAD)  # by the snapshot, which reads columns that all of these have
RATES_SINCE = "0004"  # the table ``rate``
