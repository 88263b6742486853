"""Checks of what users pass to a decoder, each with its rule, the value and a remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.language import language_of
from cutekernels.models.sampling import Sampling
from cutekernels.ops.attention.cache import check_cache_dim, check_page_size
from cutekernels.ops.shared.checks import check_tensor, check_whole, quote

# ---- of the decoder


def check_sizes(*, max_batch: int, max_tokens: int, page_size: int, pages: int | None, chunk: int) -> int:
    """Refuses sizes out of range; returns the pages of each layer."""
    sizes = {"max_batch": max_batch, "max_tokens": max_tokens, "page_size": page_size, "chunk": chunk}
    for name, size in sizes.items():
        check_whole("Decoder", name, size, 1)
    check_page_size(page_size)
    if pages is None:
        return max_batch * -(-max_tokens // page_size)
    check_whole("Decoder", "pages", pages, 1)
    return pages


def check_tokenizer(tokenizer: object) -> None:
    """Refuses what cannot turn text into tokens and back. None is no tokenizer."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "batch_decode")):
        raise UnsupportedProblem(
            "Decoder takes tokenizer as a callable with batch_decode, such as those of transformers; got "
            f"{quote(tokenizer)}: pass AutoTokenizer.from_pretrained(...), or None for prompts of token ids"
        )


def check_kv_cache(kv_cache: object) -> None:
    """Refuses types of a cache other than the model's, None, and e4m3."""
    if kv_cache is not None and not (isinstance(kv_cache, str) and kv_cache == "fp8"):
        got = quote(kv_cache)
        raise UnsupportedProblem(f'kv_cache is "fp8", or None for the model\'s type; got {got}: pass either')


def check_memory(
    model: Any, *, max_batch: int, max_tokens: int, page_size: int, pages: int, kv_cache: str | None = None
) -> None:
    """Refuses sizes whose cache and tables are more than the device has memory for, before any of it is allocated.

    The meta device has none.
    """
    model = language_of(model)
    if model.device.type == "meta":
        raise UnsupportedProblem(
            "Decoder takes a model with weights, and this one is on the meta device: load it by from_pretrained"
        )
    config, device = model.config, model.device
    head_dim, itemsize = model.model.layers[0].self_attn.head_dim, 1 if kv_cache else model.dtype.itemsize
    if kv_cache is not None:
        check_cache_dim(kv_cache, head_dim)
    of_head = head_dim * itemsize + (kv_cache is not None)  # each with its scale
    page = 2 * config.num_hidden_layers * config.num_key_value_heads * page_size * of_head
    tables = 4 * max_tokens * head_dim + 4 * max_batch * -(-max_tokens // page_size)  # cos and sin; page numbers
    need = pages * page + tables + max_batch * config.vocab_size
    room = free_bytes(device)
    if need > room:
        raise UnsupportedProblem(
            f"a cache of {pages} pages of {page_size} tokens and the tables of max_batch={max_batch} requests of "
            f"max_tokens={max_tokens} take {need} bytes, and {device} has {room}: pass smaller ones, or fewer pages"
        )


def free_bytes(device: torch.device) -> int:
    """Memory on a GPU that torch can still give out; on the CPU all there is, since untouched pages take none."""
    if device.type != "cuda":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


# ---- of a request


def listed_prompts(prompts: Any) -> list[Any]:
    """The prompts one by one; each is still to be checked."""
    _check_ordered("prompts", prompts, "a list of prompts", "pass [prompt]")
    if getattr(prompts, "ndim", 1) == 0:
        raise UnsupportedProblem("prompts are a list, or the rows of a tensor; this has shape (): pass [[token, ...]]")
    return list(prompts)


def ids_of(prompt: Any, tokenizer: Any) -> list[Any]:
    """The elements of one prompt, on the host; whether each is a token is still to be checked."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UnsupportedProblem("a prompt of text needs a tokenizer: pass tokenizer= to from_transformers")
        prompt = tokenizer(prompt).input_ids
    _check_ordered(
        "a prompt",
        prompt,
        "token ids in a list, an array or a tensor, or as text",
        "pass a list of ids; generate takes a list of prompts",
    )
    if not hasattr(prompt, "tolist"):  # neither a tensor nor an array
        return list(prompt)
    if getattr(prompt, "ndim", 1) == 1:
        return prompt.tolist()  # type: ignore[no-any-return]
    if prompt.ndim != 2 or len(prompt) != 1:
        raise UnsupportedProblem(f"a prompt is one sequence; this has shape {tuple(prompt.shape)}: pass its rows")
    return prompt[0].tolist()  # type: ignore[no-any-return]


def _check_ordered(name: str, given: Any, what: str, remedy: str) -> None:
    """Refuses what is no collection of elements in an order of their own."""
    if isinstance(given, Tensor):
        check_tensor("Decoder", name, given)
        if given.is_meta:
            raise UnsupportedProblem(f"Decoder takes {name} with values; got a tensor on the meta device: {remedy}")
    elif isinstance(given, Mapping) and "input_ids" in given:
        raise UnsupportedProblem(f"Decoder takes {name} as {what}; got a tokenizer's output: pass its input_ids")
    elif not isinstance(given, Iterable) or isinstance(given, str | bytes | Set | Mapping):
        raise UnsupportedProblem(f"Decoder takes {name} as {what}; got {quote(given)}: {remedy}")


def chosen_sampling(sampling: Sampling | None) -> Sampling:
    """``sampling``, or the greedy one for None."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise UnsupportedProblem(
            f"sampling is a Sampling or None; got {quote(sampling)}: pass Sampling(temperature=0.8)"
        )
    return sampling


def end_tokens(model: Any, tokenizer: Any, vocabulary: int) -> frozenset[int]:
    """Tokens at which ``generate`` of transformers ends a sequence, and the tokenizer's end of a text.

    A model has none where its ``generation_config`` has none; its ``config`` counts where there is no such. Ids beyond
    the vocabulary, which no model generates, are left out.
    """
    model = language_of(model)
    own = getattr(model, "generation_config", None) or model.config
    found: list[Any] = []
    both: list[Any] = [getattr(own, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    for given in both:
        ids = given.tolist() if hasattr(given, "tolist") else given  # of an array or a tensor
        found += ids if isinstance(ids, list | tuple) else [ids]
    return frozenset(token for token in found if type(token) is int and 0 <= token < vocabulary)


def is_token(token: Any, vocabulary: int) -> bool:
    """Whether it is a token's id: an integer, numpy's too."""
    whole = type(token) is int or (isinstance(token, Integral) and not isinstance(token, bool))
    return whole and 0 <= token < vocabulary


def stop_tokens(stop: object, vocabulary: int) -> frozenset[int]:
    """Stop tokens as a set. Raises UnsupportedProblem for what is no sequence or set of token ids."""
    listed = isinstance(stop, Sequence | Set) and not isinstance(stop, str | bytes | bytearray)
    found: list[Any] = list(stop) if listed else ["?"]  # type: ignore[call-overload]
    if not all(is_token(token, vocabulary) for token in found):
        raise UnsupportedProblem(
            f"stop is token ids in a list, a tuple or a set, integers from 0 to {vocabulary - 1}; got {quote(stop)}: "
            "pass (tokenizer.eos_token_id,), or None for the model's own"
        )
    return frozenset(map(int, found))
