"""What a wheel or a release is made of, as CycloneDX 1.6: a function of its content, without a time or a number drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sage_factory.files import sha256

LICENCE = [{"license": {"id": "Apache-2.0"}}]


def name(package: str) -> str:
    """Where a wheel has it in its .dist-info, as PEP 770 says."""
    return f"sboms/{package}.cdx.json"


def of_wheel(files: Mapping[str, bytes], package: str, version: str) -> bytes:
    """Of a wheel of a package with these files: its two binary parts, the PyTorch it needs, and what compiled them."""
    made = json.loads(files.get(f"{package}/_build.json", b"{}"))
    parts = [
        _file(path, files[path])
        for path in (f"{package}/_C.so", f"{package}/_C.dll", f"{package}/cubins/manifest.json")
        if path in files  # the manifest has the digest of every kernel
    ]
    components = [
        _component("library", "torch", made.get("torch", ""), "required", purl=f"pkg:pypi/torch@{made.get('torch', '')}"),
        _component("application", "CUDA toolkit", made.get("cuda", ""), "excluded"),
        _component("application", "C++ compiler", made.get("compiler", ""), "excluded"),
    ]
    return _document(package, version, parts, [c for c in components if c["version"]], made.get("commit", ""), ["torch"])


def of_release(package: str, version: str, tag: str, files: Iterable[Path]) -> bytes:
    """Of a release of a package: its files."""
    parts = [_file(path.name, path.read_bytes()) for path in sorted(files, key=lambda path: path.name)]
    return _document(package, version, parts, [], "", [], tag)


def _document(
    package: str,
    version: str,
    parts: list[dict[str, Any]],
    components: list[dict[str, Any]],
    commit: str,
    needs: list[str],
    tag: str = "",
) -> bytes:
    own = _component("library", package, version, None, purl=f"pkg:pypi/{package}@{quote(version)}")
    own |= {"licenses": LICENCE, "components": parts}
    own["properties"] = [{"name": f"{package}:{key}", "value": v} for key, v in (("commit", commit), ("tag", tag)) if v]
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": package, "dependsOn": needs}],
    }
    return json.dumps(bom, indent=1, sort_keys=True).encode() + b"\n"


def _component(kind: str, name: str, version: str, scope: str | None, *, purl: str | None = None) -> dict[str, Any]:
    found = {"type": kind, "bom-ref": name, "name": name, "version": version, "scope": scope, "purl": purl}
    return {key: value for key, value in found.items() if value is not None}


def _file(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": sha256(data)}]}
