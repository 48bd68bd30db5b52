"""The torch network against transformers, on checkpoints that transformers itself wrote.

Logits and states, after one run of 140 tokens, after runs of odd lengths, and token by token.

Three things transformers 5.23 does not do, and the tests therefore do not ask of it: Mamba-1
continues no state when given more than one token (it starts again from zeros); Mamba-2's step
ignores `time_step_limit`; Bamba counts positions from zero in every call unless told them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from edge.export.checkpoint import open_checkpoint
from edge.export.network import Network, NetworkState
from tests.checkpoints import VOCABULARY
from tests.transformers_checkpoints import (
    save_arcee,
    save_bamba,
    save_beside_images,
    save_falcon_h1,
    save_falcon_mamba,
    save_gemma,
    save_gemma2,
    save_gemma3,
    save_gpt_neox,
    save_granite,
    save_granite_hybrid,
    save_jamba,
    save_lfm2,
    save_lfm3,
    save_llama,
    save_mamba,
    save_mamba2,
    save_mistral,
    save_nemotron_h,
    save_olmo2,
    save_olmo3,
    save_olmo_hybrid,
    save_phi3,
    save_qwen2,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_5_moe,
    save_smollm3,
    save_with_experts,
    save_zamba,
    save_zamba2,
)

RUNS = (1, 7, 64, 65, 3)
LENGTH = sum(RUNS)
# more steps than any convolution or window is long; the first ones are in a test of their own
STEPS, FIRST = (LENGTH - 9, *[1] * 9), (5, *[1] * 8)
Save = Callable[[Path], Path]

CASES: dict[str, Save] = {
    "arcee": save_arcee,
    "arcee-biases-tied": partial(
        save_arcee, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12,
        rms_norm_eps=1e-2, num_key_value_heads=1,
    ),
    "mamba": save_mamba,
    "mamba-biases-untied": partial(
        save_mamba, use_bias=True, use_conv_bias=False, tie_word_embeddings=False
    ),
    "mamba-odd-shapes": partial(
        save_mamba, hidden_size=20, state_size=7, conv_kernel=2, time_step_rank=3, expand=3,
        layer_norm_epsilon=1e-2,
    ),
    "mamba2-one-group": partial(save_mamba2, n_groups=1),
    "mamba2-four-groups": partial(save_mamba2, n_groups=4, layer_norm_epsilon=1e-2),
    "mamba2-biases-tied": partial(
        save_mamba2, use_bias=True, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=True
    ),
    "bamba": save_bamba,
    "bamba-biases-tied": partial(
        save_bamba, attention_bias=True, mlp_bias=True, mamba_proj_bias=True,
        mamba_conv_bias=False, tie_word_embeddings=True, rms_norm_eps=1e-2,
    ),
    "bamba-attention-first-full-rope": partial(
        save_bamba, attn_layer_indices=[0, 2], num_key_value_heads=1, mamba_n_groups=1,
        rope_parameters={
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0
        },
    ),
    "gpt-neox": save_gpt_neox,
    "gpt-neox-in-turn-tanh-tied": partial(
        save_gpt_neox, use_parallel_residual=False, hidden_act="gelu_new", attention_bias=False,
        tie_word_embeddings=True, layer_norm_eps=1e-2,
        rope_parameters={
            "rope_type": "linear", "factor": 3.0, "rope_theta": 500.0, "partial_rotary_factor": 1.0
        },
    ),
    "llama": save_llama,
    "llama-biases-tied-wide-heads-scaled": partial(
        save_llama, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12,
        num_key_value_heads=1, rms_norm_eps=1e-2,
        # of the six frequencies two stay, two are divided and two lie between
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "llama-yarn": partial(
        save_llama, head_dim=16, attention_bias=True,
        # of the eight frequencies two stay, three are divided and three lie between
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 8,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": partial(save_mistral, head_dim=16),
    "phi3": save_phi3,
    "qwen2": save_qwen2,
    "qwen3": save_qwen3,
    "qwen3-biases-tied-scaled": partial(
        save_qwen3, attention_bias=True, tie_word_embeddings=True, head_dim=16, rms_norm_eps=1e-2,
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 3.0, "attention_factor": 1.3,
            "original_max_position_embeddings": 100, "truncate": False, "beta_slow": 0.5,
        },
    ),
    "olmo2-biases-tied": partial(
        save_olmo2, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1,
        rms_norm_eps=1e-2, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "olmo3": save_olmo3,
    "gemma-biases-untied": partial(
        save_gemma, attention_bias=True, tie_word_embeddings=False, num_key_value_heads=1,
        rms_norm_eps=1e-2,
    ),
    "gemma2": partial(save_gemma2, sliding_window=7),
    "gemma2-without-caps": partial(
        save_gemma2, attn_logit_softcapping=None, final_logit_softcapping=None,
        query_pre_attn_scalar=16,
    ),
    "gemma3": save_gemma3,
    "granite": save_granite,
    "granite-biases-untied": partial(
        save_granite, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "granite-hybrid": save_granite_hybrid,
    "granite-hybrid-rope-biases-untied": partial(
        save_granite_hybrid, position_embedding_type="rope", attention_bias=True,
        mamba_proj_bias=True, mamba_conv_bias=False, tie_word_embeddings=False, mamba_n_groups=1,
        layer_types=["full_attention", "linear_attention", "full_attention"], rms_norm_eps=1e-2,
    ),
    "falcon-mamba": save_falcon_mamba,
    "falcon-mamba-biases-untied": partial(
        save_falcon_mamba, use_bias=True, use_conv_bias=False, tie_word_embeddings=False,
        mixer_rms_eps=1e-2, time_step_rank=3, expand=3, conv_kernel=2,
    ),
    "falcon-h1": save_falcon_h1,
    "falcon-h1-normed-behind-tied": partial(
        save_falcon_h1, mamba_rms_norm=True, mamba_norm_before_gate=False,
        tie_word_embeddings=True, mamba_n_groups=2, rms_norm_eps=1e-2,
    ),
    "falcon-h1-normed-before-biases": partial(
        save_falcon_h1, mamba_rms_norm=True, mamba_norm_before_gate=True, attention_bias=True,
        mlp_bias=True, projectors_bias=True, mamba_conv_bias=False, mamba_n_groups=2,
    ),
    "jamba": save_jamba,
    "jamba-biases-tied": partial(
        save_jamba, mamba_proj_bias=True, mamba_conv_bias=False, tie_word_embeddings=True,
        mamba_dt_rank=3, mamba_expand=3, attn_layer_period=2, attn_layer_offset=0,
        rms_norm_eps=1e-2, num_key_value_heads=1,
    ),
    "lfm2": save_lfm2,
    "lfm2-biases-untied": partial(
        save_lfm2, conv_bias=True, conv_L_cache=4, tie_word_embeddings=False, norm_eps=1e-2,
        block_auto_adjust_ff_dim=False, num_key_value_heads=1,
        layer_types=["full_attention", "conv", "conv"],
    ),
    "lfm3": save_lfm3,
    "lfm3-biases-untied-stretched": partial(
        save_lfm3, attention_bias=True, conv_bias=True, conv_L_cache=4, num_key_value_heads=1,
        tie_word_embeddings=False, norm_eps=1e-2, head_dim=12, rope_parameters={
            "sliding_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 200.0, "partial_rotary_factor": 0.4,
                "factor": 3.0,
            },
        },
    ),
    "lfm3-plain": partial(
        save_lfm3, use_sandwich_norm=False, use_attention_gate=False,
        rope_parameters={
            kind: {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": share}
            for kind, share in (("sliding_attention", 0.0), ("full_attention", 1.0))
        },
    ),
    "nemotron-h": save_nemotron_h,
    "zamba-four-heads-biases": partial(
        save_zamba, n_mamba_heads=4, mamba_proj_bias=True, mamba_conv_bias=False,
        mamba_dt_rank="auto", layers_block_type=["hybrid", "hybrid", "mamba", "mamba"],
    ),
    "zamba": save_zamba,
    "zamba2": save_zamba2,
    "zamba2-two-blocks-biases-plain": partial(
        save_zamba2, num_mem_blocks=2, add_bias_linear=True, use_mem_rope=False, mamba_ngroups=1,
        use_shared_attention_adapter=False, layers_block_type=["hybrid"] * 3,
    ),
    "nemotron-h-biases": partial(
        save_nemotron_h, use_bias=True, mlp_bias=True, use_conv_bias=False, conv_kernel=3,
        n_groups=1, layer_norm_epsilon=1e-2,
        layers_block_type=["mlp", "full_attention", "linear_attention", "mlp"],
    ),
    "granite-experts": partial(
        save_granite_hybrid, num_local_experts=5, num_experts_per_tok=5, intermediate_size=12
    ),
    "jamba-experts": partial(save_jamba, num_experts=4, expert_layer_offset=0),
    "nemotron-h-latent": partial(
        save_nemotron_h, n_routed_experts=6, moe_latent_size=16, norm_topk_prob=False,
        moe_intermediate_size=20, moe_shared_expert_intermediate_size=40, num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
    "lfm2-experts-plain": partial(
        save_with_experts, family="lfm2_moe", num_dense_layers=0, use_expert_bias=False,
        norm_topk_prob=False, layer_types=["conv", "full_attention", "conv"],
    ),
    "qwen3-experts-normalised": partial(
        save_with_experts, family="qwen3_moe", mlp_only_layers=[1], norm_topk_prob=True,
        head_dim=16,
    ),
    "qwen2-experts": partial(
        save_with_experts, family="qwen2_moe", shared_expert_intermediate_size=24,
        decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True,
    ),
    "olmo-hybrid": save_olmo_hybrid,
    "olmo-hybrid-plain": partial(
        save_olmo_hybrid, linear_allow_neg_eigval=False, attention_bias=True, rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": None}, linear_num_value_heads=8,
        linear_conv_kernel_dim=3, num_key_value_heads=1,
        layer_types=["full_attention", "linear_attention"],
    ),
    "qwen3.5": save_qwen3_5,
    "qwen3.5-biases-tied": partial(
        save_qwen3_5, attention_bias=True, tie_word_embeddings=True, embedding=0.2,
        rms_norm_eps=3e-2, linear_conv_kernel_dim=3, linear_num_key_heads=4, layer_types=None,
        num_key_value_heads=1,
        num_hidden_layers=4, head_dim=24,
    ),
    "qwen3.5-beside-images": save_beside_images,
    "qwen3.5-experts": partial(save_qwen3_5_moe, stacked=False, rms_norm_eps=1e-2),
    "qwen3.5-experts-in-stacks": partial(
        save_qwen3_5_moe, stacked=True, num_experts_per_tok=2, rms_norm_eps=1e-2,
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
    ),
    "qwen3-next": partial(
        save_with_experts, family="qwen3_next", shared_expert_intermediate_size=24,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        mlp_only_layers=[1], norm_topk_prob=False, linear_num_value_heads=6, rms_norm_eps=1e-1,
    ),
    "smollm3": save_smollm3,
    "smollm3-given-biases-untied": partial(
        save_smollm3, no_rope_layers=[0, 1], attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False, rms_norm_eps=1e-2,
    ),
}  # fmt: skip


class Pair:
    """One checkpoint, read by transformers and by us."""

    def __init__(self, path: Path) -> None:
        self.theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.network = load_network(path)
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        if self.network.config.family in ("zamba", "zamba2"):
            # a norm of what attention gives, small as that may be, makes much of rounding in fp32
            self.theirs, self.network = self.theirs.double(), self.network.double()
        self.whole = self.run_theirs((LENGTH,))

    @torch.no_grad()
    def run_theirs(self, runs: tuple[int, ...]) -> tuple[Tensor, Any]:
        attends = self.network.config.has_attention
        cache_name = "past_key_values" if attends else "cache_params"
        logits, cache, start = [], None, 0
        for length in runs:
            positions = torch.arange(start, start + length)[None]
            where = {"position_ids": positions} if attends else {}
            out = self.theirs(
                self.tokens[:, start : start + length], use_cache=True, **where,
                **({cache_name: cache} if cache is not None else {}),
            )  # fmt: skip
            logits.append(out.logits)
            cache = getattr(out, cache_name)
            start += length
        return torch.cat(logits, 1), cache

    @torch.no_grad()
    def run_ours(self, runs: tuple[int, ...]) -> tuple[Tensor, NetworkState]:
        logits, state, start = [], None, 0
        for length in runs:
            out, state = self.network(self.tokens[:, start : start + length], state)
            logits.append(out)
            start += length
        assert state is not None
        return torch.cat(logits, 1), state


def load_network(path: Path) -> Network:
    checkpoint = open_checkpoint(path)
    network = Network(checkpoint.config).eval()
    network.load_canonical(dict(checkpoint.tensors()))
    return network


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.to(theirs.dtype), theirs, atol=1e-4, rtol=0)


def rotating_first(size: int, turned: int) -> Tensor:
    """Where our heads' values lie in theirs, of whose halves the first `turned / 2` rotate."""
    halves = torch.arange(size).view(2, -1)
    return torch.cat([halves[:, : turned // 2].flatten(), halves[:, turned // 2 :].flatten()])


def compare_states(pair: Pair, ours: NetworkState, theirs: Any) -> None:
    """Theirs: conv [B, C, K], Mamba-1 state [B, E, N], Mamba-2 state and KV cache as ours."""
    layers = pair.network.config.layers
    # what lies beside experts is theirs and no layer; nor does a block end with one that is aside
    beside = ("mlp", "experts")
    own = [at for at, y in enumerate(layers) if y.kind not in beside or not y.is_parallel]
    ends = [not layers[at].is_aside for at in own]
    per_block = sum(ends) // len(theirs.layers)
    compared = 0
    for place, index in enumerate(own):
        layer, state = layers[index], ours.layers[index]
        cached = theirs.layers[sum(ends[:place]) // per_block]
        if layer.kind in ("mamba1", "mamba2"):
            close(state["conv_state"], cached.conv_states[0][..., 1:].transpose(1, 2))
            recurrent = cached.recurrent_states[0]
            if pair.network.config.family == "zamba":  # by head
                recurrent = recurrent.flatten(1, 2)
            assert recurrent.abs().max() > 0.1, "a state of nothing proves nothing"
            close(state["ssm_state"], recurrent.mT if layer.kind == "mamba1" else recurrent)
            compared += 1
        elif layer.kind == "gated_deltanet":
            close(state["conv_state"], cached.conv_states[0][..., 1:].transpose(1, 2))
            recurrent = cached.recurrent_states[0]
            assert recurrent.abs().max() > 0.1, "a state of nothing proves nothing"
            close(state["ssm_state"], recurrent.mT)
            compared += 1
        elif layer.kind == "shortconv":
            close(state["conv_state"], cached.conv_states[0][..., 1:].transpose(1, 2))
        elif layer.kind == "attention":
            assert state["key_cache"].shape[2] == ours.position
            # theirs has what a window needs of the past, and ours all of it
            kept = ours.position if layer.window is None else min(ours.position, layer.window - 1)
            assert cached.keys.shape[2] == kept
            keys = cached.keys
            if pair.network.config.family == "lfm3" and layer.rope is not None:
                keys = keys[..., rotating_first(layer.head_dim, layer.rope.dim)]
            close(state["key_cache"][:, :, -kept:], keys)
            close(state["value_cache"][:, :, -kept:], cached.values)
            compared += 1
    assert compared == sum(layer.recurrent or layer.attends for layer in layers)


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(CASES[request.param](tmp_path_factory.mktemp("checkpoint")))


@pytest.mark.parametrize("runs", [(LENGTH,), RUNS, STEPS], ids=["whole", "odd", "steps"])
def test_logits_and_states_equal_one_run_of_transformers(pair: Pair, runs: tuple[int, ...]) -> None:
    theirs, their_state = pair.whole
    ours, our_state = pair.run_ours(runs)
    assert our_state.position == LENGTH
    close(ours, theirs)
    compare_states(pair, our_state, their_state)


def test_logits_and_states_equal_transformers_token_by_token(pair: Pair) -> None:
    theirs, their_state = pair.run_theirs(FIRST)
    ours, our_state = pair.run_ours(FIRST)
    close(ours, theirs)
    compare_states(pair, our_state, their_state)


def test_odd_runs_equal_odd_runs_of_transformers(pair: Pair) -> None:
    if pair.network.config.family in ("mamba", "falcon_mamba", "jamba", "zamba"):
        pytest.skip("transformers' Mamba-1 continues no state over more than one token")
    theirs, their_state = pair.run_theirs(RUNS)
    ours, our_state = pair.run_ours(RUNS)
    close(ours, theirs)
    compare_states(pair, our_state, their_state)


@pytest.mark.parametrize("save", [save_mamba2, save_bamba])
def test_the_step_size_is_limited_in_runs_and_steps_alike(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    pair = Pair(save(tmp_path, time_step_limit=(0.05, 0.3)))
    theirs, their_state = pair.whole
    for runs in ((LENGTH,), RUNS, STEPS):
        ours, our_state = pair.run_ours(runs)
        close(ours, theirs)
        compare_states(pair, our_state, their_state)
    unlimited = Pair(save(tmp_path / "unlimited")).run_ours((LENGTH,))[0]
    assert (unlimited - theirs).abs().max() > 0.1, "the limit must matter for this to prove it"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_checkpoint_widened_to_fp32_equals_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    pair = Pair(save_mamba2(tmp_path, dtype=dtype))
    close(pair.run_ours((LENGTH,))[0], pair.whole[0])
