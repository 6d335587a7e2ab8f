"""The sanity suite: every test's name is the sentence it proves, its arithmetic stands in a comment.

    pytest                    # all of it, no network
    pytest -k "clip or kl"    # what you are working on

Ids such as A11 or B18 are the points of the two articles; README.md has the table.
"""

import ast
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

import grpo

HERE = Path(__file__).resolve().parent
SCRIPTS = [
    path for path in sorted(HERE.glob("*.py")) if path.name in ("grpo.py", "ppo.py", "dpo.py", "reward_model.py")
]


def near(value, expected, tolerance=1e-5):
    """Whether a tensor or number is `expected`, element by element."""
    value = torch.as_tensor(value).detach().double()
    return torch.allclose(value, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def row(*values, grad=False):
    """A batch of one sequence: (1, T)."""
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


# ================================================================ GRPO: advantages


def test_B18_advantages_are_rewards_minus_the_group_mean_over_its_std():
    # mean 1/4; sample std sqrt((9 + 1 + 1 + 1) / 16 / 3) = 0.5; 0.75 / 0.5001 = 1.49970, -0.25 / 0.5001 = -0.49990
    got = grpo.group_advantages(torch.tensor([1.0, 0, 0, 0]), 4)
    assert near(got, [1.49970, -0.49990, -0.49990, -0.49990]), "A = (r - mean) / (sample std + 1e-4)"


def test_B18_groups_stand_side_by_side_and_do_not_mix():
    # The two groups differ by 100: after subtracting each one's mean nothing of that is left.
    first = torch.tensor([1.0, 0, 0, 0])
    got = grpo.group_advantages(torch.cat([first, first + 100]), 4)
    assert near(got[:4], got[4:], 1e-4), "rewards are prompt-major: neighbours form a group"


def test_advantages_agree_with_trl_for_every_scale_rewards():
    # Recorded from TRL 1.9's GRPOTrainer with groups of three.
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 1], dtype=torch.float64)
    for scale, high, low in (
        ("group", 1.1545005730, -0.5772502865),  # std of (1, 0, 0) = 0.57735
        ("batch", 1.2907444715, -0.6453722357),  # std of all six = 0.51640
        ("none", 2 / 3, -1 / 3),  # Dr. GRPO
    ):
        got = grpo.group_advantages(rewards, 3, scale)
        assert near(got, [high, low, low, low, low, high], 1e-7), f"scale_rewards={scale!r}"


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [1.0, 0.9, -0.1, 1e6])
def test_A10_a_group_of_equal_rewards_has_advantages_of_exactly_0(scale, reward):
    # Eight times 0.9 has a float32 mean of 0.90000004: the difference must not be divided by 1e-4 and learned from.
    rewards = torch.tensor([reward] * 8 + [0.0, 1.0] * 4)
    assert (grpo.group_advantages(rewards, 8, scale)[:8] == 0).all(), "equal rewards teach nothing"


def test_A10_equal_rewards_give_loss_0_and_no_gradient():
    log_probs = row(-1.0, -2.0, -3.0, grad=True)
    advantages = grpo.group_advantages(torch.tensor([1.0, 1, 1, 1]), 4)[:1]
    loss, _ = grpo.grpo_loss(log_probs, log_probs.detach() - 0.1, None, advantages, torch.ones(1, 3), beta=0)
    loss.backward()
    assert loss == 0 and (log_probs.grad == 0).all(), "advantage 0: no loss, no gradient"


def test_a_group_of_one_and_a_broken_group_are_refused():
    for rewards, size in (([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 2)):
        with pytest.raises(ValueError, match="num_generations"):
            grpo.group_advantages(torch.tensor(rewards), size)


# ================================================================ GRPO: the clipped objective


def test_A9_ratio_1_gives_minus_the_advantage():
    # policy = old policy, A = 2: -(1 x 2) = -2. Its gradient is -A / T = -2/3 a token, not 0.
    log_probs = row(-1.0, -2.0, -3.0, grad=True)
    loss, _ = grpo.grpo_loss(
        log_probs, log_probs.detach(), log_probs.detach(), torch.tensor([2.0]), torch.ones(1, 3), epsilon=None
    )
    loss.backward()
    assert near(loss, -2.0) and near(log_probs.grad, [[-2 / 3] * 3]), "ratio 1: loss -A, gradient -A / T"


def test_A8_the_ratio_is_to_the_old_policy_and_the_reference_enters_only_through_the_kl():
    log_probs, old, ref = row(-1.0, -1.0), row(-1.5, -1.5), row(-9.0, -9.0)
    loss, _ = grpo.grpo_loss(log_probs, old, ref, torch.tensor([1.0]), torch.ones(1, 2), epsilon=None, beta=0)
    assert near(loss, -math.exp(0.5)), "ratio = exp(log pi_theta - log pi_old), whatever the reference says"


def test_A11_a_positive_advantage_never_gives_less_than_minus_1_plus_epsilon_times_A():
    # Every ratio is e^0.5 = 1.65 or more, so clipped to 1.2: -1.2 x 2 = -2.4.
    log_probs = row(-1.0, -0.5, -0.1, grad=True)
    loss, metrics = grpo.grpo_loss(
        log_probs, row(-1.5, -2.0, -9.0), None, torch.tensor([2.0]), torch.ones(1, 3), beta=0
    )
    loss.backward()
    assert near(loss, -2.4), "-(1 + epsilon) A"
    assert (log_probs.grad == 0).all(), "A12: a clipped token has no gradient, so -2.4 is no more stable than -2"
    assert metrics["clip_ratio/high_mean"] == 1 and metrics["clip_ratio/low_mean"] == 0


def test_A12_a_negative_advantage_is_not_bounded_without_delta():
    # A = -2, ratio 3: min(3 x -2, 1.2 x -2) = -6, loss +6, gradient -(-2) x 3 = 6. With delta = 2: loss 4, gradient 0.
    for delta, expected, slope in ((None, 6.0, 6.0), (2.0, 4.0, 0.0)):
        log_probs = row(math.log(3.0), grad=True)
        loss, metrics = grpo.grpo_loss(
            log_probs, row(0.0), None, torch.tensor([-2.0]), torch.ones(1, 1), beta=0, delta=delta
        )
        loss.backward()
        assert near(loss, expected) and near(log_probs.grad, [[slope]]), (
            f"delta={delta}: the bound on negative advantages"
        )
        assert metrics["clip_ratio/dual_mean"] == (delta is not None) and metrics["clip_ratio/high_mean"] == 0


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient, share",
    [
        # loss = -min(r A, clip(r, 0.8, 1.28) A); where the first is the smaller its gradient by log r is -r A, else 0
        (0.5, 1.0, -0.5, -0.5, None),  # min(0.5, 0.8): a good token became rare: the gradient stays
        (1.1, 1.0, -1.1, -1.1, None),  # in range
        (2.0, 1.0, -1.28, 0.0, "high"),  # min(2, 1.28): good and common enough
        (0.5, -1.0, 0.8, 0.0, "low"),  # min(-0.5, -0.8): bad and rare enough
        (1.1, -1.0, 1.1, 1.1, None),  # in range
        (2.0, -1.0, 2.0, 2.0, None),  # min(-2, -1.28): a bad token became common: the gradient stays
    ],
)
def test_the_clip_takes_the_gradient_in_two_of_six_cells(ratio, advantage, loss, gradient, share):
    log_probs = row(math.log(ratio), grad=True)
    got, metrics = grpo.grpo_loss(
        log_probs, row(0.0), None, torch.tensor([advantage]), torch.ones(1, 1), beta=0, epsilon=0.2, epsilon_high=0.28
    )
    got.backward()
    assert near(got, loss) and near(log_probs.grad, [[gradient]]), "pessimistic: the smaller of clipped and unclipped"
    for side in ("low", "high", "dual"):
        assert metrics[f"clip_ratio/{side}_mean"] == (side == share), "a share counts the gradients taken, on its side"


def test_gspo_has_one_length_normalised_ratio_a_sequence():
    # log-ratios 0.1 and 0.3 (a third is padding): their mean 0.2, ratio e^0.2 = 1.2214, above 1.2: loss -1.2 x 2.
    mask = torch.tensor([[1, 1, 0]])
    options = {"beta": 0, "importance_sampling_level": "sequence"}
    args = row(0.1, 0.3, 5.0), row(0.0, 0.0, 0.0), None, torch.tensor([2.0]), mask
    loss, metrics = grpo.grpo_loss(*args, epsilon=0.3, **options)
    assert near(loss, -2 * math.exp(0.2)), "the ratio is exp(mean of the log-ratios over the sequence's tokens)"
    loss, metrics = grpo.grpo_loss(*args, epsilon=0.2, **options)
    assert near(loss, -2.4) and metrics["clip_ratio/high_mean"] == 1, "all of its tokens are clipped, or none"


def test_clip_shares_are_of_tokens_and_for_gspo_of_sequences():
    # Ratios 2 2 2 and 1: of four tokens three are clipped, of two sequences one.
    log_probs = torch.tensor([[math.log(2)] * 3, [0.0] * 3])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for level, share in (("token", 3 / 4), ("sequence", 1 / 2)):
        args = log_probs, torch.zeros(2, 3), None, torch.ones(2), mask
        _, metrics = grpo.grpo_loss(*args, beta=0, importance_sampling_level=level)
        assert near(metrics["clip_ratio/high_mean"], share), level


# ================================================================ GRPO: the KL


@pytest.mark.parametrize(
    "delta, kl", [(0, 0), (1, 0.367879), (-1, 0.718282), (2, 1.135335), (-2, 4.389056), (3, 2.049787), (-3, 16.085537)]
)
def test_A13_k3_is_exp_of_minus_delta_plus_delta_minus_1(delta, kl):
    # delta = log pi_theta - log pi_ref. A14: never negative, about linear for delta > 0, exponential for delta < 0.
    got = grpo.kl_divergence(row(delta - 1.0), row(-1.0))
    assert near(got, [[kl]]) and (got >= 0).all(), "k3 = exp(-delta) + delta - 1"


def test_A13_the_loss_adds_beta_times_the_kl():
    # policy = old, A = 2, delta = -1: -(2 - 0.1 x 0.718282) = -1.928172. Gradient: -2 + 0.1 (1 - e) = -2.171828
    log_probs = row(-2.0, grad=True)
    loss, metrics = grpo.grpo_loss(
        log_probs, log_probs.detach(), row(-1.0), torch.tensor([2.0]), torch.ones(1, 1), beta=0.1
    )
    loss.backward()
    assert near(loss, -1.928172) and near(metrics["kl"], 0.718282), "loss = -(objective - beta KL)"
    assert near(log_probs.grad, [[-2.171828]]), "the KL pulls back a policy that gave up a token the reference likes"


def test_k1_and_k3_are_unbiased_and_their_gradients_are_not_what_one_expects():
    # Exact expectations over a vocabulary of five. p = policy, q = reference.
    torch.manual_seed(0)
    logits, q = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64).softmax(0)
    log_p = log_softmax(logits, 0)
    p = log_p.detach().exp()
    reverse = (log_p.exp() * (log_p - q.log())).sum()  # KL(p || q)
    forward = (q * (q.log() - log_p)).sum()  # KL(q || p)
    gradient = {}
    for name in ("k1", "k2", "k3"):
        mean = (p * grpo.kl_divergence(log_p, q.log(), name)).sum()  # the samples' probabilities are not differentiated
        (gradient[name],) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert name == "k2" or near(mean, reverse, 1e-12), f"E[{name}] = KL(p || q)"
    (reverse_gradient,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad(forward, logits)
    assert near(gradient["k1"], torch.zeros(5), 1e-12), "k1 in a loss does nothing: E[grad log p] = 0"
    assert near(gradient["k2"], reverse_gradient, 1e-12), "k2 in a loss has the gradient of KL(p || q)"
    assert near(gradient["k3"], forward_gradient, 1e-12), "k3 in a loss has the gradient of KL(q || p)"


def test_B8_a_single_k1_can_be_negative_but_its_mean_under_the_policy_cannot():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    k1 = grpo.kl_divergence(p.log(), q.log(), "k1")  # ln(5/9) = -0.588, ln 5 = 1.609
    assert k1[0] < 0 < (p * k1).sum(), "0.5 x -0.588 + 0.5 x 1.609 = 0.511"


def test_at_beta_0_no_reference_is_needed_and_with_one_the_kl_is_only_reported():
    args = row(-1.0, -2.0), row(-1.0, -2.0)
    without, metrics = grpo.grpo_loss(*args, None, torch.tensor([1.0]), torch.ones(1, 2), beta=0)
    with_ref, reported = grpo.grpo_loss(*args, row(-2.0, -3.0), torch.tensor([1.0]), torch.ones(1, 2), beta=0)
    assert without == with_ref == -1 and "kl" not in metrics and near(reported["kl"], 0.367879)


# ================================================================ GRPO: masks, means, numbers that overflow


def ragged(seed=0, batch=5, length=4):
    """Random log-probs (policy, old, reference), advantages and a ragged mask with an empty row, in float64."""
    torch.manual_seed(seed)
    log_probs, old, ref = -torch.rand(3, batch, length, dtype=torch.float64) * 2
    lengths = torch.tensor([1, 4, 0, 2, 3])[:batch]
    mask = (torch.arange(length) < lengths[:, None]).long()
    return log_probs, old, ref, torch.randn(batch, dtype=torch.float64), mask


@pytest.mark.parametrize("loss_type, expected", [("grpo", -1.5), ("dapo", -1.75), ("dr_grpo", -0.7)])
def test_loss_types_differ_in_what_they_average_over(loss_type, expected):
    # Ratio 1, A = 1 with one token and A = 2 with three.
    # grpo: (1 + 2) / 2 sequences = 1.5; dapo: (1 + 2 x 3) / 4 tokens = 1.75; dr_grpo: 7 / (2 x 5) = 0.7
    log_probs, mask = torch.zeros(2, 3), torch.tensor([[1, 0, 0], [1, 1, 1]])
    args = log_probs, log_probs, log_probs, torch.tensor([1.0, 2.0]), mask
    loss, _ = grpo.grpo_loss(*args, loss_type=loss_type, max_completion_length=5)
    assert near(loss, expected), loss_type


def test_dr_grpo_without_a_max_completion_length_divides_by_the_width_of_the_batch():
    loss, _ = grpo.grpo_loss(*[torch.zeros(2, 4)] * 3, torch.ones(2), torch.ones(2, 4), loss_type="dr_grpo")
    assert near(loss, -1.0), "8 tokens of -1 over 2 x 4"


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batches_have_the_gradient_of_the_whole_batch(loss_type, level):
    log_probs, old, ref, advantages, mask = ragged()
    options = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": 6}
    # One of five rows is empty: 4 sequences, 10 tokens, 5 x 6 places.
    normalizer = {"grpo": 4, "dapo": 10, "dr_grpo": 30}[loss_type]
    whole = log_probs.clone().requires_grad_()
    loss, _ = grpo.grpo_loss(whole, old, ref, advantages, mask, **options)
    loss.backward()
    pieces, total = log_probs.clone().requires_grad_(), 0
    for rows in torch.arange(5).split(2):  # 2 + 2 + 1: the last one is ragged
        args = pieces[rows], old[rows], ref[rows], advantages[rows], mask[rows]
        part, _ = grpo.grpo_loss(*args, normalizer=normalizer, **options)
        part.backward()
        total += part.detach()
    assert near(total, loss, 1e-12) and near(pieces.grad, whole.grad, 1e-12), "normalizer is the whole batch's divisor"


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4, -1e4, 200.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_stands_under_mask_0_has_no_influence(garbage, level):
    log_probs, old, ref, advantages, mask = ragged()

    def run(fill):
        inputs = [x.masked_fill(mask == 0, fill).requires_grad_() for x in (log_probs, old, ref)]
        loss, metrics = grpo.grpo_loss(*inputs, advantages, mask, delta=1.5, importance_sampling_level=level)
        return loss, metrics, torch.autograd.grad(loss, inputs)[0]

    (loss, metrics, gradient), (clean_loss, clean_metrics, clean_gradient) = run(garbage), run(0.0)
    assert loss == clean_loss and metrics == clean_metrics, f"{garbage} in the padding changed the loss or a metric"
    assert torch.equal(gradient, clean_gradient), f"{garbage} in the padding changed the gradient: NaN x 0 is NaN"
    assert (gradient[mask == 0] == 0).all(), "padding has gradient 0"


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_ratio_of_200_overflows_neither_loss_nor_gradient(log_ratio, level):
    for advantage in (1.0, -1.0):
        log_probs = row(-1.0, log_ratio, grad=True)
        loss, metrics = grpo.grpo_loss(
            log_probs.float(), row(0, 0).float(), row(0, 0).float(), torch.tensor([advantage]), torch.ones(1, 2),
            importance_sampling_level=level,
        )  # fmt: skip
        loss.backward()
        finite = [loss, log_probs.grad, *metrics.values()]
        assert all(x.isfinite().all() for x in finite), "log-ratios are clamped to +-20 before exp"


def test_an_all_zero_mask_gives_loss_0_and_gradient_0():
    for loss_type, level in itertools.product(("grpo", "dapo", "dr_grpo"), ("token", "sequence")):
        log_probs = torch.full((2, 3), math.nan, requires_grad=True)
        args = log_probs, torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), torch.zeros(2, 3)
        loss, metrics = grpo.grpo_loss(*args, loss_type=loss_type, importance_sampling_level=level)
        loss.backward()
        assert loss == 0 and (log_probs.grad == 0).all(), f"{loss_type}, {level}: nothing to learn is no NaN"
        assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_be_bool_int_or_float(kind):
    log_probs, old, ref, advantages, mask = ragged()
    loss = grpo.grpo_loss(log_probs, old, ref, advantages, mask.to(kind))[0]
    assert loss == grpo.grpo_loss(log_probs, old, ref, advantages, mask)[0] and loss.dtype == torch.float64


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_is_the_numerical_one(loss_type, level):
    log_probs, old, ref, advantages, mask = ragged()
    options = {"loss_type": loss_type, "importance_sampling_level": level, "delta": 1.7, "beta": 0.3}
    assert torch.autograd.gradcheck(
        lambda x: grpo.grpo_loss(x, old, ref, advantages, mask, **options)[0], log_probs.requires_grad_()
    )


def test_metrics_are_detached_and_approx_kl_is_old_minus_new():
    log_probs, old, ref, advantages, mask = ragged()
    _, metrics = grpo.grpo_loss(log_probs.requires_grad_(), old, ref, advantages, mask)
    assert not any(value.requires_grad for value in metrics.values())
    assert near(metrics["approx_kl"], (old - log_probs)[mask.bool()].mean()), "mean of old minus new over the tokens"
    kl = grpo.kl_divergence(log_probs, ref)[mask.bool()].mean()
    assert near(metrics["kl"], kl), "kl is a mean over tokens"


def test_an_unknown_variant_is_a_ValueError_that_lists_what_there_is():
    args = [torch.zeros(2, 2)] * 3 + [torch.zeros(2), torch.ones(2, 2)]
    for call, listed in (
        (lambda: grpo.grpo_loss(*args, loss_type="x"), "dr_grpo"),
        (lambda: grpo.grpo_loss(*args, importance_sampling_level="x"), "sequence"),
        (lambda: grpo.kl_divergence(args[0], args[0], "x"), "k3"),
        (lambda: grpo.group_advantages(torch.zeros(4), 2, "x"), "batch"),
    ):
        with pytest.raises(ValueError, match=listed):
            call()


# ================================================================ the task


def test_happiness_counts_families_of_words_once_and_saturates():
    assert grpo.happiness(" smiled, laughed") == pytest.approx(2 / 3), "two cheerful families of three"
    assert grpo.happiness("Happy happily HAPPINESS!") == pytest.approx(1 / 3), "one family, however often"
    assert grpo.happiness("a sad, lonely friend") == pytest.approx(-1 / 3), "1 - 2"
    assert grpo.happiness("joy fun love hug smile dance") == 1, "three are enough: a list pays no more"
    assert grpo.happiness("") == grpo.happiness("unhappyish") == 0, "whole words only"


def test_the_held_out_prompts_are_16_and_none_is_trained_on():
    assert len(set(grpo.HELD_OUT_PROMPTS)) == 16 and not set(grpo.HELD_OUT_PROMPTS) & set(grpo.PROMPTS)
    assert not set(grpo.CHEERFUL) & set(grpo.GLOOMY), "no word is both"


# ================================================================ model and sampling


@pytest.fixture(scope="module")
def tiny():
    """(model, tokenizer): the embedded model, as the scripts load it."""
    return grpo.load(options())


def options(**changes):
    """The part of the command line's arguments that loading and sampling read."""
    args = {"model": "tiny_llama", "device": torch.device("cpu"), "dtype": torch.float32, "lora_targets": ["q_proj"]}
    return Namespace(**args | {"max_completion_length": 32, "temperature": 1.0} | changes)


def with_lora(**changes):
    """A fresh tiny_llama with a LoRA adapter, and its tokenizer."""
    model, tokenizer = grpo.load(options())
    config = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    return get_peft_model(model, LoraConfig(**config)).eval(), tokenizer


def by_heart(sequence, vocabulary=10):
    """A model that is certain of the next token of one sequence: logits at t single out token t + 1."""

    def model(input_ids, logits_to_keep=0, **_):
        following = torch.tensor(sequence[1:] + [0]).expand(len(input_ids), -1)
        logits = torch.nn.functional.one_hot(following, vocabulary).float() * 1000
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    return model


def test_A1_the_model_continues_the_quick_brown_fox(tiny):
    model, tokenizer = tiny
    *_, mask, texts = grpo.complete(
        model, tokenizer, ["The quick brown fox jumped over the"], options(max_completion_length=2)
    )
    assert mask.shape[1] <= 2 and isinstance(texts[0], str)


def test_A2_the_tokenizer_ends_a_text_with_eos_but_no_eos_stands_inside_what_the_model_sees(tiny):
    model, tokenizer = tiny
    assert tokenizer("The dog").input_ids[-1] == tokenizer.eos_token_id, "as babyllama's tokenizer does"
    ids, attention_mask, mask, _ = grpo.complete(model, tokenizer, grpo.HELD_OUT_PROMPTS, options())
    prompt = ids[:, : -mask.shape[1]]
    assert not (prompt == tokenizer.eos_token_id).any(), "an EOS after the prompt says that the story is over"


def test_A3_lora_trains_rank_times_in_plus_out_parameters_a_projection():
    # q_proj and v_proj of 192 x 192 in 4 layers: 4 x 2 x 8 x (192 + 192) = 24,576
    model, _ = with_lora()
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    out = width * config.num_attention_heads + width * config.num_key_value_heads
    expected = config.num_hidden_layers * 8 * (2 * config.hidden_size + out)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected


def test_A4_with_B_0_policy_and_reference_are_one_and_with_a_random_B_they_are_not():
    torch.manual_seed(0)
    for random_b in (True, False):
        model, tokenizer = with_lora(init_lora_weights=not random_b)
        batch = tokenizer([" The dog ran to the big house."], return_tensors="pt")
        args = model, batch.input_ids, batch.attention_mask, 5
        with torch.no_grad():
            new = grpo.token_log_probs(*args)
            with model.disable_adapter():
                ref = grpo.token_log_probs(*args)
        loss, _ = grpo.grpo_loss(new, ref, ref, torch.tensor([2.0]), torch.ones(1, 5), beta=0, epsilon=None)
        assert (abs(loss + 2) > 0.1) if random_b else loss == -2, "training starts at B = 0"


def test_A5_the_mask_covers_the_completion_and_its_first_eos():
    eos = 2
    for completion, expected in (
        ([5, 6, 7], [1, 1, 1]),  # truncated: no EOS
        ([5, 2, 0], [1, 1, 0]),  # the EOS counts, the padding does not
        ([5, 2, 2], [1, 1, 0]),  # also where pad == EOS
        ([2, 2, 2], [1, 0, 0]),  # an empty answer is one EOS
    ):
        assert grpo.completion_mask(torch.tensor([completion]), eos).tolist() == [expected]


def test_A6_the_log_prob_of_a_token_is_read_one_position_before_it():
    sequence = [3, 1, 4, 1, 5, 9, 2, 6]
    ids = torch.tensor([sequence])
    got = grpo.token_log_probs(by_heart(sequence), ids, torch.ones_like(ids), 3)
    assert near(got, torch.zeros(1, 3)), "a model that knows the sequence by heart is certain of each token"
    logits = by_heart(sequence)(ids, logits_to_keep=8).logits
    unshifted = log_softmax(logits, -1).gather(2, ids[..., None])[0, -3:, 0]
    assert (unshifted < -100).all(), "the article's version, unshifted, finds the same tokens impossible"


def test_A7_a_row_has_the_same_log_probs_alone_and_in_a_left_padded_batch(tiny):
    model, tokenizer = tiny
    ids, attention_mask, mask, _ = grpo.complete(model, tokenizer, ["The dog", grpo.HELD_OUT_PROMPTS[1]], options())
    assert (attention_mask[0] == 0).any(), "the first prompt is the shorter one"
    T, n = mask.shape[1], int(mask[0].sum())
    with torch.no_grad():
        batch = grpo.token_log_probs(model, ids, attention_mask, T)[0, :n]
        keep = attention_mask[0].bool()
        alone = grpo.token_log_probs(model, ids[:1, keep], attention_mask[:1, keep], n)[0]
        lost = grpo.token_log_probs(model, ids, torch.ones_like(ids), T)[0, :n]
    assert near(batch, alone, 1e-4), "the padding is masked, and the positions are counted without it"
    assert not near(lost, alone, 1e-2), "this test would notice a lost mask (attention_masks= loses it silently)"


def test_columns_that_are_padding_in_every_row_cost_nothing_and_get_0(tiny):
    model, tokenizer = tiny
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 0, 0], [0, 9, 5, 6, 7, 0, 0, 0]])
    with torch.no_grad():
        got = grpo.token_log_probs(model, ids, (ids != 0).long(), 4)
        narrow = grpo.token_log_probs(model, ids[:, 1:6], (ids[:, 1:6] != 0).long(), 2)
    assert got.shape == (2, 4) and near(got[:, :2], narrow) and (got[:, 2:] == 0).all()


def test_log_probs_are_divided_by_the_sampling_temperature(tiny):
    model, _ = tiny
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        got = grpo.token_log_probs(model, ids, torch.ones_like(ids), 2, temperature=2.0)
        logits = model(input_ids=ids).logits[:, 1:3]
    expected = log_softmax(logits / 2, -1).gather(2, ids[:, 2:, None])[..., 0]
    assert near(got, expected) and got.dtype == torch.float32


def test_B1_before_the_first_update_the_ratio_is_exactly_1_and_the_kl_exactly_0():
    model, tokenizer = with_lora()
    ids, attention_mask, mask, _ = grpo.complete(model, tokenizer, ["The dog", *grpo.HELD_OUT_PROMPTS[:3]], options())
    new = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1])  # with gradient, as in the update
    with torch.no_grad():
        old = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1])
        with model.disable_adapter():
            ref = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1])
    _, metrics = grpo.grpo_loss(new, old, ref, torch.ones(4), mask)
    assert torch.equal(new, old) and metrics["kl"] == 0 and metrics["approx_kl"] == 0, "no dropout, no train mode"
    assert all(p.requires_grad == ("lora" in name) for name, p in model.named_parameters()), (
        "disable_adapter left its mark"
    )


def uniform_model(vocabulary=200):
    """A Llama whose next token is any of the vocabulary's with the same probability."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=False, **shape)).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def test_sampling_draws_from_the_whole_vocabulary_not_from_the_50_likeliest():
    torch.manual_seed(0)
    prompt = torch.ones(2000, 1, dtype=torch.long)
    ids = grpo.sample(uniform_model(), prompt, prompt, 1, eos_token_id=2, pad_token_id=0)
    assert ids.unique().numel() > 190, "2000 draws from 200 equally likely tokens miss hardly any; top_k=50 misses 150"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_draws_from_the_softmax_at_its_temperature(temperature):
    torch.manual_seed(0)
    model, logits, n = uniform_model(4), torch.tensor([0.0, 1.0, 2.0, -1.0]), 20_000
    model.forward = lambda **_: SimpleNamespace(logits=logits.expand(n, 1, 4))
    prompt = torch.ones(n, 1, dtype=torch.long)
    ids = grpo.sample(model, prompt, prompt, 1, temperature=temperature, eos_token_id=9, pad_token_id=0)
    frequency = torch.bincount(ids.flatten(), minlength=4) / n
    assert near(frequency, (logits / temperature).softmax(0), 0.015), "four standard errors are 0.014"


def test_sampling_pads_behind_the_eos_and_stops_when_every_row_has_one(tiny):
    model, tokenizer = tiny
    torch.manual_seed(0)
    batch = tokenizer(["The dog"] * 32, add_special_tokens=False, return_tensors="pt")
    ids = grpo.sample(model, batch.input_ids, batch.attention_mask, 200, eos_token_id=2, pad_token_id=0)
    behind = grpo.completion_mask(ids, 2) == 0
    assert (ids[behind] == 0).all() and ids.shape[1] < 200
    assert (ids[~behind] != 0).all(), "a real model does not write <pad>"


def test_greedy_steps_with_the_cache_agree_with_a_pass_over_the_whole_text(tiny):
    model, tokenizer = tiny
    batch = tokenizer(
        ["The dog", grpo.HELD_OUT_PROMPTS[1]], add_special_tokens=False, padding=True, return_tensors="pt"
    )
    special = {"eos_token_id": 2, "pad_token_id": 0, "temperature": 1e-4}  # so cold that the likeliest token wins
    ids = grpo.sample(model, batch.input_ids, batch.attention_mask, 6, **special)
    mask = grpo.completion_mask(ids, 2)
    full, attention = torch.cat([batch.input_ids, ids], 1), torch.cat([batch.attention_mask, mask], 1)
    with torch.no_grad():
        log_probs = grpo.token_log_probs(model, full, attention, ids.shape[1], temperature=1e-4)
    assert (log_probs[mask.bool()] > -0.1).all(), "cache, mask and positions are those of the full pass"


# ================================================================ grpo.py end to end


SMALL = ["--prompts-per-step", "2", "--num-generations", "4", "--max-completion-length", "8"]


def run_grpo(out, *extra, steps=2, size=SMALL):
    """grpo.main on tiny_llama, with small batches unless `size` is []."""
    return grpo.main(["--model", "tiny_llama", "--out", str(out), "--steps", str(steps), *size, *extra])


@pytest.fixture
def quick(monkeypatch):
    """Judge on one held-out prompt: what these tests are about is something else."""
    monkeypatch.setattr(grpo, "HELD_OUT_PROMPTS", grpo.HELD_OUT_PROMPTS[:1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, summary) of a short run with the default options."""
    out = tmp_path_factory.mktemp("runs") / "grpo"
    return out, run_grpo(out, steps=15, size=[])


def test_A15_training_makes_the_stories_happier_by_5_standard_errors(trained):
    before, after = trained[1]["happiness_before"], trained[1]["happiness_after"]
    error = math.hypot(before["standard_error"], after["standard_error"])
    assert after["mean"] - before["mean"] > 5 * error, f"{before} -> {after}"
    assert before["n"] == after["n"] == 256 and trained[1]["kl_before"]["mean"] == 0 < trained[1]["kl_after"]["mean"]


def test_a_run_starts_at_ratio_1_and_kl_0_and_leaves_metrics_and_a_summary(trained):
    out, summary = trained
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 16)) and records[-1]["samples"] == 15 * 64
    assert records[0]["kl"] == records[0]["approx_kl"] == 0 < records[-1]["kl"], "the adapter starts at B = 0"
    assert abs(records[0]["loss"]) < 1e-5 < records[0]["grad_norm"], "the loss starts at 0, its gradient does not"
    saved = json.loads((out / "summary.json").read_text())
    assert saved["happiness_after"] == summary["happiness_after"] and saved["stopped"] is None
    assert {p.name for p in out.parent.iterdir()} == {"grpo"}, "nothing half-written is left beside it"


def test_the_saved_adapter_gives_the_same_log_probs_in_a_new_process(trained):
    code = """if True:
        import sys, torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
        ids = torch.arange(3, 23)[None]
        torch.manual_seed(1)
        with torch.no_grad():
            logits = PeftModel.from_pretrained(base, sys.argv[2])(input_ids=ids).logits
        print(logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum().item())
    """
    got = subprocess.run(
        [sys.executable, "-c", code, str(HERE / "tiny_llama"), str(trained[0])], capture_output=True, text=True
    )
    model, ids = PeftModel.from_pretrained(grpo.load(options())[0], trained[0]), torch.arange(3, 23)[None]
    with torch.no_grad():
        here = grpo.token_log_probs(model, ids, torch.ones_like(ids), 19).sum().item()
        with model.disable_adapter():
            untrained = grpo.token_log_probs(model, ids, torch.ones_like(ids), 19).sum().item()
    assert float(got.stdout) == pytest.approx(here, abs=1e-3) != pytest.approx(untrained, abs=1e-3), got.stderr


def test_the_same_seed_gives_the_same_metrics_and_another_one_does_not(tmp_path, quick):
    metrics = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run_grpo(tmp_path / name, "--seed", seed, "--num-iterations", "2")
        metrics.append((tmp_path / name / "metrics.jsonl").read_text())
    assert metrics[0] == metrics[1] != metrics[2]


def test_the_size_of_the_micro_batch_does_not_change_what_is_learned(tmp_path, quick):
    weights = []
    for size in ("3", "16"):
        run_grpo(tmp_path / size, "--micro-batch-size", size, "--loss-type", "dapo", steps=1)
        record = json.loads((tmp_path / size / "metrics.jsonl").read_text())
        weights.append(torch.tensor([record["loss"], record["grad_norm"], record["kl"], record["reward"]]))
    assert near(weights[0], weights[1], 1e-4), "loss, gradient and metrics are the whole batch's"


def test_later_iterations_on_a_batch_have_a_ratio_other_than_1(tmp_path, quick):
    for iterations in (1, 2):
        run_grpo(tmp_path / "x", "--num-iterations", str(iterations), "--learning-rate", "0.01", steps=1)
        record = json.loads((tmp_path / "x" / "metrics.jsonl").read_text())
        assert (record["approx_kl"] == 0) == (iterations == 1), "B1: on-policy in the first pass, off-policy later"


@pytest.mark.parametrize(
    "extra",
    [
        ["--beta", "0"],
        ["--epsilon", "none", "--scale-rewards", "none", "--loss-type", "dr_grpo"],
        [
            "--importance-sampling-level",
            "sequence",
            "--delta",
            "2",
            "--epsilon-high",
            "0.28",
            "--scale-rewards",
            "batch",
        ],
        ["--temperature", "0.7", "--num-generations", "3", "--micro-batch-size", "1", "--lora-targets", "o_proj"],
    ],
)
def test_every_variant_runs(tmp_path, quick, extra):
    summary = run_grpo(tmp_path / "x", *extra, steps=1)
    assert summary["steps"] == 1 and (tmp_path / "x" / "adapter_model.safetensors").exists()


# ================================================================ what goes wrong


def refused(capsys, *argv):
    """The one sentence on stderr with which grpo.py refuses, with exit status 2, before it loads or trains anything."""
    with pytest.raises(SystemExit) as end:
        grpo.main([*argv])
    sentence = capsys.readouterr().err.strip()
    assert end.value.code == 2 and sentence.count("\n") == 0 and sentence.startswith("grpo.py: "), sentence
    return sentence


@pytest.mark.parametrize(
    "argv, named",
    [
        (["--num-generations", "1"], "--num-generations"),
        (["--steps", "0"], "--steps"),
        (["--steps", "2.5"], "--steps"),
        (["--max-completion-length", "-3"], "--max-completion-length"),
        (["--temperature", "0"], "--temperature"),
        (["--learning-rate", "-1"], "--learning-rate"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--epsilon", "0"], "--epsilon"),
        (["--epsilon", "inf"], "--epsilon"),
        (["--beta", "-0.1"], "--beta"),
        (["--loss-type", "grpoo"], "dr_grpo"),
        (["--device", "warp"], "--device"),
        (["--step", "5"], "--step"),
        (["--model", "no/such-model"], "no/such-model"),
        (["--model", "test_losses.py"], "test_losses.py"),
        (["--lora-targets", "q_proj", "c_attn"], "c_attn"),
        (["--max-completion-length", "256"], "context"),
        (["--prompts", "no_such_file"], "no_such_file"),
    ],
)
def test_bad_options_are_refused_in_one_sentence_that_names_them(argv, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grpo, "hub_has", lambda name: False)
    model = [] if "--model" in argv else ["--model", "tiny_llama"]
    assert named in refused(capsys, *model, "--out", str(tmp_path / "x"), *argv)


def test_bad_folders_and_files_are_refused_in_one_sentence_that_names_them(tmp_path, capsys):
    out = ["--model", "tiny_llama", "--out", str(tmp_path / "x")]
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, *out[2:], "--model", str(tmp_path / "empty"))
    for content, named in ((b"", "blank"), (b" \n\r\n", "blank"), (b"caf\xe9", "utf-8")):
        (tmp_path / "prompts").write_bytes(content)
        assert named in refused(capsys, *out, "--prompts", str(tmp_path / "prompts")), content
    assert "directory" in refused(capsys, *out, "--prompts", str(tmp_path)).lower()
    assert "--out" in refused(capsys, *out[:2], "--out", str(tmp_path / "prompts" / "x")), "a file is no folder"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert "--out" in refused(capsys, *out[:2], "--out", str(tmp_path / "mine")), "a run replaces its folder: not yours"


def test_a_prompts_file_may_have_a_byte_order_mark_windows_line_ends_and_blank_lines(tmp_path):
    (tmp_path / "prompts").write_bytes("\ufeffOne day\r\n\r\n Zoë said\u2028so\n".encode())
    assert grpo.read_prompts(tmp_path / "prompts") == ["One day", "Zoë said\u2028so"]


@pytest.mark.parametrize(
    "bad, named",
    [
        (lambda texts: None, "None"),
        (lambda texts: [0.0], "1 values"),
        (lambda texts: [0.0, 1.0, math.nan] + [0.0] * 5, "completion 2 is nan"),
        (lambda texts: [0.0, "great"] + [0.0] * 6, "completion 1 is 'great'"),
        (lambda texts: [None] * 8, "completion 0 is None"),
        (lambda texts: "12345678", "'12345678'"),
    ],
)
def test_a_reward_that_is_no_number_stops_the_run_and_is_named(bad, named, tmp_path, capsys, monkeypatch, quick):
    monkeypatch.setattr(grpo, "reward", lambda prompts, texts: bad(texts))
    with pytest.raises(SystemExit) as end:
        run_grpo(tmp_path / "x")
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "step 1" in error and named in error and not (tmp_path / "x").exists()


def test_a_reward_may_be_a_tensor_or_hold_ints_and_bools():
    for rewards in (torch.tensor([1, 0]), [1, 0], (True, False), torch.tensor([1.0, 0.0], dtype=torch.float64)):
        assert grpo.checked(rewards, ["a", "b"], 1) == [1.0, 0.0]


def stop_in_step_3(monkeypatch, what):
    """Let the third call of grpo.group_advantages do `what`."""
    calls, real = itertools.count(1), grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *args: what() if next(calls) == 3 else real(*args))


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_the_last_good_weights(tmp_path, capsys, monkeypatch, quick):
    stop_in_step_3(monkeypatch, lambda: torch.full((8,), math.nan))
    with pytest.raises(SystemExit) as end:
        run_grpo(tmp_path / "x", steps=5)
    assert end.value.code == 2 and "step 3" in capsys.readouterr().err.splitlines()[-1]
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["steps"] == 2 and "step 3" in summary["stopped"]
    model = PeftModel.from_pretrained(grpo.load(options())[0], tmp_path / "x")
    assert all(p.isfinite().all() for p in model.parameters())


def test_ctrl_c_saves_the_weights_of_the_last_whole_step(tmp_path, capsys, monkeypatch, quick):
    def press():
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        stop_in_step_3(monkeypatch, press)
        with pytest.raises(SystemExit) as end:
            run_grpo(tmp_path / "x", steps=5)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "a second Ctrl-C ends at once"
    finally:
        signal.signal(signal.SIGINT, handler)
    assert end.value.code == 130 and "step 2" in capsys.readouterr().err.splitlines()[-1]
    run_grpo(tmp_path / "two", steps=2)
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("x", "two")]
    assert weights[0] == weights[1], "as if only two steps had been asked for"


def test_a_failed_save_leaves_the_old_result_whole(tmp_path, quick):
    def broken(folder):
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    out = tmp_path / "x"
    run_grpo(out)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OSError, match="disk full"):
        grpo.save(out, broken, [], {}, {})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files, "written beside it, renamed at the end"


def test_without_a_network_the_default_is_the_cached_model_or_tiny_llama_and_soon(tmp_path):
    code = """if True:
        import time; start = time.time()
        import grpo
        from test_losses import options
        args = options(model=None)
        grpo.load(args)
        print(args.model, time.time() - start)
    """
    cached = tmp_path / "full" / "hub" / "models--babylm--babyllama-100m-2024"
    shutil.copytree(
        HERE / "tiny_llama", cached / "snapshots" / ("0" * 40), ignore=shutil.ignore_patterns("work", "*.py", "*.md")
    )
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    offline = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    offline |= {"HF_ENDPOINT": "http://127.0.0.1:9"}  # nothing listens there
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=offline | {"HF_HOME": str(tmp_path / home)}, cwd=HERE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for home in ("none", "full")
    ]  # fmt: skip
    (nothing, _), (full, errors) = (process.communicate(timeout=100) for process in processes)
    first, last = nothing.strip().split("\n")
    assert "hub cannot be reached" in first and "tiny_llama" in first, "the first line of output says so"
    assert last.split()[0] == "tiny_llama" and float(last.split()[1]) < 20, "within 20 s"
    assert full.split()[0] == "babylm/babyllama-100m-2024", f"a cached model is used: {full} {errors}"


# ================================================================ the files themselves


def definitions(path):
    """{name: source} of a script's top-level functions."""
    source = path.read_text(encoding="utf-8")
    return {n.name: ast.get_source_segment(source, n) for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}


def test_functions_of_one_name_have_one_text_in_all_scripts():
    texts = {}
    for path in SCRIPTS:
        for name, text in definitions(path).items():
            if name not in ("train", "parse_args", "main"):
                assert texts.setdefault(name, text) == text, f"{name} in {path.name} differs from the other scripts"


def test_scripts_import_only_what_requirements_name_and_never_each_other():
    allowed = set(sys.stdlib_module_names) | {"torch", "transformers", "peft", "tqdm", "matplotlib"}
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert all(name.split(".")[0] in allowed for name in names), f"{path.name} imports {names}"
