"""Which serving process a command means, and what that process says of itself."""

import json
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from zerolayer.arena.runtime_dir import SHM, RuntimeDir, list_instances
from zerolayer.core.errors import ZeroLayerError

STATUS_PATH = "/zerolayer/status"
ANSWER_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 16 << 20
HOW_TO_START = "nothing is serving here; start it with: zerolayer serve"

Url = Annotated[
    str | None,
    typer.Option(
        help="Address of the serving process, like http://127.0.0.1:8000. "
        "Without it: the one that runs on this machine.",
        show_default=False,
    ),
]
Instance = Annotated[
    str | None,
    typer.Option(
        help="Which serving process, when several run here: the first letters of its id suffice.",
        show_default=False,
    ),
]


class NotFound(ZeroLayerError):
    """No serving process, or more than one, fits what was asked for."""


class NoAnswer(ZeroLayerError):
    """The serving process does not answer as one of ours."""


def find_instance(wanted: str | None, shm: Path = SHM) -> RuntimeDir:
    """The one running instance of this user whose id begins with `wanted`. Raises `NotFound`."""
    running = list_instances(shm)
    if not running:
        raise NotFound(HOW_TO_START)
    fitting = [each for each in running if each.instance.startswith(wanted or "")]
    if len(fitting) == 1:
        return fitting[0]
    what = "several are serving" if fitting else f"no instance is called {wanted}"
    lines = "\n".join(_line(each) for each in running)
    raise NotFound(f"{what}; choose one with --instance:\n{lines}")


def find_url(url: str | None, wanted: str | None, shm: Path = SHM) -> str:
    """`url` itself, or that of the instance. Raises `NotFound`."""
    return (url or find_instance(wanted, shm).info.url).rstrip("/")


def fetch_status(url: str) -> dict[str, Any]:
    """What the serving process says at `/zerolayer/status`. Raises `NoAnswer`."""
    try:
        status = fetch_json(url, STATUS_PATH)
    except urllib.error.HTTPError as cause:
        raise NoAnswer(f"{url} answers {cause.code}: not a Zero-Layer server") from cause
    if "engines" not in status:
        raise NoAnswer(f"{url} answers something else: not a Zero-Layer server")
    return status


def fetch_json(
    url: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_TIMEOUT_S
) -> dict[str, Any]:
    """The JSON object that a GET, or a POST of `body`, is answered with.

    Raises `NoAnswer`, and urllib's `HTTPError` for a status that says no.
    """
    if not url.startswith(("http://", "https://")):
        raise NoAnswer(f"{url} is not an http address; this command needs one")
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    # Straight there: a proxy from the environment knows nothing of this machine's ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            said = json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError:
        raise
    except TimeoutError as cause:
        raise NoAnswer(f"{url} does not answer within {timeout_s:.0f} s") from cause
    except OSError as cause:
        reason = getattr(cause, "reason", cause)
        raise NoAnswer(
            f"{url} is not open ({reason}); it opens when its first engine is ready"
        ) from cause
    except ValueError as cause:
        raise NoAnswer(f"{url} answers something else: not a Zero-Layer server") from cause
    if not isinstance(said, dict):
        raise NoAnswer(f"{url} answers something else: not a Zero-Layer server")
    return said


def _line(each: RuntimeDir) -> str:
    info = each.info
    since = datetime.fromtimestamp(info.started).strftime("%Y-%m-%d %H:%M:%S")
    return f"  {each.instance}  {info.url}  pid {info.pid}  since {since}  {info.model}"
