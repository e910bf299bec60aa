"""What placement and the memory picture touch of vLLM's inside; see `test_contract`."""

import asyncio
import inspect
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_contract import found, source
from zerolayer.dispatch.asked import Asked, asked
from zerolayer.dispatch.policies.base import Decision, Preference
from zerolayer.dispatch.preference import Hints
from zerolayer.engines import free_map, nvml

ANSWERS = (
    "entrypoints.openai.chat_completion.serving:OpenAIServingChat",
    "entrypoints.openai.completion.serving:OpenAIServingCompletion",
    "entrypoints.openai.responses.serving:OpenAIServingResponses",
)


@pytest.mark.parametrize("where", ANSWERS)
def test_every_api_asks_for_admission_before_it_begins_an_answer(where: str) -> None:
    needed_by = "app/admission.py refuses with 429, which a stream that has begun cannot carry"
    assert "self._preflight(" in source(where, needed_by), (
        f"vLLM's {where} does not call _preflight any more; {needed_by}"
    )
    base = "entrypoints.generate.base.serving:GenerateBaseServing._preflight"
    assert "self.engine_client.check_admission(n)" in source(base, needed_by), (
        f"vLLM's {base} no longer asks its engine client; {needed_by}"
    )


def test_a_refusal_becomes_an_answer_with_its_status_and_text() -> None:
    needed_by = "app/admission.py"
    error = found("exceptions:GracefulHTTPError", needed_by)("every engine is full", 429)
    create = found(
        "entrypoints.serve.exception_handling.error_response:create_error_response", needed_by
    )
    answer = create(type(error)(error.message, HTTPStatus(429)))
    assert (answer.error.code, answer.error.message) == (429, "every engine is full"), (
        "vLLM answers a GracefulHTTPError with another status or text now; app/admission.py needs "
        "both"
    )


def test_middleware_is_still_loaded_by_its_path_and_outermost() -> None:
    text = source(
        "entrypoints.serve.middleware.register:init_entrypoints_middleware",
        "app/vllm_words.py names our middleware there",
    )
    assert "for middleware in args.middleware:" in text
    assert text.rindex("app.add_middleware(imported)") > text.rindex("AuthenticationMiddleware")


async def test_what_the_door_reads_is_seen_where_an_engine_is_chosen_and_back() -> None:
    needed_by = "dispatch/asked.py goes around vLLM's server by a context variable"
    with_cancellation = found("entrypoints.serve.utils.api_utils:with_cancellation", needed_by)
    decision = Decision(1, 0.5, None, "zerolayer")

    async def handler(request: Any, raw_request: Any) -> str:
        seen = asked.get()
        assert seen is not None, f"vLLM runs handlers in another context now; {needed_by}"
        seen.decision = decision
        return seen.hints.preference.value

    never = asyncio.Event()
    wishes = Asked(Hints(Preference.COST_OPTIMAL))
    token = asked.set(wishes)
    try:
        said = await with_cancellation(handler)(None, SimpleNamespace(receive=never.wait))
    finally:
        asked.reset(token)
    assert said == "cost-optimal"
    assert wishes.decision is decision


# -- the memory picture ---------------------------------------------------------------------------


def test_the_list_of_free_blocks_changes_by_the_methods_that_we_follow() -> None:
    needed_by = "engines/free_map.py follows every change of it"
    queue = found("v1.core.kv_cache_utils:FreeKVCacheBlockQueue", needed_by)
    reading = {"get_all_free_blocks", "iter_blocks_after"}
    public = {name for name in vars(queue) if not name.startswith("_")}
    followed = {*free_map.TAKING, *free_map.REMOVING, *free_map.GIVING}
    assert public - reading == followed, (
        f"vLLM's FreeKVCacheBlockQueue has the methods {sorted(public)} now; {needed_by}"
    )


def test_the_map_of_free_blocks_is_what_vllms_own_pool_says() -> None:
    pool = found("v1.core.block_pool:BlockPool", "engines/free_map.py")(64, True, 16)
    map_ = free_map.FreeMap(pool, lambda: None)
    first, second = pool.get_new_blocks(10), pool.get_new_blocks(5)
    pool.free_blocks(reversed(first))
    pool.touch(first[:2])
    free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    assert set(map_._free.nonzero()[0].tolist()) == free, (
        "vLLM's BlockPool changes its free list in a way that engines/free_map.py does not follow"
    )
    assert map_.longest_run() == 64 - 1 - len(first) - len(second)


# -- counters of the GPU --------------------------------------------------------------------------


@pytest.mark.parametrize("name", nvml.NAMES)
def test_vllms_copy_of_nvml_has_every_name_that_we_use(name: str) -> None:
    found(f"third_party.pynvml:{name}", "engines/nvml.py reads GPU counters with it")


def test_vllms_copy_of_nvml_takes_and_gives_what_we_pass_and_read() -> None:
    needed_by = "engines/nvml.py"
    passed = {
        "nvmlDeviceGetHandleByIndex": 1, "nvmlDeviceGetHandleByUUID": 1,
        "nvmlDeviceGetUtilizationRates": 1, "nvmlDeviceGetComputeRunningProcesses_v3": 1,
        "nvmlDeviceGetProcessUtilization": 2, "nvmlDeviceGetPcieThroughput": 2,
    }  # fmt: skip
    for name, count in passed.items():
        taken = inspect.signature(found(f"third_party.pynvml:{name}", needed_by)).parameters
        assert len(taken) == count, f"vLLM's {name} takes {list(taken)} now; {needed_by} calls it"
    read = {
        "c_nvmlUtilization_t": {"gpu"},
        "c_nvmlProcessUtilizationSample_t": {"pid", "timeStamp", "smUtil"},
        "c_nvmlProcessInfo_v3_t": {"pid", "usedGpuMemory"},
    }
    for name, fields in read.items():
        given = {field[0] for field in found(f"third_party.pynvml:{name}", needed_by)._fields_}
        assert fields <= given, f"vLLM's {name} has the fields {sorted(given)}; {needed_by}"
    error = found("third_party.pynvml:NVMLError", needed_by)(3)
    assert (error.value, str(error)) == (3, "Not Supported"), (
        f"vLLM's NVMLError carries its number or its text elsewhere now; {needed_by} reads both"
    )
