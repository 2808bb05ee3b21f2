"""Codec and blob store: what goes in comes out, and what is wrong is refused before it is allocated."""

import os
import time

import numpy as np
import pytest
import torch

from headwater.common.v1.tensor_pb2 import BlobRef, DType, Tensor, TensorSpec
from headwater.errors import DataLoss, InvalidArgument, NotFound, Unavailable
from headwater.tensors import codec, torch_codec
from headwater.tensors.blobs import BlobStore


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i4", "i8", "u1", "?", ">f4"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_numpy_round_trip(dtype, shape):
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
    back = codec.decode(Tensor.FromString(codec.encode(array).SerializeToString()))
    assert back.shape == shape
    assert back.dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(back, array)


def test_non_contiguous_arrays_travel_in_row_major_order():
    array = np.arange(6, dtype="f4").reshape(2, 3).T
    np.testing.assert_array_equal(codec.decode(codec.encode(array)), array)


@pytest.mark.parametrize("dtype", list(torch_codec.TORCH_DTYPES.values()))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_torch_round_trip(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    back = torch_codec.decode(torch_codec.encode(tensor))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_bfloat16_means_the_same_to_numpy_and_torch():
    tensor = torch.randn(5).bfloat16()
    bits = codec.decode(torch_codec.encode(tensor))
    assert bits.dtype == np.uint16
    again = codec.encode(bits, DType.D_TYPE_BFLOAT16)
    assert torch.equal(torch_codec.decode(again), tensor)
    with pytest.raises(InvalidArgument, match="uint16 do not travel"):
        codec.encode(bits)


def test_contiguous_tensors_are_not_copied():
    tensor = torch.zeros(4)
    view = torch_codec.to_buffer(tensor)
    tensor[0] = 1.0
    assert np.frombuffer(view, "f4")[0] == 1.0
    data = bytearray(16)
    shared = torch_codec.from_buffer(torch_codec.spec_of(tensor), data)
    shared[0] = 1.0
    assert np.frombuffer(data, "f4")[0] == 1.0


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (TensorSpec(dtype=0, shape=[1]), "x.spec.dtype"),
        (TensorSpec(dtype=DType.D_TYPE_FLOAT32, shape=[-1]), "x.spec.shape"),
        (TensorSpec(dtype=DType.D_TYPE_FLOAT32, shape=[2**40, 2**40]), "x.spec.shape"),
        (TensorSpec(dtype=DType.D_TYPE_FLOAT32, shape=[1] * 9), "x.spec.shape"),
    ],
)
def test_bad_specs_are_refused_by_field(spec, field):
    with pytest.raises(InvalidArgument) as caught:
        codec.decode(Tensor(spec=spec, inline=b"1234"), field="x")
    assert caught.value.field == field


def test_wrong_length_is_data_loss_before_any_fetch():
    spec = TensorSpec(dtype=DType.D_TYPE_FLOAT32, shape=[2])
    with pytest.raises(DataLoss, match="7 bytes"):
        codec.decode(Tensor(spec=spec, inline=b"1234567"))
    with pytest.raises(DataLoss, match="9 bytes"):
        codec.decode(Tensor(spec=spec, blob=BlobRef(uri="a", byte_size=9)), fetch=lambda ref: pytest.fail("fetched"))
    with pytest.raises(InvalidArgument, match="carries no data"):
        codec.decode(Tensor(spec=spec))


def test_large_tensors_do_not_travel_inline():
    with pytest.raises(InvalidArgument, match="blob store"):
        codec.encode(np.zeros(codec.MAX_INLINE_BYTES + 1, "u1"))


def test_blob_round_trip(tmp_path):
    store = BlobStore(str(tmp_path))
    refs = store.put("run/groups/g.bin", [b"abc", b"", memoryview(b"x" * 100)])
    assert [ref.offset_bytes for ref in refs] == [0, 64, 64]
    assert [bytes(store.get(ref)) for ref in refs] == [b"abc", b"", b"x" * 100]
    assert os.listdir(tmp_path / "run/groups") == ["g.bin"]
    assert store.delete("run/groups/g.bin")
    assert not store.delete("run/groups/g.bin")
    with pytest.raises(NotFound, match="blob-root"):
        store.get(refs[0])


def test_memory_file_systems_work_too():
    store = BlobStore("memory://blobs")
    (ref,) = store.put("run/a.bin", [b"abc"])
    assert bytes(store.get(ref)) == b"abc"


def test_damage_is_data_loss(tmp_path):
    store = BlobStore(f"file://{tmp_path}")
    (ref,) = store.put("a.bin", [b"abcdef"])
    path = tmp_path / "a.bin"
    path.write_bytes(b"abcdeX" + path.read_bytes()[6:])
    with pytest.raises(DataLoss, match="checksum"):
        store.get(ref)
    path.write_bytes(b"abc")
    with pytest.raises(DataLoss, match="ends at byte 3"):
        store.get(ref)


@pytest.mark.parametrize(
    "uri", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a\\b", ".hidden", "a/./b", "a\n", "x" * 600]
)
def test_uris_stay_inside_the_root(tmp_path, uri):
    store = BlobStore(str(tmp_path / "root"))
    for call in (
        lambda: store.put(uri, [b"x"]),
        lambda: store.get(BlobRef(uri=uri, byte_size=1)),
        lambda: store.delete(uri),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == "blob.uri"


def test_links_do_not_lead_out_of_the_root(tmp_path):
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path)
    with pytest.raises(InvalidArgument, match="leaves the blob root"):
        BlobStore(str(tmp_path / "root")).get(BlobRef(uri="link/secret", byte_size=1))


@pytest.mark.parametrize(
    ("offset", "size", "error"),
    [(0, codec.MAX_TENSOR_BYTES + 1, InvalidArgument), (0, 2**31, DataLoss), (2**60, 8, DataLoss), (2, 8, DataLoss)],
)
def test_a_reference_to_more_than_there_is_allocates_nothing(tmp_path, monkeypatch, offset, size, error):
    store = BlobStore(str(tmp_path))
    (ref,) = store.put("a.bin", [b"12345678"])
    (tmp_path / "a.bin").write_bytes(b"12345678")
    monkeypatch.setattr(store, "_read", lambda *_: pytest.fail("read"))
    with pytest.raises(error):
        store.get(BlobRef(uri="a.bin", offset_bytes=offset, byte_size=size, checksum=ref.checksum))


def test_a_failed_write_leaves_nothing(tmp_path):
    store = BlobStore(str(tmp_path))
    with pytest.raises(TypeError):
        store._write(str(tmp_path / "a.bin"), [b"abc", object()])
    assert os.listdir(tmp_path) == []


def test_an_unwritable_store_is_unavailable(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="cannot write blob"):
        BlobStore(str(tmp_path)).put("file/a.bin", [b"x"])


def test_sweep_removes_the_old_and_spares_the_kept(tmp_path):
    store = BlobStore(str(tmp_path))
    for name in ("old", "kept", "new"):
        store.put(f"run/groups/{name}.bin", [b"x"])
    (tmp_path / "run/groups/.tmp-crashed").write_bytes(b"half")
    past = time.time() - 100
    for name in ("old.bin", "kept.bin", ".tmp-crashed"):
        os.utime(tmp_path / "run/groups" / name, (past, past))
    removed = store.sweep(50, keep={"run/groups/kept.bin"}, below="run")
    assert sorted(removed) == ["run/groups/.tmp-crashed", "run/groups/old.bin"]
    assert sorted(os.listdir(tmp_path / "run/groups")) == ["kept.bin", "new.bin"]
