"""Other people's code as oracle: one loop with Hugging Face's weights computes what GPT-2 and Llama compute."""

import pytest
import torch
from helpers import build
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.tools.export import from_gpt2

SIZES = dict(vocab_size=67, block_size=24, n_layer=3, n_loop=1, n_head=4, n_embd=32, rule="none")


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Every weight random, biases and norms included, so that none of them can be lost unseen."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or ".ln" in name and "weight" in name else 0.0, 0.2)
    return model.double().eval()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=67, n_positions=24, n_layer=3, n_head=4, n_embd=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return randomised(GPT2LMHeadModel(config))


def llama(tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=67,
        max_position_embeddings=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        hidden_size=32,
        intermediate_size=88,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )
    return randomised(LlamaForCausalLM(config))


def from_llama(theirs: LlamaForCausalLM, tied: bool) -> LoopedGPT:
    """Its separate q, k, v and gate, up matrices are stacked here."""
    w = theirs.state_dict()
    state = {"wte.weight": w["model.embed_tokens.weight"], "final_norm.weight": w["model.norm.weight"]}
    if not tied:
        state["head.weight"] = w["lm_head.weight"]
    for i in range(3):
        layer, block = f"model.layers.{i}", f"blocks.{i}"
        state |= {
            f"{block}.attn_pre_norm.weight": w[f"{layer}.input_layernorm.weight"],
            f"{block}.attn.qkv.weight": torch.cat([w[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv"]),
            f"{block}.attn.proj.weight": w[f"{layer}.self_attn.o_proj.weight"],
            f"{block}.mlp_pre_norm.weight": w[f"{layer}.post_attention_layernorm.weight"],
            f"{block}.mlp.w_in.weight": torch.cat([w[f"{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up")]),
            f"{block}.mlp.w_out.weight": w[f"{layer}.mlp.down_proj.weight"],
        }
    model = build(LoopedConfig(tie_embeddings=tied, **SIZES))
    model.load_state_dict(state)
    return model


def text(length: int = 24) -> Tensor:
    return torch.randint(67, (2, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("length", [1, 24])
def test_one_loop_with_gpt2s_weights_gives_gpt2s_logits(length):
    theirs = gpt2()
    torch.testing.assert_close(from_gpt2(theirs)(text(length))[0], theirs(text(length)).logits, rtol=1e-10, atol=1e-10)


def test_one_loop_with_gpt2s_weights_gives_gpt2s_loss_and_gradient():
    """Theirs shifts the labels itself; ours takes the shifted targets."""
    theirs, idx = gpt2(), text()
    ours = from_gpt2(theirs)
    loss = ours(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())[1]
    expected = theirs(idx, labels=idx).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # theirs takes the loss in float32
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.wte.weight.grad, theirs.transformer.wte.weight.grad, rtol=1e-5, atol=1e-6)


def test_one_loop_with_gpt2s_weights_writes_gpt2s_text():
    theirs, idx = gpt2(), text(5)
    expected = theirs.generate(idx, max_new_tokens=15, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(from_gpt2(theirs).generate(idx, 15, temperature=0), expected)


def test_both_count_the_same_parameters():
    theirs = gpt2()
    assert from_gpt2(theirs).num_params() == theirs.num_parameters()


@pytest.mark.parametrize("tied", [True, False])
def test_one_loop_with_llamas_weights_gives_llamas_logits(tied):
    """RMSNorm, rotary positions in half-split pairs, SwiGLU. Its angles and ours are rounded to float32."""
    theirs = llama(tied)
    torch.testing.assert_close(from_llama(theirs, tied)(text())[0], theirs(text()).logits, rtol=1e-4, atol=1e-4)
