"""The shapes of the paper: counts against the published tables, FLOPs against Appendix D, the matched-shape solver."""

import pytest
import torch

from depthlit import Decoder, ShapeSpec
from depthlit.residuals import HC, MHC, BlockAttnRes, FullAttnRes, MoDA, PreLN
from depthlit.shape import NAMED, matched

# name: (d, F, head size, backbone, total, HC, mHC, AttnRes, MoDA), millions; depthbench.md section 4
TABLE = {
    "400m-L16": (1216, 3248, 76, 284.25, 406.53, 406.77, 410.27, 406.61, 450.89),
    "400m-L20": (1120, 2992, 70, 301.46, 414.09, 414.36, 418.39, 414.18, 461.75),
    "400m-L24": (1024, 2736, 64, 302.43, 405.41, 405.70, 410.13, 405.51, 453.64),
    "400m-L26": (992, 2656, 62, 307.91, 407.66, 407.97, 412.61, 407.76, 456.86),
    "400m-L28": (960, 2560, 60, 309.71, 406.25, 406.57, 411.41, 406.36, 456.02),
    "400m-L30": (928, 2480, 58, 310.53, 403.85, 404.18, 409.19, 403.96, 453.80),
    "400m-L32": (896, 2400, 56, 309.26, 399.36, 399.70, 404.87, 399.47, 449.13),
    "400m-L42": (800, 2144, 50, 323.70, 404.15, 404.56, 410.60, 404.29, None),
    "400m-L70": (640, 1712, 40, 344.87, 409.23, 409.77, 417.83, 409.41, None),
    "300m-backbone-L16": (1248, 3328, 78, 299.08, 424.58, None, None, None, None),
    "300m-backbone-L24": (1024, 2736, 64, 302.43, 405.41, None, None, None, None),
    "300m-backbone-L32": (896, 2400, 56, 309.26, 399.36, None, None, None, None),
    "300m-backbone-L42": (768, 2048, 48, 297.34, 374.57, None, None, None, None),
    "300m-backbone-L70": (608, 1632, 38, 311.97, 373.11, None, None, None, None),
    "300m-backbone-L84": (544, 1456, 34, 299.13, 353.83, None, None, None, None),
    "200m-L12": (896, 2400, 56, 115.97, 206.07, None, None, None, None),
    "200m-L18": (768, 2048, 48, 127.43, 204.66, None, None, None, None),
    "200m-L24": (672, 1792, 42, 130.09, 197.67, None, None, None, None),
    "300m-L14": (1056, 2816, 66, 187.37, 293.56, None, None, None, None),
    "300m-L21": (896, 2400, 56, 202.95, 293.05, None, None, None, None),
    "300m-L28": (800, 2144, 50, 215.80, 296.25, None, None, None, None),
    "500m-L17": (1344, 3584, 84, 368.54, 503.69, None, None, None, None),
    "500m-L26": (1120, 2992, 70, 391.90, 504.53, None, None, None, None),
    "500m-L34": (992, 2656, 62, 402.65, 502.40, None, None, None, None),
    "1600m-L28": (2048, 6144, 128, 1409.40, 1615.35, 1616.04, None, 1615.58, None),
    "1600m-L40": (1728, 5184, 108, 1433.41, 1607.18, 1608.01, None, 1607.46, None),
    "1600m-L54": (1504, 4512, 94, 1465.95, 1617.19, 1618.17, None, 1617.52, None),
}


def millions(shape: ShapeSpec, strategy) -> float:
    with torch.device("meta"):
        return round(sum(p.numel() for p in Decoder(shape, strategy).parameters()) / 1e6, 2)


@pytest.mark.parametrize("name", TABLE)
def test_published_counts(name):
    d_model, d_ff, head_dim, backbone, total, hc, mhc, attnres, moda = TABLE[name]
    shape = ShapeSpec.named(name)
    assert (shape.d_model, shape.d_ff, shape.head_dim) == (d_model, d_ff, head_dim)
    assert round(shape.backbone() / 1e6, 2) == backbone
    assert round(shape.parameters() / 1e6, 2) == total
    assert millions(shape, PreLN()) == total
    for strategy, published in {
        HC(): hc,
        MHC(): mhc,
        FullAttnRes(): attnres,
        BlockAttnRes(): attnres,
        MoDA(): moda,
    }.items():
        assert published is None or millions(shape, strategy) == published, strategy


def test_every_published_name_is_there():
    paper = [name for name in NAMED if not name.startswith(("tiny", "small"))]
    assert set(paper) == {*TABLE, "400m-L36", "300m-backbone-L56"}


# (L, d): TFLOPs at T = 4096 with last-position and all-position head; depthbench.md section 8
FLOPS = {
    (16, 1216): (2.981, 3.482),
    (20, 1120): (3.221, 3.682),
    (24, 1024): (3.302, 3.724),
    (28, 960): (3.439, 3.834),
    (32, 896): (3.495, 3.864),
    (42, 800): (3.779, 4.108),
    (70, 640): (4.328, 4.591),
}


@pytest.mark.parametrize("size", FLOPS)
def test_forward_flops_of_appendix_d(size):
    shape = ShapeSpec(*size)
    assert (round(shape.forward_flops(4096, "last") / 1e12, 3), round(shape.forward_flops(4096) / 1e12, 3)) == FLOPS[
        size
    ]


@pytest.mark.parametrize(
    "reference, by, family",
    [
        ("400m-L24", "total", "400m"),
        ("300m-backbone-L24", "backbone", "300m-backbone"),
        ("200m-L18", "total", "200m"),
        ("300m-L21", "total", "300m"),
        ("500m-L26", "total", "500m"),
        ("1600m-L40", "total", "1600m"),
    ],
)
def test_the_solver_finds_the_papers_widths(reference, by, family):
    for name, shape in NAMED.items():
        if name.rpartition("-L")[0] == family:
            assert matched(ShapeSpec.named(reference), shape.n_layer, by) == shape, name


def test_a_shape_matched_by_flops_costs_the_same():
    reference = ShapeSpec.named("400m-L24")
    for n_layer in (16, 32, 70):
        shape = matched(reference, n_layer, "flops")
        assert shape.forward_flops(2048) == pytest.approx(reference.forward_flops(2048), rel=0.04)
    assert matched(reference, 70, "flops").d_model < matched(reference, 70, "total").d_model


def test_too_deep_to_match():
    with pytest.raises(ValueError, match="fewer layers"):
        matched(ShapeSpec(4, 32, n_head=4, vocab_size=61), 1000)


@pytest.mark.parametrize(
    "settings, line",
    [
        (dict(n_layer=2, d_model=100), "d_model 100 is not divisible by n_head 16; d_model 96"),
        (dict(n_layer=2, d_model=48), "heads of odd size 3"),
        (dict(n_layer=2, d_model=64, n_kv_head=5), "n_head 16 is not divisible by n_kv_head 5"),
        (dict(n_layer=0, d_model=64), "n_layer is 0"),
        (dict(n_layer=2, d_model=64, vocab_size=-1), "vocab_size is -1"),
    ],
)
def test_bad_shapes_are_named(settings, line):
    with pytest.raises(ValueError, match=line):
        ShapeSpec(**settings)


def test_an_unknown_name_names_near_ones():
    with pytest.raises(ValueError, match=r"no shape is named '400m-L25'; near ones: 400m-L[2-4]"):
        ShapeSpec.named("400m-L25")


def test_tied_embeddings_are_one_tensor():
    shape = ShapeSpec(2, 32, n_head=4, vocab_size=61, tie_embeddings=True)
    decoder = Decoder(shape, PreLN(), seed=0)
    assert sum(p.numel() for p in decoder.parameters()) == shape.parameters()
    assert decoder.head.weight is decoder.embed.weight
