import array
import ctypes
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from skippy import identity as module
from skippy.config import Adapter, CacheConfig, RopeConfig, StageConfig
from skippy.errors import ConfigError
from skippy.identity import (
    NAMESPACE_FIELDS,
    WEIGHTS_FIELDS,
    KvIdentity,
    MessageBase,
    PageIdentity,
    PrefillKvIdentity,
    prefix_identity_with_namespace,
    prefix_namespace_hash,
)

BASE = MessageBase(
    run_id="run",
    request_id="request",
    session_id="session",
    stage_id="stage",
    stage_index=0,
    topology_id="topology",
    model_id="model",
    tokenizer_id="tokenizer",
    chat_template_id="chatml",
    namespace="tenant",
    seq=3,
)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith("SKIPPY_") or name == "LLAMA_ATTN_ROT_DISABLE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def stage(**values: Any) -> StageConfig:
    return StageConfig(**{"model_id": "model", "ctx_size": 512, "source_model_sha256": "aa", **values})


def kv(min_tokens: int = 256, stride: int = 128, limit: int = 2, **values: Any) -> KvIdentity:
    cache = CacheConfig(min_tokens=min_tokens, shared_prefix_stride_tokens=stride, shared_prefix_record_limit=limit)
    return KvIdentity(stage(ctx_size=4096, kv_cache=cache, **values), "dense")


# ---- what is in the namespace --------------------------------------------------------------------------------------

# For each field of the stage some values of which no two may share.
INSIDE: dict[str, list[Any]] = {
    "manifest_sha256": [None, "aa", "bb"],
    "source_model_sha256": [None, "aa", "bb"],
    "cache_type_k": ["f16", "q8_0", "f32"],
    "cache_type_v": ["f16", "q8_0", "f32"],
    "flash_attn_type": ["auto", "on", "off"],
    "n_gpu_layers": [0, 1, -1, 11],
    "selected_device": [None, "", "CUDA0", "CUDA1"],
    "kv_unified": [True, False],
    "swa_full": [None, True, False],
    "stage_index": [0, 1],
    "layer_start": [0, 1],
    "layer_end": [None, 0, 10],
    "ctx_size": [512, 1024],
    "rope": [
        RopeConfig(),
        *(
            RopeConfig.model_validate({name: value})
            for name in ("freq_base", "freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast")
            for value in (0.0, 1.0, 1.0000000000000002)
        ),
        *(RopeConfig(yarn_beta_slow=value) for value in (0.0, 1.0)),
        *(RopeConfig(yarn_orig_ctx=value) for value in (0, 1)),
    ],
    "adapters": [
        (),
        (Adapter(digest="a"),),
        (Adapter(digest="a", scale=0.5),),
        (Adapter(digest="b"),),
        (Adapter(digest="a"), Adapter(digest="b")),
        (Adapter(digest="b"), Adapter(digest="a")),
        (Adapter(digest="a"), Adapter(digest="a")),
        (Adapter(digest="a", scale=2.0), Adapter(digest="b")),
        (Adapter(digest="a"), Adapter(digest="b", scale=2.0)),
    ],
    "control_vector": [None, "a", "b"],
    "attn_rot_disabled": [False, True],
    "llama_build": [None, "b1", "b2"],
}
OUTSIDE: dict[str, Any] = {
    "run_id": "other",
    "topology_id": "other",
    "stage_id": "other",
    "model_id": "other",
    "model_path": "elsewhere.gguf",
    "package_ref": "other",
    "lane_count": 7,
    "n_batch": 64,
    "n_ubatch": 64,
    "kv_cache": CacheConfig(min_tokens=3, mode="lookup"),
}


def test_every_field_of_the_stage_is_tried_in_one_of_the_two_tables() -> None:
    assert set(INSIDE) | set(OUTSIDE) == set(StageConfig.model_fields)
    assert set(INSIDE) == {*NAMESPACE_FIELDS, *WEIGHTS_FIELDS[:2]}


@pytest.mark.parametrize("name", INSIDE)
def test_each_value_of_a_field_of_the_namespace_has_its_own(name: str) -> None:
    # The other digest stays, so that the absence of one is not made up for by the path.
    other = {"source_model_sha256": "zz", "manifest_sha256": "zz"}
    hashes = {prefix_namespace_hash(stage(**{**other, name: value}), 0) for value in INSIDE[name]}
    assert len(hashes) == len(INSIDE[name])


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_field_outside_the_namespace_does_not_change_it(name: str) -> None:
    assert getattr(stage(), name) != OUTSIDE[name]
    assert prefix_namespace_hash(stage(**{name: OUTSIDE[name]}), 0) == prefix_namespace_hash(stage(), 0)


def test_no_two_fields_are_taken_for_each_other() -> None:
    hashes = [
        prefix_namespace_hash(stage(**{"source_model_sha256": "zz", "manifest_sha256": "zz", name: value}), 0)
        for name in INSIDE
        for value in INSIDE[name]
        if value != getattr(stage(), name) and name not in WEIGHTS_FIELDS
    ]
    assert len(set(hashes)) == len(hashes)


def test_k_and_v_types_are_apart() -> None:
    k, v = stage(cache_type_k="q8_0"), stage(cache_type_v="q8_0")
    assert prefix_namespace_hash(k, 0) != prefix_namespace_hash(v, 0)


def test_the_two_digests_are_apart() -> None:
    source = stage(source_model_sha256="aa", manifest_sha256=None)
    manifest = stage(source_model_sha256=None, manifest_sha256="aa")
    assert prefix_namespace_hash(source, 0) != prefix_namespace_hash(manifest, 0)


def test_the_two_zeros_are_one_number() -> None:
    positive, negative = (stage(adapters=(Adapter(digest="a", scale=zero),)) for zero in (0.0, -0.0))
    assert prefix_namespace_hash(positive, 0) == prefix_namespace_hash(negative, 0)


@pytest.mark.parametrize("argument", ["token_start", "chat_template_id", "namespace"])
def test_each_argument_has_its_own_namespace(argument: str) -> None:
    values: dict[str, list[Any]] = {
        "token_start": [0, 1, 10],
        "chat_template_id": [None, "", "a", "b"],
        "namespace": [None, "", "a", "b"],
    }
    hashes = {prefix_namespace_hash(stage(), **{"token_start": 0, argument: value}) for value in values[argument]}
    assert len(hashes) == len(values[argument])


def test_text_does_not_flow_from_one_field_into_the_next() -> None:
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), (None, "ab"), ("ab", None), ("b", "a")]
    assert len({prefix_namespace_hash(stage(), 0, *pair) for pair in pairs}) == len(pairs)
    adapters = [(Adapter(digest="a"), Adapter(digest="b")), (Adapter(digest="ab"),)]
    assert len({prefix_namespace_hash(stage(adapters=given), 0) for given in adapters}) == 2


@given(st.lists(st.tuples(*[st.none() | st.text(max_size=3)] * 2), min_size=2, max_size=2, unique=True))
def test_two_pairs_of_texts_never_share(pairs: list[tuple[str | None, str | None]]) -> None:
    first, second = (prefix_namespace_hash(stage(), 0, *pair) for pair in pairs)
    assert first != second


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4)


@given(*[st.recursive(SCALARS, lambda part: st.lists(part, max_size=3).map(tuple), max_leaves=6)] * 2)
def test_values_have_the_same_bytes_only_if_they_are_the_same(one: object, other: object) -> None:
    def typed(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(typed, value))
        return type(value).__name__, struct.pack("<d", value + 0.0) if isinstance(value, float) else value

    assert (module._value(one) == module._value(other)) == (typed(one) == typed(other))


def test_a_value_without_a_form_is_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        module._value({1})


@pytest.mark.parametrize(
    "patch",
    [(platform, "machine", lambda: "other"), (sys, "byteorder", "other"), (module, "FORMAT", "skippy-identity-0")],
)
def test_machine_byte_order_and_format_are_part_of_it(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prefix_namespace_hash(stage(), 0)
    monkeypatch.setattr(*patch)
    assert prefix_namespace_hash(stage(), 0) != before


# ---- weights without a digest --------------------------------------------------------------------------------------


def namespace_of(path: str | Path | None, **values: Any) -> str:
    return prefix_namespace_hash(stage(source_model_sha256=None, model_path=path, **values), 0)


def test_without_a_digest_path_size_and_time_name_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    os.utime(path, ns=(10**18, 10**18))
    before = namespace_of(path)
    assert namespace_of(path, model_id="alias", package_ref="other") == before
    assert namespace_of("model.gguf") == before  # relative to the working directory

    os.utime(path, ns=(10**18, 10**18 + 1))
    touched = namespace_of(path)
    path.write_bytes(b"longer weights")
    os.utime(path, ns=(10**18, 10**18))
    grown = namespace_of(path)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"weights")
    os.utime(copy, ns=(10**18, 10**18))
    path.unlink()
    assert len({before, touched, grown, namespace_of(copy), namespace_of(path), namespace_of(None)}) == 6


def test_a_link_to_the_weights_is_the_weights(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    (tmp_path / "link.gguf").symlink_to("model.gguf")
    assert namespace_of("link.gguf") == namespace_of("model.gguf")


def test_every_file_of_a_split_model_counts(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"weights")
    seen = {namespace_of(parts[0])}
    for n, part in enumerate(parts):
        part.write_bytes(b"other weights")
        seen.add(namespace_of(parts[0]))
        assert len(seen) == n + 2


def test_without_digest_and_path_the_callers_word_counts() -> None:
    words = [{"model_id": "a"}, {"model_id": "b"}, {"model_id": "a", "package_ref": "b"}]
    assert len({namespace_of(None, **given) for given in words}) == 3


def test_a_file_that_is_replaced_later_does_not_lend_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    loaded = KvIdentity(stage(source_model_sha256=None, model_path=path), "dense")
    before = loaded.namespace(BASE)
    path.write_bytes(b"other weights")
    assert loaded.namespace(BASE) == before
    assert KvIdentity(loaded.config, "dense").namespace(BASE) != before


# ---- prefixes ------------------------------------------------------------------------------------------------------


def test_the_hash_is_what_the_module_says_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def frame(name: str, kind: bytes, body: bytes) -> bytes:
        text = name.encode()
        return struct.pack("<I", len(text)) + text + kind + struct.pack("<Q", len(body)) + body

    found = prefix_identity_with_namespace(stage(), 7, [1, -2, 300])
    head = frame("format", b"s", b"skippy-identity-1")
    inner = frame("namespace", b"s", found.namespace.encode()) + frame("token_start", b"i", b"7")
    tokens = struct.pack("<3iQ", 1, -2, 300, 3)
    assert found.prefix_hash == blake3(head + frame("purpose", b"s", b"prefix") + inner + tokens).hexdigest()
    page = inner + frame("token_count", b"i", b"3") + frame("prefix_hash", b"s", found.prefix_hash.encode())
    assert found.page_id == blake3(head + frame("purpose", b"s", b"page") + page).hexdigest()
    assert found.namespace == prefix_namespace_hash(stage(), 7)
    assert (found.token_start, found.token_count) == (7, 3)


def test_prompts_that_differ_in_their_tail_share_the_namespace_and_no_page() -> None:
    one, other = (prefix_identity_with_namespace(stage(), 0, [*range(200), tail]) for tail in (1, 2))
    assert one.namespace == other.namespace
    assert one.page_id != other.page_id
    assert one.prefix_hash != other.prefix_hash


def test_a_page_depends_on_namespace_start_and_tokens() -> None:
    pages = [
        prefix_identity_with_namespace(stage(), 0, [1, 2]),
        prefix_identity_with_namespace(stage(), 1, [1, 2]),
        prefix_identity_with_namespace(stage(), 0, [2, 1]),
        prefix_identity_with_namespace(stage(), 0, [1, 2, 0]),
        prefix_identity_with_namespace(stage(), 0, [1]),
        prefix_identity_with_namespace(stage(), 0, []),
        prefix_identity_with_namespace(stage(), 0, [1, 2], "chatml"),
        prefix_identity_with_namespace(stage(), 0, [1, 2], None, "chatml"),
        prefix_identity_with_namespace(stage(ctx_size=1024), 0, [1, 2]),
    ]
    assert len({page.page_id for page in pages}) == len(pages)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_tokens_are_the_same_in_every_container(tokens: list[int]) -> None:
    page = prefix_identity_with_namespace(stage(), 0, tokens)
    containers: list[Any] = [
        tuple(tokens),
        array.array("i", tokens),
        array.array("q", tokens),
        memoryview(array.array("i", tokens)),
        (ctypes.c_int32 * len(tokens))(*tokens),
        np.array(tokens, dtype=np.int32),
        np.array(tokens, dtype=np.int64),
        np.array(tokens, dtype="<i4"),
        np.array(tokens, dtype=">i4"),
        np.array([tokens, tokens], dtype=np.int32).T[:, 0],  # with a stride
    ]
    assert all(prefix_identity_with_namespace(stage(), 0, given) == page for given in containers)


def test_a_range_is_tokens_too() -> None:
    assert prefix_identity_with_namespace(stage(), 0, range(9)) == prefix_identity_with_namespace(
        stage(), 0, list(range(9))
    )


@pytest.mark.parametrize(
    "tokens",
    [[1.5], ["1"], "12", b"12", 5, None, [[1, 2]], [[1], [2, 3]], [2**31], [-(2**31) - 1], [2**70], [True], {1, 2}],
)
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="token_ids"):
        prefix_identity_with_namespace(stage(), 0, tokens)
    with pytest.raises(ConfigError, match="token_ids"):
        kv().activation_lookup_identities(BASE, 0, tokens)


def test_a_negative_start_is_refused() -> None:
    calls: list[Callable[[], object]] = [
        lambda: prefix_namespace_hash(stage(), -1),
        lambda: prefix_identity_with_namespace(stage(), -1, [1]),
        lambda: kv().prefill_identity(BASE, -1, [1]),
        lambda: kv().namespace(BASE, -1),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="token_start=-1: expected a position from 0"):
            call()


def test_a_start_may_be_any_integer() -> None:
    assert prefix_namespace_hash(stage(), np.int32(5)) == prefix_namespace_hash(stage(), 5)  # type: ignore[arg-type]


# ---- KvIdentity ----------------------------------------------------------------------------------------------------


def test_a_page_says_what_it_is() -> None:
    config = stage(
        topology_id="t",
        stage_id="s",
        stage_index=2,
        layer_start=3,
        layer_end=9,
        llama_build="b1",
        cache_type_v="q8_0",
    )
    page = KvIdentity(config, "recurrent").prefill_identity(BASE, 5, [1, 2, 3])
    prefix = prefix_identity_with_namespace(config, 5, [1, 2, 3], "chatml", "tenant")
    assert page.page_id == prefix.page_id
    assert page.namespace == prefix.namespace == prefix_namespace_hash(config, 5, "chatml", "tenant")
    assert page.token_ids.tolist() == [1, 2, 3]
    assert page.identity == PageIdentity(
        model_id="model",
        model_revision="aa",
        runtime_abi_version="b1",
        topology_id="t",
        stage_id="s",
        stage_index=2,
        layer_start=3,
        layer_end=9,
        prefix_hash=prefix.prefix_hash,
        session_id="session",
        token_start=5,
        token_count=3,
        generation=0,
        layout="recurrent",
        codec="raw",
        tokenizer_id="tokenizer",
        chat_template_id="chatml",
        position_config_hash="ctx:512",
        kv_dtype="f16/q8_0",
    )


def test_what_a_page_says_where_nothing_is_known() -> None:
    config = stage(source_model_sha256=None)
    page = KvIdentity(config, "dense").prefill_identity(MessageBase(), 0, [1]).identity
    assert (page.tokenizer_id, page.chat_template_id, page.session_id) == ("model", "", "")
    assert (page.model_revision, page.runtime_abi_version, page.layout, page.kv_dtype) == ("", "", "dense", "f16")


@pytest.mark.parametrize(
    ("name", "value", "shared"),
    [
        ("run_id", "x", True),
        ("request_id", "x", True),
        ("session_id", "x", True),
        ("stage_id", "x", True),
        ("stage_index", 9, True),
        ("topology_id", "x", True),
        ("model_id", "x", True),
        ("tokenizer_id", "x", True),
        ("chat_template_id", "x", False),
        ("chat_template_id", None, False),
        ("namespace", "x", False),
        ("namespace", None, False),
        ("seq", 9, True),
    ],
)
def test_of_the_request_only_template_and_partition_decide(name: str, value: Any, shared: bool) -> None:
    one, other = (kv().prefill_identity(base, 0, [1, 2]) for base in (BASE, replace(BASE, **{name: value})))
    assert (one.page_id == other.page_id) is shared
    assert (one.namespace == other.namespace) is shared


def test_every_field_of_the_request_was_tried() -> None:
    names = {field.name for field in fields(MessageBase)}
    tried = {
        case[0] for mark in test_of_the_request_only_template_and_partition_decide.pytestmark for case in mark.args[1]
    }
    assert tried == names


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind='sparse': expected one of 'dense', 'recurrent'"):
        KvIdentity(stage(), "sparse")  # type: ignore[arg-type]


def test_the_tree_is_asked_for_the_full_path_alone() -> None:
    found = kv()
    for ask in (found.lookup_identities, found.record_identities):
        assert ask(BASE, 0, []) == []
        assert ask(BASE, 0, range(300)) == [found.prefill_identity(BASE, 0, range(300))]
        assert ask(BASE, 0, [1]) == [found.prefill_identity(BASE, 0, [1])]


def counts(pages: list[PrefillKvIdentity]) -> list[int]:
    return [page.identity.token_count for page in pages]


def test_a_store_without_a_tree_is_asked_for_each_candidate() -> None:
    found = kv(64, 32, 2)
    lookup = found.activation_lookup_identities(BASE, 0, range(160))
    record = found.activation_record_identities(BASE, 0, range(160))
    assert counts(lookup) == [160, 128, 96, 64]
    assert record == lookup[:2]
    assert found.activation_lookup_identities(BASE, 0, []) == found.activation_record_identities(BASE, 0, []) == []
    for page in lookup:  # one pass over the tokens gives what each length alone gives
        assert page == found.prefill_identity(BASE, 0, range(page.identity.token_count))
        assert page.token_ids.tolist() == list(range(page.identity.token_count))


def test_a_recorded_path_is_found_under_a_prompt_that_extends_it() -> None:
    found, tokens = kv(256, 128, 2), list(range(2231))
    recorded = found.activation_record_identities(BASE, 0, tokens[:2214])
    asked = found.activation_lookup_identities(BASE, 0, tokens)
    assert counts(recorded) == [2214, 2176]
    assert [page.identity.token_count for page in asked if page.page_id in {page.page_id for page in recorded}] == [
        2176
    ]
    other = found.activation_lookup_identities(BASE, 0, [9, *tokens[1:]])
    assert not {page.page_id for page in recorded} & {page.page_id for page in other}


def test_pages_share_one_buffer_that_nobody_can_write() -> None:
    tokens = np.arange(160, dtype=np.int32)
    pages = kv(64, 32).activation_lookup_identities(BASE, 0, tokens)
    tokens[:] = 0
    assert pages[0].token_ids[5] == 5
    assert all(np.shares_memory(pages[0].token_ids, page.token_ids) for page in pages)
    with pytest.raises(ValueError, match="read-only"):
        pages[0].token_ids[0] = 1
    assert len(set(pages)) == 4


@pytest.mark.parametrize(
    ("min_tokens", "stride", "count", "shared"),
    [
        (256, 128, 2214, 2048),
        (256, 128, 970, 768),
        (0, 128, 1, None),
        (256, 128, 0, None),
        (256, 128, 200, None),
        (256, 128, 256, None),
        (256, 128, 257, 256),
        (256, 128, 384, 256),
        (256, 128, 512, 384),
        (0, 128, 0, None),
        (0, 128, 129, None),
        (0, 128, 256, 128),
        (0, 1, 10, 9),
        (4, 0, 10, None),
    ],
)
def test_where_the_shared_checkpoint_lies(min_tokens: int, stride: int, count: int, shared: int | None) -> None:
    found = kv(min_tokens, stride)
    assert found.exact_shared_checkpoint_token_count(count) == shared
    page = found.exact_shared_checkpoint_identity(BASE, 0, range(count))
    if shared is None:
        assert page is None
    else:
        assert page == found.prefill_identity(BASE, 0, range(shared))


@pytest.mark.parametrize(
    ("prompt", "candidate", "allowed"),
    [
        (970, 768, True),
        (970, 969, False),
        (970, 970, False),
        (200, 200, True),
        (200, 199, False),
        (0, 0, False),
        (2214, 2048, True),
        (2214, 2214, False),
    ],
)
def test_which_exact_states_are_recorded(prompt: int, candidate: int, allowed: bool) -> None:
    assert kv(256, 128).exact_state_record_token_count_allowed(prompt, candidate) is allowed


@given(st.integers(0, 500), st.integers(0, 300), st.integers(0, 3000))
def test_at_most_one_length_of_exact_state_is_recorded(min_tokens: int, stride: int, prompt: int) -> None:
    found = kv(min_tokens, stride)
    allowed = [length for length in range(prompt + 2) if found.exact_state_record_token_count_allowed(prompt, length)]
    shared = found.exact_shared_checkpoint_token_count(prompt)
    assert allowed == ([shared or prompt] if prompt else [])
    assert shared is None or max(1, min_tokens) <= shared < prompt


# ---- the same in another process, and on another day ---------------------------------------------------------------

PINNED = """
import platform, sys
from skippy.config import Adapter, CacheConfig, RopeConfig, StageConfig
from skippy.identity import KvIdentity, MessageBase
platform.machine = lambda: "x86_64"
sys.byteorder = "little"
config = StageConfig(
    model_id="model", source_model_sha256="aa", ctx_size=4096, cache_type_v="q8_0", layer_end=30, llama_build="b1",
    rope=RopeConfig(freq_base=10000.0), adapters=(Adapter(digest="x", scale=0.5), Adapter(digest="y")),
    attn_rot_disabled=False, kv_cache=CacheConfig(min_tokens=64),
)
base = MessageBase(session_id="s", chat_template_id="chatml", namespace="t\\u00e9nant")
page = KvIdentity(config, "dense").prefill_identity(base, 0, range(1000))
print(page.namespace, page.identity.prefix_hash, page.page_id)
"""
NAMESPACE = "a4cc314f9baf46a5f7ecd2b533652c490769a96544a8af61b83ddb2f6550993e"
PREFIX_HASH = "eca16957430586b7a0ce84e0bb5d9e6911bbab2af0e0168e7379ec13f673ec85"
PAGE_ID = "a79aa4fec07cfa4b5f2c745e3867925328617e510158b2686d3ea9edbb601cef"


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_the_ids_are_the_same_in_another_process_and_on_another_day(seed: str) -> None:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "TZ": f"UTC{seed[:1]}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PINNED], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [NAMESPACE, PREFIX_HASH, PAGE_ID]
