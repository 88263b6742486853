"""A process of the tests of tensor parallelism: ``python -m tests.integrations.ranks TASK FOLDER ...``.

A phase that takes longer than its deadline writes every thread's stack and ends the process. The launcher then ends
the other ranks with SIGTERM, which write theirs.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cutekernels as ck
from tests.integrations.tiny import tokens

LEFT = torch.tensor([[0] * 7 + [1] * 13, [1] * 20])
PHASE_S = 120  # the longest compiles every kernel of a family's backward
NEW_TOKENS = 16


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Says when a phase of this rank begins and ends, with the work that it left to the GPU."""
    begin = time.monotonic()
    rank = os.environ.get("RANK", "-")
    print(f"{time.strftime('%H:%M:%S')} rank {rank} {name}: begins", flush=True)
    faulthandler.dump_traceback_later(PHASE_S, exit=True)
    try:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"{time.strftime('%H:%M:%S')} rank {rank} {name}: took {time.monotonic() - begin:.1f} s", flush=True)


def loaded(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model in shards, one for each process of a run; whole in a process by itself."""
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.logging.set_verbosity_error()  # type: ignore[attr-defined]
    plan = {"distributed_config": DistributedConfig(tp_plan="auto")} if "RANK" in os.environ else {}
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
            found[name] = gradient(p).clone()
    return found


def gradient(p: Any) -> Tensor:
    """This rank's part, laid out as ``p`` is."""
    grad = p.grad
    if not hasattr(p, "placements"):
        return grad  # type: ignore[no-any-return]
    if grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return grad.to_local()  # type: ignore[no-any-return]


def share(whole: Tensor, p: Any) -> Tensor:
    """A rank's part of ``whole``, laid out as ``p`` is. torch 2.11 gathers no strided shard, so parts are compared."""
    for placement in getattr(p, "placements", ()):
        axis = getattr(placement, "dim", None)  # None: replicated
        if axis is not None:
            strips = whole.chunk(getattr(placement, "split_factor", 1), axis)
            rank, size = p.device_mesh.get_local_rank(), p.device_mesh.size()
            whole = torch.cat([strip.chunk(size, axis)[rank] for strip in strips], axis)
    return whole


def compare(folder: str) -> dict[str, Any]:
    """Largest differences from one process's results, of the largest result; and what was patched."""
    expected = torch.load(Path(folder, "results.pt"))
    model = loaded(folder)
    parameters = dict(model.named_parameters())
    expected = {name: share(t, parameters[name]) if name in parameters else t for name, t in expected.items()}
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
    """How far logits and gradients in bf16 are from those of one process in fp32, and the tokens; plain and patched."""
    family, found = Path(folder).name, {}
    with phase(f"{family}: load"):
        model = loaded(folder, torch.bfloat16)
        ids, mask, labels, logits, gradients = torch.load(Path(folder, "exact.pt"), map_location=model.device)
    for kind in ("plain", "ours"):
        if kind == "ours":
            with phase(f"{family}: patch"):
                report = ck.patch(model)
        with phase(f"{family}, {kind}: forward"), torch.no_grad():
            told = labels >= 0  # tokens that are neither padding nor so near another expert that either is right
            made = model(ids, attention_mask=mask).logits[told].float()
            found[kind] = {"logits": float((made - logits[told]).norm() / logits[told].norm())}
        with phase(f"{family}, {kind}: backward"):
            model.train().zero_grad()
            model(ids, attention_mask=mask, labels=labels).loss.backward()
            sizes, errors = {}, {}
            for name, p in model.eval().named_parameters():
                expected = share(gradients[name], p)
                sizes[name], errors[name] = float(expected.norm()), float((gradient(p).float() - expected).norm())
            size = math.hypot(*sizes.values())
            found[kind]["gradients"] = math.hypot(*errors.values()) / size
            # A parameter's own, but for those whose gradient is next to nothing (biases of keys).
            found[kind]["worst gradient"] = max(e / max(sizes[name], 0.02 * size) for name, e in errors.items())
        with phase(f"{family}, {kind}: generate"), torch.no_grad():
            options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
            found[kind]["tokens"] = model.generate(ids, **options)[:, ids.shape[1] :].tolist()
    with phase(f"{family}: unpatch"), torch.no_grad():
        ck.unpatch(model)
        after = model(ids, attention_mask=mask).logits[told].float()
        found["unpatched"] = {"logits": float((after - logits[told]).norm() / logits[told].norm())}
    print({kind: {k: v for k, v in of_kind.items() if k != "tokens"} for kind, of_kind in found.items()}, flush=True)
    return found | {"patched": report.patched}


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
    faulthandler.register(signal.SIGTERM, chain=True)
    tasks = {"compare": compare, "near": near, "memory": memory, "killed": killed}
    for task, folder in zip(given[::2], given[1::2], strict=True):
        Path(folder, f"{task}{os.environ.get('RANK', '')}.json").write_text(json.dumps(tasks[task](folder)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
