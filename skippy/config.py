"""What can be set: how much is kept and where (`CacheConfig`), and which model it is kept for (`StageConfig`).

docs/configuration.md is the table of all of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from typing_extensions import Self, Unpack

from skippy.errors import ConfigError
from skippy.policy import PrefixCandidatePolicy, derive_max_resident_tokens
from skippy.settings import Count, Settings, Text, Whole, refuse_unknown
from skippy.sizes import available_memory, parse_size

__all__ = [
    "Adapter",
    "CacheArguments",
    "CacheConfig",
    "PrefixCandidatePolicy",
    "ResidentCacheConfig",
    "RopeConfig",
    "StageConfig",
    "derive_max_resident_tokens",
]

Mode = Literal["lookup-record", "lookup", "record", "disabled"]
Payload = Literal["auto", "resident-kv", "kv-recurrent", "full-state"]
Residency = Literal["auto", "keep"]
Eviction = Literal["worth", "lru"]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]

MAX_ENTRIES = 512
SEQUENCE_IDS = 256
"""llama.cpp's LLAMA_MAX_SEQ: more sequence ids than this do not exist in one context."""

RAM_SHARE = 10
RAM_MOST = 2 * 2**30
RAM_UNKNOWN = 512 * 2**20
"""What `ram = "auto"` means where the system does not say how much memory is available."""

_PREFIX = "SKIPPY_"
_FILE = "skippy.toml"
_NOT_SETTINGS = frozenset({"SKIPPY_CONFIG", "SKIPPY_ANNOTATE"})  # the file's path; setup.py: annotate the Cython parts


def _none_text(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


def _folder(value: object) -> object:
    value = _none_text(value)
    if isinstance(value, str) and not value.strip():
        raise ValueError("expected the path of a folder, or None for no disk tier")
    return Path(value).expanduser() if isinstance(value, (str, Path)) else value


def _ram(value: object) -> object:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"expected 'auto' or a size; for a size: {error}") from None


def _clamp_entries(value: int) -> int:
    return min(max(value, 1), MAX_ENTRIES)


Size = Annotated[int, BeforeValidator(parse_size)]


class CacheArguments(TypedDict, total=False):
    """The types that `CacheConfig` accepts; each field is described there."""

    mode: Mode
    payload: Payload
    max_entries: int
    max_bytes: int | str
    min_tokens: int
    shared_prefix_stride_tokens: int
    shared_prefix_record_limit: int
    max_resident_tokens: int | None
    residency: Residency
    eviction: Eviction
    ram: int | str
    logits_bytes: int | str
    disk: str | os.PathLike[str] | None
    disk_bytes: int | str
    disk_min_free: int | str


class CacheConfig(Settings, BaseSettings):
    """How much is kept, and where: from the environment (`SKIPPY_*`), skippy.toml and arguments, in rising precedence.

    `SKIPPY_MODE=disabled` wins over all of them.  Sizes are bytes, or text such as "2GiB".  Raises ConfigError.

    >>> CacheConfig(ram="1.5 GiB", max_entries=9000).ram, CacheConfig(max_entries=9000).max_entries
    (1610612736, 512)
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_ignore_empty=True)

    mode: Mode = Field(default="lookup-record", description="what the cache does; 'disabled' is the kill switch")
    payload: Payload = Field(
        default="auto", description="what is kept for a path; 'auto' decides from the loaded model"
    )
    max_entries: Annotated[Count, AfterValidator(_clamp_entries)] = Field(
        default=64, description="entries, clamped to 1..512"
    )
    max_bytes: Size = Field(default=0, description="cap of saved-state bytes per context; 0: `ram` alone decides")
    min_tokens: Count = Field(default=64, description="shorter prefixes are neither stored nor restored")
    shared_prefix_stride_tokens: Count = Field(default=128, description="the grid of candidate lengths")
    shared_prefix_record_limit: Count = Field(default=2, description="how many candidate lengths are recorded; 0: all")
    max_resident_tokens: Annotated[Count | None, BeforeValidator(_none_text)] = Field(
        default=None, description="cells that residents may keep; None: derived from the context size; 0: no cap"
    )
    residency: Residency = Field(
        default="auto", description="'auto': cells stay in the pool where that costs less than RAM; 'keep': always"
    )
    eviction: Eviction = Field(
        default="worth",
        description="what leaves first: 'worth': what is least expected, cheapest to bring back; 'lru': least recent",
    )
    ram: Annotated[int | Literal["auto"], BeforeValidator(_ram)] = Field(
        default="auto", description="bytes for saved state; 'auto': a tenth of the available memory, at most 2 GiB"
    )
    logits_bytes: Size = Field(
        default=512 * 2**10, description="keep the logits after a whole prompt if they take no more than this; 0: never"
    )
    disk: Annotated[Path | None, BeforeValidator(_folder)] = Field(default=None, description="folder of the disk tier")
    disk_bytes: Size = Field(default=8 * 2**30, description="cap of the bytes in that folder")
    disk_min_free: Size = Field(
        default=2**30, description="bytes to leave free on its file system, below it is only read"
    )

    def __init__(self, **values: Unpack[CacheArguments]) -> None:
        _check_environment(type(self))
        super().__init__(**values)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Where values come from, highest precedence first.  Called by pydantic-settings."""
        return init_settings, InitSettingsSource(settings_cls, _read_file(settings_cls)), env_settings

    @model_validator(mode="before")
    @classmethod
    def _kill_switch(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "mode": "disabled"} if _killed() else values

    @classmethod
    def _origin(cls, values: dict[str, Any]) -> Callable[[str], str]:
        def origin(field: str) -> str:
            if field in values:
                return ""
            in_file = field in _read_file(cls)
            return f" (in {_file_path()})" if in_file else f" (from {_PREFIX}{field.upper()})"

        return origin

    def ram_bytes(self, available: int | None = None) -> int:
        """Bytes of RAM for saved state: `ram`, or a tenth of `available` bytes of memory, at most 2 GiB.  O(1).

        Where neither the caller nor the system says what is available, "auto" is 512 MiB.  Ask once and keep the
        answer: what is available changes.

        >>> CacheConfig(ram="auto").ram_bytes(available=8 * 2**30) == 8 * 2**30 // 10
        True
        """
        if self.ram != "auto":
            return self.ram
        if available is None:
            available = available_memory()
        return RAM_UNKNOWN if available is None else min(available // RAM_SHARE, RAM_MOST)

    def saved_bytes_cap(self, available: int | None = None) -> int:
        """Bytes of saved state that one context may keep in RAM: the lower of `max_bytes` and `ram_bytes`.  O(1)."""
        ram = self.ram_bytes(available)
        return min(self.max_bytes, ram) if self.max_bytes else ram


def _environment() -> dict[str, str]:
    """The environment's settings by field name; as for pydantic, case does not matter and empty is not set."""
    names = {name: name.upper() for name in os.environ}
    return {
        upper.removeprefix(_PREFIX).lower(): os.environ[name]
        for name, upper in names.items()
        if upper.startswith(_PREFIX) and upper not in _NOT_SETTINGS and os.environ.get(name)
    }


def _check_environment(cls: type[CacheConfig]) -> None:
    given = _environment()
    names = (f"{_PREFIX}{field.upper()}" for field in given)
    refuse_unknown("environment", names, [f"{_PREFIX}{field.upper()}" for field in cls.model_fields])
    # A mistyped kill switch must not go unnoticed because a file or an argument says something else.
    modes = get_args(Mode)
    if "mode" in given and given["mode"] not in modes and not _killed():
        raise ConfigError(f"{_PREFIX}MODE={given['mode']!r}: expected one of {', '.join(map(repr, modes))}")


def _killed() -> bool:
    return _environment().get("mode", "").strip().lower() == "disabled"


def _file_path() -> Path | None:
    named = os.environ.get("SKIPPY_CONFIG")
    if named:
        return Path(named).expanduser()
    return Path(_FILE) if Path(_FILE).is_file() else None


def _read_file(cls: type[BaseSettings]) -> dict[str, Any]:
    path = _file_path()
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigError(f"SKIPPY_CONFIG={str(path)!r}: expected the path of a TOML file, there is none")
    try:
        values = TomlConfigSettingsSource(cls, path).toml_data
    except (OSError, ValueError) as error:  # not readable; not TOML, not UTF-8
        raise ConfigError(f"{path}: expected a TOML file: {error}") from error
    refuse_unknown(str(path), values, cls.model_fields)
    return values


def _rotation_disabled() -> bool:
    """What llama.cpp makes of LLAMA_ATTN_ROT_DISABLE: C's atoi, and anything but 0 disables."""
    found = re.match(r"\s*([+-]?\d+)", os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""), re.ASCII)
    return found is not None and int(found[1]) != 0


def _flash_attention(value: object) -> object:
    """llama.cpp's own words and numbers, and Python's, for the three that are kept."""
    if isinstance(value, (int, str)):
        name = str(value).strip().lower()
        words = {"-1": "auto", "0": "off", "1": "on", "enabled": "on", "disabled": "off", "true": "on", "false": "off"}
        return words.get(name, name)
    return value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _path_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Kv = Annotated[KvType, BeforeValidator(_lower)]


class RopeConfig(Settings):
    """Where the model's rotary positions were overridden; None: as the model file says.  Raises ConfigError."""

    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: Count | None = None


class Adapter(Settings):
    """A LoRA adapter: a digest of its bytes (not its name: files are replaced) and its scale.  Raises ConfigError."""

    digest: Text
    scale: float = 1.0


class StageConfig(Settings):
    """What identifies the loaded model and the layout of its KV; tokens for sizes, None for "not known".

    Only `model_id` and `ctx_size` must be given.  docs/configuration.md says which fields are part of the namespace
    (`skippy.identity.NAMESPACE_FIELDS`).  Raises ConfigError.
    """

    run_id: str = ""
    topology_id: str = ""
    stage_id: str = ""
    stage_index: Count = 0
    layer_start: Count = 0
    layer_end: Count | None = Field(default=None, description="one past the last layer; None: all of them")
    model_id: Text
    model_path: Annotated[Text | None, BeforeValidator(_path_text)] = None
    package_ref: str | None = None
    manifest_sha256: Text | None = None
    source_model_sha256: Text | None = None
    ctx_size: Annotated[Whole, Field(ge=1)]
    lane_count: Annotated[Count, Field(lt=SEQUENCE_IDS // 2)] = 4
    n_batch: Annotated[Whole, Field(ge=1)] = 512
    n_ubatch: Annotated[Whole, Field(ge=1)] = 512
    n_gpu_layers: Annotated[Whole, Field(ge=-1)] = Field(default=0, description="-1: all of them")
    cache_type_k: Kv = "f16"
    cache_type_v: Kv = "f16"
    flash_attn_type: Annotated[Literal["auto", "on", "off"], BeforeValidator(_flash_attention)] = Field(
        default="auto", description="what was decided, where it is known: 'auto' shares with neither 'on' nor 'off'"
    )
    kv_unified: bool = True
    swa_full: bool | None = None
    selected_device: str | None = None
    rope: RopeConfig = RopeConfig()
    adapters: tuple[Adapter, ...] = Field(default=(), description="in the order in which they are applied")
    control_vector: Text | None = Field(
        default=None, description="digest of the active control vector: data, layers, strength"
    )
    attn_rot_disabled: bool = Field(
        default_factory=_rotation_disabled,
        description="whether llama.cpp does not rotate a quantised KV; by default what LLAMA_ATTN_ROT_DISABLE says now",
    )
    llama_build: Text | None = Field(default=None, description="which llama.cpp wrote the state: version, commit")
    kv_cache: CacheConfig = Field(default_factory=CacheConfig)

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.layer_end is not None and self.layer_end < self.layer_start:
            raise ConfigError(f"layer_end={self.layer_end}: expected at least layer_start, {self.layer_start}")
        if self.kv_cache.mode != "disabled":
            _check_min_tokens(self.kv_cache.min_tokens, self.ctx_size)
        return self


def _check_min_tokens(min_tokens: int, ctx_size: int) -> None:
    if min_tokens > ctx_size:
        raise ConfigError(f"min_tokens={min_tokens}: expected at most ctx_size, {ctx_size}: nothing could be kept")


@dataclass(frozen=True, kw_only=True)
class ResidentCacheConfig:
    """The caps of the live pool: entries and sequence ids, bytes (0: no cap of its own), cells (0: no cap)."""

    max_entries: int
    max_bytes: int
    min_tokens: int
    reserved_seq_count: int
    max_resident_tokens: int

    @classmethod
    def from_stage(cls, stage: StageConfig, cache: CacheConfig) -> ResidentCacheConfig:
        """The caps for this model and these settings; entries fit into the sequence ids that lanes leave.  O(1).

        Raises ConfigError where `min_tokens` is above the context.

        >>> stage = StageConfig(model_id="m", ctx_size=16384, lane_count=4)
        >>> ResidentCacheConfig.from_stage(stage, CacheConfig()).max_resident_tokens
        8192
        """
        if cache.mode != "disabled":
            _check_min_tokens(cache.min_tokens, stage.ctx_size)
        reserved = max(2, 2 * stage.lane_count)
        resident = cache.max_resident_tokens
        return cls(
            max_entries=min(cache.max_entries, SEQUENCE_IDS - reserved),
            max_bytes=cache.max_bytes,
            min_tokens=cache.min_tokens,
            reserved_seq_count=reserved,
            max_resident_tokens=derive_max_resident_tokens(stage.ctx_size) if resident is None else resident,
        )
