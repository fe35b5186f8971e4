"""What a Windows library says of itself: its processor, whether it is whole, the libraries it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pefile

MACHINES = {"win_amd64": "IMAGE_FILE_MACHINE_AMD64"}
# As in elf.py: one Python's, one CUDA's, or a PyTorch's with CUDA.
FORBIDDEN = re.compile(r"(?i)(python|cudart|nvcuda|torch_cuda|c10_cuda|torch_python|nvrtc|cublas)")


def library_faults(name: str, data: bytes, platform: str) -> Iterator[str]:
    """What keeps a library from working on Windows; `platform` is a wheel's, such as win_amd64."""
    try:
        library = pefile.PE(data=data)
        kinds = [pefile.DIRECTORY_ENTRY[f"IMAGE_DIRECTORY_ENTRY_{kind}"] for kind in ("IMPORT", "DELAY_IMPORT")]
        library.parse_data_directories(kinds)
        machine = pefile.MACHINE_TYPE.get(library.FILE_HEADER.Machine, hex(library.FILE_HEADER.Machine))
        ends = [section.PointerToRawData + section.SizeOfRawData for section in library.sections]
        needed = [
            entry.dll.decode(errors="replace")
            for table in ("DIRECTORY_ENTRY_IMPORT", "DIRECTORY_ENTRY_DELAY_IMPORT")
            for entry in getattr(library, table, [])
        ]
    except Exception as error:  # noqa: BLE001 - a damaged header may ask for anything
        yield f"{name} is not a whole Windows library ({error}): truncated or damaged"
        return
    if machine != MACHINES[platform]:
        yield f"{name} is code for {machine}, expected {MACHINES[platform]} ({platform})"
    if not library.is_dll():
        yield f"{name} is no DLL"
    if max(ends, default=0) > len(data):
        yield f"{name} has sections up to byte {max(ends)} and only {len(data)} bytes: truncated"
    for library_name in needed:
        if FORBIDDEN.match(library_name):
            yield f"{name} needs {library_name}, which it must do without"
