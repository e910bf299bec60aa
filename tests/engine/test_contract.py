"""Everything of vLLM's inside that Zero-Layer touches, held to what it is in that release.

No engine is started. Each failure says what changed in vLLM and what in Zero-Layer depends on it:
a version bump is then a list of places to look at and not a search.
"""

import ast
import dataclasses
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from zerolayer.engines import replay, resume
from zerolayer.engines.client import FleetClient
from zerolayer.engines.connector import ZeroLayerConnector
from zerolayer.engines.port import PortClient, engine_request
from zerolayer.engines.usage import FIELD, install_usage_extras
from zerolayer.engines.version import require_supported_vllm
from zerolayer.stitch.driver import SubmitOrder

VOCABULARY = 128


@dataclass(frozen=True)
class Part:
    """A class or function of vLLM, names that it must have, and who in Zero-Layer needs them."""

    where: str  # "module:Class.method" below `vllm.`
    names: tuple[str, ...]
    needed_by: str


def part(where: str, names: str, needed_by: str) -> Part:
    return Part(where, tuple(names.split()), needed_by)


#: Parameters that we pass by name or position.
CALLED = (
    part("v1.engine.core_client:EngineCoreClient.make_async_mp_client",
         "vllm_config executor_class log_stats", "app/serve.py puts the FleetClient in its place"),
    part("v1.engine.core_client:AsyncMPClient.__init__",
         "vllm_config executor_class log_stats client_addresses",
         "engines/launcher.py connects to an engine that it started itself"),
    part("v1.engine.core_client:AsyncMPClient.add_request_async", "request", "engines/port.py"),
    part("v1.engine.core_client:AsyncMPClient.abort_requests_async", "request_ids",
         "engines/port.py"),
    part("v1.engine.core_client:AsyncMPClient.call_utility_async", "method args",
         "engines/port.py proves an engine by a round trip"),
    part("v1.engine.core:EngineCoreProc.__init__",
         "vllm_config local_client handshake_address executor_class log_stats",
         "engines/child.py starts an engine through run_engine_core"),
    part("v1.engine.async_llm:AsyncLLM.from_vllm_config",
         "vllm_config enable_log_requests disable_log_stats aggregate_engine_logging",
         "app/serve.py"),
    part("v1.engine.async_llm:AsyncLLM.check_admission", "n request_id",
         "app/admission.py asks behind it"),
    part("v1.engine.output_processor:RequestOutputCollector.put", "output",
         "app/serve.py ends a lost stream with an error"),
    part("v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
         "layer key value kv_cache slot_mapping", "engines/kv_layout.py asks where a token lies"),
    part("v1.structured_output:StructuredOutputManager._create_grammar", "request",
         "engines/resume.py advances a moved stream's grammar"),
    part("v1.structured_output:StructuredOutputManager._get_reasoner", "request",
         "engines/resume.py finds where reasoning ended"),
    part("v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens",
         "request_id tokens", "engines/resume.py advances a moved stream's grammar"),
    part("reasoning:ReasoningParser.is_reasoning_end", "input_ids", "engines/resume.py"),
    part("reasoning:ReasoningParser.is_reasoning_end_streaming", "input_ids delta_ids",
         "engines/resume.py"),
    part("v1.metrics.stats:PrefillStats.set",
         "num_prompt_tokens num_local_cached_tokens num_external_cached_tokens",
         "engines/snapshot_scheduler.py says how much was restored"),
    part("v1.core.block_pool:BlockPool.get_num_free_blocks", "self", "engines/progress.py"),
    part("v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids", "self", "engines/connector.py"),
    part("entrypoints.launchers.launcher:setup_server", "args reuse_port", "app/serve.py"),
    part("entrypoints.launchers.launcher:serve_http", "app sock enable_ssl_refresh uvicorn_kwargs",
         "app/serve.py"),
    part("entrypoints.launchers.app:build_app", "args supported_tasks model_config",
         "app/serve.py"),
    part("entrypoints.launchers.api_server.app_state:init_app_state",
         "engine_client state args supported_tasks", "app/serve.py"),
    part("entrypoints.launchers.cli_args:make_arg_parser", "parser", "app/serve.py"),
    part("entrypoints.launchers.cli_args:validate_parsed_serve_args", "args", "app/serve.py"),
    part("v1.executor:Executor.get_class", "vllm_config", "engines/launcher.py, engines/child.py"),
)  # fmt: skip

#: Fields that we read, write or fill in.
FIELDS = (
    part("v1.engine:EngineCoreRequest",
         "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time "
         "lora_request cache_salt data_parallel_rank prompt_embeds resumable",
         "engines/port.py makes and rewrites requests"),
    part("v1.engine:EngineCoreOutput",
         "request_id new_token_ids finish_reason prefill_stats events",
         "engines/fleet.py fences outputs and renames them"),
    part("v1.engine:EngineCoreOutputs",
         "outputs scheduler_stats finished_requests engine_index",
         "engines/fleet.py fences outputs and labels them with their engine"),
    part("v1.engine.utils:EngineZmqAddresses", "inputs outputs", "engines/launcher.py"),
    part("v1.engine.utils:EngineHandshakeMetadata", "addresses parallel_config",
         "engines/launcher.py answers an engine's HELLO"),
    part("v1.worker.gpu_input_batch:CachedRequestState",
         "sampling_params generator output_token_ids",
         "engines/resume.py rebuilds a moved request in the worker"),
    part("v1.metrics.stats:PrefillStats",
         "num_prompt_tokens num_cached_tokens num_external_cached_tokens", "engines/port.py"),
    part("v1.core.sched.output:SchedulerOutput",
         "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens",
         "engines/snapshot_scheduler.py and engines/progress.py follow each step"),
    part("v1.core.sched.output:NewRequestData", "req_id num_computed_tokens block_ids",
         "engines/snapshot_scheduler.py"),
    part("v1.core.sched.output:CachedRequestData",
         "req_ids num_computed_tokens new_block_ids resumed_req_ids",
         "engines/snapshot_scheduler.py"),
    part("config.cache:CacheConfig", "block_size num_gpu_blocks enable_prefix_caching",
         "engines/prefixes.py knows how much an engine can hold"),
    part("config.parallel:ParallelConfig", "world_size distributed_executor_backend",
         "engines/gpus.py shares GPUs out to engines"),
    part("engine.arg_utils:AsyncEngineArgs", "device_ids gpu_memory_utilization",
         "engines/gpus.py shares GPUs out to engines"),
    part("sampling_params:SamplingParams", "skip_reading_prefix_cache", "engines/prefixes.py"),
    part("pooling_params:PoolingParams", "skip_reading_prefix_cache", "engines/prefixes.py"),
    part("v1.kv_cache_interface:KVCacheConfig", "kv_cache_groups num_blocks",
         "engines/settings.py sizes the arena"),
    part("v1.kv_cache_interface:KVCacheGroupSpec", "layer_names kv_cache_spec",
         "engines/settings.py sizes the arena"),
    part("v1.kv_cache_interface:FullAttentionSpec", "block_size", "engines/settings.py"),
    part("config:KVTransferConfig",
         "kv_connector kv_connector_module_path kv_role kv_load_failure_policy engine_id "
         "kv_connector_extra_config", "engines/fleet.py makes vLLM load our connector"),
)  # fmt: skip


def found(where: str, needed_by: str) -> Any:
    """An object of vLLM, or a sentence that says who misses it."""
    module, _, path = where.partition(":")
    try:
        value: Any = importlib.import_module(f"vllm.{module}")
        for name in path.split(".") if path else ():
            value = getattr(value, name)
    except (ImportError, AttributeError) as cause:
        pytest.fail(f"vLLM has no {where} any more ({cause}); it is needed by: {needed_by}")
    return value


def source(where: str, needed_by: str) -> str:
    return textwrap.dedent(inspect.getsource(found(where, needed_by)))


def field_names(kind: Any) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(kind.__struct_fields__)


def test_the_installed_release_is_the_one_that_this_room_was_written_against() -> None:
    require_supported_vllm()


@pytest.mark.parametrize("needed", CALLED, ids=lambda needed: needed.where)
def test_what_we_call_still_takes_what_we_pass(needed: Part) -> None:
    parameters = inspect.signature(found(needed.where, needed.needed_by)).parameters
    missing = set(needed.names) - set(parameters)
    assert not missing, (
        f"vLLM's {needed.where} has no parameter {sorted(missing)} any more (it has "
        f"{list(parameters)}); it is needed by: {needed.needed_by}"
    )


@pytest.mark.parametrize("needed", FIELDS, ids=lambda needed: needed.where)
def test_what_we_read_and_write_still_has_its_fields(needed: Part) -> None:
    missing = set(needed.names) - field_names(found(needed.where, needed.needed_by))
    assert not missing, (
        f"vLLM's {needed.where} has no field {sorted(missing)} any more; it is needed by: "
        f"{needed.needed_by}"
    )


# -- the client between AsyncLLM and its engines --------------------------------------------------


def async_methods(kind: type[Any]) -> set[str]:
    return {name for name, value in inspect.getmembers(kind) if inspect.iscoroutinefunction(value)}


def test_the_fleet_client_answers_every_call_that_vllm_makes_of_its_engines() -> None:
    base = found("v1.engine.core_client:EngineCoreClient", "engines/client.py")
    #: Elastic expert parallelism and its faults: of engines that are coupled, ours are not.
    left_out = {"commit_elastic_ep", "prepare_elastic_ep", "handle_fault"}
    inherited = {
        name
        for name in async_methods(base) - left_out
        if getattr(FleetClient, name) is getattr(base, name)
    }
    assert not inherited, (
        f"vLLM's EngineCoreClient has calls that engines/client.py does not answer: {inherited}"
    )


def test_async_llm_touches_nothing_else_of_its_client() -> None:
    tree = ast.parse(source("v1.engine.async_llm:AsyncLLM", "engines/client.py"))
    touched = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute | ast.Name)
        and (getattr(node.value, "attr", None) or getattr(node.value, "id", None)) == "engine_core"
    }
    client = FleetClient(
        SimpleNamespace(driver=None, settings=SimpleNamespace(engines=2))  # type: ignore[arg-type]
    )
    missing = {name for name in touched if not hasattr(client, name)}
    assert touched >= {"add_request_async", "abort_requests_async", "get_output_async"}
    # Events of KV caches are asked for only when --kv-events-config is given.
    assert missing <= {"get_kv_event_sources"}, (
        f"AsyncLLM uses {missing} of its client, which engines/client.py does not have"
    )


def test_async_llm_still_asks_the_factory_for_its_client() -> None:
    text = source("v1.engine.async_llm:AsyncLLM.__init__", "app/serve.py")
    assert "EngineCoreClient.make_async_mp_client(" in text, (
        "AsyncLLM no longer gets its client from EngineCoreClient.make_async_mp_client; "
        "app/serve.py replaces the client there"
    )


async def test_the_reading_task_hands_each_message_to_our_hook_before_it_queues_it() -> None:
    text = source(
        "v1.engine.core_client:AsyncMPClient._ensure_output_queue_task", "engines/port.py"
    )
    for piece, why in (
        ('getattr(self.__class__, "process_engine_outputs", None)', "finds our hook on the class"),
        ("await output_handler(_self, outputs)", "awaits our hook with the message"),
        ("outputs_queue = self.outputs_queue", "takes our stand-in for its queue"),
        ("outputs_queue.put_nowait(EngineDeadError())", "puts an exception at the engine's end"),
    ):
        assert piece in text, (
            f"AsyncMPClient._ensure_output_queue_task no longer {why} ({piece!r}); "
            "engines/port.py leads an engine's outputs to the fleet through it"
        )
    assert "process_engine_outputs" in PortClient.__dict__


def test_the_handshake_still_says_hello_and_ready() -> None:
    needed_by = "engines/launcher.py answers HELLO with the addresses and waits for READY"
    hello = source("v1.engine.core:EngineCoreProc.startup_handshake", needed_by)
    ready = source("v1.engine.core:EngineCoreProc._perform_handshake", needed_by)
    assert '"status": "HELLO"' in hello, f"an engine no longer says HELLO; {needed_by}"
    assert '"status": "READY"' in ready, f"an engine no longer says READY; {needed_by}"
    assert "EngineHandshakeMetadata" in hello, f"an engine expects another answer; {needed_by}"


def test_an_exception_that_is_put_for_a_request_is_raised_to_its_reader() -> None:
    collector = found("v1.engine.output_processor:RequestOutputCollector", "app/serve.py")
    error = found("exceptions:GracefulHTTPError", "app/serve.py")("gone", 503)
    queue = collector(SimpleNamespace(value=2), "r")
    queue.put(error)
    with pytest.raises(type(error), match="gone"):
        queue.get_nowait()


def test_async_llm_hands_this_exception_on_with_its_text() -> None:
    text = source("v1.engine.async_llm:AsyncLLM.generate", "app/serve.py")
    assert "except (VLLMClientError, GracefulHTTPError)" in text, (
        "AsyncLLM.generate no longer raises GracefulHTTPError unchanged; app/serve.py ends a lost "
        "stream with it, and its text would not reach the client"
    )


def test_async_llm_keeps_the_reader_of_each_request_where_we_look_for_it() -> None:
    state = source("v1.engine.output_processor:RequestState.__init__", "app/serve.py")
    processor = source("v1.engine.output_processor:OutputProcessor.__init__", "app/serve.py")
    llm = source("v1.engine.async_llm:AsyncLLM", "app/serve.py tells a stop string from a client")
    assert "self.queue = " in state
    assert "self.request_states" in processor
    assert "self.output_handler" in llm


def test_readers_of_in_host_queues_have_one_default_and_it_is_how_long_they_spin() -> None:
    where, needed_by = "SpinCondition.__init__", "engines/child.py:spin_briefly shortens it"
    init = found(f"distributed.device_communicators.shm_broadcast:{where}", needed_by)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(init).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert list(defaults) == ["busy_loop_s"], (
        f"vLLM's {where} has the defaults {defaults} now; {needed_by}"
    )


def test_a_reader_of_an_in_host_queue_looks_again_whenever_its_wait_returns() -> None:
    where, needed_by = "distributed.device_communicators.shm_broadcast", "engines/child.py"
    wait = found(f"{where}:SpinCondition.wait", needed_by)
    assert list(inspect.signature(wait).parameters) == ["self", "timeout_ms"], needed_by
    text = source(f"{where}:MessageQueue.acquire_read", needed_by)
    assert "_spin_condition.wait(timeout_ms=" in text, (
        f"vLLM's queue readers wait otherwise now; {needed_by} bounds each wait"
    )
    assert "while True:" in text, f"a wait that ends early is no longer harmless; {needed_by}"


# -- the connector --------------------------------------------------------------------------------

OURS = [
    name
    for name, value in vars(ZeroLayerConnector).items()
    if inspect.isfunction(value) and not name.startswith("_")
]


@pytest.mark.parametrize("name", OURS)
def test_the_connector_overrides_a_method_that_vllm_has_with_the_same_parameters(name: str) -> None:
    base = found(
        f"distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.{name}",
        "engines/connector.py overrides it",
    )
    theirs = list(inspect.signature(base).parameters)
    ours = list(inspect.signature(getattr(ZeroLayerConnector, name)).parameters)
    assert ours == theirs, (
        f"KVConnectorBase_V1.{name} takes {theirs} now, engines/connector.py takes {ours}"
    )


def test_the_connector_is_complete() -> None:
    assert not inspect.isabstract(ZeroLayerConnector), (
        "KVConnectorBase_V1 has new abstract methods that engines/connector.py lacks: "
        f"{sorted(ZeroLayerConnector.__abstractmethods__)}"
    )


# -- a moved request ------------------------------------------------------------------------------


def sampling(**fields: Any) -> Any:
    return found("sampling_params:SamplingParams", "engines/port.py")(max_tokens=8, **fields)


def core_request(**fields: Any) -> Any:
    return found("v1.engine:EngineCoreRequest", "engines/port.py")(
        **{
            "request_id": "r", "prompt_token_ids": [1, 2, 3], "mm_features": None,
            "sampling_params": sampling(), "pooling_params": None, "arrival_time": 0.0,
            "lora_request": None, "cache_salt": "salt", "data_parallel_rank": None, **fields,
        }
    )  # fmt: skip


def moved_request(output: list[int], **params: Any) -> Any:
    """A moved stream as an engine gets it, over the wire."""
    order = SubmitOrder(
        core_request(sampling_params=sampling(**params)), "r@1", output, ["arena-e0-1-r0.kv"]
    )
    sent = engine_request(order)
    assert sent.sampling_params.skip_reading_prefix_cache is False
    encoder = found("v1.serial_utils:MsgpackEncoder", "engines/port.py")()
    decoder = found("v1.serial_utils:MsgpackDecoder", "engines/port.py")(type(sent))
    return decoder.decode(encoder.encode(sent))


def test_a_moved_request_is_rebuilt_as_prompt_and_output_in_the_scheduler() -> None:
    kind = found("v1.request:Request", "engines/resume.py splits prompt and output")
    request = kind.from_engine_core_request(moved_request([7, 8]), None)
    marker = resume.split_scheduler_request(request)
    assert marker is not None
    assert marker.output == [7, 8]
    state = (
        list(request.prompt_token_ids), list(request.output_token_ids), request.num_prompt_tokens,
        request.num_output_tokens, request.num_tokens, list(request.all_token_ids),
        list(request._all_token_ids),
    )  # fmt: skip
    all_tokens = [1, 2, 3, 7, 8]
    assert state == ([1, 2, 3], [7, 8], 3, 2, 5, all_tokens, all_tokens), (
        "vLLM's Request keeps prompt and output in another way now; "
        "engines/resume.py:split_scheduler_request rebuilds a moved request in it"
    )
    assert request.prefill_stats is not None
    assert isinstance(request.block_hashes, list)


@pytest.fixture
def model_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The V1 runner's module with our worker-side resume in it, taken back afterwards."""
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    if not hasattr(runner, "CachedRequestState"):
        pytest.fail(
            "vllm.v1.worker.gpu_model_runner has no CachedRequestState any more; engines/resume.py "
            "replaces it, so that a moved request is rebuilt with its output in the worker"
        )
    monkeypatch.setattr(runner, "CachedRequestState", runner.CachedRequestState)
    resume.install_worker_resume(VOCABULARY)
    return runner


def test_a_moved_request_is_rebuilt_as_prompt_and_output_in_the_worker(model_runner: Any) -> None:
    state = model_runner.CachedRequestState(
        req_id="r@1", prompt_token_ids=[1, 2, 3], mm_features=[],
        sampling_params=moved_request([7, 8]).sampling_params, generator=None,
        block_ids=([],), num_computed_tokens=4, output_token_ids=[],
    )  # fmt: skip
    assert (state.output_token_ids, state.num_tokens) == ([7, 8], 5)


def test_the_runner_still_builds_its_state_by_keyword_under_the_name_that_we_replace() -> None:
    needed_by = "engines/resume.py replaces CachedRequestState in gpu_model_runner"
    text = source("v1.worker.gpu_model_runner:GPUModelRunner._update_states", needed_by)
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "CachedRequestState"
    ]
    assert len(calls) == 1, f"_update_states builds CachedRequestState {len(calls)} times"
    passed = {keyword.arg for keyword in calls[0].keywords}
    assert not calls[0].args, f"CachedRequestState is built by position now; {needed_by}"
    assert passed >= {"sampling_params", "generator", "output_token_ids"}, needed_by


@pytest.mark.parametrize("draws", [1, 5])
def test_the_cpu_sampler_draws_once_per_token_from_a_seeded_generator(draws: int) -> None:
    torch = pytest.importorskip("torch")
    sampler = found(
        "v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu",
        "engines/replay.py:advance_generator repeats its draws",
    )
    sampled, advanced = (torch.Generator().manual_seed(7) for _ in range(2))
    owner = SimpleNamespace(logprobs_mode="raw_logprobs", use_fp64_gumbel=False)
    for _ in range(draws):
        sampler(owner, torch.zeros(1, VOCABULARY), {0: sampled}, None, None)
    replay.advance_generator(advanced, draws, VOCABULARY)
    assert torch.equal(sampled.get_state(), advanced.get_state()), (
        "vLLM's CPU sampler draws in another way from a seeded generator now; "
        "engines/replay.py:advance_generator must repeat it, or seeded streams go on differently"
    )


def test_a_draw_that_vllm_takes_back_is_drawn_again(model_runner: Any) -> None:
    """As the runner does it for a row whose prefill is not over: the sampler drew for nothing."""
    torch = pytest.importorskip("torch")
    text = source(
        "v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync", "engines/replay.py"
    )
    assert "gen.set_offset(gen.get_offset() - 4)" in text, (
        "vLLM takes a draw back in another way now; engines/replay.py:ReplayGenerator must follow"
    )
    state = model_runner.CachedRequestState(
        req_id="r@1", prompt_token_ids=[1, 2, 3], mm_features=[],
        sampling_params=moved_request([7, 8], seed=5).sampling_params,
        generator=torch.Generator().manual_seed(5), block_ids=([],), num_computed_tokens=0,
        output_token_ids=[],
    )  # fmt: skip
    untouched = torch.Generator().manual_seed(5)
    replay.advance_generator(untouched, 2, VOCABULARY)
    drawn = None
    for _ in range(2):
        drawn = torch.randint(0, 2**31, (1,), generator=state.generator, dtype=torch.long)
        state.generator.set_offset(state.generator.get_offset() - 4)
        assert torch.equal(state.generator.get_state(), untouched.get_state())
    wanted = torch.randint(0, 2**31, (1,), generator=untouched, dtype=torch.long)
    assert torch.equal(drawn, wanted)


def test_grammars_are_made_by_the_method_that_we_extend() -> None:
    text = source("v1.structured_output:StructuredOutputManager.grammar_init", "engines/resume.py")
    assert "self._create_grammar" in text, (
        "StructuredOutputManager.grammar_init no longer calls _create_grammar; engines/resume.py "
        "advances a moved stream's grammar there"
    )
    manager = source("v1.structured_output:StructuredOutputManager.__init__", "engines/resume.py")
    assert "self.enable_in_reasoning" in manager
    fields = source("v1.structured_output.request:StructuredOutputRequest", "engines/resume.py")
    assert "reasoning_ended" in fields


def test_a_moved_request_goes_to_the_front_of_the_waiting_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed_by = "engines/resume.py puts moved requests first"
    scheduler = found("v1.core.sched.scheduler:Scheduler", needed_by)
    queue = found("v1.core.sched.request_queue:FCFSRequestQueue", needed_by)()
    text = source("v1.core.sched.scheduler:Scheduler.add_request", needed_by)
    assert "self._enqueue_waiting_request(request)" in text, (
        "Scheduler.add_request no longer goes through _enqueue_waiting_request; " + needed_by
    )
    name = "_enqueue_waiting_request"
    monkeypatch.setattr(scheduler, name, getattr(scheduler, name))
    resume.install_moved_first()
    state = SimpleNamespace(
        waiting=queue,
        _is_blocked_waiting_status=lambda status: False,
        _holds_kv_blocks=lambda request: False,
    )
    marker = {resume.MARKER: {"output": [5], "sources": []}}
    new, other, moved = (
        SimpleNamespace(status=None, sampling_params=SimpleNamespace(extra_args=extra))
        for extra in (None, None, marker)
    )
    for request in (new, other, moved):
        getattr(scheduler, name)(state, request)
    assert list(queue) == [moved, new, other], (
        "vLLM's scheduler queues requests in another way; " + needed_by
    )


# -- the server -----------------------------------------------------------------------------------


def test_usage_takes_a_field_more_and_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerolayer.engines.client import dispatch_time_ms

    needed_by = "engines/usage.py adds kernel_dispatch_time_ms"
    chat = found("entrypoints.serve.engine.protocol:UsageInfo", needed_by)
    responses = found("entrypoints.openai.responses.protocol:ResponseUsage", needed_by)
    for kind in (chat, responses):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    install_usage_extras()
    token = dispatch_time_ms.set(1.25)
    try:
        assert chat(prompt_tokens=1).model_dump()[FIELD] == 1.25, needed_by
        assert FIELD in chat(prompt_tokens=1).model_dump_json(exclude_unset=True), needed_by
    finally:
        dispatch_time_ms.reset(token)


def test_the_server_still_loads_middleware_by_its_dotted_name() -> None:
    text = source("entrypoints.serve.middleware.register:init_entrypoints_middleware", "app")
    assert "for middleware in args.middleware" in text, (
        "vLLM's server no longer loads `--middleware` by name; app/serve.py puts "
        "gateway/sse.py in there, which withholds [DONE] after an error"
    )


def test_what_travels_in_extra_args_arrives_as_it_was_sent() -> None:
    marker = resume.marker_of(moved_request([7]).sampling_params)
    assert marker == resume.ResumeMarker(output=[7], sources=["arena-e0-1-r0.kv"])
    assert msgspec.to_builtins(marker) == {"output": [7], "sources": ["arena-e0-1-r0.kv"]}
