"""Comparing weight versions: one rule for router and workers."""

from headwater.common.v1.sample_pb2 import WeightVersion


def satisfies(have: WeightVersion, wanted: WeightVersion) -> bool:
    """Whether weights `have` may serve a request that asks for `wanted` or newer.

    Steps of different runs do not compare. A run's own step 0 is wanted like any other: a worker that loaded its model
    elsewhere serves a run only after the trainer has brought it to the run's weights. An empty run id asks for nothing.
    """
    return not wanted.run_id or (have.run_id == wanted.run_id and have.step >= wanted.step)
