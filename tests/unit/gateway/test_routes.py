from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from zerolayer.gateway.routes import Health, admin_routes


async def get(path: str, health: Health, status: dict[str, Any]) -> httpx.Response:
    app = Starlette(routes=admin_routes(lambda: health, lambda: status))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("ready", "total", "code", "word"),
    [(2, 2, 200, "ok"), (1, 2, 200, "degraded"), (0, 2, 503, "down")],
)
async def test_health_is_200_while_any_engine_takes_streams(
    ready: int, total: int, code: int, word: str
) -> None:
    answer = await get("/health", Health(ready, total), {})
    assert answer.status_code == code
    assert answer.json() == {"status": word, "engines_ready": ready, "engines_total": total}


async def test_status_is_what_the_callable_says_and_is_never_cached() -> None:
    answer = await get("/zerolayer/status", Health(1, 1), {"engines": []})
    assert answer.json() == {"engines": []}
    assert answer.headers["cache-control"] == "no-store"
