"""What may change in a roll, against vLLM's real parser and config; no engine is started."""

from pathlib import Path

import pytest

from zerolayer.app.roll_arguments import configured, unknown_names
from zerolayer.app.vllm_words import ServeOptions
from zerolayer.core.errors import ConfigError

OLD = ("--max-model-len", "1024", "--enforce-eager")


@pytest.fixture
def options(model: str, tmp_path: Path) -> ServeOptions:
    return ServeOptions(
        model=model, engines=2, host="127.0.0.1", port=1, snapshots=True, snapshot_bytes=1 << 30,
        wait_for_engine_s=1.0, log_dir=tmp_path, vllm_args=OLD, environment={},
    )  # fmt: skip


def test_every_setting_that_may_change_is_one_that_this_vllm_has() -> None:
    assert not unknown_names()


def test_new_words_are_laid_over_the_old_ones(options: ServeOptions) -> None:
    new = configured(options, OLD, (*OLD, "--max-num-seqs", "7"))
    assert new.changed == ("max_num_seqs",)
    assert new.words == (*OLD, "--max-num-seqs", "7")
    assert new.config.scheduler_config.max_num_seqs == 7
    assert new.config.model_config.max_model_len == 1024
    assert not new.recomputed


def test_words_that_change_what_a_snapshot_means_are_known_as_such(options: ServeOptions) -> None:
    new = configured(options, OLD, (*OLD, "--block-size", "64"))
    assert new.changed == ("block_size",)
    assert new.recomputed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--no-such-word",), "no-such-word"),
        (("--max-num-seqs", "many"), "invalid"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
        (("--max-model-len", "512"), "the server itself reads"),
        (("--served-model-name", "other"), "the server itself reads"),
        (("--enable-auto-tool-choice", "--tool-call-parser", "hermes"), "the server itself reads"),
        (("--data-parallel-size", "2"), "--engines"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    options: ServeOptions, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        configured(options, OLD, (*OLD, *words))
    assert "\n" not in str(refused.value)
