"""The sanity suite: every test's name is the sentence it proves, its arithmetic stands in a comment.

    pytest                    # all of it, no network
    pytest -k "B9_ or B11_"   # what you are working on: README.md says which ids are whose

In this order:

    GRPO's functions; the task; model and sampling; grpo.py end to end; what goes wrong (options, files, Ctrl-C)
    reward_model.py, ppo.py, dpo.py: what each has of its own, functions first
    learning: the four scripts, run for a minute beside the other tests; the files themselves

Ids such as A11 or B18 are the points of the two articles; README.md has the table.
"""

import ast
import contextlib
import copy
import inspect
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import dpo
import grpo
import ppo
import reward_model

HERE = Path(__file__).resolve().parent
SCRIPTS = [HERE / name for name in ("grpo.py", "ppo.py", "dpo.py", "reward_model.py")]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses names that transformers has renamed


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """No curves.png: to draw one takes longer than most tests, and none looks at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        yield


# ================================================================ helpers: tensors, made and compared
# near is a yes or no, for an assert; close raises, and shows both tensors.


def near(value, expected, tolerance=1e-5):
    """Whether a tensor or number is `expected`, element by element."""
    value = torch.as_tensor(value).detach().double()
    return torch.allclose(value, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def close(value, expected, why, tolerance=1e-6):
    """A tensor or number is `expected`, element by element; if not, the error says why it should be."""
    value, expected = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{why}\n{text}")


def row(*values, grad=False):
    """A batch of one sequence: (1, T)."""
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def rows64(*rows):
    """A batch of sequences, each a list: (B, T)."""
    return torch.tensor(rows, dtype=torch.float64)


def float64(*values):
    """A vector that takes gradient."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


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


def test_two_answers_make_a_group():
    # mean 0.5; sample std sqrt((0.25 + 0.25) / 1) = 0.707107; 0.5 / 0.707207 = 0.707007
    assert near(grpo.group_advantages(torch.tensor([1.0, 0]), 2), [0.707007, -0.707007]), "num_generations=2 is allowed"


def test_a_group_of_one_and_a_broken_group_are_refused():
    for rewards, size in (([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 2)):
        with pytest.raises(ValueError, match="num_generations"):
            grpo.group_advantages(torch.tensor(rewards), size)


# ================================================================ GRPO: the clipped objective


def one_sequence(log_probs, old, advantage, ref=None, **options):
    """grpo_loss of one sequence whose tokens all count: (1, T), (1, T) and a number."""
    return grpo.grpo_loss(log_probs, old, ref, torch.tensor([advantage]), torch.ones_like(log_probs), **options)


def test_A9_ratio_1_gives_minus_the_advantage():
    # policy = old policy, A = 2: -(1 x 2) = -2. Its gradient is -A / T = -2/3 a token, not 0.
    log_probs = row(-1.0, -2.0, -3.0, grad=True)
    loss, _ = one_sequence(log_probs, log_probs.detach(), 2.0, ref=log_probs.detach(), epsilon=None)
    loss.backward()
    assert near(loss, -2.0) and near(log_probs.grad, [[-2 / 3] * 3]), "ratio 1: loss -A, gradient -A / T"


def test_A8_the_ratio_is_to_the_old_policy_and_the_reference_enters_only_through_the_kl():
    loss, _ = one_sequence(row(-1.0, -1.0), row(-1.5, -1.5), 1.0, ref=row(-9.0, -9.0), epsilon=None, beta=0)
    assert near(loss, -math.exp(0.5)), "ratio = exp(log pi_theta - log pi_old), whatever the reference says"


def test_A11_a_positive_advantage_never_gives_less_than_minus_1_plus_epsilon_times_A():
    # Every ratio is e^0.5 = 1.65 or more, so clipped to 1.2: -1.2 x 2 = -2.4.
    log_probs = row(-1.0, -0.5, -0.1, grad=True)
    loss, metrics = one_sequence(log_probs, row(-1.5, -2.0, -9.0), 2.0, beta=0)
    loss.backward()
    assert near(loss, -2.4), "-(1 + epsilon) A"
    assert (log_probs.grad == 0).all(), "A12: a clipped token has no gradient, so -2.4 is no more stable than -2"
    shares = [metrics[f"clip_ratio/{side}_mean"] for side in ("high", "low")]
    assert shares == [1, 0], "the share of the clip that took the gradient, and no other"


def test_A12_a_negative_advantage_is_not_bounded_without_delta():
    # A = -2, ratio 3: min(3 x -2, 1.2 x -2) = -6, loss +6, gradient -(-2) x 3 = 6. With delta = 2: loss 4, gradient 0.
    for delta, expected, slope in ((None, 6.0, 6.0), (2.0, 4.0, 0.0)):
        log_probs = row(math.log(3.0), grad=True)
        loss, metrics = one_sequence(log_probs, row(0.0), -2.0, beta=0, delta=delta)
        loss.backward()
        assert near(loss, expected) and near(log_probs.grad, [[slope]]), f"delta={delta} bounds a negative advantage"
        shares = [metrics[f"clip_ratio/{side}_mean"] for side in ("dual", "high")]
        assert shares == [delta is not None, 0], "the share of the clip that took the gradient, and no other"


def test_without_epsilon_delta_bounds_the_ratio_of_a_bad_token_and_of_no_other():
    # loss -ratio A, gradient the same; where A < 0 and the ratio is above delta: -delta A, gradient 0
    cases = (5, -1.0, 2.0, 2.0, 0.0), (5, 1.0, 2.0, -5.0, -5.0), (10, 0.5, 2.0, -5.0, -5.0), (10, -0.5, 2.0, 1.0, 0.0)
    for ratio, advantage, delta, expected, slope in (*cases, (0.5, -1.0, None, 0.5, 0.5)):
        log_probs = row(math.log(ratio), grad=True)
        loss, metrics = one_sequence(log_probs, row(0.0), advantage, beta=0, epsilon=None, delta=delta)
        loss.backward()
        assert near(loss, expected) and near(log_probs.grad, [[slope]]), f"ratio {ratio}, A {advantage}, delta {delta}"
        assert metrics["clip_ratio/dual_mean"] == (slope == 0) and metrics["clip_ratio/high_mean"] == 0, "dual's share"


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
    got, metrics = one_sequence(log_probs, row(0.0), advantage, beta=0, epsilon=0.2, epsilon_high=0.28)
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


@pytest.mark.parametrize("side, ratio, advantage", [("low", 0.5, -1.0), ("high", 2.0, 1.0), ("dual", 2.0, -1.0)])
def test_clip_shares_are_of_tokens_and_for_gspo_of_sequences(side, ratio, advantage):
    # Three ratios out of range and a 1: of four tokens three are clipped, of two sequences one. The third is empty.
    log_probs = torch.tensor([[math.log(ratio)] * 3, [0.0] * 3, [0.0] * 3])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    for level, share in (("token", 3 / 4), ("sequence", 1 / 2)):
        args = log_probs, torch.zeros(3, 3), None, torch.full((3,), advantage), mask
        _, metrics = grpo.grpo_loss(*args, beta=0, delta=1.5, importance_sampling_level=level)
        assert near(metrics[f"clip_ratio/{side}_mean"], share), f"{side}, of the {level}s"


def test_a_masked_mean_is_over_what_the_mask_keeps_and_of_nothing_it_is_0():
    x = torch.tensor([1.0, math.nan, 3.0])
    assert grpo.masked_mean(x, torch.tensor([True, False, True])) == 2, "(1 + 3) / 2"
    assert grpo.masked_mean(x, torch.zeros(3, dtype=torch.bool)) == 0


# ================================================================ GRPO: the KL


@pytest.mark.parametrize(
    "delta, kl", [(0, 0), (1, 0.367879), (-1, 0.718282), (2, 1.135335), (-2, 4.389056), (3, 2.049787), (-3, 16.085537)]
)
def test_A13_k3_is_exp_of_minus_delta_plus_delta_minus_1(delta, kl):
    # delta = log pi_theta - log pi_ref
    got = grpo.kl_divergence(row(delta - 1.0), row(-1.0))
    assert near(got, [[kl]]) and (got >= 0).all(), "k3 = exp(-delta) + delta - 1"


def test_A14_k3_grows_like_delta_where_the_policy_likes_a_token_more_and_exponentially_where_it_likes_it_less():
    delta = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    kl = grpo.kl_divergence(delta, torch.zeros_like(delta))
    assert (kl >= 0).all() and kl[800] == 0, "never negative, 0 at delta = 0"
    assert near(kl[-1], 7, 1e-3) and near(kl[0], math.exp(8) - 9), "delta - 1 above; exp(-delta) + delta - 1 below"
    three = grpo.kl_divergence(torch.tensor([-3.0, 3.0]), torch.zeros(2))
    assert near(three, [16.0855, 2.0498], 1e-4), "a token given up costs eight times one taken up"


def test_A13_the_loss_adds_beta_times_the_kl():
    # policy = old, A = 2, delta = -1: -(2 - 0.1 x 0.718282) = -1.928172. Gradient: -2 + 0.1 (1 - e) = -2.171828
    log_probs = row(-2.0, grad=True)
    loss, metrics = one_sequence(log_probs, log_probs.detach(), 2.0, ref=row(-1.0), beta=0.1)
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
    log_probs = row(-1.0, -2.0)
    without, metrics = one_sequence(log_probs, log_probs, 1.0, beta=0)
    with_ref, reported = one_sequence(log_probs, log_probs, 1.0, ref=row(-2.0, -3.0), beta=0)
    assert without == with_ref == -1, "beta 0: the KL is not in the loss"
    assert "kl" not in metrics and near(reported["kl"], 0.367879), "but reported where there is a reference"


def test_a_beta_above_0_without_ref_log_probs_is_a_ValueError():
    with pytest.raises(ValueError, match="ref_log_probs are needed"):
        one_sequence(row(-1.0), row(-1.0), 1.0, beta=0.1)


# ================================================================ masks, means, numbers that overflow


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


def test_without_options_the_loss_is_deepseekmaths():
    # (2 / 3) / (0.577350 + 1e-4) = 1.154501 and (20 / 3) / (5.773503 + 1e-4) = 1.154681: each group by its own std
    got = grpo.group_advantages(torch.tensor([1.0, 0, 0, 10, 0, 0]), 3)
    assert near(got[[0, 3]], [1.154501, 1.154681]), "scale_rewards is 'group'"
    # A = 1 with one token, A = 2 with three: (1 + 2) / 2 sequences. Log-ratios +-0.1: (e^0.1 + e^-0.1) / 2 = 1.005004
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss, _ = grpo.grpo_loss(*[torch.zeros(2, 3)] * 3, torch.tensor([1.0, 2.0]), mask)
    assert near(loss, -1.5), "loss_type is 'grpo', a mean of the sequences' means"
    loss, _ = one_sequence(row(0.1, -0.1), row(0, 0), 1.0, beta=0)
    assert near(loss, -1.005004), "importance_sampling_level is 'token': a ratio each, not one of e^0"


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
def test_what_stands_under_mask_0_has_no_influence_on_grpo_loss(garbage, level):
    log_probs, old, ref, advantages, mask = ragged()

    def run(fill):
        inputs = [x.masked_fill(mask == 0, fill).requires_grad_() for x in (log_probs, old, ref)]
        loss, metrics = grpo.grpo_loss(*inputs, advantages, mask, delta=1.5, importance_sampling_level=level)
        return loss, metrics, torch.autograd.grad(loss, inputs)[0]

    (loss, metrics, gradient), (clean_loss, clean_metrics, clean_gradient) = run(garbage), run(0.0)
    assert loss == clean_loss and metrics == clean_metrics, f"{garbage} in the padding changed the loss or a metric"
    assert torch.equal(gradient, clean_gradient), f"{garbage} in the padding changed the gradient: NaN x 0 is NaN"
    assert (gradient[mask == 0] == 0).all(), "padding has gradient 0"


@pytest.mark.parametrize("beyond", [20.5, 200.0])
def test_log_ratios_beyond_20_count_as_20(beyond):
    one, none = torch.ones(1, 1), row(0)
    for side in (1, -1):
        e = math.exp(20 * side)
        loss, _ = one_sequence(row(side * beyond), none, 1.0, epsilon=None, beta=0)
        assert near(loss / -e, 1, 1e-9), "ratio = exp(log-ratio within +-20)"
        loss, _ = ppo.policy_loss(row(side * beyond), none, -one, one, clip_low=1.0, clip_dual=None)
        assert near(loss / e, 1, 1e-9), "the same in PPO"
        k3 = math.exp(-20 * side) + 20 * side - 1
        assert near(grpo.kl_divergence(row(side * beyond), none) / k3, 1, 1e-9), "k3 of delta within +-20"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_at_the_very_edge_of_the_range_is_not_clipped(advantage):
    _, metrics = one_sequence(row(0), row(0), advantage, epsilon=0.0, delta=1.0, beta=0)
    one = torch.ones(1, 1)
    _, more = ppo.policy_loss(row(0), row(0), one * advantage, one, clip_low=0.0, clip_high=0.0, clip_dual=1.0)
    shares = [value for m in (metrics, more) for name, value in m.items() if name.startswith("clip_ratio")]
    assert len(shares) == 6 and not any(shares), "ratio 1, range [1, 1], delta 1: nothing is out of range"


def test_a_sequence_of_one_token_has_the_ratio_of_that_token():
    options = {"importance_sampling_level": "sequence", "epsilon": None, "beta": 0}
    mask = torch.tensor([[1, 0]])
    loss, _ = grpo.grpo_loss(row(0.5, 9), row(0, 0), None, -torch.ones(1), mask, **options)
    assert near(loss, math.exp(0.5)), "GSPO: exp(mean of the log-ratios), a mean over one"


def test_the_defaults_of_the_losses_are_those_of_their_sources():
    def defaults(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if isinstance(p.default, float)}

    assert defaults(grpo.grpo_loss) == {"epsilon": 0.2, "beta": 0.04}, "PPO; DeepSeekMath"
    assert defaults(ppo.policy_loss) == {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0}, "PPO; dual clip"
    assert defaults(ppo.value_loss) == {"cliprange_value": 0.2} and defaults(ppo.token_rewards) == {"kl_coef": 0.05}
    assert defaults(ppo.gae) == {"gamma": 1.0, "lam": 0.95}
    assert defaults(grpo.token_log_probs) == defaults(grpo.sample) == {"temperature": 1.0}, "plain sampling"


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_ratio_of_200_overflows_neither_loss_nor_gradient_of_grpo(log_ratio, level):
    for advantage in (1.0, -1.0):
        log_probs, zero = row(-1.0, log_ratio, grad=True), torch.zeros(1, 2)
        loss, metrics = one_sequence(log_probs.float(), zero, advantage, ref=zero, importance_sampling_level=level)
        loss.backward()
        finite = [loss, log_probs.grad, *metrics.values()]
        assert all(x.isfinite().all() for x in finite), "log-ratios are clamped to +-20 before exp"


def test_an_all_zero_mask_gives_loss_0_and_gradient_0_in_grpo_loss():
    for loss_type, level in itertools.product(("grpo", "dapo", "dr_grpo"), ("token", "sequence")):
        log_probs = torch.full((2, 3), math.nan, requires_grad=True)
        args = log_probs, torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), torch.zeros(2, 3)
        loss, metrics = grpo.grpo_loss(*args, loss_type=loss_type, importance_sampling_level=level)
        loss.backward()
        assert loss == 0 and (log_probs.grad == 0).all(), f"{loss_type}, {level}: nothing to learn is no NaN"
        assert all(value == 0 for value in metrics.values()), "metrics of nothing are 0"


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_be_bool_int_or_float(kind):
    log_probs, old, ref, advantages, mask = ragged()
    loss = grpo.grpo_loss(log_probs, old, ref, advantages, mask.to(kind))[0]
    assert loss == grpo.grpo_loss(log_probs, old, ref, advantages, mask)[0] and loss.dtype == torch.float64


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_of_grpo_loss_is_the_numerical_one(loss_type, level):
    log_probs, old, ref, advantages, mask = ragged()
    options = {"loss_type": loss_type, "importance_sampling_level": level, "delta": 1.7, "beta": 0.3}
    check = torch.autograd.gradcheck
    assert check(lambda x: grpo.grpo_loss(x, old, ref, advantages, mask, **options)[0], log_probs.requires_grad_())


def test_metrics_are_detached_means_over_tokens_and_approx_kl_is_old_minus_new():
    log_probs, old, ref, advantages, mask = ragged()
    for level in ("token", "sequence"):
        args = log_probs.requires_grad_(), old, ref, advantages, mask
        _, metrics = grpo.grpo_loss(*args, importance_sampling_level=level)
        assert not any(value.requires_grad for value in metrics.values()), "metrics are for looking at: detached"
        assert near(metrics["approx_kl"], (old - log_probs)[mask.bool()].mean()), "old minus new, a mean over tokens"
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
    assert grpo.happiness("SAD") == grpo.happiness("sad sadness") == pytest.approx(-1 / 3), "gloomy ones likewise"
    assert grpo.happiness("a sad, lonely friend") == pytest.approx(-1 / 3), "1 - 2"
    assert grpo.happiness("joy fun love hug smile dance") == 1, "three are enough: a list pays no more"
    assert grpo.happiness("sad cold dark lost poor") == -1, "and costs no more"
    assert grpo.happiness("") == grpo.happiness("unhappyish") == 0, "whole words only"
    assert not set(grpo.CHEERFUL) & set(grpo.GLOOMY), "no word is both"


def test_the_held_out_prompts_are_16_and_none_is_trained_on():
    assert len(set(grpo.HELD_OUT_PROMPTS)) == 16 and not set(grpo.HELD_OUT_PROMPTS) & set(grpo.PROMPTS)


# ================================================================ helpers: models to test with


@pytest.fixture(scope="module")
def tiny():
    """(model, tokenizer): the embedded model, as the scripts load it."""
    return grpo.load(settings())


def settings(**changes):
    """The part of the command line's arguments that loading and sampling read, and what a test adds."""
    args = {"model": "tiny_llama", "device": torch.device("cpu"), "dtype": torch.float32, "lora_targets": ["q_proj"]}
    return Namespace(**args | {"max_completion_length": 32, "temperature": 1.0} | changes)


def with_lora(**changes):
    """A fresh tiny_llama with a LoRA adapter, and its tokenizer."""
    model, tokenizer = grpo.load(settings())
    config = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    return get_peft_model(model, LoraConfig(**config)).eval(), tokenizer


def off_zero(model, adapter="", std=0.02):
    """Give the adapter a B that is not 0, as training would: the model then differs from the one without adapter."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if f"lora_B.{adapter}" in name:
            torch.nn.init.normal_(p, std=std)


def minimal_model(vocabulary):
    """A Llama of one layer and 8 numbers a token. Most tests replace its forward by one of their own."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, initializer_range=0.5, **shape)).eval()


def minimal_lora():
    """minimal_model with tiny_llama's vocabulary and an adapter that is off zero."""
    torch.manual_seed(0)
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return get_peft_model(minimal_model(4096), LoraConfig(**config)).eval()


def by_heart(sequence, vocabulary=10):
    """A model that is certain of the next token of one sequence: logits at t single out token t + 1."""

    def model(input_ids, logits_to_keep, **_):
        following = torch.tensor(sequence[1:] + [0])[: input_ids.shape[1]].expand(len(input_ids), -1)
        logits = torch.nn.functional.one_hot(following, vocabulary).float() * 1000
        return SimpleNamespace(logits=logits[:, logits_to_keep])

    return model


def learned_positions():
    """A small random model whose positions are a table, not rotations: it notices a wrong one."""
    torch.manual_seed(0)
    size = {"vocab_size": 30, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(**size, initializer_range=0.5)).eval()
    torch.nn.init.normal_(model.transformer.wpe.weight)
    return model


@contextlib.contextmanager
def batch_sizes(module):
    """A list that grows by the number of rows of every forward pass."""
    sizes = []

    def count(module, positional, keywords):
        sizes.append(len(keywords["input_ids"]))

    hook = module.register_forward_pre_hook(count, with_kwargs=True)
    yield sizes
    hook.remove()


# ================================================================ helpers: a training step written out


def fixed_answers(tokenizer, prompts):
    """What complete() returns, here six answers, of which the first is cut off, and the texts a to f."""
    prompt = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    answers = [[50, 60, 70, 80, 90], [50, 60, 2, 0, 0], [52, 61, 71, 2, 0], [53, 62, 72, 81, 2], [2, 0, 0, 0, 0]]
    answers = torch.tensor([*answers, [54, 63, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5, [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
    ids, attention_mask = torch.cat([prompt.input_ids, answers], 1), torch.cat([prompt.attention_mask, mask], 1)
    return ids, attention_mask, mask, list("abcdef"), torch.full(mask.shape, -1.5)


def row_alone(batch, i):
    """(ids, n) of a row of fixed_answers on its own: prompt and answer without padding; the n last are the answer."""
    ids, attention_mask, mask, *_ = batch
    return ids[i : i + 1, attention_mask[i].bool()], int(mask[i].sum())


def log_probs_alone(model, batch, temperature):
    """Each answer's log-probs, (n,), from a pass over its row alone: the logits at t predict token t + 1."""
    for i in range(6):
        ids, n = row_alone(batch, i)
        log_probs = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        yield log_probs[:-1].gather(1, ids[0, 1:, None])[-n:, 0]


def plain_sgd(monkeypatch):
    """Let the scripts, which must ask for AdamW without decay, train by SGD, of which a step is easy to write out."""
    sgd = torch.optim.SGD

    def adamw(params, rate, *, weight_decay):
        assert weight_decay == 0, "AdamW's own is 0.01"
        return sgd(params, rate)

    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    monkeypatch.delattr(torch.optim, "SGD")


class Enough(Exception):
    """A test has seen so much of a run that the run may end."""


def sgd_step(params, loss, rate):
    """One step of gradient descent, the gradient's norm clipped to 1. Returns the norm before that."""
    grads = torch.autograd.grad(loss, params)
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    for p, grad in zip(params, grads, strict=True):
        p.data -= rate * grad * min(1, 1 / norm)
    return norm


def trained_parameters(model):
    """The parameters that an optimizer would get."""
    return [p for p in model.parameters() if p.requires_grad]


def values_of(params):
    """Their numbers, copied into one vector."""
    return torch.cat([p.detach().flatten() for p in params])


def agree(record, expected):
    """A step's metrics are those expected, all of them and no others."""
    assert set(record) == set(expected)
    for name, value in expected.items():
        value = torch.as_tensor(value).detach().item()
        assert float(record[name]) == pytest.approx(value, rel=1e-3, abs=1e-5), f"the metric {name}"


# ================================================================ model and sampling


def test_A1_the_model_continues_the_quick_brown_fox(tiny):
    model, tokenizer = tiny
    prompts = ["The quick brown fox jumped over the"]
    greedy = settings(max_completion_length=8, temperature=1e-4)
    *_, mask, texts, _ = grpo.complete(model, tokenizer, prompts, greedy)
    assert texts[0].strip() and 0 < mask.sum() <= 8, "it has something to say, of 8 tokens at most"


def test_A2_the_tokenizer_ends_a_text_with_eos_but_no_eos_stands_inside_what_the_model_sees(tiny):
    model, tokenizer = tiny
    assert tokenizer("The dog").input_ids[-1] == tokenizer.eos_token_id, "as babyllama's tokenizer does"
    torch.manual_seed(0)
    ids, attention_mask, mask, texts, _ = grpo.complete(model, tokenizer, grpo.HELD_OUT_PROMPTS, settings())
    prompt, answers = ids[:, : -mask.shape[1]], ids[:, -mask.shape[1] :]
    assert not (prompt == tokenizer.eos_token_id).any(), "an EOS after the prompt says that the story is over"
    assert (answers == tokenizer.eos_token_id).any(), "some of these answers end"
    assert not any(tokenizer.eos_token in text for text in texts), "and none of the texts says so"
    assert (answers[mask.bool()] != tokenizer.pad_token_id).all(), "a real model does not write <pad>"


def test_A3_lora_trains_rank_times_in_plus_out_parameters_a_projection():
    # q_proj and v_proj of 192 x 192 in 4 layers: 4 x 2 x 8 x (192 + 192) = 24,576
    model, _ = with_lora()
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    out = width * config.num_attention_heads + width * config.num_key_value_heads
    expected = config.num_hidden_layers * 8 * (2 * config.hidden_size + out)
    assert expected == 24_576 == sum(p.numel() for p in model.parameters() if p.requires_grad)


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
        got = grpo.completion_mask(torch.tensor([completion]), eos).tolist()
        assert got == [expected], f"{completion}: up to the first EOS, which counts"


def test_A5_a_mask_is_of_integers():
    mask = grpo.completion_mask(torch.tensor([[5, 2, 0]]), 2)
    assert mask.dtype == torch.long, "1 and 0 like the tokenizer's mask, not True and False"


def test_A5_prompt_tokens_are_in_no_loss(tiny):
    # 5 tokens of prompt, 3 of the completion. The first predicts the second: of 7 log-probs the last 3 count.
    ids = torch.tensor([[10, 11, 12, 13, 14, 20, 21, 22]])
    with torch.no_grad():
        logits = tiny[0](input_ids=ids).logits.log_softmax(-1)[:, :-1]
        log_probs = grpo.token_log_probs(tiny[0], ids, torch.ones_like(ids), 3)
    every = logits.gather(2, ids[:, 1:, None]).squeeze(2)  # of tokens 1 to 7
    assert near(log_probs, every[:, 4:], 1e-4), "the log-probs are those of the completion alone"


def test_A6_the_log_prob_of_a_token_is_read_one_position_before_it():
    sequence = [3, 1, 4, 1, 5, 9, 2, 6]
    ids = torch.tensor([sequence])
    got = grpo.token_log_probs(by_heart(sequence), ids, torch.ones_like(ids), 3)
    assert near(got, torch.zeros(1, 3)), "a model that knows the sequence by heart is certain of each token"
    logits = by_heart(sequence)(ids, logits_to_keep=slice(-8, None)).logits
    unshifted = log_softmax(logits, -1).gather(2, ids[..., None])[0, -3:, 0]
    assert (unshifted < -100).all(), "the article's version, unshifted, finds the same tokens impossible"


def test_A7_a_row_has_the_same_log_probs_alone_and_in_a_left_padded_batch(tiny):
    model, tokenizer = tiny
    prompts = ["The dog", grpo.HELD_OUT_PROMPTS[1]]
    ids, attention_mask, mask, *_ = grpo.complete(model, tokenizer, prompts, settings(max_completion_length=8))
    assert (attention_mask[0] == 0).any(), "the first prompt is the shorter one"
    T, n = mask.shape[1], int(mask[0].sum())
    with torch.no_grad():
        batch = grpo.token_log_probs(model, ids, attention_mask, T)[0, :n]
        keep = attention_mask[0].bool()
        alone = grpo.token_log_probs(model, ids[:1, keep], attention_mask[:1, keep], n)[0]
        lost = grpo.token_log_probs(model, ids, torch.ones_like(ids), T)[0, :n]
    assert near(batch, alone, 1e-4), "the padding is masked"
    assert not near(lost, alone, 1e-2), "this test would notice a lost mask (attention_masks= loses it silently)"


def test_A7_every_keyword_that_the_model_is_given_is_one_that_it_names(tiny, monkeypatch):
    model, tokenizer = tiny
    given, named = [], inspect.signature(type(model).forward).parameters
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **keywords: given.append(set(keywords)) or forward(**keywords))
    ids, attention_mask, mask, *_ = grpo.complete(model, tokenizer, ["The dog"], settings(max_completion_length=2))
    grpo.token_log_probs(model, ids, attention_mask, mask.shape[1])
    assert len(given) == mask.shape[1] + 1, "sampling and the log-probs both went through it"
    for keywords in given:
        assert {"attention_mask", "position_ids"} <= keywords <= set(named), "it ignores others without a word"


def test_columns_that_are_padding_in_every_row_cost_nothing_and_get_0(tiny):
    model, tokenizer = tiny
    ids = torch.tensor([[0] * 7 + [5, 6, 7, 8, 0, 0], [0] * 6 + [9, 5, 6, 7, 0, 0, 0]])
    with torch.no_grad():
        got = grpo.token_log_probs(model, ids, (ids != 0).long(), 4)
        narrow = grpo.token_log_probs(model, ids[:, 6:11], (ids[:, 6:11] != 0).long(), 2)
    assert got.shape == (2, 4) and near(got[:, :2], narrow) and (got[:, 2:] == 0).all()


def test_padding_in_the_prompt_is_none_of_the_completion():
    # 0 is padding, in the first column or in the prompt's last one. Ten tokens, all alike: log 1/10 = -2.302585
    def model(input_ids, logits_to_keep, **_):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 10)[:, logits_to_keep])

    for ids, T in (([0, 5, 6], 1), ([5, 0, 6, 7], 2)):
        ids = torch.tensor([ids])
        got = grpo.token_log_probs(model, ids, (ids != 0).long(), T)
        assert near(got, torch.full((1, T), -math.log(10))), "only the last T columns can be padding behind"


def test_log_probs_are_divided_by_the_sampling_temperature(tiny):
    model, _ = tiny
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        got = grpo.token_log_probs(model, ids, torch.ones_like(ids), 2, temperature=2.0)
        logits = model(input_ids=ids).logits[:, 1:3]
    expected = log_softmax(logits / 2, -1).gather(2, ids[:, 2:, None])[..., 0]
    assert near(got, expected) and got.dtype == torch.float32


def test_log_probs_are_float32_also_of_a_model_in_bfloat16():
    torch.manual_seed(0)
    ids, logits = torch.tensor([[5, 6, 7, 8]]), torch.randn(1, 3, 10).bfloat16()
    got = grpo.token_log_probs(lambda **_: SimpleNamespace(logits=logits), ids, torch.ones_like(ids), 3, 0.7)
    expected = (logits.float() / 0.7).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert got.dtype == torch.float32 and near(got, expected, 1e-6), "bfloat16 has 3 digits, and ratios are near 1"


def test_a_pass_over_the_whole_text_keeps_no_cache():
    given, logits = [], torch.zeros(1, 1, 10)

    def forward(**keywords):
        given.append(keywords)
        return SimpleNamespace(logits=logits)

    grpo.token_log_probs(forward, torch.tensor([[5, 6]]), torch.ones(1, 2), 1)
    assert given[0]["use_cache"] is False, "no keys and values are kept where nothing is to be sampled"


@torch.no_grad()
def test_positions_are_counted_from_the_first_real_token():
    model = learned_positions()
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]])
    padded, alone = (grpo.token_log_probs(model, x, (x != 0).long(), 3) for x in (ids, ids[:1, 3:]))
    assert near(padded[:1], alone), "a model that learned its positions is right under left padding, too"
    cold = {"temperature": 1e-4, "eos_token_id": 99, "pad_token_id": 0}
    padded, alone = (grpo.sample(model, x, (x != 0).long(), 4, **cold)[0] for x in (ids, ids[:1, 3:]))
    assert torch.equal(padded[:1], alone), "and so is what it writes"
    whole = torch.cat([ids[:1, 3:], alone], 1)
    assert (grpo.token_log_probs(model, whole, torch.ones_like(whole), 4, 1e-4) > -0.1).all(), "one position a step"


def test_B1_before_the_first_update_the_ratio_is_exactly_1_and_the_kl_exactly_0():
    model, tokenizer = with_lora()
    prompts = ["The dog", *grpo.HELD_OUT_PROMPTS[:3]]
    ids, attention_mask, mask, *_ = grpo.complete(model, tokenizer, prompts, settings(max_completion_length=8))
    new = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1])  # with gradient, as in the update
    with torch.no_grad():
        old = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1])
        with model.disable_adapter():
            ref = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1])
    _, metrics = grpo.grpo_loss(new, old, ref, torch.ones(4), mask)
    assert torch.equal(new, old) and metrics["kl"] == 0 and metrics["approx_kl"] == 0, "the same pass gives the same"
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {name for name, _ in model.named_parameters() if "lora" in name}, "disable_adapter left its mark"


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_dropout_is_off_in_every_pass(tmp_path, tiny, quick):
    # GPT-2 drops half of everything in train mode: sampler, policy and reference would differ before any update.
    drop = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    config = GPT2Config(vocab_size=4096, n_positions=64, n_embd=16, n_layer=1, n_head=2, **drop)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny[1].save_pretrained(tmp_path / "gpt2")
    run_grpo(tmp_path / "x", "--model", str(tmp_path / "gpt2"), "--lora-targets", "c_attn", steps=1)
    record = json.loads((tmp_path / "x" / "metrics.jsonl").read_text())
    assert record["kl"] == record["approx_kl"] == 0, "model.eval() for sampling, reference and training"


@torch.no_grad()
def test_sampling_and_scores_are_float32_also_of_a_model_in_bfloat16():
    torch.manual_seed(0)
    model, prompt, logits = minimal_model(10), torch.ones(1, 1, dtype=torch.long), torch.randn(1, 1, 10).bfloat16()
    model.forward = lambda **_: SimpleNamespace(logits=logits)
    ids, drawn = grpo.sample(model, prompt, prompt, 1, eos_token_id=2, pad_token_id=0)
    assert drawn.dtype == torch.float32 and near(drawn, logits.float().log_softmax(-1)[0][:, ids[0]], 1e-6)
    hidden, head = torch.randn(1, 3, 8).bfloat16(), torch.nn.Linear(8, 1, bias=False)
    base = SimpleNamespace(base_model=lambda **_: SimpleNamespace(last_hidden_state=hidden))
    peft_model = SimpleNamespace(get_base_model=lambda: base)
    scores = reward_model.token_scores(peft_model, head, torch.ones(1, 3).long(), torch.ones(1, 3))
    assert scores.dtype == torch.float32 and near(scores, head(hidden.float())[..., 0])


def test_sampling_draws_from_the_whole_vocabulary_not_from_the_50_likeliest():
    torch.manual_seed(0)
    model, logits = minimal_model(200), torch.linspace(0, 0.1, 200)  # nearly the same, but no ties for a top-k
    model.forward = lambda **_: SimpleNamespace(logits=logits.expand(2000, 1, 200))
    prompt = torch.ones(2000, 1, dtype=torch.long)
    ids, _ = grpo.sample(model, prompt, prompt, 1, eos_token_id=2, pad_token_id=0)
    assert ids.unique().numel() > 190, "2000 draws from 200 likely tokens miss hardly any; top_k=50 misses 150"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_draws_from_the_softmax_at_its_temperature(temperature):
    torch.manual_seed(0)
    model, logits, n = minimal_model(4), torch.tensor([0.0, 1.0, 2.0, -1.0]), 20_000
    model.forward = lambda **_: SimpleNamespace(logits=logits.expand(n, 1, 4))
    prompt = torch.ones(n, 1, dtype=torch.long)
    ids, _ = grpo.sample(model, prompt, prompt, 1, temperature=temperature, eos_token_id=9, pad_token_id=0)
    frequency = torch.bincount(ids.flatten(), minlength=4) / n
    assert near(frequency, (logits / temperature).softmax(0), 0.015), "four standard errors are 0.014"


def test_complete_samples_from_the_padded_prompts_at_the_temperature_and_decodes_up_to_the_eos(tiny, monkeypatch):
    model, tokenizer = tiny
    answers = torch.tensor([[50, 60, 70, 80], [51, 61, 2, 90]])  # what stands behind the EOS, 2, is not decoded
    calls = []
    monkeypatch.setattr(grpo, "sample", lambda *args, **more: calls.append((args, more)) or (answers, "log-probs"))
    prompts = ["The dog", "Every morning the old farmer"]
    ids, attention_mask, mask, texts, log_probs = grpo.complete(model, tokenizer, prompts, settings(temperature=0.7))
    [(args, more)] = calls
    prompt = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    assert args[0] is model and torch.equal(args[1], prompt.input_ids) and torch.equal(args[2], prompt.attention_mask)
    assert (prompt.attention_mask[0] == 0).any() and (prompt.attention_mask[:, -1] == 1).all(), "padded on the left"
    assert args[3:] == (32,) and more == {"temperature": 0.7, "eos_token_id": 2, "pad_token_id": 0}
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]], "the EOS counts"
    assert texts == tokenizer.batch_decode([[50, 60, 70, 80], [51, 61]]), "up to the EOS"
    assert torch.equal(ids, torch.cat([prompt.input_ids, answers], 1)) and log_probs == "log-probs"
    assert torch.equal(attention_mask, torch.cat([prompt.attention_mask, mask], 1)), "prompt and answer are attended to"


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_sampling_never_draws_a_token_of_probability_0(monkeypatch, u):
    # The smallest and the largest uniform number there are, and first and last tokens that have no probability.
    model, prompt = minimal_model(4), torch.ones(1, 1, dtype=torch.long)
    model.forward = lambda **_: SimpleNamespace(logits=torch.tensor([[[-math.inf, 0.0, 1.0, -math.inf]]]))
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, u))
    assert grpo.sample(model, prompt, prompt, 1, eos_token_id=9, pad_token_id=0)[0].item() == (2 if u else 1)


def test_sampling_pads_behind_the_eos_and_stops_when_every_row_has_one():
    model, prompt, eye = minimal_model(10), torch.ones(2, 1, dtype=torch.long), torch.eye(10) * 1000
    drawn = iter([[5, 6], [2, 7], [8, 2], [9, 9]])  # what each step is certain of, for two rows; 2 is the EOS
    model.forward = lambda **_: SimpleNamespace(logits=eye[next(drawn)][:, None])
    ids, _ = grpo.sample(model, prompt, prompt, 200, eos_token_id=2, pad_token_id=0)
    assert ids.tolist() == [[5, 2, 0], [6, 7, 2]], "row 1 ends first and is padded; nothing is drawn after the last EOS"


def test_the_log_probs_that_sampling_returns_are_those_of_a_pass_over_the_whole_text(tiny):
    model, tokenizer = tiny
    prompts, args = ["The dog", *grpo.HELD_OUT_PROMPTS[:3]], settings(temperature=0.7, max_completion_length=8)
    ids, attention_mask, mask, _, drawn = grpo.complete(model, tokenizer, prompts, args)
    with torch.no_grad():
        log_probs = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1], 0.7)
    assert drawn.shape == mask.shape and near(drawn[mask.bool()], log_probs[mask.bool()], 1e-4), "but for rounding"


def test_greedy_steps_with_the_cache_agree_with_a_pass_over_the_whole_text(tiny):
    model, tokenizer = tiny
    prompts = ["The dog", grpo.HELD_OUT_PROMPTS[1]]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    special = {"eos_token_id": 2, "pad_token_id": 0, "temperature": 1e-4}  # so cold that the likeliest token wins
    ids, _ = grpo.sample(model, batch.input_ids, batch.attention_mask, 6, **special)
    mask = grpo.completion_mask(ids, 2)
    full, attention = torch.cat([batch.input_ids, ids], 1), torch.cat([batch.attention_mask, mask], 1)
    with torch.no_grad():
        log_probs = grpo.token_log_probs(model, full, attention, ids.shape[1], temperature=1e-4)
    assert (log_probs[mask.bool()] > -0.1).all(), "cache, mask and positions are those of the full pass"


# ================================================================ grpo.py end to end


SMALL = ["--prompts-per-step", "2", "--num-generations", "3", "--max-completion-length", "4"]
TWICE = ["--num-iterations", "2", "--learning-rate", "0.01"]


def run_grpo(out, *extra, steps=2):
    """grpo.main on tiny_llama, with small batches."""
    return grpo.main(["--model", "tiny_llama", "--out", str(out), "--steps", str(steps), *SMALL, *extra])


def make_quick(patch):
    """No judging, and a reward that differs from text to text: what these tests are about is something else."""
    patch.setattr(grpo, "evaluate", lambda *args: ({}, []))
    patch.setattr(grpo, "reward", lambda prompts, texts: [len(text) for text in texts])


@pytest.fixture
def quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """The folder of a run of one step, two iterations and seed 0."""
    folder = tmp_path_factory.mktemp("one_step") / "x"
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        run_grpo(folder, *TWICE, steps=1)
    return folder


def test_the_same_seed_gives_the_same_metrics_and_another_one_does_not(one_step, tmp_path, quick):
    metrics = [(one_step / "metrics.jsonl").read_text()]
    for seed in ("0", "1"):
        run_grpo(tmp_path / seed, "--seed", seed, *TWICE, steps=1)
        metrics.append((tmp_path / seed / "metrics.jsonl").read_text())
    assert metrics[0] == metrics[1] != metrics[2], "the seed decides LoRA's start, the prompts' order and the answers"


def test_later_iterations_on_a_batch_have_a_ratio_other_than_1(one_step, tmp_path, quick):
    run_grpo(tmp_path / "x", steps=1)
    once, twice = (json.loads((out / "metrics.jsonl").read_text()) for out in (tmp_path / "x", one_step))
    assert once["approx_kl"] == 0 != twice["approx_kl"], "B1: on-policy in the first pass, off-policy later"


@pytest.mark.parametrize(
    "loss_type, level, beta, scale",
    [("grpo", "token", 10.0, "group"), ("dapo", "token", 0.1, "batch"), ("dr_grpo", "sequence", 0.1, "none")],
)
def test_A15_a_step_of_training_is_the_algorithm_written_out_row_by_row(
    tmp_path, monkeypatch, loss_type, level, beta, scale
):
    size = "--prompts-per-step 2 --num-generations 3 --max-completion-length 8 --micro-batch-size 4".split()
    loss = f"--loss-type {loss_type} --importance-sampling-level {level} --beta {beta} --scale-rewards {scale}".split()
    clip = "--epsilon 0.02 --epsilon-high 0.03 --delta 1.05".split()
    passes = 3 if loss_type == "grpo" else 2  # of three, old is the first, not the one before
    rest = f"--temperature 0.7 --num-iterations {passes} --steps 1 --learning-rate 0.05".split()
    args = grpo.parse_args([*size, *loss, *clip, *rest, "--out", str(tmp_path / "x")])
    model, tokenizer = with_lora()
    off_zero(model)
    batches, rewarded = [], []

    def complete(model, tokenizer, prompts, args):
        rewarded.append(prompts)
        batches.append(fixed_answers(tokenizer, prompts))
        return batches[-1]

    plain_sgd(monkeypatch)
    monkeypatch.setattr(grpo, "complete", complete)
    monkeypatch.setattr(grpo, "reward", lambda prompts, texts: rewarded.append(prompts) or [1, 0.4, 0, 2, 2, 2])
    params = trained_parameters(model)
    start = [p.detach().clone() for p in params]
    (record,) = grpo.train(model, tokenizer, ["The dog", "Every morning the old farmer"], args)
    learned = values_of(params)
    (batch,) = batches
    assert rewarded[0] == rewarded[1], "the rewards are those of the answers' prompts"
    kinds = [len(set(rewarded[0][i : i + 3])) for i in (0, 2, 3)]
    assert kinds == [1, 2, 1], "the three answers to a prompt are side by side"

    for p, value in zip(params, start, strict=True):
        p.data.copy_(value)
    # mean 1.4 / 3; sample std sqrt((0.533333^2 + 0.066667^2 + 0.466667^2) / 2) = 0.503322; the second group is equal.
    # All six: mean 7.4 / 6, the squares of what is above or below it 4.033333, sample std sqrt(4.033333 / 5) = 0.898146
    std = 0.503322
    divisor = {"group": std + 1e-4, "batch": 0.898146 + 1e-4, "none": 1}[scale]
    a = [x / divisor for x in (1 - 1.4 / 3, 0.4 - 1.4 / 3, -1.4 / 3, 0, 0, 0)]
    with torch.no_grad():
        old = list(log_probs_alone(model, batch, 0.7))
        with model.disable_adapter():
            ref = list(log_probs_alone(model, batch, 0.7))
    for _ in range(passes):
        losses, moved, kls, clipped = [], [], [], {"low": 0, "high": 0, "dual": 0}
        for i, new in enumerate(log_probs_alone(model, batch, 0.7)):
            log_ratio = new - old[i]
            ratio = (log_ratio if level == "token" else log_ratio.mean(dim=0, keepdim=True)).exp()
            bounded = ratio.clamp(max=1.05) if a[i] < 0 else ratio
            kl = (ref[i] - new).exp() - (ref[i] - new) - 1
            losses.append(-torch.minimum(bounded * a[i], bounded.clamp(0.98, 1.03) * a[i]) + beta * kl)
            moved.append(-log_ratio)
            kls.append(kl)
            clipped["low"] += (ratio < 0.98).sum() * (a[i] < 0)
            clipped["high"] += (ratio > 1.03).sum() * (a[i] > 0)
            clipped["dual"] += (ratio > 1.05).sum() * (a[i] < 0)
        if loss_type == "grpo":
            loss = sum(x.mean() for x in losses) / 6
        else:
            loss = sum(x.sum() for x in losses) / (21 if loss_type == "dapo" else 6 * 8)  # tokens; rows x 8
        norm = sgd_step(params, loss, 0.05)
    moved, kls = torch.cat(moved), torch.cat(kls)
    assert norm > 1 or beta < 1, "with a large KL the gradient is clipped to norm 1"
    assert any(clipped.values()), "in the later iterations the policy has moved, so that the clip has something to do"
    expected = {"loss": loss, "grad_norm": norm, "approx_kl": moved.mean(), "kl": kls.mean(), "samples": 6}
    ratios = 21 if level == "token" else 6
    expected |= {f"clip_ratio/{side}_mean": count / ratios for side, count in clipped.items()}
    expected |= {"reward": 7.4 / 6, "reward_std": std / 2, "frac_reward_zero_std": 1 / 2}
    expected |= {"completions/mean_length": 21 / 6, "completions/clipped_ratio": 1 / 6, "step": 1}
    agree(record, expected)
    step = values_of(params) - values_of(start)
    # What no metric shows: a constant that has a gradient (detach), a missing zero_grad.
    assert (values_of(params) - learned).norm() < 1e-3 * step.norm(), "the weights after both optimizer steps"


def test_each_prompt_has_its_turn_before_any_comes_again(tmp_path, monkeypatch):
    model, tokenizer = with_lora()
    seen = []

    def complete(model, tokenizer, prompts, args):
        seen.extend(prompts[::3])
        return fixed_answers(tokenizer, ["A"] * 3 + ["The old dog"] * 3)

    monkeypatch.setattr(grpo, "complete", complete)
    tokenizer.pad_token = tokenizer.eos_token  # what pads a prompt ends no answer
    few = ["--prompts-per-step", "2", "--num-generations", "3", "--steps", "3", "--out", str(tmp_path / "x")]
    records = list(grpo.train(model, tokenizer, ["A", "B", "C"], grpo.parse_args(few)))
    assert sorted(seen[:3]) == sorted(seen[3:]) == ["A", "B", "C"], "3 steps of 2 prompts are 2 turns of all 3"
    assert seen != ["A", "B", "C"] * 2, "in another order each time"
    assert [record["samples"] for record in records] == [6, 12, 18]
    assert near(records[0]["completions/clipped_ratio"], 1 / 6), "one answer has no EOS; two fill the width"
    tied = records[0]["frac_reward_zero_std"] == 1 and records[0]["reward_std"] == records[0]["reward"] == 0
    assert tied, "the texts a to f are equally happy"


def test_a_group_of_equal_rewards_counts_as_one_whatever_its_rounded_std(tmp_path, monkeypatch):
    # Eight times 1/3 in float32: the mean is rounded, and torch's std of the eight is 3e-8.
    model, tokenizer = with_lora()
    monkeypatch.setattr(grpo, "reward", lambda prompts, texts: [1 / 3] * 8)
    few = ["--prompts-per-step", "1", "--num-generations", "8", "--max-completion-length", "2", "--steps", "1"]
    (record,) = grpo.train(model, tokenizer, ["A"], grpo.parse_args([*few, "--out", str(tmp_path / "x")]))
    assert record["frac_reward_zero_std"] == 1, "frac_reward_zero_std: all rewards of the group are the same"


def test_no_reference_pass_is_made_at_beta_0(tmp_path, monkeypatch):
    model, tokenizer = with_lora()
    monkeypatch.setattr(grpo, "complete", lambda model, tokenizer, prompts, args: fixed_answers(tokenizer, prompts))
    monkeypatch.setattr(model, "disable_adapter", None)
    few = ["--prompts-per-step", "2", "--num-generations", "3", "--steps", "1", "--out", str(tmp_path / "x")]
    (record,) = grpo.train(model, tokenizer, ["A", "B"], grpo.parse_args([*few, "--beta", "0"]))
    assert "kl" not in record and "approx_kl" in record, "approx_kl needs no reference"


def test_the_judge_takes_16_answers_to_each_prompt_by_the_same_draws_and_their_mean_log_ratio(tiny, monkeypatch):
    model, tokenizer = minimal_lora(), tiny[1]
    args = settings(max_completion_length=4, temperature=0.7, micro_batch_size=5)
    monkeypatch.setattr(grpo, "HELD_OUT_PROMPTS", grpo.HELD_OUT_PROMPTS[:2])
    batches, complete = [], grpo.complete

    def shortened(*x):
        batches.append(complete(*x))
        for mask in batches[-1][1:3]:
            mask[0, -2:] = 0  # as if the first answer had ended two tokens earlier
        return batches[-1]

    monkeypatch.setattr(grpo, "complete", shortened)
    monkeypatch.setattr(grpo, "happiness", lambda text: len(text))
    state = torch.random.get_rng_state()
    estimates, shown = grpo.evaluate(model, tokenizer, args)
    assert torch.equal(torch.random.get_rng_state(), state), "judging does not touch the draws of the training"
    torch.manual_seed(99)
    with batch_sizes(model) as sizes:
        assert grpo.evaluate(model, tokenizer, args) == (estimates, shown), "the same draws before and after training"
    assert sizes[-7:] == [5] * 6 + [2], "the reference reads the 32 answers in micro-batches"
    ids, attention_mask, mask, texts, _ = batches[0]
    assert estimates["happiness"] == grpo.estimate(map(len, texts)) and estimates["happiness"]["n"] == 2 * 16
    assert shown == list(zip(grpo.HELD_OUT_PROMPTS, texts, strict=False))
    k1 = grpo.token_log_probs(model, ids, attention_mask, mask.shape[1], 0.7).detach()
    with model.disable_adapter():
        k1 = (k1 - grpo.token_log_probs(model, ids, attention_mask, mask.shape[1], 0.7))[mask.bool()]
    assert abs(k1.mean()) > 1e-3, "the adapter is off zero"
    assert near(estimates["kl"]["mean"], k1.mean()) and estimates["kl"]["n"] == len(k1), "policy less reference"
    assert near(estimates["kl"]["standard_error"], k1.std() / len(k1) ** 0.5)


def test_log_probs_that_are_not_finite_stop_the_judge(tiny, monkeypatch):
    model, tokenizer = minimal_lora(), tiny[1]
    monkeypatch.setattr(grpo, "HELD_OUT_PROMPTS", grpo.HELD_OUT_PROMPTS[:1])
    real = grpo.token_log_probs
    monkeypatch.setattr(grpo, "token_log_probs", lambda *x: real(*x) * math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        grpo.evaluate(model, tokenizer, settings(max_completion_length=2, micro_batch_size=16))


def test_a_mean_that_rounds_to_0_is_printed_without_a_sign(tmp_path, capsys, monkeypatch):
    kl = {"mean": -1e-9, "standard_error": 0.0, "n": 2}  # what rounding makes of a KL of 0
    monkeypatch.setattr(grpo, "evaluate", lambda *args: ({"kl": kl}, []))
    small = ["--prompts-per-step", "1", "--num-generations", "2", "--max-completion-length", "1", "--steps", "1"]
    grpo.main(["--model", "tiny_llama", "--device", "cpu", "--out", str(tmp_path / "x"), *small])
    assert "held-out kl before: 0.000 ± 0.000" in capsys.readouterr().out


def test_an_estimate_is_the_mean_and_its_standard_error():
    # mean 2, sample std sqrt((1 + 0 + 1) / 2) = 1, over sqrt(3)
    got = grpo.estimate([1, 2, 3])
    assert got == {"mean": 2.0, "standard_error": pytest.approx(0.577350, abs=1e-6), "n": 3}


@pytest.mark.parametrize(
    "extra",
    [
        "--beta 0",
        "--epsilon none --scale-rewards none --loss-type dr_grpo",
        "--importance-sampling-level sequence --delta 2 --epsilon-high 0.28 --scale-rewards batch",
        "--temperature 0.7 --num-generations 2 --micro-batch-size 1 --lora-targets o_proj",
    ],
)
def test_every_variant_runs_and_adapts_the_layers_it_was_told(tmp_path, quick, extra):
    assert run_grpo(tmp_path / "x", *extra.split(), steps=1)["steps"] == 1
    config = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == (["o_proj"] if "o_proj" in extra else ["q_proj", "v_proj"])


def test_a_training_pass_of_grpo_has_micro_batch_size_rows(tmp_path, monkeypatch):
    model, tokenizer = with_lora()
    monkeypatch.setattr(grpo, "complete", lambda model, tokenizer, prompts, args: fixed_answers(tokenizer, prompts))
    few = ["--prompts-per-step", "2", "--num-generations", "3", "--steps", "1", "--micro-batch-size", "4"]
    with batch_sizes(model) as sizes:
        list(grpo.train(model, tokenizer, ["A", "B"], grpo.parse_args([*few, "--out", str(tmp_path / "x")])))
    assert sizes == [4, 2] * 2, "the reference's passes and the policy's"


def test_a_run_reports_what_it_was_told_and_what_it_did(tmp_path, capsys, monkeypatch):
    texts = iter(["old", "new"])
    monkeypatch.setattr(grpo, "evaluate", lambda *args: ({}, [("A bear", next(texts))]))
    records = [{"step": 1, "samples": 6, "reward": 0.25}, {"step": 2, "samples": 12, "reward": 0.5}]
    monkeypatch.setattr(grpo, "train", lambda *args: iter(records))
    summary, printed = run_grpo(tmp_path / "x", "--seed", "3"), capsys.readouterr().out
    assert "parameters, 24,576 trained" in printed and "reward ▁█ 0.250 to 0.500" in printed
    assert "A bear ...\n  before: 'old'\n  after:  'new'" in printed
    assert summary["options"]["seed"] == 3 and summary["model"] == "tiny_llama" and summary["samples"] == 12
    assert 0 < summary["seconds"] < 600 and summary["peak_memory_mb"] > 100


# ================================================================ what goes wrong


@pytest.mark.parametrize(
    "script, options, why",
    [
        (grpo, "--beta 0 --epsilon none --delta 1.1", None),
        (grpo, "--epsilon-high 0.5 --delta 1.4", "--delta must be above 1 + epsilon-high = 1.5"),
        (ppo, "--clip-dual none --kl-coef 0 --gamma 1 --lam 1", None),
        (ppo, "--lam 0", None),
        (ppo, "--gamma 1.5", "at most 1"),
        (ppo, "--clip-dual 1.2", "above 1 + clip-high"),
        (ppo, "--clip-high 0.5 --clip-dual 1.4", "above 1 + clip-high"),
        (ppo, "--learning-rate 0", "--learning-rate"),
        (dpo, "--num-generations 4 --pairs-per-prompt 2", None),
    ],
)
def test_options_at_the_edge_are_accepted_and_beyond_it_refused(tmp_path, capsys, script, options, why):
    with pytest.raises(SystemExit) if why else contextlib.nullcontext():
        script.parse_args([*options.split(), "--out", str(tmp_path / "x")])
    assert not why or why in capsys.readouterr().err


def test_a_relative_out_folder_never_replaces_what_the_run_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    write(tmp_path / "x" / "summary.json", "{}")
    write(tmp_path / "x" / "prompts.txt", "One day")
    with pytest.raises(SystemExit):
        grpo.parse_args(["--out", "x", "--prompts", "x/prompts.txt"])
    assert "what --prompts reads" in capsys.readouterr().err


def test_a_loss_or_a_gradient_of_grpo_that_is_not_finite_is_enough_to_stop(tmp_path, monkeypatch):
    model, tokenizer = with_lora()
    monkeypatch.setattr(grpo, "complete", lambda model, tokenizer, prompts, args: fixed_answers(tokenizer, prompts))
    few = ["--prompts-per-step", "2", "--num-generations", "3", "--steps", "1", "--out", str(tmp_path / "x")]
    args, norm, real = grpo.parse_args(few), math.inf, grpo.group_advantages
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(norm))
    with pytest.raises(FloatingPointError, match="step 1"):
        next(grpo.train(model, tokenizer, ["A", "B"], args))
    norm = 1.0
    monkeypatch.setattr(grpo, "group_advantages", lambda *x: real(*x) * math.nan)
    with pytest.raises(FloatingPointError, match="step 1"):
        next(grpo.train(model, tokenizer, ["A", "B"], args))


def refused(capsys, script, *argv):
    """The one sentence on stderr with which a script refuses, exit status 2, before it loads or trains anything."""
    with pytest.raises(SystemExit) as end:
        script.main([*argv])
    sentence = capsys.readouterr().err
    named = sentence.startswith(f"{script.__name__}.py: ")
    assert end.value.code == 2 and sentence.count("\n") == 1 and named, f"one sentence, exit status 2: {sentence}"
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
        (["--learning-rate", "1e38"], "--learning-rate"),
        (["--seed", "9" * 25], "--seed"),
        (["--delta", "1.2"], "--delta"),
        (["--epsilon", "none", "--epsilon-high", "0.3"], "--epsilon-high"),
        (["--device", "meta"], "--device"),
        (["--model", ""], "the model ''"),
        (["--beta", "-0.1"], "--beta"),
        (["--loss-type", "grpoo"], "dr_grpo"),
        (["--device", "warp"], "--device"),
        (["--step", "5"], "--step"),
        (["--model", "no/such-model"], "no/such-model"),
        (["--model", "test_losses.py"], "test_losses.py"),
        (["--lora-targets", "q_proj", "c_attn"], "c_attn"),
        (["--lora-targets", "input_layernorm"], "input_layernorm"),
        (["--out", "."], "--out . is neither empty nor an earlier result"),
        (["--max-completion-length", "256"], "context"),
        (["--prompts", "no_such_file"], "no_such_file"),
    ],
)
def test_bad_options_are_refused_in_one_sentence_that_names_them(argv, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = [] if "--model" in argv else ["--model", "tiny_llama"]
    assert named in refused(capsys, grpo, *model, "--out", str(tmp_path / "x"), *argv)


def test_a_prompt_and_its_completion_may_fill_the_context_and_no_more(tiny, tmp_path, capsys):
    (tmp_path / "prompts").write_text("The\n" + "The old dog" * 9)
    args = settings(prompts=tmp_path / "prompts", max_completion_length=7)
    length = len(tiny[1]("The old dog" * 9, add_special_tokens=False).input_ids)
    for context in (length + 7, length + 6):
        model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=context))
        with contextlib.nullcontext() if context == length + 7 else pytest.raises(SystemExit):
            assert grpo.read_prompts(args, model, tiny[1])[0] == "The"
    assert f"a prompt of {length} tokens and --max-completion-length 7 exceed" in capsys.readouterr().err
    longest = max(len(ids) for ids in tiny[1](grpo.HELD_OUT_PROMPTS, add_special_tokens=False).input_ids)
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=longest + 6))
    (tmp_path / "prompts").write_text("The")
    with pytest.raises(SystemExit):  # the judge's prompts count, too
        grpo.read_prompts(args, model, tiny[1])


def test_bad_folders_and_files_are_refused_in_one_sentence_that_names_them(tmp_path, capsys):
    out = ["--model", "tiny_llama", "--out", str(tmp_path / "x")]
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, grpo, *out[2:], "--model", str(tmp_path / "empty"))
    for content, named in ((b"", "blank"), (b" \n\r\n", "blank"), (b"caf\xe9", "utf-8")):
        (tmp_path / "prompts").write_bytes(content)
        assert named in refused(capsys, grpo, *out, "--prompts", str(tmp_path / "prompts")), content
    assert "directory" in refused(capsys, grpo, *out, "--prompts", str(tmp_path)).lower()
    assert "--out" in refused(capsys, grpo, *out[:2], "--out", str(tmp_path / "prompts" / "x")), "a file is no folder"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert "--out" in refused(capsys, grpo, *out[:2], "--out", str(tmp_path / "mine")), "a run replaces it: not yours"


def test_a_model_folder_must_hold_all_weights_and_be_no_adapter(tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "no config.json" in refused(capsys, grpo, "--out", str(tmp_path / "x"), "--model", str(tmp_path / "adapter"))
    shutil.copytree(HERE / "tiny_llama", tmp_path / "more", ignore=shutil.ignore_patterns("work", "*.py"))
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    (tmp_path / "more" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    error = refused(capsys, grpo, "--out", str(tmp_path / "x"), "--model", str(tmp_path / "more"))
    assert "lacks model.layers.4" in error, "transformers fills what is missing with random numbers, without a word"


@pytest.mark.parametrize("eos, why", [(None, "has no EOS token"), ("<far>", "token that the model does not know")])
def test_a_tokenizer_must_end_texts_with_a_token_that_the_model_knows(eos, why, tmp_path, capsys):
    model, tokenizer = grpo.load(settings())
    tokenizer.eos_token = eos  # <far> is new, the first token behind the model's last
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert why in refused(capsys, grpo, "--out", str(tmp_path / "x"), "--model", str(tmp_path / "model"))


def test_a_result_never_replaces_what_the_run_reads(tmp_path, capsys):
    out = tmp_path / "x"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    (out / "prompts.txt").write_text("One day")
    assert "--prompts" in refused(capsys, grpo, "--out", str(out), "--prompts", str(out / "prompts.txt"))
    assert "--model" in refused(capsys, grpo, "--out", str(out), "--model", str(out))
    where = ["--out", str(out), "--reward-model", str(out / "reward_model")]
    assert "what --reward-model reads" in refused(capsys, ppo, "--model", "tiny_llama", *where)
    for script in (dpo, reward_model):
        assert "what --data reads" in refused(capsys, script, "--out", str(out), "--data", str(out / "mine.jsonl"))
    assert (out / "prompts.txt").exists()


def test_a_prompts_file_may_have_a_byte_order_mark_windows_line_ends_and_blank_lines(tiny, tmp_path):
    (tmp_path / "prompts").write_bytes("\ufeffOne day\r\n\r\n Zoë said\u2028so\n".encode())
    assert grpo.read_prompts(settings(prompts=tmp_path / "prompts"), *tiny) == ["One day", "Zoë said\u2028so"]
    assert grpo.read_prompts(settings(prompts=None), *tiny) == grpo.PROMPTS


@pytest.mark.parametrize(
    "bad, named",
    [
        (None, "must return 3 numbers, one per completion, and it returned None"),
        ([0.0], "must return 3 numbers, one per completion, and it returned [0.0]"),
        ([[0.0], [1.0], [0.0]], "must return 3 numbers, one per completion, and it returned [[0.0], [1.0], [0.0]]"),
        ([0.0, 1.0, math.nan], "the reward of 'c' is nan"),
        (torch.tensor([0.0, math.inf, 0.0]), "the reward of 'b' is inf"),
        ([0.0, "great", 1.0], "must return 3 numbers, one per completion, and it returned [0.0, 'great', 1.0]"),
        ([None] * 3, "must return 3 numbers, one per completion, and it returned [None, None, None]"),
        ("123", "must return 3 numbers, one per completion, and it returned '123'"),
    ],
)
def test_a_reward_that_is_no_number_is_named_with_its_step_and_its_completion(bad, named):
    with pytest.raises(FloatingPointError, match="step 7: ") as error:
        grpo.checked(bad, ["a", "b", "c"], 7)
    assert named in str(error.value)


def test_a_reward_that_is_no_number_stops_the_run_before_anything_is_saved(tmp_path, capsys, monkeypatch, quick):
    monkeypatch.setattr(grpo, "reward", lambda prompts, texts: [math.nan] * len(texts))
    with pytest.raises(SystemExit) as end:
        run_grpo(tmp_path / "x")
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        end.value.code == 2 and "step 1: the reward of" in error and "is nan" in error and "nothing is saved" in error
    )
    assert not any((tmp_path / "x").iterdir())


def test_rewards_may_be_a_tensor_or_numbers_of_any_kind():
    one, zero = torch.tensor([1.0, 0.0], dtype=torch.float64)
    learned = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not grpo.checked(learned, ["a", "b"], 1).requires_grad, "no gradient flows into a reward"
    for rewards in (torch.tensor([1, 0]), [1, 0], (True, False), [one, zero], [one.half(), 0], (one, 0.0)):
        checked = grpo.checked(rewards, ["a", "b"], 1)
        assert checked.tolist() == [1.0, 0.0] and checked.dtype == torch.float32, rewards


def in_step_2(monkeypatch, what):
    """Let the second call of grpo.group_advantages do `what`."""
    calls, real = itertools.count(1), grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *args: what() if next(calls) == 2 else real(*args))


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_the_last_good_weights(tmp_path, capsys, monkeypatch, quick):
    in_step_2(monkeypatch, lambda: torch.full((6,), math.nan))
    with pytest.raises(SystemExit) as end:
        run_grpo(tmp_path / "x", steps=3)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "step 2" in error and "the weights after step 1 are saved" in error
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["steps"] == 1 and "step 2" in summary["stopped"]
    model = PeftModel.from_pretrained(grpo.load(settings())[0], tmp_path / "x")
    assert all(p.isfinite().all() for p in model.parameters())


def test_ctrl_c_saves_the_weights_as_they_are(tmp_path, capsys, monkeypatch, quick):
    clip, calls, kept = torch.nn.utils.clip_grad_norm_, itertools.count(1), []

    def press(trained, *more):
        if next(calls) == 4:  # in step 2, when the first of its two updates has been made
            kept.extend(p.detach().clone() for p in trained)
            raise KeyboardInterrupt
        return clip(trained, *more)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", press)
    with pytest.raises(SystemExit) as end:
        run_grpo(tmp_path / "x", *TWICE, steps=3)
    assert end.value.code == 130 and "the weights after step 1 are saved" in capsys.readouterr().err.splitlines()[-1]
    saved = load_file(tmp_path / "x" / "adapter_model.safetensors").values()
    assert sorted(p.norm().item() for p in saved) == sorted(p.norm().item() for p in kept), "three updates are kept"
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["stopped"] == "interrupted", "the step that was not finished has no record"


def test_a_failed_save_leaves_the_old_result_whole(tmp_path):
    def good(folder):
        (folder / "adapter_model.safetensors").write_bytes(b"whole")

    def broken(folder):
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    out = tmp_path / "x"
    out.mkdir()
    grpo.save(out, good, [{"step": 1}], {"steps": 1}, {"reward": [0.0, 1.0]})
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files["adapter_model.safetensors"] == b"whole" and json.loads(files["metrics.jsonl"]) == {"step": 1}
    assert json.loads(files["summary.json"]) == {"steps": 1}
    with pytest.raises(OSError, match="disk full"):
        grpo.save(out, broken, [], {}, {})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files, "written beside it, renamed at the end"
    grpo.save(out, lambda folder: None, [], {}, {"reward": [0.0]})
    assert not (out / "adapter_model.safetensors").exists(), "a new result replaces all of the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"], "and nothing is left beside it"


def test_a_kill_between_the_two_renames_of_save_loses_nothing(tmp_path, monkeypatch):
    out, rename = tmp_path / "x", Path.rename
    out.mkdir()

    def killed(path, target):
        if path.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(path, target)

    grpo.save(out, lambda folder: (folder / "weights").write_text("old"), [], {}, {"reward": [0.0]})
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        grpo.save(out, lambda folder: (folder / "weights").write_text("new"), [], {}, {"reward": [0.0]})
    found = {path.suffix: (path / "weights").read_text() for path in tmp_path.iterdir()}
    assert found == {".old": "old", ".new": "new"}, "both results stand whole beside the name"


def test_ctrl_c_while_the_old_result_is_removed_leaves_one_that_can_be_saved_again(tmp_path, monkeypatch):
    out, rmtree = tmp_path / "x", shutil.rmtree
    out.mkdir()

    def press(path, **options):
        if path.name.endswith(".old") and (path / "weights").exists():
            raise KeyboardInterrupt
        rmtree(path, **options)

    grpo.save(out, lambda folder: (folder / "weights").write_text("old"), [], {}, {"reward": [0.0]})
    monkeypatch.setattr(shutil, "rmtree", press)
    with pytest.raises(KeyboardInterrupt):
        grpo.save(out, lambda folder: (folder / "weights").write_text("new"), [], {}, {"reward": [0.0]})
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    grpo.save(out, lambda folder: (folder / "weights").write_text("new"), [], {}, {"reward": [0.0]})
    assert (out / "weights").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_ctrl_c_while_a_result_is_written_does_not_lose_it_and_a_second_one_ends_at_once(tmp_path, monkeypatch, quick):
    saves, runs, save_pretrained = itertools.count(1), itertools.count(1), PeftModel.save_pretrained

    def press(*args, **options):
        save_pretrained(*args, **options)
        if next(saves) in (1, 3):
            raise KeyboardInterrupt

    def train(*args):
        yield {"step": 1, "samples": 6, "reward": 0.5}
        if next(runs) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(PeftModel, "save_pretrained", press)
    monkeypatch.setattr(grpo, "train", train)
    run_grpo(tmp_path / "x", steps=1)
    assert (tmp_path / "x" / "summary.json").exists() and [path.name for path in tmp_path.iterdir()] == ["x"]
    before = (tmp_path / "x" / "summary.json").read_text()
    with pytest.raises(KeyboardInterrupt):  # the third save
        run_grpo(tmp_path / "x", steps=2)
    assert next(saves) == 4 and (tmp_path / "x" / "summary.json").read_text() == before, "the old result stands"


def test_a_result_may_be_a_link_and_needs_no_picture(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if matplotlib were broken
    grpo.save(tmp_path / "link", lambda folder: None, [], {"steps": 1}, {"reward": [0.0]})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "summary.json").exists()
    assert not (tmp_path / "real" / "curves.png").exists()


# ================================================================ reward_model.py


def group_of(rows, pairs):
    """A group of ranked answers, as ranked_answers makes them."""
    return {"prompt": "One day", "rows": rows, "pairs": pairs, "weight": 1 / math.comb(len(rows), 2)}


# ---------------------------------------------------------------- reward_model.py: ranked_pairs


@pytest.mark.parametrize("K, count", [(2, 1), (3, 3), (4, 6), (9, 36)])
def test_B5_K_ranked_answers_make_K_times_K_minus_1_over_2_pairs(K, count):
    pairs = reward_model.ranked_pairs(torch.randperm(K).tolist())
    assert len(pairs) == len(set(pairs)) == count == K * (K - 1) // 2, "each two answers are one pair"


def test_B5_the_better_answer_stands_first_and_ties_are_left_out():
    assert sorted(reward_model.ranked_pairs([0.5, 1.0, 0.5])) == [(1, 0), (1, 2)], "0.5 and 0.5 are no pair"
    assert sorted(reward_model.ranked_pairs(torch.tensor([3.0, 1.0, 2.0]))) == [(0, 1), (0, 2), (2, 1)]
    assert reward_model.ranked_pairs([0.0, 0.0]) == [], "nothing to learn where all answers tie"


# ---------------------------------------------------------------- reward_model.py: reward_loss


@pytest.mark.parametrize("gap, expected", [(0.0, 0.693147), (1.0, 0.313262), (-1.0, 1.313262)])
def test_B5_the_loss_is_minus_log_sigmoid_of_the_difference(gap, expected):
    # ln 2; ln(1 + 1/e); ln(1 + e). 50 on both scores changes nothing: only the difference counts.
    for offset in (0.0, 50.0):
        loss, metrics = reward_model.reward_loss(torch.tensor([offset + gap]), torch.tensor([offset]))
        close(loss, expected, "-log sigmoid(chosen - rejected)")
        close(metrics["margin"], gap, "margin is chosen - rejected")
        assert metrics["accuracy"] == (gap > 0), "right order only where chosen is above rejected: a tie is not"


def test_B5_K_2_is_bradley_terry():
    # P(0 beats 1) = e^s0 / (e^s0 + e^s1), and the loss is its -log
    s = torch.tensor([0.3, -1.2], dtype=torch.float64)
    loss, _ = reward_model.reward_loss(s[:1], s[1:])
    close(loss, -s.softmax(0)[0].log(), "K = 2 is Bradley-Terry", 1e-12)


def test_B5_the_loss_of_three_answers_is_the_mean_over_their_three_pairs():
    # scores 2, 1, 0, ranked in this order: gaps 1, 1, 2 -> (0.313262 x 2 + 0.126928) / 3
    scores = float64(2, 1, 0)
    better, worse, weights = reward_model.pair_rows([group_of([0] * 3, [(0, 1), (1, 2), (0, 2)])], "cpu")
    loss, _ = reward_model.reward_loss(scores[better], scores[worse], weights=weights)
    close(loss, 0.251151, "mean over the 3 pairs")
    loss.backward()
    # d/ds0 = -(sigmoid(-1) + sigmoid(-2)) / 3 = -(0.268941 + 0.119203) / 3; s1 wins once and loses once by 1: 0
    close(scores.grad, [-0.129381, 0, 0.129381], "the best answer is pushed up by both its pairs")


def test_B5_prompts_of_4_2_and_3_answers_count_the_same():
    # Open-Assistant's RMLoss on the same scores, best first within a prompt (recorded): the mean of the prompts' means.
    scores = float64(-1.0475493192917231, 0.36706934789287643, 0.38753278340875547, 1.8382482151095312,
                     1.5602131758317697, 3.8717520002002703,
                     -0.6926605323147021, -4.697721427573063, -0.18493336515537095)  # fmt: skip
    groups = [group_of([0] * K, reward_model.ranked_pairs(range(K, 0, -1))) for K in (4, 2, 3)]
    better, worse, weights = reward_model.pair_rows(groups, "cpu")
    close(weights, [1 / 6] * 6 + [1] + [1 / 3] * 3, "each pair of K answers weighs 1 / C(K, 2)")
    loss, _ = reward_model.reward_loss(scores[better], scores[worse], weights=weights)
    close(loss, 1.9856165619294293, "each prompt weighs 1, whatever its K")


def test_the_weights_of_pairs_take_the_type_of_the_scores():
    chosen, rejected, weights = torch.ones(1), torch.zeros(1), torch.ones(1, dtype=torch.float64)
    loss, _ = reward_model.reward_loss(chosen, rejected, weights=weights)
    assert loss.dtype == torch.float32, "float32 scores have a float32 loss, whatever their weights are"


def test_a_tie_leaves_the_other_pairs_their_weight():
    # answers rated 1, 0, 0: pairs (0, 1) and (0, 2), each 1/3, not 1/2
    _, _, weights = reward_model.pair_rows([group_of([0] * 3, reward_model.ranked_pairs([1, 0, 0]))], "cpu")
    close(weights, [1 / 3, 1 / 3], "1 / C(3, 2) each")


@pytest.mark.parametrize("gap, loss_is, gradient", [(100.0, 0.0, 0.0), (-100.0, 100.0, -1.0), (-1000.0, 1000.0, -1.0)])
def test_differences_of_100_and_more_stay_finite(gap, loss_is, gradient):
    chosen, rejected = torch.tensor([gap], requires_grad=True), torch.zeros(1, requires_grad=True)
    loss, _ = reward_model.reward_loss(chosen, rejected)
    loss.backward()
    close(loss, loss_is, "no log of a sigmoid that has become 0")
    close(torch.stack([chosen.grad, rejected.grad]).flatten(), [gradient, -gradient], "gradient -sigmoid(-gap), and +")


def test_a_margin_is_what_the_difference_should_exceed():
    chosen, rejected = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])
    # gaps 1 and 2, less 1 and 3: 0 and -1 -> (0.693147 + 1.313262) / 2
    loss, metrics = reward_model.reward_loss(chosen, rejected, margin=torch.tensor([1.0, 3.0]))
    close(loss, 1.003204, "one margin a pair, no broadcasting to pairs of pairs")
    close(metrics["accuracy"], 1.0, "accuracy is about the order, not the margin")


def test_the_metrics_are_weighted_like_the_loss_and_detached():
    # gaps 1 and -2, weights 3 and 1: one of two in the right order is 3/4, the mean gap (3 - 2) / 4, less no margin
    chosen, rejected, weights = float64(1, 0), float64(0, 2), torch.tensor([3.0, 1.0])
    _, metrics = reward_model.reward_loss(chosen, rejected, 0.5, weights)
    close(metrics["accuracy"], 0.75, "accuracy is weighted")
    close(metrics["margin"], 0.25, "margin is the weighted mean of chosen - rejected")
    assert not any(value.requires_grad for value in metrics.values())


def test_a_pair_of_weight_0_has_no_influence_and_no_pairs_give_0():
    for bad in (math.nan, math.inf, 1e4):
        chosen, rejected = float64(1, bad), float64(0, bad)
        loss, metrics = reward_model.reward_loss(chosen, rejected, torch.tensor([0, bad]), torch.tensor([2.0, 0.0]))
        loss.backward()
        close(loss, 0.313262, f"{bad} under weight 0 has no influence on the value")
        close(chosen.grad, [-0.268941, 0], f"{bad} under weight 0 has no influence on the gradient")
        close(torch.stack(list(metrics.values())), [1, 1], f"{bad} under weight 0 has no influence on a metric")
    chosen = float64(1, math.nan)
    loss, metrics = reward_model.reward_loss(chosen, float64(0, 0), weights=torch.zeros(2))
    loss.backward()
    assert loss == 0 and (chosen.grad == 0).all() and not any(metrics.values()), "no weight: value and gradient 0"
    empty = torch.zeros(0, requires_grad=True)
    assert reward_model.reward_loss(empty, empty)[0] == 0, "no pairs: 0, never NaN"


def test_the_gradient_of_reward_loss_is_the_numerical_one():
    torch.manual_seed(0)
    inputs = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = torch.rand(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c, r: reward_model.reward_loss(c, r, 0.3, weights)[0], inputs)


# ---------------------------------------------------------------- reward_model.py: last_token_scores


def test_B4_B6_the_score_is_read_at_the_last_real_token_wherever_the_padding_is():
    scores = torch.arange(20.0).view(4, 5).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 0, 1, 0]])  # right, left, both, hole
    for kind in (torch.long, torch.bool, torch.float32):
        read = reward_model.last_token_scores(scores, mask.to(kind))
        close(read, [2, 9, 12, 18], f"the last 1 of each row of a {kind} mask, by position and not by count")
    read.sum().backward()
    close(scores.grad.nonzero(), [[0, 2], [1, 4], [2, 2], [3, 3]], "only this one position gets gradient")


def test_scores_of_padding_have_no_influence_and_an_empty_row_scores_0():
    for bad in (math.nan, math.inf):
        scores = torch.tensor([[bad, 7.0, bad], [bad, bad, bad]], requires_grad=True)
        read = reward_model.last_token_scores(scores, torch.tensor([[0, 1, 0], [0, 0, 0]]))
        read.sum().backward()
        close(read, [7, 0], f"{bad} under mask 0")
        close(scores.grad, [[0, 1, 0], [0, 0, 0]], f"{bad} under mask 0: gradient")


# ---------------------------------------------------------------- reward_model.py: with a model


def make_reward_model(args):
    """(model, tokenizer): what reward_model.py trains, with a random head and an adapter that is off zero."""
    model, tokenizer = reward_model.load(args)
    torch.manual_seed(1)
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    config = LoraConfig(r=8, lora_alpha=32, target_modules=args.lora_targets, task_type="SEQ_CLS")
    model = get_peft_model(model, config).eval()
    off_zero(model, std=0.05)
    return model, tokenizer


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """(args, model, tokenizer) of a reward model with random weights."""
    out = str(tmp_path_factory.mktemp("x") / "x")
    args = reward_model.parse_args(["--model", "tiny_llama", "--device", "cpu", "--out", out])
    return args, *make_reward_model(args)


def rows_of(tokenizer, count=8):
    """The ids of a few texts of different length, every second one ending in its EOS."""
    texts = [prompt + " was happy." * (i % 3) for i, prompt in enumerate(reward_model.PROMPTS[:count])]
    texts = tokenizer(texts, add_special_tokens=False).input_ids
    return [torch.tensor(ids + [tokenizer.eos_token_id] * (i % 2)) for i, ids in enumerate(texts)]


def pad_to_one_side(rows, pad, side):
    """(ids, mask) of a batch, three columns wider than its longest row."""
    width = max(map(len, rows)) + 3
    fill = [torch.full((width - len(ids),), pad) for ids in rows]
    join = [(f, r) if side == "left" else (r, f) for r, f in zip(rows, fill, strict=True)]
    mask = [(torch.zeros_like(f), torch.ones_like(r)) for r, f in zip(rows, fill, strict=True)]
    mask = mask if side == "left" else [pair[::-1] for pair in mask]
    return torch.stack([torch.cat(x) for x in join]), torch.stack([torch.cat(x) for x in mask])


@torch.no_grad()
def test_B6_a_batch_scores_like_one_by_one_padded_left_or_right_also_where_pad_is_eos(scorer):
    _, model, tokenizer = scorer
    rows, head = rows_of(tokenizer), model.get_base_model().score
    alone = torch.cat([reward_model.answer_scores(model, [ids], 0) for ids in rows])
    assert alone.std() > 1e-3, "the texts differ, so must the scores"
    for pad in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        close(reward_model.answer_scores(model, rows, pad), alone, "a batch scores like its rows alone", 1e-4)
    for pad in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        for side in ("left", "right"):
            ids, mask = pad_to_one_side(rows, pad, side)
            scores = reward_model.token_scores(model, head, ids, mask)
            close(reward_model.last_token_scores(scores, mask), alone, f"pad {pad} on the {side} changes nothing", 1e-4)


@torch.no_grad()
def test_the_positions_of_scores_are_counted_from_the_first_real_token():
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]])
    model, head = learned_positions(), torch.nn.Linear(16, 1, bias=False)
    peft_model = SimpleNamespace(get_base_model=lambda: model)
    padded, alone = (reward_model.token_scores(peft_model, head, x, (x != 0).long()) for x in (ids, ids[:1, 3:]))
    close(padded[:1, 3:], alone, "a model that learned its positions is right under left padding, too", 1e-5)


def test_B7_both_batchings_have_the_same_gradient_on_the_same_prompts(scorer):
    # mixed: mean over all prompts. by-prompt: one prompt after the other; the mean of these gradients is the same.
    _, model, tokenizer = scorer
    rows = rows_of(tokenizer, 12)
    groups = [group_of(rows[i : i + 4], reward_model.ranked_pairs([0, 2, 1, 3])) for i in (0, 4, 8)]

    def gradient(batches, micro_batch_size=16):
        for batch in batches:
            scores = reward_model.backward(model, tokenizer, batch, settings(micro_batch_size=micro_batch_size))
        flat = torch.cat([p.grad.flatten() for p in trained_parameters(model)])
        model.zero_grad()
        return flat, scores

    mixed, scores = gradient([groups])
    assert scores.shape == (12,), "one score an answer: 12 passes for 18 pairs, not 36"
    close(gradient([[g] for g in groups])[0] / 3, mixed, "same prompts, same gradient", 1e-5)
    close(gradient([groups], micro_batch_size=8)[0], mixed, "micro-batches of 2 and 1 prompts change nothing", 1e-5)


def test_an_answer_is_encoded_once_not_once_a_pair_and_a_micro_batch_is_made_of_whole_groups(scorer):
    _, model, tokenizer = scorer
    groups = [group_of(rows_of(tokenizer, 4), reward_model.ranked_pairs([0, 1, 2, 3])) for _ in range(3)]
    with batch_sizes(model.get_base_model().base_model) as sizes:
        for size in (8, 1):
            reward_model.backward(model, tokenizer, groups, settings(micro_batch_size=size))
    model.zero_grad()
    assert sizes == [8, 4] + [4, 4, 4], "6 pairs of 4 answers take 4 passes; 2 groups and 1, or else one by one"


# ---------------------------------------------------------------- reward_model.py: --data


def write(path, text):
    """The path of a new file with this text."""
    path.write_text(text, encoding="utf-8")
    return path


def test_a_pair_of_a_file_is_a_ranking_of_two_answers(scorer):
    args, _, tokenizer = scorer
    pairs = [{"prompt": "One", "chosen": " good day.", "rejected": rejected} for rejected in (" bad day.", " day.")]
    groups = reward_model.group_pairs(pairs, tokenizer, 256, args)
    assert [len(group["rows"]) for group in groups] == [2, 2]
    for ids in (ids for group in groups for ids in group["rows"]):
        assert ids[-1] == tokenizer.eos_token_id, "a finished answer ends in its EOS"
        assert tokenizer.eos_token_id not in ids[:-1], "and has no EOS inside (A2)"
    better, worse, weights = reward_model.pair_rows(groups, "cpu")
    assert better.tolist() == [0, 2] and worse.tolist() == [1, 3]
    close(weights, [1, 1], "every line counts the same")


def test_a_cut_off_answer_gains_no_eos_in_pairs_jsonl_and_a_finished_one_has_exactly_one(scorer, tmp_path):
    args, _, tokenizer = scorer
    answers = [" was happy.", " was sad and"]
    prompt, *encoded = tokenizer(["A bear", *answers], add_special_tokens=False).input_ids
    for cut_off in (0, 1):
        rows = [torch.tensor(prompt + ids + [2] * (i != cut_off)) for i, ids in enumerate(encoded)]
        line = reward_model.text_pair({"prompt": "A bear", "answers": answers, "rows": rows}, 0, 1, 2)
        pairs = reward_model.read_pairs(write(tmp_path / "pairs.jsonl", json.dumps(line)))
        assert (pairs[0]["chosen"], pairs[0]["rejected"]) == (" was happy.", " was sad and")
        (group,) = reward_model.group_pairs(pairs, tokenizer, 256, args)
        assert [ids.tolist() for ids in group["rows"]] == [ids.tolist() for ids in rows], f"{cut_off} was cut off"
        assert group["pairs"] == [(0, 1)]


def test_too_long_a_prompt_loses_its_left_end_and_too_long_an_answer_its_row(scorer):
    args, _, tokenizer = scorer
    context = 64
    pair = {"prompt": "Once" + " more and" * context, "chosen": " good day.", "rejected": " bad."}
    (group,) = reward_model.group_pairs([pair, pair | {"chosen": pair["prompt"]}], tokenizer, context, args)
    assert max(map(len, group["rows"])) == context, "as much of the prompt as there is room for"
    prompt, *answers = tokenizer(list(pair.values()), add_special_tokens=False).input_ids
    heads = [ids[: -len(answer) - 1].tolist() for ids, answer in zip(group["rows"], answers, strict=True)]
    assert heads[0] == heads[1] == prompt[-len(heads[0]) :], "the same cut for both answers, on the left"


# ---------------------------------------------------------------- reward_model.py: the script


@pytest.mark.parametrize(
    "argv, why",
    [
        (["--num-generations", "1"], "invalid choice: 1 (choose from"),
        (["--num-generations", "10"], "invalid choice: 10 (choose from"),
        (["--data", "nowhere.jsonl"], "cannot be read"),
        (["--data", "x", "--prompts", "y"], "not allowed with argument --data"),
        (["--batching", "both"], "invalid choice"),
    ],
)
def test_bad_options_of_the_reward_model_end_in_one_sentence_before_any_training(tmp_path, capsys, argv, why):
    assert why in refused(capsys, reward_model, "--model", "tiny_llama", "--out", str(tmp_path / "out"), *argv)


def test_identical_and_blank_answers_are_counted_not_learned_and_kept_in_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reward_model, "HELD_OUT_PROMPTS", reward_model.HELD_OUT_PROMPTS[:1])  # to be quick
    few = ["--model", "tiny_llama", "--device", "cpu", "--steps", "1", "--max-completion-length", "2"]
    few += ["--prompts-per-step", "2"]
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "summary.json").write_text("{}")
    lines = [{"prompt": f"Day {i}", "chosen": " was happy.", "rejected": " cried", "more": i} for i in range(4)]
    useless = [lines[0] | {"chosen": " cried"}, lines[1] | {"rejected": " "}]
    text = "".join(json.dumps(line) + "\n" for line in lines + useless)
    data = write(tmp_path / "rm" / "pairs.jsonl", text)
    reward_model.main([*few, "--data", str(data), "--out", str(tmp_path / "rm")])
    assert "2 pairs to train on, 2 held out; 2 with identical or blank answers" in capsys.readouterr().out
    assert data.read_text() == text, "the result replaces the folder, but all pairs are in it"
    assert (tmp_path / "rm" / "adapter_model.safetensors").exists()
    data.write_text("".join(json.dumps(line) + "\n" for line in useless))
    with pytest.raises(SystemExit):
        reward_model.main([*few, "--data", str(data), "--out", str(tmp_path / "other")])
    assert "0 rankings are left to train on" in capsys.readouterr().err, "useless pairs alone teach nothing"


@torch.no_grad()
def test_best_of_8_goes_by_the_scores_alone_also_where_they_tie(scorer, monkeypatch):
    args, model, tokenizer = scorer
    rows = rows_of(tokenizer, 8)
    eights = []
    for happiness in ([0.0, 1.0] * 4, [0.5] + [-1.0] * 6 + [1.0]):
        more = {"happiness": happiness, "answers": list("abcdefgh")}
        eights.append(group_of(rows, reward_model.ranked_pairs(happiness)) | more)
    scores = torch.zeros(8)
    monkeypatch.setattr(reward_model, "answer_scores", lambda *_: scores)
    estimates, _ = reward_model.evaluate_scores(model, tokenizer, eights, eights, args)
    close(estimates["best_of_8"]["mean"], 0.25, "a constant scorer picks the first answers: (0 + 0.5) / 2")
    close(estimates["happiness"]["mean"], (0.5 - 4.5 / 8) / 2, "the mean of all answers")
    close(estimates["best_of_8_by_rater"]["mean"], 1.0, "the happiest answer of each set")
    close(estimates["accuracy"]["mean"], 0.0, "a tie is not the right order")
    counts = [estimates[name]["n"] for name in ("best_of_8", "happiness", "accuracy")]
    assert counts == [2, 16, 2], "2 sets, 16 answers, 2 rankings"
    scores = torch.arange(8.0)  # the last is the best: the odd ones are above the even ones in 10 of 16 pairs;
    estimates, shown = reward_model.evaluate_scores(model, tokenizer, eights, eights, args)  # in the other set 7 of 13
    close(estimates["best_of_8"]["mean"], 1.0, "the answer with the highest score")
    close(estimates["accuracy"]["mean"], (10 / 16 + 7 / 13) / 2, "a prompt is one number, the share of its pairs")
    # the mean of 1 3 5 7, and of 7 in 7 pairs and 0 in 6; the mean of 0 2 4 6, and of 0, 1 to 6 and 1 to 6
    close(estimates["chosen_score"]["mean"], (4 + 49 / 13) / 2, "the better answers' score, pair by pair")
    close(estimates["rejected_score"]["mean"], (3 + 42 / 13) / 2, "the worse answers'")
    assert shown == [("highest score", "7.00 One dayh"), ("lowest score", "0.00 One daya")]
    scores = 7 - scores
    _, shown = reward_model.evaluate_scores(model, tokenizer, eights, eights, args)
    assert shown == [("highest score", "7.00 One daya"), ("lowest score", "0.00 One dayh")]
    scores = torch.full((8,), math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        reward_model.evaluate_scores(model, tokenizer, eights, eights, args)


@torch.no_grad()
def test_the_answers_come_from_the_model_without_its_adapter_and_the_rater_ranks_those_to_one_prompt(
    scorer, tiny, monkeypatch
):
    args, model, tokenizer = scorer
    ids = torch.tensor([[0, 8, 50, 2], [0, 8, 51, 61], [0, 8, 52, 2], [7, 9, 53, 2], [7, 9, 54, 2], [7, 9, 2, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]])
    texts = [" sad", " ran", " happy", " glad", " glad", ""]

    def complete(sampler, tokenizer, prompts, args):
        assert prompts == ["A"] * 3 + ["B"] * 3, "the answers to one prompt are side by side"
        logits, plain = sampler(input_ids=ids[3:]).logits, tiny[0](input_ids=ids[3:]).logits
        close(logits, plain, "without the adapter that is being trained", 1e-4)
        return ids, mask, mask[:, 2:], texts, None

    monkeypatch.setattr(reward_model, "complete", complete)
    groups = reward_model.ranked_answers(model, tokenizer, ["A", "B"], 3, args)
    assert [group["prompt"] for group in groups] == ["A", "B"]
    assert [group["answers"] for group in groups] == [texts[:3], texts[3:]]
    assert [sorted(group["pairs"]) for group in groups] == [[(1, 0), (2, 0), (2, 1)], [(0, 2), (1, 2)]]
    assert [group["weight"] for group in groups] == [1 / 3, 1 / 3], "1 / C(3, 2), also where two of them tie"
    assert [group["happiness"] for group in groups] == [[-1 / 3, 0, 1 / 3], [1 / 3, 1 / 3, 0]]
    rows = [own.tolist() for group in groups for own in group["rows"]]
    assert rows == [[8, 50, 2], [8, 51, 61], [8, 52, 2], [7, 9, 53, 2], [7, 9, 54, 2], [7, 9, 2]], "no padding"


def test_a_score_that_is_not_finite_stops_training_and_names_the_step(scorer, monkeypatch):
    _, model, tokenizer = scorer
    group = group_of(rows_of(tokenizer, 2), [(0, 1)])
    monkeypatch.setattr(reward_model, "backward", lambda *_: torch.tensor([0.0, math.nan]))
    args = settings(steps=2, prompts_per_step=1, batching="mixed", learning_rate=0.5, micro_batch_size=4)
    with pytest.raises(FloatingPointError, match="step 1"):
        next(reward_model.train(model, tokenizer, [group], args))


def test_each_group_of_answers_of_the_reward_model_has_its_turn_before_any_comes_again(scorer, monkeypatch):
    _, model, tokenizer = scorer
    groups, seen = [group_of(rows_of(tokenizer, 2), [(0, 1)]) | {"prompt": name} for name in "ABC"], []

    def backward(model, tokenizer, groups, args):
        seen.extend(group["prompt"] for group in groups)
        return torch.zeros(2 * len(groups))

    monkeypatch.setattr(reward_model, "backward", backward)
    args = settings(steps=3, prompts_per_step=2, batching="mixed", learning_rate=0.5, micro_batch_size=4)
    torch.manual_seed(0)
    records = list(reward_model.train(model, tokenizer, groups, args))
    assert sorted(seen[:3]) == sorted(seen[3:]) == list("ABC"), "3 steps of 2 groups are 2 turns of all 3"
    assert [record["samples"] for record in records] == [4, 8, 12]


@pytest.mark.parametrize("batching", ["mixed", "by-prompt"])
def test_a_step_of_the_reward_model_is_the_loss_written_out_pair_by_pair(scorer, monkeypatch, batching):
    _, model, tokenizer = scorer
    rows = rows_of(tokenizer, 9)
    groups = []
    for first, rank in ((0, [2, 1, 0, 1]), (4, [0, 1]), (6, [1, 0, 0])):  # 5 pairs and a tie, 1 pair, 2 pairs and a tie
        groups.append(group_of(rows[first : first + len(rank)], reward_model.ranked_pairs(rank)))
    plain_sgd(monkeypatch)
    args = settings(steps=1, prompts_per_step=3, batching=batching, learning_rate=0.5, micro_batch_size=8)
    params = trained_parameters(model)
    start = [p.detach().clone() for p in params]
    torch.manual_seed(0)
    order = torch.randperm(3).tolist()
    torch.manual_seed(0)
    (record,) = reward_model.train(model, tokenizer, groups, args)
    learned = values_of(params)
    for p, value in zip(params, start, strict=True):
        p.data.copy_(value)

    def losses(part):
        """(sum of weighted losses, sum of the weights, pairs in the right order, sum of weighted gaps) of groups."""
        total = torch.zeros(4)
        for group in part:
            hidden = [model.get_base_model().base_model(input_ids=ids[None]).last_hidden_state for ids in group["rows"]]
            scores = torch.cat([model.get_base_model().score(h[0, -1]) for h in hidden])
            for better, worse in group["pairs"]:
                gap, w = scores[better] - scores[worse], group["weight"]
                total = total + w * torch.stack([-gap.sigmoid().log(), torch.tensor(1.0), (gap > 0).float(), gap])
        return total

    parts, report = [groups] if batching == "mixed" else [[groups[i]] for i in order], torch.zeros(4)
    for part in parts:
        total = losses(part)
        report += total.detach()
        norm = sgd_step(params, total[0] / total[1], 0.5)
    step = values_of(params) - values_of(start)
    assert (values_of(params) - learned).norm() < 1e-3 * step.norm(), "one optimizer step on all prompts, or one each"
    for p, value in zip(params, start, strict=True):
        p.data.copy_(value)
    assert record["samples"] == 9 and record["pairs"] == 8 and record["step"] == 1
    for name, value in zip(("loss", "accuracy", "margin"), (report / report[1])[[0, 2, 3]], strict=True):
        assert record[name].item() == pytest.approx(value.item(), rel=1e-3, abs=1e-6), name
    assert record["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-3)


DIFFER, TIE = [1.0, 0.0], [0.0, 0.0]


def test_every_batch_of_prompts_is_ranked(scorer, monkeypatch):
    args, model, tokenizer = scorer

    def complete(model, tokenizer, prompts, args):
        ids = torch.ones(len(prompts), 2, dtype=torch.long)
        return ids, ids, None, [""] * len(prompts), None

    monkeypatch.setattr(reward_model, "complete", complete)
    prompts = [f"p{i}" for i in range(70)]  # a batch is 256 // 4 = 64 prompts
    groups = reward_model.ranked_answers(model, tokenizer, prompts, 4, args)
    assert [group["prompt"] for group in groups] == prompts


def test_a_gradient_of_the_reward_model_that_is_not_finite_stops_training_and_mean_score_is_a_mean(scorer, monkeypatch):
    _, model, tokenizer = scorer
    norm, groups = 0.0, [group_of(rows_of(tokenizer, 2), [(0, 1)])]
    monkeypatch.setattr(reward_model, "backward", lambda *_: torch.tensor([1.0, 3.0]))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(norm))
    args = settings(steps=1, prompts_per_step=1, batching="mixed", learning_rate=0.5, micro_batch_size=4)
    (record,) = reward_model.train(model, tokenizer, groups, args)
    assert record["mean_score"] == 2, "(1 + 3) / 2"
    norm = math.inf
    with pytest.raises(FloatingPointError, match="step 1"):
        next(reward_model.train(model, tokenizer, groups, args))


def test_reward_model_py_ranks_as_many_answers_as_it_is_told_and_judges_by_others(tmp_path, capsys, monkeypatch):
    calls, seen = [], {}

    def ranked_answers(model, tokenizer, prompts, K, args):
        calls.append((prompts, K, torch.initial_seed()))
        more = {"answers": [" glad", " ran", " sad"], "happiness": [0.3, 0, -0.3]}
        rows = [torch.tensor([5, 6, 2])] * 3
        groups = [group_of(rows, [(0, 1), (0, 2), (1, 2)]) | more | {"prompt": prompt} for prompt in prompts]
        groups[-1]["pairs"] = []  # all equally good
        return groups

    def run(args, model, start, records, judge, write, shown):
        write(args.out)
        seen.update(trained=records, eights=judge.args[2], held_out=judge.args[3])
        raise Enough

    monkeypatch.setattr(reward_model, "ranked_answers", ranked_answers)
    monkeypatch.setattr(reward_model, "train", lambda model, tokenizer, groups, args: groups)
    monkeypatch.setattr(reward_model, "run", run)
    few = ["--rankings", "50", "--num-generations", "3", "--seed", "5", "--out", str(tmp_path / "x")]
    with pytest.raises(Enough):
        reward_model.main(["--model", "tiny_llama", "--device", "cpu", *few])
    prompts, out = (reward_model.PROMPTS * 2)[:50], capsys.readouterr().out
    assert calls == [(reward_model.HELD_OUT_PROMPTS * 2, 8, 0), (prompts, 3, 5)], "the judge's seed is 0"
    assert [len(seen[name]) for name in ("trained", "eights", "held_out")] == [49, 32, 31]
    assert "49 rankings made" in out and "1 left out" in out
    assert [group["prompt"] for group in seen["trained"]] == prompts[:49], "what is held out is not trained on"
    assert all(group["prompt"] in reward_model.HELD_OUT_PROMPTS for group in seen["held_out"])
    assert len((tmp_path / "x" / "pairs.jsonl").read_text().splitlines()) == 49 * 3, "every pair of every ranking"


@pytest.mark.parametrize(
    "held_out, others, why",
    [(TIE, DIFFER, "2 rankings are left to train on and 0 to judge by"), (DIFFER, TIE, "0 rankings are left")],
)
def test_answers_that_all_tie_are_an_error(tmp_path, capsys, monkeypatch, held_out, others, why):
    monkeypatch.setattr(reward_model, "HELD_OUT_PROMPTS", reward_model.HELD_OUT_PROMPTS[:2])
    rated = itertools.chain(held_out * 16, itertools.cycle(others))  # first 2 sets of 8 answers to the 2 prompts
    monkeypatch.setattr(reward_model, "happiness", lambda text: next(rated))
    few = ["--steps", "1", "--max-completion-length", "2", "--num-generations", "2", "--rankings", "2"]
    with pytest.raises(SystemExit) as end:
        reward_model.main(["--model", "tiny_llama", "--out", str(tmp_path / "out"), *few])
    assert end.value.code == 2 and why in capsys.readouterr().err and not any((tmp_path / "out").iterdir())


# ================================================================ ppo.py


def random_rows(B=6, T=9, seed=0, holes=False):
    """A random mask of rows of length 1 to T (with holes), and a function that makes random tensors of its shape."""
    torch.manual_seed(seed)
    mask = torch.arange(T)[None] < torch.randint(1, T + 1, (B, 1))
    mask &= torch.rand(B, T) > 0.3 if holes else mask
    return mask.long(), lambda scale=1.0: torch.randn(B, T, dtype=torch.float64) * scale


def spoiled(x, mask, bad):
    """A copy of x with bad where the mask is 0, as a leaf that takes gradient."""
    return torch.where(mask.bool(), x, torch.tensor(bad, dtype=x.dtype)).requires_grad_()


# ---------------------------------------------------------------- ppo.py: token_rewards, spread


def test_B4_the_score_of_an_answer_is_paid_at_its_last_token():
    zero, mask = torch.zeros(3, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0]])
    rewards = ppo.token_rewards(torch.tensor([1.0, 2.0, 3.0]), zero, zero, mask)
    close(rewards, [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 3, 0]], "with EOS early, at the end, and after a hole")


def test_B4_a_score_is_paid_at_the_last_token_at_every_one_or_as_their_mean():
    nan, mask = math.nan, torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    scores = rows64([1, 2, 6, nan], [4, nan, nan, nan])
    close(ppo.spread(scores, mask, "last"), [6, 4], "last: the score of the whole answer")
    close(ppo.spread(scores, mask, "every"), [[1, 2, 6, 0], [4, 0, 0, 0]], "every: each token its own")
    close(ppo.spread(scores, mask, "mean"), [[3, 3, 3, 0], [4, 0, 0, 0]], "mean: (1 + 2 + 6) / 3 on each token")
    with pytest.raises(ValueError, match="'last', 'every' or 'mean'"):
        ppo.spread(scores, mask, "first")
    zero = torch.zeros_like(scores)
    rewards = ppo.token_rewards(ppo.spread(scores, mask, "every"), zero, zero, mask)
    close(rewards, [[1, 2, 6, 0], [4, 0, 0, 0]], "scores of shape (B, T) are used token by token")


def test_B8_the_kl_is_taken_from_the_reward_token_by_token_and_may_be_negative():
    log_probs, ref = rows64([-1, -2, -3, math.nan]), rows64([-2, -2, -1, math.nan])
    rewards = ppo.token_rewards(rows64(10), log_probs, ref, torch.tensor([[1, 1, 1, 0]]), kl_coef=0.1)
    # k1 = +1, 0, -2: a token that the policy likes less than the reference is paid for
    close(rewards, [[-0.1, 0, 10.2, 0]], "score - kl_coef * (log_probs - ref_log_probs)")


def test_B8_the_mean_of_k1_under_the_policy_is_the_kl_and_never_negative():
    policy, ref = rows64([0.7, 0.2, 0.1]), rows64([0.2, 0.3, 0.5])
    k1 = -ppo.token_rewards(torch.zeros(1), policy.log(), ref.log(), torch.ones(1, 3), kl_coef=1.0)
    assert (k1 < 0).any(), "a single sample can be below 0: the article's 'always above 1' is wrong"
    close((policy * k1).sum(), 0.634900, "0.7 ln 3.5 + 0.2 ln 2/3 + 0.1 ln 1/5 = 0.8769 - 0.0811 - 0.1609", 1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4])
def test_rewards_under_mask_0_are_0_and_have_no_gradient(bad):
    mask, make = random_rows(holes=True)
    x = [spoiled(make(), mask, bad) for _ in range(3)]
    rewards = ppo.token_rewards(*x, mask)
    rewards.sum().backward()
    assert (rewards[mask == 0] == 0).all(), f"{bad} under mask 0: value"
    assert all((t.grad[mask == 0] == 0).all() for t in x), f"{bad} under mask 0: gradient"


# ---------------------------------------------------------------- ppo.py: gae


def test_B11_gae_carries_one_reward_at_the_end_back_to_every_token():
    rewards, values = rows64([0, 0, 1]), rows64([0.5, 0.5, 0.5])
    advantages, returns = ppo.gae(rewards, values, torch.ones(1, 3))
    # deltas 0, 0, 1 - 0.5; each step back is multiplied by 0.95: 0.5, 0.475, 0.45125
    close(advantages, [[0.45125, 0.475, 0.5]], "one reward at the end reaches every token")
    close(returns, [[0.95125, 0.975, 1.0]], "return = advantage + value")


def test_B11_padding_and_holes_are_skipped():
    rewards, values = rows64([0, 9, 0, 1, 9]), rows64([0.5, 9, 0.5, 0.5, 9])
    advantages, returns = ppo.gae(rewards, values, torch.tensor([[1, 0, 1, 1, 0]]))
    close(advantages, [[0.45125, 0, 0.475, 0.5, 0]], "the next value is that of the next real token")
    close(returns, [[0.95125, 0, 0.975, 1.0, 0]], "0 where the mask is 0")


def test_B11_gamma_discounts_the_next_value_and_lambda_the_next_advantage():
    # delta_1 = 1 - 2 = -1; delta_0 = 0 + 0.9 * 2 - 1 = 0.8; A_0 = 0.8 + 0.9 * 0.5 * -1 = 0.35
    advantages, _ = ppo.gae(rows64([0, 1]), rows64([1, 2]), torch.ones(1, 2), gamma=0.9, lam=0.5)
    close(advantages, [[0.35, -1.0]], "delta_t + gamma lam A_(t+1)")


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4])
def test_B11_gae_is_a_plain_loop_over_the_real_tokens_whatever_stands_in_the_padding(gamma, lam, bad):
    mask, make = random_rows(seed=1, holes=True)
    rewards, values = spoiled(make(), mask, bad), spoiled(make(), mask, bad)
    advantages, returns = ppo.gae(rewards, values, mask, gamma, lam)
    for i, real in enumerate(mask.bool()):
        r, v = rewards[i][real].tolist(), values[i][real].tolist() + [0.0]
        expected, advantage = [], 0.0
        for t in reversed(range(len(r))):
            advantage = r[t] + gamma * v[t + 1] - v[t] + gamma * lam * advantage
            expected.insert(0, advantage)
        close(advantages[i][real], expected, "GAE, eq. 16", 1e-12)
    assert (advantages[mask == 0] == 0).all() and (returns[mask == 0] == 0).all(), "0 where the mask is 0"
    (advantages + returns).sum().backward()
    for x in (rewards, values):
        assert x.grad.isfinite().all() and (x.grad[mask == 0] == 0).all(), f"{bad} under mask 0 has no gradient"


def test_B11_with_gamma_and_lambda_1_the_advantage_is_the_sum_of_rewards_to_come_less_the_value():
    mask, make = random_rows(seed=2)
    rewards, values = make() * mask, make()
    to_come = rewards.flip(1).cumsum(1).flip(1)
    close(ppo.gae(rewards, values, mask, 1.0, 1.0)[0], (to_come - values) * mask, "Monte Carlo", 1e-12)


def test_B11_gae_and_whitening_agree_with_easyr1():
    # Recorded from EasyR1's compute_gae_advantage_return, gamma 0.99, lambda 0.9, float64; it whitens as well.
    rewards = rows64([-0.42118920854336855, -0.07189392460957575, -0.2447599734228689, 0.9264148465409054,
                      -0.6894484229582267, -0.6023573285964183, 0.273013414827296])  # fmt: skip
    values = rows64([-0.28065288240993835, -0.8098960320124117, 2.04840073977315, 0.8521186992134101,
                     0.4503838319603026, 0.9714559145272655, 0.1612549427679177])  # fmt: skip
    mask = torch.ones(1, 7)
    advantages, returns = ppo.gae(rewards, values, mask, 0.99, 0.9)
    close(returns, [[-0.3918394423848619, 0.12292870182686355, -0.008943935803706449, 0.16998460875088117,
                     -0.8990103671763123, -0.3431381366512737, 0.273013414827296]], "returns", 1e-12)  # fmt: skip
    close(ppo.whiten(advantages, mask), [[0.5151958439340963, 1.5350582992797914, -1.385946036454386,
          -0.04254520136562942, -0.6943710358356718, -0.6603758438744315, 0.7329839743162309]],
          "whitened advantages", 1e-7)  # fmt: skip


# ---------------------------------------------------------------- ppo.py: whiten


def test_B12_whitening_gives_mean_0_and_sample_variance_1_over_the_real_tokens():
    white = ppo.whiten(rows64([1, math.nan, 2, 3]), torch.tensor([[1, 0, 1, 1]]))
    close(white, [[-1, 0, 0, 1]], "variance (1 + 0 + 1) / 2")
    # variance 2e-8: 1e-4 / sqrt(2e-8 + 1e-8) = 0.577350
    close(ppo.whiten(rows64([-1e-4, 1e-4]), torch.ones(1, 2)), [[-0.577350, 0.577350]], "+ 1e-8 inside the root")
    for bad in (math.nan, math.inf, 1e4):
        mask, make = random_rows(seed=3, holes=True)
        x = spoiled(make(5) + 2, mask, bad)
        white = ppo.whiten(x, mask)
        kept = white[mask.bool()]
        close(torch.stack([kept.mean(), kept.var()]), [0, 1], "one mean and one variance for the whole batch")
        assert (white[mask == 0] == 0).all(), "0 where the mask is 0"
        (white**3).sum().backward()
        assert x.grad.isfinite().all() and (x.grad[mask == 0] == 0).all(), f"{bad} under mask 0 has no gradient"


@pytest.mark.parametrize("x, mask", [([5.0, 9.0], [1, 0]), ([5.0, 9.0], [0, 0]), ([0.9] * 8, [1] * 8)])
def test_whitening_one_token_none_or_equal_ones_gives_exactly_0(x, mask):
    x = torch.tensor([x], requires_grad=True)
    white = ppo.whiten(x, torch.tensor([mask]))
    white.sum().backward()
    assert (white == 0).all() and (x.grad == 0).all(), "nothing to compare: 0, not NaN and not a rounding error"


# ---------------------------------------------------------------- ppo.py: policy_loss


# ratio, advantage, loss, d loss / d log_prob = -advantage * ratio unless the clip took it away, metric that counts it
CELLS = [
    (0.5, 1.0, -0.5, -0.5, None),  # a good token become rarer: not clipped, it must come back
    (1.0, 1.0, -1.0, -1.0, None),
    (1.5, 1.0, -1.2, 0.0, "high"),  # a good token 1.5 as likely: enough
    (0.5, -1.0, 0.8, 0.0, "low"),  # a bad token half as likely: enough
    (1.0, -1.0, 1.0, 1.0, None),
    (1.5, -1.0, 1.5, 1.5, None),  # a bad token become likelier: not clipped
    (10.0, -1.0, 3.0, 0.0, "dual"),  # B9: but bounded, by clip_dual * 1
    (10.0, 1.0, -1.2, 0.0, "high"),  # the dual clip is for bad tokens
]


@pytest.mark.parametrize("cell", CELLS)
def test_B9_a_token_that_went_far_enough_has_no_gradient_and_a_bad_one_costs_at_most_clip_dual(cell):
    ratio, advantage, loss_is, gradient, metric = cell
    log_probs = rows64([math.log(ratio)]).requires_grad_()
    loss, metrics = ppo.policy_loss(log_probs, rows64([0]), rows64([advantage]), torch.ones(1, 1))
    loss.backward()
    close(loss, loss_is, "-min(r A, clip(r) A), at most -clip_dual A for A < 0")
    close(log_probs.grad, [[gradient]], "a clipped token has no gradient")
    for name in ("low", "high", "dual"):
        assert metrics[f"clip_ratio/{name}_mean"] == (name == metric), f"{name}: only tokens whose gradient was taken"
    close(metrics["approx_kl"], -math.log(ratio), "approx_kl = old - new log-prob")
    assert not any(value.requires_grad for value in metrics.values()), "metrics are for looking at: detached"


def test_B9_clip_low_and_clip_high_are_set_apart():
    def loss(ratio, advantage, **options):
        args = rows64([math.log(ratio)]), rows64([0]), rows64([advantage]), torch.ones(1, 1)
        return ppo.policy_loss(*args, **options)[0]

    close(loss(1.5, 1.0, clip_high=0.28), -1.28, "1 + clip_high, DAPO's clip-higher")
    close(loss(0.5, -1.0, clip_low=0.1, clip_high=0.28), 0.9, "1 - clip_low")
    close(loss(10.0, -1.0, clip_dual=None), 10.0, "no dual clip, no bound (A12)")


def test_B9_policy_loss_agrees_with_easyr1():
    # Recorded from EasyR1's compute_policy_loss, clip 0.2 / 0.3, dual 3: the per-token losses of one answer, float64.
    log_probs = rows64([-1.0683876476480867, -0.8683139486355624, -1.3759256009996355, -1.207849358569276,
                        -1.6198680941519892, -0.6257372044192566, -1.5834147230266646])  # fmt: skip
    old = rows64([-1.3255241083965972, -0.9282838307415636, -1.7634573957464854, -1.100228005527798,
                  -1.8120749597706796, -0.7360851328176596, -1.263848942045068])  # fmt: skip
    advantages = rows64([-0.600270633877665, 1.1589735713289677, -0.7148316469492509, -0.6686962592190029,
                         -0.16115634722258582, -0.6875323668262259, -0.8326801687232895])  # fmt: skip
    expected = [0.7762829427962312, -1.2306034307754723, 1.0531899138485707, 0.600467538071619, 0.19530879304700097,
                0.7677443774264808, 0.6661441349786317]  # fmt: skip
    loss, metrics = ppo.policy_loss(log_probs, old, advantages, torch.ones(1, 7), clip_low=0.2, clip_high=0.3)
    close(loss, sum(expected) / 7, "token mean", 1e-12)
    close(metrics["clip_ratio/low_mean"], 1 / 7, "the last token's ratio is 0.726 with a negative advantage")


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_ratios_of_200_stay_finite_in_policy_loss(log_ratio, advantage):
    log_probs = torch.full((1, 2), log_ratio, requires_grad=True)
    args = log_probs, torch.zeros(1, 2), torch.full((1, 2), advantage), torch.ones(1, 2)
    loss, _ = ppo.policy_loss(*args, clip_dual=None)
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all(), "clamped to +-20 before exp"


def both_losses(mask, make, bad, rows=slice(None), **options):
    """The two losses of random tensors with bad under mask 0, their gradients and their metrics, in one vector."""
    torch.manual_seed(7)
    data = [make(0.5) for _ in range(6)]
    x = [spoiled(t, mask, bad) for t in data]
    m = mask[rows]
    loss, metrics = ppo.policy_loss(*(t[rows] for t in x[:3]), m, **options)
    value, more = ppo.value_loss(*(t[rows] for t in x[3:]), m, **options)
    (loss + value).backward()
    return torch.stack([loss, value]).detach(), torch.stack([t.grad for t in x]), metrics | more


@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4])
def test_what_stands_under_mask_0_has_no_influence_on_ppos_losses(bad, kind):
    mask, make = random_rows(seed=4, holes=True)
    loss, gradient, metrics = both_losses(mask.to(kind), make, 0.0)
    bad_loss, bad_gradient, bad_metrics = both_losses(mask.to(kind), make, bad)
    assert gradient.abs().sum() > 0 and (bad_gradient[:, mask == 0] == 0).all(), f"{bad} under mask 0 has no gradient"
    assert torch.equal(loss, bad_loss), f"{bad} under mask 0: value"
    assert torch.equal(gradient, bad_gradient), f"{bad} under mask 0: gradient"
    assert metrics == bad_metrics and metrics["vf_clip_ratio"] > 0, f"{bad} under mask 0: metrics"


def test_the_mean_is_over_tokens_and_any_split_into_micro_batches_gives_the_same_gradient():
    mask, make = random_rows(B=7, seed=5)
    whole, gradient, _ = both_losses(mask, make, math.nan)
    for size in (1, 2, 3, 7):
        pieces = [slice(i, i + size) for i in range(0, 7, size)]
        parts = [both_losses(mask, make, math.nan, piece, normalizer=mask.sum()) for piece in pieces]
        close(sum(loss for loss, _, _ in parts), whole, f"micro-batches of {size}: same loss", 1e-12)
        close(sum(g for _, g, _ in parts), gradient, f"micro-batches of {size}: same gradient", 1e-12)
    # lengths 1 and 3, one token worth -4, three worth 0: the token mean is -1, the mean of the rows' means would be -2
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss, metrics = ppo.policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), rows64([4, 9, 9], [0, 0, 0]), mask)
    close(loss, -1.0, "a mean over tokens")
    _, metrics = ppo.policy_loss(torch.zeros(2, 3), rows64([4, 9, 9], [0, 0, 0]), torch.zeros(2, 3), mask)
    close(metrics["approx_kl"], 1.0, "approx_kl is a mean over the same tokens: (4 + 0 + 0 + 0) / 4")


@pytest.mark.parametrize("side, ratio, advantage", [("low", 0.5, -1), ("high", 2, 1), ("dual", 4, -1)])
def test_the_shares_that_the_clips_took_are_of_the_real_tokens(side, ratio, advantage):
    # One of four real tokens has a ratio out of range, and so have the two masked ones; V likewise (B10's numbers).
    mask, zero = torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.zeros(2, 3)
    log_probs = torch.tensor([[math.log(ratio)] * 3, [0.0] * 3])
    _, metrics = ppo.policy_loss(log_probs, zero, torch.full((2, 3), float(advantage)), mask)
    close(metrics[f"clip_ratio/{side}_mean"], 1 / 4, side)
    _, metrics = ppo.value_loss(rows64([1, 1, 1], [0, 0, 0]), zero, rows64([2, 2, 2], [0, 0, 0]), mask)
    close(metrics["vf_clip_ratio"], 1 / 4, "tokens whose value the clip held back")


@pytest.mark.parametrize("ratio, advantage", [(0.5, 0.5), (0.5, 0.0), (4, 0.5), (4, 0.0)])
def test_low_and_dual_count_only_bad_tokens_and_high_only_good_ones(ratio, advantage):
    one = torch.ones(1, 1)
    _, metrics = ppo.policy_loss(row(math.log(ratio)), row(0), one * advantage, one)
    _, more = one_sequence(row(math.log(ratio)), row(0), advantage, beta=0, delta=3.0)
    for script, found in (("ppo", metrics), ("grpo", more)):
        shares = {name[11:-5] for name, value in found.items() if name.startswith("clip_ratio") and value}
        expected = {"high"} if ratio == 4 and advantage else set()
        assert shares == expected, f"{script}: low and dual count A < 0, high A > 0, none A = 0"


def test_an_all_zero_mask_gives_ppos_losses_0_and_gradient_0():
    mask, make = torch.zeros(2, 3), lambda scale: torch.randn(2, 3, dtype=torch.float64)
    loss, gradient, metrics = both_losses(mask, make, math.nan)
    assert (loss == 0).all() and (gradient == 0).all() and not any(metrics.values()), "0, never NaN"


def test_the_gradients_of_ppos_functions_are_the_numerical_ones():
    mask, make = random_rows(B=3, T=4, seed=6, holes=True)
    x = [make(0.5).requires_grad_() for _ in range(3)]
    check = torch.autograd.gradcheck
    assert check(lambda *x: ppo.policy_loss(*x, mask)[0], x)
    assert check(lambda *x: ppo.value_loss(*x, mask)[0], x)
    assert check(lambda *x: ppo.whiten(ppo.gae(*x, mask, 0.9, 0.8)[0], mask), x[:2])
    assert check(lambda *x: ppo.token_rewards(*x, mask), x)


# ---------------------------------------------------------------- ppo.py: value_loss


@pytest.mark.parametrize(
    "value, target, loss_is, gradient, clipped",
    [
        (1.0, 2.0, 1.62, 0.0, True),  # B10: 0.5 * max((1 - 2)^2, (0.2 - 2)^2) = 0.5 * 3.24
        (-1.0, -2.0, 1.62, 0.0, True),  # the same below
        (3.5, 2.0, 1.62, 0.0, True),  # past the return, but nearer to it than the bound: 1.5 < 1.8
        (3.9, 2.0, 1.805, 1.9, False),  # past it and farther: pulled back
        (0.1, 2.0, 1.805, -1.9, False),  # within 0.2: 0.5 * 1.9^2, gradient V - R
        (1.0, -2.0, 4.5, 3.0, False),  # it went the wrong way: not clipped, 0.5 * 9
        (-1.0, 2.0, 4.5, -3.0, False),
    ],
)
def test_B10_a_value_may_move_towards_its_return_by_the_clip_range_at_most(value, target, loss_is, gradient, clipped):
    values = rows64([value]).requires_grad_()
    loss, metrics = ppo.value_loss(values, rows64([0]), rows64([target]), torch.ones(1, 1))
    loss.backward()
    close(loss, loss_is, "0.5 * max((V - G)^2, (clip(V, V_old +- 0.2) - G)^2)")
    close(values.grad, [[gradient]], "no gradient where the clip holds the value back")
    assert metrics["vf_clip_ratio"] == clipped, "vf_clip_ratio counts the values that the clip holds back"


def test_B10_the_clip_is_around_the_old_value_and_the_mean_over_the_real_tokens():
    # V_old 1, V 2, G 3: 0.5 max((2 - 3)^2, (1.2 - 3)^2) = 1.62; V = V_old = G: 0; the third is padding: 1.62 / 2
    loss, _ = ppo.value_loss(rows64([2, 1, 9]), rows64([1, 1, 0]), rows64([3, 1, 0]), torch.tensor([[1, 1, 0]]))
    close(loss, 0.81, "clip(V, V_old - c, V_old + c), and a mean over two tokens")


# ---------------------------------------------------------------- ppo.py: four models on one backbone


@pytest.fixture(scope="module")
def saved_reward_model(tmp_path_factory):
    """(folder, model): a reward model with random weights, and the folder that reward_model.py would leave of it."""
    folder = tmp_path_factory.mktemp("rm") / "rm"
    args = reward_model.parse_args(["--model", "tiny_llama", "--device", "cpu", "--out", str(folder)])
    model, _ = make_reward_model(args)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "summary.json").write_text("{}")
    return folder, model


@pytest.fixture(scope="module")
def four_as_made(saved_reward_model, tmp_path_factory):
    """What `four` gives each test a copy of, and the state of torch's generator."""
    few = ["--max-completion-length", "6", "--prompts-per-step", "6", "--micro-batch-size", "4"]
    few += ["--reward-model", str(saved_reward_model[0]), "--out", str(tmp_path_factory.mktemp("four") / "out")]
    args = ppo.parse_args(["--model", "tiny_llama", "--device", "cpu", *few])
    model, tokenizer = ppo.load(args)
    config = LoraConfig(r=8, lora_alpha=32, target_modules=args.lora_targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config, adapter_name="actor").eval()
    ppo.add_reward_model(model, args)
    torch.manual_seed(0)
    ids, attention_mask, mask, *_ = ppo.complete(model, tokenizer, ppo.PROMPTS[:5], args)
    return args, model, tokenizer, (ids, attention_mask, mask.shape[1]), torch.get_rng_state()


@pytest.fixture
def four(four_as_made):
    """(args, the model with its four roles, tokenizer, a batch of ids and its mask)."""
    args, model, tokenizer, batch, state = four_as_made
    torch.set_rng_state(state)
    return copy.copy(args), copy.deepcopy(model), tokenizer, batch


def roles(model, batch):
    """What the actor, the reference, the critic and the reward model make of a batch."""
    out = {}
    with torch.no_grad():
        for name in ("actor", None):
            with ppo.use(model, name):
                out[name or "reference"] = ppo.token_log_probs(model, *batch)
        for name in ("critic", "reward"):
            with ppo.use(model, name):
                out[name] = ppo.token_scores(model, model.heads[name], *batch[:2])
    return out


def test_B3_before_training_the_critic_is_the_reward_model_and_the_actor_the_reference(four, saved_reward_model):
    _, model, tokenizer, batch = four
    out = roles(model, batch)
    assert torch.equal(out["critic"], out["reward"]), "the critic starts from the reward model"
    assert torch.equal(out["actor"], out["reference"]), "the actor starts from the reference: LoRA's B is 0"
    ids, attention_mask, _ = batch
    rows = [text[real.bool()] for text, real in zip(ids, attention_mask, strict=True)]
    with torch.no_grad():
        own = reward_model.answer_scores(saved_reward_model[1], rows, tokenizer.pad_token_id)
    at_the_end = ppo.last_token_scores(out["critic"], attention_mask)
    close(at_the_end, own, "the critic's value at the last token is the score that reward_model.py gives", 1e-4)


def test_B3_what_trains_is_decided_once_and_stays_so_whichever_role_the_model_plays(four):
    _, model, _, _ = four

    def trained():
        return {name for name, p in model.named_parameters() if p.requires_grad}

    before = trained()
    assert before and all(".actor." in name or "critic" in name for name in before)
    assert "heads.critic.weight" in before and "heads.reward.weight" not in before
    for role in ("reward", None, "critic", "actor"):
        with ppo.use(model, role):
            assert trained() == before, f"inside use(model, {role!r})"
        assert trained() == before and model.active_adapter == "actor", f"after use(model, {role!r})"
    with pytest.raises(KeyError), ppo.use(model, "reward"):
        raise KeyError
    assert trained() == before and model.active_adapter == "actor", "also after an error"


def test_B3_after_ten_steps_only_actor_and_critic_have_changed_bit_for_bit(four):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs, args.prompts_per_step, args.max_completion_length = 10, 1, 2, 2
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert len(list(ppo.train(model, tokenizer, ppo.PROMPTS, args))) == 10
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".actor." in name or "critic" in name}


@pytest.mark.parametrize(
    "trained, others", [("critic", ["actor", "reference"]), ("actor", ["critic", "reward", "reference"])]
)
def test_B3_training_one_leaves_the_others_bit_equal(four, trained, others):
    _, model, _, batch = four
    assert not any(module.training for module in model.modules()), "no dropout, in no role"
    before = roles(model, batch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0)
    for _ in range(2):
        with ppo.use(model, trained):
            if trained == "actor":
                ppo.token_log_probs(model, *batch).sum().backward()
            else:
                ppo.token_scores(model, model.heads["critic"], *batch[:2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = roles(model, batch)
    assert not torch.equal(before[trained], after[trained]), f"the {trained} has learned something"
    assert all(torch.equal(before[name], after[name]) for name in others), f"{others} are as they were"


@torch.no_grad()
def test_token_values_reads_the_critic_before_a_token_and_the_reward_at_it_also_where_columns_are_padding(four):
    args, model, tokenizer, _ = four
    off_zero(model, "actor")
    torch.nn.init.normal_(model.heads["critic"].weight)  # else the critic would be the reward model
    batch = fixed_answers(tokenizer, ["The dog", "Every morning the old farmer"] * 3)
    ids, attention_mask, mask, *_ = batch
    wide = [torch.nn.functional.pad(x, (0, 2)) for x in (ids, attention_mask, mask)]  # 2 columns of padding for all
    args.temperature = 0.7
    read = {role: ppo.token_values(model, *wide, args, role) for role in ("actor", None, "reward", "critic")}
    for role, values in read.items():
        assert values.shape == (6, 7) and values.dtype == torch.float32
        with ppo.use(model, role):
            log_probs = list(log_probs_alone(model, batch, 0.7))
            for i in range(6):
                own, n = row_alone(batch, i)
                expected = log_probs[i]
                if role in ("reward", "critic"):
                    hidden = model.get_base_model().base_model(input_ids=own).last_hidden_state[0]
                    scores = model.heads[role](hidden)[:, 0]
                    expected = scores[-n:] if role == "reward" else scores[-n - 1 : -1]
                close(values[i, :n], expected, f"{role}: the reward at the token, all others one position before", 1e-4)


def test_token_values_adds_up_the_gradient_of_a_loss_over_the_micro_batches(four):
    args, model, tokenizer, _ = four
    off_zero(model, "actor")
    ids, attention_mask, mask, *_ = fixed_answers(tokenizer, ["The dog", "Every morning the old farmer"] * 3)
    old, target, params = torch.randn(6, 5), torch.randn(6, 5), trained_parameters(model)

    def loss(new, old, target, mask, normalizer):
        return (torch.where(mask.bool(), new + 2 * old - target, 0.0).abs() ** 3).sum() / normalizer, {}

    for role in ("actor", "critic"):
        results = []
        for args.micro_batch_size in (6, 4, 1):
            with_loss = {"loss": loss, "old": old, "target": target, "weight": 0.5}
            values = ppo.token_values(model, ids, attention_mask, mask, args, role, **with_loss)
            assert not values.requires_grad
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            results.append((values[mask.bool()], torch.cat([grad.flatten() for grad in grads])))
            model.zero_grad()
        for values, gradient in results[1:]:
            close(values, results[0][0], "a micro-batch changes no value", 1e-4)
            assert (gradient - results[0][1]).norm() < 1e-4 * gradient.norm(), "nor the gradient"
        with ppo.use(model, role):
            if role == "actor":
                new = ppo.token_log_probs(model, ids, attention_mask, 5)
            else:
                new = ppo.token_scores(model, model.heads["critic"], ids, attention_mask)[:, -6:-1]
        whole = 0.5 * loss(new, old, target, mask, 21)[0]  # 21 tokens
        grads = torch.autograd.grad(whole, params, allow_unused=True)
        grads = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(params, grads, strict=True)]
        gradient = torch.cat([grad.flatten() for grad in grads])
        assert (gradient - results[0][1]).norm() < 1e-4 * gradient.norm(), "weight times the whole batch's loss"


def test_each_prompt_of_ppo_has_its_turn_before_any_comes_again(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs, seen = 2, 1, []

    def complete(model, tokenizer, prompts, args):
        seen.extend(prompts)
        return fixed_answers(tokenizer, prompts)

    monkeypatch.setattr(ppo, "complete", complete)
    monkeypatch.setattr(ppo, "token_values", lambda model, ids, attention, mask, *x, **more: torch.zeros(mask.shape))
    torch.manual_seed(0)
    records = list(ppo.train(model, tokenizer, list("ABCD"), args))
    assert [sorted(seen[i : i + 4]) for i in (0, 4, 8)] == [list("ABCD")] * 3, "2 steps of 6 prompts are 3 turns of 4"
    assert seen != list("ABCD") * 3, "in another order each time"
    assert [record["samples"] for record in records] == [6, 12]


@pytest.mark.parametrize("broken", ["policy_loss", "value_loss"])
def test_a_loss_of_ppo_that_is_not_finite_stops_training_and_names_the_step(four, monkeypatch, broken):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs = 2, 1
    monkeypatch.setattr(ppo, "complete", lambda model, tokenizer, prompts, args: fixed_answers(tokenizer, prompts))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(1.0))  # which would be NaN, too
    real, factor = getattr(ppo, broken), 1

    def loss(*args, **more):
        value, metrics = real(*args, **more)
        return value * factor, metrics

    monkeypatch.setattr(ppo, broken, loss)
    steps = ppo.train(model, tokenizer, ppo.PROMPTS, args)
    assert next(steps)["step"] == 1
    factor = math.nan
    with pytest.raises(FloatingPointError, match="step 2"):
        next(steps)


@pytest.mark.parametrize("score_on, vf_coef", [("last", 0.3), ("every", 0.3), ("mean", 30.0)])
def test_B12_a_step_of_training_is_the_algorithm_written_out_row_by_row(four, monkeypatch, score_on, vf_coef):
    args, model, tokenizer, _ = four
    off_zero(model, "actor")
    passes = 3 if score_on == "last" else 2  # of three, old is the first, not the one before
    args.steps, args.num_ppo_epochs, args.learning_rate, args.temperature = 1, passes, 0.02, 0.7
    args.score_on, args.missing_eos_penalty, args.kl_coef, args.vf_coef = score_on, 0.25, 0.2, vf_coef
    args.clip_low, args.clip_high, args.clip_dual, args.cliprange_value = 0.02, 0.03, 1.05, 0.1
    args.gamma, args.lam = 0.9, 0.8
    batches, sampled_by, drawn = [], [], -1.5  # the log-prob that complete() gives each token

    def complete(model, tokenizer, prompts, args):
        batches.append(fixed_answers(tokenizer, prompts))
        sampled_by.append(ppo.token_log_probs(model, *batches[-1][:2], 5, 0.7).detach())
        return batches[-1]

    plain_sgd(monkeypatch)
    monkeypatch.setattr(ppo, "complete", complete)
    monkeypatch.setattr(ppo, "happiness", lambda text: float(text == "b"))
    params = trained_parameters(model)
    start = [p.detach().clone() for p in params]
    prompts = ["The dog", "Every morning the old farmer", "One day", "A", "It was", "The end of the old"]
    (record,) = ppo.train(model, tokenizer, prompts, args)
    learned = values_of(params)
    for p, value in zip(params, start, strict=True):
        p.data.copy_(value)
    (batch,) = batches

    def log_probs(role):
        with ppo.use(model, role):
            return list(log_probs_alone(model, batch, 0.7))

    def scores(role):
        """The head's scores at each row's n + 1 last tokens: the last of the prompt and the answer's."""
        with ppo.use(model, role):
            for i in range(6):
                ids, n = row_alone(batch, i)
                hidden = model.get_base_model().base_model(input_ids=ids).last_hidden_state
                yield model.heads[role](hidden)[0, -n - 1 :, 0]

    with torch.no_grad():
        old, ref = log_probs("actor"), log_probs(None)
        old_values, paid = [s[:-1] for s in scores("critic")], [s[1:] for s in scores("reward")]
    raw = []
    for i in range(6):
        n, kl = len(old[i]), drawn - ref[i]
        spread = {"last": torch.zeros(n), "every": paid[i], "mean": paid[i].mean().expand(n)}[score_on].clone()
        spread[-1] += paid[i][-1] if score_on == "last" else 0.0
        rewards = spread - 0.2 * kl
        rewards[-1] -= 0.25 * (i == 0)  # the row without EOS
        values, advantage, own = [*old_values[i], torch.tensor(0.0)], 0.0, []
        for t in reversed(range(n)):
            advantage = rewards[t] + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * advantage
            own.insert(0, advantage)
        raw.append(torch.stack(own))
    returns = [a + v for a, v in zip(raw, old_values, strict=True)]
    flat = torch.cat(raw)
    white = [(a - flat.mean()) / (flat.var() + 1e-8).sqrt() for a in raw]
    for _ in range(passes):
        policy, critic, moved, clipped = [], [], [], {"low": 0, "high": 0, "dual": 0, "value": 0}
        for new, a, before in zip(log_probs("actor"), white, old, strict=True):
            ratio = (new - before).exp()
            bounded = torch.where(a < 0, ratio.clamp(max=1.05), ratio)
            policy.append(-torch.minimum(bounded * a, bounded.clamp(0.98, 1.03) * a))
            moved.append(before - new)
            clipped["low"] += ((ratio < 0.98) & (a < 0)).sum()
            clipped["high"] += ((ratio > 1.03) & (a > 0)).sum()
            clipped["dual"] += ((ratio > 1.05) & (a < 0)).sum()
        for new, target, before in zip((s[:-1] for s in scores("critic")), returns, old_values, strict=True):
            square, clip = (new - target) ** 2, (before + (new - before).clamp(-0.1, 0.1) - target) ** 2
            critic.append(0.5 * torch.maximum(square, clip))
            clipped["value"] += (clip > square).sum()
        policy, critic = torch.cat(policy).mean(), torch.cat(critic).mean()
        norm = sgd_step(params, policy + vf_coef * critic, 0.02)
    moved, returns = torch.cat(moved), torch.cat(returns)
    assert any(clipped.values()) and (moved != 0).all(), "in the later passes the policy has moved"
    assert norm > 1 or vf_coef < 1, "with a large value loss the gradient is clipped to norm 1"
    close(sampled_by[0][batch[2].bool()], torch.cat(old), "the actor has written the answers", 1e-4)
    expected = {"loss/policy": policy, "loss/value": critic, "grad_norm": norm, "approx_kl": moved.mean()}
    expected |= {f"clip_ratio/{side}_mean": clipped[side] / 21 for side in ("low", "high", "dual")}
    expected |= {"vf_clip_ratio": clipped["value"] / 21, "score": sum(x[-1] for x in paid) / 6, "happiness": 1 / 6}
    expected |= {"kl": (drawn - torch.cat(ref)).mean(), "entropy": -drawn}
    expected |= {"explained_variance": 1 - flat.var(correction=0) / returns.var(correction=0), "step": 1, "samples": 6}
    expected |= {"completions/mean_length": 21 / 6, "completions/clipped_ratio": 1 / 6}
    agree(record, expected)
    step = values_of(params) - values_of(start)
    # What no metric shows: a constant that has a gradient (detach), a missing zero_grad.
    assert (values_of(params) - learned).norm() < 1e-3 * step.norm(), "the weights after both optimizer steps"


def test_B1_the_ratio_is_exactly_1_in_the_first_pass_and_not_in_the_second(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs, args.max_completion_length = 2, 2, 3
    approx_kl, policy_loss = [], ppo.policy_loss

    def recorded(*x, **more):
        loss, metrics = policy_loss(*x, **more)
        approx_kl.append(metrics["approx_kl"].item())
        return loss, metrics

    monkeypatch.setattr(ppo, "policy_loss", recorded)
    _, metrics = ppo.train(model, tokenizer, ppo.PROMPTS, args)
    first, second = approx_kl[-6:-3], approx_kl[-3:]  # of step 2: 2 pieces and the whole batch, twice
    assert first == [0, 0, 0], "first pass: new / old policy, bit for bit"
    assert all(second), "second pass: the policy has moved"
    assert metrics["kl"] != 0, "and the reference, which the actor left in step 1, does not enter the ratio"


def test_the_penalty_for_a_missing_eos_is_paid_at_the_end_of_answers_that_were_cut_off(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs, args.learning_rate = 1, 1, 0.0
    seen, gae = [], ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *x: seen.append(x) or gae(*x))
    monkeypatch.setattr(ppo, "complete", lambda model, tokenizer, prompts, args: fixed_answers(tokenizer, prompts))
    for args.missing_eos_penalty in (0.0, 5.0):
        torch.manual_seed(3)
        (metrics,) = ppo.train(model, tokenizer, ppo.PROMPTS, args)
    free, fined = [rewards for rewards, *_ in seen if len(rewards) == 6][::2]  # the others are micro-batches: 4 and 2
    expected = torch.zeros(6, 5)
    expected[0, 4] = 5.0  # of the six answers the first was cut off
    close(free - fined, expected, "5 at the last token of each answer without EOS, and nothing else", 1e-5)
    close(metrics["completions/clipped_ratio"], 1 / 6, "the share of answers without EOS")


# ---------------------------------------------------------------- ppo.py: the script


@pytest.mark.parametrize(
    "argv, why",
    [
        (["--clip-dual", "1.1"], "above 1 + clip-high"),
        (["--lam", "1.5"], "at most 1"),
        (["--kl-coef", "-1"], "--kl-coef must be"),
        (["--score-on", "first"], "invalid choice"),
        (["--reward-model", "nowhere"], "nowhere cannot be used: it has no adapter_config.json"),
    ],
)
def test_bad_options_of_ppo_end_in_one_sentence_before_any_training(tmp_path, capsys, argv, why):
    assert why in refused(capsys, ppo, "--model", "tiny_llama", "--out", str(tmp_path / "out"), *argv)


def test_a_reward_model_without_its_head_or_for_another_base_is_refused(tmp_path, capsys, saved_reward_model):
    def refusal(name, kept=lambda key: True, **changes):
        """What ppo.py says to a copy of the reward model that lacks weights or has another configuration."""
        folder = shutil.copytree(saved_reward_model[0], tmp_path / name)
        weights = load_file(folder / "adapter_model.safetensors")
        save_file({key: p for key, p in weights.items() if kept(key)}, folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        where = ["--out", str(tmp_path / "o"), "--reward-model", str(folder)]
        return refused(capsys, ppo, "--model", "tiny_llama", "--device", "cpu", *where)

    assert "no head" in refusal("headless", lambda key: "score" not in key)
    error = refusal("other", base_model_name_or_path="somebody/else")
    assert "made for somebody/else" in error and "reward_model.py" in error, "the sentence names the thing and the fix"
    error = refusal("half", lambda key: ".layers.1." not in key)
    assert "not those of an adapter" in error and "layers.1" in error, "what is missing would be random"


def test_ppo_alone_in_a_folder_says_how_to_do_without_reward_model_py(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ppo, "__file__", str(tmp_path / "ppo.py"))
    with pytest.raises(SystemExit):
        ppo.train_reward_model(None)
    assert "is missing: name a folder that it has written with --reward-model" in capsys.readouterr().err


def test_B2_without_a_reward_model_it_says_so_and_trains_one_like_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands, process = [], SimpleNamespace(wait=lambda: 2)
    monkeypatch.setattr(ppo.subprocess, "Popen", lambda command: commands.append(command) or process)
    with pytest.raises(SystemExit) as end:
        options = "--model tiny_llama --seed 7 --device cpu --dtype bfloat16 --prompts p.txt --temperature 0.7"
        ppo.main([*options.split(), "--max-completion-length", "9", "--lora-targets", "o_proj", "k_proj"])
    assert end.value.code == 2, "what stops reward_model.py stops ppo.py"
    assert "no reward model in runs" in capsys.readouterr().out
    (command,) = commands
    assert Path(command[1]).name == "reward_model.py"
    same = "--model=tiny_llama --seed=7 --device=cpu --dtype=bfloat16 --prompts=p.txt --temperature=0.7"
    same = {*same.split(), "--max-completion-length=9", f"--out={Path('runs') / 'reward_model'}"}
    assert set(command[5:]) == same, "the same model, seed, prompts and sampling; where ppo.py looks for it"
    assert command[2:5] == ["--lora-targets", "o_proj", "k_proj"], "the same layers"


def test_B2_what_is_not_given_is_not_handed_on_and_an_empty_folder_is_no_reward_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "reward_model").mkdir(parents=True)  # what a run that was stopped early leaves
    commands, process = [], SimpleNamespace(wait=lambda: 2)
    monkeypatch.setattr(ppo.subprocess, "Popen", lambda command: commands.append(command) or process)
    with pytest.raises(SystemExit):
        ppo.main(["--device", "cpu"])
    names = [option.split("=")[0] for option in commands[0][2:]]
    assert "--model" not in names and "--prompts" not in names, "reward_model.py has its own defaults"


def test_after_ctrl_c_ppo_waits_until_reward_model_py_has_saved(monkeypatch):
    waits = iter([KeyboardInterrupt, 130])

    def wait():
        if (status := next(waits)) is KeyboardInterrupt:
            raise status
        return status

    monkeypatch.setattr(ppo.subprocess, "Popen", lambda command: SimpleNamespace(wait=wait))
    with pytest.raises(SystemExit) as end:
        ppo.train_reward_model(ppo.parse_args(["--device", "cpu"]))
    assert end.value.code == 130


def test_a_gradient_of_ppo_that_is_not_finite_is_enough_to_stop(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs = 1, 1
    monkeypatch.setattr(ppo, "complete", lambda model, tokenizer, prompts, args: fixed_answers(tokenizer, prompts))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    with pytest.raises(FloatingPointError, match="step 1"):
        next(ppo.train(model, tokenizer, ppo.PROMPTS, args))


def test_a_score_of_the_reward_model_that_is_not_finite_is_named_with_its_step_and_its_answer(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps = 1
    monkeypatch.setattr(ppo, "complete", lambda model, tokenizer, prompts, args: fixed_answers(tokenizer, prompts))
    model.heads["reward"].weight.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="step 1: the reward model's score of 'a' is nan"):
        next(ppo.train(model, tokenizer, ppo.PROMPTS, args))


def test_an_eos_that_pads_a_prompt_ends_no_answer_of_ppo(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs, tokenizer = 1, 1, copy.deepcopy(tokenizer)
    tokenizer.pad_token, prompts = tokenizer.eos_token, ["A"] * 3 + ["The old dog"] * 3
    monkeypatch.setattr(ppo, "complete", lambda model, tokenizer, *_: fixed_answers(tokenizer, prompts))
    (record,) = ppo.train(model, tokenizer, ppo.PROMPTS, args)
    close(record["completions/clipped_ratio"], 1 / 6, "one of the six answers has no EOS", 1e-6)


def test_the_actor_that_ppo_has_judged_is_the_one_it_leaves_for_peft(tmp_path, saved_reward_model, monkeypatch):
    ids = torch.tensor(ROWS[:1])

    def judge(model, tokenizer=None, args=None):
        """A stand-in for the judge of 256 answers: the log-prob of one text, which no two of the roles agree on."""
        with torch.no_grad():
            log_prob = ppo.token_log_probs(model, ids, torch.ones_like(ids), 19).sum().item()
        return {"log_prob": {"mean": log_prob, "standard_error": 0.0, "n": 1}}, []

    monkeypatch.setattr(ppo, "evaluate", judge)
    monkeypatch.setattr(ppo, "train_reward_model", None)  # there is one
    few = ["--steps", "1", "--prompts-per-step", "4", "--num-ppo-epochs", "1", "--learning-rate", "0.01"]
    few += ["--max-completion-length", "4", "--out", str(tmp_path / "ppo")]
    few += ["--reward-model", str(saved_reward_model[0])]
    summary = ppo.main(["--model", "tiny_llama", "--device", "cpu", *few])
    before, after = (summary[f"log_prob_{when}"]["mean"] for when in ("before", "after"))
    saved = PeftModel.from_pretrained(ppo.load(settings())[0], tmp_path / "ppo").eval()
    close(judge(saved)[0]["log_prob"]["mean"], after, "the actor that was judged is the one saved", 1e-5)
    assert abs(after - before) > 0.01, "and it has learned something"
    assert not any(path.is_dir() for path in (tmp_path / "ppo").iterdir()), "no other adapter is saved"


# ================================================================ dpo.py

LOSSES = ["sigmoid", "robust", "exo_pair", "hinge", "ipo", "bco_pair", "sppo_hard", "nca_pair", "aot_pair", "aot"]
LOSSES += ["apo_zero", "apo_down", "discopop"]
DIVERGENCES = ["reverse_kl", "js_divergence", "alpha_divergence"]


def dpo_grads(chosen, rejected, ref_chosen, ref_rejected, **options):
    """(losses, gradient of their mean to chosen, to rejected), in float64."""
    chosen, rejected, *ref = torch.tensor([chosen, rejected, ref_chosen, ref_rejected], dtype=torch.float64)
    losses, _, _ = dpo.dpo_loss(chosen.requires_grad_(), rejected.requires_grad_(), *ref, **options)
    losses.mean().backward()
    return losses.detach(), chosen.grad, rejected.grad


def dpo_options(**changes):
    """The part of the command line's arguments that training on pairs reads."""
    values = dict(device=torch.device("cpu"), temperature=1.0, micro_batch_size=64, prompts_per_step=5, steps=1)
    values |= dict(learning_rate=0.1, beta=0.1, loss_type="sigmoid", label_smoothing=0.0, reference_free=False)
    return SimpleNamespace(**(values | dict(f_divergence_type="reverse_kl") | changes))


@pytest.fixture
def adapted(tiny):
    """tiny_llama with an adapter that is off zero, so that policy and reference differ."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny[0], config).eval()
    yield model
    model.unload()


PAIRS = [
    {"prompt": "Once upon a time there was a cat who", "chosen": " was happy.", "rejected": " was sad and cold."},
    {"prompt": "The old bear", "chosen": " loved to sing and dance with his good friends.", "rejected": " cried."},
    {"prompt": "One day a young girl", "chosen": " smiled.", "rejected": " fell into the dark, cold river."},
    {"prompt": "Every morning the tired farmer went out and", "chosen": " laughed.", "rejected": " was hurt."},
    {"prompt": "In the forest", "chosen": " it was warm.", "rejected": " it was dark and there was no one at all."},
]


# ---------------------------------------------------------------- dpo.py: sequence_log_probs


def test_B14_a_sequences_log_prob_is_the_sum_over_its_mask_and_ipos_is_the_mean():
    log_probs = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -9.0, -9.0], [-7.0, -7.0, -7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    # -1 - 2 - 4 = -7, / 3 = -2.333333; one token: -3 either way; no token: 0
    assert dpo.sequence_log_probs(log_probs, mask).tolist() == [-7, -3, 0], "the sum over the mask"
    mean = dpo.sequence_log_probs(log_probs, mask, average=True)
    assert torch.allclose(mean, torch.tensor([-7 / 3, -3, 0])), "average divides by the number of tokens, not by T"


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e4])
@pytest.mark.parametrize("average", [False, True])
def test_what_stands_under_mask_0_has_no_influence_on_a_sequences_log_prob(garbage, average):
    log_probs = torch.tensor([[-1.0, garbage, -2.0], [garbage] * 3], requires_grad=True)
    total = dpo.sequence_log_probs(log_probs, torch.tensor([[1, 0, 1], [0, 0, 0]]), average)
    total.sum().backward()
    share = 0.5 if average else 1.0
    assert total.tolist() == [-3 * share, 0], "a masked token reached the value"
    assert log_probs.grad.tolist() == [[share, 0, share], [0, 0, 0]], "a masked token reached the gradient"


# ---------------------------------------------------------------- dpo.py: dpo_loss


def test_B14_at_the_start_the_loss_is_ln_2_the_margin_0_and_the_gradient_is_not_0():
    start = torch.tensor([-20.0, -31.0]), torch.tensor([-25.0, -30.0])
    losses, chosen_rewards, rejected_rewards = dpo.dpo_loss(*start, *start)
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
    assert dpo_grads(*at)[0].item() == pytest.approx(0.598139, abs=1e-6), "L(x) = -log sigmoid(x), x = beta (c - r)"
    assert dpo_grads(*at, label_smoothing=0.1)[0].item() == pytest.approx(0.618139, abs=1e-6), "(1 - s) L(x) + s L(-x)"


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


@pytest.mark.parametrize("loss_type, more, expected", [(name, more, values) for name, more, *values in BY_HAND])
def test_B17_every_loss_type_has_its_value_and_gradient_at_a_point_computed_by_hand(loss_type, more, expected):
    got = dpo_grads([-9.6], [-13.8], [-10.0], [-13.0], beta=0.5, loss_type=loss_type, **more)
    assert [x.item() for x in got] == pytest.approx(expected, abs=1e-6), f"{loss_type} {more}: loss, two gradients"


def test_B17_discopop_is_the_one_loss_that_starts_by_lowering_the_margin():
    # x = 0: m = 1/2, loss (ln 2 + 1) / 2 = 0.846574; its slope -1/4 - 1/2 + (1/4) / 0.05 x (1 - ln 2) = 0.784264
    for loss_type in LOSSES:
        loss, chosen, rejected = dpo_grads([-10.0], [-13.0], [-10.0], [-13.0], beta=0.5, loss_type=loss_type)
        assert (chosen < rejected) == (loss_type != "discopop"), f"{loss_type}: the margin grows against the gradient"
        if loss_type == "discopop":
            assert near(loss, 0.846574) and near(chosen, 0.5 * 0.784264), "loss and slope at x = 0"


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


@pytest.mark.parametrize("loss_type, more, expected", [(name, more, values) for name, more, *values in TRL])
def test_B17_every_loss_type_computes_what_trl_computes_on_a_batch(loss_type, more, expected):
    losses, grad_chosen, grad_rejected = dpo_grads(*TRL_BATCH, loss_type=loss_type, **more)
    got = [losses.mean().item(), grad_chosen[0].item(), grad_rejected[0].item()]
    assert got == pytest.approx(expected, rel=2e-6, abs=1e-7), f"{loss_type} {more}: loss, two gradients"


def test_hinge_is_0_beyond_a_margin_of_1():
    # beta h = 0.5 x (3 + 1) = 2: 1 - 2 < 0, so the loss is 0 and so is the gradient
    got = dpo_grads([-7.0], [-14.0], [-10.0], [-13.0], beta=0.5, loss_type="hinge")
    assert [x.item() for x in got] == [0, 0, 0], "loss, gradient to chosen, to rejected"


@pytest.mark.parametrize("loss_type", LOSSES)
def test_reference_free_is_the_same_as_zeros_for_both_reference_log_probs(loss_type):
    batch = torch.tensor(TRL_BATCH)
    free = dpo.dpo_loss(*batch, loss_type=loss_type, reference_free=True)
    zeros = dpo.dpo_loss(*batch[:2], torch.zeros(5), torch.zeros(5), loss_type=loss_type)
    for name, a, b in zip(("losses", "chosen_rewards", "rejected_rewards"), free, zeros, strict=True):
        assert torch.equal(a, b), f"{name} of {loss_type} still know the reference"


def test_rewards_are_beta_times_the_log_ratio_and_carry_no_gradient():
    chosen = torch.tensor([-3.0, -6.0], requires_grad=True)
    _, good, bad = dpo.dpo_loss(chosen, chosen - 5, torch.tensor([-4.0, -4.0]), torch.tensor([-8.0, -8.5]), beta=0.5)
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
def test_dpo_at_log_ratios_of_200_gives_finite_losses_and_gradients_in_float32(loss_type, divergence):
    chosen, rejected = torch.tensor([200.0, -200, 200, -200, 0]), torch.tensor([200.0, 200, -200, -200, 0])
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    for beta, tau in ((0.1, 0.05), (1.0, 5.0)):
        kind = {"loss_type": loss_type, "f_divergence_type": divergence, "beta": beta, "discopop_tau": tau}
        losses, _, _ = dpo.dpo_loss(chosen, rejected, torch.zeros(5), torch.zeros(5), **kind)
        grads = torch.autograd.grad(losses.sum(), (chosen, rejected))
        assert losses.isfinite().all(), f"{loss_type} overflows"
        assert all(grad.isfinite().all() for grad in grads), f"the gradient of {loss_type} overflows"


def test_exponents_of_dpo_are_at_most_40():
    # alpha: f(-100) = -e^40, f(0) = -1, hinge 1 - (1 - e^40) = e^40. discopop: x = -100, m = sigmoid(-0.1) = 0.475021
    zero, far, e = row(0)[0], row(-100)[0], math.exp(40)
    kind = {"beta": 1.0, "loss_type": "hinge", "f_divergence_type": "alpha_divergence"}
    assert near(dpo.dpo_loss(far, zero, zero, zero, **kind)[0] / e, 1), "f of alpha_divergence"
    losses, _, _ = dpo.dpo_loss(far, zero, zero, zero, beta=1.0, loss_type="discopop", discopop_tau=1000.0)
    assert near(losses / e, 0.475021), "exp(-x) of discopop"


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
        dpo.dpo_loss(*torch.zeros(4, 2), **wrong)


def test_a_label_smoothing_of_almost_a_half_is_allowed():
    dpo.check_loss_options(0.1, "sigmoid", 0.499, "reverse_kl")  # from 0.5 on it is refused


# ---------------------------------------------------------------- dpo.py: pairs


def test_prompt_and_answers_are_encoded_apart_and_a_finished_answer_ends_in_one_eos(tiny):
    tokenizer = tiny[1]
    pair = {"prompt": "The old be", "chosen": "ar was happy.", "rejected": " was sad.", "rejected_truncated": True}
    (got,) = dpo.encode_pairs(tokenizer, [pair], 256)
    plain = [tokenizer(pair[name], add_special_tokens=False).input_ids for name in ("prompt", "chosen", "rejected")]
    assert got["prompt"] == plain[0], "the prompt's ids must be those that sampling sees, whatever follows"
    assert got["chosen"] == plain[1] + [tokenizer.eos_token_id], "a finished answer ends in exactly one EOS"
    assert got["rejected"] == plain[2], "an answer cut before its EOS gets none"
    (spelled,) = dpo.encode_pairs(tokenizer, [pair | {"chosen": "ar was happy." + tokenizer.eos_token}], 256)
    assert spelled["chosen"] == got["chosen"], "an EOS that the text spells out must not be doubled"


def test_an_empty_answer_is_one_eos_token_with_a_finite_log_prob(tiny):
    model, tokenizer = tiny
    pair = {"prompt": "The old bear", "chosen": "", "rejected": " cried.", "chosen_truncated": True}
    encoded = dpo.encode_pairs(tokenizer, [pair], 256)
    assert encoded[0]["chosen"] == [tokenizer.eos_token_id], "also where the file says that it was cut off"
    assert dpo.all_log_probs(model, encoded, dpo_options()).isfinite().all()


def test_a_prompt_too_long_is_cut_from_the_left_the_same_for_both_answers_which_stay_whole(tiny):
    prompt, short, long = "a " * 300, " good", " bad" * 20
    (got,) = dpo.encode_pairs(tiny[1], [{"prompt": prompt, "chosen": short, "rejected": long}], 256)
    (whole,) = dpo.encode_pairs(tiny[1], [{"prompt": prompt, "chosen": short, "rejected": long}], math.inf)
    assert len(whole["prompt"]) >= 300 and (got["chosen"], got["rejected"]) == (whole["chosen"], whole["rejected"])
    assert len(got["prompt"]) + len(got["rejected"]) == 256, "the prompt keeps all that the longer answer leaves"
    assert got["prompt"] == whole["prompt"][-len(got["prompt"]) :], "the prompt is cut from the left"


def test_a_pair_with_an_answer_longer_than_the_context_is_left_out(tiny):
    fits, does_not = PAIRS[0], {"prompt": "The bear", "chosen": " was happy" * 200, "rejected": " was sad"}
    assert dpo.encode_pairs(tiny[1], [does_not, fits], 256) == dpo.encode_pairs(tiny[1], [fits], 256)
    (whole,) = dpo.encode_pairs(tiny[1], [fits], math.inf)
    length = len(whole["rejected"])
    assert length > len(whole["chosen"]) and dpo.encode_pairs(tiny[1], [fits], length) == [], "no room for a prompt"
    assert dpo.encode_pairs(tiny[1], [fits], length + 1) == [whole | {"prompt": whole["prompt"][-1:]}], "room for one"


@pytest.mark.parametrize("loss_type, temperature", [("sigmoid", 1.0), ("ipo", 1.0), ("sigmoid", 0.7)])
def test_a_pairs_log_probs_are_those_of_its_answers_and_their_eos_alone_whatever_the_padding(
    tiny, loss_type, temperature
):
    model, tokenizer = tiny
    args = dpo_options(loss_type=loss_type, temperature=temperature, micro_batch_size=6)
    encoded = dpo.encode_pairs(tokenizer, PAIRS, 256)
    got = dpo.all_log_probs(model, encoded, args)
    for i, pair in enumerate(encoded):
        for which, name in enumerate(("chosen", "rejected")):
            ids = torch.tensor([pair["prompt"] + pair[name]])
            with torch.no_grad():
                log_probs = (model(input_ids=ids).logits / temperature).log_softmax(-1)  # t predicts token t + 1
            answer = range(len(pair["prompt"]), ids.shape[1])
            values = torch.tensor([log_probs[0, t - 1, ids[0, t]] for t in answer])
            expected = values.mean() if loss_type == "ipo" else values.sum()
            assert got[which, i].item() == pytest.approx(expected.item(), abs=1e-4), f"pair {i}, {name}"


def test_chosen_and_rejected_go_through_the_model_in_one_batch(tiny):
    pairs = dpo.encode_pairs(tiny[1], PAIRS, 256)
    with batch_sizes(tiny[0]) as sizes:
        for size in (6, 1):
            list(dpo.pair_log_probs(tiny[0], pairs, dpo_options(micro_batch_size=size)))
    assert sizes == [6, 4] + [2] * 5, "3 pairs are 6 sequences, of 5 pairs 2 remain; a pair is never torn apart"


def test_a_cut_off_answer_gains_no_eos_in_the_file_of_pairs_and_a_finished_one_has_exactly_one(
    tiny, tmp_path, monkeypatch
):
    tokenizer = tiny[1]
    texts = [" was sad and", " was happy."]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    T = max(map(len, ids)) + 1
    for cut_off in (0, 1):
        answers = [answer + [2] * (i != cut_off) for i, answer in enumerate(ids)]
        answers = torch.tensor([answer + [0] * (T - len(answer)) for answer in answers])
        monkeypatch.setattr(dpo, "complete", lambda *_, answers=answers: (answers, None, torch.ones(2, T), texts, None))
        made = dpo.make_pairs(None, tokenizer, ["A bear"], SimpleNamespace(num_generations=2, pairs_per_prompt=1))
        (tmp_path / "pairs.jsonl").write_text(json.dumps(made[0]))
        (pair,) = dpo.encode_pairs(tokenizer, dpo.read_pairs(tmp_path / "pairs.jsonl"), 256)
        for i, name in enumerate(("rejected", "chosen")):
            assert pair[name].count(2) == (i != cut_off), f"answer {cut_off} was cut off; {name}: {pair[name]}"


def test_a_pair_is_the_happiest_and_the_gloomiest_answer_and_a_tie_makes_none(monkeypatch):
    texts = [" so sad", " ran", " a happy friend", " glad", " ran", " sat", " ran", " sat"]
    ids = torch.tensor([[7, 2], [7, 7], [7, 7], [7, 2]] + [[7, 2]] * 4)  # 2 is the EOS
    monkeypatch.setattr(dpo, "complete", lambda *_: (ids, None, torch.ones(8, 2), texts, None))
    tokenizer = SimpleNamespace(eos_token_id=2)
    pairs = dpo.make_pairs(None, tokenizer, ["A bear", "A cat"], SimpleNamespace(num_generations=4, pairs_per_prompt=1))
    assert pairs == [{"prompt": "A bear", "chosen": " a happy friend", "rejected": " so sad", "chosen_truncated": True}]
    two, known = SimpleNamespace(num_generations=4, pairs_per_prompt=2), dpo.HELD_OUT_PROMPTS[0]
    pairs = dpo.make_pairs(None, tokenizer, ["A bear", "A cat"], two)
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [(" a happy friend", " so sad"), (" glad", " ran")]
    assert len(dpo.make_pairs(None, tokenizer, [known, "A cat"], two)) == 1, "held out are best and worst alone"


def test_no_prompt_is_both_trained_on_and_held_out():
    own = [{"prompt": f"p{i % 25}"} for i in range(50)]
    made = [{"prompt": prompt} for prompt in dpo.PROMPTS + dpo.HELD_OUT_PROMPTS]
    for pairs in (own, made, own[:4], made[-16:]):  # the last: of HELD_OUT_PROMPTS alone
        trained, held_out = ({pair["prompt"] for pair in part} for part in dpo.split_pairs(pairs))
        assert not trained & held_out, "each prompt is on one side"
        assert len(trained | held_out) == len({pair["prompt"] for pair in pairs}), "and none is lost"
        assert len(held_out) >= 2 and trained, "a standard error takes two held-out pairs"
    assert dpo.split_pairs(made)[1] == [{"prompt": prompt} for prompt in dpo.HELD_OUT_PROMPTS]
    assert dpo.split_pairs(own[:3]) == (own[:3], []), "of three pairs none can be spared"


def test_a_data_file_may_have_a_bom_crlf_blank_lines_and_line_separators_inside_a_text(tmp_path):
    pairs = [{"prompt": "The bear", "chosen": " sat\u2028down\x85", "rejected": ""}, PAIRS[0] | {"more": [1]}]
    lines = [json.dumps(pair, ensure_ascii=False) for pair in pairs]
    (tmp_path / "pairs.jsonl").write_bytes(("\ufeff" + lines[0] + "\r\n\r\n \n" + lines[1]).encode())
    assert dpo.read_pairs(tmp_path / "pairs.jsonl") == pairs


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"prompt": "a", "chosen": "b"}', "'rejected'"),
        (b'{"prompt": "a", "chosen": 3, "rejected": "c"}', "'chosen'"),
        (b'{"prompt": " ", "chosen": "b", "rejected": "c"}', "prompt is blank"),
        (b'["a", "b", "c"]', "it must be a JSON object"),
        (b'{"prompt": "a"', "it must be a JSON object"),
        (b'{"prompt": "\xff", "chosen": "b", "rejected": "c"}', "utf-8"),
        (b'{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}', "surrogates"),
    ],
)
def test_a_bad_line_of_a_data_file_is_named_with_its_number_and_what_is_wrong(tmp_path, capsys, line, said):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"\n" + json.dumps(PAIRS[0]).encode() + b"\n" + line + b"\n")
    error = refused(capsys, dpo, "--model", "tiny_llama", "--data", str(path), "--out", str(tmp_path / "out"))
    assert "line 3" in error and said in error


def test_every_batch_of_prompts_makes_its_own_pairs(monkeypatch):
    def complete(model, tokenizer, prompts, args):
        n = len(prompts)
        return torch.full((n, 1), 2), None, torch.ones(n, 1), [" happy", " sad"] * (n // 2), None

    monkeypatch.setattr(dpo, "complete", complete)
    prompts, args = [f"p{i}" for i in range(70)], SimpleNamespace(num_generations=2, pairs_per_prompt=1)
    pairs = dpo.make_pairs(None, SimpleNamespace(eos_token_id=2), prompts, args)
    assert [pair["prompt"] for pair in pairs] == prompts, "70 prompts are two batches of 32 and a rest"


def test_an_eos_that_pads_a_prompt_ends_no_answer_of_dpo(monkeypatch):
    ids = torch.tensor([[2, 7, 9], [2, 7, 2]])  # 2 is pad and EOS; answers of one token
    monkeypatch.setattr(dpo, "complete", lambda *_: (ids, None, torch.ones(2, 1), [" happy", " sad"], None))
    one = SimpleNamespace(num_generations=2, pairs_per_prompt=1)
    (pair,) = dpo.make_pairs(None, SimpleNamespace(eos_token_id=2), ["A"], one)
    assert pair.get("chosen_truncated") and "rejected_truncated" not in pair


def test_every_tenth_prompt_of_a_file_of_other_prompts_is_held_out():
    own = [{"prompt": f"p{i}"} for i in range(40)]
    assert [pair["prompt"] for pair in dpo.split_pairs(own)[1]] == ["p0", "p10", "p20", "p30"]


def test_dpo_asks_for_as_many_pairs_as_it_is_told_trains_on_them_and_judges_by_those_held_out(tmp_path, monkeypatch):
    asked, seen = [], {}
    made = PAIRS + [PAIRS[0] | {"prompt": prompt} for prompt in dpo.HELD_OUT_PROMPTS[:2]]
    monkeypatch.setattr(dpo, "make_pairs", lambda model, tokenizer, prompts, args: asked.extend(prompts) or made)
    monkeypatch.setattr(dpo, "train", lambda model, pairs, args: pairs)
    monkeypatch.setattr(dpo, "evaluate", lambda *args: ({}, []))
    monkeypatch.setattr(dpo, "evaluate_pairs", lambda model, pairs, args: {"pairs": pairs})

    def run(args, model, start, records, judge, write, shown):
        seen.update(trained=records, judged=judge()[0]["pairs"], seed=torch.initial_seed())
        raise Enough

    monkeypatch.setattr(dpo, "run", run)
    for pairs, each, count, held in (("10", "3", 4, 16), ("100", "1", 100, 25)):  # rounded up; a quarter, 16 at least
        asked.clear()
        options = ["--pairs", pairs, "--pairs-per-prompt", each, "--seed", "5", "--out", str(tmp_path / "x")]
        with pytest.raises(Enough):
            dpo.main(["--model", "tiny_llama", "--device", "cpu", *options])
        assert asked == (dpo.PROMPTS * 3)[:count] + (dpo.HELD_OUT_PROMPTS * 2)[:held]
        assert (len(seen["trained"]), len(seen["judged"]), seen["seed"]) == (5, 2, 5)


def test_dpo_trains_on_too_few_pairs_to_hold_any_out_and_stops_without_any(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dpo, "evaluate", lambda *args: ({}, []))
    few = ["--model", "tiny_llama", "--device", "cpu", "--steps", "1", "--prompts-per-step", "2"]
    few += ["--out", str(tmp_path / "x")]
    data = write(tmp_path / "few.jsonl", "".join(json.dumps(pair) + "\n" for pair in PAIRS[:3]))
    summary = dpo.main([*few, "--data", str(data)])
    assert summary["steps"] == 1 and "rewards/margins_after" not in summary, "3 pairs, 0 held out"
    data = write(tmp_path / "long.jsonl", json.dumps({"prompt": "A", "chosen": " was happy" * 200, "rejected": " sad"}))
    with pytest.raises(SystemExit):
        dpo.main([*few, "--data", str(data)])
    assert "no pair is left to train on" in capsys.readouterr().err


# ---------------------------------------------------------------- dpo.py: training


def test_a_gradient_of_dpo_that_is_not_finite_is_enough_to_stop(monkeypatch):
    monkeypatch.setattr(dpo, "pair_log_probs", lambda model, pairs, args: model.log_probs(pairs, args))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    with pytest.raises(FloatingPointError, match="step 1"):
        next(dpo.train(Table(), range(5), dpo_options()))


def test_the_first_step_of_training_starts_at_ln_2_with_a_gradient(tiny):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny[0], config).eval()
    (record,) = dpo.train(model, dpo.encode_pairs(tiny[1], PAIRS, 256), dpo_options())
    model.unload()
    assert record["loss"].item() == pytest.approx(math.log(2), abs=1e-5)
    assert record["rewards/margins"].item() == pytest.approx(0, abs=1e-5) and record["grad_norm"] > 0
    names = {"loss", "grad_norm", "step", "samples", "logps/chosen", "logps/rejected"}
    assert set(record) == names | {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}


def test_identical_answers_have_loss_ln_2_and_gradient_0(adapted, tiny):
    pairs = dpo.encode_pairs(tiny[1], [{"prompt": "The bear", "chosen": " sat.", "rejected": " sat."}], 256)
    (record,) = dpo.train(adapted, pairs, dpo_options(prompts_per_step=1))
    assert record["loss"].item() == pytest.approx(math.log(2), abs=1e-6)
    assert record["grad_norm"].item() == pytest.approx(0, abs=1e-5), "what both answers share cancels"


class Table(torch.nn.Module):
    """A model that is a table: TRL_BATCH's log-probs under the policy and, with the adapter off, the reference."""

    def __init__(self):
        super().__init__()
        self.policy, self.reference = torch.nn.Parameter(torch.tensor(TRL_BATCH[:2])), torch.tensor(TRL_BATCH[2:])
        self.on = True

    @contextlib.contextmanager
    def disable_adapter(self):
        self.on = False
        yield
        self.on = True

    def log_probs(self, pairs, args):
        """What pair_log_probs yields, in an order of its own."""
        for rows in torch.arange(len(pairs)).flip(0).split(max(1, args.micro_batch_size // 2)):
            yield rows.tolist(), (self.policy if self.on else self.reference)[:, [pairs[i] for i in rows]]


def test_the_metrics_of_a_pair_are_its_rewards_and_log_probs():
    # beta 0.5: rewards 0.5 x (-4 + 5) = 0.5 and 0.5 x (-8 + 7) = -0.5; then twice the reference's own: 0 and 0, a tie
    log_probs, ref = torch.tensor([[-4.0, -5.0], [-8.0, -7.0]]), torch.tensor([[-5.0, -5.0], [-7.0, -7.0]])
    got = dpo.pair_metrics(log_probs.requires_grad_(), ref, dpo_options(beta=0.5))
    expected = {"rewards/chosen": [0.5, 0], "rewards/rejected": [-0.5, 0], "rewards/margins": [1, 0]}
    expected |= {"rewards/accuracies": [1, 0], "logps/chosen": [-4, -5], "logps/rejected": [-8, -7]}
    expected |= {"loss": [0.313262, 0.693147]}  # -log sigmoid(1), ln 2
    assert set(got) == set(expected)
    for name, values in expected.items():
        assert near(got[name], values), name
        assert got[name].requires_grad == (name == "loss"), f"{name}: only the loss has a gradient"


@pytest.mark.parametrize("size", [10, 6, 4, 1])  # all five pairs at once; three, two; two, two, one; one at a time
@pytest.mark.parametrize("loss_type, more", [(name, more) for name, more, *_ in TRL])
def test_any_split_into_micro_batches_has_the_gradient_of_the_batch_in_every_loss_type(
    monkeypatch, loss_type, more, size
):
    plain_sgd(monkeypatch)
    monkeypatch.setattr(dpo, "pair_log_probs", lambda model, pairs, args: model.log_probs(pairs, args))
    model, args = Table(), dpo_options(loss_type=loss_type, micro_batch_size=size, learning_rate=0.5, **more)
    losses, *grads = dpo_grads(*TRL_BATCH, loss_type=loss_type, **more)
    (record,) = dpo.train(model, range(5), args)
    grad = torch.stack(grads)
    step = -0.5 * grad * min(1, 1 / grad.norm().item())  # the gradient is clipped to norm 1
    moved = model.policy.detach() - torch.tensor(TRL_BATCH[:2])
    assert torch.allclose(moved.double(), step, rtol=1e-4, atol=1e-5), "the split changed the gradient"
    assert record["loss"].item() == pytest.approx(losses.mean().item(), rel=1e-5), "the mean over the batch's pairs"
    assert record["grad_norm"].item() == pytest.approx(grad.norm().item(), rel=1e-4)


def test_two_steps_of_dpo_are_two_steps_of_gradient_descent(monkeypatch):
    # A second step from where the first one led, with a gradient of its own: nothing of the first is left in it.
    plain_sgd(monkeypatch)
    monkeypatch.setattr(dpo, "pair_log_probs", lambda model, pairs, args: model.log_probs(pairs, args))
    model, policy = Table(), TRL_BATCH[:2]
    records = list(dpo.train(model, range(5), dpo_options(steps=2, learning_rate=5.0, micro_batch_size=4)))
    for record in records:
        losses, *grads = dpo_grads(*policy, *TRL_BATCH[2:])
        assert record["loss"].item() == pytest.approx(losses.mean().item(), rel=1e-5)
        policy = [(torch.tensor(x) - 5.0 * grad).tolist() for x, grad in zip(policy, grads, strict=True)]
    assert torch.allclose(model.policy.detach(), torch.tensor(policy), atol=1e-4)
    assert [record["samples"] for record in records] == [10, 20], "two answers a pair"


def test_a_step_on_a_model_has_the_gradient_of_the_mean_loss(tiny, adapted, monkeypatch):
    plain_sgd(monkeypatch)
    pairs, start = dpo.encode_pairs(tiny[1], PAIRS, 256), values_of(trained_parameters(adapted))
    with adapted.disable_adapter():
        ref = dpo.all_log_probs(adapted, pairs, dpo_options())
    ((rows, new),) = dpo.pair_log_probs(adapted, pairs, dpo_options())
    mean = dpo.dpo_loss(*new, *ref[:, rows])[0].mean()
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(mean, trained_parameters(adapted))])
    (record,) = dpo.train(adapted, pairs, dpo_options(micro_batch_size=4))
    step = -0.1 * grad * min(1, 1 / grad.norm())
    assert (values_of(trained_parameters(adapted)) - start - step).norm() < 1e-3 * step.norm(), "two, two and one pair"
    expected = (mean.item(), grad.norm().item())
    assert (record["loss"].item(), record["grad_norm"].item()) == pytest.approx(expected, rel=1e-3)


def test_held_out_pairs_are_judged_against_the_reference(tiny, adapted):
    pairs = dpo.encode_pairs(tiny[1], PAIRS, 256)
    got = dpo.evaluate_pairs(adapted, pairs, dpo_options())
    new = dpo.all_log_probs(adapted, pairs, dpo_options())
    with adapted.disable_adapter():
        ref = dpo.all_log_probs(adapted, pairs, dpo_options())
    for name, values in dpo.pair_metrics(new, ref, dpo_options()).items():
        assert got[name] == dpo.estimate(values.tolist()) and got[name]["n"] == 5, name
    assert got["rewards/margins"]["mean"] != 0, "the adapter is off zero, so the policy is not the reference"


def test_the_reference_is_run_once_before_training_and_kept(monkeypatch):
    model, switched_off, seen, loss = Table(), [], [], dpo.dpo_loss
    disable = model.disable_adapter
    monkeypatch.setattr(model, "disable_adapter", lambda: switched_off.append(1) or disable())
    monkeypatch.setattr(dpo, "pair_log_probs", lambda model, pairs, args: model.log_probs(pairs, args))
    monkeypatch.setattr(dpo, "dpo_loss", lambda *a, **k: seen.append(torch.stack(a[2:]).sort().values) or loss(*a, **k))
    assert len(list(dpo.train(model, range(5), dpo_options(steps=3)))) == 3
    assert len(switched_off) == 1, "one reference pass, none in the loop"
    expected = torch.tensor(TRL_BATCH[2:]).sort().values
    assert seen and all(torch.equal(ref, expected) for ref in seen), "the reference moved"


def test_training_lowers_the_loss_and_each_pair_has_its_turn_before_any_comes_again(monkeypatch):
    # The five losses start at 0.53 to 0.78. Three turns in steps of 1 or more widen each margin by 6, x = 0.1 h by 0.6:
    # before its fourth turn no pair costs more than 0.51.
    model, batches = Table(), []

    def log_probs(model, pairs, args):
        batches.append(pairs)
        return model.log_probs(pairs, args)

    monkeypatch.setattr(dpo, "pair_log_probs", log_probs)
    torch.manual_seed(0)
    records = list(dpo.train(model, range(5), dpo_options(steps=10, prompts_per_step=2, learning_rate=1.0)))
    order = [pair for batch in batches[1:] for pair in batch]  # the first is the reference's pass
    assert all(sorted(order[i : i + 5]) == list(range(5)) for i in range(0, 20, 5)), "not every pair had its turn"
    assert order != list(range(5)) * 4, "in another order each time"
    last, first = (sum(record["loss"] for record in part) for part in (records[-2:], records[:2]))
    assert last < first, "the last two batches cost less than the first two"


def test_a_loss_of_dpo_that_is_not_finite_stops_training_and_names_the_step(tiny, adapted, monkeypatch):
    steps = dpo.train(adapted, dpo.encode_pairs(tiny[1], PAIRS, 256), dpo_options(steps=3))
    assert next(steps)["step"] == 1
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(1.0))  # which would be NaN, too
    real = dpo.dpo_loss
    monkeypatch.setattr(dpo, "dpo_loss", lambda *args, **more: [x * math.nan for x in real(*args, **more)])
    with pytest.raises(FloatingPointError, match="step 2"):
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
        (["--pairs-per-prompt", "5"], "--pairs-per-prompt"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--data", os.devnull], "no pairs"),
        (["--data", "a.jsonl", "--prompts", "b.txt"], "--prompts"),
    ],
)
def test_bad_options_of_dpo_end_in_one_sentence_before_any_training(tmp_path, capsys, argv, said):
    assert said in refused(capsys, dpo, "--model", "tiny_llama", "--out", str(tmp_path / "out"), *argv)


def test_a_data_file_can_be_trained_on_and_the_result_holds_the_pairs_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dpo, "evaluate", lambda *args: ({}, []))  # to be quick
    path = tmp_path / "pairs.jsonl"
    long = {"prompt": "The bear", "chosen": " was happy" * 200, "rejected": " was sad"}
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS + [long]), encoding="utf-8")
    few = ["--steps", "1", "--prompts-per-step", "2", "--max-completion-length", "8", "--reference-free"]
    summary = dpo.main(["--model", "tiny_llama", "--data", str(path), *few, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "3 pairs to train on, 2 held out; 1 left out" in printed
    for name, who in (("logps/chosen", "the chosen answers"), ("logps/rejected", "the rejected ones")):  # B16
        change = summary[f"{name}_after"]["mean"] - summary[f"{name}_before"]["mean"]
        assert f"{who} {'rose' if change > 0 else 'fell'} by {abs(change):.3f}" in printed and change != 0
    assert summary["steps"] == 1 and summary["rewards/accuracies_after"]["n"] == 2
    assert dpo.read_pairs(tmp_path / "out" / "pairs.jsonl") == PAIRS + [long]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_run_on_the_pairs_that_a_run_has_made_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setattr(dpo, "HELD_OUT_PROMPTS", dpo.HELD_OUT_PROMPTS[:2])  # to be quick
    monkeypatch.setattr(dpo, "evaluate", lambda *args: ({}, []))
    monkeypatch.setattr(dpo, "happiness", len)  # short answers would tie
    few = ["--steps", "2", "--prompts-per-step", "2", "--pairs", "4", "--num-generations", "3", "--seed", "5"]
    few += ["--model", "tiny_llama", "--device", "cpu", "--max-completion-length", "4"]
    made = dpo.main([*few, "--out", str(tmp_path / "made")])
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    read = dpo.main([*few, "--data", str(tmp_path / "made" / "pairs.jsonl"), "--out", str(tmp_path / "made")])
    for name in ("pairs.jsonl", "metrics.jsonl", "adapter_model.safetensors"):
        assert (tmp_path / "made" / name).read_bytes() == files[name], f"{name} differs"
    names = {"seconds", "peak_memory_mb", "options"}
    assert {k: v for k, v in made.items() if k not in names} == {k: v for k, v in read.items() if k not in names}


# ================================================================ the four scripts alike


@pytest.mark.parametrize("script", [grpo, ppo, dpo, reward_model])
def test_every_script_reads_the_prompts_and_adapts_the_layers_that_it_is_told(
    script, tmp_path, monkeypatch, saved_reward_model
):
    seen, complete = set(), script.complete
    options = ["--prompts", str(tmp_path / "prompts"), "--lora-targets", "o_proj", "--max-completion-length", "2"]
    options += {
        grpo: ["--prompts-per-step", "2"],
        ppo: ["--prompts-per-step", "2", "--reward-model", str(saved_reward_model[0])],
        dpo: ["--pairs", "2"],
        reward_model: ["--rankings", "2"],
    }[script]
    (tmp_path / "prompts").write_text("My first line\nMy second line")

    def watched(model, tokenizer, prompts, args):
        seen.update(prompts)
        return complete(model, tokenizer, prompts, args)

    def run(args, model, start, records, *more):
        if script in (grpo, ppo):  # the others have read their prompts
            next(records)
        assert not any(module.training for module in model.modules()), "no dropout"
        assert {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name} >= {"o_proj"}
        raise Enough

    monkeypatch.setattr(script, "complete", watched)
    monkeypatch.setattr(script, "happiness", len)  # short answers would tie
    monkeypatch.setattr(script, "run", run)
    with pytest.raises(Enough):
        script.main(["--model", "tiny_llama", "--device", "cpu", "--out", str(tmp_path / "x"), *options])
    assert seen - set(script.HELD_OUT_PROMPTS) == {"My first line", "My second line"}


# ================================================================ learning, end to end


# The four scripts, long enough to learn something, in two processes beside the other tests. A small model gains next to
# nothing from a second thread. None is told a model: reward_model.py finds babyllama-100m-2024 (tiny_llama by another
# name) on a hub, ppo.py then in the cache; grpo.py and dpo.py find neither hub nor cache.
LEARN = """
import importlib, json, sys, time, torch

sys.modules["matplotlib.figure"] = None  # no picture

scripts, rows = sys.argv[2].split(), json.loads(sys.argv[3])
for script in scripts:
    options = ["--out", f"{sys.argv[1]}/{script}", "--micro-batch-size", "32", "--max-completion-length", "16"]
    if script == "grpo":
        options += ["--steps", "5", "--learning-rate", "8e-3"]
    if script == "reward_model":
        options += ["--steps", "24", "--learning-rate", "1e-2", "--rankings", "192"]
    if script == "ppo":
        options += ["--steps", "4", "--learning-rate", "5e-3", "--reward-model", f"{sys.argv[1]}/reward_model"]
    if script == "dpo":
        options += ["--steps", "28", "--pairs", "224", "--pairs-per-prompt", "2", "--loss-type", "ipo"]
    module, found = importlib.import_module(script), {}

    def load(args, load=module.load):
        start, loaded = time.perf_counter(), load(args)
        found["load_seconds"] = time.perf_counter() - start
        return loaded

    def run(args, model, *more, run=module.run):
        if script == "dpo":  # its gain is so large that a quarter of the prompts shows it
            module.HELD_OUT_PROMPTS = module.HELD_OUT_PROMPTS[:4]
        found["summary"] = run(args, model, *more)
        with torch.no_grad():
            if script == "reward_model":
                found["scores"] = module.answer_scores(model, [torch.tensor(row) for row in rows], 0).tolist()
            else:
                ids = torch.tensor(rows[:1])
                found["log_probs"] = module.token_log_probs(model, ids, torch.ones_like(ids), 19).sum().item()
        return found["summary"]

    module.load, module.run = load, run
    module.main(options)
    print("FOUND", json.dumps(found, default=str))
"""
ROWS = [list(range(3, 23)), list(range(40, 45)) + [2]]


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download takes, with tiny_llama under babyllama's name."""

    files = {path.name: path.read_bytes() for path in (HERE / "tiny_llama").iterdir() if path.is_file()}
    files["pytorch_model.bin"], asked = b"a pickle", []

    def do_GET(self):
        name, header = self.path.split("?")[0].split("/")[-1], {"X-Repo-Commit": "c" * 40}
        self.asked.append(f"{self.command} {name}")
        if self.path.startswith("/api/models/babylm/babyllama-100m-2024/"):
            files = [{"type": "file", "oid": n, "size": len(data), "path": n} for n, data in self.files.items()]
            siblings = [{"rfilename": n} for n in self.files]
            repo = {"id": "babylm/babyllama-100m-2024", "sha": "c" * 40, "siblings": siblings}
            body = json.dumps(files if "/tree/" in self.path else repo).encode()
        else:
            body, header = self.files.get(name), header | {"ETag": f'"{name}"'}
        self.send_response(404 if body is None else 200)
        for key, value in (header | {"Content-Length": str(len(body or b""))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module", autouse=True)
def learning(request, tmp_path_factory):
    """(processes, logs, folder): started before the first test, if a test of this run asks for what they learn."""
    if not any("learned" in item.fixturenames for item in request.session.items):
        yield None
        return
    folder, home = tmp_path_factory.mktemp("learning"), tmp_path_factory.mktemp("home")
    threads = torch.get_num_threads()
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "NO_PROXY": "127.0.0.1"}
    processes, logs = [], []
    for scripts, port in (("reward_model ppo", hub.server_port), ("grpo dpo", 9)):  # on port 9 nothing listens
        command = [sys.executable, "-c", LEARN, str(folder), scripts, json.dumps(ROWS)]
        own = environment | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home / str(port))}
        logs.append(home / f"{port}.log")
        with logs[-1].open("w") as log:
            processes.append(subprocess.Popen(command, cwd=HERE, env=own, stdout=log, stderr=log))
    torch.set_num_threads(1)
    yield processes, logs, folder
    hub.shutdown()
    for process in processes:
        process.kill()
        process.wait()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def learned(learning):
    """({script: what its run found}, {script: its lines of output}, folder) of the four runs."""
    processes, logs, folder = learning
    found, output = {}, {}
    for process, log, scripts in zip(processes, logs, (("reward_model", "ppo"), ("grpo", "dpo")), strict=True):
        status, text = process.wait(timeout=600), log.read_text(encoding="utf-8")
        assert status == 0, text[-2000:]
        parts = text.split("FOUND ")
        output |= {script: part.splitlines() for script, part in zip(scripts, parts, strict=False)}
        results = [json.loads(part.splitlines()[0]) for part in parts[1:]]
        found |= dict(zip(scripts, results, strict=True))
    return found, output, folder


def gain_in_standard_errors(summary):
    before, after = summary["happiness_before"], summary["happiness_after"]
    return (after["mean"] - before["mean"]) / math.hypot(before["standard_error"], after["standard_error"])


def test_A15_training_makes_the_stories_happier_by_5_standard_errors(learned):
    summary = learned[0]["grpo"]["summary"]
    assert gain_in_standard_errors(summary) > 5, f"{summary['happiness_before']} -> {summary['happiness_after']}"
    assert summary["happiness_before"]["n"] == summary["happiness_after"]["n"] == 256
    assert abs(summary["kl_before"]["mean"]) < 1e-5 < summary["kl_after"]["mean"], "0 but for rounding, then more"


def test_a_run_starts_at_ratio_1_and_kl_0_and_leaves_metrics_and_a_summary(learned):
    found, _, folder = learned
    records = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 6))
    assert records[-1]["samples"] == 5 * 8 * 8, "8 prompts a step, 8 answers each"
    assert records[0]["kl"] == records[0]["approx_kl"] == 0 < records[-1]["kl"], "the adapter starts at B = 0"
    assert abs(records[0]["loss"]) < 1e-5 < records[0]["grad_norm"], "the loss starts at 0, its gradient does not"
    assert found["grpo"]["summary"]["steps"] == 5 and found["grpo"]["summary"]["stopped"] is None
    left = {"grpo", "reward_model", "ppo", "dpo"}
    assert {path.name for path in folder.iterdir()} == left, "nothing half-written is left beside the results"


def test_the_default_model_is_downloaded_once_without_its_pickles_and_then_read_from_the_cache(learned):
    found, *_ = learned
    assert found["reward_model"]["summary"]["model"] == found["ppo"]["summary"]["model"] == "babylm/babyllama-100m-2024"
    asked = [Hub.asked.count(request) for request in ("GET main", "GET model.safetensors", "GET pytorch_model.bin")]
    assert asked == [1, 1, 0], "reward_model.py asks the hub once, ppo.py not at all"


def test_without_a_network_and_a_cache_the_default_is_tiny_llama_and_soon(learned):
    found, output, _ = learned
    for script in ("grpo", "dpo"):
        assert found[script]["summary"]["model"] == "tiny_llama"
        assert found[script]["load_seconds"] < 10, "from_pretrained alone retries for a minute"
    assert "hub cannot be reached" in output["grpo"][0] and "tiny_llama" in output["grpo"][0], "the first line says so"


def test_A3_all_scripts_train_lora_of_rank_8_and_alpha_32_on_q_proj_and_v_proj_without_dropout(learned):
    tasks = {"grpo": "CAUSAL_LM", "ppo": "CAUSAL_LM", "dpo": "CAUSAL_LM", "reward_model": "SEQ_CLS"}
    for script, task in tasks.items():
        config = json.loads((learned[2] / script / "adapter_config.json").read_text())
        lora = [config[name] for name in ("r", "lora_alpha", "lora_dropout", "task_type")]
        assert lora == [8, 32, 0, task] and sorted(config["target_modules"]) == ["q_proj", "v_proj"], script
        weights = load_file(learned[2] / script / "adapter_model.safetensors")
        count = sum(p.numel() for p in weights.values())
        assert count == 24_576 + 192 * (script == "reward_model"), f"{script}: A and B of 8 layers, and the head's row"


@pytest.mark.parametrize("script", ["grpo", "dpo", "ppo"])
def test_the_saved_adapter_gives_the_same_log_probs_in_another_process(learned, script):
    found, _, folder = learned
    base, ids = AutoModelForCausalLM.from_pretrained(HERE / "tiny_llama", dtype=torch.float32), torch.tensor(ROWS[:1])
    model = PeftModel.from_pretrained(base, folder / script).eval()
    with torch.no_grad():
        trained = grpo.token_log_probs(model, ids, torch.ones_like(ids), 19).sum().item()
        with model.disable_adapter():
            untrained = grpo.token_log_probs(model, ids, torch.ones_like(ids), 19).sum().item()
    assert trained == pytest.approx(found[script]["log_probs"], abs=1e-3), "what was trained is what peft loads"
    assert abs(trained - untrained) > 0.1, "and it has learned something"


def test_the_saved_reward_model_gives_the_same_scores_in_another_process(learned):
    found, _, folder = learned
    torch.manual_seed(123)  # a head that was not saved would be random
    base = AutoModelForSequenceClassification.from_pretrained(HERE / "tiny_llama", num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "reward_model").eval()
    with torch.no_grad():
        scores = [model(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]
    close(found["reward_model"]["scores"], scores, "what reward_model.py scores is what PEFT loads", 1e-5)
    names = load_file(folder / "reward_model" / "adapter_model.safetensors")
    assert all("lora" in name or name == "base_model.model.score.weight" for name in names), "adapter, head, no more"


def test_the_reward_model_orders_4_of_5_held_out_pairs_rightly(learned):
    summary = learned[0]["reward_model"]["summary"]
    assert summary["accuracy_after"]["mean"] >= 0.8, f"{summary['accuracy_before']} -> {summary['accuracy_after']}"
    assert summary["best_of_8_after"]["mean"] > summary["happiness_after"]["mean"], "what it picks is happier"
    assert summary["samples"] == 24 * 16 * 4, "16 prompts a step, 4 answers each"


def test_B12_ppo_makes_the_stories_happier_by_5_standard_errors(learned):
    summary = learned[0]["ppo"]["summary"]
    assert gain_in_standard_errors(summary) > 5, f"{summary['happiness_before']} -> {summary['happiness_after']}"


def test_dpo_orders_4_of_5_held_out_pairs_to_a_standard_error_and_makes_the_stories_happier_by_5_of_them(learned):
    summary = learned[0]["dpo"]["summary"]
    accuracy, error = (summary["rewards/accuracies_after"][name] for name in ("mean", "standard_error"))
    assert accuracy + error >= 0.8, f"{accuracy} ± {error}: another processor's rounding may cost a standard error"
    assert accuracy - 3 * error > 0.5, f"{accuracy} ± {error}: better than a coin"
    assert gain_in_standard_errors(summary) > 5, f"{summary['happiness_before']} -> {summary['happiness_after']}"


# ================================================================ the files themselves


def definitions(path):
    """{name: source} of a script's top-level functions, decorators included."""
    source, texts = path.read_text(encoding="utf-8"), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            texts[node.name] = "\n".join(source.split("\n")[start - 1 : node.end_lineno])
    return texts


def test_functions_and_constants_of_one_name_are_the_same_in_all_scripts():
    texts = {}
    for path in SCRIPTS:
        for name, text in definitions(path).items():
            if name not in ("train", "parse_args", "main"):
                assert texts.setdefault(name, text) == text, f"{name} in {path.name} differs from the other scripts"
    for name in ("PROMPTS", "HELD_OUT_PROMPTS", "CHEERFUL", "GLOOMY", "CACHE"):
        values = [repr(getattr(script, name)) for script in (grpo, ppo, dpo, reward_model)]
        assert len(set(values)) == 1, f"{name} differs between the scripts"


def test_the_options_of_model_files_seed_device_and_sampling_are_the_same_in_all_scripts():
    names = "model lora-targets out seed device dtype max-completion-length temperature".split()
    sources = [path.read_text(encoding="utf-8").splitlines() for path in SCRIPTS]
    for name in names:
        lines = {line for source in sources for line in source if line.startswith(f'    add("--{name}",')}
        assert len(lines) == 1, f"--{name} differs between the scripts: {lines}"


def test_scripts_import_only_what_requirements_name_and_never_each_other():
    required = {re.split("[<>=]", line)[0] for line in (HERE / "requirements.txt").read_text().split()}
    allowed = set(sys.stdlib_module_names) | required | {"matplotlib"}  # which may be missing
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert all(name.split(".")[0] in allowed for name in names), f"{path.name} imports {names}"
