"""Tiny GGUF models with seeded random weights: real architectures of every memory family of llama.cpp, 0.5 to 2 MiB.

Shapes are in ggml's order, as in llama.cpp's `create_tensor`: the first number is the length of a row.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

Shapes: TypeAlias = dict[str, tuple[int, ...]]
Metadata: TypeAlias = dict[str, int | float | list[int]]

N_VOCAB = 384
WINDOW = 32  # of the models with a sliding window
D = 64  # embedding
FF = 128  # feed-forward
INNER, STATE, DT, CONV = 128, 16, 4, 4  # mamba: inner size, state per channel, rank (or heads) of dt, kernel
XBC = INNER + 2 * STATE  # what mamba 2 convolves: x, B and C of one group

# --- tensors of a block -------------------------------------------------------------------------------------------


def attention(d_q: int = D, d_kv: int = 32, *, d_qk_norm: int = 0, query_and_gate: bool = False) -> Shapes:
    """`d_qk_norm`: the length of a head where q and k are normalised; `query_and_gate`: attn_q makes both."""
    shapes: Shapes = {
        "attn_q.weight": (D, 2 * d_q if query_and_gate else d_q),
        "attn_k.weight": (D, d_kv),
        "attn_v.weight": (D, d_kv),
        "attn_output.weight": (d_q, D),
    }
    if d_qk_norm:
        shapes |= {"attn_q_norm.weight": (d_qk_norm,), "attn_k_norm.weight": (d_qk_norm,)}
    return shapes


ATTN_NORM: Shapes = {"attn_norm.weight": (D,)}
FFN_NORM: Shapes = {"ffn_norm.weight": (D,)}
POST_NORM: Shapes = {"post_attention_norm.weight": (D,)}
FEED_FORWARD: Shapes = {"ffn_gate.weight": (D, FF), "ffn_up.weight": (D, FF), "ffn_down.weight": (FF, D)}

EXPERTS, D_EXPERT = 4, 32
MIXTURE: Shapes = {
    "ffn_gate_inp.weight": (D, EXPERTS),
    "ffn_gate_exps.weight": (D, D_EXPERT, EXPERTS),
    "ffn_up_exps.weight": (D, D_EXPERT, EXPERTS),
    "ffn_down_exps.weight": (D_EXPERT, D, EXPERTS),
    "ffn_gate_inp_shexp.weight": (D,),
    "ffn_gate_shexp.weight": (D, D_EXPERT),
    "ffn_up_shexp.weight": (D, D_EXPERT),
    "ffn_down_shexp.weight": (D_EXPERT, D),
}

MAMBA: Shapes = {
    "ssm_in.weight": (D, 2 * INNER),
    "ssm_conv1d.weight": (CONV, INNER),
    "ssm_conv1d.bias": (INNER,),
    "ssm_x.weight": (INNER, DT + 2 * STATE),
    "ssm_dt.weight": (DT, INNER),
    "ssm_dt.bias": (INNER,),
    "ssm_a": (STATE, INNER),
    "ssm_d": (INNER,),
    "ssm_out.weight": (INNER, D),
}
JAMBA = MAMBA | {"ssm_dt_norm.weight": (DT,), "ssm_b_norm.weight": (STATE,), "ssm_c_norm.weight": (STATE,)}
MAMBA2: Shapes = {
    "ssm_in.weight": (D, INNER + XBC + DT),
    "ssm_conv1d.weight": (CONV, XBC),
    "ssm_conv1d.bias": (XBC,),
    "ssm_dt.bias": (DT,),
    "ssm_a": (1, DT),
    "ssm_d": (1, DT),
    "ssm_norm.weight": (INNER, 1),
    "ssm_out.weight": (INNER, D),
}

SHORT_CONV: Shapes = {
    "shortconv.conv.weight": (3, D),
    "shortconv.in_proj.weight": (D, 3 * D),
    "shortconv.out_proj.weight": (D, D),
}

D_DELTA, DELTA_HEADS = 32, 2  # one key head, two value heads
DELTA_NET: Shapes = {
    "attn_qkv.weight": (D, (2 + DELTA_HEADS) * D_DELTA),
    "attn_gate.weight": (D, DELTA_HEADS * D_DELTA),
    "ssm_conv1d.weight": (CONV, (2 + DELTA_HEADS) * D_DELTA),
    "ssm_dt.bias": (DELTA_HEADS,),
    "ssm_a": (DELTA_HEADS,),
    "ssm_norm.weight": (D_DELTA,),
    "ssm_out.weight": (DELTA_HEADS * D_DELTA, D),
}
QWEN3NEXT_DELTA = DELTA_NET | {"ssm_ba.weight": (D, 2 * DELTA_HEADS)}
QWEN35_DELTA = DELTA_NET | {"ssm_beta.weight": (D, DELTA_HEADS), "ssm_alpha.weight": (D, DELTA_HEADS)}

D_RWKV, RANK = 128, 16  # two heads of 64


def norm_with_bias(name: str) -> Shapes:
    return {f"{name}.weight": (D_RWKV,), f"{name}.bias": (D_RWKV,)}


RWKV7: Shapes = {
    **norm_with_bias("attn_norm"),
    **norm_with_bias("attn_norm_2"),
    **norm_with_bias("time_mix_ln"),
    **{f"time_mix_{name}.weight": (D_RWKV,) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")},
    **{f"time_mix_{name}1.weight": (D_RWKV, RANK) for name in "wavg"},
    **{f"time_mix_{name}2.weight": (RANK, D_RWKV) for name in "wavg"},
    "time_mix_lerp_fused.weight": (D_RWKV, 1, 1, 6),
    **{f"time_mix_{name}.weight": (D_RWKV, D_RWKV) for name in ("key", "value", "receptance", "output")},
    "channel_mix_lerp_k.weight": (D_RWKV, 1, 1),
    "channel_mix_key.weight": (D_RWKV, 2 * D_RWKV),
    "channel_mix_value.weight": (2 * D_RWKV, D_RWKV),
}

# --- models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TinyModel:
    """One architecture, as llama.cpp reads it.  `family` is what `Model.family` says of it."""

    family: str
    architecture: str
    metadata: Metadata
    blocks: list[Shapes]
    d: int = D
    norms: Shapes | None = None  # outside the blocks, where they are not just output_norm

    def tensors(self) -> Shapes:
        """Every tensor of the file."""
        shapes: Shapes = {"token_embd.weight": (self.d, N_VOCAB), "output.weight": (self.d, N_VOCAB)}
        shapes |= self.norms or {"output_norm.weight": (self.d,)}
        for i, block in enumerate(self.blocks):
            shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
        return shapes


RMS: Metadata = {"attention.layer_norm_rms_epsilon": 1e-5}
TRANSFORMER: Metadata = {**RMS, "feed_forward_length": FF, "attention.head_count": 4, "attention.head_count_kv": 2}
SSM: Metadata = {"ssm.conv_kernel": CONV, "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": DT}
SSM2: Metadata = {**SSM, "ssm.group_count": 1}
# llama.cpp takes the blocks without key-value heads for the recurrent ones of these.
ONE_OF_FOUR: Metadata = {**TRANSFORMER, "attention.head_count_kv": [0, 0, 2, 0]}
LFM2: Metadata = {**TRANSFORMER, "attention.head_count_kv": [0, 0, 2, 0, 2], "shortconv.l_cache": 3}
QWEN: Metadata = {
    **TRANSFORMER,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "full_attention_interval": 4,
    "ssm.conv_kernel": CONV,
    "ssm.inner_size": DELTA_HEADS * D_DELTA,
    "ssm.state_size": D_DELTA,
    "ssm.time_step_rank": DELTA_HEADS,
    "ssm.group_count": 1,
}

ATTENTION_BLOCK = ATTN_NORM | attention() | FFN_NORM | FEED_FORWARD
GEMMA3_BLOCK = ATTENTION_BLOCK | attention(128, d_qk_norm=32) | POST_NORM | {"post_ffw_norm.weight": (D,)}
JAMBA_BLOCK = ATTN_NORM | JAMBA | FFN_NORM | FEED_FORWARD
GRANITE_BLOCK = ATTN_NORM | MAMBA2 | FFN_NORM | FEED_FORWARD
# falcon-h1's ffn_norm has no ".weight".
FALCON_BLOCK = ATTN_NORM | MAMBA2 | attention() | {"ffn_norm": (D,)} | FEED_FORWARD
LFM2_CONV = ATTN_NORM | SHORT_CONV | FFN_NORM | FEED_FORWARD
LFM2_ATTN = ATTENTION_BLOCK | attention(d_qk_norm=16)
LFM2_BLOCKS = [LFM2_CONV, LFM2_CONV, LFM2_ATTN, LFM2_CONV, LFM2_ATTN]
LFM2_NORMS: Shapes = {"token_embd_norm.weight": (D,)}  # llama.cpp's name for its norm before the output
QWEN_ATTENTION = attention(d_qk_norm=32, query_and_gate=True)


def qwen_blocks(delta: Shapes, feed_forward: Shapes) -> list[Shapes]:
    return [ATTN_NORM | mixer | POST_NORM | feed_forward for mixer in (delta, delta, delta, QWEN_ATTENTION)]


FAMILIES: dict[str, TinyModel] = {
    "llama": TinyModel("dense", "llama", TRANSFORMER, [ATTENTION_BLOCK] * 4),
    "gemma3": TinyModel(
        "window",
        "gemma3",
        {
            **TRANSFORMER,
            "attention.head_count_kv": 1,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": 3,
        },
        [GEMMA3_BLOCK] * 6,
    ),
    "mamba": TinyModel("recurrent", "mamba", RMS | SSM, [ATTN_NORM | MAMBA] * 3),
    "mamba2": TinyModel("recurrent", "mamba2", RMS | SSM2, [ATTN_NORM | MAMBA2] * 3),
    "rwkv7": TinyModel(
        "recurrent",
        "rwkv7",
        {
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": 2 * D_RWKV,
            "wkv.head_size": 64,
            "token_shift_count": 2,
            **{f"attention.{name}_lora_rank": RANK for name in ("decay", "iclr", "value_residual_mix", "gate")},
        },
        [RWKV7] * 3,
        d=D_RWKV,
        norms=norm_with_bias("token_embd_norm") | norm_with_bias("output_norm"),
    ),
    "lfm2": TinyModel("hybrid", "lfm2", LFM2, LFM2_BLOCKS, norms=LFM2_NORMS),
    "lfm2swa": TinyModel("hybrid", "lfm2", {**LFM2, "attention.sliding_window": WINDOW}, LFM2_BLOCKS, norms=LFM2_NORMS),
    "falconh1": TinyModel("hybrid", "falcon-h1", TRANSFORMER | SSM2, [FALCON_BLOCK] * 3),
    "granitehyb": TinyModel(
        "hybrid",
        "granitehybrid",
        ONE_OF_FOUR | SSM2,
        [GRANITE_BLOCK, GRANITE_BLOCK, ATTENTION_BLOCK, GRANITE_BLOCK],
    ),
    "jamba": TinyModel("hybrid", "jamba", ONE_OF_FOUR | SSM, [JAMBA_BLOCK, JAMBA_BLOCK, ATTENTION_BLOCK, JAMBA_BLOCK]),
    "qwen3next": TinyModel(
        "hybrid",
        "qwen3next",
        {
            **QWEN,
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": D_EXPERT,
            "expert_shared_feed_forward_length": D_EXPERT,
        },
        qwen_blocks(QWEN3NEXT_DELTA, MIXTURE),
    ),
    "qwen35": TinyModel(
        "hybrid", "qwen35", {**QWEN, "rope.dimension_sections": [6, 5, 5, 0]}, qwen_blocks(QWEN35_DELTA, FEED_FORWARD)
    ),
}

# --- weights ------------------------------------------------------------------------------------------------------

GAINS = {
    "output.weight": 2,  # logits of deviation 2
    "ssm_x.weight": 2,  # mamba's B, C and dt: at 1 its state hardly shows beside what passes by it
}


def _weights(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Random values that keep activations near 1 and let early tokens show in late logits."""
    normal = rng.standard_normal(shape[::-1], dtype=np.float32)
    match kind := re.sub(r"^blk\.\d+\.", "", name):
        case "token_embd.weight":
            return normal  # as large as what the blocks add, or attention's mean of all tokens drowns the last one
        case "output.weight":
            normal[:N_CONTROL] = 0  # logit 0, far under the largest: no greedy answer ends by chance
        case "ssm_a":
            return np.negative(np.exp(normal / 2))  # a decay: a positive one would grow without bound
        case "ssm_dt.bias" | "time_mix_w0.weight":
            return normal - 3  # a slow decay: the state remembers some tens of tokens
        case "ssm_d" | "time_mix_a0.weight" | "time_mix_v0.weight" | "time_mix_r_k.weight":
            return 0.1 * normal
        case "time_mix_ln.weight" | "time_mix_k_k.weight" | "time_mix_k_a.weight":
            return 1 + 0.1 * normal
        case "time_mix_lerp_fused.weight" | "channel_mix_lerp_k.weight":
            return rng.random(shape[::-1], dtype=np.float32)
        case _ if kind.endswith(".bias"):
            return 0.1 * normal
        case _ if "norm" in kind:
            return 1 + 0.1 * normal
    return normal * np.float32(GAINS.get(kind, 1) / np.sqrt(shape[0]))


# --- vocabulary ---------------------------------------------------------------------------------------------------

CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
N_CONTROL = len(CONTROL)
UNK, BOS, EOS = 0, 1, 2
SPACE = "\u2581"  # what SentencePiece writes for a space
# Best first, each of two tokens that no better merge takes apart: every one of them occurs in tokenised text.
MERGES = "th the _the an and _and in ing er re on at en or es ed he nd _a _t _s _w _c _o _to _in _on er_"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece vocabulary: bytes for what has no piece, so that every text comes back as it was."""
    characters = [SPACE, *map(chr, range(0x21, 0x7F))]
    merges = [merge.replace("_", SPACE) for merge in MERGES.split()]
    pieces = characters + merges
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    assert len(tokens) == len(set(tokens)) == N_VOCAB
    kinds = [gguf.TokenType.CONTROL] * N_CONTROL + [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(pieces)
    kinds[UNK] = gguf.TokenType.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (N_VOCAB - len(pieces)) + [-float(rank) for rank in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)  # or every text would come back with a space before it
    writer.add_chat_template(CHAT_TEMPLATE)


# --- file ---------------------------------------------------------------------------------------------------------


def write_model(name: str, path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Write model `name` of FAMILIES to `path`: the same bytes for the same name and seed."""
    model = FAMILIES[name]
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_name(f"tiny {name}, seed {seed}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(8192)
    writer.add_embedding_length(model.d)
    writer.add_block_count(len(model.blocks))
    for key, value in model.metadata.items():
        key = f"{model.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    _add_vocabulary(writer)
    rng = np.random.default_rng([seed, *name.encode()])
    for tensor, shape in model.tensors().items():
        writer.add_tensor(tensor, _weights(tensor, shape, rng))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
