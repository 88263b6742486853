"""Rules of the store that only a planted bug would break: ties between winners."""

from __future__ import annotations

from pathlib import Path

from cutekernels.db.storage.store import Store
from tests.db.trials import trial


def test_of_two_winners_of_one_moment_the_greater_id_stays_whoever_comes_first(tmp_path: Path) -> None:
    old = trial("tile_m=64")
    new = trial("tile_m=128", created_at=old.created_at)
    assert new.id > old.id
    for name, row in (("old", old), ("new", new)):
        with Store(str(tmp_path / f"{name}.db")) as store:
            store.record([row])
            store.crown(row.id)
    for target, order in (("x", ("old", "new")), ("y", ("new", "old"))):
        with Store(str(tmp_path / f"{target}.db")) as store:
            for name in order:
                store.merge(str(tmp_path / f"{name}.db"))
            assert [w.id for w in store.winners()] == [new.id]
