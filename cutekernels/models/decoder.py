"""``Decoder``: a language model that generates tokens over this library's ops alone, many requests at a time.

A step is one token of every running request. On a GPU it is one captured graph for each size of the batch, whose
inputs (tokens, lengths, page table, sampling) are read on the device: requests come and go between steps and nothing is
captured again. The host reads tokens back one step late, so it never waits for the step that it has just started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels.ahead import compile_first, structure
from cutekernels.kv_cache import KVCache
from cutekernels.lengths import Line, Posed, alone, lines
from cutekernels.models import arguments
from cutekernels.models.accepted import check_model
from cutekernels.models.fair_lock import FairLock
from cutekernels.models.loading import load
from cutekernels.models.requests import Request, Requests
from cutekernels.models.sampling import SEEDS, Choices, Sampling
from cutekernels.models.source import Source
from cutekernels.models.weights import Attention
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.shared.calls import Recorder
from cutekernels.ops.shared.checks import check_flag


@dataclass(frozen=True)
class Generated:
    """Results of :meth:`Decoder.generate`, in the order of the prompts.

    Attributes:
        tokens: of each request, without the prompt.
        texts: the same, decoded, where the decoder has a tokenizer.
        seconds: of the whole call.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


@dataclass
class _Launched:
    """Tokens on their way to the host, and the requests that they belong to."""

    tokens: Tensor
    ready: torch.cuda.Event | None
    requests: list[Request]


class Decoder:
    """Generates tokens for up to ``max_batch`` requests at a time; make one with
    :meth:`from_transformers` or :meth:`from_pretrained`.

    ::

        decoder = Decoder.from_transformers(model, max_batch=16, max_tokens=4096)
        print(decoder.generate([[1, 2, 3], [4, 5]], max_new_tokens=64).tokens)

    or request by request, with ``add``, ``step`` until ``idle``, and ``result``.

    Threads may share a decoder. ``step``, ``cancel`` and a whole ``generate`` run one at a time, in the order of their
    calls; all else waits for none of them, so that other threads may ``add`` to the requests of a loop of steps.

    Weights stay the model's: an optimizer's step counts at once, and where the memory of a parameter has moved or
    another one has taken its place, the next step reads all of them anew (and captures its graphs again), or refuses
    with what is in the way.
    """

    @torch.inference_mode(False)  # or its state could not be changed outside of it
    def __init__(
        self,
        source: Source,
        *,
        max_batch: int,
        max_tokens: int,
        page_size: int,
        pages: int,
        chunk: int,
        kv_cache: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        w = self._w = source.weights
        self._sizes: dict[str, Any] = {
            "max_batch": max_batch, "max_tokens": max_tokens, "page_size": page_size, "pages": pages, "chunk": chunk,
            "kv_cache": kv_cache,
        }  # fmt: skip
        self._source, self._alone = source, FairLock()
        device, dtype = w.embedding.weight.device, w.embedding.weight.dtype
        self._max_batch, self._chunk, self._tokenizer = max_batch, chunk, tokenizer
        self._caches = KVCache.layers(
            len(w.layers), max_batch, max_tokens, w.heads_kv, w.head_dim, page_size=page_size, pages=pages,
            dtype=dtype if kv_cache is None else "fp8", device=device,
        )  # fmt: skip
        self._parts: dict[tuple[int, int], list[KVCache]] = {}
        self._requests = Requests(self._caches[0], max_tokens, len(w.embedding.weight))
        self._choices = Choices(max_batch, w.head.weight.shape[0], device)
        self._tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)  # each slot's last one
        self._counts = torch.zeros(max_batch, dtype=torch.int32, device=device)  # 1 where a step appends a token
        self._counted: set[int] = set()  # the slots where it is 1
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # memory of all graphs: one runs at a time, and leaves nothing in it
        self._launched: list[_Launched] = []
        self._cold = device.type == "cuda"  # kernels of the first requests may have to be compiled

    @classmethod
    def from_transformers(
        cls,
        model: torch.nn.Module,
        *,
        max_batch: int = 8,
        max_tokens: int = 4096,
        page_size: int = 64,
        pages: int | None = None,
        chunk: int = 2048,
        kv_cache: Literal["fp8"] | None = None,
        tokenizer: Any = None,
    ) -> Decoder:
        """A decoder over the weights of a transformers model (or of :func:`load`'s), in the model's own memory.

        The model stays usable. Projections that share an input are moved side by side, as :func:`cutekernels.patch`
        moves them: once, and again after something else has moved them apart.

        Args:
            model: Llama, Mistral, Mixtral, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, Phi-3, Phi-4, Granite, OLMo2,
                SmolLM3, Starcoder2, GLM4, GLM-4.5 to 4.7, Cohere2, Gemma 2, Gemma 3 (text) or Gemma 4 (without
                heads of 512) for causal language modelling, or the last or Qwen3-VL with its towers, for prompts of
                text; on one device, fp16 or bf16 on a GPU.
            max_batch: requests that run at a time; more wait.
            max_tokens: of a request, its prompt included.
            page_size: tokens in a page of the cache: 16, 32, 64, 128 or 256.
            pages: of the cache in each layer; by default enough for ``max_batch`` requests of ``max_tokens``.
            chunk: tokens of a prompt that are computed at a time.
            kv_cache: "fp8" for keys and values in float8_e4m3fn, with a scale of each token and head
                (:class:`cutekernels.KVCache` says what it costs); None for the model's type.
            tokenizer: to take prompts as text and give texts back; its ``eos_token_id`` ends a request too.

        Raises:
            UnsupportedProblem: a model that is not of these families, is patched, has hooks or options that no op has
                (its documentation lists them), fp32 on a GPU, or on the meta device; sizes that are out of range or
                more than the device has memory for; a tokenizer that is none; a cache of another type, or in FP8 for a
                head_dim that is no multiple of 16.
        """
        pages = arguments.check_sizes(
            max_batch=max_batch, max_tokens=max_tokens, page_size=page_size, pages=pages, chunk=chunk
        )
        arguments.check_tokenizer(tokenizer)
        arguments.check_kv_cache(kv_cache)
        check_model(model)
        arguments.check_memory(
            model, max_batch=max_batch, max_tokens=max_tokens, page_size=page_size, pages=pages, kv_cache=kv_cache
        )
        source = Source(model, max_tokens)
        return cls(
            source, max_batch=max_batch, max_tokens=max_tokens, page_size=page_size, pages=pages, chunk=chunk,
            kv_cache=kv_cache, tokenizer=tokenizer,
        )  # fmt: skip

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        progress: bool = True,
        max_batch: int = 8,
        max_tokens: int = 4096,
        page_size: int = 64,
        pages: int | None = None,
        chunk: int = 2048,
        kv_cache: Literal["fp8"] | None = None,
        tokenizer: Any = None,
    ) -> Decoder:
        """A decoder over the weights of a checkpoint, without transformers: :func:`load`, then as from its model.

        Args:
            path, device, dtype, progress: of :func:`load`. All others: of :meth:`from_transformers`.

        Raises:
            UnsupportedProblem: what either refuses; sizes out of range before anything is read.
        """
        sizes = {"max_batch": max_batch, "max_tokens": max_tokens, "page_size": page_size, "chunk": chunk}
        arguments.check_sizes(pages=pages, **sizes)
        arguments.check_tokenizer(tokenizer)
        arguments.check_kv_cache(kv_cache)
        model = load(path, device=device, dtype=dtype, progress=progress)
        return cls.from_transformers(model, pages=pages, kv_cache=kv_cache, tokenizer=tokenizer, **sizes)

    # ---- requests

    def add(
        self,
        prompt: str | Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[int] | Set[int] | None = None,
    ) -> int:
        """Queue a request; it starts in the next :meth:`step` that has room for it. Waits for no step.

        Args:
            prompt: token ids, in a list or in a tensor or array ``(S,)`` or ``(1, S)``; or text where the decoder has
                a tokenizer.
            max_new_tokens: at most; room for the prompt and all of them is reserved when it starts.
            sampling: how tokens are chosen; greedy by default.
            stop: token ids behind which the request ends; the token itself is part of the result. None: those of the
                model's ``generation_config.eos_token_id``, as ``generate`` of transformers takes them, and the
                tokenizer's. ``()``: none.

        Returns:
            The request's number, for :meth:`result` and :meth:`cancel`.

        Raises:
            UnsupportedProblem: an empty prompt, an unknown token, more tokens than the cache can ever hold, or an
                argument of another kind.
        """
        ids = arguments.ids_of(prompt, self._tokenizer)
        return self._requests.add(ids, max_new_tokens, arguments.chosen_sampling(sampling), self._stop(stop)).number

    def step(self) -> None:
        """Start waiting requests, start one token of each running one, and take in the tokens of the step before.

        Where an exception leaves it (an interrupt, say), requests that are not finished start anew in the next step.

        Raises:
            UnsupportedProblem: the model has been changed into one that the decoder cannot read, or of another dtype,
                device or shape.
        """
        with self._alone:
            try:
                with torch.autocast(self._tokens.device.type, enabled=False):  # weights, caches, graphs have one type
                    self._follow()
                    self._step()
            except BaseException:  # what the caches hold is unknown: one layer may be a token ahead of the next
                self._launched.clear()
                self._counts.zero_()
                self._counted = set()
                self._requests.restart()
                raise

    def _step(self) -> None:
        if self._cold and (waiting := self._requests.waiting):
            self._compile_first(waiting)
            self._cold = False
        for request in self._requests.admitted():
            self._begin(request)
        running = self._requests.running()
        if running:
            self._advance(running)
        while len(self._launched) > bool(running):
            self._collect(self._launched.pop(0))

    @property
    def idle(self) -> bool:
        """Whether every request is finished."""
        return not self._launched and self._requests.all_finished

    @property
    def finished(self) -> list[int]:
        """Numbers of the finished requests whose results have not been taken."""
        return self._requests.finished

    def result(self, number: int) -> list[int]:
        """The tokens of a finished request, which is then forgotten. Raises KeyError where there is none."""
        return self._requests.take(number)

    def tokens_of(self, number: int) -> list[int]:
        """The tokens known so far of a request that has not been taken. Raises KeyError where there is none."""
        return self._requests.tokens_of(number)

    def cancel(self, number: int) -> list[int]:
        """End a request, waiting, running or finished, and forget it; others can have its place and pages.

        Returns:
            Its tokens known so far.

        Raises:
            KeyError: no request has this number, or its result has been taken.
            UnsupportedProblem: ``number`` is no whole number.
        """
        with self._alone:
            tokens = self._requests.cancel(number)
            self._drop_finished()
            return tokens

    def _drop_finished(self) -> None:
        """Tokens on their way to the host that no request waits for."""
        self._launched = [step for step in self._launched if not all(r.done for r in step.requests)]

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[int] | Set[int] | None = None,
        progress: bool = False,
    ) -> Generated:
        """Tokens for every prompt; arguments as of :meth:`add`. ``progress`` shows a bar with tokens a second.

        ``prompts`` are in a list, or the rows of a tensor or array. With a seed, request ``i`` draws with ``seed + i``.
        An exception (an interrupt, say) cancels the requests of this call. Requests of others run on beside it, and
        are left where they are when it returns.
        """
        begin = time.perf_counter()
        check_flag("generate", "progress", progress)
        chosen = arguments.chosen_sampling(sampling)
        stop = self._stop(stop)
        numbers: list[int] = []
        with self._alone:
            try:
                for i, prompt in enumerate(arguments.listed_prompts(prompts)):
                    own = replace(chosen, seed=(chosen.seed + i) % SEEDS)
                    numbers.append(self.add(prompt, max_new_tokens=max_new_tokens, sampling=own, stop=stop))
                for _ in self._show(numbers, max_new_tokens) if progress else self._until_done(numbers):
                    self.step()
            except BaseException:
                for number in numbers:
                    self.cancel(number)
                raise
            self._drop_finished()
            tokens = [self.result(number) for number in numbers]
        texts = None if self._tokenizer is None else self._tokenizer.batch_decode(tokens)
        return Generated(tokens, texts, time.perf_counter() - begin)

    def _until_done(self, numbers: list[int]) -> Iterator[None]:
        while not self._requests.all_done(numbers):
            yield

    def _show(self, numbers: list[int], most: int) -> Iterator[None]:
        """A step at a time, under a progress bar."""
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        rate = TextColumn("{task.fields[rate]:.0f} tokens/s")
        with Progress(TextColumn("generate"), BarColumn(), TaskProgressColumn(), rate, transient=True) as bar:
            task = bar.add_task("", total=len(numbers) * most, rate=0.0)
            begin = time.perf_counter()
            for _ in self._until_done(numbers):
                yield
                done = sum(len(self.tokens_of(n)) for n in numbers)
                bar.update(task, completed=done, rate=done / (time.perf_counter() - begin))

    def _stop(self, stop: Sequence[int] | Set[int] | None) -> frozenset[int]:
        """The tokens that end a request."""
        vocabulary = self._requests.vocabulary
        if stop is None:
            return arguments.end_tokens(self._source.model, self._tokenizer, vocabulary)
        return arguments.stop_tokens(stop, vocabulary)

    # ---- kernels ahead of calls

    @property
    def device(self) -> torch.device:
        """The device that computes it."""
        return self._tokens.device

    @property
    def max_tokens(self) -> int:
        """Tokens of a request at most, its prompt included."""
        return int(self._sizes["max_tokens"])

    def lines(self, low: int, high: int) -> list[Line]:
        """Problems of prompts of ``low`` to ``high`` tokens, and of steps of every batch."""
        recorder = Recorder()
        twin = self._twin(recorder)
        steps = twin._posed_by_steps(recorder, self._max_batch, (True, False))
        prompts = lines(lambda tokens: twin._posed_by_prompt(recorder, tokens), low, min(high, self._chunk))
        return [*prompts, *alone(steps)]

    def _twin(self, recorder: Recorder) -> Decoder:
        """A decoder for fakes: the same weights, one layer of each kind and the last, caches of its own."""
        w = self._w
        kinds = {structure(layer): layer for layer in reversed(w.layers[:-1])}
        with recorder.calls():
            twin = Decoder(self._source, **self._sizes)
        twin._w = replace(w, layers=(*reversed(kinds.values()), w.layers[-1]))
        twin._caches = twin._caches[-len(twin._w.layers) :]
        return twin

    def _posed_by_prompt(self, recorder: Recorder, tokens: int) -> list[Posed]:
        """Problems of a prompt's chunk, and of the token behind it."""
        with recorder.calls() as noted:
            ids = torch.zeros(tokens, dtype=torch.int64, device=self.device)
            self._choose(self._prefill(ids, slice(0, 1))[:, -1], slice(0, 1), True)
        return noted

    def _posed_by_steps(self, recorder: Recorder, most: int, ways: Iterable[bool]) -> list[Posed]:
        """Problems of steps of every batch of up to ``most``, greedy or not."""
        with recorder.calls() as noted:
            for batch in sorted({*(1 << i for i in range(most.bit_length())), most}):
                for greedy in ways:
                    self._decode(batch, greedy)
        return noted

    def _compile_first(self, waiting: Sequence[Request]) -> None:
        """The kernels that the first requests need, side by side."""
        lengths = {len(request.prompt) for request in waiting}
        chunks = sorted({size for n in lengths for size in (min(n, self._chunk), n % self._chunk or self._chunk)})
        most = min(1 << (len(waiting) - 1).bit_length(), self._max_batch)
        ways = sorted({request.sampling.greedy for request in waiting})

        def record() -> list[Posed]:
            recorder = Recorder()
            twin = self._twin(recorder)
            noted = [pair for size in chunks for pair in twin._posed_by_prompt(recorder, size)]
            return noted + twin._posed_by_steps(recorder, most, ways)

        compile_first(self, (chunks, most, ways), record, self.device)

    def identity(self) -> object:
        """All that decides the problems of its calls: sizes, and the kinds of layers, not how many there are."""
        w = self._w
        return self._sizes, structure(replace(w, layers=())), list(dict.fromkeys(map(structure, w.layers)))

    # ---- steps

    def _follow(self) -> None:
        """Read the weights anew where the model's have moved or been replaced; captured steps know old addresses."""
        if not self._source.moved():
            return
        if self._tokens.is_cuda:
            torch.cuda.synchronize(self._tokens.device)  # a captured step may still run
        self._graphs.clear()
        self._pool = None
        self._source.refresh()
        self._w = self._source.weights

    def _begin(self, request: Request) -> None:
        """The prompt of a request, chunk by chunk, and its first token."""
        slot = slice(request.slot, request.slot + 1)
        self._choices.put(request.slot, request.sampling)
        ids = torch.tensor(request.prompt, device=self._tokens.device)
        for begin in range(0, len(ids), self._chunk):
            hidden = self._prefill(ids[begin : begin + self._chunk], slot)
        self._choose(hidden[:, -1], slot, request.sampling.greedy)
        self._launch([request], slot)

    def _advance(self, running: list[Request]) -> None:
        """One token of every running request."""
        highest = max(request.slot for request in running) + 1
        batch = min(self._max_batch, 1 << (highest - 1).bit_length())
        greedy = all(request.sampling.greedy for request in running)
        slots = {request.slot for request in running}
        for slot in slots ^ self._counted:
            self._counts[slot : slot + 1].fill_(int(slot in slots))
        self._counted = slots
        if self._tokens.is_cuda:
            self._graph(batch, greedy).replay()
        else:
            self._decode(batch, greedy)
        self._launch(running, slice(0, batch))

    def _launch(self, requests: list[Request], slots: slice) -> None:
        """Start the copy of the tokens in ``slots`` to the host."""
        source = self._tokens[slots]
        tokens = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
        tokens.copy_(source, non_blocking=True)
        ready = None
        if source.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        for request in requests:
            request.launched += 1
        self._launched.append(_Launched(tokens, ready, requests))

    def _collect(self, launched: _Launched) -> None:
        """Hand tokens to their requests, and end those that are done."""
        if launched.ready is not None:
            launched.ready.synchronize()
        tokens = launched.tokens.tolist()
        for request in launched.requests:
            self._requests.receive(request, tokens[request.slot if len(tokens) > 1 else 0])

    def _graph(self, batch: int, greedy: bool) -> torch.cuda.CUDAGraph:
        """The captured step of the first ``batch`` slots; running requests are not touched by the capture."""
        found = self._graphs.get((batch, greedy))
        if found is None:
            state = (self._counts, self._tokens, self._choices.seen)
            kept = [t.clone() for t in state]
            self._counts.zero_()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.inference_mode():
                self._decode(batch, greedy)  # compiles kernels; appends nothing, since nobody counts
                found = torch.cuda.CUDAGraph()
                # Capture concerns this thread alone: another one may read a prompt from the device meanwhile.
                with torch.cuda.graph(found, pool=self._pool, capture_error_mode="thread_local"):
                    self._decode(batch, greedy)
            for t, before in zip(state, kept, strict=True):
                t.copy_(before)
            self._graphs[batch, greedy] = found
        return found

    @torch.inference_mode()
    def _decode(self, batch: int, greedy: bool) -> None:
        """One token of each of the first ``batch`` slots, from ``_tokens`` to ``_tokens``."""
        hidden = self._layers(self._w.embedding(self._tokens[:batch, None]), slice(0, batch), False)
        self._choose(hidden[:, 0], slice(0, batch), greedy)

    @torch.inference_mode()
    def _prefill(self, ids: Tensor, slot: slice) -> Tensor:
        """``(1, 1, H)`` of the last token of a prompt's chunk, which goes behind the slot's tokens so far."""
        return self._layers(self._w.embedding(ids[None]), slot, True)

    @torch.inference_mode()
    def _choose(self, hidden: Tensor, slots: slice, greedy: bool) -> None:
        logits, positions = self._w.logits(hidden), self._caches[-1].lengths[slots]
        self._choices.take(logits, positions, slots, greedy, out=self._tokens[slots])

    def _layers(self, x: Tensor, slots: slice, prompt: bool) -> Tensor:
        """All layers and the last norm: of a ``prompt``'s chunk, whose last token is left, or of a token a slot."""
        layers = self._w.layers
        residual, x = x, layers[0].attention_norm(x)
        norms = [layer.attention_norm for layer in layers[1:]] + [self._w.norm]
        for layer, cache, norm in zip(layers, self._of(slots), norms, strict=True):
            out = self._attend(layer.attention, x, cache, slots, prompt)
            if prompt and norm is self._w.norm:  # nobody reads what follows for the other tokens
                out, residual, x = out[:, -1:], residual[:, -1:], x[:, -1:]
            if layer.parallel:
                x, residual = norm.add(out + layer.mlp(x), residual)
                continue
            if layer.attention_out_norm is not None:
                out = layer.attention_out_norm(out)
            if layer.multiplier is not None:
                out = out * layer.multiplier
            x, residual = layer.mlp_norm.add(out, residual)
            out = layer.mlp(x)
            if layer.mlp_out_norm is not None:
                out = layer.mlp_out_norm(out)
            if layer.multiplier is not None:
                out = out * layer.multiplier
            if layer.scalar is None:
                x, residual = norm.add(out, residual)
            else:
                residual = (residual + out).mul_(layer.scalar)
                x = norm(residual)
        return x

    def _of(self, slots: slice) -> list[KVCache]:
        """Each layer's cache of the sequences in ``slots``; views, so made once."""
        key = slots.start, slots.stop
        if key not in self._parts:
            self._parts[key] = [cache[slots] for cache in self._caches]
        return self._parts[key]

    def _attend(self, a: Attention, x: Tensor, cache: KVCache, slots: slice, prompt: bool) -> Tensor:
        w = self._w
        heads = (w.heads_q, w.heads_kv, *(() if a.keys_alone else (w.heads_kv,)))
        parts = list(a.qkv(x).split([n * w.head_dim for n in heads], dim=-1))
        if a.whole_norms and a.q_norm is not None and a.k_norm is not None:
            parts[:2] = a.q_norm(parts[0]), a.k_norm(parts[1])
        q, k, *values = (part.unflatten(-1, (n, w.head_dim)) for part, n in zip(parts, heads, strict=True))
        v = k if a.keys_alone else values[0]
        if not a.whole_norms and a.q_norm is not None and a.k_norm is not None:
            q, k = a.q_norm(q), a.k_norm(k)
        if a.v_norm is not None:
            v = a.v_norm(v)
        cache.append(
            k, v, q=None if a.cos is None else q, cos=a.cos, sin=a.sin,
            interleaved=a.interleaved and a.cos is not None, counts=None if prompt else self._counts[slots],
        )  # fmt: skip
        out = decode_attention(q, **cache.view(), **a.options)
        assert isinstance(out, Tensor)
        return a.out(out.flatten(2))
