"""The mma.sync kernels with 8-bit scores: their own source, compiled for the CPU, against the reference and float64.

tests/kernels_on_cpu.py runs them, tests/on_cpu/kernels/ptx/mma_sync.cuh says what is taken for granted of tensor cores. Of architectures there are
8.9, whose tensor cores multiply e4m3, and 9.0, where it is converted to FP16.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import fuzz
import fuzz_inputs
import model_inputs
import pytest
import torch
from calls_on_cpu import (
    FORMS,
    MANY,
    Case,
    check_random_calls,
    check_unseen,
    check_wrong_starts,
    infinite_in_q,
    inputs,
    large_channels,
    large_in_q,
    packed,
    randn,
    small_keys,
    stand_in,
    tokens_behind,
    unseen_keys,
)
from fuzz_inputs import Problem
from kernels_on_cpu import BEFORE, WAIT, Kernels, operators

from sageattention import _ops

pytestmark = pytest.mark.slow

KERNELS = [name for name in BEFORE if "int8" in name and "sm90" not in name]
F8 = [name for name in KERNELS if "f8" in name]
TYPES = {64: torch.float16, 128: torch.bfloat16}  # of the kernels that are compiled, by head_dim
LENGTHS = [5, 0, 150, 33], [70, 9, 0, 133]
FIRST, PROBLEMS = 2_000_000, 60  # of the fuzz


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on_cpu")


@pytest.fixture(scope="module")
def ada(folder: Path) -> Kernels:
    return Kernels(folder, "sm_89")


@pytest.fixture
def as_operators(ada: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's operators are these kernels, each time in another order of threads."""
    stand_in(ada, monkeypatch)


def halves(*sizes: int) -> list[torch.Tensor]:
    """`inputs` in float16."""
    return [x.half() for x in inputs(*sizes)]


def masked(mask: torch.Tensor) -> Case:
    """70 queries and 150 keys."""
    return Case(*halves(1, 2, 1, 70, 150, 64, 64), attn_mask=mask)


def additive(dtype: torch.dtype, hides: float) -> torch.Tensor:
    """A number for each score, some of which hides, and all of a row; rows are not next to each other."""
    numbers = randn(1, 1, 70, 333, seed=6).to(dtype)[..., ::2][..., :150]
    hidden = randn(1, 1, 70, 150, seed=7) > 0.5
    hidden[..., 7, :] = True
    return numbers.masked_fill(hidden, hides)


def seen() -> torch.Tensor:
    """One row sees nothing, one tile is hidden, and one seen, as a whole."""
    mask = randn(1, 1, 70, 150, seed=1) > -0.3
    mask[..., :64], mask[..., 64:128] = True, False
    mask[..., 7, :] = False
    return mask


def strided() -> Case:
    """Tokens before heads, in the output too; rows that start anywhere."""
    q, k, v = (torch.randn(2, 90, 3, 71, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    return Case(*(x[..., 3:63].transpose(1, 2) for x in (q, k, v)), out_turned=True)


def not_numbers() -> Case:
    q, k, v = halves(1, 2, 2, 70, 130, 64, 64)
    q[0, 0, 3, 5] = k[0, 1, 7, 9] = v[0, 1, 100, 3] = math.nan
    return Case(q, k, v, smooth_k=False, smooth_v=False)


CASES = {
    "plain": Case(*halves(1, 1, 1, 128, 64, 64, 64), smooth_k=False, smooth_v=False),
    "one key": Case(*halves(1, 1, 1, 3, 1, 64, 64)),
    "grouped heads": Case(*halves(1, 2, 1, 150, 200, 64, 64)),
    "causal": Case(*halves(2, 1, 1, 100, 140, 64, 64), is_causal=True),
    "uneven": Case(*halves(1, 1, 1, 70, 90, 33, 31)),
    "strided": strided(),
    "negative scale": Case(*halves(1, 1, 1, 70, 130, 64, 64), sm_scale=-0.1),
    "infinite scale": Case(*halves(1, 1, 1, 70, 130, 64, 64), sm_scale=math.inf),
    "packed": packed(*LENGTHS, 64, 48, torch.float16),
    "packed, causal": packed(*LENGTHS, 64, 48, torch.float16, is_causal=True),
    "packed, causal, keys that nobody sees": unseen_keys(packed(*LENGTHS, 64, 48, torch.float16, is_causal=True)),
    "packed, no queries at the end": packed([5, 0], [70, 9], 64, 48, torch.float16),
    "packed, tokens behind": tokens_behind(packed(*LENGTHS, 64, 48, torch.float16)),
    "packed, no sequence": tokens_behind(packed([5], [70], 64, 48, torch.float16)),
    "packed, no keys": packed([5, 33], [0, 0], 64, 48, torch.float16),
    "bool mask": masked(seen()),
    # The same for all keys, of which none past the last query is seen.
    "mask of rows, causal": Case(
        *halves(1, 1, 1, 70, 130, 64, 64), attn_mask=(torch.arange(70) % 3 > 0)[:, None], is_causal=True
    ),
    # Of which a sample of all keys has few, and more than are sampled.
    "mask of some keys": Case(*halves(1, 2, 1, 70, 1000, 64, 64), attn_mask=((torch.arange(1000) - 370).abs() < 70)[None]),
    "float16 mask": masked(additive(torch.float16, -65504.0)),
    "bfloat16 mask": masked(additive(torch.bfloat16, -5e5)),
    "float32 mask": masked(additive(torch.float32, -5e5)),
    "NaN": not_numbers(),
    "infinite": infinite_in_q(Case(*halves(1, 2, 2, 70, 130, 64, 64), smooth_k=False)),
    "large V": Case(randn(1, 1, 40, 64).half(), randn(1, 1, 70, 64, seed=1).half(), torch.full((1, 1, 70, 64), 60000.0).half()),
    "128": Case(*(x.bfloat16() for x in inputs(1, 2, 1, 140, 330, 128, 100)), is_causal=True),
    "large channels": large_channels(Case(*halves(2, 6, 2, 40, 200, 64, 64))),
    "large channels, small keys": small_keys(large_channels(Case(*halves(2, 6, 2, 40, 200, 64, 64)))),
    "large channels, a query": large_channels(Case(*halves(1, 8, 1, 1, 200, 64, 64))),
    "large channels, 128": large_channels(Case(*(x.bfloat16() for x in inputs(1, 2, 1, 140, 330, 100, 128)), is_causal=True)),
    "large channels, packed": large_channels(packed(*LENGTHS, 64, 48, torch.float16)),
    "large channels, mask": large_channels(masked(seen())),
    "large in Q": large_in_q(Case(*halves(2, 6, 2, 40, 200, 64, 64))),
    "large in Q, 128": large_in_q(Case(*(x.bfloat16() for x in inputs(1, 2, 1, 140, 330, 100, 128)), is_causal=True)),
    "large in Q, 256": large_in_q(Case(*(x.bfloat16() for x in inputs(1, 2, 1, 40, 100, 256, 200)))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_agree_with_the_reference(kernel: str, name: str, ada: Kernels) -> None:
    CASES[name].check(ada, kernel)


@pytest.mark.parametrize(
    "name", ["grouped heads", "uneven", "packed", "packed, no queries at the end", "bool mask", "float16 mask", "float32 mask"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_behind_the_callers_tensors_is_read(kernel: str, name: str, ada: Kernels) -> None:
    CASES[name].at_the_end_of_memory().check(ada, kernel)


def test_many_packed_sequences(ada: Kernels) -> None:
    """Blocks of threads quantise four spans each."""
    packed(*MANY, 64, 48, torch.float16, kv_heads=4).check(ada, "sm89_qk_int8_pv_f8")
    blocks = {kernel: blocks for kernel, blocks, *_ in ada.launches()}
    assert blocks["quant_k_int8"] == blocks["quant_v_f8"] == 4 * (sum(MANY[1]) // (4 * 128) + len(MANY[1]))


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_nobody_sees_changes_no_bit(kernel: str, form: str, ada: Kernels) -> None:
    check_unseen(ada, kernel, FORMS[form], v_hidden=1e4 if kernel == "sm80_qk_int8_pv_f16" else math.nan)


def test_keys_that_one_tile_of_rows_sees(ada: Kernels) -> None:
    """Of two in each of 20 heads: more than a warp adds up at once, and of a key there is only that one to tell of it."""
    tile = torch.arange(20)[:, None, None] * 2 + torch.arange(130)[:, None] // 128
    Case(*halves(1, 20, 1, 130, 100, 64, 64), attn_mask=torch.arange(100) % 40 == tile).check(ada, KERNELS[0])


@pytest.mark.parametrize("name", ["causal", "packed", "bool mask"])
def test_converted_kernels_agree_with_the_reference(name: str, folder: Path) -> None:
    CASES[name].check(Kernels(folder, "sm_90"), "sm89_qk_int8_pv_f8")


def test_largest_head_dim(ada: Kernels) -> None:
    Case(*(x.bfloat16() for x in inputs(1, 1, 1, 70, 130, 256, 200))).check(ada, "sm89_qk_int8_pv_f8")


def test_largest_sums_of_16_bits(folder: Path) -> None:
    """Of a block whose keys all are 2^8 above those before, just not too much where few are taken at a time; V just fits its scale."""
    q, k = torch.zeros(1, 1, 40, 128), torch.zeros(1, 1, 128, 128)
    q[..., 0], k[:, :, 64:, 0] = 1.0, 8.0 - 2**-6
    v = torch.full((1, 1, 128, 128), 0.2793)
    scale = 1 / math.log2(math.e)
    case = Case(*(x.bfloat16() for x in (q, k, v)), sm_scale=scale, smooth_k=False, smooth_v=False)
    case.check(Kernels(folder, "sm_120"), "sm80_qk_int8_pv_f16_accum_f16")


@pytest.mark.parametrize("kernel", F8)
@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
@pytest.mark.usefixtures("as_operators")
def test_sinks(kernel: str, mass: float) -> None:
    sink = model_inputs.sink(400, mass).to("cpu", torch.bfloat16)
    assert model_inputs.error(kernel, sink, smooth_v=False) <= 0.045
    assert model_inputs.error(kernel, sink, smooth_v=True) <= 0.045


@pytest.mark.parametrize("kernel", F8)
@pytest.mark.parametrize("name", model_inputs.LONE_SINKS)
@pytest.mark.usefixtures("as_operators")
def test_lone_sinks(kernel: str, name: str) -> None:
    model_inputs.check_lone_sinks(kernel, "cpu", name, 640)


@pytest.mark.parametrize("kernel", F8)
@pytest.mark.parametrize("mass", [0.9, 0.99])
@pytest.mark.usefixtures("as_operators")
def test_sinks_in_a_row(kernel: str, mass: float) -> None:
    model_inputs.check_sinks_in_a_row(kernel, "cpu", mass, 640)


@pytest.mark.parametrize("kernel", F8)
@pytest.mark.usefixtures("as_operators")
def test_sinks_of_many_keys(kernel: str) -> None:
    """Between keys that take nearly all of a row lie some that take little: to be seen in whichever lanes they are."""
    sink = model_inputs.sink(2048, 0.99, seats=range(5, 45), queries=32).to("cpu", torch.bfloat16)
    plain, smoothed = (model_inputs.error(kernel, sink, smooth_v=smooth) for smooth in (False, True))
    assert smoothed <= 1.02 * plain


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("as_operators")
def test_huge_values(kernel: str) -> None:
    model_inputs.check_huge(kernel, "cpu", torch.bfloat16, smooth_v=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("smooth_v", [False, True])
@pytest.mark.usefixtures("as_operators")
def test_a_value_that_is_no_number(kernel: str, smooth_v: bool) -> None:
    model_inputs.check_bad_value(kernel, "cpu", smooth_v=smooth_v)


def check_far_apart(kernels: Kernels, kernel: str, *head_dims: int) -> None:
    """Scores whose standard deviation is 3: which rows are taken in two is the reference's to say."""
    for head_dim in head_dims:
        q, k, v = inputs(1, 1, 1, 140, 700, head_dim, head_dim)
        case = Case(*(x.to(TYPES[head_dim]) for x in (q * 3**0.5, k * 3**0.5, v)))
        case.check(kernels, kernel, 3e-3, largest_lse=0.05)


@pytest.mark.parametrize("kernel", F8)
def test_scores_far_apart(kernel: str, ada: Kernels) -> None:
    check_far_apart(ada, kernel, *TYPES)


def test_other_rows_in_two_are_seen(faulty: Kernels) -> None:
    faulty.change("attention/mma_sync/twice.cuh", "in_two = far_apart ? 0 : ", "in_two = ")
    with pytest.raises(AssertionError, match="differs"):
        check_far_apart(faulty, F8[0], *TYPES)


def coarse(unit: float, times: float, head_dim: int) -> Case:
    """Rows whose scores are some hundreds of units of `unit` log2 units or less, in turn with rows whose scores are not coarse. Of the second 64
    keys the first 16 are the least of all, and the others `times` as large as the rest; the last 32 are to the rows that are not coarse
    as an attention sink. V is 1."""
    scale = head_dim**-0.5 * math.log2(math.e)
    size = math.sqrt(unit * 127**2 / scale)
    q, k = torch.full((2, head_dim), size / 127)
    q[0] = k[1] = size  # in different channels, so that scores are small integers
    q[2] = 0.0
    rows = torch.linspace(0.5, 1.0, 64)[:, None] * q
    keys = k.repeat(192, 1)
    keys[64:128] *= times
    keys[64:80] *= -1
    keys[96:128, 2] = size
    dtype = TYPES[head_dim]
    others = rows * (0.01 / size)
    others[:, 2] = 14 / (size * scale)
    q = torch.stack([rows, others], dim=1).flatten(0, 1)
    tensors = (q, keys, torch.ones(192, head_dim))
    return Case(*(x[None, None].to(dtype) for x in tensors), smooth_k=False, smooth_v=False)


def check_weights(kernels: Kernels, kernel: str, *head_dims: int) -> None:
    """What goes into a row's sum is what meets V."""
    for head_dim, unit, times in itertools.product(head_dims, [0.25, 1.0, 8.0, 64.0, 512.0], [1.0, 1.01]):
        out, _ = coarse(unit, times, head_dim).run(kernels, kernel)
        assert (out - 1).abs().max() <= 0.07, f"{unit} {times}: {out.min()} to {out.max()}"


# Where scores are coarse a probability that is computed in haste may be powers of two off.
@pytest.mark.parametrize("kernel", F8)
@pytest.mark.parametrize("head_dim", TYPES)
def test_weights_of_coarse_scores_sum_to_one(kernel: str, head_dim: int, ada: Kernels) -> None:
    check_weights(ada, kernel, head_dim)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["grouped heads", "packed", "bool mask"])
def test_order_of_threads_changes_nothing(kernel: str, name: str, ada: Kernels) -> None:
    CASES[name].check_orders(ada, kernel, 1, 2)


# In the attention kernels' sources: a text, what it becomes, and the error that follows (empty: or another result, or other bits in another
# order of threads).
FAULTS = {
    "barrier": ("attend.cuh", "__syncthreads();  // this stage", "// this stage", ""),
    "tile": ("attend.cuh", "  __syncthreads();\n  if (tile.qo_len == 0)", "  if (tile.qo_len == 0)", ""),
    "wait": ("attend.cuh", "ptx::cp_async_wait<0>();", "ptx::cp_async_wait<1>();", ""),
    "bounds": (
        "load.cuh",
        "return shared + Config::kVScaleOffset",
        "return shared + 64 + Config::kVScaleOffset",
        "access to byte",
    ),
    "alignment": (
        "load.cuh",
        "return shared + Config::kKScaleOffset",
        "return shared + 8 + Config::kKScaleOffset",
        "misaligned",
    ),
}


@pytest.fixture
def faulty(ada: Kernels, tmp_path: Path) -> Kernels:
    """FP8 kernels, whose source the test may change. Those before attention stay as they are."""
    for head_dim, dtype in TYPES.items():
        ada.compile(F8[0], head_dim, dtype, masked=False)
    return ada.copy(tmp_path, F8[0])


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, ada: Kernels, faulty: Kernels) -> None:
    file, text, other, words = FAULTS[name]
    faulty.change(f"attention/mma_sync/{file}", text, other)
    right, found = CASES["grouped heads"].run(ada, F8[0])[0], []
    try:
        found = [CASES["grouped heads"].run(faulty, F8[0], seed=seed)[0] for seed in range(4)]
    except RuntimeError as error:
        message = str(error)
    else:
        message = ""
    assert words in message
    assert message or not all(torch.equal(out, right) for out in found)


@pytest.mark.parametrize(
    ("file", "text", "other"),
    [
        ("twice.cuh", "coarsest<Config>(block) > Config::kCoarsest", "false"),
        ("softmax.cuh", " || !(scale <= Config::kCoarsest)", ""),
    ],
)
def test_haste_with_coarse_scores_is_seen(file: str, text: str, other: str, faulty: Kernels) -> None:
    faulty.change(f"attention/mma_sync/{file}", text, other)
    with pytest.raises(AssertionError, match="to"):
        check_weights(faulty, F8[0], *TYPES)


def test_attention_waits_for_k_though_v_does_not_need_it(folder: Path, tmp_path: Path) -> None:
    """From 9.0 on a kernel may start before the one before it has ended: what waits for V's waits for K's by it."""
    hopper, case = Kernels(folder, "sm_90"), CASES["grouped heads"]
    case.run(hopper, F8[0])
    faulty = hopper.copy(tmp_path, "quant_v_f8")
    faulty.change("quant/quant_v.cuh", WAIT, "")
    with pytest.raises(RuntimeError, match="the one before it has not been waited for"):
        case.run(faulty, F8[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_sequences_that_start_nowhere(kernel: str, folder: Path) -> None:
    check_wrong_starts(Kernels(folder, "sm_90"), kernel, TYPES[64])


def compiled(problem: Problem) -> bool:
    """Whether the kernels for a problem are among those that these tests compile."""
    dtype = torch.bfloat16 if problem.q.dtype == torch.float32 else problem.q.dtype
    largest: int = max(problem.q.shape[-1], problem.v.shape[-1])
    return largest <= 128 and TYPES[64 if largest <= 64 else 128] == dtype


@pytest.mark.parametrize("kind", ["any", "huge", "by the stable ABI"])
def test_random_calls(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(Kernels(folder, "sm_89", stable_abi=kind == "by the stable ABI"), monkeypatch)
    monkeypatch.setattr(fuzz, "kernels", lambda device, problem: KERNELS)
    if kind == "huge":
        monkeypatch.setattr(fuzz_inputs, "Q_KINDS", {"randn": 1, "huge": 1})
        monkeypatch.setattr(fuzz_inputs, "K_KINDS", {"randn": 1, "huge": 2, "loud token": 1})
    calls = check_random_calls(FIRST, PROBLEMS, lambda call, problem: call.kernel in KERNELS and compiled(problem))
    assert calls >= PROBLEMS / 3


def test_what_32_bits_cannot_count_is_refused(folder: Path) -> None:
    """Of tensors that repeat few numbers. Where a limit is met nothing is refused: the kernel is looked for, and there is none."""
    (folder / "none" / "sm_80").mkdir(parents=True)
    operators_of_cpu = operators(stable_abi=False).choose(folder / "none", "sm_80", 0)
    options = _ops.number_of("sm80_qk_int8_pv_f16", True, False, True, False, False)

    def refused(heads: int, keys: int, mask_heads: int | None = None) -> str:
        q, k = (torch.zeros(1, 1, 1, 8).half().expand(1, heads, tokens, 8) for heads, tokens in ((heads, 1), (1, keys)))
        mask = None if mask_heads is None else torch.zeros(1, mask_heads, 1, 1).half()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            operators_of_cpu.attention(q, k, k, mask, 1.0, options)
        return str(caught.value).splitlines()[0]

    most, tiles = (2**31 - 1) // 16, 2**31 // (2**20 // 64)
    assert f"expected at most {most} heads for each of k, got {most + 1} for 1" in refused(most + 1, 8)
    assert f"attn_mask: too large: {2**31} tiles of 128 queries x 64 keys" in refused(tiles, 2**20, tiles)
    assert "quant_k_int8" in refused(tiles, 2**20)
