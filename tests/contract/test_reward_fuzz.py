"""A few hundred fuzzed ScoreGroup requests; `python tests/reward_fuzz.py --count 20000` sends more."""

import reward_fuzz


async def test_requests_of_any_kind_end_with_an_answer_or_a_reason():
    figures = await reward_fuzz.run(600, seed=1)
    assert figures["bad"] == {}
    assert figures["scored_afterwards"] >= 1
    assert figures["rss_growth"] < 0.2  # a short run still fills caches; the long one asks for 5 %
    assert any(key.endswith(" OK") for key in figures["statuses"])
