"""Admin routes of a serving process: is it healthy, and what is it doing.

GET /health             200 while at least one engine takes new streams, else 503
GET /zerolayer/status   the whole fleet as JSON; what `zerolayer status` shows
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

HEALTH_PATH = "/health"
STATUS_PATH = "/zerolayer/status"


@dataclass(frozen=True, slots=True)
class Health:
    """How many engines take new streams now, of how many."""

    engines_ready: int
    engines_total: int

    @property
    def status(self) -> str:
        """`ok`: all engines; `degraded`: some; `down`: none."""
        if self.engines_ready == 0:
            return "down"
        return "ok" if self.engines_ready >= self.engines_total else "degraded"

    @property
    def http_status(self) -> int:
        """200 while any engine can take a stream: a balancer in front must not leave then."""
        return 503 if self.engines_ready == 0 else 200


def admin_routes(
    health: Callable[[], Health], status: Callable[[], dict[str, Any]]
) -> list[BaseRoute]:
    """Routes to put before vLLM's own. Both callables run on the event loop and must be quick;
    `status` returns plain JSON values."""

    async def get_health(request: Request) -> Response:
        now = health()
        body = {
            "status": now.status,
            "engines_ready": now.engines_ready,
            "engines_total": now.engines_total,
        }
        return JSONResponse(body, status_code=now.http_status)

    async def get_status(request: Request) -> Response:
        return JSONResponse(status(), headers={"cache-control": "no-store"})

    return [
        Route(HEALTH_PATH, get_health, methods=["GET"]),
        Route(STATUS_PATH, get_status, methods=["GET"]),
    ]
