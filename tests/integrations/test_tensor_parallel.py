"""A model under ``tp_plan="auto"`` in two gloo processes on the CPU: patched, it computes what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import modules
from tests.integrations import tiny
from tests.integrations.ranks import results
from tests.models.test_decoder import decoder

theirs = pytest.importorskip("transformers.distributed.tensor_parallel")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ROOT = Path(__file__).parents[2]


def start(*tasks: str | Path, ranks: int = 2) -> subprocess.Popen[str]:
    """Processes with tasks and their folders; one is no distributed run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "tests.integrations.ranks", *map(str, tasks)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)


def run(process: subprocess.Popen[str], deadline_s: float = 300) -> str:
    """Output of a run, behind its end; printed as it comes. One that is not done by its deadline is ended."""
    stream, lines = process.stdout, []
    assert stream is not None

    def show() -> None:
        with stream:
            for line in stream:
                lines.append(line)
                print(line, end="", flush=True)

    shower = threading.Thread(target=show)
    shower.start()
    late = False
    for end, seconds in ((process.terminate, deadline_s), (process.kill, 40), (process.kill, None)):
        try:
            process.wait(seconds)
            break
        except subprocess.TimeoutExpired:
            late = True
            end()  # the launcher ends its ranks, which have sessions of their own, and kills them 30 s later
    shower.join()
    text = "".join(lines)
    assert not late, f"no end after {deadline_s:g} s:\n{text[-20000:]}"
    return text


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_results_are_those_of_one_process_for_half_its_memory_and_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """Dense and sparse; biases, norms of heads, joined projections, and a vocabulary that two do not divide.

    transformers 5.17 refuses such a vocabulary. The last task is cut short by one of its processes' end.
    """
    vocabulary = 131 if hasattr(theirs.TensorParallelLayer, "_from_local_last_dim_shard") else 132
    families = {"qwen2": {"linear": 15, "mlp": 2}, "qwen3-moe": {"linear": 9, "experts": 2}, "phi3": {"linear": 9}}
    folders = [tmp_path / family for family in families]
    for folder in folders:
        model = tiny.model(folder.name, vocab_size=vocabulary)
        model.save_pretrained(folder)
        torch.save(results(model), folder / "results.pt")
    big = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "head_dim": 128,
        "vocab_size": vocabulary,
    }
    large = tiny.model("llama", torch.bfloat16, **big)  # and read as fp32: nothing stays mapped
    large.save_pretrained(tmp_path)
    first = "compare", folders[0]  # code and buffers are there when memory is measured
    alone = start(*first, "memory", tmp_path, ranks=1)
    compares = (task for folder in folders for task in ("compare", folder))
    both = start(*compares, "memory", tmp_path, "killed", folders[0])
    text, ended = run(both), time.time()
    assert (folders[0] / "killed").exists(), text[-3000:]
    assert both.returncode and ended - (folders[0] / "killed").stat().st_mtime < 30
    assert sum("exitcode: -9) local_rank: 1" in line for line in text.splitlines()) == 1
    text = run(alone)
    assert alone.returncode == 0, text[-3000:]
    for folder in folders:
        for found in (read(folder, "compare0"), read(folder, "compare1")):
            assert found["apart"] <= 64 * 2.0**-23, f"{folder.name}: {found}"
            assert found["patched"].items() >= families[folder.name].items()
            assert found["patched"]["attention"] == 2 and found["patched"]["norm"] == (9 if "moe" in folder.name else 5)
            assert {why for _, why in found["left"]} <= {
                "its projections are sharded as DTensors, each a product of its own"
            }
    weights, whole = 4 * sum(p.numel() for p in large.parameters()), read(tmp_path, "memory")["peak"]
    assert whole >= weights
    for rank in (0, 1):
        assert weights / 2 <= read(tmp_path, f"memory{rank}")["peak"] <= 0.55 * whole


def plan(module: Any) -> None:
    """A forward around the module's own, as transformers puts it there."""
    original_forward = module.forward

    def tp_forward(*args: Any) -> Any:
        return original_forward(*args) * 2

    tp_forward.__module__ = "transformers.distributed.tensor_parallel"
    module.forward = tp_forward


def test_a_planned_forward_stays_around_the_patched_one() -> None:
    model, ids = tiny.model("llama"), tiny.tokens()
    projection = model.model.layers[0].mlp.down_proj
    plan(projection)
    own, expected = projection.forward, model(ids).logits
    with ck.patch(model) as report:
        assert report.patched["linear"] == 15 and projection.forward is own
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert isinstance(own.__closure__[0].cell_contents.__self__, modules.Linear)
        assert own.__closure__[0].cell_contents.__func__ is modules.Linear.forward
    assert torch.equal(model(ids).logits, expected)
    for verb, rule in (
        (decoder, "load the model without tp_plan, or"),
        (lambda m: ck.compare(m, ids), "to compare it"),
    ):
        with pytest.raises(UnsupportedProblem, match=rule):
            verb(model)


def test_plans_are_told_from_other_forwards() -> None:
    """A forward of someone else's stays, and its module is left."""
    model = tiny.model("llama")
    projection = model.model.layers[0].self_attn.q_proj
    inner = projection.forward
    projection.forward = lambda x: inner(x)
    with ck.patch(model) as report:
        assert any(path.endswith("q_proj") and "forward has been replaced" in why for path, why in report.left)
