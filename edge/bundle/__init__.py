"""The bundle: one folder of hashed files, the only thing the runtime reads.

`manifest.json` lists every other file with its size and SHA-256. `open_bundle` checks each file
through the file descriptor it then hands out; `BundleWriter` publishes whole folders or nothing.
"""

from edge.bundle.manifest import (
    SCHEMA_VERSION,
    FileEntry,
    GenerationDefaults,
    Limits,
    Manifest,
    Provenance,
    Quantization,
    TokenizerInfo,
)
from edge.bundle.reader import Bundle, open_bundle
from edge.bundle.writer import BundleWriter

__all__ = [
    "SCHEMA_VERSION",
    "Bundle",
    "BundleWriter",
    "FileEntry",
    "GenerationDefaults",
    "Limits",
    "Manifest",
    "Provenance",
    "Quantization",
    "TokenizerInfo",
    "open_bundle",
]
