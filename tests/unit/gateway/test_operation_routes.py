"""Who may order what over HTTP, and how refusals read."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from zerolayer.core.errors import ConfigError, ZeroLayerError
from zerolayer.gateway.operation_routes import BODY_BYTES_MAX, operation_routes


class Busy(ZeroLayerError):
    pass


class Orders:
    """Notes what reaches the fleet; `error` is raised instead."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Mapping[str, Any]]] = []
        self.error: ZeroLayerError | None = None

    def app(self, *, remote: bool = False) -> Starlette:
        def order(kind: str) -> Any:
            async def begin(fields: Mapping[str, Any]) -> dict[str, Any]:
                if self.error is not None:
                    raise self.error
                self.given.append((kind, fields))
                return {"kind": kind}

            return begin

        kinds = ("drain", "undrain", "roll", "scale", "back")
        newest = {"kind": "roll", "state": "running"}
        return Starlette(
            routes=operation_routes(
                {kind: order(kind) for kind in kinds}, lambda: newest, Busy, remote=remote
            )
        )


async def post(app: Starlette, path: str, *, client: str = "127.0.0.1", **request: Any) -> Any:
    transport = httpx.ASGITransport(app, client=(client, 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as http:
        return await http.post(path, **request)


async def test_an_order_from_this_machine_reaches_the_fleet_with_its_defaults() -> None:
    orders = Orders()
    answer = await post(orders.app(), "/zerolayer/drain", json={"engine": "e1"})
    assert (answer.status_code, answer.json()) == (202, {"kind": "drain"})
    await post(orders.app(), "/zerolayer/roll", client="::1")
    assert orders.given == [
        ("drain", {"engine": "e1", "may_wait": False}),
        ("roll", {"vllm_args": [], "may_wait": False}),
    ]


@pytest.mark.parametrize(
    ("client", "headers"),
    [
        ("10.0.0.7", {}),
        ("2001:db8::1", {}),
        ("somewhere", {}),
        ("127.0.0.1", {"origin": "http://evil.example"}),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.7"}),
        ("127.0.0.1", {"forwarded": "for=10.0.0.7"}),
    ],
)
async def test_others_are_refused_with_the_fix(client: str, headers: dict[str, str]) -> None:
    orders = Orders()
    answer = await post(
        orders.app(), "/zerolayer/scale", client=client, headers=headers, json={"engines": 1}
    )
    assert answer.status_code == 403
    assert "--remote-admin" in answer.json()["error"]["message"]
    assert orders.given == []
    allowed = await post(
        orders.app(remote=True), "/zerolayer/scale", client=client, headers=headers,
        json={"engines": 1},
    )  # fmt: skip
    assert allowed.status_code == 202


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/zerolayer/drain", {}),
        ("/zerolayer/drain", {"engine": 1}),
        ("/zerolayer/drain", {"engine": "e1", "may_wait": "yes"}),
        ("/zerolayer/drain", {"engine": "e1", "gently": True}),
        ("/zerolayer/scale", {"engines": "3"}),
        ("/zerolayer/scale", {"engines": True}),
        ("/zerolayer/roll", {"vllm_args": "--max-num-seqs 8"}),
        ("/zerolayer/roll", {"vllm_args": [8]}),
        ("/zerolayer/roll", ["--max-num-seqs"]),
    ],
)
async def test_a_body_that_does_not_fit_is_refused_by_name(path: str, body: Any) -> None:
    orders = Orders()
    answer = await post(orders.app(), path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert orders.given == []


async def test_bodies_that_are_no_json_or_too_large_are_refused() -> None:
    orders = Orders()
    for content in (b"{", b"x" * (BODY_BYTES_MAX + 1)):
        answer = await post(orders.app(), "/zerolayer/back", content=content)
        assert answer.status_code == 400
    assert orders.given == []


async def test_a_refusal_is_400_and_a_running_operation_409() -> None:
    orders = Orders()
    orders.error = ConfigError("ENGINE", "e9", "this fleet has e0, e1")
    answer = await post(orders.app(), "/zerolayer/back", json={"engine": "e9"})
    assert (answer.status_code, "this fleet has" in answer.text) == (400, True)
    orders.error = Busy("roll is running")
    answer = await post(orders.app(), "/zerolayer/back", json={"engine": "e1"})
    assert (answer.status_code, "roll is running" in answer.text) == (409, True)


async def test_everybody_may_see_how_far_an_operation_is() -> None:
    transport = httpx.ASGITransport(Orders().app(), client=("10.0.0.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as http:
        answer = await http.get("/zerolayer/operation")
    assert answer.json()["state"] == "running"
