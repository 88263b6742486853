"""Patched models under ``tp_plan="auto"`` on two GPUs (NCCL), against one process in fp32.

Logits, gradients and tokens are no further off than those of plain transformers on the same two GPUs.

Three families share one run of two ranks, so that processes start and kernels compile once. ``pytest -s`` shows each
rank's phases as they begin; a phase that misses its deadline shows every thread's stack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import tiny
from tests.models.near_ties import check_greedy, routing_gap, widened

tensor_parallel = pytest.importorskip("tests.integrations.test_tensor_parallel")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]
FAMILIES = {"llama": 1.25, "qwen2": 1.25, "qwen3-moe": 2.0}  # errors beside transformers' own
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 2, "vocab_size": 132}
EXPERTS, TOP_K, TIE = 4, 2, 0.06  # a token so near another expert may be rounded to that one
DEADLINE_S = 420


def made(family: str) -> Any:
    model = tiny.model(family, torch.float32, **WIDE, **({"moe_intermediate_size": 128} if "moe" in family else {}))
    for name, parameter in model.named_parameters():  # hidden sizes of 64 have 0.15; scores of attention are near 1
        parameter.data.mul_(0.5).add_(name.endswith("norm.weight"))
    return model.to(torch.bfloat16)


def prepare(folder: Path) -> None:
    """A checkpoint, and what one process computes with its weights in fp32."""
    model = made(folder.name)
    model.save_pretrained(folder)
    exact, ids = widened(model), tiny.tokens(4, 50)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if "moe" in folder.name:
        tied = routing_gap(exact, {"input_ids": ids, "attention_mask": mask}, EXPERTS, TOP_K) < TIE
        assert float(tied.double().mean()) < 0.3
        labels = labels.masked_fill(tied, -100)
    made_of_all = exact(ids, attention_mask=mask, labels=labels)
    made_of_all.loss.backward()
    gradients = {name: p.grad for name, p in exact.named_parameters()}
    torch.save((ids, mask, labels, made_of_all.logits.detach(), gradients), folder / "exact.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with each rank's results, and what the run wrote."""
    root = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        prepare(root / family)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUTEKERNELS_DB", str(root / "tuned.db"))
        patched.setenv("CUTEKERNELS_CACHE", str(root / "cache"))
        process = tensor_parallel.start(*(word for family in FAMILIES for word in ("near", root / family)))
    text = tensor_parallel.run(process, DEADLINE_S)
    return root, text


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_no_further_from_fp32_than_transformers(family: str, results: tuple[Path, str]) -> None:
    folder, text = results[0] / family, results[1]
    assert (folder / "near1.json").exists() and (folder / "near0.json").exists(), text[-20000:]
    ranks = [tensor_parallel.read(folder, f"near{rank}") for rank in (0, 1)]
    for found in ranks:
        assert found["patched"]["attention"] == 2 and found["patched"]["linear"] == (9 if "moe" in family else 15)
        assert found["patched"].get("experts", 0) == 2 * ("moe" in family)
        for what, slack, most in (("logits", 1, 0.2), ("gradients", 1, 0.3), ("worst gradient", 2, 0.6)):
            assert 0 < found["ours"][what] <= slack * FAMILIES[family] * found["plain"][what] < most, f"{what}: {found}"
        assert found["ours"]["logits"] != found["plain"]["logits"], "nothing was patched"
        assert found["unpatched"]["logits"] == found["plain"]["logits"], "unpatch restores transformers' own way"
    assert ranks[0]["ours"]["tokens"] == ranks[1]["ours"]["tokens"], "a rank went its own way"
    model = made(family)
    exact = widened(model)
    ids, mask, *_ = torch.load(folder / "exact.pt")
    routing = (EXPERTS, TOP_K, TIE) if "moe" in family else None
    for prompt, seen, row in zip(ids, mask.bool(), ranks[0]["ours"]["tokens"], strict=True):
        check_greedy(model, exact, prompt[seen].tolist(), row, routing)
