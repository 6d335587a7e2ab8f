"""PPO: sample answers, score them with a reward model, make the tokens that beat the critic's forecast more likely.

    J(theta) = mean over tokens t of  min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    r_t = pi_theta(o_t | ...) / pi_old(o_t | ...)
    R_t = (score at the last token, 0 at all others) - kl_coef log(pi_old / pi_ref)_t
    A_t = sum over k >= 0 of (gamma lam)^k (R_(t+k) + gamma V_(t+k+1) - V_(t+k)), then whitened over the batch; V is
          V_old here, and 0 after the last token, cut off or not; where A_t < 0, r_t is first kept at most clip_dual
    The critic minimises the mean over tokens of 0.5 max((V_t - G_t)^2, (V_t clipped around V_old,t - G_t)^2), with
    G_t = A_t before whitening + V_old,t.

In memory: one frozen model in four roles, by the adapter that is switched on:
    actor           the policy, trained
    critic + head   the value function, trained; starts as a copy of the reward model
    reward + head   the reward model, frozen
    none            the reference, frozen

    python ppo.py                           # trains a reward model first if runs/reward_model has none
    python ppo.py --model tiny_llama --reward-model DIR --score-on mean --clip-high 0.28

The actor's adapter is saved; the critic, which only training needs, is not. Left out: minibatches (one optimizer step
per pass, so the ratio is 1 in all of the first), InstructGPT's pretraining term, and a KL coefficient that adapts (a
fixed one keeps the objective the same from the first step to the last).

PPO (arXiv 1707.06347), GAE (1506.02438), InstructGPT (2203.02155), clip-higher: DAPO (2503.14476), dual clip
(1912.09729).
"""

import argparse
import contextlib
import copy
import functools
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import errors, snapshot_download
from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, logging

# ---------------------------------------------------------------- the loss


def token_rewards(scores, log_probs, ref_log_probs, mask, kl_coef=0.05):
    """R_t = score - kl_coef * (log pi - log pi_ref)_t, the score at the last token only: InstructGPT, eq. 2.

    scores: (B,), one per answer, for its last token; or (B, T), used token by token. log_probs (of the policy that
    sampled), ref_log_probs, mask: (B, T). Returns (B, T). The KL (k1, negative at some tokens) is part of the reward,
    so the losses have no KL term.
    Shown by B4 in test_losses.py: score 1, mask 1 1 1 0 gives 0 0 1 0; and by B8.
    """
    mask = mask.bool()
    if scores.dim() == 1:
        scores = torch.where(last_token(mask), scores[:, None], 0.0)
    return torch.where(mask, scores - kl_coef * (log_probs - ref_log_probs), 0.0)


def last_token(mask):
    """True at the last 1 of each row, and nowhere else: (B, T) -> (B, T)."""
    mask = mask.bool()
    return mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)


def last_token_scores(token_scores, attention_mask):
    """The score at each row's last real token, which alone has seen the whole answer: (B, L), (B, L) -> (B,).

    It is found by its position in the mask, not by token id or count, so padding may stand on either side, and pad may
    equal EOS. A row without a real token gets 0.
    Shown by B4 and B6 in test_losses.py.
    """
    return torch.where(last_token(attention_mask), token_scores, 0.0).sum(dim=1)


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """A_t = delta_t + gamma lam A_(t+1), delta_t = R_t + gamma V_(t+1) - V_t: GAE, eq. 16. Returns (A, A + V).

    rewards, values, mask: (B, T); values[:, t] is the value of the text before token t. Both results are (B, T).
    The end of an answer is terminal: the value after its last token is 0. Masked places are skipped, holes too.
    lam = 0: the one-step TD error. lam = 1: the discounted rewards to come less the value.
    Shown by B11 in test_losses.py: rewards 0 0 1, values 0.5 give 0.45125 0.475 0.5.
    """
    mask = mask.bool()
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages, advantage, next_value = [], 0.0, 0.0
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages.append(advantage)
    advantages = torch.where(mask, torch.stack(advantages[::-1], dim=1), 0.0)
    return advantages, advantages + values


def whiten(x, mask):
    """(x - mean) / sqrt(variance + 1e-8) where mask is 1, 0 elsewhere: (B, T), (B, T) -> (B, T).

    The sample variance (n - 1). A single element, or equal ones, give exactly 0.
    Shown by B12 in test_losses.py: 1 2 3 gives -1 0 1.
    """
    mask = mask.bool()
    kept = x[mask]  # (n,)
    varies = mask & ~(kept == kept[:1]).all()  # the mean of equal numbers may be off by a rounding error
    centred = torch.where(mask, torch.where(mask, x, 0.0) - kept.sum() / max(len(kept), 1), 0.0)
    variance = centred.square().sum() / max(len(kept) - 1, 1)
    return torch.where(varies, centred * (variance + 1e-8).rsqrt(), 0.0)


def policy_loss(log_probs, old_log_probs, advantages, mask, *, clip_low=0.2, clip_high=0.2, clip_dual=3.0,
                normalizer=None):  # fmt: skip
    """-J of the module docstring: PPO, eq. 7, a mean over all tokens. Returns (loss, metrics).

    log_probs (pi_theta), old_log_probs (pi_old), advantages, mask: (B, T), the middle two constants. What is masked has
    no influence.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    clip_dual: upper bound on the ratio where the advantage is negative (it must exceed 1 + clip_high): there a token's
        loss is at most -clip_dual * advantage. None = no bound.
    normalizer: for a micro-batch, the number of tokens of the whole batch. None = counted here.
    metrics: approx_kl (mean of old minus new log-prob) and clip_ratio/low_mean, /high_mean, /dual_mean: shares of
        tokens whose gradient the clip took away.
    Shown by B9 in test_losses.py: A = -1, ratio 10 gives 3 without gradient; A = 1, ratio 1.5, high 0.28 gives -1.28.
    """
    mask = mask.bool()
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)  # before exp, whose gradient would be 0 x inf = NaN
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()
    low, high, bound = 1 - clip_low, 1 + clip_high, math.inf if clip_dual is None else clip_dual
    bounded = torch.where(advantages < 0, ratio.clamp(max=bound), ratio)
    objective = torch.min(bounded * advantages, bounded.clamp(low, high) * advantages)  # (B, T), 0 where mask is 0
    metrics = {
        "approx_kl": masked_mean(-log_ratio.detach(), mask),
        "clip_ratio/low_mean": masked_mean((ratio < low) & (advantages < 0), mask),
        "clip_ratio/high_mean": masked_mean((ratio > high) & (advantages > 0), mask),
        "clip_ratio/dual_mean": masked_mean((ratio > bound) & (advantages < 0), mask),
    }
    return -objective.sum() / (mask.sum().clamp(min=1) if normalizer is None else normalizer), metrics


def value_loss(values, old_values, returns, mask, *, cliprange_value=0.2, normalizer=None):
    """0.5 * mean of max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2). Returns (loss, metrics).

    values (V, of the critic being trained), old_values (when the answers were sampled), returns (G), mask: (B, T), the
    middle two constants. c = cliprange_value. The larger square counts, so a value that has left V_old +- c and is
    nearer to its return than that bound gets no gradient. Source: OpenAI's baselines, ppo2.
    normalizer: as in policy_loss. metrics: vf_clip_ratio, the share of tokens where the clipped square is the larger.
    Shown by B10 in test_losses.py: V_old 0, V 1, G 2, c 0.2 gives 1.62.
    """
    mask = mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    square, clipped_square = (values - returns).square(), (clipped - returns).square()
    total = 0.5 * torch.max(square, clipped_square).sum()
    metrics = {"vf_clip_ratio": masked_mean(clipped_square > square, mask)}
    return total / (mask.sum().clamp(min=1) if normalizer is None else normalizer), metrics


def masked_mean(x, mask):
    """Mean of x where mask is true; 0 if it is true nowhere."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


# ---------------------------------------------------------------- the task: cheerful stories

OPENINGS = ["Once upon a time there was a {} who", "One day a {} went to the park and", "Every morning the {}"]
OPENINGS += ["The {} looked out of the window and", "In the forest there lived a {} that", "When the {} came home, it"]
HEROES = "little cat, old bear, young girl, small bird, brave mouse, tired farmer, white duck, quiet boy".split(", ")
PROMPTS = [opening.format(hero) for opening in OPENINGS for hero in HEROES]
HELD_OUT_PROMPTS = ["The quick brown fox jumped over the", "Once upon a time there was an old woman who"]
HELD_OUT_PROMPTS += ["The young king sat down by the river and", "It was a dark night and the little train"]
HELD_OUT_PROMPTS += [opening.format(hero) for opening in OPENINGS for hero in ("little dog", "grey rabbit")]

# Words joined by / are one family: "happy" and "happily" count once.
CHEERFUL = """happy/happily/happiness/happier/happiest glad/gladly joy/joyful/joyfully cheerful/cheer/cheered/cheerfully
smile/smiles/smiled/smiling laugh/laughs/laughed/laughing/laughter love/loves/loved/loving/lovely fun/funny
play/plays/played/playing/playful friend/friends/friendly/friendship kind/kindly/kindness nice/nicely bright/brightly
sunny/sunshine warm/warmly/warmth beautiful/beautifully wonderful/wonderfully great good/best sing/sings/sang/singing
dance/dances/danced/dancing hug/hugs/hugged/hugging gift/gifts/present/presents proud/proudly excited/exciting/excitedly
delight/delighted/delightful safe/safely sweet/sweetly giggle/giggled/giggling grateful/thankful magic/magical"""
GLOOMY = """sad/sadly/sadness/sadder cry/cries/cried/crying tear/tears scared/scary afraid/fear/fearful/frightened
lost/lose/loses/losing dark/darkness cold alone/lonely/loneliness angry/angrily/anger hurt/hurts/hurting/pain/painful
bad/badly/worse/worst sick/ill dead/die/dies/died/death hate/hates/hated sorry worry/worries/worried tired hungry
broken/break/breaks/broke terrible/horrible/awful mean/cruel danger/dangerous poor gloomy/grumpy ugly wrong"""
CHEERFUL, GLOOMY = ({w: family for family in ws.split() for w in family.split("/")} for ws in (CHEERFUL, GLOOMY))


def happiness(text):
    """(cheerful families in the text - gloomy ones) / 3, kept within [-1, 1]: the rule that judges a completion.

    Families are counted once, so "happy happy happy" is worth no more than "happy"; three are enough, so a list of
    cheerful words is worth no more than a sentence with three of them.
    """
    words = re.findall(r"[a-z]+", text.lower())
    cheerful, gloomy = (len({family[word] for word in words if word in family}) for family in (CHEERFUL, GLOOMY))
    return max(-1.0, min(1.0, (cheerful - gloomy) / 3))


# ---------------------------------------------------------------- model and sampling

# transformers 5 renamed the keyword past_key_values.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def load(args):
    """The (model, tokenizer) that args.model names: a folder, or a name on the hub or in its cache.

    No name means babyllama-100m-2024 or, if neither hub nor cache has it, tiny_llama, and a line that says so.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # peft uses names that transformers has renamed
    logging.set_verbosity_error()
    name = "babylm/babyllama-100m-2024" if args.model is None else args.model
    embedded = Path(__file__).resolve().parent / "tiny_llama"
    folder = embedded if name == "tiny_llama" else Path(name)
    try:
        if not folder.exists():
            files = ["*.json", "*.safetensors", "*.txt", "*.model"]  # no pickles
            download = functools.partial(snapshot_download, name, allow_patterns=files)
            with contextlib.suppress(Exception):  # the cache first, which needs no network
                folder = Path(download(local_files_only=True))
            try:  # the hub, which is asked once; from_pretrained would retry for a minute
                folder = folder if any(folder.glob("*.safetensors")) else Path(download())
            except errors.LocalEntryNotFoundError:  # no network, and not all of it in the cache
                if args.model is not None:
                    raise
                print(f"The hub cannot be reached and {name} is not in the cache: using the embedded tiny_llama.")
                name, folder = "tiny_llama", embedded
        if not (folder / "config.json").is_file():
            raise ValueError("the folder has no config.json")
        logging.disable_progress_bar()
        options = {"dtype": args.dtype, "use_safetensors": True, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
        if info["missing_keys"]:
            raise ValueError(f"its file lacks {min(info['missing_keys'])}, which would be random")
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        known = range(model.get_input_embeddings().weight.shape[0])
        if not {tokenizer.eos_token_id, tokenizer.pad_token_id} <= set(known):
            raise ValueError("its tokenizer has no EOS token, or an EOS or pad token that the model does not know")
    except Exception as error:
        stop(f"the model {name!r} cannot be loaded: {' '.join((str(error) or repr(error)).split())[:300]}")
    layers = {path.split(".")[-2] for path, p in model.named_parameters() if path.endswith("weight") and p.dim() == 2}
    if unknown := sorted(set(args.lora_targets) - layers):
        stop(f"--lora-targets {unknown[0]}: the model has no such layer; it has {', '.join(sorted(layers))}")
    args.model = name
    model.name_or_path = str(embedded) if name == "tiny_llama" else name  # which the adapter is saved with
    return model.to(args.device).eval(), tokenizer  # eval: no dropout, or policy, reference and sampler would differ


def add_reward_model(model, args):
    """Give the model the adapters "reward" and "critic" and a head for each, all from reward_model.py's folder."""
    folder, model.heads = args.reward_model, torch.nn.ModuleDict()
    try:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"it has no {name}")
        config, weights = LoraConfig.from_pretrained(str(folder)), load_peft_weights(str(folder), device="cpu")
        base, own = (Path(name).resolve() for name in (config.base_model_name_or_path or "none", model.name_or_path))
        if base != own:
            raise ValueError(f"it was made for {config.base_model_name_or_path}, not {args.model}")
        head = weights.pop("base_model.model.score.weight", None)  # (1, H)
        if head is None or head.shape != (1, model.config.hidden_size):
            raise ValueError("it has no head with one score (score.weight)")
        config.task_type, config.modules_to_save = "CAUSAL_LM", None  # the heads are kept apart from peft
        for name in ("reward", "critic"):
            model.add_adapter(name, copy.deepcopy(config))
            keys = set_peft_model_state_dict(model, weights, adapter_name=name)
            for key in keys.unexpected_keys + [key for key in keys.missing_keys if f".{name}." in key]:
                raise ValueError(f"its weights are not those of an adapter of {args.model}: {key}")
            model.heads[name] = torch.nn.Linear(head.shape[1], 1, bias=False, device=args.device)  # float32
            model.heads[name].weight.data.copy_(head)
    except Exception as error:  # also whatever the libraries raise over a broken file
        again = f"train one with: python reward_model.py --model {args.model} --out DIR"
        stop(f"--reward-model {folder} cannot be used: {' '.join((str(error) or repr(error)).split())[:300]}; {again}")
    for name, p in model.named_parameters():  # decided once; see use()
        p.requires_grad_("actor" in name.split(".") or "critic" in name.split("."))
    model.eval()  # adapters are added in train mode


@contextlib.contextmanager
def use(model, adapter):
    """Let the model be "actor", "critic" or "reward", or with None the reference, which has no adapter.

    peft's switches also turn requires_grad on and off; here each parameter keeps what it has, so that what trains is
    what add_reward_model decided.
    """
    before, trains = model.active_adapter, [(p, p.requires_grad) for p in model.parameters()]
    try:
        model.set_adapter(adapter or before)
        with contextlib.nullcontext() if adapter else model.disable_adapter():
            for p, requires_grad in trains:
                p.requires_grad_(requires_grad)
            yield
    finally:
        model.set_adapter(before)
        for p, requires_grad in trains:
            p.requires_grad_(requires_grad)


def token_scores(model, head, input_ids, attention_mask):
    """A head on the last hidden states: one score at each token, (B, L), (B, L) -> (B, L), float32.

    model: the peft model, whose active adapter is used; no logits are computed. Columns that are padding in every row
    are left out and get 0.
    """
    used = attention_mask.any(dim=0)  # (L,)
    ids, mask = input_ids[:, used], attention_mask[:, used]
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    backbone = model.get_base_model().base_model  # without the language model's head; the adapters are inside it
    hidden = backbone(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False).last_hidden_state
    scores = torch.zeros(attention_mask.shape, device=input_ids.device)
    scores[:, used] = head(hidden.float()).squeeze(-1)
    return scores


def spread(scores, mask, score_on):
    """The reward model's scores at the T tokens, (B, T), as the scores argument of token_rewards.

    score_on: "last" gives (B,), the score of the whole answer, the only one the reward model was trained on; "every"
    gives (B, T), each token its own; "mean" gives (B, T), every token its answer's mean (in all, length times mean).
    Shown by B4 in test_losses.py.
    """
    if score_on == "last":
        return last_token_scores(scores, mask)
    if score_on == "every":
        return torch.where(mask.bool(), scores, 0.0)
    if score_on == "mean":
        total = torch.where(mask.bool(), scores, 0.0).sum(dim=1, keepdim=True)
        return torch.where(mask.bool(), total / mask.sum(dim=1, keepdim=True).clamp(min=1), 0.0)
    raise ValueError(f"unknown score_on {score_on!r}: 'last', 'every' or 'mean'")


def token_log_probs(model, input_ids, attention_mask, num_tokens, temperature=1.0):
    """log softmax(logits / temperature) at the last num_tokens of input_ids: (B, L), (B, L) -> (B, T), T = num_tokens.

    The logits at position t predict token t + 1, so they are read one position earlier. temperature is what the tokens
    were sampled with. The result is float32. Columns that are padding in every row are left out and get 0; at least one
    completion token must be real.
    Shown by A6 and A7 in test_losses.py.
    """
    used = attention_mask.any(dim=0)  # (L,)
    behind = int((~used[-num_tokens:]).sum())  # columns that are padding after the longest completion
    input_ids, attention_mask, num_tokens = input_ids[:, used], attention_mask[:, used], num_tokens - behind
    logits = model(
        input_ids=input_ids[:, :-1],  # the last token predicts nothing we need
        attention_mask=attention_mask[:, :-1],
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, :-1],
        use_cache=False,
        logits_to_keep=torch.arange(-num_tokens, 0),  # only the completion's; indices, because a number is slower
    ).logits.float()  # (B, T, V)
    logits = logits if temperature == 1 else logits / temperature
    targets = input_ids[:, -num_tokens:]  # (B, T)
    log_probs = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return F.pad(log_probs, (0, behind))


def completion_mask(completion_ids, eos_token_id):
    """1 up to and including each row's first EOS, 0 after it: (B, T) -> (B, T). Right also where pad == EOS.

    A row of tokens a b E P P gives 1 1 1 0 0 (E: EOS, P: padding). Shown by A5 in test_losses.py.
    """
    is_eos = (completion_ids == eos_token_id).long()
    return (is_eos.cumsum(dim=1) - is_eos == 0).long()


@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, max_completion_length, *, temperature=1.0, eos_token_id, pad_token_id):
    """Sample a completion for each left-padded prompt: (B, P), (B, P) -> its ids and their log-probs, (B, T) each.

    The ids are padded after the EOS. Plain sampling from the softmax: with top-k or top-p the tokens would come from
    another distribution than the one that is trained. The log-probs are those that the tokens were drawn with; a
    pass over the whole text gives the same but for rounding (which bfloat16 makes visible), and with a gradient.
    """
    keywords = {CACHE: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": torch.tensor([-1])}
    ids, mask, position = prompt_ids, prompt_mask, (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    completion, drawn = [], []
    done = torch.zeros_like(prompt_ids[:, :1], dtype=torch.bool)  # (B, 1)
    while len(completion) < max_completion_length and not done.all():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position, **keywords).logits[:, -1]  # (B, V)
        # Inverse-CDF sampling: the distribution of torch.multinomial in a fraction of its time.
        log_probs = (logits.float() / temperature).log_softmax(dim=-1)
        cumulative = log_probs.exp().cumsum(dim=-1)
        u = torch.rand_like(cumulative[:, :1]) * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, u, right=True).clamp(max=logits.shape[1] - 1)  # the action: (B, 1)
        ids = ids.masked_fill(done, pad_token_id)
        done = done | (ids == eos_token_id)
        completion.append(ids)
        drawn.append(log_probs.gather(1, ids))
        mask, position = torch.cat([mask, torch.ones_like(ids)], dim=1), position[:, -1:] + 1
    return torch.cat(completion, dim=1), torch.cat(drawn, dim=1)


def complete(model, tokenizer, prompts, args):
    """Sample one completion per prompt: ids (N, L), attention_mask (N, L), mask (N, T), N texts, log-probs (N, T)."""
    prompt = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt").to(args.device)
    options = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    options["temperature"] = args.temperature
    ids, log_probs = sample(model, prompt.input_ids, prompt.attention_mask, args.max_completion_length, **options)
    mask = completion_mask(ids, tokenizer.eos_token_id)
    texts = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(ids, mask.sum(dim=1), strict=True)]
    ids, attention_mask = torch.cat([prompt.input_ids, ids], 1), torch.cat([prompt.attention_mask, mask], 1)
    return ids, attention_mask, mask, texts, log_probs


@torch.no_grad()
def evaluate(model, tokenizer, args):
    """16 answers to each of the 16 held-out prompts: their happiness and the mean k1 of their KL, in nats per token.

    Returns ({"happiness": estimate, "kl": estimate}, [(prompt, answer), ...]). A KL that is not finite stops the run.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same draws before and after, whatever --seed
        # (256, L), (256, L), (256, T), 256 texts, (256, T)
        ids, attention_mask, mask, texts, log_probs = complete(model, tokenizer, HELD_OUT_PROMPTS * 16, args)
    kl = []
    with model.disable_adapter():
        for rows in mask.sum(dim=1).argsort().split(args.micro_batch_size):  # rows of similar length: little padding
            ref = token_log_probs(model, ids[rows], attention_mask[rows], mask.shape[1], args.temperature)  # (B, T)
            kl += (log_probs[rows] - ref)[mask[rows].bool()].tolist()
    if not all(map(math.isfinite, kl)):
        raise FloatingPointError("the log-probs of the held-out answers are not finite")
    estimates = {"happiness": estimate(map(happiness, texts)), "kl": estimate(kl)}
    return estimates, list(zip(HELD_OUT_PROMPTS, texts, strict=False))


# ---------------------------------------------------------------- training


def token_values(model, ids, attention_mask, mask, args, role, *, loss=None, old=None, target=None, weight=1.0):
    """What the model in one role says of each answer's tokens, a micro-batch at a time: (N, T), detached.

    role: "actor" or None, the reference: log-probs. "reward": the score at a token. "critic": the value of the text
    before it, so it is read one position earlier, where the log-prob is.
    loss(new, old, target, mask, normalizer=...) * weight: where there is one, this is a training pass, and backward()
    adds up its gradient over the micro-batches. old (N, T): what the first pass read; None = this is the first pass, so
    old is new and the ratio is exactly 1. target (N, T): advantages for the actor, rewards for the critic.
    """
    T, tokens, result = mask.shape[1], mask.sum(), torch.zeros(mask.shape, device=mask.device)
    with use(model, role), torch.set_grad_enabled(loss is not None):
        for rows in mask.sum(dim=1).argsort().split(args.micro_batch_size):  # rows of similar length: little padding
            if role in ("reward", "critic"):
                scores = token_scores(model, model.heads[role], ids[rows], attention_mask[rows])  # (B, L)
                new = scores[:, -T:] if role == "reward" else scores[:, -T - 1 : -1]
            else:
                new = token_log_probs(model, ids[rows], attention_mask[rows], T, args.temperature)
            result[rows] = new.detach()
            if loss:
                before = new.detach() if old is None else old[rows]
                part, _ = loss(new, before, target[rows], mask[rows], normalizer=tokens)
                (weight * part).backward()
    return result


def train(model, tokenizer, prompts, args):
    """PPO (InstructGPT, section 3.5). Yields the metrics of a step when the step is done."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0)
    clips = {name: getattr(args, name) for name in ("clip_low", "clip_high", "clip_dual")}
    actor_loss = functools.partial(policy_loss, **clips)

    def critic_loss(values, old_values, rewards, mask, **options):
        # From rewards: the returns need the old values, which in the first pass are known only once they are read.
        _, returns = gae(rewards, old_values, mask, args.gamma, args.lam)
        return value_loss(values, old_values, returns, mask, cliprange_value=args.cliprange_value, **options)

    queue = []
    for step in range(1, args.steps + 1):
        # 1. Sample: one answer to each prompt. No labels are needed.
        while len(queue) < args.prompts_per_step:
            queue += [prompts[i] for i in torch.randperm(len(prompts))]
        batch, queue = queue[: args.prompts_per_step], queue[args.prompts_per_step :]
        with use(model, "actor"):
            ids, attention_mask, mask, texts, sampled_log_probs = complete(model, tokenizer, batch, args)  # (N, L), ...
        read = functools.partial(token_values, model, ids, attention_mask, mask, args)

        # 2. The two frozen models read the answers: the reward model's score at each token, the reference's log-probs.
        scores, ref_log_probs = read("reward"), read(None)  # (N, T)

        # 3. Rewards: the score, less the KL token by token. An answer that was cut off is scored like any other, less
        #    missing_eos_penalty.
        score = last_token_scores(scores, mask)  # (N,)
        for value, text in zip(score.tolist(), texts, strict=True):
            if not math.isfinite(value):
                raise FloatingPointError(f"step {step}: the reward model's score of {text!r} is {value}")
        paid = spread(scores, mask, args.score_on)
        rewards = token_rewards(paid, sampled_log_probs, ref_log_probs, mask, args.kl_coef)  # (N, T)
        cut_off = ~(ids[:, -mask.shape[1] :] == tokenizer.eos_token_id).any(dim=1)  # (N,)
        rewards -= args.missing_eos_penalty * (last_token(mask) & cut_off[:, None])

        # 4. Update: num_ppo_epochs passes over the same answers, each of them one optimizer step. To read with a loss
        #    is to add up its gradient. What the first pass reads, before any update, is the old policy and the old
        #    values of all passes. (The sampler's log-probs are the same but for rounding; they serve the KL.)
        old_log_probs = old_values = None
        for epoch in range(args.num_ppo_epochs):
            values = read("critic", loss=critic_loss, old=old_values, target=rewards, weight=args.vf_coef)  # (N, T)
            if epoch == 0:
                old_values = values
                # Advantages: how much better than the critic expected did it go from here on?
                raw_advantages, returns = gae(rewards, old_values, mask, args.gamma, args.lam)
                advantages = whiten(raw_advantages, mask)
            log_probs = read("actor", loss=actor_loss, old=old_log_probs, target=advantages)  # (N, T)
            if epoch == 0:
                old_log_probs = log_probs
            # Losses and metrics of the whole batch, not the mean of the micro-batches' means.
            policy, metrics = actor_loss(log_probs, old_log_probs, advantages, mask)
            critic, value_metrics = critic_loss(values, old_values, rewards, mask)
            grad_norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if not (policy.isfinite() and critic.isfinite() and grad_norm.isfinite()):
                raise FloatingPointError(f"step {step}: losses {policy} and {critic}, norm of the gradient {grad_norm}")
            optimizer.step()
            optimizer.zero_grad()

        # 5. Report: losses, clip shares and gradient as the last pass saw them before its update.
        kept = mask.bool()
        metrics |= value_metrics | {"loss/policy": policy, "loss/value": critic, "grad_norm": grad_norm}
        metrics |= {"score": score.mean(), "happiness": sum(map(happiness, texts)) / len(texts)}
        errors, total = (x[kept].var(correction=0) for x in (raw_advantages, returns))  # raw: returns - old_values
        metrics["explained_variance"] = 1 - errors / total.clamp(min=1e-8)
        metrics["kl"] = masked_mean(sampled_log_probs - ref_log_probs, kept)
        metrics["entropy"] = masked_mean(-sampled_log_probs, kept)
        metrics["completions/mean_length"] = mask.sum(dim=1).float().mean()
        metrics["completions/clipped_ratio"] = cut_off.float().mean()
        yield {"step": step, "samples": step * len(ids), **metrics}


# ---------------------------------------------------------------- command line and files

REWARD_MODEL = Path("runs") / "reward_model"


def parse_args(argv):
    """The options of this script, checked."""
    kind = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **kind)
    parser.error, add = stop, parser.add_argument
    add("--model", help="name on the hub or folder of a causal language model; tiny_llama is the embedded one")
    add("--lora-targets", nargs="+", default=["q_proj", "v_proj"], help="names of the layers that get an adapter")
    add("--out", type=Path, default=Path("runs") / Path(__file__).stem, help="folder for the results, replaced")
    add("--steps", type=int, default=24, help="training steps")
    add("--seed", type=int, default=0, help="same seed, same CPU: same numbers")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the frozen weights")
    add("--learning-rate", type=float, default=3e-3, help="of AdamW, constant")
    add("--max-completion-length", type=int, default=32, help="tokens a completion may have")
    add("--micro-batch-size", type=int, default=16, help="sequences in a training pass")
    add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob")
    add("--prompts", type=Path, help="file to train on instead of the built-in prompts, one per line")
    add("--reward-model", type=Path, default=REWARD_MODEL, help="folder that reward_model.py has written")
    add("--prompts-per-step", type=int, default=32, help="prompts in a batch, with one answer each")
    add("--num-ppo-epochs", type=int, default=2, help="passes over each batch of answers")
    add("--kl-coef", type=float, default=0.2, help="weight of the KL in the reward")
    add("--clip-low", type=float, default=0.2, help="clip range of the ratio below 1")
    add("--clip-high", type=float, default=0.2, help="clip range of the ratio above 1 (DAPO: 0.28)")
    add("--clip-dual", type=number_or_none, default=3.0, help="bound on the ratio for negative advantages, or none")
    add("--cliprange-value", type=float, default=0.2, help="clip range of the value around the old one")
    add("--vf-coef", type=float, default=0.1, help="weight of the value loss; Adam cancels it, but for the shared clip")
    add("--gamma", type=float, default=1.0, help="discount per token")
    add("--lam", type=float, default=0.95, help="lambda of GAE")
    add("--missing-eos-penalty", type=float, default=0.0, help="subtracted from the reward of an answer without EOS")
    add("--score-on", choices=["last", "every", "mean"], default="last", help="which tokens are paid a score")
    args = check_args(parser.parse_args(argv))
    if args.gamma > 1 or args.lam > 1:
        stop("--gamma and --lam must be at most 1")
    if args.clip_dual is not None and args.clip_dual <= 1 + args.clip_high:
        stop(f"--clip-dual must be above 1 + clip-high = {1 + args.clip_high}, not {args.clip_dual}")
    return args


def main(argv=None):
    """Train, from the command line or from Python: main(["--steps", "5"]). Returns the summary."""
    start, args = time.perf_counter(), parse_args(argv)
    if args.reward_model == REWARD_MODEL and not (REWARD_MODEL / "summary.json").exists():
        train_reward_model(args)
    model, tokenizer = load(args)
    prompts = read_prompts(args, model, tokenizer)
    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.0, target_modules=args.lora_targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config, adapter_name="actor").eval()  # its B is 0: actor and reference are equal
    add_reward_model(model, args)

    def write(folder):
        model.save_pretrained(folder, save_embedding_layers=False, selected_adapters=["actor"])
        shutil.copytree(folder / "actor", folder, dirs_exist_ok=True)  # peft gives it a folder of its own
        shutil.rmtree(folder / "actor")

    def judge():
        with use(model, "actor"):
            return evaluate(model, tokenizer, args)

    shown = {"score": "score", "happiness": "happiness", "kl": "kl", "clip": "clip_ratio/high_mean"}
    return run(args, model, start, train(model, tokenizer, prompts, args), judge, write, shown)


def train_reward_model(args):
    """Run reward_model.py, which stands beside this file, with the same model, prompts, seed and sampling."""
    script = Path(__file__).with_name("reward_model.py")
    if not script.exists():
        stop(f"{script} is missing: name a folder that it has written with --reward-model")
    print(f"There is no reward model in {REWARD_MODEL}: training one with reward_model.py.", flush=True)
    options = {name: getattr(args, name) for name in ("model", "prompts", "device", "seed", "temperature")}
    options |= {"out": REWARD_MODEL, "dtype": str(args.dtype)[6:], "max-completion-length": args.max_completion_length}
    command = [sys.executable, str(script), "--lora-targets", *args.lora_targets]
    process = subprocess.Popen(command + [f"--{name}={value}" for name, value in options.items() if value is not None])
    try:
        status = process.wait()
    except KeyboardInterrupt:  # it got the Ctrl-C, too: let it save
        status = process.wait()
    if status:
        raise SystemExit(status)  # it has said why


def stop(sentence, status=2):
    """Print one sentence on stderr and exit: 2 if options, files or numbers are at fault, 130 after Ctrl-C."""
    print(f"{Path(__file__).name}: {sentence}", file=sys.stderr)
    raise SystemExit(status)


def number_or_none(text):
    """An argparse type: a number, or None for "none"."""
    return None if text.lower() == "none" else float(text)


def check_args(args):
    """Refuse what cannot work, make the --out folder, seed torch; device and dtype become torch's."""
    for name, value in vars(args).items():
        zero = name in ("seed", "beta", "kl_coef", "lam", "label_smoothing", "missing_eos_penalty")
        if type(value) in (int, float) and not (0 < value < 1e18 or zero and value == 0):
            stop(f"--{name.replace('_', '-')} must be {'at least' if zero else 'above'} 0 and below 1e18, not {value}")
    try:
        torch.zeros(1, device=args.device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        stop(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}")
    args.device = torch.device(args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if any(args.out.iterdir()) and not (args.out / "summary.json").is_file():
            stop(f"--out {args.out} is neither empty nor an earlier result: name another folder")
        if not os.access(args.out.resolve().parent, os.W_OK):
            stop(f"--out {args.out} cannot be replaced: the folder that it is in is not writable")
    except OSError as error:
        stop(f"--out {args.out} cannot be written: {error.strerror}")
    for name in ("model", "prompts", "data", "reward_model"):
        path = Path(getattr(args, name, None) or "/").resolve()
        again = name == "data" and path.name == "pairs.jsonl"  # the new result will hold it, too
        if args.out.resolve() in (path, *path.parents) and not again:
            stop(f"--out {args.out} would replace what --{name.replace('_', '-')} reads: name another folder")
    auto = "bfloat16" if args.device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "float32"
    args.dtype = getattr(torch, auto if args.dtype == "auto" else args.dtype)
    torch.manual_seed(args.seed)
    return args


def read_prompts(args, model, tokenizer):
    """The lines of the --prompts file that are not blank, or PROMPTS. Refused if the context has no room for them."""
    prompts = PROMPTS
    if args.prompts:
        try:
            lines = [line.strip() for line in args.prompts.read_text(encoding="utf-8-sig").split("\n")]
        except (OSError, UnicodeDecodeError) as error:
            stop(f"--prompts {args.prompts} cannot be read: {error}")
        prompts = [line for line in lines if line] or stop(f"--prompts {args.prompts} has only blank lines")
    length = max(len(ids) for ids in tokenizer(prompts + HELD_OUT_PROMPTS, add_special_tokens=False).input_ids)
    context = getattr(model.config, "max_position_embeddings", math.inf)
    if length + args.max_completion_length > context:
        longest = f"a prompt of {length} tokens and --max-completion-length {args.max_completion_length}"
        stop(f"{longest} exceed the model's context of {context} tokens")
    return prompts


def estimate(values):
    """{"mean", "standard_error", "n"} of some numbers."""
    values = torch.tensor(list(values), dtype=torch.float64)
    return {"mean": values.mean().item(), "standard_error": values.std().item() / len(values) ** 0.5, "n": len(values)}


def run(args, model, start, records, judge, write, shown):
    """Judge, train behind a progress bar, judge again, save, report. Returns the summary.

    records: yields a step's metrics. judge() -> ({name: estimate}, [(prompt or heading, text), ...]). write(folder)
    saves the model. shown: {label: metric} for the bar and the curves.
    Ctrl-C, or a number that is not finite: the weights are saved as they are, if a step is done; exit status 130 or 2.
    """
    history, summary, stopped = [], {}, None
    trained, count = model.get_nb_trainable_parameters()
    print(f"{args.model}: {count:,} parameters, {trained:,} trained, {args.device}, {str(args.dtype)[6:]}")

    def held_out(when):
        estimates, texts = judge()
        for name, value in estimates.items():
            mean = round(value["mean"], 3) + 0  # not -0.000
            print(f"held-out {name} {when}: {mean:.3f} ± {value['standard_error']:.3f}")
            summary[f"{name}_{when}"] = value
        return texts

    try:
        texts_before = held_out("before")
        bar = tqdm(records, total=args.steps, unit="step")
        for record in bar:
            history.append({k: v if isinstance(v, int) else round(float(v), 6) for k, v in record.items()})
            bar.set_postfix({label: f"{record[name]:.3f}" for label, name in shown.items() if name in record})
        for (prompt, old), (_, new) in list(zip(texts_before, held_out("after"), strict=True))[:2]:
            print(f"{prompt} ...\n  before: {old!r}\n  after:  {new!r}")
    except (KeyboardInterrupt, FloatingPointError) as error:
        stopped = str(error) or "interrupted"
    status = 130 if stopped == "interrupted" else 2
    if not history:
        stop(f"{stopped}; no step was finished, so nothing is saved", status)
    summary |= {"model": args.model, "options": vars(args), "steps": len(history), "stopped": stopped}
    summary |= {"samples": history[-1]["samples"], "seconds": time.perf_counter() - start}
    summary["peak_memory_mb"] = peak_memory_mb(args.device)
    curves = {label: [record[name] for record in history] for label, name in shown.items() if name in history[0]}
    try:
        save(args.out, write, history, summary, curves)
    except KeyboardInterrupt:  # the first Ctrl-C saves, a second one ends at once
        if stopped == "interrupted":
            raise
        save(args.out, write, history, summary, curves)
    for label, values in curves.items():
        few = values[:: math.ceil(len(values) / 60)]
        low, span = min(few), max(few) - min(few) or 1
        bars = "".join("▁▂▃▄▅▆▇█"[int((value - low) / span * 7.99)] for value in few)
        print(f"{label:>{max(map(len, curves))}} {bars} {values[0]:.3f} to {values[-1]:.3f}")
    print(f"saved in {args.out}")
    if stopped:
        stop(f"{stopped}; the weights after step {len(history)} are saved", status)
    return summary


def save(out, write, history, summary, curves):
    """Write everything into a hidden folder beside `out`, then swap the two: `out` never holds half a result."""
    out = out.resolve()  # a link's target, not the link
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{which}") for which in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    write(new)
    (new / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history), encoding="utf-8")
    (new / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    with contextlib.suppress(Exception):  # without a matplotlib that works there is no picture
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2 * len(curves)), layout="constrained")
        for i, (label, values) in enumerate(curves.items(), 1):
            figure.add_subplot(len(curves), 1, i, xlabel="step", ylabel=label).plot(range(1, len(values) + 1), values)
        figure.savefig(new / "curves.png")
    try:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)  # what a Ctrl-C in here may have left
            out.rename(old)
        new.rename(out)
    except OSError as error:
        stop(f"--out {out} cannot be replaced ({error.strerror}): the result is in {new}")
    shutil.rmtree(old, ignore_errors=True)


def peak_memory_mb(device):
    """The most memory that tensors on the GPU, or else this process, have held; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console that lacks a character should not end the run
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted; nothing more is saved", 130)
