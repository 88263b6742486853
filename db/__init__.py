"""The tuned-config database: every attempt, and the winner of each problem.

Two rooms::

    storage/      records, tables, files and locks; what calls load of them. Problems and configs are text here
    questions/    what users ask, with stored texts read as the ops declare them; ``cutekernels db``
    shipped/      winners that travel with the package, one file of JSON lines per GPU

Nothing here imports torch. Nothing heavy is imported in this file, so that a dispatcher's snapshot loads no SQLAlchemy.
"""

from cutekernels import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
