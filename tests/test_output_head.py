"""OutputHead: hidden states and output matrix give the model's own logits, or it says why not."""

import copy
import os
import random

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ntl_lightning.losses import CrossEntropy, Objective, Wasserstein
from ntl_lightning.numbers import NumberVocabulary
from ntl_lightning.output_head import OutputHead, Projection, UnknownHead

V = 40

LLAMA_LIKE = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5_LIKE = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
BART_LIKE = {
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
MODELS = {
    "t5_tied": ("t5", {**T5_LIKE, "scale_decoder_outputs": True}),
    "t5_untied": ("t5", {**T5_LIKE, "tie_word_embeddings": False}),
    "bart": ("bart", BART_LIKE),
    "gpt2": ("gpt2", {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "gptj": ("gptj", {"vocab_size": V, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}),
    "llama": ("llama", LLAMA_LIKE),
    "qwen2_tied": ("qwen2", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "phi": ("phi", LLAMA_LIKE),
    "granite": ("granite", {**LLAMA_LIKE, "logits_scaling": 7.0}),
    "cohere": ("cohere", {**LLAMA_LIKE, "logit_scale": 0.3}),
    "gemma2": ("gemma2", {**LLAMA_LIKE, "head_dim": 8, "final_logit_softcapping": 3.0}),
    "bert_decoder": (
        "bert",
        {k: v for k, v in LLAMA_LIKE.items() if k != "num_key_value_heads"} | {"is_decoder": True},
    ),
}


def built(model_type, settings):
    config = AutoConfig.for_model(model_type, **settings)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config)
    # Far from zero, so that scaling, capping and biases are seen.
    generator = torch.Generator().manual_seed(1)
    for tensor in [*model.get_output_embeddings().parameters(), *buffers(model)]:
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def buffers(model):
    return [b for name, b in model.named_buffers() if name.endswith("final_logits_bias")]


@pytest.fixture(params=MODELS)
def model(request):
    return built(*MODELS[request.param])


def inputs_of(model):
    ids = torch.randint(3, V, (2, 8), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5].clone()
    return inputs


def captured(head, inputs):
    seen = []
    head.loss(lambda p: seen.append(p) or p.hidden.sum() * 0, **inputs)
    (projection,) = seen
    return projection


def largest_error(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def labels_of(inputs):
    shape = inputs.get("decoder_input_ids", inputs["input_ids"]).shape
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(3))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def objective():
    vocabulary = NumberVocabulary.from_values({20 + i: float(i) for i in range(10)}, width=V)
    return Objective([CrossEntropy(), Wasserstein(weight=0.5)], vocabulary)


def number_loss(projection, labels):
    return (
        objective()
        .from_hidden(
            projection.hidden,
            projection.weight,
            labels,
            projection.bias,
            scale=projection.scale,
            soft_cap=projection.soft_cap,
            low_rank=projection.low_rank,
        )
        .loss
    )


def assert_same_gradients(model, head, inputs, tolerance=1e-5):
    labels = labels_of(inputs)
    labels[0, 0] = -100
    expected_loss = objective()(model(**inputs).logits, labels).loss
    expected = gradients(model, expected_loss)
    loss = head.loss(lambda p: number_loss(p, labels), **inputs)
    found = gradients(model, loss)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert found.keys() == expected.keys()
    # A bias of keys has no gradient at all; what is there instead is rounding of the others.
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        own = max(gradient.abs().max().item(), 1e-3 * largest)
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance * own)


def test_hidden_states_times_output_matrix_are_the_models_logits(model):
    inputs = inputs_of(model)
    model.eval()
    head = OutputHead(model)
    head.verify(**inputs)
    with torch.no_grad():
        own = model(**inputs).logits
        projection = captured(head, inputs)
    assert own.abs().max() > 0.1
    assert projection.weight is model.get_output_embeddings().weight
    assert largest_error(projection.logits(), own) < 1e-6


def test_a_loss_from_hidden_states_and_its_gradient_are_those_of_the_logits(model):
    inputs = inputs_of(model)
    model.eval()
    head = OutputHead(model)
    head.verify(**inputs)
    assert_same_gradients(model, head, inputs)


@pytest.mark.parametrize(
    ("name", "scale", "soft_cap"),
    [
        ("llama", 1.0, None),
        ("granite", 1 / 7, None),
        ("cohere", 0.3, None),
        ("gemma2", 1.0, 3.0),
    ],
)
def test_what_happens_behind_the_head_is_measured(name, scale, soft_cap):
    model = built(*MODELS[name]).eval()
    head = OutputHead(model)
    head.verify(**inputs_of(model))
    projection = captured(head, inputs_of(model))
    assert projection.scale == pytest.approx(scale, rel=1e-6)
    assert projection.soft_cap == soft_cap


def test_only_the_logits_kept_reach_the_loss():
    model = built(*MODELS["llama"]).eval()
    inputs = {**inputs_of(model), "logits_to_keep": 3}
    head = OutputHead(model)
    head.verify(**inputs)
    projection = captured(head, inputs)
    assert projection.hidden.shape == (2, 3, 16)
    assert largest_error(projection.logits(), model(**inputs).logits) < 1e-6


def test_positions_at_the_front_can_be_left_out():
    model = with_lora(built(*MODELS["llama"]), "lm_head").eval()
    inputs = inputs_of(model)
    shorter = captured(OutputHead(model), inputs).without_first(3)
    assert largest_error(shorter.logits(), model(**inputs).logits[:, 3:]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["t5_tied", "granite", "gemma2", "bart"])
def test_weights_in_other_dtypes_are_within_their_rounding(name, dtype):
    model = built(*MODELS[name]).eval().to(dtype)
    head = OutputHead(model)
    head.verify(**inputs_of(model))
    with torch.no_grad():
        error = largest_error(
            captured(head, inputs_of(model)).logits(), model(**inputs_of(model)).logits
        )
    assert error <= 4 * torch.finfo(dtype).eps


def test_under_autocast_the_first_step_after_the_check_has_all_its_gradients():
    model = built(*MODELS["llama"]).eval()
    inputs = inputs_of(model)
    labels = inputs["input_ids"]
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, cross_entropy(model(**inputs).logits, labels))
    with torch.autocast("cpu", torch.bfloat16):
        head = OutputHead(model)
        head.verify(**inputs)
        loss = head.loss(lambda p: cross_entropy(p.logits(), labels), **inputs)
    found = gradients(model, loss)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in expected.items():
        assert largest_error(found[name], gradient) < 1e-2


def test_the_check_leaves_random_state_modes_and_settings_as_they_are():
    settings = {**LLAMA_LIKE, "attention_dropout": 0.5}
    model = built("llama", settings).train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    generation, config = model.generation_config.to_dict(), model.config.to_dict()
    weights = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    OutputHead(model).verify(**inputs_of(model))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert (model.generation_config.to_dict(), model.config.to_dict()) == (generation, config)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name])
    assert torch.is_grad_enabled()
    assert "forward" not in vars(model.lm_head)
    assert model(**inputs_of(model)).logits.requires_grad


def test_a_failing_loss_leaves_the_model_as_it_was():
    model = built(*MODELS["bart"]).eval()
    head, inputs = OutputHead(model), inputs_of(model)
    expected = model(**inputs).logits
    with pytest.raises(ZeroDivisionError):
        head.loss(lambda p: 1 / 0, **inputs)
    assert torch.equal(model(**inputs).logits, expected)


# Heads that are something else


def replaced(model, forward):
    """The model with another forward of its class, given the usual one."""
    kind = type(model)
    model.__class__ = type("Changed", (kind,), {"forward": forward(kind.forward)})
    return model


def changed_logits(change):
    def forward(usual):
        def changed(self, **inputs):
            output = usual(self, **inputs)
            output.logits = change(self, output.logits)
            return output

        return changed

    return forward


def add_bias_by_token(self, logits):
    return logits + torch.linspace(0, 1, V)[: logits.shape[-1]]


def forbid_a_token(self, logits):
    if logits.shape[-1]:
        logits[..., 5] = -1e30
    return logits


def square(self, logits):
    return logits**2


def normalize(self, logits):
    return logits.log_softmax(-1)


def first_tokens(self, logits):
    return logits[..., :30]


def last_positions(self, logits):
    return logits[:, 1:]


def by_position(self, logits):
    return logits * torch.linspace(0.5, 1, logits.shape[1])[:, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_bias_by_token, "something else than scaling"),
        (forbid_a_token, "something else than scaling"),
        (square, "something else than scaling"),
        (normalize, "something else than scaling"),
        (first_tokens, "logits have the shape"),
        (last_positions, "logits have the shape"),
        (by_position, "something else than scaling"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_does_something_unknown_behind_its_head_is_found_out(change, message):
    model = replaced(built(*MODELS["llama"]), changed_logits(change))
    head = OutputHead(model)
    with pytest.raises(UnknownHead, match=message):
        head.verify(**inputs_of(model))


def test_a_trained_parameter_behind_the_head_is_found_out():
    model = built(*MODELS["llama"])
    model.temperature = nn.Parameter(torch.tensor(1.0))
    model = replaced(model, changed_logits(lambda self, logits: logits / self.temperature))
    with pytest.raises(UnknownHead, match="trained parameters behind its output head"):
        OutputHead(model).verify(**inputs_of(model))


def test_logits_that_are_not_made_by_the_named_head_are_found_out():
    model = built(*MODELS["llama"])
    other = nn.Linear(16, V)
    model.get_output_embeddings = lambda: other
    with pytest.raises(UnknownHead, match="something else than scaling"):
        OutputHead(model).verify(**inputs_of(model))


def test_hidden_states_that_are_changed_where_logits_are_missing_are_found_out():
    """A model that looks at the width of its logits."""

    def forward(usual):
        def changed(self, **inputs):
            output = usual(self, **inputs)
            output.logits = output.logits.view(2, 8, V)
            return output

        return changed

    model = replaced(built(*MODELS["llama"]), forward)
    with pytest.raises(UnknownHead, match="does not run as it should"):
        OutputHead(model).verify(**inputs_of(model))


def test_a_head_that_is_called_twice_is_found_out():
    def forward(usual):
        def changed(self, **inputs):
            usual(self, **inputs)
            return usual(self, **inputs)

        return changed

    model = replaced(built(*MODELS["llama"]), forward)
    with pytest.raises(UnknownHead, match="called its output head 2 times"):
        OutputHead(model).verify(**inputs_of(model))


class Doubled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def test_heads_of_another_kind_are_refused():
    model = built(*MODELS["llama"])
    model.lm_head = Doubled(16, V)
    with pytest.raises(UnknownHead, match="a Doubled, is no plain linear layer"):
        OutputHead(model)
    model = built(*MODELS["llama"])
    model.lm_head.forward = lambda hidden: hidden
    with pytest.raises(UnknownHead, match="a Linear, is no plain linear layer"):
        OutputHead(model)
    model.get_output_embeddings = lambda: None
    with pytest.raises(UnknownHead, match="names no output head"):
        OutputHead(model)


def test_a_hook_of_the_user_on_the_head_is_measured_or_found_out():
    model = built(*MODELS["llama"]).eval()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    head = OutputHead(model)
    head.verify(**inputs_of(model))
    assert captured(head, inputs_of(model)).scale == 2
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.exp())
    with pytest.raises(UnknownHead, match="something else than scaling"):
        OutputHead(model).verify(**inputs_of(model))


@pytest.mark.parametrize("part", ["whole", "in_place", "head"])
def test_a_compiled_model_is_refused(part):
    model = built(*MODELS["llama"])
    if part == "whole":
        model = torch.compile(model, backend="eager")
    elif part == "in_place":
        model.compile(backend="eager")
    else:
        model.lm_head.compile(backend="eager")
    with pytest.raises(UnknownHead, match="compiled"):
        OutputHead(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_are_none_of_the_heads_business():
    model = built(*MODELS["llama"]).eval()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    head = OutputHead(model)
    head.verify(**inputs_of(model))
    assert (
        largest_error(captured(head, inputs_of(model)).logits(), model(**inputs_of(model)).logits)
        < 1e-6
    )


def test_gradient_checkpointing_gives_the_same_gradient():
    model = built(*MODELS["llama"]).train()
    head, inputs = OutputHead(model), inputs_of(model)
    head.verify(**inputs)
    labels = inputs["input_ids"]
    expected = gradients(model, cross_entropy(model(**inputs).logits, labels))
    model.activation_checkpointing_enable()
    found = gradients(model, head.loss(lambda p: cross_entropy(p.logits(), labels), **inputs))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


# LoRA


def with_lora(model, *targets, **settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=list(targets), init_lora_weights=False, **settings
    )
    torch.manual_seed(4)
    return peft.inject_adapter_in_model(config, model)


ATTENTION = {
    "t5_tied": "q",
    "t5_untied": "q",
    "bart": "q_proj",
    "gpt2": "c_attn",
    "bert_decoder": "query",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("on_the_head", [False, True])
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_lora_on_attention_and_head(name, on_the_head):
    model = built(*MODELS[name])
    module_names = {id(m): n for n, m in model.named_modules()}
    head_name = module_names[id(model.get_output_embeddings())]
    targets = [ATTENTION.get(name, "q_proj"), *([head_name] if on_the_head else [])]
    model = with_lora(model, *targets).eval()
    inputs = inputs_of(model)
    head = OutputHead(model)
    head.verify(**inputs)
    with torch.no_grad():
        own, projection = model(**inputs).logits, captured(head, inputs)
    assert (projection.low_rank is not None) == on_the_head
    assert largest_error(projection.logits(), own) < 1e-6
    assert_same_gradients(model, head, inputs)


def test_lora_with_dropout_draws_as_the_head_would():
    model = with_lora(built(*MODELS["llama"]), "lm_head", lora_dropout=0.5).train()
    inputs = inputs_of(model)
    head = OutputHead(model)
    head.verify(**inputs)
    torch.manual_seed(6)
    own = model(**inputs).logits
    torch.manual_seed(6)
    assert largest_error(captured(head, inputs).logits(), own) < 1e-6


def test_lora_around_a_bfloat16_head_keeps_its_own_dtype():
    model = built(*MODELS["llama"]).eval().bfloat16()
    model = with_lora(model, "lm_head")
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    inputs = inputs_of(model)
    head = OutputHead(model)
    head.verify(**inputs)
    assert largest_error(captured(head, inputs).logits(), model(**inputs).logits) < 0.02
    labels = labels_of(inputs)
    expected = objective()(model(**inputs).logits, labels).loss
    found = head.loss(lambda p: number_loss(p, labels), **inputs)
    assert found.item() == pytest.approx(expected.item(), rel=0.01)
    assert gradients(model, found).keys() == gradients(model, expected).keys()


def test_lora_that_is_switched_off_or_merged_counts_no_more():
    model = with_lora(built(*MODELS["llama"]), "lm_head").eval()
    inputs = inputs_of(model)
    head = OutputHead(model)
    head.verify(**inputs)
    model.lm_head.enable_adapters(False)
    assert captured(head, inputs).low_rank is None
    assert largest_error(captured(head, inputs).logits(), model(**inputs).logits) < 1e-6
    model.lm_head.enable_adapters(True)
    model.lm_head.merge()
    assert captured(head, inputs).low_rank is None
    assert largest_error(captured(head, inputs).logits(), model(**inputs).logits) < 1e-6


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_other_kinds_of_lora_on_the_head_are_refused(settings):
    model = built(*MODELS["phi"])
    model = with_lora(model, "lm_head", **settings)
    with pytest.raises(UnknownHead, match="LoRA"):
        OutputHead(model).verify(**inputs_of(model))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_several_loras_on_the_head_are_refused():
    peft = pytest.importorskip("peft")
    model = with_lora(built(*MODELS["llama"]), "lm_head")
    config = peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model, adapter_name="second")
    model.lm_head.set_adapter(["default", "second"])
    with pytest.raises(UnknownHead, match="several LoRAs"):
        OutputHead(model).verify(**inputs_of(model))
    model.lm_head.set_adapter("second")
    head = OutputHead(model)
    head.verify(**inputs_of(model))
    assert captured(head, inputs_of(model)).low_rank[0].shape[-1] == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_head_that_peft_trains_whole_is_the_one_that_is_read():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(built(*MODELS["llama"]), config).eval()
    trained = model.get_output_embeddings().modules_to_save["default"]
    trained.weight.data += 1
    inputs = inputs_of(model)
    head = OutputHead(model)
    head.verify(**inputs)
    projection = captured(head, inputs)
    assert projection.weight is trained.weight
    assert largest_error(projection.logits(), model(**inputs).logits) < 1e-6


def test_projection_by_hand():
    """2 * (1 * 3 + 0.5 + 4 * 0.25) = 9, under a cap of 9: 9 tanh(1)."""
    projection = Projection(
        hidden=torch.tensor([[[1.0]]]),
        weight=torch.tensor([[3.0]]),
        bias=torch.tensor([0.5]),
        low_rank=(torch.tensor([[[4.0]]]), torch.tensor([[0.25]])),
        scale=2.0,
        soft_cap=9.0,
    )
    assert projection.logits().item() == pytest.approx(9 * 0.7615941559557649)


# Sharded weights


SHARDED = {
    "llama": ("llama", False),
    "llama, its head a unit of its own": ("llama", True),
    "qwen2, tied": ("qwen2_tied", False),
    "t5, tied": ("t5_tied", False),
}


def rows(inputs, rank):
    return {k: v[rank : rank + 1] if torch.is_tensor(v) else v for k, v in inputs.items()}


def layers_of(model):
    if model.config.is_encoder_decoder:
        return [*model.encoder.block, *model.decoder.block]
    return model.model.layers


def _rank(rank, port, folder):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = {}
    try:
        mesh = init_device_mesh("cpu", (2,))
        for case, (name, own_head) in SHARDED.items():
            model = built(*MODELS[name]).eval()
            inputs = rows(inputs_of(model), rank)
            labels = labels_of(inputs_of(model))[rank : rank + 1]
            for layer in [*layers_of(model), *([model.lm_head] if own_head else [])]:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh, reshard_after_forward=True)
            head = OutputHead(model)
            head.verify(**inputs)
            for _ in range(2):  # the second step starts from what the first one left
                model.zero_grad()
                loss = head.loss(lambda p, y=labels: number_loss(p, y), **inputs)
                loss.backward()
            found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
            results[case] = (loss.detach(), found)
            # Autograd keeps the weights of this one, which are gathered anew for the backward.
            model.zero_grad()
            head.loss(lambda p, y=labels: cross_entropy(p.logits(), y), **inputs).backward()
            results[f"{case}, by autograd"] = [p.grad.full_tensor() for p in model.parameters()]
    finally:
        dist.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}.pt")


def test_two_sharded_ranks_give_the_gradient_of_the_averaged_loss(tmp_path, free_port):
    mp.spawn(_rank, args=(free_port, str(tmp_path)), nprocs=2, join=True)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for case, (name, _) in SHARDED.items():
        model = built(*MODELS[name]).eval()
        whole = inputs_of(model)
        logits = [model(**rows(whole, rank)).logits for rank in (0, 1)]
        labels = labels_of(whole).split(1)
        losses = [objective()(x, y).loss for x, y in zip(logits, labels, strict=True)]
        expected = gradients(model, sum(losses) / 2)
        for rank in (0, 1):
            loss, found = results[rank][case]
            assert loss.item() == pytest.approx(losses[rank].item(), rel=1e-6), case
            assert found.keys() == expected.keys(), case
            for parameter, gradient in expected.items():
                assert largest_error(found[parameter], gradient) < 1e-5, (case, parameter)
        logits = [model(**rows(whole, rank)).logits for rank in (0, 1)]
        loss = sum(cross_entropy(x, y) for x, y in zip(logits, labels, strict=True)) / 2
        expected = gradients(model, loss).values()
        for found, gradient in zip(results[0][f"{case}, by autograd"], expected, strict=True):
            assert largest_error(found, gradient) < 1e-5, case
