"""Fields of config.json: which are ignored, used, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge.apps.cli import app
from edge.errors import CheckpointError
from edge.export.checkpoint import FAMILIES, open_checkpoint
from edge.export.checkpoint.known import BOOKKEEPING, CHANGING, UNREAD
from edge.export.exporter import export_checkpoint
from tests.checkpoints import edit_config, refusal
from tests.transformers_checkpoints import save_llama, save_mamba

STRANGE = {"zeta_mode": 3, "aux_head": True, "colour": None}


def test_what_others_wrote_down_is_no_news(tmp_path: Path) -> None:
    """A real model saved again by transformers 5 was refused for the first two."""
    edit_config(
        save_llama(tmp_path), _model_name_or_path="x", unk_token_id=0, transformers_version="5.23",
        _commit_hash="0f", torch_dtype="bfloat16", num_beams=1, auto_map={"AutoModel": "a.B"},
    )  # fmt: skip
    assert open_checkpoint(tmp_path, strict=True).unknown_fields == ()


def test_unknown_fields_are_told_together(tmp_path: Path) -> None:
    edit_config(save_mamba(tmp_path), **STRANGE)
    assert open_checkpoint(tmp_path).unknown_fields == ("aux_head", "zeta_mode")
    notice = export_checkpoint(tmp_path, tmp_path / "bundle", verify=False).notice
    assert notice is not None
    assert "aux_head, zeta_mode" in notice


def test_strict_refuses_them(tmp_path: Path) -> None:
    source = save_mamba(tmp_path / "checkpoint")
    edit_config(source, **STRANGE)
    with pytest.raises(CheckpointError, match="aux_head, zeta_mode") as refused:
        export_checkpoint(source, tmp_path / "bundle", strict=True)
    assert refused.value.field == "aux_head" and refused.value.remedy
    run = CliRunner().invoke
    command = ["export", str(source), "-o", str(tmp_path / "bundle"), "--no-verify"]
    assert isinstance(run(app, [*command, "--strict"]).exception, CheckpointError)
    done = run(app, command)
    assert done.exit_code == 0 and "aux_head, zeta_mode" in done.stderr


def test_what_changes_a_model_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    edit_config(save_llama(tmp_path), logit_scale=2.0, num_experts=8, sliding_window=8, zeta=1)
    message = str(refusal(tmp_path))
    for said in ("logit_scale: is 2.0; only null or 1", "num_experts: is 8; only null or 1",
                 "sliding_window: is 8; only null"):  # fmt: skip
        assert said in message
    assert "zeta" not in message
    edit_config(tmp_path, logit_scale=1.0, num_experts=1, sliding_window=None)
    assert open_checkpoint(tmp_path).unknown_fields == ("zeta",)


def test_a_family_that_is_not_read_is_called_by_its_name(tmp_path: Path) -> None:
    edit_config(save_llama(tmp_path), model_type="gemma4", architectures=["Gemma4ForCausalLM"])
    error = refusal(tmp_path)
    assert "Gemma 4" in error.message and "near" not in str(error)
    assert "\n" not in str(error) and "docs/use/models.md" in str(error)


@pytest.mark.parametrize(
    ("named", "said", "near"),
    [
        ("lama", 'is "lama"', "model_type llama."),
        ("Qwen3.5", 'is "Qwen3.5"', "model_type qwen3_5 or qwen3_5_text;"),
        (5, "is 5", None),
        (None, 'is missing, and architectures is ["Foo"]', None),
    ],
)
def test_an_unknown_family_is_told_in_a_line_with_those_spelt_alike(
    tmp_path: Path, named: object, said: str, near: str | None
) -> None:
    edit_config(save_llama(tmp_path), model_type=named, architectures=["Foo"])
    error = refusal(tmp_path)
    assert error.field == "model_type" and error.message.startswith(said)
    assert len(str(error).replace(str(tmp_path), "").splitlines()) == 1
    assert near in str(error) if near else "near" not in str(error)


def test_a_name_says_one_thing() -> None:
    assert not BOOKKEEPING & CHANGING.keys()
    assert not UNREAD.keys() & {family.name for family in FAMILIES}
