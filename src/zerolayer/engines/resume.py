"""A moved request is rebuilt inside the engine as *prompt + output so far*.

Sent as a longer prompt, the tokens that were already delivered would count as prompt: penalties,
`min_tokens`, seeds, grammars and log-probabilities would all go on differently. So a marker in
`sampling_params.extra_args` says how many trailing tokens are output, and three places of vLLM
act on it:

* the scheduler's `Request` (through the connector's `on_new_request`, a supported hook), and its
  queue, where a moved request goes to the front,
* the worker's `CachedRequestState` (V1 model runner), whose random generator is moved on too,
* the grammar of structured output, which is advanced over the delivered tokens.

To vLLM the result is a request that resumes after preemption.
"""

from collections.abc import Callable
from typing import Any

import msgspec

MARKER = "zerolayer"


class ResumeMarker(msgspec.Struct, frozen=True):
    """Travels in `sampling_params.extra_args["zerolayer"]` as a plain dict."""

    output: list[int]  # the trailing tokens of the prompt that are really output
    sources: list[str]  # arena files of rank 0 that may hold the stream's pages, newest first


def marker_of(sampling_params: Any) -> ResumeMarker | None:
    """The marker that a request carries, or None for a request that was never moved."""
    extra = getattr(sampling_params, "extra_args", None)
    raw = extra.get(MARKER) if extra else None
    return msgspec.convert(raw, ResumeMarker) if raw is not None else None


def split_scheduler_request(request: Any) -> ResumeMarker | None:
    """Turn the delivered tokens at the end of a scheduler `Request`'s prompt into output."""
    marker = marker_of(request.sampling_params)
    if marker is None or not marker.output:
        return marker
    cut = len(request.prompt_token_ids) - len(marker.output)
    request.prompt_token_ids = request.prompt_token_ids[:cut]
    request.num_prompt_tokens = cut
    request._output_token_ids.extend(marker.output)
    # vLLM fills in prefill statistics on a request's first schedule only, and refuses output there.
    request.num_preemptions = 1
    return marker


def install_worker_resume(vocabulary: int) -> None:
    """Make the V1 model runner build moved requests with their output and generator state.

    `vocabulary` is the model's vocabulary size. Called once in each worker process. Raises
    `AttributeError` when vLLM moved the class; the contract test says so in words.
    """
    import vllm.v1.worker.gpu_model_runner as runner

    from zerolayer.engines.replay import ReplayGenerator, advance_generator

    original = runner.CachedRequestState
    if getattr(original, "_zerolayer", False):
        return

    def build(**fields: Any) -> Any:
        marker = marker_of(fields.get("sampling_params"))
        if marker is not None and marker.output:
            fields["output_token_ids"] = list(marker.output)
        generator = fields.get("generator")
        if generator is not None and generator.device.type == "cpu":
            fields["generator"] = generator = ReplayGenerator(fields["sampling_params"].seed)
        state = original(**fields)
        if isinstance(generator, ReplayGenerator):
            generator.state = state
        if generator is not None:
            advance_generator(generator, len(state.output_token_ids), vocabulary)
        return state

    build._zerolayer = True  # type: ignore[attr-defined]
    runner.CachedRequestState = build


def install_moved_first() -> None:
    """Make the scheduler take a moved request before those that wait for their first token.

    Its client is reading already, and it is what vLLM itself puts in front: a request that resumes
    after preemption. Called once in each engine core process. Raises `AttributeError` when vLLM
    moved the method; the contract test says so in words.
    """
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler

    original: Callable[[Any, Any], None] = Scheduler._enqueue_waiting_request
    if getattr(original, "_zerolayer", False):
        return

    def enqueue(self: Any, request: Any) -> None:
        original(self, request)
        marker = marker_of(request.sampling_params)
        queue = self.waiting
        if marker is None or not marker.output or not isinstance(queue, FCFSRequestQueue):
            return
        if queue and queue[-1] is request:
            queue.pop()
            queue.prepend_request(request)

    enqueue._zerolayer = True  # type: ignore[attr-defined]
    Scheduler._enqueue_waiting_request = enqueue


def install_grammar_resume() -> None:
    """Make structured output continue: a moved request's grammar accepts its delivered tokens.

    Called once in each engine core process.
    """
    from vllm.v1.structured_output import StructuredOutputManager

    original: Callable[[Any, Any], Any] = StructuredOutputManager._create_grammar
    if getattr(original, "_zerolayer", False):
        return

    def create(self: Any, request: Any) -> Any:
        grammar = original(self, request)
        marker = marker_of(request.sampling_params)
        if marker is not None and marker.output:
            advance_grammar(self, request, grammar, marker.output)
        return grammar

    create._zerolayer = True  # type: ignore[attr-defined]
    StructuredOutputManager._create_grammar = create


def advance_grammar(manager: Any, request: Any, grammar: Any, output: list[int]) -> None:
    """Feed the delivered tokens to a fresh grammar, leaving out those of a reasoning section.

    Raises `ValueError` when the grammar refuses a delivered token: then vLLM fails this one
    request with a clear error instead of producing text that no longer fits the schema.
    """
    start = _grammar_start(manager, request, output)
    if output[start:] and not grammar.accept_tokens(request.request_id, output[start:]):
        raise ValueError(
            "the grammar refuses the tokens that were already delivered; "
            "this stream cannot go on within its schema"
        )


def _grammar_start(manager: Any, request: Any, output: list[int]) -> int:
    """Index of the first delivered token that the grammar constrains."""
    structured = request.structured_output_request
    reasoner = manager._get_reasoner(request)
    if reasoner is None or manager.enable_in_reasoning or structured.reasoning_ended:
        return 0
    prompt = list(request.prompt_token_ids or [])
    if reasoner.is_reasoning_end(prompt):
        return 0
    for index in range(len(output)):
        if reasoner.is_reasoning_end_streaming([*prompt, *output[: index + 1]], [output[index]]):
            structured.reasoning_ended = True
            return index + 1
    structured.reasoning_ended = False
    return len(output)
