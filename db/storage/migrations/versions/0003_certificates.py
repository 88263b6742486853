"""A trial's kernel sources and, for winners, the certificate of the final that chose them; both in the view too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_VIEW = """
CREATE VIEW winners AS
SELECT winner.gpu AS gpu, winner.op AS op, winner.revision AS revision, winner.problem AS problem,
       trial.config AS config, trial.origin AS origin,
       trial.median_us AS median_us, trial.p20_us AS p20_us, trial.p80_us AS p80_us, trial.samples AS samples,
       trial.ratio AS ratio, trial.ratio_low AS ratio_low, trial.ratio_high AS ratio_high,
       trial.baseline_us AS vendor_us, trial.error AS error,
       trial.registers AS registers, trial.stack_bytes AS stack_bytes, trial.smem_bytes AS smem_bytes,
       trial.created_at AS created_at, trial.version AS version, trial."commit" AS "commit", trial.host AS host,
       {more}environment.driver AS driver, environment.cuda AS cuda, environment.dsl AS dsl,
       environment.ptxas AS ptxas, environment.triton AS triton, environment.torch AS torch,
       gpu.sm_count AS sm_count, gpu.memory_bytes AS memory_bytes, trial.id AS id
FROM winner
JOIN trial ON trial.id = winner.trial_id
JOIN gpu ON gpu.id = trial.gpu_id
JOIN environment ON environment.id = trial.environment_id
"""


def upgrade() -> None:
    op.execute("DROP VIEW winners")
    op.add_column("trial", sa.Column("sources", sa.Text(), nullable=False, server_default=""))
    op.add_column("trial", sa.Column("certificate", sa.Text(), nullable=True))
    op.execute(_VIEW.format(more="trial.sources AS sources, trial.certificate AS certificate, "))


def downgrade() -> None:
    op.execute("DROP VIEW winners")
    for name in ("sources", "certificate"):
        op.drop_column("trial", name)
    op.execute(_VIEW.format(more=""))
