"""Model repositories of the Hugging Face hub, or of the hub that `HF_ENDPOINT` names."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import quote

from edge.apps.exporter import packages_of
from edge.apps.models.download import RemoteFile, ask, fetch
from edge.bundle import Manifest
from edge.bundle.manifest import MAX_MANIFEST
from edge.errors import PullError, some

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_TEXT = (
    "config.json", "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "README.md",
    "mamba_config.json",
)  # fmt: skip
_CONFIGS = ("config.json", "mamba_config.json")
# forms of a tokenizer, of which the first one there counts; the others are not fetched
_TOKENIZER = (
    re.compile(r"tokenizer\.json"),
    re.compile(r"[^/]+\.model(\.v[0-9]+[a-z0-9]*)?"),
    re.compile(r"tekken\.json"),
    re.compile(r"vocab\.json|merges\.txt"),
)
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
MANIFEST = "manifest.json"
MAX_FILES = 10_000
MAX_TOLD = 16 << 20  # bytes of the hub's description of a repository
_UNNAMEABLE = re.compile(r"[\\\0\ud800-\udfff]")  # no file here can have them in its name


@dataclass(frozen=True)
class HubModel:
    """A repository at one commit.

    Attributes:
        repository: OWNER/NAME.
        revision: the commit.
        licence: licence stated on the model card, or None.
        files: files to fetch.
        chosen: the one of `files` that is the checkpoint, a GGUF file, or None.
        is_bundle: whether it holds a bundle; then only files that its manifest lists are fetched.
    """

    repository: str
    revision: str
    licence: str | None
    files: list[RemoteFile]
    chosen: str | None = None
    is_bundle: bool = False

    def fetch(self, folder: Path) -> Path:
        """Download the files; return the folder, or the GGUF file in it. Raises PullError."""
        headers = _hub().utils.build_hf_headers(library_name="mamba-edge")
        files = self.files
        if self.is_bundle:
            size = next(file.size for file in files if file.name == MANIFEST)
            if size > MAX_MANIFEST:
                raise PullError(
                    f"has a manifest.json of {size} bytes, at most {MAX_MANIFEST} are read",
                    file=self.repository, remedy="do not trust it",
                )  # fmt: skip
            fetch([file for file in files if file.name == MANIFEST], folder, headers)
            files = [file for file in files if file.name in self._listed(folder / MANIFEST)]
        fetch(files, folder, headers)
        return folder if self.chosen is None else folder / self.chosen

    def _listed(self, manifest: Path) -> set[str]:
        try:
            listed = Manifest.model_validate_json(manifest.read_bytes(), strict=True).files
        except ValueError:
            raise PullError(
                "has a manifest.json that is not a bundle's", file=self.repository,
                remedy="it may need a later version of edge",
            ) from None  # fmt: skip
        return {MANIFEST, *(entry.path for entry in listed)}


def _hub() -> Any:
    """Import the package `huggingface_hub`. Raises PullError when it is not installed."""
    with packages_of("hub", "the hub", PullError):
        import huggingface_hub
        import huggingface_hub.utils
    return huggingface_hub


def _endpoint() -> str | None:
    """Return the current `HF_ENDPOINT`; the package reads it only once, on import."""
    return os.environ.get("HF_ENDPOINT") or None


def look_up(repository: str, revision: str | None, file: str | None = None) -> HubModel:
    """Look up a repository on the hub and choose the files to fetch.

    Args:
        repository: OWNER/NAME.
        revision: branch, tag or commit, or None for the newest.
        file: the GGUF file to take, or None.

    Raises:
        PullError: the repository, revision or file does not exist, access is denied, the hub
            cannot be reached, or the repository holds no readable checkpoint.
    """
    return _choose(repository, _ask(repository, revision), file)


def look_up_tokenizer(repository: str) -> HubModel:
    """Look up only the tokenizer files of a repository. Raises PullError."""
    info = _ask(repository, None)
    found = {each.name: each for each in _remote(repository, info)}
    if not (files := _tokenizer(found)):
        raise PullError(
            "has no tokenizer.json, tokenizer.model, tekken.json or vocab.json", file=repository
        )
    beside = [found[name] for name in _BESIDE if name in found]
    return HubModel(repository, str(info.sha), None, [*files, *beside])


def look_up_config(repository: str) -> HubModel:
    """Look up only the config files of a repository. Raises PullError."""
    info = _ask(repository, None)
    files = [each for each in _remote(repository, info) if each.name in _CONFIGS]
    if not any(file.name == _CONFIGS[0] for file in files):
        raise PullError(
            "has no config.json", file=repository, remedy="pull it, and ask about the file"
        )
    return HubModel(repository, str(info.sha), None, files)


def _ask(repository: str, revision: str | None) -> ModelInfo:
    """Return the hub's description of a repository. Raises PullError.

    The request is made here because the package reads a response of any length.
    """
    hub = _hub()
    from huggingface_hub.hf_api import ModelInfo

    named = repository if revision is None else f"{repository}@{revision}"
    place = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    start = (_endpoint() or hub.constants.ENDPOINT).rstrip("/")
    try:
        if hub.constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        told = ask(
            f"{start}/api/models/{repository}{place}?blobs=true",
            hub.utils.build_hf_headers(library_name="mamba-edge"),
            MAX_TOLD,
        )
    except HTTPError as problem:
        raise _refused(named, problem) from None
    except (OSError, HTTPException, ValueError) as problem:  # ValueError: HF_ENDPOINT is not a URL
        cause = getattr(problem, "reason", None) or problem  # urllib wraps the system's error
        told_of = getattr(cause, "strerror", None) or str(cause) or type(problem).__name__
        first = str(told_of).splitlines()[0]
        raise PullError(
            f"the hub cannot be reached: {first:.200}", file=named,
            remedy="check the network and HF_ENDPOINT, which names another hub; models already "
            "pulled run offline",
        ) from None  # fmt: skip
    try:
        made: ModelInfo = ModelInfo(**json.loads(told))  # type: ignore[no-untyped-call]
        return made
    except Exception as problem:  # the package raises various errors for malformed fields
        raise PullError(
            f"the hub's answer does not describe a repository: {problem!s:.200}", file=named,
            remedy="check what HF_ENDPOINT names",
        ) from None  # fmt: skip


def _refused(named: str, problem: HTTPError) -> PullError:
    code = problem.headers.get("X-Error-Code")
    if code == "RevisionNotFound":
        return PullError("has no such revision", file=named, remedy="leave it out for the newest")
    if code == "GatedRepo":
        return PullError(
            "requires that its terms are accepted", file=named,
            remedy="accept them on its page, and set HF_TOKEN to your access token",
        )  # fmt: skip
    if code == "RepoNotFound" or problem.code in (401, 404):
        return PullError(
            "is not on the hub, or private", file=named,
            remedy="check the spelling; for a private one set HF_TOKEN to your access token",
        )  # fmt: skip
    return PullError(f"the hub answered {problem.code}", file=named, remedy="try again later")


def _choose(repository: str, info: ModelInfo, file: str | None) -> HubModel:
    found = {each.name: each for each in _remote(repository, info)}
    texts = [*(found[name] for name in _TEXT if name in found), *_tokenizer(found)]
    licence = _licence(info)
    if file is None and MANIFEST in found and "config.json" not in found:
        return HubModel(repository, str(info.sha), licence, list(found.values()), is_bundle=True)
    if file is None and "config.json" in found and (weights := _weights(found)):
        return HubModel(repository, str(info.sha), licence, [*texts, *weights])
    offered = sorted(name for name in found if name.endswith(".gguf"))
    if file is not None and file not in offered:
        raise PullError(f"has no GGUF file {file!r:.100}", file=repository, remedy=_list(offered))
    if file is None and len(offered) > 1:
        raise PullError("has several GGUF files", file=repository, remedy=_list(offered))
    if not offered:
        raise PullError(
            "has no config.json with weights beside it, and no GGUF file", file=repository,
            remedy="safetensors, pytorch_model.bin and GGUF can be read",
        )  # fmt: skip
    chosen = file or offered[0]
    card = [found["README.md"]] if "README.md" in found else []
    return HubModel(repository, str(info.sha), licence, [*card, found[chosen]], chosen)


def _list(offered: list[str]) -> str:
    return f"choose one with --file: {some(offered, 8)}" if offered else "it has none"


def _tokenizer(found: dict[str, RemoteFile]) -> list[RemoteFile]:
    """Return the files of a repository's tokenizer; none if it has no known form."""
    of_forms = ([found[name] for name in found if form.fullmatch(name)] for form in _TOKENIZER)
    return next(filter(None, of_forms), [])


def _weights(found: dict[str, RemoteFile]) -> list[RemoteFile]:
    """Return the weight files of a checkpoint, safetensors before pickles.

    For a sharded checkpoint these are the index and every file named like a shard.
    """
    for name in _WEIGHTS:
        if name in found:
            return [found[name]]
        index, (stem, suffix) = f"{name}.index.json", name.rsplit(".", 1)
        if index in found:
            shards = [
                file
                for each, file in sorted(found.items())
                if each.startswith(f"{stem}-") and each.endswith(f".{suffix}")
            ]
            return [found[index], *shards]
    return []


def _remote(repository: str, info: ModelInfo) -> list[RemoteFile]:
    """Return the files of a repository, with sizes and hashes.

    Raises PullError for file names that lead out of the folder, and for a malformed commit, size or
    name.
    """
    siblings = info.siblings or []
    if len(siblings) > MAX_FILES:
        raise PullError(f"has {len(siblings)} files", file=repository, remedy="is it a model?")
    commit = isinstance(info.sha, str) and re.fullmatch(r"[0-9A-Za-z]{1,64}", info.sha)
    if not commit or any(type(each.size) is not int or each.size < 0 for each in siblings):
        raise PullError("the hub states no commit or sizes", file=repository,
                        remedy="check what HF_ENDPOINT names")  # fmt: skip
    files = []
    for each in siblings:
        path = PurePosixPath(str(each.rfilename))
        named = isinstance(each.rfilename, str) and not _UNNAMEABLE.search(each.rfilename)
        if not named or path.is_absolute() or ".." in path.parts:
            raise PullError(f"holds the file {each.rfilename!r:.100}, which leads out of it",
                            file=repository, remedy="do not trust it")  # fmt: skip
        url = _hub().hf_hub_url(repository, each.rfilename, revision=info.sha, endpoint=_endpoint())
        sha256 = each.lfs.sha256 if each.lfs is not None else None
        files.append(RemoteFile(each.rfilename, url, each.size or 0, sha256, each.blob_id))
    return files


def _licence(info: ModelInfo) -> str | None:
    stated: object = None
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        stated = info.card_data["license"] if info.card_data is not None else None
    return stated[:200] if isinstance(stated, str) and stated else None
