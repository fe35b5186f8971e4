"""verify: good wheels pass, and each way of being broken is caught and named, of whatever artifact that is one; the command."""

from __future__ import annotations

import functools
import io
import json
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import samples
from changes import Change, Files, drop, put, swap
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_factory import ROOT, commands
from sage_factory.inspect import content, elf, verify

INFO = samples.DIST_INFO
SM90 = "sageattention/cubins/sm_90a/quant_k_int8-d64-fp16.cubin"
PTX = "sageattention/cubins/compute_80/quant_k_int8-d64-fp16.ptx"


def cubin(name: str, data: bytes | None) -> Change:
    """A change of a kernel that the manifest agrees with: only its content can give it away."""

    def change(files: Files) -> None:
        if data is None:
            del files[name]
        else:
            files[name] = data
        folder = "sageattention/cubins/"
        kernels = {n.removeprefix(folder): d for n, d in files.items() if n.startswith(folder)}
        files[f"{folder}manifest.json"] = samples.manifest(kernels)

    return change


def c_library(*flags: str, source: str = "int sage_one(void) { return 1; }") -> Change:
    return put("sageattention/_C.so", lambda: samples.library(*flags, source=source))


WHEELS: dict[str, tuple[Change, str]] = {
    "torch pin of another build": (swap(f"{INFO}/METADATA", b"torch==2.8.*", b"torch==2.7.*"), "requires torch==2.7.*, expected torch==2.8.*"),
    "a requirement too many": (swap(f"{INFO}/METADATA", b"Requires-Dist:", b"Requires-Dist: numpy\nRequires-Dist:"), "requires numpy, torch==2.8.*, expected"),
    "torch pin with a marker": (swap(f"{INFO}/METADATA", b"2.8.*", b"2.8.*; python_version < '3'"), "expected torch==2.8.* alone"),
    "requirement that is none": (swap(f"{INFO}/METADATA", b"torch==2.8.*", b"torch=="), "holds a Requires-Dist that is no requirement"),
    "licence lost": (drop(f"{INFO}/licenses/LICENSE"), "names the licence file LICENSE, which is not in"),
    "wheel format of the future": (swap(f"{INFO}/WHEEL", b"Wheel-Version: 1.0", b"Wheel-Version: 2.0"), "says Wheel-Version 2.0, expected 1.0"),
    "file of nobody": (put("stray.pth", b""), "stray.pth lies outside sageattention/ and"),
    "file of an editor": (put("sageattention/__init__.py~", b""), "sageattention/__init__.py~ is neither a module nor"),
    "file of a tool": (put("sageattention/.mypy_cache/x.json", b""), "sageattention/.mypy_cache/x.json is neither a module nor"),
    "module of a folder": (put("sageattention/old/core.py", b""), "sageattention/old/core.py is neither a module nor"),
    "commands": (put(f"{INFO}/entry_points.txt", b""), "entry_points.txt does not belong in .dist-info"),
    "second library": (put("sageattention/_D.so", b""), "_D.so is a second library: expected _C.so alone"),
    "library of Windows": (put("sageattention/_C.so", lambda: samples.dll("c10.dll")), "_C.so is not a whole ELF file"),
    "binary METADATA": (put(f"{INFO}/METADATA", b"\xff\0\xfe"), "METADATA is not valid"),
    "binary WHEEL": (put(f"{INFO}/WHEEL", b"\xff\0\xfe"), "WHEEL says Tag nothing"),
    "WHEEL of another charset": (swap(f"{INFO}/WHEEL", b"cp312-cp312-linux", b"cp312-cp312-\xe9"), "WHEEL says Tag cp312-cp312-\ufffd"),
    "build file nested without end": (put("sageattention/_build.json", b"[" * 100_000), "_build.json is not valid JSON"),
    "names that differ in case": (put("sageattention/_c.SO", b""), "in the archive twice"),
    "torch pin missing": (swap(f"{INFO}/METADATA", b"Requires-Dist: torch==2.8.*\n", b""), "requires nothing, expected torch==2.8.*"),
    "python of another build": (swap(f"{INFO}/METADATA", b">=3.9", b"==3.11.*"), "Requires-Python ==3.11.*, expected >=3.9"),
    "version of another release": (swap(f"{INFO}/METADATA", b"Version: 2.2.0", b"Version: 2.1.0"), "says Version 2.1.0, expected 2.2.0"),
    "another name": (swap(f"{INFO}/METADATA", b"Name: sageattention", b"Name: flash"), "says Name flash, expected sageattention"),
    "license that is none": (
        swap(f"{INFO}/METADATA", b"Summary:", b"License-Expression: Freeware-9\nSummary:"),
        "METADATA is not valid: ",
    ),
    "no METADATA": (drop(f"{INFO}/METADATA"), "METADATA is missing"),
    "tag of another python": (swap(f"{INFO}/WHEEL", b"cp312-cp312", b"cp311-cp311"), "WHEEL says Tag cp311-cp311-linux_x86_64, expected cp312"),
    "no build tag": (swap(f"{INFO}/WHEEL", b"Build: 280.128\n", b""), "WHEEL says Build nothing, expected 280.128"),
    "pure": (swap(f"{INFO}/WHEEL", b"Purelib: false", b"Purelib: true"), "WHEEL says Root-Is-Purelib true, expected false"),
    "second dist-info": (put("other-1.dist-info/METADATA", b""), "other-1.dist-info lies beside"),
    "built for another CUDA": (swap("sageattention/_build.json", b"12.8", b"12.9"), "_build.json says cuda '12.9', expected '12.8'"),
    "built for another torch": (swap("sageattention/_build.json", b"2.8.0", b"2.7.0"), "_build.json says torch '2.7.0', expected '2.8.0'"),
    "build file damaged": (put("sageattention/_build.json", b"{"), "_build.json is not valid JSON"),
    "no library": (drop("sageattention/_C.so"), "sageattention/_C.so is missing"),
    "library cut short": (put("sageattention/_C.so", lambda: samples.library()[:3000]), "_C.so is not a whole ELF file"),
    "library of another machine": (
        put("sageattention/_C.so", lambda: samples.library()[:18] + b"\xb7\0" + samples.library()[20:]),
        "_C.so is code for EM_AARCH64, expected EM_X86_64",
    ),
    "RUNPATH": (c_library("-Wl,--enable-new-dtags,-rpath,/opt/torch/lib"), "_C.so has RUNPATH '/opt/torch/lib', expected none"),
    "an export": (
        c_library(source="int sage_one(void) { return 1; } int another(void) { return 2; } int other(void) { return 3; }"),
        "_C.so exports another and 1 more symbols: expected those alone that begin with sage_",
    ),
    "RPATH": (c_library("-Wl,--disable-new-dtags,-rpath,/opt/torch/lib"), "_C.so has RPATH '/opt/torch/lib', expected none"),
    "path of the build machine": (
        c_library(source='const char *sage_one(void) { return "/home/me/csrc/ops.cpp"; }'),
        "_C.so names a path of the build machine: '/home/me/csrc/ops.cpp'",
    ),
    "kernel of another GPU": (cubin(SM90, samples.cubin(80)), "sm_90a/quant_k_int8-d64-fp16.cubin is code for sm_80, expected sm_90"),
    "newer ABI, another GPU": (cubin(SM90, samples.cubin(100, abi=8)), "is code for sm_100, expected sm_90"),
    "host code for a kernel": (cubin(SM90, samples.cubin(90, machine=62)), "ELF file for EM_X86_64, expected CUDA code"),
    "kernel cut short": (cubin(SM90, samples.cubin(90)[:70]), "cubin is not a whole CUDA ELF file"),
    "kernel empty": (cubin(SM90, b""), "cubin is not a whole CUDA ELF file"),
    "kernel missing": (cubin(SM90, None), "sm_90a/quant_k_int8-d64-fp16.cubin is missing: variants.yaml promises sm_90"),
    "kernel file lost": (drop(SM90), "sm_90a/quant_k_int8-d64-fp16.cubin is listed in cubins/manifest.json but missing"),
    "kernel damaged": (put(SM90, samples.cubin(90) + b"\0"), "sm_90a/quant_k_int8-d64-fp16.cubin has sha256"),
    "kernel too many": (put("sageattention/cubins/sm_90a/x.cubin", samples.cubin(90)), "sm_90a/x.cubin is not listed in cubins/manifest.json"),
    "PTX of another target": (cubin(PTX, samples.ptx("sm_90")), "ptx is PTX for sm_90, expected sm_80"),
    "PTX without target": (cubin(PTX, b".entry"), "ptx is PTX for no .target, expected sm_80"),
    "PTX with a path": (cubin(PTX, samples.ptx("sm_80") + b'.file 1 "/home/me/k.cu"\n'), "names a path of the build machine: '/home/me/k.cu"),
    "no manifest": (drop("sageattention/cubins/manifest.json"), "manifest.json is missing"),
    "kernels of another CUDA": (swap("sageattention/cubins/manifest.json", b'"12.8"', b'"13.0"'), "manifest.json says cuda '13.0', expected '12.8'"),
}  # fmt: skip


def test_a_good_wheel_passes(wheel_path: Path) -> None:
    assert verify.verify_wheel(wheel_path) == []


@pytest.mark.parametrize("case", WHEELS)
def test_a_broken_wheel_is_named(wheel_path: Path, case: str) -> None:
    change, message = WHEELS[case]
    files = samples.contents(wheel_path)
    change(files)
    faults = verify.verify_wheel(samples.rewrite(wheel_path, files))
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("changed", "sageattention/__init__.py has hash"),
        ("size", "sageattention/__init__.py has 1 bytes, RECORD says 0"),
        ("missing", "sageattention/__init__.py is listed in RECORD but missing"),
        ("unlisted", "stray.py is in the wheel but not listed in RECORD"),
        ("gone", "RECORD is missing"),
    ],
)
def test_a_record_that_does_not_fit_is_named(wheel_path: Path, case: str, message: str) -> None:
    files = samples.contents(wheel_path)
    if case in {"changed", "size"}:
        files["sageattention/__init__.py"] = b"#"
    elif case == "missing":
        del files["sageattention/__init__.py"]
    elif case == "unlisted":
        files["stray.py"] = b""
    else:
        del files[f"{INFO}/RECORD"]
    faults = verify.verify_wheel(samples.rewrite(wheel_path, files, record=False))
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sageattention-2.2.0-280.129-cp312-cp312-linux_x86_64.whl", "_build.json says cuda '12.8', expected '12.9'"),
        (
            "sageattention-2.2.0-280.128-cp311-cp311-linux_x86_64.whl",
            "WHEEL says Tag cp312-cp312-linux_x86_64, expected cp311-cp311-linux_x86_64",
        ),
        ("sageattention-2.2.0-280.128-cp312-cp312-win_amd64.whl", "_C.dll is missing"),
        ("sageattention-2.2.0-999.128-cp312-cp312-linux_x86_64.whl", "variants.yaml has no build named"),
        ("sageattention-2.2.0.whl", "the file name is not a wheel's"),
    ],
)
def test_a_renamed_wheel_is_named(wheel_path: Path, name: str, message: str) -> None:
    faults = verify.verify_wheel(wheel_path.rename(wheel_path.with_name(name)))
    assert any(message in fault for fault in faults), faults


KINDS: dict[str, Callable[[Path], Path]] = {
    "wheel": samples.a_wheel,
    "operators": samples.operators_conda,
    "kernels": samples.cubins_conda,
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.99])
def test_a_truncated_artifact_is_named(tmp_path: Path, kind: str, keep: float) -> None:
    path = KINDS[kind](tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    assert "truncated or damaged" in verify.verify(path)[0]


@kinds
@pytest.mark.parametrize("extra", ["before", "behind", "between"])
def test_bytes_that_belong_to_no_entry_are_named(tmp_path: Path, kind: str, extra: str) -> None:
    path = KINDS[kind](tmp_path)
    data, with_prefix = path.read_bytes(), io.BytesIO(b"MZ" + bytes(98))
    if extra == "before":  # as self-extracting archives are
        path.write_bytes(with_prefix.getvalue() + data)
    elif extra == "behind":
        path.write_bytes(data[:-2] + b"\4\0more")  # the directory's comment
    else:
        with zipfile.ZipFile(path) as archive:
            start = archive.start_dir
        path.write_bytes(data[:start] + b"hidden" + data[start:-6] + (start + 6).to_bytes(4, "little") + data[-2:])
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, "other readers take it"
    faults = verify.verify(path)
    assert any("as it was written" in fault for fault in faults), faults


@kinds
def test_an_entry_that_two_readers_see_differently_is_named(tmp_path: Path, kind: str) -> None:
    """Installers that unpack while they download go by the header before an entry, others by the directory."""
    path = KINDS[kind](tmp_path)
    data = bytearray(path.read_bytes())
    assert data[:4] == b"PK\3\4"
    data[22] ^= 1  # the size, in the first header
    path.write_bytes(bytes(data))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "Python's own reader takes it"
    assert any("is not as it was written" in fault for fault in verify.verify(path))


def test_a_flipped_byte_is_named(wheel_path: Path) -> None:
    data = bytearray(wheel_path.read_bytes())
    data[200] ^= 0xFF
    wheel_path.write_bytes(bytes(data))
    assert "truncated or damaged" in verify.verify_wheel(wheel_path)[0]


@functools.cache
def _good(kind: str) -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = KINDS[kind](Path(folder))
        return path.name, path.read_bytes()


@kinds
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_no_flipped_bit_goes_unnoticed(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    name, good = _good(kind)
    position = data.draw(st.integers(0, len(good) - 1))
    bit = data.draw(st.integers(0, 7))
    assert faults_of_flipped(tmp_path_factory.getbasetemp() / name, good, position, bit), f"bit {bit} of byte {position}"


def faults_of_flipped(path: Path, good: bytes, position: int, bit: int) -> list[str]:
    """What is said of an artifact with one bit flipped, or why that bit is of no consequence."""
    damaged = bytearray(good)
    damaged[position] ^= 1 << bit
    path.write_bytes(bytes(damaged))
    if faults := verify.verify(path):
        return faults
    with zipfile.ZipFile(io.BytesIO(good)) as one, zipfile.ZipFile(path) as other:
        same = all(one.read(name) == other.read(name) for name in one.namelist())
        for member, flipped in zip(one.infolist(), other.infolist(), strict=True):
            begin = member.header_offset + len(member.FileHeader())
            # A compressed stream has bits that no content depends on: after its last symbol, in the lengths of unused codes.
            if begin <= position < begin + member.compress_size and same:
                return ["the same content"]
            if member.external_attr ^ flipped.external_attr == stat.S_IFREG << 16 and same:
                return ["file type"]
    return []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "does not exist" in verify.verify_wheel(tmp_path / samples.build().wheel_name)[0]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_and_unsafe_entries_are_named(wheel_path: Path) -> None:
    with zipfile.ZipFile(wheel_path, "a") as archive:
        archive.writestr("sageattention/__init__.py", b"")
        archive.writestr("../outside.py", b"")
        link = zipfile.ZipInfo("sageattention/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, b"/etc/passwd")
    faults = "\n".join(verify.verify_wheel(wheel_path))
    assert "sageattention/__init__.py is in the archive twice" in faults
    assert "'../outside.py' would be unpacked outside" in faults
    assert "sageattention/link is a symbolic link" in faults


@pytest.mark.parametrize("change", [{"kernels": 5}, {"kernels": [1]}, {"files": []}, {"files": None}])
def test_a_manifest_of_another_form_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    files = samples.cubin_set()
    files["manifest.json"] = json.dumps(json.loads(files["manifest.json"]) | change).encode()
    faults = verify.verify_conda(samples.cubins_conda(tmp_path, files))
    assert faults == ["cubins/manifest.json has no list of kernels or no table of files"]


@pytest.mark.parametrize("library", ["libcudart.so.12", "libpython3.12.so.1.0", "libtorch_cuda.so", "libcuda.so.1"])
def test_a_forbidden_library_is_named(tmp_path: Path, library: str) -> None:
    stub = tmp_path / library
    stub.write_bytes(samples.library(f"-Wl,-soname,{library}"))
    data = samples.library("-Wl,--no-as-needed", str(stub))
    faults = list(elf.host_faults("_C.so", data, "linux-64", "2.28"))
    assert faults == [f"_C.so needs {library}, which it must do without (DT_NEEDED)"]


def test_a_symbol_newer_than_promised_is_named() -> None:
    # memcpy is of glibc 2.14: fine where 2.28 is promised, too new where 2.5 is.
    source = "#include <string.h>\nint sage_one(char *a, char *b) { memcpy(a, b, 9999); return a[3]; }"
    data = samples.library("-O0", source=source)
    assert list(elf.host_faults("_C.so", data, "linux-64", "2.28")) == []
    faults = list(elf.host_faults("_C.so", data, "linux-64", "2.5"))
    assert len(faults) == 1
    assert "_C.so needs GLIBC_2.14 of libc.so.6, newer than promised: variants.yaml says glibc 2.5" in faults[0]


@pytest.mark.parametrize(("sm", "abi"), [(80, 7), (90, 7), (80, 8), (90, 8), (100, 8), (120, 8), (121, 8)])
def test_both_cubin_layouts_are_read(sm: int, abi: int) -> None:
    data = samples.cubin(sm, abi=abi)
    assert list(elf.gpu_faults("k", data, f"sm_{sm}")) == []
    assert list(elf.gpu_faults("k", data, f"sm_{sm}a")) == []
    assert list(elf.gpu_faults("k", data, "sm_75")) == [f"k is code for sm_{sm}, expected sm_75 as its folder says"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"\0/home/me/k.cu\0", r"/home/me/k.cu"),
        (b"x/var/tmp/b/k.cu y", r"/var/tmp/b/k.cu"),
        (b"/x/.venvs/cuda/k.h", r"/.venvs/cuda/k.h"),
        (rb"C:\Users\me\k.cu", r":\\Users\\me\\k.cu"),
        (b"/opt/_h_env_placehold_placehold/bin", r"_h_env_placehold_placehold/bin"),
        (b"/build/csrc/k.cu /host/include homework", ""),
    ],
)
def test_paths_of_machines_are_found(text: bytes, found: str) -> None:
    expected = [f"k names a path of the build machine: '{found}'"] if found else []
    assert list(elf.path_faults("k", text)) == expected


@pytest.mark.parametrize(
    ("sm", "folder", "runs"),
    [(86, "sm_89", True), (89, "sm_86", False), (86, "sm_89a", False), (89, "sm_90", False), (100, "sm_120", False)],
)
def test_code_for_an_earlier_minor_version_serves_a_later_one(sm: int, folder: str, runs: bool) -> None:
    assert (not list(elf.gpu_faults("k", samples.cubin(sm), folder))) == runs


# ── command line ──────────────────────────────────────────────────────────────────────────────────────────


def test_command_shows_a_verdict_for_each_file(
    wheel_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert commands.main(["verify", str(wheel_path)]) == 0
    assert "good" in capsys.readouterr().out
    broken = wheel_path.with_suffix(".conda")
    broken.write_bytes(b"")
    assert commands.main(["verify", str(wheel_path), str(broken), str(wheel_path.parent / "x.zip")]) == 1
    said = capsys.readouterr().out
    assert "good" in said
    assert "truncated or damaged" in said
    assert "neither a wheel" in said


def fresh() -> Path:
    """The wheel that `run.py test` has just built. Others in dist/ may be of older sources."""
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    found = sorted(Path(ROOT, "dist", "wheels").glob(f"sageattention-*-280.128-{here}-*.whl"))
    if not found:
        pytest.skip("dist/ holds no wheel of CUDA 12.8 for this Python: `python3 scripts/run.py build-cu128` makes one")
    return found[-1]


def test_the_built_wheel_and_its_packages_are_good() -> None:
    wheel = fresh()
    packages = sorted(Path(ROOT, "dist", "conda").glob("*/*cu128_*.conda"))
    built = [path for path in packages if path.name.startswith(("sageattention-cubins-", "sageattention-2.2.0-torch280_"))]
    assert len(built) >= 2
    assert {path.name: verify.verify(path) for path in (wheel, *built) if verify.verify(path)} == {}


def test_every_kernel_of_the_sources_is_in_the_built_wheel() -> None:
    assert set(json.loads(samples.contents(fresh())["sageattention/cubins/manifest.json"])["kernels"]) == set(
        content.instances("12.8")
    )
