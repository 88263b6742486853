"""What each process of ``test_tensor_parallel.py`` runs: ``python -m tests.integrations.ranks TASK FOLDER ...``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import cutekernels as ck
from tests.integrations.tiny import tokens

LEFT = torch.tensor([[0] * 7 + [1] * 13, [1] * 20])


def loaded(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model in shards, one for each process of a run; whole in a process by itself."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[attr-defined]
    plan: dict[str, Any] = {"tp_plan": "auto"} if "RANK" in os.environ else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plan).eval()


def results(model: Any) -> dict[str, Any]:
    """Logits, with and without padding; tokens; the loss and gradients that it sends back."""
    ids = tokens()
    with torch.no_grad():
        found = {"plain": model(ids).logits, "padded": model(ids, attention_mask=LEFT).logits[LEFT.bool()]}
        found["tokens"] = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=LEFT).float()
    model.train().zero_grad()
    model(ids, labels=ids).loss.backward()
    for name, p in model.eval().named_parameters():
        if p.grad is not None:
            found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
    return found


def compare(folder: str) -> dict[str, Any]:
    """Largest differences from one process's results, of the largest result; and what was patched."""
    expected = torch.load(Path(folder, "results.pt"))
    model = loaded(folder)
    before = results(model)
    report = ck.patch(model)
    ours = results(model)
    ck.unpatch(model)
    after = results(model)
    assert all(torch.equal(after[name], before[name]) for name in before), "unpatch restores transformers' own way"
    apart = {name: float((ours[name] - t).abs().max() / t.abs().max().clamp_min(1e-3)) for name, t in expected.items()}
    assert ours.keys() == expected.keys()
    return {"apart": max(apart.values()), "patched": report.patched, "left": report.left}


def near(folder: str) -> dict[str, Any]:
    """How far bf16 logits are from those of one process in fp32, plain and patched."""
    model = loaded(folder, torch.bfloat16)
    expected = torch.load(Path(folder, "logits.pt")).to(model.device)
    ids = tokens(4, 50).to(model.device)
    with torch.no_grad():
        plain = model(ids).logits.float()
        report = ck.patch(model)
        ours = model(ids).logits.float()
    errors = {name: float((t - expected).norm() / expected.norm()) for name, t in (("plain", plain), ("ours", ours))}
    return errors | {"patched": report.patched}


def memory(folder: str) -> dict[str, Any]:
    """Bytes that loading, patching and calling a model add to this process at their peak, but for mapped files.

    Behind another task, so that code, buffers and connections are there already.
    """

    def now() -> int:
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon"))

    ids, done, peak = tokens(1, 8), threading.Event(), [0]
    before = now()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], now())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with torch.no_grad():
        model = loaded(folder)
        ck.patch(model)
        model(ids)
    done.set()
    watcher.join()
    return {"peak": peak[0] - before}


def killed(folder: str) -> dict[str, Any]:
    """One process ends in the middle of the run; the others wait for it."""
    model = loaded(folder)
    ck.patch(model)
    with torch.no_grad():
        for step in range(1000):
            model(tokens())
            if step == 3 and torch.distributed.get_rank() == 1:
                Path(folder, "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
    return {}


def main(*given: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tasks = {"compare": compare, "near": near, "memory": memory, "killed": killed}
    for task, folder in zip(given[::2], given[1::2], strict=True):
        Path(folder, f"{task}{os.environ.get('RANK', '')}.json").write_text(json.dumps(tasks[task](folder)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
