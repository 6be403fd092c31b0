"""Who may share state with whom: hashes of everything that decides the bytes of the KV, and of the tokens.

The hash is BLAKE3 over `FORMAT` and then one frame per field: length and text of its name, a byte for the kind of its
value (so that an absent value is none of the present ones), length and bytes of the value.  No two different sets of
fields give the same bytes.  Tokens are little-endian int32 on every machine.  A change to any of this changes `FORMAT`.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import BaseModel
from typing_extensions import Buffer

from skippy.config import PrefixCandidatePolicy, StageConfig
from skippy.errors import ConfigError

__all__ = [
    "FORMAT",
    "NAMESPACE_FIELDS",
    "WEIGHTS_FIELDS",
    "KvIdentity",
    "MessageBase",
    "PageIdentity",
    "PrefillKvIdentity",
    "PrefixIdentity",
    "Tokens",
    "prefix_identity_with_namespace",
    "prefix_namespace_hash",
]

FORMAT = "skippy-identity-1"
"""The version of the format; part of every hash."""

NAMESPACE_FIELDS = (
    "cache_type_k",
    "cache_type_v",
    "flash_attn_type",
    "n_gpu_layers",
    "selected_device",
    "kv_unified",
    "swa_full",
    "stage_index",
    "layer_start",
    "layer_end",
    "ctx_size",
    "rope",
    "adapters",
    "control_vector",
    "attn_rot_disabled",
    "llama_build",
)
"""The fields of StageConfig that are always part of the namespace."""

WEIGHTS_FIELDS = ("manifest_sha256", "source_model_sha256", "model_path", "package_ref", "model_id")
"""Those that name the weights: the two digests; without them the path; without that, reference and model id."""

Kind = Literal["dense", "recurrent"]
Tokens = Sequence[int] | NDArray[np.integer] | Buffer
"""Token ids: any sequence of ints, or a buffer of integers of one dimension (int32 is fastest)."""


@dataclass(frozen=True, kw_only=True)
class MessageBase:
    """The request's side of an identity: who asks, and for whom.

    Only `chat_template_id` and `namespace` (the caller's own partition, a tenant for example) decide what is shared.
    """

    run_id: str = ""
    request_id: str = ""
    session_id: str = ""
    stage_id: str = ""
    stage_index: int = 0
    topology_id: str = ""
    model_id: str = ""
    tokenizer_id: str | None = None
    chat_template_id: str | None = None
    namespace: str | None = None
    seq: int = 0


@dataclass(frozen=True, kw_only=True)
class PageIdentity:
    """What one page of saved state is: of which model, stage, request and tokens, in which form."""

    model_id: str
    model_revision: str
    runtime_abi_version: str
    topology_id: str
    stage_id: str
    stage_index: int
    layer_start: int
    layer_end: int | None
    prefix_hash: str
    session_id: str
    token_start: int
    token_count: int
    generation: int
    layout: Kind
    codec: str
    tokenizer_id: str
    chat_template_id: str
    position_config_hash: str
    kv_dtype: str


@dataclass(frozen=True, kw_only=True)
class PrefixIdentity:
    """The hashes of one prefix: 64 hex digits each.  `page_id` covers namespace, token_start and tokens."""

    namespace: str
    prefix_hash: str
    page_id: str
    token_start: int
    token_count: int


@dataclass(frozen=True, kw_only=True)
class PrefillKvIdentity:
    """A page, the id under which it is stored, its namespace, and its tokens (int32, 1-d, read-only).

    The pages of one call share one token buffer.  Equality does not read it: `page_id` covers it.
    """

    identity: PageIdentity
    page_id: str
    namespace: str
    token_ids: NDArray[np.int32] = field(compare=False, repr=False)


def prefix_namespace_hash(
    config: StageConfig, token_start: int, chat_template_id: str | None = None, namespace: str | None = None
) -> str:
    """Hash of everything but the tokens that decides the bytes of the KV: 64 hex digits.  O(1).

    Without a digest of the weights the model's files are looked at (size, time of change) at each call; `KvIdentity`
    looks once.  Raises ConfigError for a negative `token_start`.
    """
    return _namespace(_stage_hasher(config), token_start, chat_template_id, namespace)


def prefix_identity_with_namespace(
    config: StageConfig,
    token_start: int,
    token_ids: Tokens,
    chat_template_id: str | None = None,
    namespace: str | None = None,
) -> PrefixIdentity:
    """The hashes of these tokens at `token_start`, under their namespace.  O(tokens).

    Raises ConfigError for a negative `token_start` and for tokens that are not int32.
    """
    tokens = _as_tokens(token_ids)
    space = prefix_namespace_hash(config, token_start, chat_template_id, namespace)
    return next(_prefixes(space, token_start, tokens, [tokens.size]))


class KvIdentity:
    """Identities of one loaded model's state.  `kind` says whether it can be sliced ("dense") or not ("recurrent").

    Make it when the model is loaded: without a digest of the weights the model's files are looked at here, once, so
    that a file that is replaced later does not lend its name to state of the weights that are in memory.

    Raises ConfigError for an unknown kind.  May be used from several threads.

    >>> from skippy.config import CacheConfig, StageConfig
    >>> cache = CacheConfig(min_tokens=256, shared_prefix_stride_tokens=128)
    >>> identity = KvIdentity(StageConfig(model_id="m", ctx_size=4096, kv_cache=cache), "dense")
    >>> [page.identity.token_count for page in identity.activation_record_identities(MessageBase(), 0, range(2214))]
    [2214, 2176]
    """

    def __init__(self, config: StageConfig, kind: Kind) -> None:
        if kind not in get_args(Kind):
            raise ConfigError(f"kind={kind!r}: expected one of {', '.join(map(repr, get_args(Kind)))}")
        self.config = config
        self.kind = kind
        self.policy = PrefixCandidatePolicy.from_cache(config.kv_cache)
        self._stage = _stage_hasher(config)

    def namespace(self, base: MessageBase, token_start: int = 0) -> str:
        """The namespace of this request: 64 hex digits.  O(1).  Raises ConfigError for a negative start."""
        return _namespace(self._stage, token_start, base.chat_template_id, base.namespace)

    def prefill_identity(self, base: MessageBase, token_start: int, token_ids: Tokens) -> PrefillKvIdentity:
        """The identity of all of these tokens.  O(tokens).

        This and every method below raise ConfigError for a negative `token_start` and tokens that are not int32.
        """
        tokens = _as_tokens(token_ids)
        return self._identities(base, token_start, tokens, [tokens.size])[0]

    def lookup_identities(self, base: MessageBase, token_start: int, token_ids: Tokens) -> list[PrefillKvIdentity]:
        """What to look for where there is a tree: the full path, nothing for no tokens.  O(tokens)."""
        tokens = _as_tokens(token_ids)
        return self._identities(base, token_start, tokens, [tokens.size] if tokens.size else [])

    def record_identities(self, base: MessageBase, token_start: int, token_ids: Tokens) -> list[PrefillKvIdentity]:
        """What to record where there is a tree: the full path, nothing for no tokens.  O(tokens)."""
        return self.lookup_identities(base, token_start, token_ids)

    def activation_lookup_identities(
        self, base: MessageBase, token_start: int, token_ids: Tokens
    ) -> list[PrefillKvIdentity]:
        """What to ask a store that has no tree: one identity per candidate length, longest first.  O(tokens)."""
        tokens = _as_tokens(token_ids)
        return self._identities(base, token_start, tokens, self.policy.candidate_token_counts(tokens.size))

    def activation_record_identities(
        self, base: MessageBase, token_start: int, token_ids: Tokens
    ) -> list[PrefillKvIdentity]:
        """What to put into a store that has no tree: the first of the candidates, longest first.  O(tokens)."""
        tokens = _as_tokens(token_ids)
        return self._identities(base, token_start, tokens, self.policy.record_candidate_token_counts(tokens.size))

    def exact_shared_checkpoint_token_count(self, token_count: int) -> int | None:
        """Where to put the checkpoint that prompts with another tail can share, or None: no place for it.  O(1).

        One stride below the last multiple of the stride, at least `min_tokens`.
        """
        return self.policy.shared_checkpoint(token_count)

    def exact_shared_checkpoint_identity(
        self, base: MessageBase, token_start: int, token_ids: Tokens
    ) -> PrefillKvIdentity | None:
        """The identity of that checkpoint, or None where there is no place for one.  O(tokens)."""
        tokens = _as_tokens(token_ids)
        shared = self.exact_shared_checkpoint_token_count(tokens.size)
        return None if shared is None else self._identities(base, token_start, tokens, [shared])[0]

    def exact_state_record_token_count_allowed(self, prompt_tokens: int, candidate_tokens: int) -> bool:
        """Whether state of this length is recorded: the shared checkpoint's, else the whole prompt's.  O(1)."""
        shared = self.exact_shared_checkpoint_token_count(prompt_tokens)
        return candidate_tokens > 0 and candidate_tokens == (prompt_tokens if shared is None else shared)

    def _identities(
        self, base: MessageBase, token_start: int, tokens: NDArray[np.int32], counts: Sequence[int]
    ) -> list[PrefillKvIdentity]:
        """One identity per count; counts fall."""
        space = self.namespace(base, token_start)
        found = [
            PrefillKvIdentity(
                identity=self._page(base, prefix),
                page_id=prefix.page_id,
                namespace=space,
                token_ids=tokens[: prefix.token_count],
            )
            for prefix in _prefixes(space, token_start, tokens, counts[::-1])
        ]
        return found[::-1]

    def _page(self, base: MessageBase, prefix: PrefixIdentity) -> PageIdentity:
        config = self.config
        k, v = config.cache_type_k, config.cache_type_v
        return PageIdentity(
            model_id=config.model_id,
            model_revision=config.source_model_sha256 or config.manifest_sha256 or config.package_ref or "",
            runtime_abi_version=config.llama_build or "",
            topology_id=config.topology_id,
            stage_id=config.stage_id,
            stage_index=config.stage_index,
            layer_start=config.layer_start,
            layer_end=config.layer_end,
            prefix_hash=prefix.prefix_hash,
            session_id=base.session_id,
            token_start=prefix.token_start,
            token_count=prefix.token_count,
            generation=0,  # a page is named by its contents: there is no second edition of it
            layout=self.kind,
            codec="raw",
            tokenizer_id=base.tokenizer_id or config.model_id,
            chat_template_id=base.chat_template_id or "",
            position_config_hash=f"ctx:{config.ctx_size}",
            kv_dtype=k if k == v else f"{k}/{v}",
        )


def _as_tokens(token_ids: Tokens) -> NDArray[np.int32]:
    """A copy as little-endian int32, so that what the caller does to the buffer later changes no identity."""
    try:
        raw = np.asarray(token_ids)
    except ValueError:  # lists of different lengths
        raw = np.empty((0, 0))
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise ConfigError(f"token_ids={token_ids!r:.120}: expected whole numbers in one dimension")
    limits = np.iinfo(np.int32)
    if raw.size and raw.dtype != np.int32 and not limits.min <= raw.min() <= raw.max() <= limits.max:
        wrong = raw.min() if raw.min() < limits.min else raw.max()
        raise ConfigError(f"token_ids: {wrong} is no token, expected int32")
    tokens = raw.astype("<i4", copy=True)
    tokens.flags.writeable = False
    return tokens


def _prefixes(
    space: str, token_start: int, tokens: NDArray[np.int32], counts: Sequence[int]
) -> Iterator[PrefixIdentity]:
    """The hashes of the first `count` tokens for each of the rising counts, in one pass over the tokens.

    The tokens come last and their number after them, so that what was hashed for one length is used for the next.
    """
    running = _hasher("prefix", ("namespace", space), ("token_start", token_start))
    done = 0
    for count in counts:
        running.update(tokens[done:count].view(np.uint8).data)
        done = count
        ended = running.copy()
        ended.update(struct.pack("<Q", count))
        prefix_hash = ended.hexdigest()
        page = _hasher(
            "page",
            ("namespace", space),
            ("token_start", token_start),
            ("token_count", count),
            ("prefix_hash", prefix_hash),
        )
        yield PrefixIdentity(
            namespace=space,
            prefix_hash=prefix_hash,
            page_id=page.hexdigest(),
            token_start=token_start,
            token_count=count,
        )


def _namespace(stage: blake3, token_start: int, chat_template_id: str | None, namespace: str | None) -> str:
    if token_start < 0:
        raise ConfigError(f"token_start={token_start!r}: expected a position from 0")
    hasher = stage.copy()
    for name, value in (
        ("token_start", token_start),
        ("chat_template_id", chat_template_id),
        ("namespace", namespace),
    ):
        hasher.update(_frame(name, value))
    return hasher.hexdigest()


def _stage_hasher(config: StageConfig) -> blake3:
    return _hasher(
        "namespace",
        *_weights(config),
        *((name, getattr(config, name)) for name in NAMESPACE_FIELDS),
        ("machine", platform.machine()),
        ("byte_order", sys.byteorder),
    )


def _weights(config: StageConfig) -> Iterator[tuple[str, object]]:
    """What names the weights: digests; else the files, by path, size and time of change; else the caller's word."""
    if config.manifest_sha256 is not None or config.source_model_sha256 is not None:
        yield "manifest_sha256", config.manifest_sha256
        yield "source_model_sha256", config.source_model_sha256
    elif config.model_path is not None:
        yield "model_files", tuple(_file(path) for path in _shards(config.model_path))
    else:
        yield "package_ref", config.package_ref
        yield "model_id", config.model_id


def _file(path: str) -> tuple[str, int | None, int | None]:
    real = os.path.realpath(path)
    try:
        found = os.stat(real)
    except OSError:  # gone since it was loaded, or never there: the path alone, which no present file shares
        return real, None, None
    return real, found.st_size, found.st_mtime_ns


def _shards(path: str) -> list[str]:
    """All files of a model that was split ("name-00001-of-00003.gguf"), or the one file."""
    split = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", path, re.ASCII | re.DOTALL)
    return [path] if split is None else [f"{split[1]}{n:05d}{split[2]}" for n in range(1, int(split[3]) + 1)]


def _hasher(purpose: str, *fields: tuple[str, object]) -> blake3:
    """A hasher that has read the format, what the hash is for, and these fields."""
    hasher = blake3(_frame("format", FORMAT) + _frame("purpose", purpose))
    for name, value in fields:
        hasher.update(_frame(name, value))
    return hasher


def _frame(name: str, value: object) -> bytes:
    text = name.encode()
    return struct.pack("<I", len(text)) + text + _value(value)


def _value(value: object) -> bytes:
    """A byte for the kind, the length, the bytes; what a field is made of is framed the same way."""
    if value is None:
        kind, body = b"-", b""
    elif isinstance(value, bool):
        kind, body = b"b", b"\1" if value else b"\0"
    elif isinstance(value, (int, np.integer)):
        kind, body = b"i", str(int(value)).encode()
    elif isinstance(value, float):
        kind, body = b"f", struct.pack("<d", value + 0.0)  # + 0.0: the two zeros are one number
    elif isinstance(value, str):
        kind, body = b"s", value.encode("utf-8", "surrogatepass")  # paths may hold what is not UTF-8
    elif isinstance(value, tuple):
        kind, body = b"l", b"".join(map(_value, value))
    elif isinstance(value, BaseModel):
        kind, body = b"r", b"".join(_frame(name, part) for name, part in value)
    else:
        raise TypeError(f"no canonical form for {type(value).__name__}")
    return kind + struct.pack("<Q", len(body)) + body
