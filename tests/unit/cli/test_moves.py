"""What the commands that steer a fleet send, show and exit with."""

import json
import urllib.error
from email.message import Message
from io import BytesIO
from typing import Any

import pytest
from typer.testing import CliRunner

from zerolayer.cli import moves
from zerolayer.cli.main import app

runner = CliRunner()
URL = ("--url", "http://fleet")


class Server:
    """Answers as a serving process does: the order at once, then how far it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.result = result
        self.error = ""
        self.refusal: urllib.error.HTTPError | None = None
        monkeypatch.setattr(moves, "fetch_json", self.answer)
        monkeypatch.setattr(moves, "LOOK_EVERY_S", 0.0)

    def answer(self, url: str, path: str, body: Any = None, timeout_s: float = 5.0) -> Any:
        operation = {
            "number": 1, "began": 100.0, "state": "running", "error": "", "result": None,
            "lines": [{"unix": 101.5, "text": "e0: moving 3 streams"}],
        }  # fmt: skip
        if body is not None:
            if self.refusal is not None:
                raise self.refusal
            self.sent.append((path, body))
            return operation
        last = [*operation["lines"], {"unix": 103.0, "text": "e0: restarting"}]  # type: ignore[misc]
        state = "failed" if self.error else "done"
        return {**operation, "state": state, "lines": last, "result": self.result,
                "error": self.error}  # fmt: skip


def moved(**other: Any) -> dict[str, Any]:
    return {"moved": 3, "from_snapshot": 3, "worst_gap_ms": 87.2, "seconds": 4.0, **other}


def test_a_roll_sends_its_words_and_shows_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, moved(seconds_per_engine={"e0": 9.1}, changed=["max_num_seqs"]))
    ended = runner.invoke(app, ["roll", *URL, "--", "--max-num-seqs", "8"])
    assert ended.exit_code == 0, ended.output
    assert server.sent == [
        ("/zerolayer/roll", {"vllm_args": ["--max-num-seqs", "8"], "may_wait": False})
    ]
    assert ended.output.count("e0: moving 3 streams") == 1
    for words in ("1.5 s", "e0: restarting", "worst gap 87 ms", "e0 9.1 s", "max_num_seqs"):
        assert words in ended.output


def test_json_is_alone_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    Server(monkeypatch, moved(engines=3, engines_before=2))
    ended = runner.invoke(app, ["scale", "3", "--json", *URL])
    assert json.loads(ended.stdout)["engines"] == 3
    assert "e0: restarting" in ended.stderr


def test_streams_that_stayed_are_said_and_give_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    why = {"its input is a live session that only that engine has": 1}
    server = Server(monkeypatch, moved(stayed=1, why_stayed=why))
    ended = runner.invoke(app, ["drain", "e1", "--may-wait", *URL])
    assert ended.exit_code == 1
    assert "1 stayed: 1 its input is a live session" in ended.output
    assert server.sent == [("/zerolayer/drain", {"engine": "e1", "may_wait": True})]


def test_undo_undrains(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, {"engine": "e1", "state": "ready"})
    assert runner.invoke(app, ["drain", "e1", "--undo", *URL]).exit_code == 0
    assert server.sent == [("/zerolayer/undrain", {"engine": "e1"})]


def test_an_operation_that_fails_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, {})
    server.error = "the roll stopped: e1: no memory"
    ended = runner.invoke(app, ["roll", *URL])
    assert ended.exit_code == 2
    assert "zerolayer: the roll stopped: e1: no memory" in ended.stderr


def test_what_the_server_refuses_is_said_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, {})
    said = BytesIO(json.dumps({"error": {"message": "roll is running", "code": 409}}).encode())
    server.refusal = urllib.error.HTTPError("http://fleet", 409, "Conflict", Message(), said)
    ended = runner.invoke(app, ["back", "e1", *URL])
    assert ended.exit_code == 2
    assert "zerolayer: roll is running" in ended.stderr
