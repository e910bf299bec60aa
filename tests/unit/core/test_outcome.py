from zerolayer.core.outcome import Outcome


def test_every_outcome_has_a_label_of_its_own_and_an_http_status() -> None:
    assert len({outcome.label for outcome in Outcome}) == len(Outcome)
    assert all(200 <= outcome.http_status <= 599 for outcome in Outcome)


def test_only_a_finished_request_answers_200() -> None:
    assert [outcome for outcome in Outcome if outcome.http_status == 200] == [Outcome.FINISHED]


def test_a_client_that_left_or_asked_for_too_much_is_no_fault_of_the_service() -> None:
    faultless = {outcome for outcome in Outcome if not outcome.is_fault}
    assert faultless == {
        Outcome.FINISHED, Outcome.CLIENT_LEFT, Outcome.REJECTED, Outcome.REFUSED,
    }  # fmt: skip
