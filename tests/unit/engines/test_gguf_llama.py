"""The conversion of a Llama-type GGUF, on a model small enough to write in the test."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerolayer.engines import gguf_llama

gguf = pytest.importorskip("gguf", reason="the `gguf` package comes with the cpu extra")

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 64, 4, 2, 32
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "é"]


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    return {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }


def write_gguf(path: Path, architecture: str = "llama", extra: str | None = None) -> None:
    """A one-layer Llama with seeded weights; projections are stored as Q4_1, norms as float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    random = np.random.default_rng(7)
    for name, shape in {**tensor_shapes(), **({extra: (4,)} if extra else {})}.items():
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2 and name.startswith("blk."):
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    out.mkdir()
    gguf_llama.write_folder(gguf_llama.LlamaGguf(tmp_path / "tiny.gguf"), out, lambda _: None)
    return out


def read_weights(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    assert header.pop("__metadata__") == {"format": "pt"}
    weights, end = {}, 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert (start, entry["dtype"]) == (end, "BF16"), f"{name} leaves a hole"
        weights[name] = np.frombuffer(body[start:stop], np.uint16).reshape(entry["shape"])
        end = stop
    assert end == len(body)
    return weights


def test_every_file_that_the_engine_loads_is_written(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(gguf_llama.FILES)


def test_every_tensor_arrives_once_under_its_hugging_face_name(folder: Path) -> None:
    weights = read_weights(folder / gguf_llama.WEIGHTS_FILE)
    assert {gguf_llama.hugging_face_name(name) for name in tensor_shapes()} == set(weights)
    for name, shape in tensor_shapes().items():
        assert weights[gguf_llama.hugging_face_name(name)].shape == shape


def test_tensor_data_starts_at_a_multiple_of_eight_bytes() -> None:
    for length in range(1, 17):
        header = gguf_llama.safetensors_header({"w" * length: (3, 5)})
        assert len(header) % 8 == 0
        assert struct.unpack_from("<Q", header) == (len(header) - 8,)


def test_configuration_says_what_the_gguf_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HIDDEN // HEADS
    assert config["vocab_size"] == len(TOKENS)
    assert config["rope_parameters"] == {"rope_theta": 10_000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_tokenizer_encodes_with_the_vocabulary_of_the_file_and_splits_digits(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab<|im_end|>ba").ids == [5, 2, 4, 3]
    splits = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab 42")]
    assert splits == ["ab", "Ġ", "4", "2"]


def test_rope_permutation_is_the_inverse_of_the_converter_of_llama_cpp() -> None:
    rows = np.arange(2 * 8 * 3).reshape(16, 3)
    # llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute
    stored = rows.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert not np.array_equal(stored, rows)
    np.testing.assert_array_equal(gguf_llama.undo_rope_permutation(stored, heads=2), rows)


@pytest.mark.parametrize(
    ("float32_bits", "bfloat16_bits"),
    [
        (0x3F80_0000, 0x3F80),  # exact
        (0x3F80_7FFF, 0x3F80),  # below the middle
        (0x3F80_8000, 0x3F80),  # the middle, to even: down
        (0x3F81_8000, 0x3F82),  # the middle, to even: up
        (0x3F80_8001, 0x3F81),  # above the middle
        (0xBF81_8000, 0xBF82),  # the sign changes nothing
        (0x3FFF_FFFF, 0x4000),  # carries into the exponent
        (0x0000_0000, 0x0000),
        (0x8000_0000, 0x8000),
    ],
)
def test_bfloat16_rounds_to_nearest_and_ties_to_even(float32_bits: int, bfloat16_bits: int) -> None:
    value = np.array([float32_bits], np.uint32).view(np.float32)
    assert gguf_llama.round_to_bfloat16(value).tolist() == [bfloat16_bits]


def test_bfloat16_rounds_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(11).standard_normal(100_000, dtype=np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(gguf_llama.round_to_bfloat16(values), expected)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(gguf_llama.UnsupportedGguf, match="qwen2"):
        gguf_llama.LlamaGguf(tmp_path / "other.gguf")


def test_a_tensor_without_a_counterpart_is_refused_and_not_dropped(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", extra="blk.0.ffn_gate_inp.weight")
    with pytest.raises(gguf_llama.UnsupportedGguf, match="ffn_gate_inp"):
        gguf_llama.LlamaGguf(tmp_path / "odd.gguf").weight_shapes()
