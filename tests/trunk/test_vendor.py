"""The vendor's calls: they compute what the op's reference does, and serve where they were measured to be fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from cutekernels import compile as compiler
from cutekernels import dispatch, gpu, introspection
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.job import Task
from cutekernels.autotune.predict import Prediction
from cutekernels.db.storage.snapshot import Snapshot, TunedConfig
from cutekernels.db.storage.store import Environment, Store
from cutekernels.ops.attention.op import ATTENTION, AttentionProblem
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem
from cutekernels.verify import worst_error
from tests.tuner.toys import ToyMachine


@pytest.mark.parametrize(
    "text",
    [
        "m=32 n=48 k=64",
        "m=32 n=48 k=64 b_major=k c=n dtype=fp16",
        "m=32 n=48 k=64 a_major=m out_major=m bias=same",
        "m=32 n=48 k=64 batched=1 batch=3 c=n",
        "m=32 n=48 k=64 batched=1 batch=3 bias=same",
    ],
)
def test_products(text: str) -> None:
    p = GemmProblem.parse(text)
    args = GEMM.sample(p, "cpu", 0)
    outputs = GEMM.outputs(p, *args)
    outputs[0].fill_(float("nan"))
    call = GEMM.vendor(p)
    assert call is not None
    call(*outputs, *args)
    assert worst_error(outputs, GEMM.reference(p, *args), GEMM.work(p).flops) <= 1


@pytest.mark.parametrize("more", ["", "causal=1", "mask=1"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
def test_attention(more: str, heads: tuple[int, int]) -> None:
    p = AttentionProblem.parse(f"batch=2 seq_q=32 seq_kv=32 heads_q={heads[0]} heads_kv={heads[1]} head_dim=64 {more}")
    args = ATTENTION.sample(p, "cpu", 0)
    call = ATTENTION.vendor(p)
    assert call is not None
    found = call(*ATTENTION.outputs(p, *args), *args)
    assert isinstance(found, torch.Tensor)
    work = ATTENTION.work(p)
    assert worst_error((found.transpose(1, 2),), ATTENTION.reference(p, *args), work.flops, "fp32", work.depth) <= 1


@pytest.mark.parametrize(
    "text", ["m=32 n=48 k=64 activation=gelu", "m=32 n=48 k=64 bias=fp32", "m=32 n=48 k=64 c=n bias=same"]
)
def test_products_that_take_more_than_one_call_have_none(text: str) -> None:
    assert GEMM.vendor(GemmProblem.parse(text)) is None


@pytest.mark.parametrize(
    "more", ["varlen=1", "softcap=1", "window=left window_left=8", "seq_q=16 causal=1", "causal=1 mask=1"]
)
def test_attention_that_torch_lacks_has_none(more: str) -> None:
    fields = {"batch": "2", "seq_q": "32", "seq_kv": "32", "heads_q": "4", "heads_kv": "4", "head_dim": "64"}
    fields |= dict(word.split("=") for word in more.split())
    p = AttentionProblem.parse(" ".join(f"{name}={value}" for name, value in fields.items()))
    assert ATTENTION.vendor(p) is None


class TestConfig:
    """``body=vendor`` of gemm."""

    PROBLEM = GemmProblem.parse("m=256 n=4096 k=4096 b_major=k")
    H200 = gpu.lookup("h200")

    @property
    def config(self) -> GemmConfig:
        (found,) = [c for c in GEMM.valid(self.PROBLEM, self.H200) if c.vendors]
        return found

    def row(self, problem: str, config: str = "", ratio: float = 1.2) -> TunedConfig:
        words = problem, config or str(self.config), "measured"
        return TunedConfig("gemm", GEMM.revision, *words, 100.0, ratio, "", "database")

    def resolved(self, problem: str, *rows: str) -> dispatch.Choice:
        table = {row: self.row(row) for row in rows}
        snapshot = Snapshot(MappingProxyType({("gemm", GEMM.revision): table}))
        return dispatch.resolve(GEMM, GemmProblem.parse(problem), self.H200, snapshot)

    def test_there_is_one(self) -> None:
        assert self.config.body == "vendor" and GemmConfig.parse(str(self.config)) == self.config
        assert "takes stages from 2" in str(GEMM.why_not(self.PROBLEM, replace(self.config, stages=3), self.H200))
        gated = self.PROBLEM.replace(activation="gelu")
        assert "no one call of torch's" in str(GEMM.why_not(gated, self.config, self.H200))
        assert not [c for c in GEMM.valid(gated, self.H200) if c.vendors]

    @pytest.mark.parametrize("name", [g.name for g in gpu.GPUS])
    def test_it_is_never_the_default(self, name: str) -> None:
        assert not any(GEMM.default(GemmProblem.parse(text), gpu.lookup(name)).vendors for text in GEMM.suite)

    def test_it_serves_where_it_was_measured_and_where_the_three_closest_winners_are_its(self) -> None:
        text = str(self.PROBLEM)
        assert self.resolved(text, text).config == self.config
        assert self.resolved(f"{text} dtype=fp16", text).config == self.config, "one tuning serves both types"
        near = self.resolved("m=384 n=4096 k=4096 b_major=k", text)
        assert (near.origin, near.config.vendors) == ("default", False)
        assert not self.resolved(f"{text} activation=gelu", text).config.vendors
        asked, *others = (f"m=512 n=4096 k={k} b_major=k" for k in (4096, 4608, 3584, 5120))
        assert not self.resolved(asked, *others[:2]).config.vendors, "two are not enough"
        three = self.resolved(asked, *others)
        assert three.origin == "nearest" and three.config.vendors
        ours = str(GEMM.default(GemmProblem.parse(asked), self.H200))
        rows = {row: self.row(row) for row in others}
        closest = "m=512 n=4096 k=4224 b_major=k"
        rows[closest] = self.row(closest, ours, 1.0)
        table = Snapshot(MappingProxyType({("gemm", GEMM.revision): rows}))
        served = dispatch.resolve(GEMM, GemmProblem.parse(asked), self.H200, table)
        assert (served.origin, str(served.config)) == ("nearest", ours), "one of ours is closer"

    def test_it_is_not_predicted(self, tmp_path: Path) -> None:
        class Machine(ToyMachine):
            def compile(self, op: Any, problem: Any, config: Any, gpu: Any) -> Any:
                assert not config.vendors
                return super().compile(op, problem, config, gpu)

        problem = GemmProblem.parse("m=32 n=32 k=64")
        with Store(str(tmp_path / "t.db")) as store:
            history = TaskHistory(store, GEMM, problem, self.H200, Environment(), "predicted")
            report = Prediction(Task(GEMM, problem, 10), self.H200, history, Machine()).run()
        assert report.winner is not None and not GemmConfig.parse(report.winner.config).vendors

    def test_it_is_cached_loaded_and_launched(self) -> None:
        facts = compiler.prepare(GEMM, self.PROBLEM, self.config, self.H200)
        assert (facts.registers, facts.smem_bytes) == (0, 0)
        p = GemmProblem.parse("m=24 n=40 k=64 c=n")
        launch = GEMM.bind(p, self.config, compiler.get(GEMM, p, self.config, self.H200))
        args = GEMM.sample(p, "cpu", 0)
        outputs = GEMM.outputs(p, *args)
        args[0].requires_grad_()  # a call below autograd
        launch(*outputs, *args)
        args[0].requires_grad_(False)
        assert worst_error(outputs, GEMM.reference(p, *args), GEMM.work(p).flops) <= 1
        assert GEMM.bind(p.replace(m=0), self.config, lambda *_: None)(*outputs, *args) is None

    def test_explain_shows_it(self) -> None:
        told = introspection.explain("gemm", str(self.PROBLEM), gpu="h200", config=str(self.config))
        assert "body=vendor" in str(told)
