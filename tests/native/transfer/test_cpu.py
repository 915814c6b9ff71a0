# SPDX-License-Identifier: Apache-2.0
"""CPU transfers against the slow reference: every format, random shapes, types, ids and tails, both directions."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semkv.native import _core
from semkv.native.layout import EngineKVFormat, LayoutError
from semkv.native.transfer.cpu import BlockTransfer, RowTransfer
from tests.native.transfer import reference
from tests.native.transfer.caches import Sizes, build, clone, noise

F = EngineKVFormat
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,  # two in a byte
    torch.int32,
]
ROWS = [fmt for fmt in F if not _core.is_opaque(fmt)]
OPAQUE = [F.NL_X_NB_PAGE, F.NL_X_TWO_NB_PAGE]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

sizes = st.builds(
    Sizes,
    nb=st.integers(1, 7),
    nl=st.integers(1, 3),
    bs=st.integers(1, 5),
    nh=st.integers(1, 4),
    hs=st.sampled_from([1, 2, 3, 8, 32, 64]),
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from([0, 0, 1]),
    widths=st.sampled_from([(5,), (5, 3), (16, 4, 1), (64, 32)]),
)
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def request_of(draw: st.DrawFn, s: Sizes) -> tuple[list[int], int, int]:
    """(block ids, tokens, tokens to skip), the last block in part more often than not."""
    ids = draw(st.permutations(range(s.nb)))[: draw(st.integers(1, s.nb))]
    tokens = len(ids) * s.bs - draw(st.integers(0, s.bs - 1))
    return list(ids), tokens, draw(st.integers(0, tokens))


@pytest.mark.parametrize("fmt", ROWS, ids=lambda fmt: fmt.name)
@given(data=st.data())
@many
def test_rows_there_and_back(fmt: EngineKVFormat, data: st.DataObject) -> None:
    s = data.draw(sizes)
    cache = build(fmt, s)
    ids, tokens, skip = data.draw(request_of(s))
    threads, stores = data.draw(st.sampled_from([(1, "automatic"), (2, "plain"), (2, "streaming")]))
    slots = [ids[i // s.bs] * s.bs + i % s.bs for i in range(tokens)]
    expected = reference.rows(cache, fmt, s.nl, s.bs, slots)

    transfer = RowTransfer(cache, fmt, block_size=s.bs, threads=threads, stores=stores)
    assert transfer.object_bytes(tokens) == expected.numel()
    obj = torch.zeros(expected.numel(), dtype=torch.uint8)
    transfer.gather(ids, tokens, obj)
    assert torch.equal(obj, expected)
    by_token = torch.zeros_like(obj)
    transfer.gather_slots(slots, by_token)
    assert torch.equal(by_token, expected)

    # Scattered into empty pages, what was skipped is still empty and all else is the source's.
    other = clone(cache)
    back = RowTransfer(other, fmt, block_size=s.bs, threads=threads, stores=stores)
    back.scatter(ids, tokens, obj, skip_tokens=skip)
    assert torch.equal(rows_of(other, fmt, s, slots[skip:]), rows_of(cache, fmt, s, slots[skip:]))
    assert torch.count_nonzero(rows_of(other, fmt, s, slots[:skip])) == 0
    back.scatter_slots([-1] * skip + slots[skip:], obj)
    assert torch.count_nonzero(rows_of(other, fmt, s, slots[:skip])) == 0
    back.scatter_slots(slots, obj)
    assert torch.equal(rows_of(other, fmt, s, slots), expected)


def rows_of(cache: Any, fmt: EngineKVFormat, s: Sizes, slots: list[int]) -> torch.Tensor:
    return reference.rows(cache, fmt, s.nl, s.bs, slots) if slots else torch.zeros(0, dtype=torch.uint8)


@pytest.mark.parametrize("fmt", F, ids=lambda fmt: fmt.name)
@given(data=st.data())
@many
def test_blocks_there_and_back(fmt: EngineKVFormat, data: st.DataObject) -> None:
    s = data.draw(sizes)
    cache = build(fmt, s)
    ids, _, _ = data.draw(request_of(s))
    skip = data.draw(st.integers(0, len(ids)))
    transfer = BlockTransfer(cache, fmt, block_size=s.bs, threads=data.draw(st.sampled_from([1, 2])))
    obj = torch.zeros(transfer.object_bytes(len(ids)), dtype=torch.uint8)
    transfer.gather(ids, obj)
    if fmt in OPAQUE:
        assert torch.equal(obj, reference.blocks(cache, fmt, ids))
    other = clone(cache)
    BlockTransfer(other, fmt, block_size=s.bs).scatter(ids, obj, skip_blocks=skip)
    again = torch.zeros_like(obj)
    BlockTransfer(other, fmt, block_size=s.bs).gather(ids, again)
    kept, done = again.view(-1), obj.view(-1)
    at = 0
    for _, _, size, _ in transfer.plan.planes:
        end = at + len(ids) * size
        assert torch.count_nonzero(kept[at : at + skip * size]) == 0
        assert torch.equal(kept[at + skip * size : end], done[at + skip * size : end])
        at = end
    if fmt not in OPAQUE and skip == 0:
        slots = [block * s.bs + offset for block in ids for offset in range(s.bs)]
        assert torch.equal(reference.rows(other, fmt, s.nl, s.bs, slots), reference.rows(cache, fmt, s.nl, s.bs, slots))


def small() -> tuple[list[torch.Tensor], RowTransfer, BlockTransfer]:
    cache: list[Any] = [noise((2, 4, 2, 1, 8), torch.float32) for _ in range(2)]
    fmt = F.NL_X_TWO_NB_BS_NH_HS
    return cache, RowTransfer(cache, fmt), BlockTransfer(cache, fmt)


@pytest.mark.parametrize(
    ("ids", "tokens", "skip", "size", "error", "message"),
    [
        ([0, 4], 4, 0, 512, IndexError, r"block id 4 at position 1 is outside \[0, 4\)"),
        ([0, -1], 4, 0, 512, IndexError, "block id -1 at position 1"),
        ([0, 2**40], 4, 0, 512, IndexError, "block id 1099511627776"),
        ([0], 4, 0, 512, ValueError, "4 tokens are 2 blocks of 2, but 1 ids"),
        ([0, 1, 2], 4, 0, 512, ValueError, "but 3 ids"),
        ([0, 1], 4, 5, 512, IndexError, "skip 5 is more than the 4 tokens"),
        ([0, 1], 4, 0, 511, ValueError, "the object has 511 bytes, 4 tokens need 512"),
    ],
)
def test_rows_refused_before_a_byte_moves(
    ids: list[int], tokens: int, skip: int, size: int, error: type[Exception], message: str
) -> None:
    cache, rows, _ = small()
    before = [tensor.clone().view(torch.uint8) for tensor in cache]
    obj = torch.full((size,), 7, dtype=torch.uint8)
    for move in (rows.gather, rows.scatter):
        with pytest.raises(error, match=message):
            move(ids, tokens, obj, skip_tokens=skip)
    assert torch.equal(obj, torch.full((size,), 7, dtype=torch.uint8))
    assert all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(before, cache, strict=True))


def test_blocks_refused_before_a_byte_moves() -> None:
    _, _, blocks = small()
    obj = torch.full((512,), 7, dtype=torch.uint8)
    for ids, skip, error in (([0, 4], 0, IndexError), ([0, 1], 3, IndexError), ([0, 1, 2], 0, ValueError)):
        with pytest.raises(error):
            blocks.gather(ids, obj, skip_blocks=skip)
    assert torch.equal(obj, torch.full((512,), 7, dtype=torch.uint8))
    slots = torch.tensor([2, 3, 5, 4])
    for start, end, error, message in (
        (0, 4, ValueError, "slot 5 of token 2 does not begin a block of 2"),
        (0, 5, IndexError, "outside the 4 slots"),
        (-1, 2, IndexError, "outside the 4 slots"),
    ):
        with pytest.raises(error, match=message):
            blocks.gather_range(slots, start, end, obj.data_ptr(), 512)


def test_slots_refused_and_skipped() -> None:
    cache, rows, _ = small()
    obj = torch.zeros(3 * rows.plan.bytes_per_token, dtype=torch.uint8)
    for slots in ([0, 8, 1], [0, -2, 1]):
        with pytest.raises(IndexError, match="at position 1"):
            rows.gather_slots(slots, obj)
    rows.gather_slots([3, -1, 0], obj)
    expected = reference.rows(cache, F.NL_X_TWO_NB_BS_NH_HS, 2, 2, [3, 0]).view(4, 2, 32)
    assert torch.equal(obj.view(4, 3, 32)[:, [0, 2]], expected)
    assert torch.count_nonzero(obj.view(4, 3, 32)[:, 1]) == 0


def test_what_has_no_rows_or_is_no_object_is_refused() -> None:
    s = Sizes(3, 1, 2, 1, 8, torch.float32, 0)
    with pytest.raises(LayoutError, match="only whole blocks"):
        RowTransfer(build(F.NL_X_NB_PAGE, s), F.NL_X_NB_PAGE)
    with pytest.raises(LayoutError, match="give the block size"):
        RowTransfer(build(F.NL_X_NBBS_ONE_HS, s), F.NL_X_NBBS_ONE_HS)
    _, rows, _ = small()
    with pytest.raises(LayoutError, match="has gaps"):
        rows.gather([0], 2, torch.zeros(64, 64, dtype=torch.uint8)[:, ::2])
    with pytest.raises(TypeError, match="must be integers"):
        rows.gather(torch.tensor([0.0]), 2, torch.zeros(512, dtype=torch.uint8))


def test_layers_that_share_memory_are_stored_once() -> None:
    tensor = noise((3, 2, 2, 8), torch.float32)
    shared = BlockTransfer([tensor, tensor, tensor.clone()], F.NL_X_NB_PAGE)
    assert shared.plan.bytes_per_block == 2 * 2 * 2 * 8 * 4


def test_offsets_are_64_bit() -> None:
    """A page more than 4 GiB from the first: the memory is mapped, hardly any of it used."""
    width, blocks = 1 << 20, 4200
    pages = torch.empty(blocks, 1, width, dtype=torch.uint8)
    pages[blocks - 1, 0, :] = 3
    obj = torch.zeros(width, dtype=torch.uint8)
    for transfer in (BlockTransfer([pages], F.NL_X_NB_BS_HS), RowTransfer([pages], F.NL_X_NB_BS_HS)):
        obj.zero_()
        if isinstance(transfer, BlockTransfer):
            transfer.gather([blocks - 1], obj)
        else:
            transfer.gather([blocks - 1], 1, obj)
        assert int(obj.min()) == 3


@pytest.mark.parametrize("call", ["blocks", "blocks by slots", "rows", "rows by slots", "control"])
def test_the_interpreter_runs_while_bytes_move(call: str) -> None:
    """The GIL is released: with switching by time put off, another thread runs only if the copying one lets it.

    The control copies the same bytes through a call that keeps the GIL: nobody else runs before it has ended. The
    core is called by itself, with numpy's ids: torch's own operations let others run.
    """
    size = 64 << 20
    pages = torch.zeros(64, 1, 1 << 20, dtype=torch.uint8)
    obj = torch.zeros(size, dtype=torch.uint8)
    blocks = BlockTransfer([pages], F.NL_X_NB_BS_HS)._copier
    rows = RowTransfer([pages], F.NL_X_NB_BS_HS)._copier
    to, source, gather = obj.data_ptr(), pages.data_ptr(), _core.Direction.gather
    ids = np.arange(64)  # of blocks, and of slots: a block is one token
    keeps = ctypes.PyDLL(None).memmove
    calls: dict[str, Callable[[], Any]] = {
        "blocks": lambda: blocks.copy_ids(gather, ids, to, size),
        "blocks by slots": lambda: blocks.copy_slots(gather, ids, 0, 64, 1, to, size),
        "rows": lambda: rows.copy_blocks(gather, ids, 64, to, size),
        "rows by slots": lambda: rows.copy_slots(gather, ids, to, size),
        "control": lambda: keeps(ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size)),
    }
    inside, ended, seen = threading.Event(), False, None

    def copy() -> None:
        nonlocal ended
        inside.set()
        for _ in range(30):
            calls[call]()
        ended = True

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker = threading.Thread(target=copy)
        worker.start()
        inside.wait()
        seen = not ended
        worker.join()
    finally:
        sys.setswitchinterval(before)
    assert seen == (call != "control")


def test_a_copy_needs_no_memory_of_its_own() -> None:
    """Straight into the object: no room for a second one is there."""
    program = """
import resource, torch
from semkv.native.layout import EngineKVFormat as F
from semkv.native.transfer.cpu import BlockTransfer, RowTransfer
size = 128 << 20
pages, obj = torch.ones(128, 16, size // 2048, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
ids = list(reversed(range(128)))
movers = [RowTransfer([pages], F.NL_X_NB_BS_HS), BlockTransfer([pages], F.NL_X_NB_BS_HS)]
torch.set_num_threads(1)
pages.index_select(0, torch.arange(1))
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (16 << 20),) * 2)
movers[0].gather(ids, 2048, obj)
movers[0].scatter(ids, 2048, obj)
movers[1].gather(ids, obj)
movers[1].scatter(ids, obj)
assert int(obj.min()) == 1
try:
    obj.copy_(pages.index_select(0, torch.tensor(ids)).view(-1))
except RuntimeError as error:
    print("SMALL" if "alloc" in str(error) else error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "SMALL" in done.stdout, done.stdout + done.stderr
