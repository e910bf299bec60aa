"""Admission control: a new request is refused with 429 when every engine is over its limits.

vLLM's server asks its engine client (`check_admission`) before it begins an answer, as a stream
that has begun has sent its 200 already. Our question is put behind vLLM's own.
"""

from http import HTTPStatus
from typing import TYPE_CHECKING

from vllm.exceptions import GracefulHTTPError

from zerolayer.core.outcome import Outcome

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from zerolayer.engines.fleet import Fleet


def install_admission(llm: "AsyncLLM", fleet: "Fleet") -> None:
    """Extend one AsyncLLM. What the operator chose decides whether it ever refuses."""
    vllms_own = llm.check_admission

    def check_admission(n: int = 1, request_id: str | None = None) -> None:
        vllms_own(n, request_id)
        wait_s = fleet.placing.refused_for_s(fleet.driver)
        if wait_s is not None:
            raise GracefulHTTPError(
                f"every engine is over its limits; try again in {wait_s:.0f} s",
                HTTPStatus(Outcome.REFUSED.http_status),
            )

    llm.check_admission = check_admission
