"""The first tables: gpu, environment, trial, winner, request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "gpu",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("smem_per_block_bytes", sa.BigInteger(), nullable=False),
        sa.Column("l2_bytes", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpu"),
        sa.UniqueConstraint(
            "name", "target", "sm_count", "smem_per_block_bytes", "l2_bytes", "memory_bytes", name="uq_gpu"
        ),
    )
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("cuda", sa.Text(), nullable=False),
        sa.Column("dsl", sa.Text(), nullable=False),
        sa.Column("ptxas", sa.Text(), nullable=False),
        sa.Column("triton", sa.Text(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environment"),
        sa.UniqueConstraint("driver", "cuda", "dsl", "ptxas", "triton", "torch", name="uq_environment"),
    )
    op.create_table(
        "trial",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("op", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("p20_us", sa.Double(), nullable=True),
        sa.Column("p80_us", sa.Double(), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=True),
        sa.Column("ratio", sa.Double(), nullable=True),
        sa.Column("ratio_low", sa.Double(), nullable=True),
        sa.Column("ratio_high", sa.Double(), nullable=True),
        sa.Column("baseline_us", sa.Double(), nullable=True),
        sa.Column("error", sa.Double(), nullable=True),
        sa.Column("registers", sa.BigInteger(), nullable=True),
        sa.Column("stack_bytes", sa.BigInteger(), nullable=True),
        sa.Column("smem_bytes", sa.BigInteger(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.CheckConstraint("origin IN ('measured', 'predicted')", name=op.f("ck_trial_origin")),
        sa.CheckConstraint(
            "status IN ('ok', 'invalid', 'compile_error', 'wrong_result', 'crashed', 'timeout', 'pruned')",
            name=op.f("ck_trial_status"),
        ),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name="fk_trial_gpu_id"),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name="fk_trial_environment_id"),
        sa.PrimaryKeyConstraint("id", name="pk_trial"),
    )
    op.create_index("ix_trial_op_revision_problem_gpu_id", "trial", ["op", "revision", "problem", "gpu_id"])
    op.create_table(
        "winner",
        *_tuning_key(),
        sa.Column("trial_id", sa.String(36), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_winner_trial_id"),
        sa.PrimaryKeyConstraint("gpu", "op", "revision", "problem", name="pk_winner"),
    )
    op.create_index("ix_winner_trial_id", "winner", ["trial_id"])
    op.create_table(
        "request",
        *_tuning_key(),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("gpu", "op", "revision", "problem", name="pk_request"),
    )


def downgrade() -> None:
    for table in ("request", "winner", "trial", "environment", "gpu"):
        op.drop_table(table)


def _tuning_key() -> list[sa.Column[str] | sa.Column[int]]:
    return [
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("op", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
    ]
