"""The real `openai` package gets the same answers from our server as from stock `vllm serve`."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.asking import ANSWER_TIMEOUT_S, Joined, without_own
from tests.fleet_fixture import FLEET_ARGS
from zerolayer.bench.fleet_process import SERVED_NAME, FleetOptions, FleetProcess, PlainVllm
from zerolayer.bench.server_process import ServerProcess
from zerolayer.bench.stream_client import cold_salt

MESSAGES: Any = [{"role": "user", "content": "Which colours has a rainbow?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
TOOL: Any = {"type": "function", "function": {"name": "remember", "parameters": PERSON}}
CHOICE: Any = {"type": "function", "function": {"name": "remember"}}

Call = Callable[[openai.OpenAI], Any]


def chat(**fields: Any) -> Call:
    def call(client: openai.OpenAI) -> Any:
        wanted: dict[str, Any] = {"max_tokens": 16, "temperature": 0, **fields}
        wanted["extra_body"] = {"cache_salt": cold_salt(), **wanted.get("extra_body", {})}
        return client.chat.completions.create(model=SERVED_NAME, messages=MESSAGES, **wanted)

    return call


def completion(**fields: Any) -> Call:
    def call(client: openai.OpenAI) -> Any:
        wanted: dict[str, Any] = {"max_tokens": 16, "temperature": 0, **fields}
        wanted["extra_body"] = {"cache_salt": cold_salt(), **wanted.get("extra_body", {})}
        return client.completions.create(model=SERVED_NAME, prompt="The sea is", **wanted)

    return call


def response(**fields: Any) -> Call:
    def call(client: openai.OpenAI) -> Any:
        return client.responses.create(
            model=SERVED_NAME, input="What is a tide?", max_output_tokens=16, temperature=0,
            store=False, extra_body={"cache_salt": cold_salt()}, **fields,
        )  # fmt: skip

    return call


CALLS: dict[str, Call] = {
    "models": lambda client: client.models.list(),
    "one model": lambda client: client.models.retrieve(SERVED_NAME),
    "chat": chat(),
    "chat, streamed": chat(stream=True, stream_options={"include_usage": True}),
    "chat, sampled": chat(temperature=0.9, top_p=0.9, seed=5, frequency_penalty=0.5),
    "chat, logprobs": chat(logprobs=True, top_logprobs=2),
    "chat, stop string": chat(stop=["a", "e"], extra_body={"include_stop_str_in_output": True}),
    "chat, JSON schema": chat(response_format=FORMAT, max_tokens=40),
    "chat, tool": chat(tools=[TOOL], tool_choice=CHOICE, max_tokens=40),
    "chat, tool, streamed": chat(tools=[TOOL], tool_choice=CHOICE, max_tokens=40, stream=True),
    "completion": completion(echo=True),
    "completion, streamed": completion(stream=True, stream_options={"include_usage": True}),
    "completion, logprobs": completion(logprobs=2),
    "completion, prompt logprobs": completion(extra_body={"prompt_logprobs": 1}),
    "completion, regex": completion(
        extra_body={"structured_outputs": {"regex": "(blue|green), (deep|wide)"}}
    ),
    "completion, two prompts": lambda client: client.completions.create(
        model=SERVED_NAME, prompt=["One", "Two and three"], max_tokens=1, temperature=0
    ),
    "response": response(),
    "response, streamed": response(stream=True),
    "embeddings": lambda client: client.embeddings.create(model=SERVED_NAME, input="tide"),
    "unknown model": lambda client: client.completions.create(model="nobody", prompt="a"),
    "too long": completion(max_tokens=100_000),
    "wrong field": chat(temperature=-1),
    "wrong schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
}


@pytest.fixture(scope="module")
def stock(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainVllm]:
    """Stock vLLM with one engine; the fleet idles beside it."""
    logs = tmp_path_factory.mktemp("stock")
    options = FleetOptions(model, engines=1, vllm_args=FLEET_ARGS, log_dir=logs)
    with PlainVllm(options) as server:
        yield server


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )  # fmt: skip


def answer(server: ServerProcess, call: Call) -> Any:
    """What the caller sees: a value, the joined events of a stream, or an error."""
    with client_of(server) as client:
        try:
            value = call(client)
            if isinstance(value, openai.Stream):
                return joined(value)
        except openai.APIStatusError as error:
            return error.status_code, type(error).__name__, without_own(error.body)
        return without_own(value.model_dump())


def joined(stream: "openai.Stream[Any]") -> Any:
    whole = Joined()
    for event in stream:
        whole.take(event.model_dump_json(exclude_none=True))
    assert not whole.errors
    return without_own(whole.content)


@pytest.mark.parametrize("name", CALLS)
def test_the_openai_package_gets_the_same_answer(
    fleet: FleetProcess, stock: PlainVllm, name: str
) -> None:
    assert answer(fleet, CALLS[name]) == answer(stock, CALLS[name])


def test_two_answers_of_one_request_are_those_of_the_same_seeds(
    fleet: FleetProcess, stock: PlainVllm
) -> None:
    """One token each: with more, two sequences in one batch round otherwise than one alone."""
    call = chat(n=2, temperature=1.0, seed=3, max_tokens=1)
    ours, theirs = answer(fleet, call), answer(stock, call)
    assert len(ours["choices"]) == 2
    assert ours == theirs


def test_tokenising_gives_the_same_tokens_and_back(fleet: FleetProcess, stock: PlainVllm) -> None:
    asked = {"model": SERVED_NAME, "prompt": "naïve 漢字 😀 x == 10"}
    ours, theirs = (
        httpx.post(f"{s.base_url}/tokenize", json=asked, trust_env=False).json()
        for s in (fleet, stock)
    )
    assert ours == theirs
    back = {"model": SERVED_NAME, "tokens": ours["tokens"]}
    text = httpx.post(f"{fleet.base_url}/detokenize", json=back, trust_env=False).json()
    assert text["prompt"] == asked["prompt"]


def test_every_answer_says_how_long_its_dispatch_took(fleet: FleetProcess) -> None:
    with client_of(fleet) as client:
        for call in (chat(), completion(), response()):
            assert 0.0 < call(client).usage.model_dump()["kernel_dispatch_time_ms"] < 1000.0


def test_metrics_have_all_that_stock_vllm_has_for_each_engine(
    fleet: FleetProcess, stock: PlainVllm
) -> None:
    with client_of(fleet) as client:
        chat(max_tokens=4, n=4, temperature=1.0)(client)  # so many at once that both get some
    ours, theirs = (server.get("/metrics").text for server in (fleet, stock))
    family = re.compile(r"^# TYPE (vllm:\S+)", re.MULTILINE)
    assert set(family.findall(theirs)) <= set(family.findall(ours))
    for engine in ("0", "1"):
        served = re.search(
            rf'^vllm:generation_tokens_total{{engine="{engine}",.*}} (\S+)$', ours, re.MULTILINE
        )
        assert served is not None
        assert float(served[1]) > 0
