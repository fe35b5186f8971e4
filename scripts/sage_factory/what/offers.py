"""What a release of a package offers pip and uv: for each PyTorch × CUDA of a profile its version and where that is found, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from packaging.version import Version

from sage_factory.what import matrix
from sage_factory.what.build import Build, cuda_tag, release_order

START, END = "<!-- offers: `lock` writes what stands up to the next comment -->", "<!-- end of offers -->"
TITLES = ("PyTorch", "CUDA", "Python", "platforms", "version", "indexes")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]


def rows(builds: Iterable[Build]) -> list[list[Build]]:
    """Builds by PyTorch × CUDA, in order of version."""
    found: dict[tuple[Version, Version], list[Build]] = {}
    for build in builds:
        found.setdefault((release_order(build.torch), Version(build.cuda)), []).append(build)
    return [found[key] for key in sorted(found)]


def row(builds: Sequence[Build]) -> list[str]:
    """One of them."""
    one = builds[0]
    pythons = sorted({build.python for build in builds}, key=Version)
    platforms = dict.fromkeys(build.platform for build in builds)
    where = f"`{one.index_major}`, `{one.index_folder}`"
    later = " and later" if one.stable_abi else ""
    return [
        one.torch_series + later,
        one.cuda,
        ", ".join(pythons) + later,
        ", ".join(platforms),
        f"`{one.index_version}`",
        where,
    ]


def commands(builds: Iterable[Build], address: str) -> list[str]:
    """How each is installed: the lines of a shell."""
    groups = rows(builds)
    majors = dict.fromkeys(group[0].index_major for group in groups)
    newest = groups[-1][0]
    lines = [f"pip install --upgrade {newest.package} --index-url {address}/{major}/" for major in majors]
    width = max(map(len, lines))
    said = [
        f"{line:<{width}}  # PyTorch for CUDA {major.removeprefix('cu')}" for line, major in zip(lines, majors, strict=True)
    ]
    exact = f"pip install {newest.package}=={newest.index_version} --index-url {address}/{newest.index_major}/"
    return [*said, f"{exact}  # this one, whatever was there"]


def abi(builds: Sequence[Build], *, cxx11_abi: bool = True) -> str:
    """Where to take a PyTorch from whose wheels on PyPI have another C++ ABI than those of its own index. Empty where any will do."""
    linux = next((build for build in builds if not matrix.load().platforms[build.platform].windows), None)
    if linux is None or not matrix.load().pytorch[linux.torch].old_abi_on_pypi:
        return ""
    series, tag = linux.torch_series, cuda_tag(linux.cuda)
    if cxx11_abi:
        own = f"`uv pip install 'torch=={series}.*' --torch-backend {tag}`"
        said = (
            f"of conda-forge or of its own index for CUDA {linux.cuda} ({own}), not beside PyPI's, which has an older C++ ABI"
        )
    else:
        said = "of PyPI alone, since all others have a newer C++ ABI"
    return f"On Linux the wheels for PyTorch {series} load beside that {said}."


def with_offers(text: str, builds: Sequence[Build]) -> str:
    """A document with its list of what a release of these builds offers as it should be."""
    groups = rows(builds)
    shown = ["", *table(TITLES, [row(group) for group in groups]), "", "```sh", *commands(builds, "PAGES"), "```", ""]
    for said in filter(None, map(abi, groups)):
        shown += [said, ""]
    return re.sub(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: "\n".join([START, *shown, END]), text, flags=re.S)
