"""A context as a cache needs it, made by llama_cpp.Llama's own constructor, and the cache over it."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import llama_cpp as lib

from skippy._binding import BUILD
from skippy._llama import SEQ_LIMIT, Context
from skippy.cache import Cache
from skippy.capability import Capability
from skippy.config import Adapter, CacheConfig, ResidentCacheConfig, StageConfig
from skippy.identity import KvIdentity
from skippy.model import KV_TYPES, AdapterFile, family_of
from skippy.pool import Pool
from skippy.probe import probe

__all__ = ["CAPTURE", "LANE", "Attached", "attach", "prepare", "stage_of"]

log = logging.getLogger("skippy")

LANE, CAPTURE = 0, 1  # sequence ids: the one the parent knows of, and the one that deltas are saved through

_KV_NAMES = {number: name for name, number in KV_TYPES.items()}


@dataclass(frozen=True)
class Attached:
    """What was put over a Llama's context; `bytes_per_token` is the attention state of one token."""

    sequences: Context
    cache: Cache
    identity: KvIdentity
    bytes_per_token: int


def prepare(params: Any, model: Any, config: CacheConfig, asked: Collection[str]) -> None:
    """Change llama.cpp's context parameters to what a cache needs: a unified pool, and spare sequence ids.

    `model` is a llama_model, `asked` the names of the arguments that the caller gave: those are kept.
    """
    if not params.embeddings:
        # An id of a model with recurrent or window layers costs memory of its own, and nothing of it stays in the pool.
        residents = config.max_entries if family_of(model) == "dense" else 0
        params.n_seq_max = max(1, min(2 + residents, params.n_batch, SEQ_LIMIT))
    if "swa_full" not in asked and lib.llama_model_n_swa(model) > 0:
        params.swa_full = False
    params.kv_unified = True
    params.n_rs_seq = 0
    if "flash_attn" not in asked:
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_AUTO


def attach(
    llama: llama_cpp.Llama, config: CacheConfig, *, on_event: Callable[[str, dict[str, Any]], None] | None = None
) -> Attached | None:
    """Find out what the context of `llama` can do, and put a cache over it.  None, with a warning, if it cannot."""
    params = llama.context_params
    family = family_of(llama._model.model)
    unable = None
    if params.n_seq_max < (3 if family == "dense" else 2):
        unable = f"n_batch of {params.n_batch} leaves no sequence ids for cached prefixes"
    capability = Capability(unable)
    sequences: Context | None = None
    if unable is None:
        address = ctypes.cast(llama._ctx.ctx, ctypes.c_void_p).value or 0
        sequences = Context(address, unified=bool(params.kv_unified), owner=llama._ctx)
        window = int(lib.llama_model_n_swa(llama._model.model))
        capability = probe(sequences, bos=llama.token_bos(), unified=True, family=family, window=window, second=CAPTURE)
    if sequences is None or capability.unable:
        log.warning("prefix reuse is off: %s", capability.unable)
        return None
    stage = stage_of(llama, config, capability)
    caps = ResidentCacheConfig.from_stage(stage, config)
    residents = min(caps.max_entries, sequences.n_seq_max - 2)
    pool = Pool(sequences, lanes=1, residents=residents, shape=capability)
    cache = Cache(
        pool,
        config,
        max_resident_tokens=caps.max_resident_tokens,
        capability=capability,
        on_event=on_event,
    )
    if cache.unable:
        log.warning("prefix reuse is off: %s", cache.unable)
        return None
    identity = KvIdentity(stage, "recurrent" if capability.needs_checkpoints else "dense")
    return Attached(sequences, cache, identity, capability.bytes_per_token)


def stage_of(llama: llama_cpp.Llama, config: CacheConfig, capability: Capability) -> StageConfig:
    """What identifies the loaded model and the layout of its KV."""
    params = llama.context_params
    adapters = []
    if llama.lora_path:
        adapter = AdapterFile.read((llama.lora_path, llama.lora_scale))
        adapters.append(Adapter(digest=adapter.digest, scale=adapter.scale))
    return StageConfig.model_validate(
        {
            "model_id": Path(llama.model_path).name,
            "model_path": os.fspath(llama.model_path),
            "ctx_size": llama.n_ctx(),
            "lane_count": 1,
            "n_batch": llama.n_batch,
            "n_ubatch": params.n_ubatch,
            "n_gpu_layers": min(llama.model_params.n_gpu_layers, 2**31 - 1),
            "cache_type_k": _KV_NAMES.get(params.type_k, str(params.type_k)),
            "cache_type_v": _KV_NAMES.get(params.type_v, str(params.type_v)),
            "flash_attn_type": "on" if capability.flash_attn else "off",
            "swa_full": bool(params.swa_full),
            "rope": {
                "freq_base": params.rope_freq_base or None,
                "freq_scale": params.rope_freq_scale or None,
                "yarn_ext_factor": params.yarn_ext_factor,
                "yarn_attn_factor": params.yarn_attn_factor,
                "yarn_beta_fast": params.yarn_beta_fast,
                "yarn_beta_slow": params.yarn_beta_slow,
                "yarn_orig_ctx": params.yarn_orig_ctx,
            },
            "adapters": tuple(adapters),
            "llama_build": BUILD,
            "kv_cache": config,
        }
    )
