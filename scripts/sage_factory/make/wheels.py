"""Pack a wheel from two conda packages: no compiler, no unpacking, the same inputs give the same bytes.

`wheel.py OPERATORS.conda CUBINS.conda --python 3.12 --out dist/wheels`
"""

from __future__ import annotations

import argparse
import base64
import csv
import email.policy
import hashlib
import io
import json
import sys
import tempfile
import zipfile
from email.message import EmailMessage
from email.parser import BytesParser
from pathlib import Path

from sage_factory import ROOT
from sage_factory.make import archives
from sage_factory.what import matrix

# The oldest time a zip can state: entries then differ by content alone.
EPOCH = (1980, 1, 1, 0, 0, 0)
LEVEL = 6  # 9 takes seven times as long for 2% less


class WheelError(Exception):
    """The packages do not make the wheel that was asked for; the message says why."""


def emit(sageattention_conda: Path, cubins_conda: Path, *, python: str, build: matrix.Build, out_dir: Path) -> Path:
    """Write the wheel of `build` for `python` into `out_dir`, whole or not at all, and return its path."""
    files = payload(sageattention_conda, cubins_conda)
    _check(files, sageattention_conda, cubins_conda, build)
    tag = "cp" + python.replace(".", "")
    tags = f"{tag}-{tag}-{build.wheel_platform}"
    info = f"{build.package}-{build.version}.dist-info"
    described = {name: files.pop(name) for name in list(files) if name.startswith(info + "/")}
    licenses = {name: data for name, data in described.items() if name.startswith(f"{info}/licenses/")}
    files |= licenses
    files[f"{info}/METADATA"] = _metadata(described.get(f"{info}/METADATA"), python, build, sorted(licenses))
    files[f"{info}/WHEEL"] = _wheel(tags, build)
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    out_dir.mkdir(parents=True, exist_ok=True)
    target = out_dir / f"{build.package}-{build.version}-{build.build_tag}-{tags}.whl"
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(_zipped(files, last=f"{info}/"))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def payload(sageattention_conda: Path, cubins_conda: Path) -> dict[str, bytes]:
    """The files of both packages where a wheel has them."""
    files: dict[str, bytes] = {}
    for name, data in archives.read_conda(sageattention_conda).payload.items():
        _, found, inside = name.partition(archives.SITE_PACKAGES)
        # Compiled Python is the installer's business, and INSTALLER and RECORD are those of another installation.
        if found and "__pycache__" not in inside:
            files[inside] = data
    for name, data in archives.read_conda(cubins_conda).payload.items():
        if name.startswith(archives.CUBINS):
            files[f"{archives.PACKAGE}cubins/{name.removeprefix(archives.CUBINS)}"] = data
    return files


def _check(files: dict[str, bytes], operators: Path, cubins: Path, build: matrix.Build) -> None:
    for name, source in (
        (f"{archives.PACKAGE}_build.json", operators),
        (f"{archives.PACKAGE}cubins/manifest.json", cubins),
    ):
        if name not in files:
            raise WheelError(f"{source.name} does not hold {Path(name).name}: is it the right package?")
    made = json.loads(files[f"{archives.PACKAGE}_build.json"])
    wanted = {"version": build.version, "torch": build.torch, "cuda": build.cuda}
    if {key: made.get(key) for key in wanted} != wanted:
        raise WheelError(f"{operators.name} was built for {made}, but a wheel for {wanted} was asked for")
    cuda = json.loads(files[f"{archives.PACKAGE}cubins/manifest.json"]).get("cuda")
    if cuda != build.cuda:
        raise WheelError(f"{cubins.name} holds kernels of CUDA {cuda}, but a wheel for CUDA {build.cuda} was asked for")


def _metadata(described: bytes | None, python: str, build: matrix.Build, licenses: list[str]) -> bytes:
    """What pip reads: the project's own description with this build's requirements in it."""
    old = BytesParser(policy=email.policy.compat32).parsebytes(described or b"")
    lines = [("Metadata-Version", "2.4"), ("Name", build.package), ("Version", build.version)]
    lines += [(key, str(value)) for key, value in old.items() if key.title() in KEPT]
    lines += [("License-File", name.partition("/licenses/")[2]) for name in licenses]
    # pip takes the highest build tag whatever PyTorch is there: only the pin keeps a wrong one out.
    lines += [("Requires-Python", f"=={python}.*"), ("Requires-Dist", f"torch=={build.torch_series}.*")]
    body = old.get_payload(decode=True)
    text = body.decode("utf-8") if isinstance(body, bytes) else ""
    return ("".join(f"{key}: {value}\n" for key, value in lines) + "\n" + text).encode()


KEPT = {"Summary", "Author", "Author-Email", "License-Expression", "Keywords", "Classifier", "Project-Url",
        "Description-Content-Type"}  # fmt: skip


def _wheel(tags: str, build: matrix.Build) -> bytes:
    message = EmailMessage(policy=email.policy.compat32.clone(linesep="\n"))
    message["Wheel-Version"] = "1.0"
    message["Generator"] = "sageattention scripts/wheel.py"
    message["Root-Is-Purelib"] = "false"
    message["Tag"] = tags
    message["Build"] = build.build_tag
    return message.as_bytes()


def _record(files: dict[str, bytes], own: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(files[name])])
    writer.writerow([own, "", ""])
    return text.getvalue().encode()


def _zipped(files: dict[str, bytes], last: str) -> bytes:
    """A zip of sorted entries, the metadata at the end as the wheel specification recommends."""
    answer = io.BytesIO()
    with zipfile.ZipFile(answer, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for name in sorted(files, key=lambda name: (name.startswith(last), name)):
            member = zipfile.ZipInfo(name, EPOCH)
            member.create_system = 3  # the modes below are Unix's, on Windows too
            member.external_attr = (0o100755 if name.endswith((".so", ".dll")) else 0o100644) << 16
            archive.writestr(member, files[name], zipfile.ZIP_DEFLATED, LEVEL)
    return answer.getvalue()


def find_build(operators: Path, python: str) -> matrix.Build:
    """The build of variants.yaml that a package was made as."""
    conda = archives.read_conda(operators)
    made = next((json.loads(data) for name, data in conda.payload.items() if name.endswith("/_build.json")), None)
    if made is None:
        raise WheelError(f"{operators.name} does not hold _build.json: the operators' package comes first, then the kernels'")
    platform = json.loads(conda.info["info/index.json"])["subdir"]
    return matrix.builds(platform=platform, cuda=made["cuda"], torch=made["torch"], python=python)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", type=Path, help="conda package `sageattention`")
    parser.add_argument("cubins", type=Path, help="conda package `sageattention-cubins` of the same CUDA version")
    parser.add_argument("--python", nargs="+", required=True, help="Pythons to pack wheels for, such as 3.12")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "wheels", help="default: dist/wheels")
    args = parser.parse_args()
    try:
        # Everything is packed before anything is placed.
        builds = [find_build(args.operators, python) for python in args.python]
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.out, prefix=".wheels-") as scratch:
            made = [emit(args.operators, args.cubins, python=b.python, build=b, out_dir=Path(scratch)) for b in builds]
            for path in made:
                print(path.replace(args.out / path.name))
    except (WheelError, archives.ArtifactError, matrix.MatrixError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
