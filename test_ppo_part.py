"""ppo.py's part of the sanity suite: B1-B4, B8-B13."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import ppo
import reward_model

MODEL = os.environ.get("TEST_MODEL", "tiny_llama")
NAN = math.nan


def close(value, expected, why, tolerance=1e-6):
    value, expected = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{why}\n{text}")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def ragged(B=6, T=9, seed=0, holes=False):
    """A random mask of rows of length 1 to T (with holes), and a function that makes random tensors of its shape."""
    torch.manual_seed(seed)
    mask = torch.arange(T)[None] < torch.randint(1, T + 1, (B, 1))
    mask &= torch.rand(B, T) > 0.3 if holes else mask
    return mask.long(), lambda scale=1.0: torch.randn(B, T, dtype=torch.float64) * scale


def spoiled(x, mask, bad):
    """A copy of x with bad where the mask is 0, as a leaf that takes gradient."""
    return torch.where(mask.bool(), x, torch.tensor(bad, dtype=x.dtype)).requires_grad_()


# ---------------------------------------------------------------- token_rewards, spread


def test_B4_the_score_of_an_answer_is_paid_at_its_last_token():
    zero, mask = torch.zeros(3, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0]])
    rewards = ppo.token_rewards(torch.tensor([1.0, 2.0, 3.0]), zero, zero, mask)
    close(rewards, [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 3, 0]], "with EOS early, at the end, and after a hole")


def test_B4_the_three_ways_to_spread_a_score():
    scores, mask = tensor([1, 2, 6, NAN], [4, NAN, NAN, NAN]), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    close(ppo.spread(scores, mask, "last"), [6, 4], "last: the score of the whole answer")
    close(ppo.spread(scores, mask, "every"), [[1, 2, 6, 0], [4, 0, 0, 0]], "every: each token its own")
    close(ppo.spread(scores, mask, "mean"), [[3, 3, 3, 0], [4, 0, 0, 0]], "mean: (1 + 2 + 6) / 3 on each token")
    with pytest.raises(ValueError, match="'last', 'every' or 'mean'"):
        ppo.spread(scores, mask, "first")
    zero = torch.zeros_like(scores)
    rewards = ppo.token_rewards(ppo.spread(scores, mask, "every"), zero, zero, mask)
    close(rewards, [[1, 2, 6, 0], [4, 0, 0, 0]], "scores of shape (B, T) are used token by token")


def test_B8_the_kl_is_taken_from_the_reward_token_by_token_and_may_be_negative():
    log_probs, ref = tensor([-1, -2, -3, NAN]), tensor([-2, -2, -1, NAN])
    rewards = ppo.token_rewards(tensor(10), log_probs, ref, torch.tensor([[1, 1, 1, 0]]), kl_coef=0.1)
    # k1 = +1, 0, -2: a token that the policy likes less than the reference is paid for
    close(rewards, [[-0.1, 0, 10.2, 0]], "score - kl_coef * (log_probs - ref_log_probs)")


def test_B8_the_mean_of_k1_under_the_policy_is_the_kl_and_never_negative():
    policy, ref = tensor([0.7, 0.2, 0.1]), tensor([0.2, 0.3, 0.5])
    k1 = policy.log() - ref.log()
    assert (k1 < 0).any(), "a single sample can be below 0: the article's 'always above 1' is wrong"
    close((policy * k1).sum(), 0.634900, "0.7 ln 3.5 + 0.2 ln 2/3 + 0.1 ln 1/5 = 0.8769 - 0.0811 - 0.1609", 1e-4)


@pytest.mark.parametrize("bad", [NAN, math.inf, 1e4])
def test_rewards_under_mask_0_are_0_and_have_no_gradient(bad):
    mask, make = ragged(holes=True)
    x = [spoiled(make(), mask, bad) for _ in range(3)]
    rewards = ppo.token_rewards(*x, mask)
    rewards.sum().backward()
    assert (rewards[mask == 0] == 0).all() and all((t.grad[mask == 0] == 0).all() for t in x)


# ---------------------------------------------------------------- gae


def test_B11_gae_by_hand():
    rewards, values = tensor([0, 0, 1]), tensor([0.5, 0.5, 0.5])
    advantages, returns = ppo.gae(rewards, values, torch.ones(1, 3))
    # deltas 0, 0, 1 - 0.5; each step back is multiplied by 0.95: 0.5, 0.475, 0.45125
    close(advantages, [[0.45125, 0.475, 0.5]], "one reward at the end reaches every token")
    close(returns, [[0.95125, 0.975, 1.0]], "return = advantage + value")


def test_B11_padding_and_holes_are_skipped():
    rewards, values = tensor([0, 9, 0, 1, 9]), tensor([0.5, 9, 0.5, 0.5, 9])
    advantages, returns = ppo.gae(rewards, values, torch.tensor([[1, 0, 1, 1, 0]]))
    close(advantages, [[0.45125, 0, 0.475, 0.5, 0]], "the next value is that of the next real token")
    close(returns, [[0.95125, 0, 0.975, 1.0, 0]], "0 where the mask is 0")


def test_B11_gamma_discounts_the_next_value_and_lambda_the_next_advantage():
    # delta_1 = 1 - 2 = -1; delta_0 = 0 + 0.9 * 2 - 1 = 0.8; A_0 = 0.8 + 0.9 * 0.5 * -1 = 0.35
    advantages, _ = ppo.gae(tensor([0, 1]), tensor([1, 2]), torch.ones(1, 2), gamma=0.9, lam=0.5)
    close(advantages, [[0.35, -1.0]], "delta_t + gamma lam A_(t+1)")


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
@pytest.mark.parametrize("bad", [NAN, math.inf, 1e4])
def test_B11_gae_is_a_plain_loop_over_the_real_tokens_whatever_stands_in_the_padding(gamma, lam, bad):
    mask, make = ragged(seed=1, holes=True)
    rewards, values = spoiled(make(), mask, bad), spoiled(make(), mask, bad)
    advantages, returns = ppo.gae(rewards, values, mask, gamma, lam)
    for i, row in enumerate(mask.bool()):
        r, v = rewards[i][row].tolist(), values[i][row].tolist() + [0.0]
        expected, advantage = [], 0.0
        for t in reversed(range(len(r))):
            advantage = r[t] + gamma * v[t + 1] - v[t] + gamma * lam * advantage
            expected.insert(0, advantage)
        close(advantages[i][row], expected, "GAE, eq. 16", 1e-12)
    assert (advantages[mask == 0] == 0).all() and (returns[mask == 0] == 0).all(), "0 where the mask is 0"
    (advantages + returns).sum().backward()
    for x in (rewards, values):
        assert x.grad.isfinite().all() and (x.grad[mask == 0] == 0).all(), f"{bad} under mask 0 has no gradient"


def test_B11_with_gamma_and_lambda_1_the_advantage_is_the_sum_of_rewards_to_come_less_the_value():
    mask, make = ragged(seed=2)
    rewards, values = make() * mask, make()
    to_come = rewards.flip(1).cumsum(1).flip(1)
    close(ppo.gae(rewards, values, mask, 1.0, 1.0)[0], (to_come - values) * mask, "Monte Carlo", 1e-12)


def test_B11_gae_and_whitening_agree_with_easyr1():
    # Recorded from EasyR1's compute_gae_advantage_return, gamma 0.99, lambda 0.9, float64; it whitens as well.
    rewards = tensor([-0.42118920854336855, -0.07189392460957575, -0.2447599734228689, 0.9264148465409054,
                      -0.6894484229582267, -0.6023573285964183, 0.273013414827296])  # fmt: skip
    values = tensor([-0.28065288240993835, -0.8098960320124117, 2.04840073977315, 0.8521186992134101,
                     0.4503838319603026, 0.9714559145272655, 0.1612549427679177])  # fmt: skip
    mask = torch.ones(1, 7)
    advantages, returns = ppo.gae(rewards, values, mask, 0.99, 0.9)
    close(returns, [[-0.3918394423848619, 0.12292870182686355, -0.008943935803706449, 0.16998460875088117,
                     -0.8990103671763123, -0.3431381366512737, 0.273013414827296]], "returns", 1e-12)  # fmt: skip
    close(ppo.whiten(advantages, mask), [[0.5151958439340963, 1.5350582992797914, -1.385946036454386,
          -0.04254520136562942, -0.6943710358356718, -0.6603758438744315, 0.7329839743162309]],
          "whitened advantages", 1e-7)  # fmt: skip


# ---------------------------------------------------------------- whiten


def test_B12_whitening_gives_mean_0_and_sample_variance_1_over_the_real_tokens():
    close(ppo.whiten(tensor([1, NAN, 2, 3]), torch.tensor([[1, 0, 1, 1]])), [[-1, 0, 0, 1]], "variance (1 + 0 + 1) / 2")
    for bad in (NAN, math.inf, 1e4):
        mask, make = ragged(seed=3, holes=True)
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


# ---------------------------------------------------------------- policy_loss


# ratio, advantage, loss, d loss / d log_prob = -advantage * ratio unless the clip took it away, metric that counts it
CELLS = [
    (0.5, 1.0, -0.5, -0.5, None),  # a good token become rarer: not clipped, it must come back
    (1.0, 1.0, -1.0, -1.0, None),
    (1.5, 1.0, -1.2, 0.0, "high"),  # a good token 1.5 as likely: enough
    (0.5, -1.0, 0.8, 0.0, "low"),  # a bad token half as likely: enough
    (1.0, -1.0, 1.0, 1.0, None),
    (1.5, -1.0, 1.5, 1.5, None),  # a bad token become likelier: not clipped
    (10.0, -1.0, 3.0, 0.0, "dual"),  # B9: but bounded, by clip_dual * 1
]


@pytest.mark.parametrize("ratio, advantage, loss_is, gradient, metric", CELLS)
def test_B9_the_six_cells_of_the_clip_and_the_dual_clip(ratio, advantage, loss_is, gradient, metric):
    log_probs = tensor([math.log(ratio)]).requires_grad_()
    loss, metrics = ppo.policy_loss(log_probs, tensor([0]), tensor([advantage]), torch.ones(1, 1))
    loss.backward()
    close(loss, loss_is, "-min(r A, clip(r) A), at most -clip_dual A for A < 0")
    close(log_probs.grad, [[gradient]], "a clipped token has no gradient")
    for name in ("low", "high", "dual"):
        assert metrics[f"clip_ratio/{name}_mean"] == (name == metric), f"{name}: only tokens whose gradient was taken"
    close(metrics["approx_kl"], -math.log(ratio), "approx_kl = old - new log-prob")


def test_B9_clip_low_and_clip_high_are_set_apart():
    def loss(ratio, advantage, **options):
        return ppo.policy_loss(
            tensor([math.log(ratio)]), tensor([0]), tensor([advantage]), torch.ones(1, 1), **options
        )[0]

    close(loss(1.5, 1.0, clip_high=0.28), -1.28, "1 + clip_high, DAPO's clip-higher")
    close(loss(0.5, -1.0, clip_low=0.1, clip_high=0.28), 0.9, "1 - clip_low")
    close(loss(10.0, -1.0, clip_dual=None), 10.0, "no dual clip, no bound (A12)")


def test_B9_policy_loss_agrees_with_easyr1():
    # Recorded from EasyR1's compute_policy_loss, clip 0.2 / 0.3, dual 3: the per-token losses of one answer, float64.
    log_probs = tensor([-1.0683876476480867, -0.8683139486355624, -1.3759256009996355, -1.207849358569276,
                        -1.6198680941519892, -0.6257372044192566, -1.5834147230266646])  # fmt: skip
    old = tensor([-1.3255241083965972, -0.9282838307415636, -1.7634573957464854, -1.100228005527798,
                  -1.8120749597706796, -0.7360851328176596, -1.263848942045068])  # fmt: skip
    advantages = tensor([-0.600270633877665, 1.1589735713289677, -0.7148316469492509, -0.6686962592190029,
                         -0.16115634722258582, -0.6875323668262259, -0.8326801687232895])  # fmt: skip
    expected = [0.7762829427962312, -1.2306034307754723, 1.0531899138485707, 0.600467538071619, 0.19530879304700097,
                0.7677443774264808, 0.6661441349786317]  # fmt: skip
    loss, metrics = ppo.policy_loss(log_probs, old, advantages, torch.ones(1, 7), clip_low=0.2, clip_high=0.3)
    close(loss, sum(expected) / 7, "token mean", 1e-12)
    close(metrics["clip_ratio/low_mean"], 1 / 7, "the last token's ratio is 0.726 with a negative advantage")


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_ratios_of_200_stay_finite(log_ratio, advantage):
    log_probs = torch.full((1, 2), log_ratio, requires_grad=True)
    loss, _ = ppo.policy_loss(
        log_probs, torch.zeros(1, 2), torch.full((1, 2), advantage), torch.ones(1, 2), clip_dual=None
    )
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
@pytest.mark.parametrize("bad", [NAN, math.inf, 1e4])
def test_what_stands_under_mask_0_has_no_influence_on_value_gradient_or_metric(bad, kind):
    mask, make = ragged(seed=4, holes=True)
    loss, gradient, metrics = both_losses(mask.to(kind), make, 0.0)
    bad_loss, bad_gradient, bad_metrics = both_losses(mask.to(kind), make, bad)
    assert gradient.abs().sum() > 0 and (bad_gradient[:, mask == 0] == 0).all(), f"{bad} under mask 0 has no gradient"
    assert torch.equal(loss, bad_loss) and torch.equal(gradient, bad_gradient), (
        f"{bad} under mask 0: value and gradient"
    )
    assert metrics == bad_metrics and metrics["vf_clip_ratio"] > 0, f"{bad} under mask 0: metrics"


def test_the_mean_is_over_tokens_and_any_split_into_micro_batches_gives_the_same_gradient():
    mask, make = ragged(B=7, seed=5)
    whole, gradient, _ = both_losses(mask, make, NAN)
    for size in (1, 2, 3, 7):
        parts = [both_losses(mask, make, NAN, slice(i, i + size), normalizer=mask.sum()) for i in range(0, 7, size)]
        close(sum(loss for loss, _, _ in parts), whole, f"micro-batches of {size}: same loss", 1e-12)
        close(sum(g for _, g, _ in parts), gradient, f"micro-batches of {size}: same gradient", 1e-12)
    # lengths 1 and 3, one token worth -4, three worth 0: the token mean is -1, the mean of the rows' means would be -2
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss, metrics = ppo.policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), tensor([4, 9, 9], [0, 0, 0]), mask)
    close(loss, -1.0, "a mean over tokens")
    _, metrics = ppo.policy_loss(torch.zeros(2, 3), tensor([4, 9, 9], [0, 0, 0]), torch.zeros(2, 3), mask)
    close(metrics["approx_kl"], 1.0, "approx_kl is a mean over the same tokens: (4 + 0 + 0 + 0) / 4")


def test_an_all_zero_mask_gives_0_and_gradient_0():
    mask, make = torch.zeros(2, 3), lambda scale: torch.randn(2, 3, dtype=torch.float64)
    loss, gradient, metrics = both_losses(mask, make, NAN)
    assert (loss == 0).all() and (gradient == 0).all() and not any(metrics.values()), "0, never NaN"


def test_the_gradients_are_the_derivatives_of_the_values():
    mask, make = ragged(B=3, T=4, seed=6, holes=True)
    x = [make(0.5).requires_grad_() for _ in range(3)]
    check = torch.autograd.gradcheck
    assert check(lambda *x: ppo.policy_loss(*x, mask)[0], x)
    assert check(lambda *x: ppo.value_loss(*x, mask)[0], x)
    assert check(lambda *x: ppo.whiten(ppo.gae(*x, mask, 0.9, 0.8)[0], mask), x[:2])
    assert check(lambda *x: ppo.token_rewards(*x, mask), x)


# ---------------------------------------------------------------- value_loss


@pytest.mark.parametrize(
    "value, target, loss_is, gradient, clipped",
    [
        (1.0, 2.0, 1.62, 0.0, True),  # B10: 0.5 * max((1 - 2)^2, (0.2 - 2)^2) = 0.5 * 3.24
        (-1.0, -2.0, 1.62, 0.0, True),  # the same below
        (0.1, 2.0, 1.805, -1.9, False),  # within 0.2: 0.5 * 1.9^2, gradient V - R
        (1.0, -2.0, 4.5, 3.0, False),  # it went the wrong way: not clipped, 0.5 * 9
        (-1.0, 2.0, 4.5, -3.0, False),
    ],
)
def test_B10_the_value_may_come_no_more_than_the_clip_range_nearer_to_its_return(
    value, target, loss_is, gradient, clipped
):
    values = tensor([value]).requires_grad_()
    loss, metrics = ppo.value_loss(values, tensor([0]), tensor([target]), torch.ones(1, 1))
    loss.backward()
    close(loss, loss_is, "0.5 * max((V - R)^2, (clip(V, V_old +- 0.2) - R)^2)")
    close(values.grad, [[gradient]], "no gradient where the clip holds the value back")
    assert metrics["vf_clip_ratio"] == clipped


# ---------------------------------------------------------------- four models on one backbone


def make_reward_model(folder, **options):
    """A folder as reward_model.py writes it, with random weights. Returns the model."""
    args = reward_model.parse_args(["--model", MODEL, "--device", "cpu", "--out", str(folder)])
    model, tokenizer = reward_model.load(args)
    torch.manual_seed(1)
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    config = LoraConfig(r=8, lora_alpha=32, target_modules=args.lora_targets, **options)
    model = get_peft_model(model, config).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


@pytest.fixture(scope="module")
def trained_reward_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm") / "rm"
    return folder, make_reward_model(folder, task_type="SEQ_CLS")


@pytest.fixture
def four(trained_reward_model, tmp_path):
    """(args, the model with its four roles, tokenizer, a batch of ids and its mask)."""
    few = ["--max-completion-length", "6", "--prompts-per-step", "6", "--micro-batch-size", "4"]
    args = ppo.parse_args(["--model", MODEL, "--device", "cpu", "--out", str(tmp_path / "out"), *few])
    model, tokenizer = ppo.load(args)
    config = LoraConfig(r=8, lora_alpha=32, target_modules=args.lora_targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config, adapter_name="actor").eval()
    ppo.add_reward_model(model, trained_reward_model[0], args)
    torch.manual_seed(0)
    ids, attention_mask, mask, _ = ppo.complete(model, tokenizer, ppo.PROMPTS[:5], args)
    return args, model, tokenizer, (ids, attention_mask, mask.shape[1])


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


def test_B3_before_training_the_critic_is_the_reward_model_and_the_actor_the_reference(four, trained_reward_model):
    _, model, tokenizer, batch = four
    out = roles(model, batch)
    assert torch.equal(out["critic"], out["reward"]), "the critic starts from the reward model"
    assert torch.equal(out["actor"], out["reference"]), "the actor starts from the reference: LoRA's B is 0"
    ids, attention_mask, _ = batch
    rows = [row[m.bool()] for row, m in zip(ids, attention_mask, strict=True)]
    with torch.no_grad():
        own = reward_model.answer_scores(trained_reward_model[1], rows, tokenizer.pad_token_id)
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
    args.steps, args.num_ppo_epochs = 10, 1
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert len(list(ppo.train(model, tokenizer, ppo.PROMPTS, args))) == 10
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".actor." in name or "critic" in name}


@pytest.mark.parametrize("trained, others", [("critic", ["actor", "reference"]), ("actor", ["critic", "reward"])])
def test_B3_training_one_leaves_the_others_bit_equal(four, trained, others):
    _, model, _, batch = four
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


def test_B1_the_ratio_is_exactly_1_in_the_first_pass_and_not_in_the_second(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs = 2, 2
    approx_kl, policy_loss = [], ppo.policy_loss
    monkeypatch.setattr(
        ppo, "policy_loss", lambda *x, **k: approx_kl.append(policy_loss(*x, **k)[1]) or policy_loss(*x, **k)
    )
    _, metrics = ppo.train(model, tokenizer, ppo.PROMPTS, args)
    approx_kl = [m["approx_kl"].item() for m in approx_kl[-6:]]  # step 2: 2 pieces and the whole batch, twice
    assert approx_kl[:3] == [0, 0, 0], "first pass: new / old policy, bit for bit"
    assert all(approx_kl[3:]), "second pass: the policy has moved"
    assert metrics["kl"] != 0, "and the reference, which the actor left in step 1, does not enter the ratio"


def test_the_penalty_for_a_missing_eos_is_paid_at_the_end_of_answers_that_were_cut_off(four, monkeypatch):
    args, model, tokenizer, _ = four
    args.steps, args.num_ppo_epochs, args.prompts_per_step = 1, 1, 12
    args.max_completion_length, args.learning_rate = 24, 0.0
    seen, answers, gae, complete = [], [], ppo.gae, ppo.complete
    monkeypatch.setattr(ppo, "gae", lambda *x: seen.append(x) or gae(*x))
    monkeypatch.setattr(ppo, "complete", lambda *x: answers.append(complete(*x)) or answers[-1])
    for args.missing_eos_penalty in (0.0, 5.0):
        torch.manual_seed(3)
        (metrics,) = ppo.train(model, tokenizer, ppo.PROMPTS, args)
    (free, *_), (fined, *_) = seen
    ids, _, mask, _ = answers[0]
    cut_off = torch.tensor([tokenizer.eos_token_id not in row for row in ids[:, -mask.shape[1] :].tolist()])
    assert 0 < cut_off.sum() < len(cut_off), "some of these answers end and some are cut off"
    expected = torch.zeros(mask.shape)
    expected[range(len(mask)), mask.sum(dim=1) - 1] = 5.0 * cut_off
    close(free - fined, expected, "5 at the last token of each answer without EOS, and nothing else", 1e-5)
    close(metrics["completions/clipped_ratio"], cut_off.float().mean(), "the share of answers without EOS")


# ---------------------------------------------------------------- the script


def refused(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        ppo.main(["--model", MODEL, "--device", "cpu", *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1, "one sentence, exit status 2"
    return error


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--clip-dual", "1.1"], "above 1 + clip-high"),
        (["--lam", "1.5"], "at most 1"),
        (["--kl-coef", "-1"], "--kl-coef must be"),
        (["--score-on", "first"], "invalid choice"),
        (["--reward-model", "nowhere"], "nowhere has no adapter_config.json"),
    ],
)
def test_bad_options_end_in_one_sentence_before_any_training(tmp_path, capsys, arguments, why):
    assert why in refused(capsys, ["--out", str(tmp_path / "out"), *arguments])


def test_a_reward_model_without_its_head_or_for_another_base_is_refused(tmp_path, capsys, trained_reward_model):
    make_reward_model(tmp_path / "headless", task_type="CAUSAL_LM")
    assert "no head" in refused(capsys, ["--out", str(tmp_path / "o"), "--reward-model", str(tmp_path / "headless")])
    (tmp_path / "other").mkdir()
    for file in trained_reward_model[0].iterdir():
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/else"
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config))
    error = refused(capsys, ["--out", str(tmp_path / "o"), "--reward-model", str(tmp_path / "other")])
    assert "made for somebody/else" in error and "reward_model.py" in error, "the sentence names the thing and the fix"


def test_B2_without_a_reward_model_it_says_so_and_trains_one_with_the_same_model_and_seed(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    commands = []
    monkeypatch.setattr(
        ppo.subprocess, "run", lambda command, **k: commands.append(command) or SimpleNamespace(returncode=2)
    )
    with pytest.raises(SystemExit) as end:
        ppo.main(["--model", MODEL, "--seed", "7", "--device", "cpu"])
    assert end.value.code == 2, "what stops reward_model.py stops ppo.py"
    assert "no reward model in runs" in capsys.readouterr().out
    (command,) = commands
    assert Path(command[1]).name == "reward_model.py"
    for option, value in (("--model", MODEL), ("--seed", "7"), ("--out", str(Path("runs") / "reward_model"))):
        assert command[command.index(option) + 1] == value, option


def test_a_run_leaves_an_actor_that_peft_can_load(tmp_path, trained_reward_model, monkeypatch):
    monkeypatch.setattr(ppo, "HELD_OUT_PROMPTS", ppo.HELD_OUT_PROMPTS[:2])  # to be quick
    few = ["--steps", "1", "--prompts-per-step", "4", "--num-ppo-epochs", "1", "--learning-rate", "0.01"]
    where = ["--out", str(tmp_path / "ppo"), "--reward-model", str(trained_reward_model[0])]
    summary = ppo.main(["--model", MODEL, "--device", "cpu", *few, *where])
    assert summary["kl_after"]["n"] > 32 and summary["kl_after"]["mean"] != 0
    args = ppo.parse_args(["--model", MODEL, "--device", "cpu", "--out", str(tmp_path / "ppo")])
    model, tokenizer = ppo.load(args)
    model = PeftModel.from_pretrained(model, tmp_path / "ppo")
    estimates, _ = ppo.evaluate(model.eval(), tokenizer, args)
    close(estimates["kl"]["mean"], summary["kl_after"]["mean"], "the actor that was judged is the one saved", 1e-4)


def test_B12_B13_a_run_makes_held_out_stories_happier_by_5_standard_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = ppo.main(["--model", MODEL, "--device", "cpu"])
    before, after = summary["happiness_before"], summary["happiness_after"]
    error = math.hypot(before["standard_error"], after["standard_error"])
    assert after["mean"] - before["mean"] >= 5 * error
