"""Behind ``warmup`` no call compiles or chooses, at whatever number of tokens, and results are those of before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels import compile as compiler
from cutekernels import dispatch
from cutekernels.models import Decoder
from tests.integrations import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::FutureWarning")]
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 1031}


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTEKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_loaded", {})
    dispatch.reload()


def refuse(*args: Any) -> None:
    raise AssertionError(f"a call chose or compiled: {args[:2]}")


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "decoder"])
def test_no_call_compiles(patched: bool, cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("qwen3", torch.bfloat16, **WIDE).to("cuda")
    draw = random.Random(1)
    prompts = [[draw.randrange(2, 1031) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 47, 64)]
    if patched:
        ck.patch(model)
        done = ck.warmup(model, tokens=(1, 64), progress=False)
    else:
        engine = Decoder.from_transformers(model, max_batch=2, max_tokens=80, page_size=16)
        done = ck.warmup(engine, tokens=(1, 64), progress=False)
    assert done.compiled == done.kernels > 10
    monkeypatch.setattr(compiler, "_build", refuse)
    monkeypatch.setattr(dispatch, "resolve", refuse)
    if not patched:
        assert engine.generate(prompts, max_new_tokens=4, stop=()).tokens
        return
    with torch.no_grad():
        for prompt in prompts:
            kept = model(torch.tensor([prompt], device="cuda")).past_key_values
            assert model(torch.tensor([[5]], device="cuda"), past_key_values=kept).logits.isfinite().all()


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "decoder"])
def test_the_first_call_compiles_one_kernel_itself(patched: bool, cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are compiled beside it, by other processes: what was recorded is what the call needs."""
    model = tiny.model("qwen3", torch.bfloat16, **WIDE).to("cuda")
    ids = torch.randint(2, 1031, (1, 33), device="cuda")
    expected = model(ids).logits
    own, build = [], compiler._build
    monkeypatch.setattr(compiler, "_build", lambda *args: own.append(args[:2]) or build(*args))
    if patched:
        ck.patch(model)
        with torch.no_grad():
            kept = model(ids, logits_to_keep=1)
            model(ids[:, :1], past_key_values=kept.past_key_values)
        torch.testing.assert_close(kept.logits[:, -1], expected[:, -1], rtol=0.05, atol=0.05)
    else:
        engine = Decoder.from_transformers(model, max_batch=2, max_tokens=80, page_size=16)
        assert len(engine.generate([ids[0], ids[0, :7]], max_new_tokens=3, stop=()).tokens) == 2
    assert len(own) == 1, own
