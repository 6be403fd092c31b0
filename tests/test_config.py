import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from skippy import sizes
from skippy.config import (
    Adapter,
    CacheArguments,
    CacheConfig,
    PrefixCandidatePolicy,
    ResidentCacheConfig,
    RopeConfig,
    StageConfig,
    derive_max_resident_tokens,
)
from skippy.errors import ConfigError, SkippyError
from skippy.sizes import available_memory, parse_size

GIB = 2**30
DOC = Path(__file__).parent.parent / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith("SKIPPY_") or name == "LLAMA_ATTN_ROT_DISABLE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refused(make: Any, *parts: str) -> str:
    """The message of a refusal, which is a ConfigError and holds all parts."""
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert isinstance(caught.value, SkippyError)
    assert isinstance(caught.value, ValueError)
    return message


def cache(**values: Any) -> CacheConfig:
    return CacheConfig(**values)


def stage(**values: Any) -> StageConfig:
    return StageConfig(**{"model_id": "m", "ctx_size": 4096, **values})


# ---- CacheConfig: values -------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_contract() -> None:
    assert CacheConfig().model_dump() == {
        "mode": "lookup-record",
        "payload": "auto",
        "max_entries": 64,
        "max_bytes": 0,
        "min_tokens": 64,
        "shared_prefix_stride_tokens": 128,
        "shared_prefix_record_limit": 2,
        "max_resident_tokens": None,
        "residency": "auto",
        "eviction": "worth",
        "ram": "auto",
        "logits_bytes": 512 * 2**10,
        "disk": None,
        "disk_bytes": 8 * GIB,
        "disk_min_free": GIB,
    }


def test_the_argument_types_name_every_field() -> None:
    assert list(CacheArguments.__annotations__) == list(CacheConfig.model_fields)


@pytest.mark.parametrize("mode", ["lookup-record", "lookup", "record", "disabled"])
def test_modes(mode: Any) -> None:
    assert CacheConfig(mode=mode).mode == mode


@pytest.mark.parametrize("payload", ["auto", "resident-kv", "kv-recurrent", "full-state"])
def test_payloads(payload: Any) -> None:
    assert CacheConfig(payload=payload).payload == payload


@pytest.mark.parametrize(("given", "kept"), [(0, 1), (1, 1), (64, 64), (512, 512), (513, 512), (10**6, 512)])
def test_entries_are_clamped(given: int, kept: int) -> None:
    assert CacheConfig(max_entries=given).max_entries == kept


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("512MB", 512_000_000),
        ("2GiB", 2 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        (" 2gib ", 2 * GIB),
        ("1TiB", 1024 * GIB),
        ("0.1kB", 100),
        ("1.0005KiB", 1024),
    ],
)
def test_sizes_are_ints_or_text(text: int | str, size: int) -> None:
    assert parse_size(text) == size
    config = CacheConfig(max_bytes=text, ram=text, disk_bytes=text)
    assert (config.max_bytes, config.ram, config.disk_bytes) == (size, size, size)


@pytest.mark.parametrize(
    "value", [-1, "-1", "2G", "2Gi", "", "GiB", "1e9", "1 2", "0x10", 1.5, None, True, 2**63, "9EiB"]
)
@pytest.mark.parametrize("field", ["max_bytes", "disk_bytes", "ram"])
def test_what_is_no_size_is_refused_by_name(field: str, value: Any) -> None:
    refused(lambda: cache(**{field: value}), f"CacheConfig.{field}={value!r}", "'1.5 GiB'")


@given(st.integers(0, 2**40), st.sampled_from(["", "B", "kB", "KiB", "MB", "MiB"]))
def test_sizes_scale_by_their_unit(count: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "kB": 1000, "KiB": 1024, "MB": 10**6, "MiB": 2**20}[unit]
    assert parse_size(f"{count}{unit}") == count * factor


def test_ram_auto_is_a_tenth_of_what_is_available_and_2_gib_at_most() -> None:
    config = CacheConfig()
    assert config.ram == "auto"
    assert config.ram_bytes(available=10 * GIB) == GIB
    assert config.ram_bytes(available=20 * GIB) == 2 * GIB
    assert config.ram_bytes(available=200 * GIB) == 2 * GIB
    assert config.ram_bytes(available=0) == 0
    assert CacheConfig(ram="3GiB").ram_bytes(available=GIB) == 3 * GIB


def test_ram_auto_asks_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippy.config.available_memory", lambda: 5 * GIB)
    assert CacheConfig().ram_bytes() == GIB // 2
    monkeypatch.setattr("skippy.config.available_memory", lambda: None)
    assert CacheConfig().ram_bytes() == 512 * 2**20


def test_saved_bytes_are_capped_by_the_lower_of_the_two() -> None:
    assert CacheConfig(ram=100).saved_bytes_cap() == 100
    assert CacheConfig(ram=100, max_bytes=40).saved_bytes_cap() == 40
    assert CacheConfig(ram=100, max_bytes=400).saved_bytes_cap() == 100
    assert CacheConfig(max_bytes=4 * GIB).saved_bytes_cap(available=10 * GIB) == GIB


def test_available_memory_is_the_lowest_that_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    assert sizes._mem_available(str(info)) == 64 * 1024
    info.write_text("MemTotal:       100 kB\n")
    assert sizes._mem_available(str(info)) is None
    assert sizes._mem_available(str(tmp_path / "none")) is None
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("4096\n")
    assert sizes._container_limit((str(tmp_path / "none"), str(tmp_path / "max"))) is None
    assert sizes._container_limit((str(tmp_path / "max"), str(tmp_path / "limit"))) == 4096

    monkeypatch.setattr(sizes, "_mem_available", lambda: None)
    monkeypatch.setattr(sizes, "_free_pages", lambda: 300)
    monkeypatch.setattr(sizes, "_container_limit", lambda: 200)
    assert available_memory() == 200
    monkeypatch.setattr(sizes, "_container_limit", lambda: None)
    assert available_memory() == 300
    monkeypatch.setattr(sizes, "_free_pages", lambda: None)
    assert available_memory() is None


def test_free_pages_where_the_system_does_not_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert sizes._free_pages() is None
    monkeypatch.setattr(os, "sysconf", lambda name: -1)
    assert sizes._free_pages() is None
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert sizes._free_pages() == 3 * 4096


def test_the_folder_of_the_disk_tier() -> None:
    assert CacheConfig(disk="states").disk == Path("states")
    assert CacheConfig(disk=Path("states")).disk == Path("states")
    assert CacheConfig(disk="~/states").disk == Path.home() / "states"
    assert CacheConfig(disk="none").disk is None
    refused(lambda: CacheConfig(disk=""), "disk=''", "folder")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("mode", "x", "'lookup-record', 'lookup', 'record' or 'disabled'"),
        ("payload", "x", "'auto', 'resident-kv', 'kv-recurrent' or 'full-state'"),
        ("max_entries", -1, "greater than or equal to 0"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("min_tokens", 2**31, "less than or equal to 2147483647"),
        ("min_tokens", "few", "valid integer"),
        ("min_tokens", 1.5, "valid integer"),
        ("min_tokens", True, "a number"),
        ("min_tokens", None, "valid integer"),
        ("shared_prefix_stride_tokens", -1, "greater than or equal to 0"),
        ("shared_prefix_record_limit", -1, "greater than or equal to 0"),
        ("max_resident_tokens", -1, "greater than or equal to 0"),
        ("disk", 4, "path"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    refused(lambda: cache(**{field: value}), f"CacheConfig.{field}={value!r}: ", allowed)
    refused(lambda: CacheConfig.model_validate({field: value}), field, repr(value), allowed)
    refused(lambda: CacheConfig().model_copy(update={field: value}), f"{field}={value!r}", allowed)


def test_a_refusal_names_everything_that_is_wrong_and_cuts_long_values() -> None:
    message = refused(lambda: cache(mode="x" * 1000, min_tokens=-3), "mode='xxx", "min_tokens=-3")
    assert len(message) < 500


def test_a_configuration_is_frozen_and_a_copy_is_checked() -> None:
    config = CacheConfig(min_tokens=8)
    with pytest.raises(ValueError, match="frozen"):
        config.min_tokens = 9
    assert config.model_copy(update={"mode": "lookup"}) == CacheConfig(min_tokens=8, mode="lookup")
    assert hash(config) == hash(CacheConfig(min_tokens=8))
    assert CacheConfig.model_validate_json(config.model_dump_json()) == config
    refused(lambda: CacheConfig.model_validate_json('{"mode": "x"}'), "mode='x'")


# ---- CacheConfig: sources ------------------------------------------------------------------------------------------


def test_environment_then_file_then_arguments_in_rising_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_MIN_TOKENS", "1")
    monkeypatch.setenv("SKIPPY_MAX_ENTRIES", "1")
    monkeypatch.setenv("SKIPPY_RAM", "1GiB")
    Path("skippy.toml").write_text('min_tokens = 2\nmax_entries = 2\ndisk = "states"\n')
    config = CacheConfig(min_tokens=3)
    assert (config.ram, config.max_entries, config.min_tokens, config.disk) == (GIB, 2, 3, Path("states"))


def test_every_field_can_be_set_in_the_environment_and_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "mode": "lookup",
        "payload": "full-state",
        "max_entries": 3,
        "max_bytes": "4kB",
        "min_tokens": 5,
        "shared_prefix_stride_tokens": 6,
        "shared_prefix_record_limit": 7,
        "max_resident_tokens": 8,
        "residency": "keep",
        "eviction": "lru",
        "ram": "9MiB",
        "logits_bytes": "1MiB",
        "disk": "states",
        "disk_bytes": "10GB",
        "disk_min_free": "1MB",
    }
    assert list(values) == list(CacheConfig.model_fields)
    wanted = cache(**values)
    Path("skippy.toml").write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()))
    assert CacheConfig() == wanted
    Path("skippy.toml").unlink()
    for name, value in values.items():
        monkeypatch.setenv(f"SKIPPY_{name.upper()}", str(value))
    assert CacheConfig() == wanted


def test_an_empty_variable_is_not_set_and_none_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_MIN_TOKENS", "")
    monkeypatch.setenv("SKIPPY_CONFIG", "")
    monkeypatch.setenv("SKIPPY_MAX_RESIDENT_TOKENS", "12")
    assert CacheConfig().min_tokens == 64
    assert CacheConfig().max_resident_tokens == 12
    Path("skippy.toml").write_text('max_resident_tokens = "none"\n')
    assert CacheConfig().max_resident_tokens is None


def test_the_file_can_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other.toml").write_text("min_tokens = 7\n")
    Path("skippy.toml").write_text("min_tokens = 8\n")
    monkeypatch.setenv("SKIPPY_CONFIG", "other.toml")
    assert CacheConfig().min_tokens == 7
    monkeypatch.setenv("SKIPPY_CONFIG", "nowhere.toml")
    refused(CacheConfig, "SKIPPY_CONFIG='nowhere.toml'", "TOML file")


def test_a_file_that_is_no_toml_is_refused_by_name() -> None:
    Path("skippy.toml").write_text("min_tokens: 7\n")
    refused(CacheConfig, "skippy.toml", "TOML")
    Path("skippy.toml").write_bytes(b"\xff\xfe")
    refused(CacheConfig, "skippy.toml", "TOML")


def test_a_refusal_says_where_the_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_MIN_TOKENS", "few")
    refused(CacheConfig, "min_tokens='few' (from SKIPPY_MIN_TOKENS): ")
    Path("skippy.toml").write_text("min_tokens = -2\n")
    refused(CacheConfig, "min_tokens=-2 (in skippy.toml): ")
    refused(lambda: CacheConfig(min_tokens=-3), "min_tokens=-3: ")


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("max_entrys", "max_entries"),
        ("mod", "mode"),
        ("MIN_TOKENS", "min_tokens"),
        ("disk_byte", "disk_bytes"),
        ("_env_file", ""),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    wrong: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(lambda: cache(**{wrong: 1}), f"unknown key {wrong!r}", f"did you mean '{nearest}")
    refused(lambda: CacheConfig.model_validate({wrong: 1}), f"unknown key {wrong!r}")
    Path("skippy.toml").write_text(f"{wrong} = 1\n")
    refused(CacheConfig, "skippy.toml", f"unknown key {wrong!r}", f"did you mean '{nearest}")
    Path("skippy.toml").unlink()
    if wrong != "MIN_TOKENS":
        monkeypatch.setenv(f"SKIPPY_{wrong.upper()}", "1")
        refused(CacheConfig, "environment", f"SKIPPY_{wrong.upper()}", f"did you mean 'SKIPPY_{nearest.upper()}")


def test_names_that_are_no_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_ANNOTATE", "1")
    monkeypatch.setenv("SKIPPYMODE", "1")
    assert CacheConfig() == CacheConfig(min_tokens=64)


@pytest.mark.parametrize("text", ["disabled", " Disabled\n", "DISABLED"])
def test_the_kill_switch_always_wins(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CacheConfig()
    monkeypatch.setenv("SKIPPY_MODE", text)
    Path("skippy.toml").write_text('mode = "lookup"\n')
    assert CacheConfig().mode == "disabled"
    assert CacheConfig(mode="lookup-record").mode == "disabled"
    assert CacheConfig.model_validate({"mode": "record"}).mode == "disabled"
    assert before.model_copy(update={"mode": "record"}).mode == "disabled"
    assert stage(kv_cache={"mode": "record"}).kv_cache.mode == "disabled"


def test_a_mistyped_kill_switch_is_never_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_MODE", "disable")
    refused(lambda: CacheConfig(mode="lookup"), "SKIPPY_MODE='disable'", "'disabled'")


def test_another_mode_of_the_environment_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_MODE", "lookup")
    assert CacheConfig().mode == "lookup"
    assert CacheConfig(mode="record").mode == "record"


# ---- StageConfig ---------------------------------------------------------------------------------------------------


def test_only_model_and_context_must_be_given() -> None:
    refused(StageConfig, "StageConfig.model_id is missing", "StageConfig.ctx_size is missing")
    config = StageConfig(model_id="m", ctx_size=512)
    assert config.kv_cache == CacheConfig()
    assert config.rope == RopeConfig()
    assert config.adapters == ()
    assert (config.cache_type_k, config.cache_type_v, config.flash_attn_type) == ("f16", "f16", "auto")
    assert (config.lane_count, config.n_batch, config.n_ubatch, config.n_gpu_layers) == (4, 512, 512, 0)
    assert (config.kv_unified, config.swa_full, config.attn_rot_disabled) == (True, None, False)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"ctx_size": 0}, ("StageConfig.ctx_size=0", "greater than or equal to 1")),
        ({"ctx_size": "big"}, ("ctx_size='big'",)),
        ({"model_id": ""}, ("model_id=''", "at least 1")),
        ({"manifest_sha256": ""}, ("manifest_sha256=''",)),
        ({"lane_count": -1}, ("lane_count=-1",)),
        ({"lane_count": 128}, ("lane_count=128", "less than 128")),
        ({"n_batch": 0}, ("n_batch=0",)),
        ({"n_gpu_layers": -2}, ("n_gpu_layers=-2", "-1")),
        ({"cache_type_k": "q9_0"}, ("cache_type_k='q9_0'", "'q8_0'")),
        ({"flash_attn_type": "maybe"}, ("flash_attn_type='maybe'", "'auto', 'on' or 'off'")),
        ({"flash_attn_type": None}, ("flash_attn_type=None", "'auto', 'on' or 'off'")),
        ({"layer_start": 4, "layer_end": 3}, ("layer_end=3", "layer_start, 4")),
        ({"min_tokens": 4}, ("unknown key 'min_tokens'", "did you mean")),
        ({"flash_attn": "on"}, ("unknown key 'flash_attn'", "did you mean 'flash_attn_type'")),
        ({"rope": {"freq_bas": 1.0}}, ("StageConfig.rope", "unknown key 'freq_bas'", "'freq_base'")),
        ({"rope": {"freq_base": float("nan")}}, ("freq_base=nan", "finite")),
        ({"adapters": [{"digest": "a", "scale": "x"}]}, ("StageConfig.adapters[0]", "scale='x'")),
        ({"adapters": [{"scale": 1.0}]}, ("StageConfig.adapters[0]", "digest is missing")),
        ({"kv_cache": {"mode": "x"}}, ("StageConfig.kv_cache", "mode='x'", "'disabled'")),
        ({"kv_cache": {"min_tokens": 4097}}, ("min_tokens=4097", "ctx_size, 4096")),
    ],
)
def test_a_wrong_stage_is_refused_by_name(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    refused(lambda: stage(**values), *parts)


def test_min_tokens_may_be_the_whole_context() -> None:
    assert stage(kv_cache=CacheConfig(min_tokens=4096)).kv_cache.min_tokens == 4096


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("auto", "auto"),
        (-1, "auto"),
        ("on", "on"),
        (True, "on"),
        (1, "on"),
        ("Enabled", "on"),
        ("off", "off"),
        (False, "off"),
        (0, "off"),
        ("disabled", "off"),
    ],
)
def test_flash_attention_in_llama_cpps_words(given: Any, kept: str) -> None:
    assert stage(flash_attn_type=given).flash_attn_type == kept


def test_stage_values_are_brought_into_one_form() -> None:
    config = stage(cache_type_k="Q8_0", model_path=Path("models/m.gguf"), adapters=[{"digest": "a", "scale": 1}])
    assert config.cache_type_k == "q8_0"
    assert config.model_path == str(Path("models/m.gguf"))
    assert config.adapters == (Adapter(digest="a", scale=1.0),)
    assert config == stage(**config.model_dump(exclude={"model_id", "ctx_size"}))
    assert hash(config) == hash(config.model_copy())


@pytest.mark.parametrize(
    ("text", "disabled"), [(None, False), ("", False), ("0", False), ("1", True), (" 2", True), ("yes", False)]
)
def test_the_rotation_switch_is_read_as_llama_cpp_reads_it(
    text: str | None, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", text)
    assert stage().attn_rot_disabled is disabled
    assert stage(attn_rot_disabled=True).attn_rot_disabled is True


# ---- residents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ctx_size", "cells"),
    [(0, 0), (768, 0), (4096, 0), (8191, 0), (8192, 4096), (16384, 8192), (131072, 65536)],
)
def test_derived_cap_of_resident_tokens(ctx_size: int, cells: int) -> None:
    assert derive_max_resident_tokens(ctx_size) == cells


def test_a_negative_context_is_refused() -> None:
    refused(lambda: derive_max_resident_tokens(-1), "ctx_size=-1", "from 0")


@pytest.mark.parametrize(("lanes", "reserved"), [(0, 2), (1, 2), (2, 4), (4, 8), (127, 254)])
def test_reserved_sequence_ids(lanes: int, reserved: int) -> None:
    resident = ResidentCacheConfig.from_stage(stage(lane_count=lanes), CacheConfig())
    assert resident.reserved_seq_count == reserved


def test_residents_take_their_caps_from_stage_and_cache() -> None:
    given = CacheConfig(max_entries=7, max_bytes="1kB", min_tokens=5)
    assert ResidentCacheConfig.from_stage(stage(ctx_size=16384), given) == ResidentCacheConfig(
        max_entries=7, max_bytes=1000, min_tokens=5, reserved_seq_count=8, max_resident_tokens=8192
    )


@pytest.mark.parametrize(("given", "kept"), [(None, 8192), (0, 0), (100, 100)])
def test_a_given_cap_of_resident_tokens_is_kept(given: int | None, kept: int) -> None:
    resident = ResidentCacheConfig.from_stage(stage(ctx_size=16384), CacheConfig(max_resident_tokens=given))
    assert resident.max_resident_tokens == kept


@given(st.integers(0, 127), st.integers(0, 2000))
def test_entries_and_lanes_fit_into_the_sequence_ids_that_exist(lanes: int, entries: int) -> None:
    resident = ResidentCacheConfig.from_stage(stage(lane_count=lanes), CacheConfig(max_entries=entries))
    assert 1 <= resident.max_entries <= min(max(1, entries), 512)
    assert resident.max_entries + resident.reserved_seq_count <= 256


def test_min_tokens_above_the_context_of_another_stage() -> None:
    refused(
        lambda: ResidentCacheConfig.from_stage(stage(ctx_size=512), CacheConfig(min_tokens=600)),
        "min_tokens=600",
        "ctx_size, 512",
    )


# ---- candidates ----------------------------------------------------------------------------------------------------


def policy(min_tokens: int, stride: int, limit: int) -> PrefixCandidatePolicy:
    return PrefixCandidatePolicy(min_tokens, stride, limit, max(1, min_tokens))


@pytest.mark.parametrize(
    ("values", "count", "candidates", "recorded"),
    [
        ((64, 32, 2), 0, [], []),
        ((64, 32, 2), 160, [160, 128, 96, 64], [160, 128]),
        ((64, 32, 2), 63, [63], [63]),
        ((64, 32, 2), 64, [64], [64]),
        ((64, 32, 2), 65, [65, 64], [65, 64]),
        ((64, 32, 0), 160, [160, 128, 96, 64], [160, 128, 96, 64]),
        ((64, 32, 1), 160, [160, 128, 96, 64], [160]),
        ((300, 128, 2), 350, [350, 300], [350, 300]),
        ((0, 128, 2), 350, [350], [350]),
        ((2, 0, 2), 5, [5, 4, 3, 2], [5, 4]),
        ((2, 64, 3), 7, [7, 6, 4, 2], [7, 6, 4]),
    ],
)
def test_candidates(values: tuple[int, int, int], count: int, candidates: list[int], recorded: list[int]) -> None:
    assert policy(*values).candidate_token_counts(count) == candidates
    assert policy(*values).record_candidate_token_counts(count) == recorded


def test_what_a_longer_prompt_looks_up_was_recorded_by_the_shorter_one() -> None:
    found = policy(256, 128, 2)
    assert found.record_candidate_token_counts(2214) == [2214, 2176]
    assert 2176 in found.candidate_token_counts(2231)


@pytest.mark.parametrize(("min_tokens", "page"), [(0, 1), (1, 1), (256, 256)])
def test_a_policy_of_the_cache(min_tokens: int, page: int) -> None:
    given = CacheConfig(min_tokens=min_tokens, shared_prefix_stride_tokens=32, shared_prefix_record_limit=3)
    assert PrefixCandidatePolicy.from_cache(given) == PrefixCandidatePolicy(
        min_tokens=min_tokens, stride_tokens=32, record_limit=3, page_size_tokens=page
    )


def test_negative_numbers_of_a_policy_are_refused_by_name() -> None:
    refused(lambda: PrefixCandidatePolicy(-1, 1, 1, 1), "min_tokens=-1")
    refused(lambda: PrefixCandidatePolicy(1, 1, -2, 1), "record_limit=-2")
    refused(lambda: policy(1, 1, 1).candidate_token_counts(-1), "token_count=-1")
    refused(lambda: policy(1, 1, 1).record_candidate_token_counts(-1), "token_count=-1")


@given(
    st.builds(PrefixCandidatePolicy, *(st.integers(0, most) for most in (400, 200, 5, 400))),
    st.integers(0, 3000),
)
def test_candidates_fall_from_the_whole_prompt_to_the_minimum(found: PrefixCandidatePolicy, count: int) -> None:
    candidates = found.candidate_token_counts(count)
    recorded = found.record_candidate_token_counts(count)
    assert candidates == sorted(set(candidates), reverse=True)
    assert all(0 < length <= count for length in candidates)
    assert recorded == candidates[: len(recorded)]
    assert len(recorded) == (min(found.record_limit, len(candidates)) if found.record_limit else len(candidates))
    if count:
        assert candidates[0] == count
    if 0 < found.min_tokens < count:
        step = min(max(1, found.stride_tokens), max(1, found.page_size_tokens))
        assert candidates[-1] == found.min_tokens
        assert set(candidates) == {
            count,
            found.min_tokens,
            *(length for length in range(found.min_tokens, count) if length % step == 0),
        }
    elif count:
        assert candidates == [count]


# ---- the documentation ---------------------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    section = DOC.read_text(encoding="utf-8").split(f"\n## {heading}")[1].split("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def test_the_documented_knobs_and_defaults_are_those_of_the_code() -> None:
    table = rows("The knobs")
    assert [row[0] for row in table] == list(CacheConfig.model_fields)
    for name, default, _, variable, meaning in table:
        assert variable == f"SKIPPY_{name.upper()}"
        assert meaning
        value = {"None": None}.get(default, default.strip('"'))
        assert getattr(cache(**{name: value}), name) == getattr(CacheConfig(), name)
        assert default.startswith('"') or default == "None" or default.isdigit()


def test_the_documented_example_works() -> None:
    example = re.search(r"```toml\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert example
    Path("skippy.toml").write_text(example[1])
    assert CacheConfig() == CacheConfig(
        min_tokens=128, ram="1.5 GiB", max_resident_tokens=4096, disk="~/.cache/skippy", disk_bytes="20GiB"
    )


def test_every_field_of_the_stage_is_documented_in_or_out_of_the_namespace() -> None:
    from skippy.identity import NAMESPACE_FIELDS, WEIGHTS_FIELDS

    documented = {name: row[1] for row in rows("Who may share") for name in row[0].split(", ")}
    assert set(documented) == set(StageConfig.model_fields)
    assert {name for name in documented if documented[name].startswith("yes")} == {
        *NAMESPACE_FIELDS,
        *WEIGHTS_FIELDS[:2],
    }
    assert {name for name in documented if documented[name].startswith("without")} == set(WEIGHTS_FIELDS[2:])


@pytest.mark.parametrize("model", [CacheConfig, StageConfig, RopeConfig, Adapter])
def test_settings_are_frozen_and_take_no_unknown_keys(model: type[BaseModel]) -> None:
    assert model.model_config["frozen"] is True
    assert model.model_config["extra"] == "forbid"
    refused(lambda: model(nothing_like_it=1), "unknown key 'nothing_like_it'")
