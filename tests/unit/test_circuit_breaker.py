"""When a circuit opens, who may try, and when it closes."""

from headwater_rollout.circuit_breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, THRESHOLD, CircuitBreaker


def test_failures_in_a_row_open_it_and_one_trial_at_a_time_may_close_it():
    now = [100.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(THRESHOLD - 1):
        breaker.failed("a")
    breaker.succeeded("a")
    for _ in range(THRESHOLD):
        assert breaker.closed(["a", "b"]) == ["a", "b"]
        breaker.failed("a")
    assert breaker.closed(["a", "b"]) == ["b"]
    assert breaker.wait_s(["a"]) == FIRST_PAUSE_S
    now[0] += FIRST_PAUSE_S
    assert breaker.closed(["a"]) == ["a"]
    breaker.calls("a")
    assert breaker.closed(["a"]) == []  # one trial only
    breaker.failed("a")
    assert breaker.wait_s(["a"]) == 2 * FIRST_PAUSE_S
    for _ in range(20):
        breaker.failed("a")
    assert breaker.wait_s(["a"]) == LONGEST_PAUSE_S
    now[0] += LONGEST_PAUSE_S
    breaker.calls("a")
    breaker.succeeded("a")
    assert breaker.closed(["a"]) == ["a"]
