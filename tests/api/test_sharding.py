"""Test sharding and unsharding of tensors and batches: `shard`, `unshard`, `local_position_ids`, `shard_batch`."""

from __future__ import annotations

import warnings

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance import oracle
from burst_portable.errors import (
    DtypeError,
    InputError,
    LayoutError,
    MaskError,
    MismatchError,
    ShapeError,
    UnknownNameError,
)
from burst_portable.nn import SelfAttention


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_unshard_inverts_shard(layout, dim):
    x = torch.randn(11, 11, 11)

    def work(mesh):
        mine = bp.shard(x, mesh, dim=dim, layout=layout)
        where = bp.local_position_ids(mesh, seq_len=11, layout=layout)
        assert torch.equal(mine, x.index_select(dim, where))
        return bp.unshard(mine, mesh, seq_len=11, dim=dim, layout=layout)

    for whole in bp.run_threads(3, work):
        assert torch.equal(whole, x)
        assert whole._base is None, "FSDP2 warns about views that a model returns"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.complex64])
def test_unshard_accepts_all_dtypes(dtype):
    """The tensors are conjugated, which is a flag of a complex tensor and not in its memory."""
    x = (torch.randn(11, 2) * (1 + 1j)).to(dtype) if dtype.is_complex else (torch.randn(11, 2) * 9).to(dtype)

    def work(mesh):
        return bp.unshard(bp.shard(x, mesh, dim=0).conj(), mesh, seq_len=11, dim=-2)

    assert all(torch.equal(whole, x.conj()) for whole in bp.run_threads(3, work))


def test_unshard_rejects_tensor_with_gradient():
    with pytest.raises(InputError, match="no gradient"):
        bp.unshard(torch.randn(1, 8, requires_grad=True), seq_len=8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": torch.int32}, "dtype: float32 on rank 0 but int32 on rank 1"),
        ({"heads": 3}, "shape of a row: .* on rank 0"),
        ({"layout": "striped"}, "layout: zigzag on rank 0 but striped on rank 1"),
        ({"rows": 5}, "rank 1 holds a different number of rows"),
        ({"dim": 9}, "no such dimension"),
        ({"grad": True}, "unshard has no gradient"),
    ],
)
def test_different_unshard_calls_raise_on_all_ranks(change, told):
    """Equal byte sizes gave wrong tensors, and different ones made the ranks wait."""

    def work(mesh):
        mine = change if mesh.rank == 1 else {}
        x = torch.ones(1, mine.get("rows", 4), mine.get("heads", 2), dtype=mine.get("dtype", torch.float32))
        x.requires_grad_("grad" in mine)
        with pytest.raises((MismatchError, InputError), match=told):
            bp.unshard(x, mesh, seq_len=8, dim=mine.get("dim", 1), layout=mine.get("layout", "zigzag"))

    bp.run_threads(2, work)


def test_shard_batch_shifts_labels_before_sharding():
    ids = torch.arange(100, 110).view(1, 10)

    def work(mesh):
        return bp.shard_batch(ids, mesh=mesh, cu_seqlens=(0, 4, 10), layout="zigzag"), bp.local_position_ids(
            mesh, seq_len=10
        )

    for batch, where in bp.run_threads(2, work):
        for column, position in enumerate(where.tolist()):
            assert batch["input_ids"][0, column] == 100 + position
            assert batch["position_ids"][0, column] == (position if position < 4 else position - 4)
            last = position in (3, 9)
            assert batch["labels"][0, column] == (-100 if last else 101 + position)


IDS = torch.arange(10).view(1, 10)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cu_seqlens": (0, 4, 8)}, MaskError, "do not fill the sequence; got documents up to 8, and 10 tokens"),
        ({"cu_seqlens": (0, 4, 12)}, MaskError, "do not fill the sequence"),
        ({"cu_seqlens": (0, 4.5, 10)}, MaskError, "takes whole numbers"),
        ({"cu_seqlens": ()}, MaskError, "cumulative lengths"),
        ({"position_ids": torch.arange(9).view(1, 9)}, ShapeError, "position_ids and input_ids have different shapes"),
        ({"position_ids": torch.arange(10)}, ShapeError, "position_ids must be"),
        ({"position_ids": torch.rand(1, 10)}, DtypeError, "position_ids must be integers"),
        ({"labels": IDS[:, :9]}, ShapeError, "labels and input_ids"),
        ({"labels": [1, 2]}, ShapeError, "labels is not a tensor"),
        ({"input_ids": IDS[0]}, ShapeError, "input_ids must be"),
        ({"input_ids": IDS.float()}, DtypeError, "not embeddings"),
        ({"input_ids": IDS[:, :0]}, ShapeError, "not empty"),
        ({"input_ids": IDS.tolist()}, ShapeError, "not a tensor"),
        ({"ignore_index": 0.5}, InputError, "ignore_index"),
        ({"layout": 3}, UnknownNameError, "unknown layout"),
        ({"mask": (0, 4, 10)}, InputError, "mask is not a mask"),
        ({"mask": "documents:0,4,12", "layout": "dispatched"}, MaskError, "longer than the sequence"),
        ({"layout": "dispatched"}, LayoutError, "needs the mask"),
    ],
)
def test_shard_batch_rejects_invalid_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        bp.shard_batch(**{"input_ids": IDS} | arguments)


def test_shard_batch_accepts_tensor_cu_seqlens_and_shared_ids():
    ids, ends = IDS.repeat(2, 1), torch.tensor([0, 4, 10], dtype=torch.int32)

    def work(mesh):
        found = bp.shard_batch(ids, cu_seqlens=ends, mesh=mesh, layout="document_zigzag")
        same = bp.shard_batch(ids, cu_seqlens=(0, 4, 10), mesh=mesh, layout="document_zigzag")
        assert all(torch.equal(found[name], same[name]) for name in same)
        placed = bp.shard_batch(ids, position_ids=IDS, mesh=mesh)["position_ids"]
        assert torch.equal(placed, bp.local_position_ids(mesh, seq_len=10).expand(2, -1))
        named = bp.local_position_ids(mesh, seq_len=10, layout="document_zigzag", mask="documents:0,4,10")
        assert torch.equal(found["input_ids"], named.expand(2, -1))

    bp.run_threads(2, work)


CU_SEQLENS = (0, 5, 30, 41, 67)
BATCH_MASKS = {
    "documents_full": bp.Mask.documents(CU_SEQLENS, causal=False),
    "documents": bp.Mask.documents(CU_SEQLENS),
    "window": bp.Mask.documents(CU_SEQLENS, window=4),
    "full": "full",
    "short_form": "full_documents:0,5,30,41,67",
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", BATCH_MASKS)
@pytest.mark.parametrize("shape", [(4, 2, 8, 8), (2, 2, 8, 24)])
def test_shard_batch_takes_mask_of_dispatched_layout(name, ranks, shape):
    """Attention of the batch's tokens equals a dense float64 oracle, as do all gradients."""
    heads, kv_heads, size, value_size = shape
    length, mask, options = CU_SEQLENS[-1], BATCH_MASKS[name], {"dtype": torch.float64}
    x = [torch.randn(2, length, *of, **options) for of in ((heads, size), (kv_heads, size), (kv_heads, value_size))]
    dout = torch.randn(2, length, heads, value_size, **options)
    seen = oracle.dense_mask(bp.Mask.parse(mask, length) if isinstance(mask, str) else mask, length)
    exact = oracle.attention(*x, dout, seen, scale=size**-0.5, dtype=torch.float64)

    def work(mesh):
        ids = torch.arange(length).expand(2, -1)
        batch = bp.shard_batch(ids, cu_seqlens=CU_SEQLENS, mesh=mesh, layout="dispatched", mask=mask)
        rows = batch["input_ids"][0]
        local = [one[:, rows].requires_grad_() for one in x]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = bp.attention(*local, mesh=mesh, mask=mask, layout="dispatched", seq_len=length)
        return rows, batch, out, torch.autograd.grad(out, local, dout[:, rows])

    found = bp.run_threads(ranks, work)
    assert sorted(torch.cat([rows for rows, *_ in found]).tolist()) == list(range(length))
    for rows, batch, out, grads in found:
        last = torch.isin(rows, torch.tensor(CU_SEQLENS[1:]) - 1)
        assert torch.equal(batch["labels"], torch.where(last, -100, rows + 1).expand(2, -1))
        starts = torch.tensor(CU_SEQLENS)[torch.bucketize(rows, torch.tensor(CU_SEQLENS[1:]), right=True)]
        assert torch.equal(batch["position_ids"], (rows - starts).expand(2, -1))
        pairs = ((out, exact.out), *zip(grads, (exact.dq, exact.dk, exact.dv), strict=True))
        for value, expected in pairs:
            torch.testing.assert_close(value, expected[:, rows], rtol=0, atol=1e-13)


def test_shard_batch_uses_mask_for_layout_without_cu_seqlens():
    mask = bp.Mask.block_sparse(64, 8, 40)

    def work(mesh):
        found = bp.shard_batch(torch.arange(64)[None], mesh=mesh, layout="dispatched", mask=mask)
        where = bp.local_position_ids(mesh, seq_len=64, layout="dispatched", mask=mask)
        assert torch.equal(found["input_ids"][0], where)
        assert torch.equal(found["position_ids"][0], where)

    bp.run_threads(3, work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 16.0}, "seq_len is not a size"),
        ({"seq_len": "16"}, "seq_len is not a size"),
        ({"layout": bp.make_layout("zigzag", 16, 2)}, "another mesh"),
        ({"layout": "document_zigzag"}, "needs a mask of documents"),
        ({"mask": 7}, "mask is not a mask"),
        ({"mesh": 7}, "not a mesh"),
        ({"device": "cuda:99"}, "this device cannot be used; got cuda:99: .*; pass a device of this machine"),
        ({"device": "cube"}, "this is not a device"),
    ],
)
def test_local_position_ids_rejects_invalid_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        bp.local_position_ids(**{"seq_len": 16} | arguments)


@pytest.mark.parametrize("cut", [bp.shard, lambda x, dim=1: bp.unshard(x, seq_len=4, dim=dim)], ids=["there", "back"])
def test_sharding_rejects_invalid_dimensions(cut):
    for dim in (3, -4, "1", 1.0):
        with pytest.raises(ShapeError, match=r"x has no such dimension; .*; allowed: -3 to 2"):
            cut(torch.zeros(4, 4, 4), dim=dim)
    with pytest.raises(ShapeError, match="allowed: a tensor that has dimensions"):
        cut(torch.zeros(()), dim=0)
    with pytest.raises(ShapeError, match="x is not a tensor"):
        cut([1, 2, 3, 4])


def test_attention_with_layout_of_no_shard_warns_once():
    """The warning is true: the output of the first call is wrong, and that of the call with one layout is right."""
    q, k, v = (torch.randn(1, 37, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)

    def largest_error(mesh, layout, again=1):
        rows = [bp.shard(x, mesh, layout="contiguous") for x in (q, k, v)]
        for _ in range(again):
            out = bp.attention(*rows, mesh=mesh, seq_len=37, **layout)
            rows = [x.float() for x in rows]  # another call to prepare
        return (out.double() - bp.shard(plain, mesh, layout="contiguous")).abs().max().item()

    with pytest.warns(
        UserWarning, match=r"result may be wrong; got zigzag; allowed: contiguous; pass the same"
    ) as told:
        assert max(bp.run_threads(3, lambda mesh: largest_error(mesh, {}, again=2))) > 0.1
    assert [one.filename for one in told] == [__file__], "the line that calls attention"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(bp.run_threads(3, lambda mesh: largest_error(mesh, {"layout": "contiguous"}))) < 1e-12


def test_self_attention_with_layout_of_no_shard_warns():
    """The module computes positions itself, which does not mean that its input was sharded so."""
    module, x = SelfAttention(16, heads=2).double(), torch.randn(1, 37, 16, dtype=torch.float64)
    plain = module(x)

    def largest_error(mesh, layout):
        attend = SelfAttention(16, heads=2, mesh=mesh, layout=layout).double()
        attend.load_state_dict(module.state_dict())
        out = attend(bp.shard(x, mesh, layout="striped"), seq_len=37)
        return (out - bp.shard(plain, mesh, layout="striped")).abs().max().item()

    with pytest.warns(UserWarning, match="result may be wrong; got zigzag; allowed: striped") as told:
        assert max(bp.run_threads(2, lambda mesh: largest_error(mesh, "zigzag"))) > 0.01
    assert [one.filename for one in told] == [__file__], "the line that calls the module"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(bp.run_threads(2, lambda mesh: largest_error(mesh, "striped"))) < 1e-12


def test_attention_with_layout_of_another_mask_warns():
    """`shard_batch` makes the layout of causal documents; these attend in both directions."""
    cu_seqlens, x = (0, 10, 64), torch.randn(1, 64, 2, 8, dtype=torch.float64)
    mask = bp.Mask.documents(cu_seqlens, causal=False)
    plain = bp.attention(x, x, x, mask=mask)

    def largest_error(mesh, layout):
        batch = bp.shard_batch(torch.arange(64)[None], cu_seqlens=cu_seqlens, mesh=mesh, layout=layout)
        rows = x[:, batch["input_ids"][0]]
        out = bp.attention(rows, rows, rows, mask=mask, mesh=mesh, layout=layout)
        return (out - plain[:, batch["input_ids"][0]]).abs().max().item()

    with pytest.warns(UserWarning, match=r"got dispatched of the mask 'full documents\(2\)'; .*make_layout\(name"):
        assert max(bp.run_threads(2, lambda mesh: largest_error(mesh, "dispatched"))) > 0.1
    layout = bp.make_layout("dispatched", 64, 2, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(bp.run_threads(2, lambda mesh: largest_error(mesh, layout))) < 1e-12


def test_unshard_with_another_layout_than_shard_warns():
    """The tokens would be at other positions."""
    x = torch.arange(64.0)[None]

    def work(mesh, layout):
        return bp.unshard(bp.shard(x, mesh, layout="contiguous"), mesh, seq_len=64, layout=layout)

    with pytest.warns(UserWarning, match=r"got zigzag; allowed: contiguous; .*same layout= to shard and unshard"):
        assert not torch.equal(bp.run_threads(2, lambda mesh: work(mesh, "zigzag"))[0], x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(bp.run_threads(2, lambda mesh: work(mesh, "contiguous"))[0], x)


def test_sharded_layouts_of_another_length_do_not_warn():
    """A custom layout of a name that shard knows from other batches may be new to this mesh."""

    def work(mesh):
        bp.local_position_ids(mesh, seq_len=8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return bp.attention(*(torch.randn(1, 8, 2, 4) for _ in range(3)), mesh=mesh).shape

    assert bp.run_threads(2, work)[0] == (1, 8, 2, 4)
