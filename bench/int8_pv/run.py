"""The inner loop of Hopper's attention with P V in bfloat16 and in 8-bit integers (loops.cu): speed, clock, power, error.

    python bench/int8_pv/run.py [--output FILE.json] [--cubin loops.cubin] [--only integers,bf16]

cuDNN's attention in bfloat16 is measured beside them. Quantisation is not timed: the host lays inputs out as shared memory has
them. The loops take turns, each long enough to reach the clock that the card's power limit leaves it. `--compile` makes the
cubin and does nothing else, `--check` computes a small problem with each loop and times nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
D = 128
STAGE_KEYS = 128
MOST_SHARED = 232448
LOG2_E = 1.4426950408889634


class Loop(NamedTuple):
    """A kernel of loops.cu, as its struct there says."""

    integers: bool
    tile_keys: int


LOOPS = {
    "bf16": Loop(integers=False, tile_keys=64),
    "bf16_wait_late": Loop(integers=False, tile_keys=64),
    "integers": Loop(integers=True, tile_keys=128),
    "integers_pack_first": Loop(integers=True, tile_keys=128),
    "integers_wait_early": Loop(integers=True, tile_keys=128),
    "integers_halves": Loop(integers=True, tile_keys=128),
    "integers_three": Loop(integers=True, tile_keys=64),
}


def compile_loops(target: Path, nvcc: str) -> None:
    """Make the cubin."""
    options = ["-cubin", "-arch=sm_90a", "-std=c++17", f"-I{CSRC}", "-DSAGE_HEAD_DIM=128", "-DSAGE_DTYPE=__nv_bfloat16"]
    subprocess.run([nvcc, *options, "-Xptxas", "-v", "-o", str(target), str(HERE / "loops.cu")], check=True)


# Layouts.


def key_at(position: torch.Tensor) -> torch.Tensor:
    """The key whose V lies at a position along K of the integers' product, so that a lane's scores are its part of the fragment of A."""
    lane, byte = position % 16 // 4, position % 4
    return position // 16 * 16 + byte // 2 * 8 + lane * 2 + byte % 2


def check_key_order() -> None:
    """Scores, as accumulators have them, packed four to a register as they come, are a fragment of A whose k-th column is key_at(k)."""
    for lane in range(4):  # of a row
        own = [8 * i + 2 * lane + j for i in range(4) for j in range(2)]  # the row's accumulators of 32 columns, in order
        registers = [own[:4], own[4:]]
        for half in range(2):
            for byte in range(4):
                k = 16 * half + 4 * lane + byte
                assert registers[half][byte] == int(key_at(torch.tensor(k)))


def swizzle(rows: torch.Tensor) -> torch.Tensor:
    """[…, row, 128 bytes], 16-byte chunks exchanged as the copy engine does it."""
    *outer, count, width = rows.shape
    chunk = torch.arange(8, device=rows.device)[None, :] ^ (torch.arange(count, device=rows.device) % 8)[:, None]
    chunks = rows.view(*outer, count, 8, width // 8)
    return chunks.gather(-2, chunk[:, :, None].expand(chunks.shape)).view(rows.shape)


class Inputs:
    """Q, K, V of heads, and what becomes of them for the loops."""

    def __init__(self, heads: int, tokens: int, device: str) -> None:
        self.heads, self.tokens, self.device = heads, tokens, device
        generator = torch.Generator(device=device).manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn(heads, tokens, D, device=device, generator=generator).to(torch.bfloat16) for _ in range(3)
        )
        unit = LOG2_E / math.sqrt(D)
        step = self.q.float().abs().amax(-1, keepdim=True) / 127
        self.q_int8 = (self.q.float() / step).round().to(torch.int8)
        self.q_step = step
        self.q_scale = (step[..., 0] * unit).contiguous()
        self.q_bound = (self.q_scale * self.q_int8.float().norm(dim=-1)).contiguous()
        # Of 64 keys those that a lane has: a scale for each 16.
        blocks = self.k.float().view(heads, tokens // 64, 8, 4, 2, D)
        step = blocks.abs().amax(dim=(2, 4, 5), keepdim=True) / 127
        k_int8 = (blocks / step).round()
        self.k_step = step.expand(*blocks.shape[:-1], 1).reshape(heads, tokens, 1)
        bound = (k_int8.norm(dim=-1) * step[..., 0]).amax(dim=(2, 4))
        self.scales = torch.stack([step.flatten(2), bound.flatten(2)], dim=2)  # [head, block, scale | bound, 4]
        self.k_int8 = k_int8.view(heads, tokens, D).to(torch.int8)
        self.v_scale = (self.v.float().abs().amax(1) / 127).contiguous()
        self.v_int8 = (self.v.float() / self.v_scale[:, None]).round().to(torch.int8)

    def records(self, loop: Loop) -> torch.Tensor:
        """What each stage has: K, as many keys behind V, scales."""
        stages = self.tokens // STAGE_KEYS + 1

        def padded(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
            return torch.nn.functional.pad(x, (0, 0, before, after)).contiguous()

        behind = loop.tile_keys, STAGE_KEYS - loop.tile_keys
        k = swizzle(padded(self.k_int8, 0, STAGE_KEYS).view(self.heads, stages, STAGE_KEYS, D)).view(torch.uint8).flatten(2)
        if loop.integers:
            v = padded(self.v_int8, *behind).view(self.heads, stages, STAGE_KEYS, D)
            v = (v.view(torch.uint8) ^ 0x80)[:, :, key_at(torch.arange(STAGE_KEYS, device=v.device))]  # 128 more
            v = swizzle(v.transpose(2, 3).contiguous()).flatten(2)
        else:
            # Panels of 64 channels for each 64 keys.
            v = padded(self.v.view(torch.int16), *behind).view(self.heads, stages, 2, 64, 2, 64).transpose(3, 4).contiguous()
            v = swizzle(v.view(torch.uint8).view(self.heads, stages, 2, 2, 64, 128)).flatten(2)
        scales = torch.nn.functional.pad(self.scales.flatten(2), (0, 0, 0, 2)).contiguous().view(self.heads, stages, -1)
        return torch.cat([k, v, scales.view(torch.uint8)], dim=2)

    def exact(self, head: int, rows: torch.Tensor, dequantised: Loop | None) -> torch.Tensor:
        """Attention in float64; of the inputs as they were, or as a loop is given them."""
        if dequantised is None:
            q, k, v = (x[head].double() for x in (self.q, self.k, self.v))
        else:
            q = self.q_int8[head].double() * self.q_step[head].double()
            k = self.k_int8[head].double() * self.k_step[head].double()
            v = self.v_int8[head].double() * self.v_scale[head].double() if dequantised.integers else self.v[head].double()
        return torch.softmax(q[rows] @ k.T / math.sqrt(D), dim=-1) @ v


# The driver's API.


class Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "q_scale", "q_bound", "stages", "v_scale", "out")),
        *((name, ctypes.c_int32) for name in ("tokens", "tiles_of_head", "tiles")),
    ]


def params_of(inputs: Inputs, records: torch.Tensor, out: torch.Tensor, consumers: int) -> Params:
    tiles = -(-inputs.tokens // (2 * 64 * consumers))
    tensors = (inputs.q_int8, inputs.q_scale, inputs.q_bound, records, inputs.v_scale, out)
    return Params(*(x.data_ptr() for x in tensors), inputs.tokens, tiles, tiles * inputs.heads)


class Library:
    """Kernels of a cubin."""

    def __init__(self, cubin: Path) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        torch.empty(1, device="cuda")  # makes the context
        self.module = ctypes.c_void_p()
        self.check(self.driver.cuModuleLoadData(ctypes.byref(self.module), cubin.read_bytes()))
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count // 2 * 2

    def check(self, result: int) -> None:
        if result:
            words = ctypes.c_char_p()
            self.driver.cuGetErrorString(result, ctypes.byref(words))
            raise RuntimeError(f"CUDA driver: {(words.value or b'?').decode()}")

    def call(self, name: str, inputs: Inputs) -> tuple[Callable[[], None], torch.Tensor]:
        """A launch of the kernel, and where it puts its output."""
        function = ctypes.c_void_p()
        self.check(self.driver.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()))
        self.check(self.driver.cuFuncSetAttribute(function, 8, MOST_SHARED))
        threads = ctypes.c_int()
        self.check(self.driver.cuFuncGetAttribute(ctypes.byref(threads), 0, function))
        records = inputs.records(LOOPS[name])
        out = torch.full((inputs.heads, inputs.tokens, D), math.nan, device="cuda", dtype=torch.bfloat16)
        params = params_of(inputs, records, out, threads.value // 128 - 1)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

        def launch(_kept: Any = (params, records)) -> None:
            self.check(
                self.driver.cuLaunchKernel(function, self.blocks, 1, 1, threads, 1, 1, MOST_SHARED, stream, arguments, None)
            )

        return launch, out


def errors(inputs: Inputs, loop: Loop | None, out: torch.Tensor, heads: list[int]) -> dict[str, float]:
    """Relative L1 error of some rows, against the inputs as they were and as the loop is given them."""
    rows = torch.linspace(0, inputs.tokens - 1, min(512, inputs.tokens), device=inputs.device).long()
    found = {}
    for name, of in (("inputs", None), ("dequantised", loop)):
        expected = torch.stack([inputs.exact(head, rows, of) for head in heads])
        difference = out[heads][:, rows].double() - expected
        found[name] = float(difference.abs().sum() / expected.abs().sum())
    return found


# Measuring.


class Load:
    """Clock and power of the card, read all the while; power is what its counter of energy says, where it has one."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        if self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)):
            raise RuntimeError("NVML does not start")
        self.samples: list[tuple[float, int, float, int]] = []  # seconds, MHz, W, mJ since the driver was loaded
        self.stopped = threading.Event()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        clock, power, energy = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        while not self.stopped.wait(0.02):
            self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(clock))  # of multiprocessors
            self.nvml.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(power))
            self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(energy))
            self.samples.append((time.monotonic(), clock.value, power.value / 1e3, energy.value))

    def between(self, start: float, end: float) -> dict[str, float]:
        seen = [s for s in self.samples if start <= s[0] <= end]
        if len(seen) < 2:
            return {"mhz": math.nan, "watts": math.nan, "watts_shown": math.nan, "samples": len(seen)}
        shown = statistics.mean(s[2] for s in seen)
        # The counter moves in steps: from its first to its last.
        steps = [b for a, b in itertools.pairwise(seen) if b[3] != a[3]]
        counted = (steps[-1][3] - steps[0][3]) / 1e3 / (steps[-1][0] - steps[0][0]) if len(steps) > 1 else shown
        return {"mhz": statistics.mean(s[1] for s in seen), "watts": counted, "watts_shown": shown, "samples": len(seen)}

    def stop(self) -> None:
        self.stopped.set()


def timed(call: Callable[[], Any], seconds: float, load: Load) -> dict[str, float]:
    """Milliseconds of a call, after a third of the time has warmed the card; clock and power of the rest."""

    def repeat(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    once = repeat(2)
    repeat(max(1, int(seconds / 3 * 1000 / once)))
    since = time.monotonic()
    ms = repeat(max(1, int(seconds * 2 / 3 * 1000 / once)))
    return {"ms": ms, **load.between(since + 0.1, time.monotonic())}


def measure(library: Library, names: list[str], heads: int, tokens: int, rounds: int, seconds: float) -> dict[str, Any]:
    inputs = Inputs(heads, tokens, "cuda")
    q, k, v = (x[None] for x in (inputs.q, inputs.k, inputs.v))
    calls: dict[str, Callable[[], Any]] = {}
    result: dict[str, Any] = {"heads": heads, "tokens": tokens, "error": {}, "rounds": []}

    def cudnn() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    some = [0, heads - 1]
    calls["cudnn"] = cudnn
    result["error"]["cudnn"] = errors(inputs, None, cudnn()[0], some)
    for name in names:
        launch, out = library.call(name, inputs)
        launch()
        torch.cuda.synchronize()
        result["error"][name] = errors(inputs, LOOPS[name], out, some)
        if result["error"][name]["inputs"] < 0.03:  # else wrong, and no number
            calls[name] = launch
    load = Load()
    for _ in range(rounds):
        result["rounds"].append({name: timed(call, seconds, load) for name, call in calls.items()})
    load.stop()
    operations = 4 * heads * tokens**2 * D
    result["summary"] = {}
    for name in calls:
        of = {key: statistics.median(r[name][key] for r in result["rounds"]) for key in ("ms", "mhz", "watts")}
        result["summary"][name] = {
            **of,
            "tflops": operations / of["ms"] / 1e9,
            "joules": of["watts"] * of["ms"] / 1e3,
            # Clocks of a multiprocessor for 64 rows and 128 keys.
            "clocks_of_tile": of["ms"] * of["mhz"] * 1e3 * library.blocks / (heads * tokens**2 / (64 * 128)),
            "of_cudnn": statistics.median(r["cudnn"]["ms"] / r[name]["ms"] for r in result["rounds"]),
            "of_bf16": statistics.median(r["bf16"]["ms"] / r[name]["ms"] for r in result["rounds"])
            if "bf16" in calls
            else math.nan,
        }
    return result


def table(result: dict[str, Any]) -> str:
    columns = "TFLOPS / cuDNN / bf16   MHz    W mJ a call clocks of 64 x 128   error of inputs, of dequantised"
    lines = [f"{result['heads']} heads, N={result['tokens']}".ljust(22) + columns]
    for name, error in result["error"].items():
        x = result["summary"].get(name)
        speed = "wrong: not timed".rjust(56)
        if x:
            speed = f"{x['tflops']:6.0f} {x['of_cudnn']:7.3f} {x['of_bf16']:6.3f} {x['mhz']:5.0f} {x['watts']:4.0f}"
            speed += f" {x['joules'] * 1e3:9.1f} {x['clocks_of_tile']:16.0f}"
        lines.append(f"  {name:20}{speed}   {error['inputs']:.4f} {error['dequantised']:.4f}")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    card = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"gpu, driver, power limit": card, **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cubin", type=Path, default=HERE / "loops.cubin", help="made if it is not there")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default=",".join(LOOPS))
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each loop in each round")
    parser.add_argument("--limit", type=int, default=150, help="seconds until the program ends itself, whatever hangs")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    check_key_order()
    if arguments.compile or not arguments.cubin.is_file():
        compile_loops(arguments.cubin, arguments.nvcc)
        if arguments.compile:
            return
    signal.alarm(arguments.limit)
    torch.backends.cuda.matmul.allow_tf32 = False
    names = arguments.only.split(",")
    library = Library(arguments.cubin)
    # A small problem first, whose last tile is not full: each loop for itself, for if one hangs.
    inputs = Inputs(5, 640, "cuda")
    for name in names:
        print(f"{name}: ", end="", flush=True)
        launch, out = library.call(name, inputs)
        launch()
        torch.cuda.synchronize()
        print(errors(inputs, LOOPS[name], out, list(range(5))), flush=True)
    if arguments.check:
        return
    where = environment()
    print(where, flush=True)
    results = []
    for tokens in arguments.tokens.split(","):
        results.append(measure(library, names, arguments.heads, int(tokens), arguments.rounds, arguments.seconds))
        print(table(results[-1]), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
