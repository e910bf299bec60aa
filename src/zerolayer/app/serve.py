"""`zerolayer serve`: vLLM's own OpenAI server in front of our fleet."""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import uvloop
from starlette.routing import BaseRoute
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.exceptions import GracefulHTTPError
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.loggers import StatLoggerManager

from zerolayer.app.admission import install_admission
from zerolayer.app.roll_arguments import configure
from zerolayer.app.vllm_words import ServeOptions, engine_config, fleet_gpus, parse_vllm_args
from zerolayer.arena.runtime_dir import RuntimeDir, reclaim
from zerolayer.core.errors import ConfigError, EngineError, ZeroLayerError
from zerolayer.core.outcome import Outcome
from zerolayer.engines.client import FleetClient
from zerolayer.engines.fleet import Fleet, FleetEvent, FleetSettings
from zerolayer.engines.gpus import Gpus
from zerolayer.engines.operations import OperationBusy
from zerolayer.engines.status import status_of
from zerolayer.engines.usage import install_usage_extras
from zerolayer.engines.version import require_supported_vllm
from zerolayer.gateway.operation_routes import operation_routes
from zerolayer.gateway.routes import Health, admin_routes

__all__ = ["ServeOptions", "run_serve"]

OnEvent = Callable[[FleetEvent], None]


def run_serve(options: ServeOptions, on_event: OnEvent) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; returns the exit status.

    Raises `ZeroLayerError` with one clear sentence when it cannot start.
    """
    require_supported_vllm()
    reclaim()
    args = parse_vllm_args(options)
    try:
        listen_address, sock = setup_server(args, reuse_port=False)
    except OSError as cause:
        raise ConfigError(
            "--port", options.port, f"it cannot be bound on {options.host} ({cause.strerror}); "
            "choose a free port with --port"
        ) from cause  # fmt: skip
    with contextlib.closing(sock):
        try:
            return uvloop.run(_serve(options, args, listen_address, sock, on_event))
        except _Stopped:
            return 0
        except BaseExceptionGroup as group:
            ours = group.subgroup(ZeroLayerError)
            if ours is None:
                raise
            raise _first_error(ours) from group


class _Stopped(Exception):
    """SIGINT or SIGTERM came before the server had its own handlers."""


async def _serve(
    options: ServeOptions,
    args: argparse.Namespace,
    listen_address: str,
    sock: socket.socket,
    on_event: OnEvent,
) -> int:
    for plugin, manager in (
        (args.tool_parser_plugin, ToolParserManager.import_tool_parser),
        (args.reasoning_parser_plugin, ReasoningParserManager.import_reasoning_parser),
    ):
        if plugin:
            manager(plugin)
    vllm_config = engine_config(args, "MODEL", options.model)
    settings = _fleet_settings(options, fleet_gpus(args, options, vllm_config))
    url = _url(listen_address, options)
    runtime = RuntimeDir.create(url=url, model=options.model, started_unix=time.time())
    try:
        with _stop_on_signals():
            async with Fleet.running(vllm_config, runtime, settings, on_event) as fleet:
                await fleet.first_ready()
                fleet.steering.configure = partial(configure, fleet, options)
                finish = await _serve_http(fleet, args, sock, url, options.remote_admin)
        await finish
    finally:
        runtime.remove()
    return 0


def _url(listen_address: str, options: ServeOptions) -> str:
    host = "127.0.0.1" if options.host in ("", "0.0.0.0") else options.host
    return listen_address if listen_address.startswith("unix:") else f"http://{host}:{options.port}"


def _fleet_settings(options: ServeOptions, gpus: Gpus) -> FleetSettings:
    environment = dict(options.environment)
    if current_platform.is_cpu():
        # The worker forks from its core, which has everything imported: 5 s a start, not 10.
        environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    return FleetSettings(
        engines=options.engines,
        snapshots=options.snapshots,
        snapshot_bytes=options.snapshot_bytes,
        wait_for_engine_s=options.wait_for_engine_s,
        log_dir=options.log_dir,
        environment=environment,
        arguments=options.vllm_args,
        offload=options.offload,
        placement=options.placement,
        gpus=gpus,
    )


async def _serve_http(
    fleet: Fleet,
    args: argparse.Namespace,
    sock: socket.socket,
    url: str,
    remote_admin: bool,
) -> Any:
    """vLLM's own application with our routes in front, until a signal ends it.

    Returns the rest of the server's shutdown, to be awaited after the fleet has ended.
    """
    install_usage_extras()
    async with _async_llm(fleet, args) as llm:
        tasks = await llm.get_supported_tasks()
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
        app.router.routes[:0] = admin_routes(
            health=lambda: Health(fleet.engines_ready(), len(fleet.supervisors)),
            status=lambda: status_of(fleet),
        )
        app.router.routes[:0] = _steering_routes(fleet, remote=remote_admin)
        fleet.note_all(f"serving at {url}")
        log_config = get_uvicorn_log_config(args)
        more = {} if log_config is None else {"log_config": log_config}
        return await serve_http(
            app,
            sock=sock,
            enable_ssl_refresh=args.enable_ssl_refresh,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
            h11_max_header_count=args.h11_max_header_count,
            **more,
        )


def _steering_routes(fleet: Fleet, *, remote: bool) -> list[BaseRoute]:
    """The operator's orders, from HTTP to the fleet."""
    steering, operations = fleet.steering, fleet.operations

    async def drain(fields: Mapping[str, Any]) -> dict[str, Any]:
        return steering.drain(fields["engine"], may_wait=fields["may_wait"]).as_json()

    async def undrain(fields: Mapping[str, Any]) -> dict[str, Any]:
        return steering.undrain(fields["engine"]).as_json()

    async def roll(fields: Mapping[str, Any]) -> dict[str, Any]:
        return (await steering.roll(fields["vllm_args"], may_wait=fields["may_wait"])).as_json()

    async def scale(fields: Mapping[str, Any]) -> dict[str, Any]:
        return steering.scale(fields["engines"], unchecked=fields["force"]).as_json()

    async def back(fields: Mapping[str, Any]) -> dict[str, Any]:
        return steering.back(fields["engine"]).as_json()

    return operation_routes(
        {"drain": drain, "undrain": undrain, "roll": roll, "scale": scale, "back": back},
        lambda: operations.newest.as_json() if operations.newest is not None else None,
        OperationBusy,
        remote=remote,
    )


@contextlib.asynccontextmanager
async def _async_llm(fleet: Fleet, args: argparse.Namespace) -> AsyncIterator[AsyncLLM]:
    """vLLM's AsyncLLM with our client in the place of its own."""
    client = FleetClient(fleet)
    with _client_factory(client):
        llm = AsyncLLM.from_vllm_config(
            fleet.vllm_config,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
            aggregate_engine_logging=args.aggregate_engine_logging,
        )
    install_admission(llm, fleet)
    client.output_task = lambda: llm.output_handler
    fleet.on_stream_failed = lambda *lost: _tell_client(llm, *lost)
    fleet.on_engines = lambda engines: _count_more_engines(llm, client, engines)
    try:
        await llm.reset_mm_cache()
        yield llm
    finally:
        llm.shutdown()


def _count_more_engines(llm: AsyncLLM, client: FleetClient, engines: int) -> None:
    """Make room in vLLM's metrics, whose labels are fixed when they are made.

    As vLLM's own elastic scaling does it: its counters begin anew (`rate()` sees a restart).
    """
    if engines <= len(client.engine_ranks_managed):
        return
    client.engine_ranks_managed = list(range(engines))
    if llm.logger_manager is not None:
        llm.logger_manager = StatLoggerManager(
            vllm_config=llm.vllm_config, engine_idxs=client.engine_ranks_managed
        )
        if hasattr(llm, "_logger_ref"):
            llm._logger_ref[0] = llm.logger_manager


@contextlib.contextmanager
def _client_factory(client: FleetClient) -> Iterator[None]:
    """The one place where vLLM's choice of client class is replaced."""
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *args, **kwargs: client)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(original)


def _tell_client(llm: AsyncLLM, stream_id: str, outcome: Outcome, message: str) -> None:
    """End a lost stream with one clear error."""
    state = llm.output_processor.request_states.get(stream_id)
    if state is None or state.queue is None:
        return
    # Of vLLM's errors the one that its engine client hands on unchanged, with text and status.
    state.queue.put(GracefulHTTPError(message, HTTPStatus(outcome.http_status)))


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Before vLLM's server has its handlers, SIGINT and SIGTERM cancel the start.

    SIGHUP, the end of a terminal, becomes SIGTERM at any time, so that nothing stays in shared
    memory; where it is ignored (`nohup`), it stays so.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, os.kill, os.getpid(), signal.SIGTERM)
    try:
        yield
    except asyncio.CancelledError:
        if stopped:
            raise _Stopped from None
        raise


def _first_error(group: BaseExceptionGroup[Any]) -> ZeroLayerError:
    """The first of our own errors inside a group."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first_error(error)
        if isinstance(error, ZeroLayerError):
            return error
    return EngineError(str(group))
