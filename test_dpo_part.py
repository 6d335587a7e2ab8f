"""DPO: the loss by hand, by TRL and by its rules; the pairs; the training loop."""

import json
import math
import os
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

import dpo
from dpo import dpo_loss, encode_pairs, pair_log_probs, read_pairs, sequence_log_probs, split_pairs

TINY = os.environ.get("TINY_MODEL", "tiny_llama")
LOSSES = ["sigmoid", "robust", "exo_pair", "hinge", "ipo", "bco_pair", "sppo_hard", "nca_pair", "aot_pair", "aot"]
LOSSES += ["apo_zero", "apo_down", "discopop"]
DIVERGENCES = ["reverse_kl", "js_divergence", "alpha_divergence"]


def dpo_grads(chosen, rejected, ref_chosen, ref_rejected, **options):
    """(losses, gradient of their mean to chosen, to rejected), in float64."""
    chosen, rejected, *ref = (
        torch.tensor(x, dtype=torch.float64) for x in (chosen, rejected, ref_chosen, ref_rejected)
    )
    losses, _, _ = dpo_loss(chosen.requires_grad_(), rejected.requires_grad_(), *ref, **options)
    losses.mean().backward()
    return losses.detach(), chosen.grad, rejected.grad


def dpo_options(**changes):
    values = dict(device=torch.device("cpu"), temperature=1.0, micro_batch_size=64, prompts_per_step=5, steps=1)
    values |= dict(learning_rate=0.1, beta=0.1, loss_type="sigmoid", label_smoothing=None, reference_free=None)
    return types.SimpleNamespace(**(values | dict(f_divergence_type="reverse_kl") | changes))


@pytest.fixture(scope="module")
def tiny():
    args = types.SimpleNamespace(model=TINY, dtype=torch.float32, device=torch.device("cpu"), lora_targets=["q_proj"])
    return dpo.load(args)


@pytest.fixture
def adapted(tiny):
    """tiny_llama with an adapter that is off zero, so that policy and reference differ."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny[0], config).eval()
    yield model
    model.unload()


PAIRS = [
    {
        "prompt": "Once upon a time there was a little cat who",
        "chosen": " was happy.",
        "rejected": " was sad and cold.",
    },
    {"prompt": "The old bear", "chosen": " loved to sing and dance with his good friends.", "rejected": " cried."},
    {"prompt": "One day a young girl", "chosen": " smiled.", "rejected": " fell into the dark, cold river."},
    {"prompt": "Every morning the tired farmer went out and", "chosen": " laughed.", "rejected": " was hurt."},
    {"prompt": "In the forest", "chosen": " it was warm.", "rejected": " it was dark and there was no one at all."},
]


# ---------------------------------------------------------------- sequence_log_probs


def test_B14_a_sequences_log_prob_is_the_sum_over_its_mask_and_ipos_is_the_mean():
    log_probs = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -9.0, -9.0], [-7.0, -7.0, -7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    # -1 - 2 - 4 = -7, / 3 = -2.333333; one token: -3 either way; no token: 0
    assert sequence_log_probs(log_probs, mask).tolist() == [-7, -3, 0], "a sequence's log-prob is the sum over its mask"
    mean = sequence_log_probs(log_probs, mask, average=True)
    assert torch.allclose(mean, torch.tensor([-7 / 3, -3, 0])), "average divides by the number of tokens, not by T"


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e4])
@pytest.mark.parametrize("average", [False, True])
def test_what_stands_under_mask_0_has_no_influence_on_value_or_gradient(garbage, average):
    log_probs = torch.tensor([[-1.0, garbage, -2.0], [garbage] * 3], requires_grad=True)
    total = sequence_log_probs(log_probs, torch.tensor([[1, 0, 1], [0, 0, 0]]), average)
    total.sum().backward()
    share = 0.5 if average else 1.0
    assert total.tolist() == [-3 * share, 0], "a masked token reached the value"
    assert log_probs.grad.tolist() == [[share, 0, share], [0, 0, 0]], "a masked token reached the gradient"


# ---------------------------------------------------------------- dpo_loss


def test_B14_at_the_start_the_loss_is_ln_2_the_margin_0_and_the_gradient_is_not_0():
    start = torch.tensor([-20.0, -31.0]), torch.tensor([-25.0, -30.0])
    losses, chosen_rewards, rejected_rewards = dpo_loss(*start, *start)
    assert torch.allclose(losses, torch.tensor(math.log(2))), "policy = reference: -log sigmoid(0) = ln 2"
    assert (chosen_rewards == 0).all() and (rejected_rewards == 0).all(), "policy = reference: no reward, no margin"
    # d/dc -log sigmoid(beta (c - r)) = -beta sigmoid(-beta (c - r)) = -0.1 x 0.5 at 0
    _, to_chosen, to_rejected = dpo_grads([-20.0], [-25.0], [-20.0], [-25.0])
    assert to_chosen.item() == pytest.approx(-0.05), "the step must make the chosen answer more likely"
    assert to_rejected.item() == pytest.approx(0.05), "the step must make the rejected answer less likely"


def test_B15_label_smoothing_mixes_in_the_loss_with_the_sign_turned():
    # log-ratios +1 and -1, beta 0.1: x = 0.2; -log sigmoid(0.2) = 0.598139, -log sigmoid(-0.2) = 0.798139
    # s = 0.1: 0.9 x 0.598139 + 0.1 x 0.798139 = 0.618139
    at = [-4.0], [-8.0], [-5.0], [-7.0]
    assert dpo_grads(*at)[0].item() == pytest.approx(0.598139, abs=1e-6)
    assert dpo_grads(*at, label_smoothing=0.1)[0].item() == pytest.approx(0.618139, abs=1e-6)


def test_B16_the_loss_falls_although_the_chosen_answer_has_become_half_as_likely():
    # reference 0.6 / 0.3, policy 0.3 / 0.1: chosen over rejected rises from 2 to 3; -log sigmoid(ln 3 - ln 2) = ln(5/3)
    policy, reference = [[math.log(0.3)], [math.log(0.1)]], [[math.log(0.6)], [math.log(0.3)]]
    loss = dpo_grads(*policy, *reference, beta=1.0)[0].item()
    assert loss == pytest.approx(math.log(5 / 3)) == pytest.approx(0.510826, abs=1e-6)
    assert loss < dpo_grads(*reference, *reference, beta=1.0)[0].item(), "the margin grew, so the loss must fall"


# c = 0.4, r = -0.8, beta = 0.5:  beta c = 0.2, beta r = -0.4, beta h = x = 0.6, 1 / (2 beta) = 1, d = -0.1
# sigmoid(0.6) = 0.645656, L(0.6) = 0.437488, L(-0.6) = 1.037488
BY_HAND = [  # loss_type, options, loss, gradient to chosen, gradient to rejected
    ("sigmoid", {}, 0.437488, -0.177172, 0.177172),  # L(0.6); -0.5 x 0.354344
    ("sigmoid", {"label_smoothing": 0.1}, 0.497488, -0.127172, 0.127172),  # 0.9 x 0.437488 + 0.1 x 1.037488
    ("robust", {"label_smoothing": 0.1}, 0.362488, -0.239672, 0.239672),  # (0.393739 - 0.103749) / 0.8
    ("robust", {}, 0.437488, -0.177172, 0.177172),  # without smoothing it is sigmoid
    # 0.645656 (-0.437488 - log 0.9) + 0.354344 (-1.037488 - log 0.1)
    ("exo_pair", {"label_smoothing": 0.1}, 0.233839, -0.182710, 0.182710),
    ("exo_pair", {}, 1.798271, -0.721443, 0.721443),  # the same with 0.999 and 0.001
    ("hinge", {}, 0.4, -0.5, 0.5),  # 1 - 0.6
    ("ipo", {}, 0.04, 0.4, -0.4),  # (1.2 - 1)^2; 2 x 0.2: beyond its aim, ipo pulls the margin back
    ("bco_pair", {}, 1.108710, -0.212779, 0.212779),  # L(0.2 + 0.1) + L(-0.1 + 0.4) = 2 x 0.554355
    ("sppo_hard", {}, 0.4, -1.2, 0.4),  # (0.4 - 1)^2 + (-0.8 + 1)^2
    ("nca_pair", {}, 1.253716, -0.087625, 0.100328),  # 0.598139 + 0.798139 / 2 + L(0.4) / 2 = 0.513015 / 2
    ("aot_pair", {}, 0.437488, -0.177172, 0.177172),  # of one pair there is nothing to sort: sigmoid
    ("aot", {"label_smoothing": 0.1}, 0.497488, -0.127172, 0.127172),
    ("apo_zero", {}, 0.851478, -0.123758, 0.120130),  # 1 - 0.549834 + 0.401312
    ("apo_down", {}, 0.904178, 0.009366, 0.114392),  # 0.549834 + 1 - 0.645656: it lowers the chosen one, too
    ("discopop", {}, 0.548811, -0.274398, 0.274398),  # m = sigmoid(0.6 / 0.05) = 0.999994: nearly exp(-0.6)
    ("discopop", {"discopop_tau": 1.0}, 0.509365, -0.227217, 0.227217),  # 0.354344 x 0.437488 + 0.645656 x 0.548812
    # log sigmoid(0.4) - log sigmoid(-0.8) = -0.513015 + 1.171101; L(0.5 x 0.658085)
    ("sigmoid", {"f_divergence_type": "js_divergence"}, 0.542099, -0.083969, 0.144368),
    # -exp(-0.4) + exp(0.8) = 1.555221; L(0.5 x 1.555221)
    ("sigmoid", {"f_divergence_type": "alpha_divergence"}, 0.378096, -0.105520, 0.350339),
    # (exp(0.4) - exp(-0.2)) / 0.5 = 1.346188; L(0.5 x 1.346188)
    ("sigmoid", {"f_divergence_type": "alpha_divergence", "alpha_divergence_coef": 0.5}, 0.412194, -0.138285, 0.251972),
]


@pytest.mark.parametrize("loss_type, more, loss, to_chosen, to_rejected", BY_HAND)
def test_B17_every_loss_type_has_its_value_and_gradient_at_a_point_computed_by_hand(
    loss_type, more, loss, to_chosen, to_rejected
):
    got = dpo_grads([-9.6], [-13.8], [-10.0], [-13.0], beta=0.5, loss_type=loss_type, **more)
    assert [x.item() for x in got] == pytest.approx([loss, to_chosen, to_rejected], abs=1e-6)


# Mean loss and the first pair's two gradients as TRL 0.19.0's DPOTrainer.dpo_loss computes them, beta = 0.1.
TRL_BATCH = [
    [-23.254548, -14.761404, -19.234497, -13.724378, -14.669179],
    [-26.472830, -13.957092, -22.699049, -14.806365, -14.385941],
    [-22.234396, -14.362754, -17.652940, -13.518250, -16.909944],
    [-21.878974, -15.308825, -22.237824, -15.329405, -13.116364],
]
TRL = [
    ("sigmoid", {"label_smoothing": 0.1}, 0.6727263, -0.00623193, 0.00623193),
    ("sigmoid", {"reference_free": True}, 0.63241287, -0.00840461, 0.00840461),
    ("sigmoid", {"f_divergence_type": "js_divergence"}, 0.66807712, -0.00615678, 0.00829268),
    ("sigmoid", {"f_divergence_type": "alpha_divergence"}, 0.57755642, -0.00000372, 0.00013257),
    ("robust", {"label_smoothing": 0.1}, 0.65704756, -0.01073193, 0.01073193),
    ("exo_pair", {}, 2.65061611, -0.03172322, 0.03172322),
    ("hinge", {}, 0.93031673, -0.02, 0.02),
    ("ipo", {}, 24.02057904, -0.57051866, 0.57051866),
    ("bco_pair", {}, 1.3591322, -0.01023925, 0.00800113),
    ("sppo_hard", {}, 49.79033045, -2.40806091, 0.16245776),
    ("nca_pair", {}, 1.37526056, -0.00576445, 0.00387132),
    ("aot_pair", {"label_smoothing": 0.1}, 0.66788079, -0.00787529, 0.00650514),
    ("aot", {"label_smoothing": 0.1}, 0.66831367, -0.0072976, 0.0072976),
    ("apo_zero", {}, 0.98299832, -0.00498701, 0.00474521),
    ("apo_down", {}, 0.97806116, 0.00014332, 0.0048437),
    ("discopop", {}, 0.75622872, -0.01393258, 0.01393258),
]


@pytest.mark.parametrize("loss_type, more, loss, to_chosen, to_rejected", TRL)
def test_B17_every_loss_type_computes_what_trl_computes_on_a_batch(loss_type, more, loss, to_chosen, to_rejected):
    losses, grad_chosen, grad_rejected = dpo_grads(*TRL_BATCH, loss_type=loss_type, **more)
    got = [losses.mean().item(), grad_chosen[0].item(), grad_rejected[0].item()]
    assert got == pytest.approx([loss, to_chosen, to_rejected], rel=2e-6, abs=1e-7)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_reference_free_is_the_same_as_zeros_for_both_reference_log_probs(loss_type):
    batch = [torch.tensor(row) for row in TRL_BATCH]
    free = dpo_loss(*batch, loss_type=loss_type, reference_free=True)
    zeros = dpo_loss(*batch[:2], torch.zeros(5), torch.zeros(5), loss_type=loss_type)
    for name, a, b in zip(("losses", "chosen_rewards", "rejected_rewards"), free, zeros, strict=True):
        assert torch.equal(a, b), f"{name} of {loss_type} still know the reference"


def test_rewards_are_beta_times_the_log_ratio_and_carry_no_gradient():
    chosen = torch.tensor([-3.0, -6.0], requires_grad=True)
    _, good, bad = dpo_loss(chosen, chosen - 5, torch.tensor([-4.0, -4.0]), torch.tensor([-8.0, -8.5]), beta=0.5)
    # 0.5 x (-3 + 4, -6 + 4); 0.5 x (-8 + 8, -11 + 8.5)
    assert good.tolist() == [0.5, -1] and bad.tolist() == [0, -1.25], "reward = beta (policy - reference)"
    assert not good.requires_grad and not bad.requires_grad, "rewards are for looking at: detached"


def test_bco_pairs_baseline_carries_no_gradient():
    # d/dc L(beta c - d) + L(d - beta r) with d held fixed: -beta sigmoid(d - beta c), / 2 for the mean of two pairs.
    # beta = 1, c = 1, 2, r = 0, -1: d = 2 / 4 = 0.5; -sigmoid(-0.5) / 2 = -0.188771
    _, to_chosen, _ = dpo_grads([1.0, 2.0], [0.0, -1.0], [0.0, 0.0], [0.0, 0.0], beta=1.0, loss_type="bco_pair")
    assert to_chosen[0].item() == pytest.approx(-0.188771, abs=1e-6), "the mean of the rewards must be detached"


@pytest.mark.parametrize(
    "loss_type, divergence",
    [(name, "reverse_kl") for name in LOSSES] + [(name, f) for name in LOSSES[:5] for f in DIVERGENCES[1:]],
)
def test_log_ratios_of_200_give_finite_losses_and_gradients_in_float32(loss_type, divergence):
    chosen, rejected = torch.tensor([200.0, -200, 200, -200, 0]), torch.tensor([200.0, 200, -200, -200, 0])
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    for beta, tau in ((0.1, 0.05), (1.0, 5.0)):
        kind = {"loss_type": loss_type, "f_divergence_type": divergence, "beta": beta, "discopop_tau": tau}
        losses, _, _ = dpo_loss(chosen, rejected, torch.zeros(5), torch.zeros(5), **kind)
        grads = torch.autograd.grad(losses.sum(), (chosen, rejected))
        assert losses.isfinite().all(), f"{loss_type} overflows"
        assert all(grad.isfinite().all() for grad in grads), f"the gradient of {loss_type} overflows"


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"loss_type": "dpo"}, "discopop"),
        ({"f_divergence_type": "kl"}, "js_divergence"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"label_smoothing": -0.1}, "at least 0"),
        ({"beta": 0.0}, "above 0"),
        *[({"loss_type": name, "label_smoothing": 0.1}, "robust") for name in LOSSES[3:8] + LOSSES[10:]],
        *[({"loss_type": name, "f_divergence_type": "js_divergence"}, "hinge") for name in LOSSES[5:]],
    ],
)
def test_an_option_that_is_unknown_out_of_range_or_not_read_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        dpo_loss(*torch.zeros(4, 2), **wrong)


# ---------------------------------------------------------------- pairs


def test_prompt_and_answers_are_encoded_apart_and_a_finished_answer_ends_in_one_eos(tiny):
    tokenizer = tiny[1]
    pair = {"prompt": "The old be", "chosen": "ar was happy.", "rejected": " was sad.", "rejected_truncated": True}
    (got,) = encode_pairs(tokenizer, [pair], 256)
    plain = [tokenizer(pair[name], add_special_tokens=False).input_ids for name in ("prompt", "chosen", "rejected")]
    assert got["prompt"] == plain[0], "the prompt's ids must be those that sampling sees, whatever follows"
    assert got["chosen"] == plain[1] + [tokenizer.eos_token_id], "a finished answer ends in exactly one EOS"
    assert got["rejected"] == plain[2], "an answer cut before its EOS gets none"
    (spelled,) = encode_pairs(tokenizer, [pair | {"chosen": "ar was happy." + tokenizer.eos_token}], 256)
    assert spelled["chosen"] == got["chosen"], "an EOS that the text spells out must not be doubled"


def test_an_empty_answer_is_one_eos_token_with_a_finite_log_prob(tiny):
    model, tokenizer = tiny
    encoded = encode_pairs(tokenizer, [{"prompt": "The old bear", "chosen": "", "rejected": " cried."}], 256)
    assert encoded[0]["chosen"] == [tokenizer.eos_token_id]
    assert dpo.all_log_probs(model, encoded, dpo_options()).isfinite().all()


def test_a_prompt_too_long_is_cut_from_the_left_the_same_for_both_answers_which_stay_whole(tiny):
    prompt, short, long = "a " * 300, " good", " bad" * 20
    (got,) = encode_pairs(tiny[1], [{"prompt": prompt, "chosen": short, "rejected": long}], 256)
    (whole,) = encode_pairs(tiny[1], [{"prompt": prompt, "chosen": short, "rejected": long}], math.inf)
    assert len(whole["prompt"]) >= 300 and (got["chosen"], got["rejected"]) == (whole["chosen"], whole["rejected"])
    assert len(got["prompt"]) + len(got["rejected"]) == 256, "the prompt keeps all that the longer answer leaves"
    assert got["prompt"] == whole["prompt"][-len(got["prompt"]) :], "the prompt is cut from the left"


def test_a_pair_with_an_answer_longer_than_the_context_is_left_out(tiny):
    fits, does_not = PAIRS[0], {"prompt": "The bear", "chosen": " was happy" * 200, "rejected": " was sad"}
    assert encode_pairs(tiny[1], [does_not, fits], 256) == encode_pairs(tiny[1], [fits], 256)


@pytest.mark.parametrize("average", [False, True])
def test_a_pairs_log_probs_are_those_of_its_answers_and_their_eos_alone_whatever_the_padding(tiny, average):
    model, tokenizer = tiny
    args = dpo_options(loss_type="ipo" if average else "sigmoid", micro_batch_size=6)
    encoded = encode_pairs(tokenizer, PAIRS, 256)
    got = dpo.all_log_probs(model, encoded, args)
    for i, pair in enumerate(encoded):
        for row, name in enumerate(("chosen", "rejected")):
            ids = torch.tensor([pair["prompt"] + pair[name]])
            with torch.no_grad():
                log_probs = model(input_ids=ids).logits.log_softmax(-1)  # position t predicts token t + 1
            answer = range(len(pair["prompt"]), ids.shape[1])
            values = torch.tensor([log_probs[0, t - 1, ids[0, t]] for t in answer])
            expected = values.mean() if average else values.sum()
            assert got[row, i].item() == pytest.approx(expected.item(), abs=1e-4), f"pair {i}, {name}"


def test_chosen_and_rejected_go_through_the_model_in_one_batch(tiny):
    rows = []
    hook = tiny[0].register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    list(pair_log_probs(tiny[0], encode_pairs(tiny[1], PAIRS, 256), dpo_options(micro_batch_size=6)))
    hook.remove()
    assert rows == [6, 4], "3 pairs are 6 sequences; of 5 pairs the last 2 remain"


def test_a_pair_is_the_happiest_and_the_gloomiest_answer_and_a_tie_makes_none(monkeypatch):
    texts = [" so sad", " ran", " a happy friend", " glad", " ran", " sat", " ran", " sat"]
    ids = torch.tensor([[7, 2], [7, 7], [7, 7], [7, 2]] + [[7, 2]] * 4)  # 2 is the EOS
    monkeypatch.setattr(dpo, "complete", lambda *_: (ids, None, torch.ones(8, 2), texts))
    tokenizer = types.SimpleNamespace(eos_token_id=2)
    pairs = dpo.make_pairs(None, tokenizer, ["A bear", "A cat"], types.SimpleNamespace(num_generations=4))
    assert pairs == [{"prompt": "A bear", "chosen": " a happy friend", "rejected": " so sad", "chosen_truncated": True}]


def test_no_prompt_is_both_trained_on_and_held_out():
    own = [{"prompt": f"p{i % 25}"} for i in range(50)]
    made = [{"prompt": prompt} for prompt in dpo.PROMPTS + dpo.HELD_OUT_PROMPTS]
    for pairs in (own, made, own[:4]):
        trained, held_out = ({pair["prompt"] for pair in part} for part in split_pairs(pairs))
        assert not trained & held_out and len(trained | held_out) == len({pair["prompt"] for pair in pairs})
        assert len(held_out) >= 2 and trained, "a standard error takes two held-out pairs"
    assert split_pairs(made)[1] == [{"prompt": prompt} for prompt in dpo.HELD_OUT_PROMPTS]
    assert split_pairs(own[:3]) == (own[:3], []), "of three pairs none can be spared"


def test_a_data_file_may_have_a_bom_crlf_blank_lines_and_line_separators_inside_a_text(tmp_path):
    pairs = [{"prompt": "The bear", "chosen": " sat\u2028down\x85", "rejected": ""}, PAIRS[0] | {"more": [1]}]
    lines = [json.dumps(pair, ensure_ascii=False) for pair in pairs]
    (tmp_path / "pairs.jsonl").write_bytes(("\ufeff" + lines[0] + "\r\n\r\n \n" + lines[1]).encode())
    assert read_pairs(tmp_path / "pairs.jsonl") == pairs


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"prompt": "a", "chosen": "b"}', "'rejected'"),
        (b'{"prompt": "a", "chosen": 3, "rejected": "c"}', "'chosen'"),
        (b'{"prompt": " ", "chosen": "b", "rejected": "c"}', "prompt is empty"),
        (b'["a", "b", "c"]', "no JSON object"),
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff", "chosen": "b", "rejected": "c"}', "utf-8"),
        (b'{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}', "surrogates"),
    ],
)
def test_a_bad_line_of_a_data_file_is_named_with_its_number_and_what_is_wrong(tmp_path, capsys, line, said):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"\n" + json.dumps(PAIRS[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(SystemExit) as stopped:
        dpo.main(["--model", TINY, "--data", str(path), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "line 3" in error and said in error and len(error.splitlines()) == 1


# ---------------------------------------------------------------- training


def test_the_first_step_of_training_starts_at_ln_2_with_a_gradient(tiny):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny[0], config).eval()
    (record,) = dpo.train(model, encode_pairs(tiny[1], PAIRS, 256), dpo_options())
    model.unload()
    assert record["loss"].item() == pytest.approx(math.log(2), abs=1e-5)
    assert record["rewards/margins"].item() == pytest.approx(0, abs=1e-5) and record["grad_norm"] > 0
    names = {"loss", "grad_norm", "step", "samples", "logps/chosen", "logps/rejected"}
    assert set(record) == names | {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}


def test_identical_answers_have_loss_ln_2_and_gradient_0(adapted, tiny):
    pairs = encode_pairs(tiny[1], [{"prompt": "The bear", "chosen": " sat.", "rejected": " sat."}], 256)
    (record,) = dpo.train(adapted, pairs, dpo_options(prompts_per_step=1))
    assert record["loss"].item() == pytest.approx(math.log(2), abs=1e-6)
    assert record["grad_norm"].item() == pytest.approx(0, abs=1e-5), "what both answers share cancels"


@pytest.mark.parametrize("loss_type", LOSSES)
def test_micro_batches_give_the_same_gradient_as_one_batch(tiny, adapted, monkeypatch, loss_type):
    monkeypatch.setattr(torch.optim, "AdamW", lambda params, lr, weight_decay: torch.optim.SGD(params, lr))
    pairs, start = encode_pairs(tiny[1], PAIRS, 256), {n: p.clone() for n, p in adapted.state_dict().items()}
    with adapted.disable_adapter():
        ref = dpo.all_log_probs(adapted, pairs, dpo_options(loss_type=loss_type))
    ((rows, new),) = pair_log_probs(adapted, pairs, dpo_options(loss_type=loss_type))
    mean = dpo_loss(*new, *ref[:, rows], loss_type=loss_type)[0].mean()
    grads = torch.autograd.grad(mean, [p for p in adapted.parameters() if p.requires_grad])
    results = []
    for size in (64, 4, 1):  # all five pairs at once; two, two, one; one at a time
        adapted.load_state_dict(start)
        torch.manual_seed(0)
        (record,) = dpo.train(adapted, pairs, dpo_options(micro_batch_size=size, loss_type=loss_type))
        step = torch.cat([(p - start[n]).flatten() for n, p in adapted.state_dict().items() if "lora" in n])
        results.append((step.detach(), record["loss"].item(), record["grad_norm"].item()))
    norm = torch.stack([grad.norm() for grad in grads]).norm().item()
    assert results[0][1:] == pytest.approx((mean.item(), norm), rel=1e-3), "a batch's loss is the mean over its pairs"
    for step, loss, grad_norm in results[1:]:
        assert (step - results[0][0]).norm() < 1e-3 * results[0][0].norm(), "the split changed the gradient"
        assert (loss, grad_norm) == pytest.approx(results[0][1:], rel=1e-3), "the split changed the metrics"


def test_the_reference_is_run_once_before_training_and_kept(tiny, adapted, monkeypatch):
    switched_off = []
    disable = adapted.disable_adapter
    monkeypatch.setattr(adapted, "disable_adapter", lambda: switched_off.append(1) or disable())
    pairs = encode_pairs(tiny[1], PAIRS, 256)
    with disable():
        expected = dpo.all_log_probs(adapted, pairs, dpo_options())
    seen, loss = [], dpo.dpo_loss
    monkeypatch.setattr(dpo, "dpo_loss", lambda *a, **k: seen.append(torch.stack(a[2:]).sort().values) or loss(*a, **k))
    assert len(list(dpo.train(adapted, pairs, dpo_options(steps=3)))) == 3
    assert len(switched_off) == 1, "one reference pass, none in the loop"
    assert all(torch.allclose(ref, expected.sort().values, atol=1e-4) for ref in seen), "the reference moved"


def test_training_lowers_the_loss_and_each_pair_has_its_turn_before_any_comes_again(tiny, adapted, monkeypatch):
    pairs, batches = encode_pairs(tiny[1], PAIRS, 256), []
    log_probs = dpo.pair_log_probs
    monkeypatch.setattr(dpo, "pair_log_probs", lambda m, p, a: batches.append(p) or log_probs(m, p, a))
    records = list(dpo.train(adapted, pairs, dpo_options(steps=10, prompts_per_step=2, learning_rate=1e-3)))
    order = [pairs.index(pair) for batch in batches[1:] for pair in batch]  # the first is the reference's pass
    assert all(sorted(order[i : i + 5]) == list(range(5)) for i in range(0, 20, 5)), "not every pair had its turn"
    assert sum(r["loss"] for r in records[-2:]) < sum(r["loss"] for r in records[:2])


def test_a_loss_that_is_not_finite_stops_training_and_names_the_step(tiny, adapted, monkeypatch):
    steps = dpo.train(adapted, encode_pairs(tiny[1], PAIRS, 256), dpo_options(steps=3))
    assert next(steps)["step"] == 1
    monkeypatch.setattr(dpo, "dpo_loss", lambda *args, **more: [x * math.nan for x in dpo_loss(*args, **more)])
    with pytest.raises(ArithmeticError, match="step 2"):
        next(steps)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--loss-type", "dpo"], "discopop"),
        (["--loss-type", "hinge", "--label-smoothing", "0.1"], "label_smoothing"),
        (["--label-smoothing", "0.5"], "below 0.5"),
        (["--f-divergence-type", "kl"], "js_divergence"),
        (["--beta", "0"], "beta"),
        (["--num-generations", "1"], "--num-generations"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--data", os.devnull], "no pairs"),
        (["--data", "a.jsonl", "--prompts", "b.txt"], "--prompts"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence_and_exit_status_2(tmp_path, capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        dpo.main(["--model", TINY, "--out", str(tmp_path / "out"), *argv])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and len(error.splitlines()) == 1, error


def test_a_data_file_can_be_trained_on_and_the_result_holds_the_pairs_again(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    long = {"prompt": "The bear", "chosen": " was happy" * 200, "rejected": " was sad"}
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS + [long]), encoding="utf-8")
    argv = ["--model", TINY, "--data", str(path), "--steps", "2", "--prompts-per-step", "2", "--reference-free"]
    summary = dpo.main([*argv, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "3 pairs to train on, 2 held out; 1 left out" in printed
    assert "held-out pairs: the margin" in printed and "logps/rejected" in printed
    assert summary["steps"] == 2 and summary["rewards/accuracies_after"]["n"] == 2
    assert read_pairs(tmp_path / "out" / "pairs.jsonl") == PAIRS + [long]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_dpo_learns_to_prefer_what_the_rater_prefers_also_on_held_out_prompts(tmp_path):
    summary = dpo.main(["--model", TINY, "--out", str(tmp_path / "out")])
    before, after = summary["happiness_before"], summary["happiness_after"]
    error = math.hypot(before["standard_error"], after["standard_error"])
    assert summary["rewards/accuracies_after"]["mean"] >= 0.8
    assert after["mean"] - before["mean"] >= 5 * error
