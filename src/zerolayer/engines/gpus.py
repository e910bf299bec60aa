"""Which GPUs each engine has: whole ones, by its slot, the same at every start of that slot.

An engine's process sees no others: it gets them in CUDA_VISIBLE_DEVICES before CUDA is up, and
vLLM's workers inherit that from their core, forked or spawned. So each engine's devices are
`cuda:0` and on.

vLLM's own `--device-ids` (`parallel_config.assigned_physical_gpu_ids`) would leave all of them
visible and give engines `cuda:1`, `cuda:2`. But vLLM keeps compiled code by rank and not by device,
and code that was compiled for one device fails on another (vLLM pull request 38962); and it turns a
MIG slice into a number, which says no more which slice it is. So what the user says there goes into
the variable too.

Engines that share a GPU start one after the other (`Launcher`): vLLM measures what is free of it
while it starts, and takes for its own what another program takes meanwhile.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zerolayer.core.errors import ConfigError

DEVICE_TYPE = "cuda"
CHOSEN_GPUS = "CUDA_VISIBLE_DEVICES"
MEMORY_SHARE = "gpu_memory_utilization"
PER_GPU = "--engines-per-gpu"


class Platform(Protocol):
    """What is asked of vLLM's `current_platform`."""

    device_type: str

    def device_count(self) -> int:
        """GPUs that CUDA_VISIBLE_DEVICES leaves; does not touch them."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The fleet's GPUs, and how they are shared out."""

    visible: tuple[str, ...]
    """In the user's order, each an index in PCI order or a UUID (`GPU-...`, `MIG-...`)."""
    each: int
    """How many an engine takes: one for each of its ranks. 0: none are given to engines."""
    engines_per_gpu: int = 1

    @property
    def engines_max(self) -> int:
        """Engines that find GPUs."""
        return self._groups() * self.engines_per_gpu

    def of(self, slot: int) -> tuple[str, ...]:
        """Those of a slot. Slots go around all GPUs before a second one shares any."""
        if not self.each:
            return ()
        assert slot < self.engines_max, "`require` refuses what does not fit"
        first = slot % self._groups() * self.each
        return self.visible[first : first + self.each]

    def environment(self, slot: int) -> dict[str, str]:
        """What the slot's process must have in its environment to see those and no others."""
        return {CHOSEN_GPUS: ",".join(self.of(slot))} if self.each else {}

    def require(self, field: str, engines: int) -> None:
        """Raises `ConfigError` about `field` when so many engines do not find GPUs."""
        if not self.each or engines <= self.engines_max:
            return
        has = f"this machine has {_counted(len(self.visible), 'visible GPU')}"
        fix = f"{has} and each engine takes {self.each}"
        if groups := self._groups():
            fix += f": give at most {self.engines_max}, "
            fix += f"or start with {PER_GPU} {-(-engines // groups)}"
        raise ConfigError(field, engines, fix)

    def require_same_size(self, config: Any) -> None:
        """Raises `ConfigError` when an engine with this config takes another number of GPUs."""
        ranks = config.parallel_config.world_size
        if self.each and ranks != self.each:
            raise ConfigError(
                "--tensor-parallel-size times --pipeline-parallel-size", ranks,
                f"in a roll each engine keeps its {_counted(self.each, 'GPU')}; end the server and "
                "start zerolayer serve with it",
            )  # fmt: skip

    def _groups(self) -> int:
        return len(self.visible) // self.each if self.each else 0


NO_GPUS = Gpus((), 0)
"""On a CPU, or where Ray chooses."""


def find_gpus(
    config: Any, chosen: str, device_ids: Sequence[int | str] | None, engines_per_gpu: int,
    platform: Platform,
) -> Gpus:  # fmt: skip
    """`chosen`: the user's CUDA_VISIBLE_DEVICES; `device_ids`: his `--device-ids`, by which he
    chooses among those. Raises `ConfigError`."""
    parallel = config.parallel_config
    if platform.device_type != DEVICE_TYPE or parallel.distributed_executor_backend == "ray":
        return NO_GPUS
    visible = _picked(_visible(chosen, platform), device_ids or ())
    return Gpus(visible, parallel.world_size, engines_per_gpu)


def take_device_ids(engine_args: Any, platform: Platform) -> None:
    """Keep `--device-ids` from vLLM's config: `find_gpus` has seen to them."""
    if platform.device_type == DEVICE_TYPE:
        engine_args.device_ids = None


def divide_memory(
    parser: argparse.ArgumentParser, engines_per_gpu: int, platform: Platform
) -> None:
    """Where engines share GPUs, each gets its part of what vLLM's parser gives one alone."""
    if platform.device_type == DEVICE_TYPE:
        share = parser.get_default(MEMORY_SHARE) / engines_per_gpu
        parser.set_defaults(**{MEMORY_SHARE: share})


def require_memory(args: argparse.Namespace, engines_per_gpu: int, platform: Platform) -> None:
    """Raises `ConfigError` when the engines of a GPU would take more than all of it."""
    share = getattr(args, MEMORY_SHARE)
    if platform.device_type == DEVICE_TYPE and share * engines_per_gpu > 1.0:
        raise ConfigError(
            f"--{MEMORY_SHARE.replace('_', '-')}", share,
            f"{engines_per_gpu} engines share a GPU ({PER_GPU}): give at most "
            f"{100 // engines_per_gpu / 100:g}, or leave it out",
        )  # fmt: skip


def _visible(chosen: str, platform: Platform) -> tuple[str, ...]:
    named = tuple(word.strip() for word in chosen.split(",") if word.strip())
    if not named:
        return tuple(map(str, range(platform.device_count())))
    if any(word.startswith("MIG-") for word in named):
        return named  # CUDA counts one slice in a process, however many are named
    return named[: platform.device_count()]  # an entry that is none hides all behind it


def _picked(visible: tuple[str, ...], ids: Sequence[int | str]) -> tuple[str, ...]:
    """An id is a UUID, or a place among the visible ones, as in vLLM."""
    if not ids:
        return visible
    shown = ",".join(map(str, ids))
    if len(set(ids)) != len(ids) or len({type(each) for each in ids}) > 1:
        raise ConfigError("--device-ids", shown, "name each GPU once, all by number or all by UUID")
    beyond = [each for each in ids if isinstance(each, int) and not 0 <= each < len(visible)]
    if beyond:
        has = _counted(len(visible), "visible GPU")
        raise ConfigError("--device-ids", shown, f"this machine has {has}, counted from 0")
    return tuple(each if isinstance(each, str) else visible[each] for each in ids)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
