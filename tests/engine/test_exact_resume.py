"""An answer whose engine is killed or frozen is, bit for bit, the answer of an undisturbed run.

Each case runs undisturbed first, then with its engine struck. Equal means token ids, text,
log-probabilities, tool calls, finish reason and usage. vLLM promises equal bits only for equal
shapes of computation, so every run is alone on its engine and has a cold prefix cache, except where
the cache is what is tested. Where an answer differs, both engines are asked without a fault: only
if they agree did the fault change it (`tests/same_answers.py`).
"""

import signal
import warnings
from collections.abc import Callable, Iterator

import pytest

from tests.asking import CHAT, COMPLETIONS, RESPONSES, Answer, Ask, Fault, ask
from tests.fleet_fixture import heal
from tests.same_answers import assert_same, assert_whole, difference, engines_agree
from tests.waiting import until
from zerolayer.bench.fleet_process import BLOCK_TOKENS, FleetProcess, all_ready

KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP
TOKENS = 36
MID = 17
#: A fault can come a token too late or, under load, after the stream's end: then it is struck anew.
TRIES = 4

STORY = "The old keeper of the lighthouse climbed the stairs every night, because"
LONG = " ".join(f"On day {n} the ship sailed {n * 7} miles." for n in range(1, 31))
MESSAGES = [{"role": "user", "content": "Tell me about a lighthouse and its keeper."}]
SAMPLED = {"temperature": 0.9, "top_p": 0.92, "top_k": 50, "min_p": 0.02, "seed": 1234}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.15}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "city": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "city", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "unit", "days"],
        },
    },
}
NAMED_TOOL = {"type": "function", "function": {"name": "get_weather"}}

GREEDY = Ask(
    COMPLETIONS,
    {"prompt": STORY, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
)
CHATTED = Ask(
    CHAT,
    {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
)
RESPONDED = Ask(
    RESPONSES,
    {
        "input": "Tell me about a lighthouse.", "max_output_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "store": False,
    },
)  # fmt: skip

CASES: dict[str, Ask] = {
    "greedy": GREEDY,
    "sampled with a seed": GREEDY.but(**SAMPLED),
    "penalties": GREEDY.but(**PENALTIES),
    "penalties, sampled": GREEDY.but(**PENALTIES, **SAMPLED),
    "logprobs": GREEDY.but(logprobs=3),
    "prompt longer than a block": GREEDY.but(prompt=LONG),
    "regex": GREEDY.but(structured_outputs={"regex": r"([a-z]{3,7} ){14}end"}, ignore_eos=False),
    "chat": CHATTED,
    "chat, sampled, with logprobs": CHATTED.but(**SAMPLED, logprobs=True, top_logprobs=2),
    "JSON schema": CHATTED.but(
        ignore_eos=False, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    ),
    "named tool": CHATTED.but(
        ignore_eos=False, max_tokens=60, tools=[WEATHER], tool_choice=NAMED_TOOL
    ),
    "required tool": CHATTED.but(
        ignore_eos=False, max_tokens=60, tools=[WEATHER], tool_choice="required"
    ),
    "responses": RESPONDED,
    "completions, not streamed": Ask(COMPLETIONS, GREEDY.but(**SAMPLED).body, stream=False),
    "chat, not streamed": Ask(CHAT, CHATTED.but(**PENALTIES).body, stream=False),
    "responses, not streamed": Ask(RESPONSES, RESPONDED.body, stream=False),
}  # fmt: skip


#: A start takes a few seconds, so fewer are killed than frozen, and never several in a row: an
#: engine that dies five times within 10 s of coming up is set aside.
KILLED = frozenset(
    {
        "greedy", "penalties, sampled", "prompt longer than a block", "JSON schema",
        "chat, not streamed",
    }
)  # fmt: skip
STRUCK = [
    (name, number) for name in CASES for number in (FREEZE, KILL) if number is FREEZE or
    name in KILLED
]  # fmt: skip


REFERENCE_TRIES = 3
#: Engines that disagree undisturbed are rare (one start in a hundred or so): more are a defect, as
#: would be a fault that changes what an engine computes from then on.
RENEWALS_MAX = 1


class Undisturbed:
    """Answers without a fault, each made once."""

    def __init__(self, fleet: FleetProcess) -> None:
        self._fleet = fleet
        self._known: dict[str, Answer] = {}
        self._renewals = 0

    def of(self, request: Ask) -> Answer:
        key = repr(request)
        if key in self._known:
            turn(self._fleet)
        else:
            self._known[key] = self.again(request)
        return self._known[key]

    def start_anew(self, seen: str) -> None:
        """Start both engines anew, because they differ without a fault; forgets what they said."""
        self._renewals += 1
        assert self._renewals <= RENEWALS_MAX, f"engines disagree again, undisturbed: {seen}"
        warnings.warn(f"engines disagree undisturbed and are started anew: {seen}", stacklevel=2)
        self._known.clear()
        for row in self._fleet.status()["engines"]:
            self._fleet.kill(row["id"])
        until(lambda: not all_ready(self._fleet.status()), seconds=10.0)
        self._fleet.wait_all_ready()

    def again(self, request: Ask) -> Answer:
        """A reference must be undisturbed: where the box itself made the fleet move it, ask again.

        Whether healthy engines are left alone is asked elsewhere (`test_stall.py`, the soak).
        """
        tries = []
        for _ in range(REFERENCE_TRIES):
            answer = ask(self._fleet, request)
            assert_whole(answer)
            if not answer.moves:
                return answer
            tries.append(answer.moves)
        raise AssertionError(f"every undisturbed run was moved: {tries}")


def turn(fleet: FleetProcess) -> None:
    """Let the next request go to the other engine: without it the same one is struck each time."""
    ask(fleet, GREEDY.but(max_tokens=1))


@pytest.fixture
def fleet(shared_fleet: FleetProcess) -> Iterator[FleetProcess]:
    """Not waited for: one engine is enough for an undisturbed run, and `struck` wants both."""
    yield shared_fleet
    heal(shared_fleet)


@pytest.fixture(scope="module")
def undisturbed(shared_fleet: FleetProcess) -> Undisturbed:
    return Undisturbed(shared_fleet)


def struck(
    fleet: FleetProcess,
    request: Ask,
    number: signal.Signals,
    after_tokens: int,
    wanted: Callable[[Answer], bool] = lambda answer: True,
) -> Answer:
    """The answer under a fault that moved it from a snapshot, with its cut as `wanted`."""
    cuts: list[list[int]] = []
    for _ in range(TRIES):
        heal(fleet)
        fleet.wait_all_ready()
        if cuts:
            turn(fleet)
        answer = ask(fleet, request, Fault(fleet, number, after_tokens))
        if answer.moves and wanted(answer):
            assert all(move["restored_tokens"] > 0 for move in answer.moves), answer.moves
            return answer
        cuts.append([move["context_tokens"] for move in answer.moves])
    raise AssertionError(f"no fault struck where it was meant to: contexts {cuts}")


def assert_unchanged(
    fleet: FleetProcess,
    undisturbed: Undisturbed,
    request: Ask,
    number: signal.Signals = FREEZE,
    after_tokens: int = MID,
    wanted: Callable[[Answer], bool] = lambda answer: True,
) -> None:
    """Strike, and compare with the undisturbed answer; engines that disagree without a fault are
    started anew first, and it is struck again."""
    reference = undisturbed.of(request)
    got = struck(fleet, request, number, after_tokens, wanted)
    assert_whole(got)
    if got.content != reference.content and not engines_agree(fleet, request, reference):
        undisturbed.start_anew(difference(got, reference))
        reference = undisturbed.of(request)
        got = struck(fleet, request, number, after_tokens, wanted)
    assert_same(got, reference)


def test_undisturbed_answers_repeat_themselves_on_both_engines(
    fleet: FleetProcess, undisturbed: Undisturbed
) -> None:
    for name in ("greedy", "penalties, sampled"):
        reference = undisturbed.of(CASES[name])
        for _ in range(2):
            assert undisturbed.again(CASES[name]).content == reference.content


@pytest.mark.parametrize(("name", "number"), STRUCK, ids=lambda part: getattr(part, "name", part))
def test_an_answer_survives_its_engine_unchanged(
    fleet: FleetProcess, undisturbed: Undisturbed, name: str, number: signal.Signals
) -> None:
    reference = undisturbed.of(CASES[name])
    if name.endswith("tool"):
        (call,) = reference.choices["0"]["tool_calls"].values()
        assert call["function"]["name"] == "get_weather"
    assert_unchanged(fleet, undisturbed, CASES[name], number)


@pytest.mark.parametrize("number", [FREEZE, KILL], ids=["freeze", "kill"])
def test_the_first_token_is_not_said_twice(
    fleet: FleetProcess, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    assert_unchanged(fleet, undisturbed, CASES["penalties, sampled"], number, 1)


@pytest.mark.parametrize("left", [1, 3])
def test_the_last_tokens_come_from_the_other_engine(
    fleet: FleetProcess, undisturbed: Undisturbed, left: int
) -> None:
    request = CASES["sampled with a seed"]
    assert_unchanged(fleet, undisturbed, request, FREEZE, TOKENS - left)


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_cut_at_the_edge_of_a_block_loses_nothing(
    fleet: FleetProcess, undisturbed: Undisturbed, beside: int
) -> None:
    reference = undisturbed.of(GREEDY)
    prompt_tokens = reference.content["usage"]["prompt_tokens"]
    edge = -(-(prompt_tokens + 4) // BLOCK_TOKENS) * BLOCK_TOKENS

    def at_the_edge(answer: Answer) -> bool:
        return bool(answer.moves[0]["context_tokens"] == edge + beside)

    after = edge + beside - prompt_tokens
    assert_unchanged(fleet, undisturbed, GREEDY, FREEZE, after, at_the_edge)


def test_a_prompt_from_the_prefix_cache_goes_on_unchanged(fleet: FleetProcess) -> None:
    request = Ask(COMPLETIONS, GREEDY.but(prompt=LONG + " Then").body, cached=True)
    warm(fleet, request)
    reference, again = ask(fleet, request), ask(fleet, request)
    assert reference.content == again.content
    assert_same(struck(fleet, request, FREEZE, MID), reference)


def warm(fleet: FleetProcess, request: Ask) -> None:
    """Put a prompt into the prefix cache of both engines, the one after the other."""
    for engine in ("e0", "e1"):
        fleet.stop(engine)  # the other one has to take it
        assert_whole(ask(fleet, request))
        fleet.cont(engine)
        heal(fleet)
        fleet.wait_all_ready()


def test_a_stop_string_that_the_cut_splits_still_ends_the_answer(
    fleet: FleetProcess, undisturbed: Undisturbed
) -> None:
    text = undisturbed.of(GREEDY).text
    pieces = token_texts(fleet, undisturbed)
    cut = next(
        at for at in range(14, TOKENS - 2)
        if at_first(text, pieces, at)
    )  # fmt: skip
    request = GREEDY.but(stop=[pieces[cut - 1] + pieces[cut]])
    reference = undisturbed.of(request)
    assert reference.choices["0"]["finish_reason"] == "stop"
    assert reference.content["usage"]["completion_tokens"] == cut + 1

    assert_unchanged(fleet, undisturbed, request, FREEZE, cut - 1)


def at_first(text: str, pieces: list[str], at: int) -> bool:
    """Whether the texts of tokens `at - 1` and `at` come side by side there for the first time."""
    both = pieces[at - 1] + pieces[at]
    return text.find(both) == len("".join(pieces[: at - 1]))


def token_texts(fleet: FleetProcess, undisturbed: Undisturbed) -> list[str]:
    """The text of each token of the greedy answer."""
    pieces: list[str] = undisturbed.of(CASES["logprobs"]).choices["0"]["logprobs"]["tokens"]
    return pieces


def test_stop_token_ids_and_min_tokens_count_from_the_start_of_the_answer(
    fleet: FleetProcess, undisturbed: Undisturbed
) -> None:
    tokens = undisturbed.of(GREEDY).token_ids
    early = tokens[4]
    request = GREEDY.but(stop_token_ids=[early], min_tokens=TOKENS - 8, ignore_eos=False)
    reference = undisturbed.of(request)
    assert len(reference.token_ids) >= TOKENS - 8
    assert_unchanged(fleet, undisturbed, request)

    later = next(token for at, token in enumerate(tokens) if at > MID + 4 and token not in
                 tokens[:at])  # fmt: skip
    request = GREEDY.but(stop_token_ids=[later])
    reference = undisturbed.of(request)
    assert reference.choices["0"]["finish_reason"] == "stop"
    assert_unchanged(fleet, undisturbed, request)


def test_logit_bias_and_bad_words_hold_on_the_other_engine(
    fleet: FleetProcess, undisturbed: Undisturbed
) -> None:
    tokens = undisturbed.of(GREEDY).token_ids
    frequent = max(set(tokens), key=tokens.count)
    word = next(w for w in undisturbed.of(GREEDY).text.split() if w.isalpha() and len(w) > 3)
    request = GREEDY.but(logit_bias={str(frequent): -100}, bad_words=[word])
    reference = undisturbed.of(request)
    assert frequent not in reference.token_ids
    assert word not in reference.text
    assert_unchanged(fleet, undisturbed, request)


def test_two_answers_of_one_request_both_go_on(
    fleet: FleetProcess, undisturbed: Undisturbed
) -> None:
    request = GREEDY.but(n=2, **SAMPLED)
    reference = undisturbed.of(request)
    assert set(reference.choices) == {"0", "1"}
    assert_unchanged(fleet, undisturbed, request)
