"""A model is asked whether it keeps packed examples apart, and is left as it was."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from ntl_lightning.probes import CannotPack, verify_packing

V = 40
TOKENS = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_LIKE = {**BLOCKS, "num_key_value_heads": 1, "intermediate_size": 32}
CAN_PACK = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    # With a window that is shorter than the examples.
    "mistral": {**LLAMA_LIKE, "sliding_window": 3},
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 3},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "gpt_neox": {**BLOCKS, "intermediate_size": 32},
    "mixtral": {**LLAMA_LIKE, "num_local_experts": 4},
}
CANNOT_PACK = {
    # Positions counted from the attention mask, or by distance along the row.
    "opt": {**BLOCKS, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 2},
    # A state that goes from example to example.
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    # A short convolution: in fresh weights the leak is below one thousandth of the logits.
    "lfm2": {
        **LLAMA_LIKE,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}


def built(model_type, settings, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **TOKENS, **settings)
    return AutoModelForCausalLM.from_config(config, **options)


def verify(model):
    verify_packing(model, V, torch.device("cpu"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CAN_PACK)
def test_a_model_that_masks_by_positions_can_be_packed(name, attention):
    verify(built(name, CAN_PACK[name], attn_implementation=attention))


@pytest.mark.parametrize("name", CANNOT_PACK)
def test_a_model_that_mixes_packed_examples_is_found_out(name):
    with pytest.raises(CannotPack, match=r"change by .* with the token ids of the example before"):
        verify(built(name, CANNOT_PACK[name]))


@pytest.mark.parametrize("name", ["opt", "bloom", "mpt", "mamba"])
def test_a_leak_that_is_no_larger_than_what_bfloat16_rounds_is_found_out(name):
    with pytest.raises(CannotPack, match="change by"):
        verify(built(name, CANNOT_PACK[name]).to(torch.bfloat16))


class CountsPositionsAlongTheRow(LlamaForCausalLM):
    """Masks by `position_ids`, but adds the place in the row, not in the example."""

    def forward(self, input_ids, position_ids=None, **settings):
        outputs = super().forward(input_ids, position_ids=position_ids, **settings)
        outputs.logits = outputs.logits + torch.arange(input_ids.shape[1])[:, None]
        return outputs


def test_a_model_that_keeps_examples_apart_but_counts_positions_on_is_found_out():
    model = CountsPositionsAlongTheRow(AutoConfig.for_model("llama", **TOKENS, **LLAMA_LIKE))
    with pytest.raises(
        CannotPack, match=r"logits of packed examples, .* differ by .* of their own"
    ):
        verify(model)


class RoundsByTheBatch(LlamaForCausalLM):
    """Logits that hang a little on the whole batch, as the rounding of expert layers may."""

    def forward(self, input_ids, **settings):
        outputs = super().forward(input_ids, **settings)
        outputs.logits = outputs.logits * (1 + 1e-6 * input_ids.sum())
        return outputs


def test_what_changes_alike_in_the_row_beside_is_rounding():
    model = RoundsByTheBatch(AutoConfig.for_model("llama", **TOKENS, **LLAMA_LIKE))
    verify(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_weights_in_bfloat16_and_mixed_precision_are_no_reason_to_refuse(name):
    verify(built(name, CAN_PACK[name]).to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        verify(built(name, CAN_PACK[name]))
        with pytest.raises(CannotPack, match="change by"):
            verify(built("bloom", CANNOT_PACK["bloom"]))


class WithoutPositions(LlamaForCausalLM):
    """Takes a mask and nothing else, as some models with code of their own do."""

    def forward(self, input_ids, attention_mask, use_cache):
        return super().forward(input_ids, attention_mask, use_cache=use_cache)


def test_a_model_that_takes_no_positions_is_found_out():
    model = WithoutPositions(AutoConfig.for_model("llama", **TOKENS, **LLAMA_LIKE))
    with pytest.raises(CannotPack, match=r"does not run on position_ids .* \(TypeError"):
        verify(model)


def test_a_model_is_left_as_it_was():
    model = built("gpt2", CAN_PACK["gpt2"]).train()
    model.transformer.drop.eval()
    before, state = [module.training for module in model.modules()], torch.get_rng_state()
    verify(model)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
