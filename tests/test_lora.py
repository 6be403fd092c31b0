"""Adapters: T7, E14.  The adapters are made here, small, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import skippy
from skippy.model import AdapterFile
from tests.conftest import words

Open = Callable[..., skippy.Runtime]
HIDDEN, RANK = 576, 4  # SmolLM2-135M


def write_adapter(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for layer in range(4):
        name = f"blk.{layer}.attn_q.weight"
        writer.add_tensor(f"{name}.lora_a", (0.3 * rng.standard_normal((RANK, HIDDEN))).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", (0.3 * rng.standard_normal((HIDDEN, RANK))).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_t7_the_same_tokens_under_four_namespaces_are_a_miss_in_each(open_runtime: Open, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", 1)
    prompt = words(48)
    hashes = set()
    logits = []
    for lora, tenant in (([adapter], ""), ([(adapter, 0.5)], ""), ([], ""), ([], "another")):
        rt = open_runtime(lora=lora)
        hashes.add(rt.namespace_hash(tenant))
        first = rt.generate(prompt, max_tokens=1, namespace=tenant)
        assert (first.reuse.cached_tokens, first.reuse.reason) == (0, "never_seen")
        logits.append(rt.context.logits())
        assert rt.generate(prompt, max_tokens=1, namespace=tenant).reuse.cached_tokens == 47
        rt.close()
    assert len(hashes) == 4
    assert np.array_equal(logits[2], logits[3])
    assert not np.allclose(logits[0], logits[2])  # the adapter does something, and its scale too
    assert not np.allclose(logits[0], logits[1])


def test_t7_within_one_tree(open_runtime: Open, tmp_path: Path) -> None:
    """Four identities in one tree: nothing of one is seen under another."""
    adapter = write_adapter(tmp_path / "a.gguf", 1)
    hashes = [open_runtime(lora=lora).namespace_hash("") for lora in ([adapter], [(adapter, 0.5)], [])]
    rt = open_runtime()
    hashes.append(rt.namespace_hash("another"))
    assert len(set(hashes)) == 4
    tokens = np.array(words(48), np.int32)
    for namespace in hashes:
        lease = rt.cache.begin(namespace, tokens)
        assert lease is not None
        assert (lease.restored, lease.reason) == (0, "never_seen")
        rt.context.sequences.decode(lease.lane, 0, tokens)
        lease.length = len(tokens)
        assert rt.cache.record(lease, tokens)
        rt.cache.end(lease)
    assert rt.stats()["residents"] == 4


def test_e14_an_adapter_with_other_weights_under_the_same_name_is_a_miss(open_runtime: Open, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", 1)
    first = open_runtime(lora=[path]).namespace_hash("")
    assert open_runtime(lora=[path]).namespace_hash("") == first
    write_adapter(path, 2)
    assert open_runtime(lora=[path]).namespace_hash("") != first


def test_adapters_that_cannot_be_loaded(open_runtime: Open, smol_path: Path, tmp_path: Path) -> None:
    with pytest.raises(skippy.ModelError, match=r"lora: there is no file '.*none[.]gguf'"):
        open_runtime(lora=[tmp_path / "none.gguf"])
    with pytest.raises(skippy.ModelError, match=r"lora: llama[.]cpp could not load"):
        open_runtime(lora=[smol_path])
    adapter = AdapterFile.read((write_adapter(tmp_path / "a.gguf", 1), 0.25))
    assert (adapter.scale, len(adapter.digest)) == (0.25, 64)
