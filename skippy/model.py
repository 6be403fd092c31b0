"""A GGUF model and its vocabulary, and contexts on it, through llama-cpp-python's low-level functions."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from skippy._llama import Context
from skippy.errors import ModelError
from skippy.logs import route_llama_log

__all__ = ["ABORTED", "FLASH_ATTENTION", "KV_TYPES", "AdapterFile", "Model", "ModelContext", "Stop", "family_of"]

ABORTED = 2  # what llama_decode returns when it was told to give up

_GGML_TYPE_BF16 = 30  # llama-cpp-python has no name for it

KV_TYPES = {"bf16": _GGML_TYPE_BF16} | {
    name.removeprefix("GGML_TYPE_").lower(): getattr(lib, name)
    for name in (
        "GGML_TYPE_F32", "GGML_TYPE_F16", "GGML_TYPE_Q8_0", "GGML_TYPE_Q4_0", "GGML_TYPE_Q4_1",
        "GGML_TYPE_Q5_0", "GGML_TYPE_Q5_1", "GGML_TYPE_IQ4_NL",
    )
}  # fmt: skip

FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


@dataclass(frozen=True)
class AdapterFile:
    """A LoRA adapter: where it lies, the BLAKE3 of its bytes, and its scale."""

    path: str
    digest: str
    scale: float

    @classmethod
    def read(cls, spec: str | os.PathLike[str] | tuple[str | os.PathLike[str], float]) -> AdapterFile:
        """From a path, or a pair of path and scale.  The digest is taken now: another file under one name differs."""
        path, scale = spec if isinstance(spec, tuple) else (spec, 1.0)
        if not Path(path).is_file():
            raise ModelError(f"lora: there is no file {os.fspath(path)!r}")
        digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
        digest.update_mmap(path)
        return cls(os.fspath(path), digest.hexdigest(), float(scale))


def family_of(model: Any) -> str:
    """What a llama_model says of itself: "dense", "window", "recurrent" or "hybrid"."""
    if lib.llama_model_is_recurrent(model):
        return "recurrent"
    if lib.llama_model_is_hybrid(model):
        return "hybrid"
    return "window" if lib.llama_model_n_swa(model) > 0 else "dense"


def piece_of(vocab: Any, token: int, *, special: bool = False) -> bytes:
    """The bytes of one token of a llama_vocab; control tokens are empty unless `special`."""
    room = 64
    while True:
        buffer = ctypes.create_string_buffer(room)
        n = lib.llama_token_to_piece(vocab, token, buffer, room, 0, special)
        if n >= 0:
            return buffer.raw[:n]
        room = -n


class Model:
    """A loaded model.  Close it after its contexts; everything raises ValueError afterwards."""

    def __init__(self, path: str | os.PathLike[str], *, n_gpu_layers: int = 0, vocab_only: bool = False) -> None:
        if not Path(path).is_file():
            raise ModelError(f"model_path: there is no file {os.fspath(path)!r}, expected a GGUF model")
        route_llama_log()
        lib.llama_backend_init()
        self.path = os.fspath(path)
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.vocab_only = vocab_only
        model = lib.llama_model_load_from_file(self.path.encode(), params)
        if not model:
            raise ModelError(
                f"model_path: llama.cpp could not load {self.path!r} as a GGUF model "
                f"(set the logger 'skippy.llama' to DEBUG to see why)"
            )
        self._model = model
        self.guard = threading.RLock()  # so that closing waits for a call that another thread is in
        self._adapters: list[lib.llama_adapter_lora_p] = []
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)
        self.bos: int = lib.llama_vocab_bos(self.vocab)
        self.eos: int = lib.llama_vocab_eos(self.vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._end_tokens: dict[int, bool] = {}
        if not vocab_only and (not lib.llama_model_has_decoder(model) or lib.llama_model_is_diffusion(model)):
            self.close()
            raise ModelError(f"model_path: {self.path!r} has no decoder that generates text token by token")
        if not vocab_only and lib.llama_model_has_encoder(model):
            self.close()
            raise ModelError(f"model_path: {self.path!r} has an encoder: its answers depend on more than the prompt")

    @property
    def _live(self) -> Any:
        if self._model is None:
            raise ValueError(f"the model {self.path!r} is closed")
        return self._model

    @property
    def vocab(self) -> Any:
        """llama.cpp's vocabulary, for samplers."""
        return lib.llama_model_get_vocab(self._live)

    @property
    def family(self) -> str:
        """What the loaded model says of itself: "dense", "window", "recurrent" or "hybrid"."""
        return family_of(self._live)

    @property
    def window(self) -> int:
        """How many tokens the layers with a sliding window see; 0 where there are none."""
        return int(lib.llama_model_n_swa(self._live))

    @property
    def n_layer(self) -> int:
        """Layers of the model."""
        return int(lib.llama_model_n_layer(self._live))

    @property
    def description(self) -> str:
        """Architecture, size and quantisation in llama.cpp's words."""
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self._live, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in the model's metadata, or None."""
        text = lib.llama_model_chat_template(self._live, None)
        return text.decode("utf-8", "replace") if text else None

    def tokenize(self, text: str, *, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of `text`.  `add_bos`: with what the model's settings add; `special`: read control tokens."""
        raw = text.encode("utf-8")
        room = len(raw) + 16
        while True:
            out = (lib.llama_token * room)()
            with self.guard:
                n = lib.llama_tokenize(self.vocab, raw, len(raw), out, room, add_bos, special)
            if n >= 0:
                return list(out[:n])
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, which need not be whole characters; control tokens are empty unless `special`."""
        found = self._pieces.get((token, special))
        if found is None:
            if not 0 <= token < self.n_vocab:
                raise ValueError(f"token {token} is not in the vocabulary (0 to {self.n_vocab - 1})")
            with self.guard:
                found = self._pieces[token, special] = piece_of(self.vocab, token, special=special)
        return found

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(int(token), special=special) for token in tokens).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Whether `token` ends an answer (end of text, end of turn)."""
        found = self._end_tokens.get(token)
        if found is None:
            with self.guard:
                found = self._end_tokens[token] = bool(lib.llama_vocab_is_eog(self.vocab, token))
        return found

    def new_context(
        self,
        *,
        n_ctx: int,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int = 1,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "auto",
        swa_full: bool | None = None,
        adapters: Sequence[AdapterFile] = (),
    ) -> ModelContext:
        """A context with a unified pool of at least `n_ctx` cells (llama.cpp rounds up to 256).

        ModelError, naming the field, for a value that llama.cpp does not know or cannot serve.
        """
        for name, value in (("type_k", type_k), ("type_v", type_v)):
            if value not in KV_TYPES:
                raise ModelError(f"{name} is {value!r}, expected one of {', '.join(KV_TYPES)}")
        if flash_attn not in FLASH_ATTENTION:
            raise ModelError(f"flash_attn is {flash_attn!r}, expected one of {', '.join(FLASH_ATTENTION)}")
        for name, number in (("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("n_threads", n_threads)):
            if number < 1:
                raise ModelError(f"{name} is {number}, expected at least 1")
        n_batch = min(n_batch, n_ctx)
        if n_seq_max > n_batch:  # llama.cpp reserves an output per sequence, and asserts that a batch has as many
            raise ModelError(f"{n_seq_max} sequence ids need n_batch and n_ctx of at least that, not {n_batch}")
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = min(n_ubatch, n_batch)
        params.n_seq_max = n_seq_max
        params.n_rs_seq = 0
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k, params.type_v = KV_TYPES[type_k], KV_TYPES[type_v]
        params.flash_attn_type = FLASH_ATTENTION[flash_attn]
        params.kv_unified = True
        if swa_full is not None:
            params.swa_full = swa_full
        pointer = lib.llama_init_from_model(self._live, params)
        if not pointer:
            raise ModelError(
                f"llama.cpp could not make a context: n_ctx={n_ctx}, n_seq_max={n_seq_max}, type_k={type_k!r}, "
                f"type_v={type_v!r}, flash_attn={flash_attn!r} (a quantised V needs flash attention)"
            )
        context = ModelContext(self, pointer)
        try:
            if adapters:
                self._apply(pointer, adapters)
        except BaseException:
            context.close()
            raise
        return context

    def _apply(self, pointer: lib.llama_context_p, adapters: Sequence[AdapterFile]) -> None:
        loaded = []
        for adapter in adapters:
            found = lib.llama_adapter_lora_init(self._live, adapter.path.encode())
            if not found:
                raise ModelError(f"lora: llama.cpp could not load {adapter.path!r} as an adapter of {self.path!r}")
            loaded.append(found)
        self._adapters += loaded  # freed by llama.cpp together with the model
        pointers = (lib.llama_adapter_lora_p_ctypes * len(loaded))(*loaded)
        scales = (ctypes.c_float * len(loaded))(*(adapter.scale for adapter in adapters))
        if lib.llama_set_adapters_lora(pointer, pointers, len(loaded), scales) != 0:
            raise ModelError(f"lora: llama.cpp could not apply {[adapter.path for adapter in adapters]}")

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model.  Closing twice does nothing."""
        with self.guard:
            if self._model is not None:
                lib.llama_model_free(self._model)
                self._model = None


class Stop:
    """Whether llama.cpp was told to give up (`said`), and what asking about it raised."""

    def __init__(self) -> None:
        self.said = False
        self.error: BaseException | None = None


class ModelContext:
    """A llama_context and the `_llama.Context` over it."""

    def __init__(self, model: Model, pointer: lib.llama_context_p) -> None:
        self.model = model
        self.pointer: lib.llama_context_p | None = pointer
        address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        self.sequences = Context(address, unified=True, owner=self)

    @property
    def live(self) -> Any:
        """llama.cpp's context.  ValueError if it is closed."""
        if self.pointer is None:
            raise ValueError("this context is closed")
        return self.pointer

    def logits(self, index: int = -1) -> npt.NDArray[np.float32]:
        """Logits of output `index` of the last decode: float32 [n_vocab], a copy.  -1 is the last one."""
        found = lib.llama_get_logits_ith(self.live, index)
        if not found:
            raise ValueError(f"the last decode has no logits at {index}")
        return np.ctypeslib.as_array(found, (self.model.n_vocab,)).copy()

    @contextmanager
    def stop_when(self, should_stop: Callable[[], bool]) -> Iterator[Stop]:
        """Let llama.cpp ask, between two operations of what is decoded in here, whether to give up.

        Then `decode` returns ABORTED with the batch half done, and what is yielded here says that it was asked to.
        llama.cpp asks on a CPU; other backends finish the batch.  What `should_stop` raises stops the decoding too,
        and is raised at the end of the block: so does KeyboardInterrupt, in the main thread, whatever the answer.
        """
        stop = Stop()

        def ask(_: object) -> bool:
            try:
                stop.said = stop.said or bool(should_stop())
            except BaseException as error:  # noqa: BLE001 - it may not pass through llama.cpp, and goes on below
                stop.error, stop.said = error, True
            return stop.said

        callback = lib.ggml_abort_callback(ask)
        lib.llama_set_abort_callback(self.live, callback, None)
        try:
            yield stop
        finally:
            lib.llama_set_abort_callback(self.live, lib.ggml_abort_callback(), None)
            if stop.error is not None:
                raise stop.error

    def close(self) -> None:
        """Free the context.  Closing twice does nothing."""
        if self.pointer is not None:
            self.sequences.close()
            lib.llama_free(self.pointer)
            self.pointer = None
