"""What a wheel or a release is made of, as CycloneDX 1.6: a function of its content, without a time or a number drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sage_factory.files import sha256
from sage_factory.make import archives

LICENCE = [{"license": {"id": "Apache-2.0"}}]
NAME = "sboms/sageattention.cdx.json"  # in .dist-info, as PEP 770 has it


def of_wheel(files: Mapping[str, bytes], version: str) -> bytes:
    """Of a wheel with these files: its two binary parts, the PyTorch it needs, and what compiled them."""
    made = json.loads(files.get(f"{archives.PACKAGE}_build.json", b"{}"))
    parts = [
        _file(name, files[name])
        for name in (f"{archives.PACKAGE}_C.so", f"{archives.PACKAGE}_C.dll", f"{archives.PACKAGE}cubins/manifest.json")
        if name in files  # the manifest has the digest of every kernel
    ]
    components = [
        _component("library", "torch", made.get("torch", ""), "required", purl=f"pkg:pypi/torch@{made.get('torch', '')}"),
        _component("application", "CUDA toolkit", made.get("cuda", ""), "excluded"),
        _component("application", "C++ compiler", made.get("compiler", ""), "excluded"),
    ]
    return _document(version, parts, [c for c in components if c["version"]], made.get("commit", ""), ["torch"])


def of_release(version: str, tag: str, files: Iterable[Path]) -> bytes:
    """Of a release: its files."""
    parts = [_file(path.name, path.read_bytes()) for path in sorted(files, key=lambda path: path.name)]
    return _document(version, parts, [], "", [], tag)


def _document(
    version: str, parts: list[dict[str, Any]], components: list[dict[str, Any]], commit: str, needs: list[str], tag: str = ""
) -> bytes:
    own = _component("library", "sageattention", version, None, purl=f"pkg:pypi/sageattention@{quote(version)}")
    own |= {"licenses": LICENCE, "components": parts}
    own["properties"] = [{"name": f"sageattention:{key}", "value": v} for key, v in (("commit", commit), ("tag", tag)) if v]
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": "sageattention", "dependsOn": needs}],
    }
    return json.dumps(bom, indent=1, sort_keys=True).encode() + b"\n"


def _component(kind: str, name: str, version: str, scope: str | None, *, purl: str | None = None) -> dict[str, Any]:
    found = {"type": kind, "bom-ref": name, "name": name, "version": version, "scope": scope, "purl": purl}
    return {key: value for key, value in found.items() if value is not None}


def _file(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": sha256(data)}]}
