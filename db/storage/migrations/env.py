"""Alembic's entry point: runs the migrations on the connection and in the transaction of the caller."""

from __future__ import annotations

from alembic import context

from cutekernels.db.storage.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite can roll back DDL; Alembic assumes it cannot. The caller's transaction holds the whole upgrade.
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
