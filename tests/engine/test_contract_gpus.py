"""How an engine gets its GPUs, against what vLLM does with them; see `test_contract`."""

import argparse
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_contract import found, source
from zerolayer.app import vllm_words
from zerolayer.app.roll_arguments import configure, configured
from zerolayer.app.vllm_words import ServeOptions, engine_config, fleet_gpus, parse_vllm_args
from zerolayer.core.errors import ConfigError
from zerolayer.engines.gpus import CHOSEN_GPUS, MEMORY_SHARE, find_gpus

NEEDED_BY = "engines/gpus.py gives each engine its GPUs in CUDA_VISIBLE_DEVICES"
#: NVML's numbers of the GPUs that a user may name by UUID.
INDEX_OF = {"GPU-aa": 4, "GPU-bb": 1}
#: As much of vLLM's platform as our own words ask for.
MACHINE = SimpleNamespace(device_type="cuda", is_cpu=lambda: False, device_count=lambda: 4)


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A platform with vLLM's own way from ranks to devices, and GPUs with these UUIDs."""

    class Cards(found("platforms.interface:Platform", NEEDED_BY)):  # type: ignore[misc]
        device_control_env_var = CHOSEN_GPUS

        @classmethod
        def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
            return INDEX_OF[device_id] if device_id in INDEX_OF else int(device_id)

    return Cards


@pytest.mark.parametrize("chosen", ["5", "6,7", "3,0", "GPU-aa,GPU-bb", "GPU-bb"])
def test_a_worker_takes_the_gpus_of_the_variable_in_their_order(
    interface: Any, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv(CHOSEN_GPUS, chosen)
    ranks = range(len(chosen.split(",")))
    devices = [interface.logical_device_id_to_visible_device_id(rank) for rank in ranks]
    assert devices == list(ranks), (
        f"with {CHOSEN_GPUS}={chosen} vLLM's ranks take cuda:{devices} now; {NEEDED_BY}"
    )


def test_numbers_in_the_config_would_win_over_the_variable(
    interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = found("platforms.interface", NEEDED_BY)
    monkeypatch.setattr(module, "_assigned_physical_gpu_ids", [2])
    monkeypatch.setenv(CHOSEN_GPUS, "1,2")
    assert interface.logical_device_id_to_visible_device_id(0) == 1
    monkeypatch.setenv(CHOSEN_GPUS, "1")
    with pytest.raises(RuntimeError, match="not visible"):
        interface.logical_device_id_to_visible_device_id(0)


@pytest.mark.parametrize(
    ("where", "pieces"),
    [
        ("v1.worker.gpu_worker", (
            "assigned_physical_gpu_ids = parallel_config.assigned_physical_gpu_ids",
            "if assigned_physical_gpu_ids is not None:",
            "current_platform.logical_device_id_to_visible_device_id(self.local_rank)",
            'torch.device(f"cuda:{visible_device_index}")',
        )),
        ("v1.executor.multiproc_executor", (
            "].parallel_config.assigned_physical_gpu_ids",
            "if assigned_physical_gpu_ids is not None:",
        )),
    ],
)  # fmt: skip
def test_a_worker_still_comes_to_its_device_on_the_way_that_we_know(
    where: str, pieces: tuple[str, ...]
) -> None:
    text = source(where, NEEDED_BY)
    for piece in pieces:
        assert piece in text, f"vLLM's {where} has no {piece!r} any more; {NEEDED_BY}"


@pytest.mark.parametrize(
    "where",
    [
        "v1.executor.multiproc_executor", "v1.executor.uniproc_executor", "v1.worker.worker_base",
        "v1.worker.gpu_worker", "v1.engine.core:EngineCoreProc",
    ],
)  # fmt: skip
def test_nothing_between_an_engine_and_its_workers_changes_the_variable(where: str) -> None:
    text = source(where, NEEDED_BY)
    for name in ("VISIBLE_DEVICES", "device_control_env_var"):
        assert name not in text, (
            f"vLLM's {where} deals with {name} now, and may undo what {NEEDED_BY}"
        )


def test_the_cuda_platform_has_the_same_variable_and_counts_what_it_leaves_visible() -> None:
    # Read and not imported: the module needs a CUDA build.
    text = (Path(found("platforms", NEEDED_BY).__file__).parent / "cuda.py").read_text()
    for piece, why in (
        (f'device_control_env_var: str = "{CHOSEN_GPUS}"', "chooses its GPUs by this variable"),
        ('device_type: str = "cuda"', "calls its devices cuda"),
        ("return _cuda_device_count_stateless(envs.CUDA_VISIBLE_DEVICES)", "counts visible ones"),
        ("torch.cuda._device_count_nvml()", "counts without touching a GPU"),
    ):
        assert piece in text, (
            f"vLLM's CUDA platform no longer {why} ({piece!r}); engines/gpus.py and "
            "cli/environment.py"
        )


# -- words for vLLM on a machine with GPUs --------------------------------------------------------


@pytest.fixture
def options(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
    """Two engines, as if vLLM had found four GPUs where our own words are read."""
    monkeypatch.setattr(vllm_words, "current_platform", MACHINE)
    return ServeOptions(
        model=model, engines=2, host="127.0.0.1", port=1, snapshots=True, snapshot_bytes=1 << 30,
        wait_for_engine_s=1.0, log_dir=tmp_path, vllm_args=(), environment={}, engines_per_gpu=2,
    )  # fmt: skip


def parsed(options: ServeOptions, *words: str) -> argparse.Namespace:
    return parse_vllm_args(dataclasses.replace(options, vllm_args=words))


def test_vllms_parser_takes_a_part_of_its_own_default_and_the_users_word_for_it(
    options: ServeOptions, tmp_path: Path
) -> None:
    whole = found("config.cache:CacheConfig", NEEDED_BY).gpu_memory_utilization
    assert getattr(parsed(options), MEMORY_SHARE) == whole / 2
    for word in ("--gpu-memory-utilization", "--device-memory-utilization"):
        assert getattr(parsed(options, word, "0.3"), MEMORY_SHARE) == 0.3
    file = tmp_path / "words.yaml"
    file.write_text("gpu-memory-utilization: 0.2\n")
    assert getattr(parsed(options, "--config", str(file)), MEMORY_SHARE) == 0.2
    with pytest.raises(ConfigError, match="2 engines share a GPU"):
        parsed(options, "--gpu-memory-utilization", "0.6")


def test_a_roll_keeps_each_engines_part_of_the_memory(options: ServeOptions) -> None:
    new = configured(options, (), ("--max-num-seqs", "7"))
    whole = found("config.cache:CacheConfig", NEEDED_BY).gpu_memory_utilization
    assert new.changed == ("max_num_seqs",)
    assert new.config.cache_config.gpu_memory_utilization == whole / 2


def test_device_ids_go_to_the_engines_in_the_variable_and_not_in_the_config(
    options: ServeOptions,
) -> None:
    args = parsed(options, "--device-ids", "3,1")
    config = engine_config(args, "MODEL", options.model)
    assert config.parallel_config.assigned_physical_gpu_ids is None
    gpus = fleet_gpus(args, options, config)
    assert [gpus.of(slot) for slot in range(2)] == [("3",), ("1",)]
    slices = parsed(options, "--device-ids", "MIG-a,MIG-b").device_ids
    assert find_gpus(config, "", slices, 1, MACHINE).visible == (
        "MIG-a", "MIG-b",
    )  # fmt: skip


def test_a_start_with_more_engines_than_gpus_is_refused(options: ServeOptions) -> None:
    nine = dataclasses.replace(options, engines=9)
    args = parsed(nine)
    config = engine_config(args, "MODEL", nine.model)
    with pytest.raises(ConfigError, match="give at most 8, or start with --engines-per-gpu 3"):
        fleet_gpus(args, nine, config)


def test_on_a_cpu_words_stay_as_they_are(
    options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    args = parsed(options, "--block-size", "32")
    whole = found("config.cache:CacheConfig", NEEDED_BY).gpu_memory_utilization
    assert getattr(args, MEMORY_SHARE) == whole
    config = engine_config(args, "MODEL", options.model)
    assert fleet_gpus(args, options, config).environment(255) == {}


async def test_a_roll_that_needs_other_gpus_is_refused(options: ServeOptions) -> None:
    gpus = find_gpus(
        engine_config(parsed(options), "MODEL", options.model), "", None, 2,
        MACHINE,
    )  # fmt: skip
    fleet: Any = SimpleNamespace(arguments=(), settings=SimpleNamespace(gpus=gpus))
    assert (await configure(fleet, options, ("--max-num-seqs", "7"))).changed
    with pytest.raises(ConfigError, match="in a roll each engine keeps its 1 GPU"):
        await configure(fleet, options, ("--tensor-parallel-size", "3"))
