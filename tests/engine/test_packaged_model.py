"""The packaged model as it is: the real wheel, converted, loaded by the library that vLLM uses."""

import hashlib
from pathlib import Path

import pytest

from zerolayer.engines import gguf_llama
from zerolayer.engines.model import default_model

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

# SHA-256 over all tensors in the order of their names, each as its name and its bfloat16 bytes, as
# transformers 5.19 makes them: `AutoModelForCausalLM.from_pretrained(..., gguf_file=...)`.
WEIGHTS_OF_TRANSFORMERS = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return default_model(tmp_path_factory.mktemp("cache"), lambda _what, _done: None)


def test_packaged_weights_are_those_of_transformers_bit_for_bit(folder: Path) -> None:
    import torch

    digest = hashlib.sha256()
    with safetensors.safe_open(folder / gguf_llama.WEIGHTS_FILE, "pt") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode())
            digest.update(file.get_tensor(name).view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS_OF_TRANSFORMERS


def test_packaged_tokenizer_gives_back_every_text(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (
        "Hello, world!",
        "in 2024  12 × 3,500\n\n 5",
        "naïve 漢字 😀",
        "\t\tif x == 10:\n",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.bos_token, tokenizer.eos_token] == ["<|im_start|>", "<|im_end|>"]


def test_packaged_chat_template_ends_where_the_answer_begins(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_packaged_configuration_is_a_llama_to_transformers(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.head_dim) == ("llama", 30, 64)
    assert config.rope_parameters["rope_theta"] == 100_000.0
