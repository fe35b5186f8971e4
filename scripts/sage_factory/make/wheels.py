"""Pack a wheel from two conda packages: no compiler, no unpacking, the same inputs give the same bytes."""

from __future__ import annotations

import base64
import csv
import email.policy
import hashlib
import io
import json
from email.message import EmailMessage
from email.parser import BytesParser
from pathlib import Path

from sage_factory import FactoryError
from sage_factory.files import put
from sage_factory.make import archives, sbom
from sage_factory.what import matrix
from sage_factory.what.build import Build

# The oldest time a zip can state: entries then differ by content alone.
EPOCH = (1980, 1, 1, 0, 0, 0)
INDEX = "Index"  # what METADATA calls the address of pip's indexes
LEVEL = 6  # 9 takes seven times as long for 2% less


class WheelError(FactoryError):
    """The packages do not make the wheel that was asked for; the message says why."""


def emit(operators: Path, cubins: Path, *, build: Build, out_dir: Path) -> Path:
    """Write the wheel of `build` into `out_dir`, whole or not at all, and return its path."""
    content = payload(operators, cubins)
    check(content, operators, cubins, build)
    # The conda package's version is without PyTorch and CUDA, which its build string says.
    old, info = f"{build.package}-{build.version}.dist-info/", build.dist_info
    described = {f"{info}/{name.removeprefix(old)}": content.pop(name) for name in list(content) if name.startswith(old)}
    licenses = {name: data for name, data in described.items() if name.startswith(f"{info}/licenses/")}
    content |= licenses
    content[f"{info}/METADATA"] = _metadata(described.get(f"{info}/METADATA"), build, sorted(licenses))
    content[f"{info}/WHEEL"] = _wheel(build)
    content[f"{info}/{sbom.name(build.package)}"] = sbom.of_wheel(content, build.package, build.wheel_version)
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    target = out_dir / build.wheel_name
    put(target, _zipped(content, last=f"{info}/"))
    return target


def for_index(wheel: Path, *, build: Build, out_dir: Path, index_url: str = "") -> Path:
    """The same wheel as pip's indexes have it: by its local version, and with the address of the indexes, which its import error names.

    Of equal versions pip and uv keep the one that is installed, whatever its build tag is. One that is there with this content stays
    as it is, byte for byte: it may be signed for.
    """
    target = out_dir / build.index_name
    info, named = build.dist_info, f"{build.package}-{build.index_version}.dist-info"
    content = {name.replace(f"{info}/", f"{named}/", 1): data for name, data in archives.read_wheel(wheel).files.items()}
    for name in ("METADATA", "WHEEL"):
        if f"{named}/{name}" not in content:
            raise WheelError(f"{wheel.name} does not hold {info}/{name}: is it the wheel of that build?")
    head, end, body = content[f"{named}/METADATA"].partition(b"\n\n")
    replaced = ("Version: ", f"Project-URL: {INDEX}, ")
    lines = [line for line in head.decode().splitlines() if not line.startswith(replaced)]
    lines.insert(2, f"Version: {build.index_version}")
    if index_url:
        lines.append(f"Project-URL: {INDEX}, {index_url.rstrip('/')}/")
    content[f"{named}/METADATA"] = "\n".join(lines).encode() + end + body
    content[f"{named}/WHEEL"] = _wheel(build, tagged=target.name == build.wheel_name)
    content[f"{named}/{sbom.name(build.package)}"] = sbom.of_wheel(content, build.package, build.index_version)
    content.pop(f"{named}/RECORD", None)
    content[f"{named}/RECORD"] = _record(content, f"{named}/RECORD")
    if not archives.holds(target, content):
        put(target, _zipped(content, last=f"{named}/"))
    return target


def index_url(wheel: Path) -> str:
    """The address of the indexes, where a wheel states it."""
    content = archives.read_wheel(wheel).files
    metadata = next((data for name, data in content.items() if name.endswith(".dist-info/METADATA")), b"")
    urls = BytesParser(policy=email.policy.compat32).parsebytes(metadata).get_all("Project-URL", [])
    return next((url.removeprefix(f"{INDEX}, ") for url in urls if url.startswith(f"{INDEX}, ")), "")


def payload(operators: Path, cubins: Path) -> dict[str, bytes]:
    """The files of both conda packages where a wheel has them."""
    package = operators.name.rsplit("-", 2)[0]
    share = archives.cubins(package)
    files: dict[str, bytes] = {}
    for name, data in archives.read_conda(operators).payload.items():
        _, found, inside = name.partition(archives.SITE_PACKAGES)
        # Compiled Python is the installer's business, and INSTALLER and RECORD are those of another installation.
        if found and "__pycache__" not in inside:
            files[inside] = data
    for name, data in archives.read_conda(cubins).payload.items():
        if name.startswith(share):
            files[f"{package}/cubins/{name.removeprefix(share)}"] = data
    return files


def check(files: dict[str, bytes], operators: Path, cubins: Path, build: Build) -> None:
    """WheelError if the packages are not those of the build."""
    record, manifest = f"{build.package}/_build.json", f"{build.package}/cubins/manifest.json"
    for name, source in ((record, operators), (manifest, cubins)):
        if name not in files:
            raise WheelError(f"{source.name} does not hold {Path(name).name}: is it the right package?")
    made = json.loads(files[record])
    wanted = {"version": build.version, "torch": build.torch, "cuda": build.cuda}
    if {key: made.get(key) for key in wanted} != wanted:
        raise WheelError(f"{operators.name} was built for {made}, but a wheel for {wanted} was asked for")
    cuda = json.loads(files[manifest]).get("cuda")
    if cuda != build.cuda:
        raise WheelError(f"{cubins.name} holds kernels of CUDA {cuda}, but a wheel for CUDA {build.cuda} was asked for")


def _metadata(described: bytes | None, build: Build, licenses: list[str]) -> bytes:
    """What pip reads: the project's own description with this build's requirements in it."""
    old = BytesParser(policy=email.policy.compat32).parsebytes(described or b"")
    lines = [("Metadata-Version", "2.4"), ("Name", build.package), ("Version", build.wheel_version)]
    lines += [(key, str(value)) for key, value in old.items() if key.title() in KEPT]
    lines += [("License-File", name.partition("/licenses/")[2]) for name in licenses]
    # pip takes the highest build tag whatever PyTorch is there: only the pin keeps a wrong one out.
    lines += [("Requires-Python", build.requires_python), ("Requires-Dist", build.requires_torch)]
    body = old.get_payload(decode=True)
    text = body.decode("utf-8") if isinstance(body, bytes) else ""
    return ("".join(f"{key}: {value}\n" for key, value in lines) + "\n" + text).encode()


KEPT = {"Summary", "Author", "Author-Email", "License-Expression", "Keywords", "Classifier", "Project-Url",
        "Description-Content-Type"}  # fmt: skip


def _wheel(build: Build, *, tagged: bool = True) -> bytes:
    message = EmailMessage(policy=email.policy.compat32.clone(linesep="\n"))
    message["Wheel-Version"] = "1.0"
    message["Generator"] = "sage_factory"
    message["Root-Is-Purelib"] = "false"
    for tag in (build.wheel_tag,) if tagged else build.index_tags:
        message["Tag"] = tag
    if tagged and build.build_tag:
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
    names = sorted(files, key=lambda name: (name.startswith(last), name))
    modes = {name: 0o100755 if name.endswith((".so", ".dll")) else 0o100644 for name in names}
    return archives.zipped(((name, modes[name], files[name]) for name in names), EPOCH, LEVEL)


def find_build(operators: Path) -> Build:
    """The first build of variants.yaml that a package was made for."""
    conda = archives.read_conda(operators)
    made = next((json.loads(data) for name, data in conda.payload.items() if name.endswith("/_build.json")), None)
    if made is None:
        raise WheelError(f"{operators.name} does not hold _build.json: the operators' package comes first, then the kernels'")
    index = json.loads(conda.info["info/index.json"])
    return matrix.builds(package=index["name"], platform=index["subdir"], cuda=made["cuda"], torch=made["torch"])[0]
