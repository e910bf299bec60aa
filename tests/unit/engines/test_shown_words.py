import pytest

from zerolayer.engines.shown_words import without_secrets


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--max-num-seqs 8 --api-key one two --enforce-eager",
         "--max-num-seqs 8 --api-key *** *** --enforce-eager"),
        ("--api_key=one --dtype bfloat16", "--api_key=*** --dtype bfloat16"),
        ("--hf-token t", "--hf-token ***"),
        ("--max-num-batched-tokens 8", "--max-num-batched-tokens 8"),
    ],
)  # fmt: skip
def test_values_of_secret_flags_are_never_shown(words: str, shown: str) -> None:
    assert " ".join(without_secrets(words.split())) == shown
