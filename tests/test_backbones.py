import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from ntl_lightning.backbones import FromConfig, Pretrained
from ntl_lightning.numbers import ArithmeticTokenizer, PretrainedTokenizer

SMALL = {
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    },
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "qwen2": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "bart": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return ArithmeticTokenizer().load()


@pytest.mark.parametrize("model_type", SMALL)
def test_a_random_model_has_the_fields_asked_for_and_the_tokenizers_ids(model_type, tokenizer):
    model = FromConfig(model_type, SMALL[model_type]).build(tokenizer)
    config = model.config
    for key, value in SMALL[model_type].items():
        assert getattr(config, key) == value
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.is_encoder_decoder == (model_type in ("t5", "bart"))
    if config.is_encoder_decoder:
        assert config.decoder_start_token_id == tokenizer.pad_token_id


def test_random_weights_come_from_torchs_random_state(tokenizer):
    def weights(seed):
        torch.manual_seed(seed)
        return FromConfig("llama", SMALL["llama"]).build(tokenizer).lm_head.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_named_ids_and_widths_win_over_the_tokenizers(tokenizer):
    config = FromConfig("t5", {**SMALL["t5"], "vocab_size": 200, "pad_token_id": 3}).config(
        tokenizer
    )
    assert (config.vocab_size, config.pad_token_id) == (200, 3)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (FromConfig("lama", {}), r"model\.backbone\.model_type: .* no architecture 'lama'"),
        (FromConfig("t5", {"d_modl": 8}), r"model\.backbone\.settings: t5 has no field d_modl"),
        (FromConfig("t5", {"vocab_size": 50}), r"vocab_size=50 is smaller than the tokenizer"),
        (FromConfig("llama", {"hidden_size": "x"}), r"settings do not fit llama: .*hidden_size"),
        (FromConfig("bert", {}), r"bert is an encoder that sees the answer"),
        (FromConfig("vit", {}), r"no language model of type 'vit'"),
    ],
)
def test_what_cannot_be_built_is_named(backbone, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        backbone.build(tokenizer)


def save_tiny_t5(folder, width):
    config = T5Config(
        vocab_size=width,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("added", [0, 1, 40])
def test_a_head_wider_than_the_tokenizer_is_never_cut(assets, tmp_path, added):
    """32100 tokens and 32128 rows: the rows stay, and grow only past 32128."""
    original = save_tiny_t5(tmp_path / "model", 32128)
    loaded_tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5")).load()
    loaded_tokenizer.add_tokens([f"<new{i}>" for i in range(added)])
    model = Pretrained(str(tmp_path / "model")).build(loaded_tokenizer)
    rows = max(32128, 32100 + added)
    assert model.lm_head.weight.shape[0] == rows
    assert model.get_input_embeddings().weight.shape[0] == rows
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    if rows == 32128:
        original.load_state_dict(again.state_dict())
    kept = again.get_input_embeddings().weight[:32128]
    torch.testing.assert_close(kept, original.get_input_embeddings().weight, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_load_in_the_dtype_asked_for(tmp_path, dtype, tokenizer):
    FromConfig("llama", SMALL["llama"]).build(tokenizer).bfloat16().save_pretrained(tmp_path / "m")
    model = Pretrained(str(tmp_path / "m"), dtype=dtype).build(tokenizer)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_a_folder_may_be_named_by_a_variable(tmp_path, monkeypatch, tokenizer):
    FromConfig("llama", SMALL["llama"]).build(tokenizer).save_pretrained(tmp_path / "m")
    monkeypatch.setenv("NTL_MODELS", str(tmp_path))
    assert Pretrained("${NTL_MODELS}/m").build(tokenizer).config.model_type == "llama"


@pytest.mark.parametrize("name", ["no/such-model", "{tmp}/missing", "{tmp}"])
def test_a_missing_model_is_an_error_that_says_where_it_was_looked_for(name, tmp_path, tokenizer):
    path = name.format(tmp=tmp_path)
    with pytest.raises(
        ValueError, match=r"model\.backbone\.name_or_path: no model could be loaded"
    ):
        Pretrained(path).build(tokenizer)


def test_a_real_pretrained_model_continues_a_story(assets):
    """The real 260k-parameter model, its tokenizer, and greedy decoding through our generate."""
    from ntl_lightning.evaluation import Generation, generate
    from ntl_lightning.numbers import decode_answer

    folder = str(assets / "models/stories260k")
    loaded_tokenizer = PretrainedTokenizer(folder).load()
    model = Pretrained(folder).build(loaded_tokenizer).eval()
    ids = torch.tensor([loaded_tokenizer("Once upon a time")["input_ids"]])
    answers, hit_limit = generate(
        model, loaded_tokenizer, ids, torch.ones_like(ids), Generation(), max_new_tokens=60
    )
    assert hit_limit == [True]
    text = decode_answer(loaded_tokenizer, answers[0])
    assert text.startswith(", there was a little girl named Lily")


def test_an_encoder_made_a_decoder_on_purpose_is_causal(tokenizer):
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "is_decoder": True,
    }
    model = FromConfig("bert", settings).build(tokenizer).eval()
    one, other = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 9]])
    torch.testing.assert_close(model(one).logits[:, :2], model(other).logits[:, :2])
