"""The bound on requests in a pair, and the retry time of refused ones."""

import pytest

from actors.pair.admission import Admission
from protos.errors import OverloadedError


def test_a_place_is_free_again_after_leave():
    admission = Admission(max_requests=1)
    admission.enter()
    admission.leave(0.5)
    admission.enter()


def test_a_full_pair_refuses_with_a_retry_time():
    admission = Admission(max_requests=2)
    admission.enter()
    admission.enter()
    with pytest.raises(OverloadedError, match="2 requests are running or queued, and this pair takes 2") as caught:
        admission.enter()
    assert caught.value.retry_after_s == 1.0
    assert admission.num_refused == 1
    admission.leave(0.5)
    admission.enter()  # a refused request has taken no place


def test_the_retry_time_grows_with_the_duration_of_requests():
    admission = Admission(max_requests=1)
    for _ in range(100):
        admission.enter()
        admission.leave(20.0)
    admission.enter()
    with pytest.raises(OverloadedError) as caught:
        admission.enter()
    assert caught.value.retry_after_s == pytest.approx(20.0, abs=0.2)
