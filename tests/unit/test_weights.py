"""Fingerprints, plans and process groups of weight updates."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import InvalidArgument, Unavailable
from headwater.rollout.v1.weights_pb2 import Transport
from headwater.weights.fingerprint import fingerprint
from headwater.weights.group import WeightGroup, connect_store, serve_store
from headwater.weights.plan import bucket_views, build_plan, check_plan, spec_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_of_parts_is_that_of_the_whole(dtype):
    whole = torch.randn(7, 5).to(dtype)
    assert fingerprint([whole[:2], whole[2:3], whole[3:]]) == fingerprint(whole) == fingerprint(whole.clone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_sees_one_flipped_bit_a_swap_and_a_truncation(dtype):
    tensor = torch.randn(1000).to(dtype)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[123] ^= 1
    swapped = tensor.clone()
    swapped[[3, 900]] = tensor[[900, 3]]
    values = {fingerprint(t) for t in (tensor, flipped, swapped, tensor[:-1], torch.zeros_like(tensor))}
    assert len(values) == 5


def test_fingerprint_does_not_depend_on_layout_or_alignment():
    tensor = torch.randn(300, 70)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)
    shifted = torch.randn(1001)[1:]
    assert fingerprint(shifted) == fingerprint(shifted.clone())


def test_fingerprint_spans_blocks(monkeypatch):
    monkeypatch.setattr("headwater.weights.fingerprint._BLOCK", 16)
    tensor = torch.randn(1000)
    parts = [tensor[:64], tensor[64:96], tensor[96:]]  # whole blocks, so that they are not joined first
    assert fingerprint(parts) == fingerprint(tensor)
    swapped = torch.cat([tensor[32:64], tensor[:32], tensor[64:]])
    assert fingerprint(swapped) != fingerprint(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_sees_pairs_of_flipped_signs(dtype):
    tensor = torch.randn(64).to(dtype)
    values = {fingerprint(tensor)}
    for other in range(1, 64):
        flipped = tensor.clone()
        flipped[[0, other]] *= -1
        values.add(fingerprint(flipped))
    assert len(values) == 64
    assert fingerprint(-tensor) not in values


def test_fingerprint_leaves_the_tensor_alone():
    for dtype in (*DTYPES, torch.int64):
        tensor = torch.arange(100).to(dtype)
        fingerprint(tensor)
        assert torch.equal(tensor, torch.arange(100).to(dtype))


@settings(deadline=None, max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=12),
    bucket_bytes=st.integers(1, 400),
)
def test_buckets_cover_every_tensor_and_round_trip(shapes, bucket_bytes):
    tensors = {f"t{i}": torch.randn(shape).to(DTYPES[i % 4]) for i, shape in enumerate(shapes)}
    plan = build_plan(
        [(name, spec_of(t)) for name, t in tensors.items()],
        epoch=1, version=WeightVersion(run_id="r", step=1), component="transformer", bucket_bytes=bucket_bytes,
    )  # fmt: skip
    check_plan(plan)
    seen = {}
    for index, bucket in enumerate(plan.buckets):
        buffer = torch.zeros(bucket.byte_size, dtype=torch.uint8)
        for name, view in bucket_views(plan, index, buffer):
            view.copy_(tensors[name])
        seen |= {name: view.clone() for name, view in bucket_views(plan, index, buffer)}
    assert list(seen) == list(tensors)
    assert all(torch.equal(seen[name], tensors[name]) and seen[name].dtype == tensors[name].dtype for name in tensors)


def test_a_tampered_plan_is_refused():
    plan = build_plan([("a", spec_of(torch.zeros(3)))], epoch=1, version=WeightVersion(), component="transformer")
    plan.tensors[0].name = "b"
    with pytest.raises(InvalidArgument, match="digest"):
        check_plan(plan)
    plan.tensors[0].spec.shape[:] = [300]
    with pytest.raises(InvalidArgument, match="does not fit"):
        check_plan(plan)


@pytest.mark.parametrize("shape", [[-1], [2**62, 2**62], [-(2**40), -(2**40)]])
def test_a_plan_of_impossible_shapes_is_refused(shape):
    plan = build_plan([("a", spec_of(torch.zeros(3)))], epoch=1, version=WeightVersion(), component="transformer")
    plan.tensors[0].spec.shape[:] = shape
    with pytest.raises(InvalidArgument) as caught:
        check_plan(plan)
    assert caught.value.field.startswith("plan.")


def test_a_tensor_named_twice_is_refused():
    spec = spec_of(torch.zeros(3))
    plan = build_plan([("a", spec), ("a", spec)], epoch=1, version=WeightVersion(), component="transformer")
    with pytest.raises(InvalidArgument, match="twice"):
        check_plan(plan)


def join(store, rank, world_size, timeout_s):
    return WeightGroup(
        Transport.TRANSPORT_GLOO, store, rank=rank, world_size=world_size, name="g", host="127.0.0.1",
        timeout_s=timeout_s,
    )  # fmt: skip


def test_three_ranks_receive_what_rank_zero_sent():
    store = serve_store("127.0.0.1", 10)
    sent = torch.randint(0, 255, (1000,), dtype=torch.uint8)
    got = {}

    def receive(rank):
        group = join(connect_store("127.0.0.1", store.port, 10), rank, 3, 10)
        got[rank] = torch.zeros_like(sent)
        group.broadcast(got[rank])
        group.close()

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    sender = join(store, 0, 3, 10)
    sender.broadcast(sent)
    for thread in threads:
        thread.join(20)
    assert all(torch.equal(got[rank], sent) for rank in (1, 2))


def test_a_missing_rank_ends_the_wait_with_an_error():
    store = serve_store("127.0.0.1", 1)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="could not join"):
        join(store, 0, 2, 1)
    assert time.monotonic() - started < 20


def test_a_store_that_does_not_answer_is_an_error():
    with pytest.raises(Unavailable, match="cannot be reached"):
        connect_store("127.0.0.1", 1, 0.5)
