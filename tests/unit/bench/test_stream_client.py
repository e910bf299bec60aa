"""What the client notes of a stream, whatever the server does to it."""

import asyncio
import json
from itertools import count

from tests.unit.bench.sse_server import Script, answer, chunk, sse_server
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt


def client_of(url: str) -> StreamClient:
    ticks = count(1_000, 1_000)
    return StreamClient(url, "m", clock_ns=lambda: next(ticks))


async def run(script: Script, request: StreamRequest | None = None) -> StreamRecord:
    async with sse_server(script) as url, client_of(url) as client:
        return await client.run(request or StreamRequest({"prompt": "x"}))


async def test_every_token_is_noted_with_its_time() -> None:
    record = await run(Script(answer([5, 6, 7])))
    assert record.token_ids == [5, 6, 7]
    assert record.arrivals_ns == sorted(set(record.arrivals_ns))
    assert record.first.text == " 5 6 7"
    assert record.first.finish_reason == "length"
    assert record.usage == {"prompt_tokens": 3, "completion_tokens": 3}
    assert record.response_id == "cmpl-1"
    assert record.done
    assert not record.broken
    assert record.ttft_ms is not None
    assert record.ttft_ms > 0


async def test_the_body_asks_for_token_ids_and_usage() -> None:
    script = Script(answer([1]))
    await run(script, StreamRequest({"prompt": "x", "max_tokens": 4}))
    body = script.bodies[0]
    assert body["return_token_ids"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"]) == ("m", 4)


async def test_chat_deltas_become_text() -> None:
    delta = {"index": 0, "delta": {"content": "hi"}, "token_ids": [9], "finish_reason": "stop"}
    script = Script([json.dumps({"id": "chatcmpl-1", "choices": [delta]}), "[DONE]"])
    record = await run(script, StreamRequest({"messages": []}, kind="chat"))
    assert (record.first.text, record.token_ids, record.broken) == ("hi", [9], False)


async def test_choices_are_kept_apart() -> None:
    ends = [chunk(n, index=n % 2, finish_reason="stop") for n in (2, 3)]
    record = await run(Script([chunk(4, index=0), chunk(5, index=1), *ends, "[DONE]"]))
    assert record.choices[0].token_ids == [4, 2]
    assert record.choices[1].token_ids == [5, 3]
    assert record.tokens == 4


async def test_a_cut_connection_breaks_the_stream_and_raises_nothing() -> None:
    record = await run(Script([chunk(1), chunk(2)], cut=True))
    assert record.token_ids == [1, 2]
    assert record.broken
    assert record.connection_error is not None


async def test_a_silent_end_is_broken() -> None:
    record = await run(Script([chunk(1), chunk(2)]))
    assert record.broken
    assert record.fault == "ended silently after 2 tokens"


async def test_an_error_event_is_broken_even_with_done() -> None:
    error = json.dumps({"error": {"message": "engine lost", "code": 503}})
    record = await run(Script([chunk(1), error, "[DONE]"]))
    assert record.broken
    assert record.errors == ["engine lost"]
    assert record.done


async def test_a_refused_request_is_noted_with_what_was_said() -> None:
    record = await run(Script(["no"], status="400 Bad Request"))
    assert record.http_status == 400
    assert record.broken
    assert "HTTP 400" in record.fault


async def test_a_server_that_is_not_there_is_noted() -> None:
    async with sse_server(Script()) as url:
        pass
    async with client_of(url) as client:
        record = await client.run(StreamRequest({"prompt": "x"}))
    assert record.broken
    assert "ConnectError" in record.fault


async def test_the_client_leaves_on_purpose_after_so_many_tokens() -> None:
    script = Script(answer([1, 2, 3]), gate=asyncio.Event())
    record = await run(script, StreamRequest({"prompt": "x"}, leave_after_tokens=2))
    assert record.token_ids == [1, 2]
    assert record.left
    assert not record.broken


async def test_the_watcher_sees_each_token_before_the_next_is_read() -> None:
    seen: list[int] = []
    request = StreamRequest({"prompt": "x"}, on_tokens=lambda record: seen.append(record.tokens))
    await run(Script(answer([1, 2, 3])), request)
    assert seen == [1, 2, 3]


async def test_many_streams_run_side_by_side() -> None:
    script = Script(answer([1, 2]), gate=asyncio.Event(), expected=20)
    async with sse_server(script) as url, client_of(url) as client:
        running = asyncio.create_task(client.run_all([StreamRequest({"prompt": "x"})] * 20))
        await script.all_came.wait()
        assert script.gate is not None
        script.gate.set()
        records = await running
    assert [record.token_ids for record in records] == [[1, 2]] * 20


def test_a_damaged_event_is_an_error_of_the_stream() -> None:
    record = StreamRecord()
    record.take("{broken", 1)
    record.take("3", 2)
    assert len(record.errors) == 2


def test_no_two_salts_are_equal() -> None:
    assert len({cold_salt() for _ in range(100)}) == 100
