"""Equality of answers, and what may be said of it.

vLLM on a CPU now and then rounds otherwise than its twin for as long as that engine lives, without
any fault (`docs/exactness.md`). An answer that goes from one such engine to another cannot stay the
same. So where an answer differs, both engines answer the same request undisturbed: `engines_agree`.
"""

from typing import Any

from tests.asking import Answer, Ask, ask
from zerolayer.bench.compare import compare
from zerolayer.bench.fleet_process import FleetProcess
from zerolayer.bench.orders import carry_out


def assert_whole(answer: Answer) -> None:
    """It came to its end, without an error."""
    assert not answer.errors, answer.errors
    assert answer.done


def assert_same(got: Answer, reference: Answer) -> None:
    """Both are whole and equal; else says where they part, and what moved."""
    assert_whole(got)
    assert got.content == reference.content, difference(got, reference)


def difference(got: Answer, reference: Answer) -> str:
    """Where two answers part, in tokens where they are known, and the moves under the first."""
    moves = [
        f"{move['from']} -> {move['to']} ({move['reason']}) at {move['context_tokens']} tokens of "
        f"context, {move['restored_tokens']} restored, {move['delivered_tokens']} delivered"
        for move in got.moves
    ]
    return f"{_parting(got.content, reference.content)}; moves: {moves or 'none'}"


def _parting(got: dict[str, Any], reference: dict[str, Any]) -> str:
    for index, wanted in reference["choices"].items():
        found = got["choices"].get(index, {})
        if "token_ids" in wanted and "token_ids" in found:
            at = compare(wanted["token_ids"], found["token_ids"]).first_difference
            if at is not None:
                return f"choice {index} parts at its token {at}"
    if "streamed" in reference and got.get("streamed") != reference["streamed"]:
        return f"{got.get('streamed')!r} is not {reference['streamed']!r}"
    return "no token is known to differ, but some field does"


def engines_agree(fleet: FleetProcess, request: Ask, reference: Answer) -> bool:
    """Whether every engine gives this answer when nothing disturbs it."""
    fleet.wait_all_ready()
    names = [row["id"] for row in fleet.status()["engines"]]
    return all(_by(fleet, name, names, request).content == reference.content for name in names)


def _by(fleet: FleetProcess, engine: str, names: list[str], request: Ask) -> Answer:
    """What one engine answers: the others are drained meanwhile."""
    others = [name for name in names if name != engine]
    for name in others:
        carry_out(fleet.base_url, "drain", {"engine": name})
    try:
        answer = ask(fleet, request)
        assert_whole(answer)
        return answer
    finally:
        for name in others:
            carry_out(fleet.base_url, "undrain", {"engine": name})
