"""Starts one vLLM engine core and ends it: process, handshake, sockets, process tree."""

import asyncio
import contextlib
import copy
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psutil
import zmq
import zmq.asyncio
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.executor import Executor

from zerolayer.core.errors import EngineError
from zerolayer.engines import preload
from zerolayer.engines.child import engine_main
from zerolayer.engines.leftovers import shared_memory_of
from zerolayer.engines.lifetime import renice
from zerolayer.engines.port import PortClient

#: An engine that has not said READY by then is given up (large models load for minutes).
START_TIMEOUT_S = 900.0
#: How long a terminated engine may take to end before it is killed.
TERMINATE_GRACE_S = 2.0
#: How long a killed process may take to be gone (its memory has to be given back).
KILL_GRACE_S = 5.0
#: The end of an engine's log that is searched for its last words.
LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class LaunchOrder:
    """Everything that one engine start needs."""

    name: str  # "e0"
    incarnation: int
    vllm_config: Any  # a private copy: the engine's extra config is already in it
    log_path: Path
    environment: dict[str, str]
    scratch: Path
    """For its temporary files and sockets; made with it and removed after it."""
    gpus: tuple[str, ...] = ()
    """Engines with the same ones start one after the other."""

    def new_socket(self) -> str:
        """An address that no other socket has."""
        return f"ipc://{self.scratch}/{uuid4().hex}"

    def clean_up(self) -> None:
        """Remove what the engine's processes left. They are gone."""
        shutil.rmtree(self.scratch, ignore_errors=True)


@dataclass
class LaunchedEngine:
    """A started engine: its client (vLLM's own), its processes, how long the start took."""

    order: LaunchOrder
    process: BaseProcess
    client: PortClient
    worker_pids: tuple[int, ...]
    shared_memory: list[str]  # segments of vLLM's own queues, to be removed after a kill
    start_seconds: float

    @property
    def pids(self) -> tuple[int, ...]:
        """The engine core first, then its workers."""
        assert self.process.pid is not None
        return (self.process.pid, *self.worker_pids)


class Launcher:
    """Starts engines from one fork server that has vLLM imported already."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preload.PRELOAD)
        self._zmq = zmq.asyncio.Context()
        self._turns: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)

    def warm_up(self, scratch: Path) -> None:
        """Start the fork server (call in the main thread: its death signal hangs on it).

        `scratch`: where its socket is from now on; whoever removes that removes it. Raises
        `EngineError` where it cannot be made.
        """
        _make_scratch(scratch)
        usual, tempfile.tempdir = tempfile.tempdir, str(scratch)
        try:
            preload.ensure_running()
        finally:
            tempfile.tempdir = usual

    async def start(self, order: LaunchOrder) -> LaunchedEngine:
        """Start an engine and wait until it is ready.

        Raises `EngineError` with the engine's last words when it ends before it is ready.
        """
        if not order.gpus:
            return await self._start(order)
        async with self._turns[order.gpus]:
            return await self._start(order)

    async def _start(self, order: LaunchOrder) -> LaunchedEngine:
        began = time.monotonic()
        _make_scratch(order.scratch)
        process = self._context.Process(
            target=engine_main,
            name=f"EngineCore-{order.name}",
            kwargs={
                "fleet_pid": os.getpid(),
                "vllm_config": order.vllm_config,
                "handshake_address": (handshake := order.new_socket()),
                "log_path": str(order.log_path),
                "environment": order.environment,
                "scratch": order.scratch,
            },
        )
        addresses = EngineZmqAddresses(inputs=[order.new_socket()], outputs=[order.new_socket()])
        loop = asyncio.get_running_loop()
        try:
            with self._handshake_socket(handshake) as socket:
                await loop.run_in_executor(None, process.start)
                await self._shake_hands(socket, process, addresses, order)
            client = await loop.run_in_executor(None, self._connect, order, addresses)
        except BaseException:
            await asyncio.shield(loop.run_in_executor(None, kill_tree, process))
            order.clean_up()
            raise
        assert process.pid is not None
        workers = tuple(_workers_of(process.pid))
        launched = LaunchedEngine(
            order=order,
            process=process,
            client=client,
            worker_pids=workers,
            shared_memory=shared_memory_of((process.pid, *workers)),
            start_seconds=time.monotonic() - began,
        )
        renice(launched.pids, 0)
        return launched

    @contextlib.contextmanager
    def _handshake_socket(self, address: str) -> Iterator[zmq.asyncio.Socket]:
        socket = self._zmq.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        try:
            yield socket
        finally:
            socket.close()

    async def _shake_hands(
        self,
        socket: zmq.asyncio.Socket,
        process: BaseProcess,
        addresses: EngineZmqAddresses,
        order: LaunchOrder,
    ) -> None:
        """vLLM's start-up handshake: HELLO is answered with the addresses, then READY comes."""
        with ended_event(process) as ended:
            gone = asyncio.ensure_future(ended.wait())
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    while True:
                        status = await self._next_status(socket, gone, process, order)
                        if status[1] == "READY":
                            return
                        reply = EngineHandshakeMetadata(addresses=addresses, parallel_config={})
                        await socket.send_multipart([status[0], msgspec.msgpack.encode(reply)])
            except TimeoutError as cause:
                raise EngineError(
                    f"engine {order.name} was not ready after {START_TIMEOUT_S:.0f} s; "
                    f"its log: {order.log_path}"
                ) from cause
            finally:
                gone.cancel()

    async def _next_status(
        self,
        socket: zmq.asyncio.Socket,
        gone: "asyncio.Future[Any]",
        process: BaseProcess,
        order: LaunchOrder,
    ) -> tuple[bytes, str]:
        received = asyncio.ensure_future(socket.recv_multipart())
        await asyncio.wait({received, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not received.done():
            received.cancel()
            raise EngineError(
                f"engine {order.name} ended while it was starting "
                f"({exit_text(process)}): {last_words(order.log_path)}; log: {order.log_path}"
            )
        identity, payload = received.result()
        return identity, msgspec.msgpack.decode(payload)["status"]

    def _connect(self, order: LaunchOrder, addresses: EngineZmqAddresses) -> PortClient:
        """vLLM's client for an engine that is managed from outside. Blocks for some 100 ms."""
        config = copy.deepcopy(order.vllm_config)
        config.cache_config.num_gpu_blocks = None
        return PortClient(
            config,
            Executor.get_class(config),
            True,
            client_addresses={
                "input_address": addresses.inputs[0],
                "output_address": addresses.outputs[0],
            },
        )

    @staticmethod
    def close() -> None:
        """End the fork server at once, and with it whatever engine it still has.

        It ends by itself when this process is gone, but not before its imports are done.
        """
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                    child.kill()


@contextlib.contextmanager
def ended_event(process: BaseProcess) -> Iterator[asyncio.Event]:
    """An event that is set when the process ends (its sentinel becomes readable)."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process.sentinel, event.set) if process.pid is not None else None
    try:
        yield event
    finally:
        if process.pid is not None:
            loop.remove_reader(process.sentinel)


def watch_pids(pids: tuple[int, ...], on_end: Callable[[int], None]) -> Callable[[], None]:
    """Call `on_end(pid)` in the running loop as soon as a process ends; returns the undo.

    Uses pidfds: they become readable at the end of the process, also for grandchildren, which
    no SIGCHLD reports.
    """
    loop = asyncio.get_running_loop()
    watched: dict[int, int] = {}

    def ended(pid: int, fd: int) -> None:
        release(pid, fd)
        on_end(pid)

    def release(pid: int, fd: int) -> None:
        if watched.pop(pid, None) is not None:
            loop.remove_reader(fd)
            os.close(fd)

    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(on_end, pid)
            continue
        watched[pid] = fd
        loop.add_reader(fd, ended, pid, fd)

    def undo() -> None:
        for pid, fd in list(watched.items()):
            release(pid, fd)

    return undo


def kill_now(pids: tuple[int, ...]) -> None:
    """SIGKILL these processes without waiting: what is left of a dead engine takes no more CPU."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_tree(process: BaseProcess, grace_s: float = 0.0) -> None:
    """End an engine and everything it started; with a grace period, SIGTERM comes first.

    Blocks until the tree is gone. Stopped processes end too: SIGKILL reaches them.
    """
    if process.pid is None:
        return
    tree = _tree(process.pid)
    if grace_s > 0:
        _signal_all(tree, signal.SIGTERM)
        tree = _wait_gone(tree, grace_s)
    _signal_all(tree, signal.SIGKILL)
    _wait_gone(tree, KILL_GRACE_S)
    process.join(timeout=KILL_GRACE_S)


def _wait_gone(tree: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until the processes are gone; returns those that are not.

    A zombie is gone: it holds nothing any more, and whether somebody collects it is not up to us.
    """
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in tree if _is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _tree(pid: int) -> list[psutil.Process]:
    """The process, its descendants, and everything else in the group that it leads."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        found = {p.pid: p for p in (root, *root.children(recursive=True))}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(process.pid) == pid:
                found[process.pid] = process
    return list(found.values())


def _signal_all(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _workers_of(pid: int) -> list[int]:
    """Pids of the engine core's workers (not of multiprocessing's resource tracker)."""
    workers = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in child.cmdline()):
                workers.append(child.pid)
    return workers


def exit_text(process: BaseProcess) -> str:
    """How a process ended, in words: 'killed by SIGKILL', 'exit code 1', 'still running'."""
    process.join(timeout=0.1)
    code = process.exitcode
    if code is None:
        return "still running"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def last_words(log_path: Path) -> str:
    """The last error line of an engine's log, or its last line; empty when it said nothing."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log_path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if "Error" in line and "ERROR" not in line.split()[:1]]
    return (errors or lines or [""])[-1][-300:]


def _make_scratch(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as cause:
        raise EngineError(f"cannot create {path}: {cause.strerror}") from cause
