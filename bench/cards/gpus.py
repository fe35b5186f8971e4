"""What is known of each card. None of it was measured here but where the H200's row says so, and none of the vendor's documents was
opened: `source` says which figures were seen in tables that third parties publish, and which are from memory alone.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cards.units import Rates

# From memory of the CUDA programming guide (throughput of native arithmetic instructions), by compute capability.
AMPERE_100 = Rates(float32=64, half=128, narrow=32)  # 8.0
AMPERE = ADA = BLACKWELL = Rates(float32=128, half=64, narrow=32)  # 8.6, 8.9, 12.0: of half pairs 128 results
HOPPER = Rates(float32=128, half=128, narrow=32)  # 9.0


class Card(NamedTuple):
    """A GPU. Multiply-adds of the tensor cores are the published dense TFLOPS / 2 / multiprocessors / boost clock: they come out whole."""

    name: str
    device: str  # as the driver names it: a pattern
    architecture: str
    multiprocessors: int
    ghz: float  # boost clock
    int8: int  # multiply-adds a clock and multiprocessor
    f16_f32: int  # of 16-bit numbers, with float32 sums
    f16_f16: int  # with FP16 sums
    e4m3_f32: int
    e4m3_f16: int
    rates: Rates
    gb_s: int  # of memory
    source: str
    mma_sync_share: float = 1.0  # of the tensor cores' rate
    e2m1: int = 0  # with a scale for each 16; remembered: twice INT8's, 1676 and 2000 TFLOPS (dense)
    wgmma_ghz: float = 0.0  # sustained with wgmma, where power sets it; 0: as `ghz`

    @property
    def tensor(self) -> dict[tuple[str, str], float]:
        return {
            ("int8", "int32"): self.int8, ("f16", "f32"): self.f16_f32, ("f16", "f16"): self.f16_f16,
            ("e4m3", "f32"): self.e4m3_f32, ("e4m3", "f16"): self.e4m3_f16,
            ("e2m1", "f32"): self.e2m1,
        }  # fmt: skip


_GA102 = "seen: clocks, memory, 71.2 and 142 FP16 TFLOPS (sums not said); remembered: 284.6 INT8, whose sums"
_ADA = "seen: 660.6 INT8, 165.2 / 330.3 FP16, 330.3 / 660.6 FP8"
_RTX_BLACKWELL = "seen: 838 INT8, 209.5 FP16; remembered: 419 FP16, 419 / 838 FP8 (the RTX 4090's ratios)"

CARDS = (
    Card("A100", r"NVIDIA A100-.*40GB.*", "sm_80", 108, 1.410, 2048, 1024, 1024, 0, 0, AMPERE_100, 1555,
         "seen: 624 INT8, 312 FP16 whatever the sums; remembered: 108 multiprocessors, the 40 GB card's 1555 GB/s"),
    Card("RTX 3090", "NVIDIA GeForce RTX 3090", "sm_86", 82, 1.695, 1024, 256, 512, 0, 0, AMPERE, 936, _GA102),
    Card("RTX 4090", "NVIDIA GeForce RTX 4090", "sm_89", 128, 2.520, 1024, 256, 512, 512, 1024, ADA, 1008, _ADA),
    Card("L4", "NVIDIA L4", "sm_89", 58, 2.040, 1024, 512, 512, 1024, 1024, ADA, 300,
         "seen: 242 INT8 and FP8, 121 FP16 whatever the sums; remembered: 58 multiprocessors; its 72 W hold a lower clock than this"),
    Card("L40S", "NVIDIA L40S", "sm_89", 142, 2.520, 1024, 512, 512, 1024, 1024, ADA, 864,
         "seen: 733 INT8 and FP8, 366 FP16 whatever the sums"),
    Card("RTX 5090", "NVIDIA GeForce RTX 5090", "sm_120", 170, 2.407, 1024, 256, 512, 512, 1024, BLACKWELL, 1792, _RTX_BLACKWELL,
         e2m1=2048),
    Card("RTX PRO 6000", r"NVIDIA RTX PRO 6000 Blackwell (Workstation|Server) Edition", "sm_120", 188, 2.617, 1024, 512, 512, 1024, 1024,
         BLACKWELL, 1792, "seen: 1010 INT8 and FP8, 504 FP16, whatever the sums (of the RTX PRO 5000 half with float32 sums)",
         e2m1=2048),
    Card("H200", r"NVIDIA H200", "sm_90a", 132, 1.980, 4096, 2048, 2048, 0, 0, HOPPER, 4300,
         "remembered: the H100's rates; measured (bench/notes.md): mma.sync's share, memory, the clock that wgmma leaves",
         mma_sync_share=0.652, wgmma_ghz=1.69),
)  # fmt: skip
BY_NAME = {card.name: card for card in CARDS}


def card_of(device: str) -> Card | None:
    """The card that the driver names so; None: not among them, as a laptop's is not."""
    return next((card for card in CARDS if re.fullmatch(card.device, device)), None)
