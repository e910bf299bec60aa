"""A Llama-type GGUF file, read into the folder that vLLM loads.

Only what the packaged model needs: architecture `llama`, a byte-level BPE vocabulary, weights in
any type that the `gguf` package can dequantise. The numbers come out as `transformers` would make
them (dequantised to float32, rounded to bfloat16 to nearest, ties to even), in a third of the time
and without torch.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zerolayer.core.errors import ZeroLayerError

WEIGHTS_FILE = "model.safetensors"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    WEIGHTS_FILE,
)

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL_TOKEN = 3  # `tokenizer.ggml.token_type` of a token that text can never contain
_SAFETENSORS_ALIGN = 8  # bytes; the header is padded with spaces to it


class UnsupportedGguf(ZeroLayerError):
    """The file is not one that this module can turn into a Hugging Face folder."""


@dataclass(frozen=True)
class LlamaShape:
    """The numbers of a Llama model that its configuration and its weights share."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_epsilon: float
    rope_base: float


class LlamaGguf:
    """One open GGUF file. Weights stay mapped until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Map `path`. Raises UnsupportedGguf for another architecture or vocabulary type."""
        from gguf import (
            GGUFReader,
        )  # here, since it is in the `cpu` extra and not in the base package

        self._reader: Any = GGUFReader(path)
        architecture, vocabulary = (
            self.field("general.architecture"),
            self.field("tokenizer.ggml.model"),
        )
        if (architecture, vocabulary) != ("llama", "gpt2"):
            raise UnsupportedGguf(
                f"{path}: architecture {architecture!r} with vocabulary {vocabulary!r};"
                " only 'llama' with 'gpt2' is read here"
            )

    def field(self, name: str, default: Any = None) -> Any:
        """The value of one key of the file's metadata, or `default`."""
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    @property
    def shape(self) -> LlamaShape:
        """Sizes as the file states them; absent optional keys follow llama.cpp's defaults."""
        hidden, heads = (
            self.field("llama.embedding_length"),
            self.field("llama.attention.head_count"),
        )
        return LlamaShape(
            layers=self.field("llama.block_count"),
            hidden=hidden,
            intermediate=self.field("llama.feed_forward_length"),
            heads=heads,
            kv_heads=self.field("llama.attention.head_count_kv", heads),
            head_dim=self.field("llama.rope.dimension_count", hidden // heads),
            vocab=len(self._reader.get_field("tokenizer.ggml.tokens").data),
            context=self.field("llama.context_length"),
            norm_epsilon=self.field("llama.attention.layer_norm_rms_epsilon"),
            rope_base=self.field("llama.rope.freq_base", 10_000.0),
        )

    @property
    def tied_embeddings(self) -> bool:
        """True if the output layer is the embedding, that is, has no weights of its own."""
        return all(tensor.name != "output.weight" for tensor in self._reader.tensors)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight under its Hugging Face name, sorted by that name."""
        shapes = {
            hugging_face_name(tensor.name): tuple(int(n) for n in reversed(tensor.shape))
            for tensor in self._reader.tensors
        }
        return dict(sorted(shapes.items()))

    def weights(self) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
        """Every weight as bfloat16 bits, in the order of `weight_shapes`."""
        from gguf import dequantize

        shape = self.shape
        for name, tensor in sorted((hugging_face_name(t.name), t) for t in self._reader.tensors):
            values = dequantize(tensor.data, tensor.tensor_type)
            if name.endswith("q_proj.weight"):
                values = undo_rope_permutation(values, shape.heads)
            elif name.endswith("k_proj.weight"):
                values = undo_rope_permutation(values, shape.kv_heads)
            yield name, round_to_bfloat16(values)


def hugging_face_name(gguf_name: str) -> str:
    """The name of a GGUF tensor in `LlamaForCausalLM`. Raises UnsupportedGguf if it has none."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and layer.isdigit() and part in _IN_BLOCK:
        return f"model.layers.{layer}.{_IN_BLOCK[part]}"
    raise UnsupportedGguf(f"tensor {gguf_name!r} has no counterpart in LlamaForCausalLM")


def undo_rope_permutation(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Put the rows of a query or key projection back into Hugging Face's order.

    llama.cpp rotates neighbouring pairs of a head's elements, Hugging Face rotates element i with
    i + head_dim/2, so llama.cpp's converter interleaves the two halves of each head. This is its
    inverse.
    """
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of finite float32 values, rounded to nearest, ties to even, like torch."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + lowest_kept) >> np.uint32(16)
    return rounded.astype(np.uint16)


def safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Length prefix and JSON header of a safetensors file of bfloat16 weights in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _SAFETENSORS_ALIGN)
    return struct.pack("<Q", len(text)) + text


def model_config(gguf: LlamaGguf) -> dict[str, Any]:
    """`config.json` of the model."""
    shape = gguf.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_theta": shape.rope_base, "rope_type": "default"},
        "tie_word_embeddings": gguf.tied_embeddings,
        **token_ids(gguf),
    }


def token_ids(gguf: LlamaGguf) -> dict[str, int]:
    """Ids of the tokens that begin, end and pad a text."""
    return {
        f"{short}_token_id": gguf.field(f"tokenizer.ggml.{long}_token_id")
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def tokenizer(gguf: LlamaGguf) -> dict[str, Any]:
    """`tokenizer.json`: byte-level BPE, digits split one by one (llama.cpp's `smollm` rule)."""
    if gguf.field("tokenizer.ggml.pre") != "smollm":
        raise UnsupportedGguf(
            f"pre-tokeniser {gguf.field('tokenizer.ggml.pre')!r} is not known here"
        )
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    types: list[int] = gguf.field("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain, "special": True}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in gguf.field("tokenizer.ggml.merges")],
        },
    }


def tokenizer_config(gguf: LlamaGguf) -> dict[str, Any]:
    """`tokenizer_config.json`: the special tokens by name, and the limit of the context."""
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.shape.context,
        "clean_up_tokenization_spaces": False,
        **{
            f"{short}_token": tokens[gguf.field(f"tokenizer.ggml.{long}_token_id")]
            for short, long in named.items()
        },
    }


def write_folder(gguf: LlamaGguf, folder: Path, on_weights: Callable[[float], None]) -> None:
    """Write `FILES` into the existing, empty `folder`.

    `on_weights` is called with the share of the weights that is written, in (0, 1]. Raises OSError
    as the file system does, and UnsupportedGguf for what the file holds.
    """
    texts = {
        "config.json": json.dumps(model_config(gguf), indent=2),
        "generation_config.json": json.dumps(token_ids(gguf), indent=2),
        "tokenizer.json": json.dumps(tokenizer(gguf), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(tokenizer_config(gguf), indent=2, ensure_ascii=False),
        "chat_template.jinja": gguf.field("tokenizer.chat_template", ""),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    shapes = gguf.weight_shapes()
    with (folder / WEIGHTS_FILE).open("xb") as file:
        file.write(safetensors_header(shapes))
        for done, (name, bits) in enumerate(gguf.weights(), start=1):
            if bits.shape != shapes[name]:
                raise UnsupportedGguf(
                    f"{name} has shape {bits.shape}, its header says {shapes[name]}"
                )
            file.write(bits.data)
            on_weights(done / len(shapes))
