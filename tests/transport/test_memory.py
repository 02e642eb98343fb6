"""Layout and block: where arrays lie, and where their memory comes from."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit.errors import ArgumentError, SharedMemoryError
from envkit.transport import Block, Field, Layout

DTYPES = st.sampled_from(["bool", "uint8", "int32", "float64", "<f4", "float16"])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(parts=st.lists(st.tuples(SHAPES, DTYPES), max_size=5), rows=st.integers(0, 5))
def test_fields_are_aligned_and_do_not_overlap(parts, rows):
    fields = tuple(Field(str(i), shape, dtype) for i, (shape, dtype) in enumerate(parts))
    layout = Layout(fields, rows)

    arrays = layout.arrays(bytearray(layout.size_bytes))
    for number, array in enumerate(arrays.values()):
        array[...] = number % 2

    assert all(offset % 64 == 0 for offset in layout.offsets)
    for number, (field, array) in enumerate(zip(fields, arrays.values(), strict=True)):
        assert array.shape == (rows, *field.shape)
        assert array.dtype == field.dtype
        assert (array == number % 2).all()


def test_a_layout_survives_pickling():
    layout = Layout((Field("a", (2,), "float32"),), 3)

    assert pickle.loads(pickle.dumps(layout)) == layout


def test_two_fields_of_one_name_are_refused():
    with pytest.raises(ArgumentError, match=r"'a'.*give each array its own name"):
        Layout((Field("a", (), "int8"), Field("a", (2,), "int8")), 1)


def test_python_objects_are_refused_in_shared_memory():
    with pytest.raises(ArgumentError, match="control channel"):
        Field("thing", (), "O")


def test_a_size_that_varies_is_refused_in_shared_memory():
    with pytest.raises(ArgumentError, match="must be fixed"):
        Field("thing", (-1,), "float32")


def test_two_mappings_of_a_block_are_the_same_bytes():
    layout = Layout((Field("a", (2,), "float32"),), 3)
    here = Block.create(layout)
    there = Block.attach(os.dup(here.fd), layout)

    here.arrays["a"][1] = 7

    assert (there.arrays["a"] == [[0, 0], [7, 7], [0, 0]]).all()
    here.close()
    there.close()


def test_a_view_outlives_its_block():
    block = Block.create(Layout((Field("a", (), "int64"),), 3))
    view = block.arrays["a"]

    block.close()
    block.close()

    view[:] = 5
    assert np.array_equal(view, [5, 5, 5])


def test_a_block_larger_than_the_machine_is_refused_with_advice():
    layout = Layout((Field("pixels", (2**20, 2**20), "float32"),), 1000)

    with pytest.raises(SharedMemoryError, match=r"MiB.*'pixels'.*fewer environments"):
        Block.create(layout)


@pytest.mark.parametrize("missing", [(), ("memfd_create",), ("memfd_create", "posix_fallocate")])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_size_limit_is_an_error_at_creation_and_leaks_nothing(
    monkeypatch, tmp_path, missing, mapped
):
    for name in missing:
        monkeypatch.delattr(os, name, raising=False)
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(SharedMemoryError, match="cannot reserve"):
            Block.create(
                Layout((Field("a", (), "int8"),), 100_000), str(tmp_path) if mapped else None
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert len(os.listdir("/proc/self/fd")) == before
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("missing", [(), ("posix_fallocate",)])
def test_all_of_a_file_is_reserved_when_it_becomes_a_block(monkeypatch, tmp_path, missing):
    for name in missing:
        monkeypatch.delattr(os, name, raising=False)
    fd = os.open(tmp_path / "named", os.O_RDWR | os.O_CREAT)

    block = Block.create_in(fd, Layout((Field("a", (), "int8"),), 3_000_000))

    assert os.stat(tmp_path / "named").st_blocks * 512 >= 3_000_000
    assert not block.arrays["a"].any()
    block.close()
