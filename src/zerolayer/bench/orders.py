"""Gives an order (drain, roll, scale, back) to a running fleet and waits for its result."""

import time
from typing import Any

import httpx

from zerolayer.bench.server_process import Progress
from zerolayer.core.errors import EngineError

#: The server reads new vLLM arguments before it answers.
ORDER_TIMEOUT_S = 60.0
OPERATION_TIMEOUT_S = 900.0
LOOK_EVERY_S = 0.1


def carry_out(
    base_url: str, kind: str, fields: dict[str, Any], on_line: Progress = lambda line: None
) -> dict[str, Any]:
    """The operation's result. Raises `EngineError` when the fleet refuses it or it fails."""
    with httpx.Client(base_url=base_url, timeout=ORDER_TIMEOUT_S, trust_env=False) as http:
        answer = http.post(f"/zerolayer/{kind}", json=fields)
        if answer.status_code != httpx.codes.ACCEPTED:
            raise EngineError(f"{kind} was refused ({answer.status_code}): {answer.text}")
        operation, shown, began = answer.json(), 0, time.monotonic()
        while True:
            for line in operation["lines"][shown:]:
                on_line(f"{line['unix'] - operation['began']:6.1f} s  {line['text']}")
            shown = len(operation["lines"])
            if operation["state"] != "running":
                break
            if time.monotonic() - began > OPERATION_TIMEOUT_S:
                raise EngineError(f"{kind} was not done after {OPERATION_TIMEOUT_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
            operation = http.get("/zerolayer/operation").json()
    if operation["error"]:
        raise EngineError(operation["error"])
    result: dict[str, Any] = operation["result"]
    return result
