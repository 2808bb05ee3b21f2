"""The queue of one reward: batching, isolation of failures, limits, deadlines, drain."""

import threading
import time

import numpy as np
import pytest
from headwater_reward.batching import PendingItem, RewardQueue
from headwater_reward.registry import GoldenImage, RewardParams, Score

from headwater.errors import DeadlineExceeded, Internal, InvalidArgument, OutOfBudget, Unavailable

PIXEL = np.zeros((1, 1, 1, 3), np.uint8)


class Recording:
    """Scores the number in the prompt. Batches wait for `gate`; their prompts are recorded."""

    name, description = "recording", "The number in the prompt."
    minimum, maximum, accepts_video, requires = None, None, False, ()
    params_model = RewardParams

    def __init__(self):
        self.gate, self.entered, self.batches = threading.Event(), threading.Event(), []
        self.gate.set()

    def load(self, threads):
        self.threads = threads

    def score(self, batch):
        self.entered.set()
        assert self.gate.wait(10)
        self.batches.append([item.prompt for item in batch])
        if any(item.prompt == "explode" for item in batch):
            raise RuntimeError("boom")
        return [Score(float(item.prompt)) for item in batch]

    def golden_images(self):
        return [GoldenImage("one", PIXEL[0], "1", 1.0)]


def item(prompt, decode=lambda: PIXEL):
    return PendingItem(decode, prompt, {}, RewardParams())


def items(*prompts):
    return [item(str(prompt)) for prompt in prompts]


def soon(seconds=10.0):
    return time.monotonic() + seconds


@pytest.fixture
def make_queue():
    made = []

    def make(reward=None, *, max_batch=8, max_wait_s=0.0, queue_limit=100):
        queue = RewardQueue(reward or Recording(), max_batch=max_batch, max_wait_s=max_wait_s, queue_limit=queue_limit)
        queue.start().result(10)
        made.append(queue)
        return queue

    yield make
    for queue in made:
        queue.reward.gate.set()
        assert queue.close(10)


@pytest.fixture
def blocked(make_queue):
    """A queue whose thread is inside a batch of one item until the reward's gate opens."""

    def make(**limits):
        reward = Recording()
        reward.gate.clear()
        queue = make_queue(reward, **limits)
        first = queue.submit(items(0), deadline=soon())
        assert reward.entered.wait(10)
        return queue, reward, first

    return make


def values(futures):
    return [future.result(10).result.value for future in futures]


def test_items_of_several_requests_are_scored_together_in_order(blocked):
    queue, reward, first = blocked(max_batch=4)
    requests = [queue.submit(items(*numbers), deadline=soon()) for numbers in ((1, 2), (3, 4, 5), (6,))]
    reward.gate.set()
    assert [values(futures) for futures in [first, *requests]] == [[0.0], [1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]
    assert reward.batches == [["0"], ["1", "2", "3", "4"], ["5", "6"]]


def test_a_batch_waits_for_company_and_starts_at_once_when_full(make_queue):
    queue = make_queue(max_batch=2, max_wait_s=30.0)
    first = queue.submit(items(1), deadline=soon())
    assert queue.reward.batches == []
    second = queue.submit(items(2), deadline=soon())
    assert values(first + second) == [1.0, 2.0]
    assert queue.reward.batches == [["1", "2"]]


def test_a_lonely_item_is_scored_after_the_longest_wait(make_queue):
    queue = make_queue(max_batch=8, max_wait_s=0.05)
    outcome = queue.submit(items(1), deadline=soon())[0].result(10)
    assert outcome.result.value == 1.0
    assert outcome.queue_s >= 0.05


def test_a_slow_reward_does_not_hold_up_another(blocked, make_queue):
    _, _, slow = blocked()
    fast = make_queue().submit(items(7), deadline=soon())
    assert values(fast) == [7.0]
    assert not slow[0].done()


def test_an_item_that_makes_the_reward_raise_fails_alone(blocked):
    queue, reward, _ = blocked()
    futures = queue.submit(items(1, "explode", 2), deadline=soon())
    reward.gate.set()
    good, bad, also_good = (future.result(10).result for future in futures)
    assert (good, also_good) == (Score(1.0), Score(2.0))
    assert isinstance(bad, Internal)
    assert "RuntimeError: boom" in bad.message


def test_an_item_that_cannot_be_decoded_fails_alone_with_its_own_error(blocked):
    def broken():
        raise InvalidArgument("media[1].data is broken", field="media[1].data")

    queue, reward, _ = blocked()
    futures = queue.submit([item("1"), item("2", broken), item("3")], deadline=soon())
    reward.gate.set()
    results = [future.result(10).result for future in futures]
    assert [results[0], results[2]] == [Score(1.0), Score(3.0)]
    assert results[1].field == "media[1].data"
    assert reward.batches[1] == ["1", "3"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_score_that_is_not_finite_is_an_error_of_its_item(make_queue, value):
    results = [f.result(10).result for f in make_queue().submit(items(1, value), deadline=soon())]
    assert results[0] == Score(1.0)
    assert isinstance(results[1], Internal)
    assert results[1].reason == "REWARD_NOT_FINITE"


def test_a_wrong_number_of_scores_is_an_error_and_never_shifts_the_others(make_queue):
    reward = Recording()
    reward.score = lambda batch: [Score(1.0)] * (len(batch) + 1)
    results = [f.result(10).result for f in make_queue(reward).submit(items(1, 2), deadline=soon())]
    assert all(isinstance(result, Internal) and "returned 2 scores for 1" in result.message for result in results)


def test_a_full_queue_refuses_with_a_time_to_retry_and_keeps_what_it_has(blocked):
    queue, reward, first = blocked(queue_limit=3)
    waiting = queue.submit(items(1, 2), deadline=soon())
    with pytest.raises(OutOfBudget) as caught:
        queue.submit(items(3, 4), deadline=soon())
    assert 0.1 <= caught.value.retry_after_s <= 60
    assert "2 of 3 items wait" in caught.value.message
    last = queue.submit(items(5), deadline=soon())
    reward.gate.set()
    assert values(first + waiting + last) == [0.0, 1.0, 2.0, 5.0]


def test_a_group_larger_than_the_queue_is_invalid_since_no_retry_can_help(make_queue):
    with pytest.raises(InvalidArgument, match="--queue-limit"):
        make_queue(queue_limit=3).submit(items(1, 2, 3, 4), deadline=soon())


def test_cancelled_and_expired_items_make_room_and_are_not_scored(blocked):
    queue, reward, first = blocked(queue_limit=2)
    expired = queue.submit(items(1), deadline=time.monotonic())
    cancelled = queue.submit(items(2), deadline=soon())
    assert cancelled[0].cancel()
    replacement = queue.submit(items(3, 4), deadline=soon())
    assert isinstance(expired[0].result(10).result, DeadlineExceeded)
    reward.gate.set()
    assert values(first + replacement) == [0.0, 3.0, 4.0]
    assert reward.batches == [["0"], ["3", "4"]]


def test_an_item_whose_deadline_passes_while_it_waits_is_not_scored(blocked):
    queue, reward, first = blocked()
    late, in_time = queue.submit(items(1), deadline=soon(0.05)), queue.submit(items(2), deadline=soon())
    time.sleep(0.1)  # the deadline is on the real clock
    reward.gate.set()
    assert isinstance(late[0].result(10).result, DeadlineExceeded)
    assert values(first + in_time) == [0.0, 2.0]
    assert reward.batches == [["0"], ["2"]]


def test_closing_scores_what_waits_and_refuses_the_rest(blocked):
    queue, reward, first = blocked()
    waiting = queue.submit(items(1, 2), deadline=soon())
    assert queue.close(0.0) is False
    with pytest.raises(Unavailable, match="draining"):
        queue.submit(items(3), deadline=soon())
    reward.gate.set()
    assert queue.close(10)
    assert values(first + waiting) == [0.0, 1.0, 2.0]


def test_closing_reports_a_reward_that_does_not_end(blocked):
    queue, _, _ = blocked()
    assert queue.close(0.05) is False


class Rank(Recording):
    """Group-wise: how many samples of the group have a smaller number."""

    group_wise = True

    def score(self, batch):
        super().score(batch)
        numbers = [float(item.prompt) for item in batch]
        return [Score(float(sum(other < number for other in numbers))) for number in numbers]


def results_of(futures):
    return [future.result(10).result for future in futures]


def test_a_group_wise_reward_sees_whole_groups_and_never_two_at_once(make_queue):
    reward = Rank()
    reward.gate.clear()
    queue = make_queue(reward, max_batch=2, max_wait_s=5.0)
    groups = [queue.submit(items(*numbers), deadline=soon()) for numbers in ((9,), (3, 1, 2), (5, 4))]
    reward.gate.set()
    assert [[score.value for score in results_of(futures)] for futures in groups] == [[0], [2, 0, 1], [1, 0]]
    assert reward.batches == [["9"], ["3", "1", "2"], ["5", "4"]]


def test_a_group_that_makes_a_group_wise_reward_fail_is_not_scored_sample_by_sample(make_queue):
    reward = Rank()
    results = results_of(make_queue(reward).submit(items(1, "explode", 2), deadline=soon()))
    assert [type(result) for result in results] == [Internal] * 3
    assert len(reward.batches) == 1


def test_the_wait_of_items_is_counted(blocked):
    queue, reward, first = blocked()
    second = queue.submit(items(1), deadline=soon())
    time.sleep(0.2)
    assert queue.oldest_wait_s >= 0.2
    reward.gate.set()
    results_of([*first, *second])
    assert queue.waited_s >= 0.2
    assert queue.oldest_wait_s == 0.0


def test_a_reward_that_cannot_load_fails_the_start():
    reward = Recording()

    def load(threads):
        raise OSError("no weights")

    reward.load = load
    with pytest.raises(OSError, match="no weights"):
        RewardQueue(reward, max_batch=1, max_wait_s=0, queue_limit=1).start().result(10)
