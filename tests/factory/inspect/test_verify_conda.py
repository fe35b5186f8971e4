"""verify, of conda packages: good ones pass, and each way of being broken is caught and named."""

from __future__ import annotations

import io
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import samples
import zstandard
from changes import Change, drop, put, swap

from sage_factory.inspect import content, verify
from sage_factory.make import archives
from sage_factory.what import matrix

INFO = samples.DIST_INFO


def test_good_conda_packages_pass(tmp_path: Path) -> None:
    assert verify.verify_conda(samples.operators_conda(tmp_path)) == []
    assert verify.verify_conda(samples.cubins_conda(tmp_path)) == []


def test_another_packages_repaired_row_says_nothing_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = matrix.load().all_builds
    repaired = [replace(one, number=one.number + 1) for one in builds if one.package != "sageattention"]
    samples.promise((*repaired, *builds), monkeypatch)
    assert verify.verify_conda(samples.operators_conda(tmp_path)) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("depends", ["python", "sageattention-cubins ==2.2.0 cu128_h1_0"], "depends on None, expected 'pytorch 2.8.*'"),
        ("depends", ["python", "pytorch 2.7.*", "sageattention-cubins ==2.2.0 cu128_h1_0"], "depends on 'pytorch 2.7.*', expected"),
        ("depends", ["python", "pytorch 2.8.*", "sageattention-cubins ==2.2.0 cu129_h1_0"], "cu129_h1_0', expected"),
        ("depends", ["pytorch 2.8.*", "sageattention-cubins ==2.2.0 cu128_h1_0"], "does not depend on python"),
        ("depends", ["python", "pytorch 2.8.*", "sageattention-cubins ==2.2.0 cu128_h1_0"], "does not depend on __glibc"),
        ("depends", None, "depends on None, expected 'pytorch 2.8.*'"),
        ("depends", [None, 5, {}], "depends on None, expected 'pytorch 2.8.*'"),
        ("noarch", "generic", "says noarch generic, expected python"),
        ("noarch", None, "says noarch None, expected python"),
        ("subdir", ["linux-64"], "says subdir ['linux-64'], expected one of"),
        ("subdir", "linux-32", "says subdir linux-32, expected one of linux-64"),
        ("build", "torch123_cu128_h2_0", "does not begin with a PyTorch and CUDA of variants.yaml"),
        ("build", "torch280_cu129_h2_0", "_build.json says cuda '12.8', expected '12.9'"),
        ("build", "torch270_cu128_h2_0", "_build.json says torch '2.8.0', expected '2.7.0'"),
        ("version", "2.2.1", "_build.json says version '2.2.0', expected '2.2.1'"),
        ("name", "other", "other is no package of this project"),
    ],
)  # fmt: skip
def test_wrong_conda_metadata_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = samples.conda(tmp_path, samples.operators(), samples.index("sageattention") | {key: value})
    faults = verify.verify_conda(path)
    assert any(message in fault for fault in faults), faults


OPERATORS: list[str] = samples.index("sageattention")["depends"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("constrains", None, "constrains None, expected ['__cuda >=12', 'cuda-version >=12.8,<13']"),
        ("constrains", ["__cuda >=12"], "constrains ['__cuda >=12'], expected"),
        ("constrains", ["__cuda >=13", "cuda-version >=12.8,<13"], "constrains ['__cuda >=13', 'cuda-version"),
        ("constrains", ["__cuda >=12", "cuda-version >=12.8,<14"], "expected ['__cuda >=12', 'cuda-version >=12.8,<13']"),
        ("depends", [one.replace("2.28", "2.17") for one in OPERATORS], "depends on '__glibc >=2.17', and the package is for glibc 2.28"),
        ("depends", [*OPERATORS, "__glibc >=2.34,<3.0.a0"], "depends on '__glibc >=2.34,<3.0.a0', and the package is for glibc 2.28"),
        ("depends", [one.replace("python >=3.9", "python 3.12.*") for one in OPERATORS], "depends on 'python 3.12.*', and the package is for every"),
        ("depends", [*OPERATORS, "python_abi 3.12.* *_cp312"], "depends on 'python_abi 3.12.* *_cp312', which operators do without"),
        ("depends", [*OPERATORS, "cuda-cudart >=12.8.90,<13.0a0"], "depends on 'cuda-cudart >=12.8.90,<13.0a0', which"),
        ("depends", [*OPERATORS, "vc >=14.3,<15"], "depends on 'vc >=14.3,<15', which operators do without"),
    ],
)  # fmt: skip
def test_what_a_solver_is_told_is_what_the_recipe_says(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = samples.conda(tmp_path, samples.operators(), samples.index("sageattention") | {key: value})
    (fault,) = verify.verify_conda(path)
    assert message in fault


def test_what_conda_forges_compilers_add_is_let_through(tmp_path: Path) -> None:
    emitted_there = [*OPERATORS, "libgcc >=12", "libstdcxx >=12", "__glibc >=2.28,<3.0.a0"]
    index = samples.index("sageattention") | {"depends": emitted_there}
    assert verify.verify_conda(samples.conda(tmp_path, samples.operators(), index)) == []


def test_kernels_with_a_dependency_or_a_platform_are_named(tmp_path: Path) -> None:
    payload = {archives.cubins("sageattention") + name: data for name, data in samples.cubin_set().items()}
    index = samples.index("sageattention-cubins") | {"subdir": "linux-64", "depends": ["cuda-version >=12.8,<13"]}
    faults = "\n".join(verify.verify_conda(samples.conda(tmp_path, payload, index)))
    assert "subdir linux-64, noarch generic: expected noarch, generic" in faults
    assert "depends ['cuda-version >=12.8,<13'], expected none" in faults


def test_conda_content_that_paths_json_denies_is_named(tmp_path: Path) -> None:
    told = samples.operators()
    payload = dict(told)
    payload["site-packages/sageattention/__init__.py"] = b"# changed"
    payload["bin/stray"] = b""
    del payload[f"site-packages/{INFO}/RECORD"]
    faults = "\n".join(verify.verify_conda(samples.conda(tmp_path, payload, samples.index("sageattention"), paths=told)))
    assert "site-packages/sageattention/__init__.py has sha256" in faults
    assert "__init__.py has 9 bytes, info/paths.json says 0" in faults
    assert "bin/stray is in the package but not listed in info/paths.json" in faults
    assert "bin/stray lies outside site-packages/sageattention/" in faults
    assert "RECORD is listed in info/paths.json but missing" in faults


PATHS: dict[str, tuple[object, str]] = {
    "no list": ({"paths": 5}, "info/paths.json has no list of files"),
    "no names": ({"paths": [{}]}, "info/paths.json has no list of files"),
    "not an object": ([], "info/paths.json holds list, expected an object"),
    "a link that is not there": ({"paths": [{"_path": "lib/a", "path_type": "softlink"}]}, "lib/a is listed in info/paths.json but missing"),
    "a file twice": ({"paths": [{"_path": "lib/a"}, {"_path": "lib/a"}]}, "info/paths.json lists a file twice"),
    "a file as a link": ({"paths": [{"_path": "site-packages/sageattention/__init__.py", "path_type": "softlink"}]}, "has path_type softlink"),
    "a prefix": (
        {"paths": [{"_path": "site-packages/sageattention/__init__.py", "prefix_placeholder": "/opt/conda"}]},
        "__init__.py holds the build machine's prefix (/opt/conda)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PATHS)
def test_paths_json_of_another_form_is_named(tmp_path: Path, case: str) -> None:
    document, message = PATHS[case]
    faults = verify.verify(samples.conda(tmp_path, samples.operators(), samples.index("sageattention"), document=document))
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("site-packages/other/__init__.py", b""), "other/__init__.py lies outside site-packages/sageattention/"),
        (put("bin/stray", b""), "bin/stray lies outside"),
        (put("site-packages/sageattention/.mypy_cache/3.11/x.json", b""), "sageattention/.mypy_cache/3.11/x.json is neither a module nor"),
        (put("site-packages/sageattention/__init__.py~", b""), "sageattention/__init__.py~ is neither a module nor"),
        (put("site-packages/sageattention/cubins/manifest.json", b"{}"), "sageattention/cubins/manifest.json is neither a module nor"),
        (put(f"site-packages/{INFO}/direct_url.json", b"{}"), "direct_url.json does not belong in .dist-info"),
        (swap(f"site-packages/{INFO}/METADATA", b"Version: 2.2.0", b"Version: 2.1.0"), "METADATA says sageattention 2.1.0, expected sageattention 2.2.0"),
        (swap(f"site-packages/{INFO}/METADATA", b"Name: sageattention", b"Name: flash"), "METADATA says flash 2.2.0"),
        (drop(f"site-packages/{INFO}/METADATA"), "METADATA says None None"),
        (swap("site-packages/sageattention/_build.json", b"12.8", b"12.9"), "_build.json says cuda '12.9', expected '12.8'"),
        (drop("site-packages/sageattention/_C.so"), "sageattention/_C.so is missing"),
        (put("site-packages/sageattention/_C.so", lambda: samples.library()[:3000]), "_C.so is not a whole ELF file"),
        (put("site-packages/sageattention/_C.so", lambda: samples.library()[:18] + b"\xb7\0" + samples.library()[20:]), "EM_AARCH64, expected EM_X86_64"),
        (put("site-packages/sageattention/_C.dll", b""), "_C.dll is a second library"),
    ],
)  # fmt: skip
def test_a_broken_operators_package_is_named(tmp_path: Path, change: Change, message: str) -> None:
    files = samples.operators()
    change(files)
    faults = verify.verify(samples.operators_conda(tmp_path, files))
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata.json": b'{"conda_pkg_format_version": 3}'}, "does not say conda_pkg_format_version 2"),
        ({"metadata.json": b"{"}, "does not say conda_pkg_format_version 2"),
        ({"metadata.json": None}, "expected pkg-…, info-… and metadata.json, each once"),
        ({"other": b""}, "expected pkg-…, info-… and metadata.json, each once"),
        ({"pkg-sageattention-2.2.0-torch280_cu128_h2_0.tar.zst": b"no zstd"}, "cannot be unpacked"),
        ({"info-sageattention-2.2.0-torch280_cu128_h2_0.tar.zst": zstandard.compress(b"no tar" * 500)}, "cannot be unpacked"),
    ],
)
def test_a_conda_archive_of_another_form_is_named(tmp_path: Path, change: dict[str, bytes | None], message: str) -> None:
    path = samples.operators_conda(tmp_path)
    members = {name: data for name, data in (samples.contents(path) | change).items() if data is not None}
    samples.archive(path, members)
    faults = verify.verify(path)
    assert any(message in fault for fault in faults), faults


def test_a_link_in_a_conda_package_is_named() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, kind in (("folder", tarfile.DIRTYPE), ("link", tarfile.SYMTYPE), ("other", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    faults: list[str] = []
    assert archives._untar(Path("a.conda"), zstandard.ZstdCompressor().compress(packed.getvalue()), faults) == {}
    assert [fault.partition(" is a link")[0] for fault in faults] == ["link", "other"]


# ── Windows ───────────────────────────────────────────────────────────────────────────────────────────────

DLLS: dict[str, tuple[bytes, str]] = {
    "good": (samples.dll("c10.dll", "torch_cpu.dll", "KERNEL32.dll"), ""),
    "one Python's": (samples.dll("c10.dll", "python312.dll"), "_C.dll needs python312.dll, which it must do without"),
    "one CUDA's": (samples.dll("cudart64_12.dll"), "_C.dll needs cudart64_12.dll, which it must do without"),
    "a CUDA PyTorch's": (samples.dll("torch_cuda.dll"), "_C.dll needs torch_cuda.dll, which it must do without"),
    "for another processor": (samples.dll("c10.dll", machine=0xAA64), "_C.dll is code for IMAGE_FILE_MACHINE_ARM64, expected IMAGE_FILE_MACHINE_AMD64"),
    "cut short": (samples.dll("c10.dll")[:700], "_C.dll has sections up to byte 1024 and only 700 bytes: truncated"),
    "cut very short": (samples.dll("c10.dll")[:100], "_C.dll is not a whole Windows library"),
    "a Linux library": (samples.cubin(80, machine=62), "_C.dll is not a whole Windows library"),
    "with a path": (samples.dll("c10.dll", "C:\\Users\\me\\c10.dll"), "_C.dll names a path of the build machine"),
}  # fmt: skip


@pytest.mark.parametrize("case", DLLS)
def test_a_library_for_windows_is_what_it_should_be(tmp_path: Path, case: str) -> None:
    data, message = DLLS[case]
    files = samples.operators()
    del files["site-packages/sageattention/_C.so"]
    files["site-packages/sageattention/_C.dll"] = data
    depends = [one for one in OPERATORS if "glibc" not in one] + [
        "ucrt >=10.0.20348.0",
        "vc >=14.3,<15",
        "vc14_runtime >=14.44",
    ]
    index = samples.index("sageattention") | {"subdir": "win-64", "depends": depends}
    faults = verify.verify(samples.conda(tmp_path, files, index))
    assert any(message in fault for fault in faults) if message else faults == []


def test_a_kernel_package_without_a_promised_architecture_is_named(tmp_path: Path) -> None:
    files = {name: data for name, data in samples.cubin_set().items() if not name.startswith("sm_120")}
    files["manifest.json"] = samples.manifest(files)
    faults = verify.verify_conda(samples.cubins_conda(tmp_path, files))
    assert len(faults) == sum(only is None or "sm_120" in only for only in content.instances(samples.CUDA).values())
    assert all("cubins/sm_120/" in fault and "variants.yaml promises sm_120 for CUDA 12.8" in fault for fault in faults)


def test_a_kernel_dropped_from_files_and_manifest_alike_is_named(tmp_path: Path) -> None:
    faults = verify.verify_conda(samples.cubins_conda(tmp_path, samples.cubin_set(samples.KERNELS[1:])))
    assert faults == [
        f"cubins/manifest.json does not name the kernel {samples.KERNELS[0]}, which csrc/kernels/kernels.json lists"
    ]


@pytest.mark.parametrize(
    "name",
    ["sageattention-2.2.0-torch280_cu129_h2_0", "sageattention-2.2.1-torch280_cu128_h2_0", "flash-2.2.0-torch280_cu128_h2_0"],
)
def test_a_renamed_conda_package_is_named(tmp_path: Path, name: str) -> None:
    path = samples.operators_conda(tmp_path)
    assert "was the file renamed?" in verify.verify(path.rename(path.with_name(f"{name}.conda")))[0]


def test_renamed_and_truncated_conda_packages_are_named(tmp_path: Path) -> None:
    path = samples.cubins_conda(tmp_path)
    renamed = shutil.copy(path, path.with_name("sageattention-cubins-2.2.0-cu129_h1_0.conda"))
    assert "was the file renamed?" in verify.verify_conda(Path(renamed))[0]
    path.write_bytes(path.read_bytes()[:-400])
    assert "truncated or damaged" in verify.verify_conda(path)[0]
    assert "is not named NAME-VERSION-BUILD.conda" in verify.verify_conda(tmp_path / "kernels.conda")[0]
