"""What the kernels should reach on cards that are not at hand, from their machine code: the tables of docs/kernels.md.

    python bench/predict.py [--cubins FOLDER ...] [--write]
    python bench/predict.py --original FOLDER       beside SageAttention's own kernels, from cubins built elsewhere
    python bench/predict.py --sageattn3 FOLDER [--original FOLDER]      the table of docs/sageattn3.md, from that package's kernels

The kernels are the installed package's, as `python3 scripts/run.py predict` installs it. FOLDER has a folder for each architecture, as
build/kernels-cu128/cubins has after `python3 scripts/run.py kernels`: then nothing need be installed. Of the kernels for the
H200, the card at hand, some are not installed: `python3 scripts/run.py kernels --proof --architecture 9.0` compiles them. Needs nvdisasm.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from cards.cubin import CubinError
from cards.gpus import BY_NAME
from cards.tables import SHORT, fp4_table, generated, kernels_of, original_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"
# Where `kernels --proof` leaves the kernels that users of a GPU are not given.
PROOF = ROOT / "build" / "kernels-cu128-proof" / "cubins"
# What stands between them in the page is written by --write.
BETWEEN = re.compile(r"(?<=<!-- bench/predict.py: from here -->\n).*?(?=<!-- bench/predict.py: to here -->)", re.DOTALL)


def installed_cubins() -> Path:
    """The installed package's kernels."""
    from sageattention import _library

    return _library.kernel_set(_library.KERNEL_DIRECTORIES)


def main() -> int:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cubins", type=Path, action="append", help="the kernels (default: the installed package's, and those of --proof)"
    )
    parser.add_argument("--original", type=Path, help="cubins of SageAttention's own, as bench/cards/original.py names them")
    parser.add_argument("--sageattn3", type=Path, help="sageattn3's kernels: the table of docs/sageattn3.md")
    parser.add_argument("--write", action="store_true", help=f"write into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    cubins = [arguments.sageattn3] if arguments.sageattn3 else arguments.cubins or [installed_cubins(), PROOF]
    if not any(cubins[0].glob("sm_*/*.cubin")):
        print(f"error: no cubins in {cubins[0]}", file=sys.stderr)
        return 1
    try:
        if arguments.sageattn3:
            print(fp4_table(arguments.sageattn3, arguments.original))
            return 0
        if arguments.original:
            print(original_table(cubins, arguments.original))
            return 0
        text = generated(cubins)
    except (CubinError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not arguments.write:
        print(text)
        return 0
    if len(list(kernels_of(cubins, BY_NAME["H200"], 128))) < len(SHORT):
        print(
            "error: the H200's kernels are not all here: run `python3 scripts/run.py kernels --proof --architecture 9.0`",
            file=sys.stderr,
        )
        return 1
    page = PAGE.read_text(encoding="utf-8")
    written, count = BETWEEN.subn(lambda _: f"\n{text}\n", page)
    if count != 1:
        print(f"error: {PAGE} has {count} places between the markers, not one", file=sys.stderr)
        return 1
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
