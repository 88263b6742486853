"""``python -m bench models``: every contender runs on a tiny model, rows come one by one, failures are rows."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import models, new_lengths, wall
from bench.baselines import Absent
from bench.models import CASES, CONFIGS, CONTENDERS, Effort, ModelCase
from bench.rows import Row, read
from cutekernels.models.weights import read as read_weights
from tests.command_line import invoke

CPU = torch.device("cpu")
TINY = [ModelCase("decode", 3, 24), ModelCase("prefill", 1, 20)]


@pytest.fixture(scope="module")
def model() -> Any:
    return models.build("tiny", CPU, torch.float32)


def _eager(function: Any, **options: Any) -> Any:
    return function


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_contender_has_a_row(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is left out on a CPU: it would take a C++ compiler and most of a minute."""
    monkeypatch.setattr(torch, "compile", _eager)
    path = tmp_path / "models" / "tiny.jsonl"
    found: list[Row] = []

    def seen() -> Iterator[Row]:
        for row in models.run("tiny", model, TINY, Effort(rounds=2, steps=2), {"gpu": "cpu"}):
            assert not found or len(read(path)) == len(found)
            found.append(row)
            yield row

    wall.record(seen(), path, wall.table)
    assert [(r.suite, r.contender) for r in found] == [(c.suite, name) for c in TINY for name in CONTENDERS]
    there = [r for r in found if r.status != "absent"]
    assert all(r.status == "ok" and r.median_us and r.rounds == 2 for r in there), there
    assert {r.contender for r in found if r.status == "absent"} <= {"liger-kernel"}
    assert wall.table(found).row_count == len(found)
    assert model.config._attn_implementation == "sdpa", "what was patched is as it was"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_decode_case_has_its_tokens_in_the_middle(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches hold as many tokens before the samples as behind them, seen from the case's number."""
    case, effort, caches = ModelCase("decode", 2, 40), Effort(rounds=3, steps=4), []
    import transformers

    made = transformers.StaticCache
    monkeypatch.setattr(transformers, "StaticCache", lambda **o: caches.append(made(**o)) or caches[-1])
    models._samples(models.theirs(model, case, effort, compiled=False), case, effort, CPU)
    assert int(caches[0].get_seq_length()) == 40 - effort.total // 2 + effort.total
    step = models.ours(model, case, effort)
    models._samples(step, case, effort, CPU)
    decoder: Any = step.__self__  # type: ignore[attr-defined]
    assert not decoder.finished, "every step had work"
    assert abs(int(decoder._caches[0].lengths[0]) - int(caches[0].get_seq_length())) <= 1


def test_packed_weights_run_in_the_decoder() -> None:
    packed = models.build_packed("tiny", CPU, torch.float32, "int4_g64")
    kinds = {name: type(module.weight).__name__ for name, module in packed.named_modules() if hasattr(module, "weight")}
    assert kinds["lm_head"] == "Parameter" and kinds["model.layers.1.mlp.down_proj"] == "QuantizedWeight"
    samples = models._samples(models.ours(packed, TINY[0], Effort(2, 2)), TINY[0], Effort(2, 2), CPU)
    assert min(samples) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--packed", "int4_g128", "--published"], "leave --published"),
        (["--packed", "int3"], "it is 'int3'"),
        (["--contender", "vllm"], "it is 'vllm'"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str) -> None:
    done = invoke(models.app, "--model", "tiny", "--dry-run", *words)
    assert done.exit_code == 2 and said in done.output


def test_a_failure_is_a_row(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Callable[[], object]:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr(models, "CONTENDERS", {"transformers": (fails, nullcontext)})
    (row,) = models.run("tiny", model, TINY[:1], Effort(2, 2), {})
    assert (row.status, row.reason) == ("failed", "CUDA out of memory")
    assert wall.table([row]).row_count == 1


def test_ligers_classes_leave_transformers_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's own patching is stood in for: its kernels need a GPU."""
    from transformers.models.qwen3 import modeling_qwen3

    def apply(twin: Any) -> None:
        monkeypatch.setattr(modeling_qwen3, "Qwen3MLP", object)
        twin.forward = None

    stand_in: Any = ModuleType("liger_kernel.transformers")
    stand_in.monkey_patch = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen3": apply}, _apply_liger_kernel_to_instance=apply
    )
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    whole = modeling_qwen3.Qwen3MLP
    with models.liger(model) as twin:
        assert modeling_qwen3.Qwen3MLP is object
        assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert modeling_qwen3.Qwen3MLP is whole and model.forward is not None
    monkeypatch.setattr(model.config, "model_type", "unheard-of")
    with pytest.raises(Absent, match="nothing for unheard-of"), models.liger(model):
        pass


def test_norms_and_mlps_alone_are_ours(model: Any) -> None:
    """Every norm and MLP, whose results stay; afterwards the model is as it was."""
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    with models.norms_and_mlps(model):
        own = [type(m).__name__ for m in model.modules() if "forward" in vars(m)]
        assert Counter(own) == {"Qwen3RMSNorm": 2 * 4 + 1, "Qwen3MLP": 2}, "queries and keys have norms here"
        calls: list[str] = []
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            real = models.cutekernels.silu_mul
            patch.setattr(models.cutekernels, "silu_mul", lambda *a: calls.append("silu_mul") or real(*a))
            assert torch.allclose(model(ids).logits, expected, atol=1e-4)
        assert calls == ["silu_mul"] * 2
    assert not any("forward" in vars(m) for m in model.modules())


def test_the_command_line() -> None:
    listed = invoke(models.app, "--model", "qwen2.5-7b", "--dry-run")
    assert listed.exit_code == 0 and len(listed.output.splitlines()) == len(CASES)
    some = ["--match", "decode batch=1 tokens=1024", "--match", "prefill"]
    assert len(invoke(models.app, "--model", "qwen2.5-7b", "--dry-run", *some).output.splitlines()) == 5
    published = invoke(models.app, "--model", "qwen2.5-7b", "--published", "--dry-run").output.splitlines()
    assert len(published) == 5 and all("cutekernels, norms and MLPs" in line for line in published)
    assert invoke(models.app, "--model", "qwen", "--dry-run").exit_code == 2
    assert invoke(models.app, "--model", "tiny", "--match", "none", "--dry-run").exit_code == 2
    if not torch.cuda.is_available():
        assert invoke(models.app, "--model", "tiny").exit_code == 1


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-7b", 7.616), ("llama-3-8b", 8.030), ("qwen3-8b", 8.191), ("qwen3-30b-a3b", 30.532)],
)
def test_the_models_have_their_sizes(name: str, billions: float) -> None:
    meta = models.build(name, torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in meta.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)
    assert name in CONFIGS
    assert len(read_weights(meta, 64).layers) == meta.config.num_hidden_layers, "the decoder takes it"


def test_new_lengths_have_rows_of_both_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_lengths, "LENGTHS", (3, 9, 20, 31))
    monkeypatch.setattr(new_lengths, "COLD", 2)
    monkeypatch.setattr(new_lengths, "FIRST", 12)
    warmed: list[Any] = []
    monkeypatch.setattr(new_lengths.cutekernels, "warmup", lambda model, tokens: warmed.append(tokens))
    cache = os.environ.get("CUTEKERNELS_CACHE")
    rows = [*new_lengths.run("tiny", model, {"gpu": "cpu"})]
    assert os.environ.get("CUTEKERNELS_CACHE") == cache and warmed == [(1, new_lengths.MOST)] * 2
    assert model.config._attn_implementation == "sdpa", "what was patched is as it was"
    for name, contender in new_lengths.CONTENDERS.items():
        own = {row.problem.partition("of=")[2]: row for row in rows if row.contender == name}
        assert len(own) == 9 and all(row.status == "ok" for row in own.values())
        us = {label: row.median_us or 0.0 for label, row in own.items()}
        assert 0 < us["median"] <= us["p90"] <= us["worst"] <= us["sum"] < 4 * us["worst"] + 1
        assert us["ready"] < us["ready and 12 tokens"]
        assert own["sum"].problem.startswith(f"lengths={2 if contender.cold else 4} ")
        assert own["sum"].reason == "0 compiled"
    listed = invoke(models.app, "--model", "tiny", "--suite", "new-lengths", "--dry-run")
    assert listed.output.startswith("tiny new-lengths 1 to 4096 tokens: cutekernels, cold; ")
    alone = invoke(models.app, "--model", "tiny", "--suite", "decode", "--dry-run").output.splitlines()
    assert len(alone) == 8
    for wrong in (["--suite", "lengths"], ["--suite", "new-lengths", "--match", "1"]):
        assert invoke(models.app, "--model", "tiny", "--dry-run", *wrong).exit_code == 2
