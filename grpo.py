"""GRPO: sample a group of answers to each prompt, then make those above their group's mean reward more likely.

    J(theta) = mean over answers i of  1/|o_i|  sum over tokens t of
               [ min(r_it A_i, clip(r_it, 1 - epsilon, 1 + epsilon) A_i)  -  beta KL(pi_theta || pi_ref)_it ]

    r_it = pi_theta(o_it | ...) / pi_old(o_it | ...)      A_i = (R_i - mean(R in group)) / std(R in group)

In memory: one model. The policy is its frozen weights plus a LoRA adapter; the reference is the same weights with the
adapter switched off; the old policy is a tensor of log-probs. There is no critic. The gradient flows through pi_theta's
log-probs alone: rewards, advantages, pi_old and pi_ref are constants.

    python grpo.py                          # babylm/babyllama-100m-2024; or tiny_llama, if it cannot be had
    python grpo.py --model tiny_llama --beta 0 --loss-type dr_grpo

DeepSeekMath (arXiv 2402.03300), DeepSeek-R1 (2501.12948); variants: DAPO (2503.14476), Dr. GRPO (2503.20783),
GSPO (2507.18071), dual clip (1912.09729).
"""

import argparse
import contextlib
import functools
import inspect
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import errors, snapshot_download
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, logging

# ---------------------------------------------------------------- the loss


def group_advantages(rewards, num_generations, scale_rewards="group"):
    """A_i = (R_i - mean(group)) / (std(group) + 1e-4), one number per answer: DeepSeekMath, section 4.1.2.

    rewards: (N,), prompt-major: the num_generations answers to one prompt are adjacent. Returns (N,).
    scale_rewards: "group" as above; "batch" divides by the std of all N; "none" does not divide (Dr. GRPO).
    The std is the sample std (n - 1). Where all rewards of a group are equal its advantages are exactly 0.
    Shown by B18 ([1, 0, 0, 0] -> 1.4997 and three times -0.4999) and A10 in test_losses.py.
    """
    if scale_rewards not in ("group", "batch", "none"):
        raise ValueError(f"unknown scale_rewards {scale_rewards!r}: 'group', 'batch' or 'none'")
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards do not make whole groups of num_generations={num_generations} >= 2")
    groups = rewards.reshape(-1, num_generations)  # (N / G, G)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (rewards.std() + 1e-4)
    # In float32 the mean of eight 0.9s is 0.90000004, so compare the rewards themselves.
    equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal, 0.0, advantages).flatten()


def kl_divergence(log_probs, ref_log_probs, kl_estimator="k3"):
    """One-sample estimates of KL(pi_theta || pi_ref), token by token: Schulman, "Approximating KL divergence" (2020).

    With delta = log_probs - ref_log_probs:  k1 = delta,  k2 = delta^2 / 2,  k3 = exp(-delta) + delta - 1 (GRPO's).
    log_probs, ref_log_probs: (B, T) of tokens sampled from the policy. Returns (B, T) in nats.
    k1 and k3 are unbiased; k2 and k3 are never negative. That is said of the values: as a loss, k3 has the expected
    gradient of KL(pi_ref || pi_theta), and k1 none. k3's delta is clamped to +-20, so that exp cannot overflow.
    Shown by A13 in test_losses.py: 0 at delta = 0, 0.367879 at 1, 0.718282 at -1.
    """
    delta = log_probs - ref_log_probs
    if kl_estimator == "k1":
        return delta
    if kl_estimator == "k2":
        return delta.square() / 2
    if kl_estimator == "k3":
        delta = delta.clamp(-20, 20)
        return torch.exp(-delta) + delta - 1
    raise ValueError(f"unknown kl_estimator {kl_estimator!r}: 'k1', 'k2' or 'k3'")


def grpo_loss(log_probs, old_log_probs, ref_log_probs, advantages, mask, *, epsilon=0.2, epsilon_high=None, delta=None,
              beta=0.04, loss_type="grpo", importance_sampling_level="token", max_completion_length=None,
              normalizer=None):  # fmt: skip
    """-J of the module docstring: DeepSeekMath, eq. 3. Returns (loss, metrics).

    log_probs (pi_theta), old_log_probs (pi_old), ref_log_probs (pi_ref; None is allowed at beta=0): (B, T).
    advantages: (B,). mask: (B, T), 1 = a token the policy produced. What stands where it is 0 has no influence.
    epsilon, epsilon_high (None: epsilon): bounds of the ratio, [1 - epsilon, 1 + epsilon_high]; epsilon=None: no clip.
    delta (above 1 + epsilon_high): bound on the ratio where the advantage is negative (dual clip); None = no bound.
    loss_type: "grpo" averages over each sequence's tokens, then over the sequences; "dapo" over all tokens;
        "dr_grpo" divides the sum by B * max_completion_length (T if None).
    importance_sampling_level: "token", or "sequence" for GSPO's one ratio per sequence. Its log is a mean over
        tokens and moves far less than that of a single one: GSPO's paper sets epsilon=3e-4, epsilon_high=4e-4.
    normalizer: for a micro-batch, the whole batch's divisor: its number of non-empty sequences ("grpo"), of tokens
        ("dapo"), or B * max_completion_length ("dr_grpo"). None = counted here.
    metrics: kl (if there is a reference), approx_kl (mean of old minus new log-prob) and clip_ratio/low_mean,
        /high_mean, /dual_mean: the shares of tokens (of sequences, for GSPO) whose gradient the clip took away.
    Shown by A8-A13 in test_losses.py: ratio 1 gives -advantage, and A = 2 with every ratio above 1.2 gives -2.4.
    """
    mask = mask.bool()
    lengths = mask.sum(dim=1)  # (B,)
    advantages = advantages[:, None]  # (B, 1)
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)  # before exp, whose gradient would be 0 x inf = NaN
    approx_kl = -log_ratio.detach()
    counted = mask  # the denominator of the clip shares
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1)[:, None]  # (B, 1)
        counted = mask.any(dim=1, keepdim=True)
    elif importance_sampling_level != "token":
        raise ValueError(f"unknown importance_sampling_level {importance_sampling_level!r}: 'token' or 'sequence'")
    ratio = log_ratio.clamp(-20, 20).exp()

    low, high = 0.0, math.inf
    if epsilon is not None:
        low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    bound = math.inf if delta is None else delta
    bounded = torch.where(advantages < 0, ratio.clamp(max=bound), ratio)
    objective = torch.min(bounded * advantages, bounded.clamp(low, high) * advantages)  # (B, T) or (B, 1)

    metrics = {
        "approx_kl": masked_mean(approx_kl, mask),
        "clip_ratio/low_mean": masked_mean((ratio < low) & (advantages < 0), counted),
        "clip_ratio/high_mean": masked_mean((ratio > high) & (advantages > 0), counted),
        "clip_ratio/dual_mean": masked_mean((ratio > bound) & (advantages < 0), counted),
    }
    per_token_loss = -objective
    if beta and ref_log_probs is None:
        raise ValueError(f"beta is {beta}, so ref_log_probs are needed")
    if ref_log_probs is not None:
        kl = kl_divergence(torch.where(mask, log_probs, 0.0), torch.where(mask, ref_log_probs, 0.0))
        per_token_loss = per_token_loss + beta * kl
        metrics["kl"] = masked_mean(kl.detach(), mask)
    per_token_loss = torch.where(mask, per_token_loss, 0.0)  # (B, T)

    if loss_type == "grpo":
        total, count = (per_token_loss.sum(dim=1) / lengths.clamp(min=1)).sum(), (lengths > 0).sum()
    elif loss_type == "dapo":
        total, count = per_token_loss.sum(), lengths.sum()
    elif loss_type == "dr_grpo":
        total, count = per_token_loss.sum(), torch.tensor(mask.shape[0] * (max_completion_length or mask.shape[1]))
    else:
        raise ValueError(f"unknown loss_type {loss_type!r}: 'grpo', 'dapo' or 'dr_grpo'")
    return total / (count.clamp(min=1) if normalizer is None else normalizer), metrics


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


def reward(prompts, completions):
    """The reward of each completion, a list of numbers. Put your own here; held-out answers are judged by happiness."""
    return [happiness(completion) for completion in completions]


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


def train(model, tokenizer, prompts, args):
    """GRPO (DeepSeekMath, algorithm 1). Yields the metrics of a step when the step is done."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0)
    names = "epsilon epsilon_high delta beta loss_type importance_sampling_level max_completion_length"
    loss_options = {name: getattr(args, name) for name in names.split()}
    queue = []
    for step in range(1, args.steps + 1):
        # 1. Sample: num_generations answers to each prompt, side by side.
        while len(queue) < args.prompts_per_step:
            queue += [prompts[i] for i in torch.randperm(len(prompts))]
        batch = [prompt for prompt in queue[: args.prompts_per_step] for _ in range(args.num_generations)]
        queue = queue[args.prompts_per_step :]
        ids, attention_mask, mask, texts, _ = complete(model, tokenizer, batch, args)  # (N, L), (N, L), (N, T)
        T = mask.shape[1]

        # 2. Score.
        rewards = checked(reward(batch, texts), texts, step).to(args.device)  # (N,)

        # 3. Advantages: how much better is an answer than the others to its prompt?
        advantages = group_advantages(rewards, args.num_generations, args.scale_rewards)  # (N,)

        pieces = mask.sum(dim=1).argsort().split(args.micro_batch_size)  # rows of similar length: little padding

        # 4. The reference's log-probs: the same model without its adapter. At beta = 0 they are not needed.
        ref_log_probs = None
        if args.beta > 0:
            ref_log_probs = torch.zeros(mask.shape, device=args.device)
            with torch.no_grad(), model.disable_adapter():
                for rows in pieces:
                    ref_log_probs[rows] = token_log_probs(model, ids[rows], attention_mask[rows], T, args.temperature)

        # 5. Update: num_iterations optimizer steps on the same answers.
        normalizer = {"grpo": len(ids), "dapo": mask.sum(), "dr_grpo": len(ids) * args.max_completion_length}
        loss_options["normalizer"] = normalizer[args.loss_type]  # of the whole batch, whatever part of it the loss sees
        old_log_probs = None  # until the first iteration has read them: there the ratio is exactly 1
        for _ in range(args.num_iterations):
            log_probs = torch.zeros(mask.shape, device=args.device)
            for rows in pieces:
                new = token_log_probs(model, ids[rows], attention_mask[rows], T, args.temperature)  # (B, T)
                log_probs[rows] = new.detach()
                old = new.detach() if old_log_probs is None else old_log_probs[rows]
                ref = None if ref_log_probs is None else ref_log_probs[rows]
                grpo_loss(new, old, ref, advantages[rows], mask[rows], **loss_options)[0].backward()
            old_log_probs = log_probs if old_log_probs is None else old_log_probs
            # Loss and metrics of the whole batch, not the mean of the micro-batches' means.
            loss, metrics = grpo_loss(log_probs, old_log_probs, ref_log_probs, advantages, mask, **loss_options)
            grad_norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if not (loss.isfinite() and grad_norm.isfinite()):
                raise FloatingPointError(f"step {step}: the loss is {loss}, its gradient's norm {grad_norm}")
            optimizer.step()
            optimizer.zero_grad()

        # 6. Report, the loss and what clips it as the last iteration saw them before its update.
        metrics |= {"loss": loss, "grad_norm": grad_norm, "reward": rewards.mean()}
        groups = rewards.view(-1, args.num_generations)  # (N / G, G)
        metrics["reward_std"] = groups.std(dim=1).mean()
        metrics["frac_reward_zero_std"] = (groups == groups[:, :1]).all(dim=1).float().mean()  # std may be 1e-8 there
        metrics["completions/mean_length"] = mask.sum(dim=1).float().mean()
        metrics["completions/clipped_ratio"] = 1 - (ids[:, -T:] == tokenizer.eos_token_id).any(dim=1).float().mean()
        yield {"step": step, "samples": step * len(ids), **metrics}


def checked(rewards, completions, step):
    """The rewards as a tensor, (N,). FloatingPointError unless they are one finite number per completion."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # what torch makes no numbers of
        values = torch.as_tensor(rewards, dtype=torch.float32).detach()  # a constant, also if a model gave it
        if values.shape == (len(completions),):
            for value, completion in zip(values.tolist(), completions, strict=True):
                if not math.isfinite(value):
                    raise FloatingPointError(f"step {step}: the reward of {completion!r} is {value}")
            return values
    wanted = f"the reward must return {len(completions)} numbers, one per completion"
    raise FloatingPointError(f"step {step}: {wanted}, and it returned {rewards!r:.80}")


# ---------------------------------------------------------------- command line and files


def parse_args(argv):
    """The options of this script, checked."""
    kind = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **kind)
    parser.error, add = stop, parser.add_argument
    add("--model", help="name on the hub or folder of a causal language model; tiny_llama is the embedded one")
    add("--lora-targets", nargs="+", default=["q_proj", "v_proj"], help="names of the layers that get an adapter")
    add("--out", type=Path, default=Path("runs") / Path(__file__).stem, help="folder for the results, replaced")
    add("--steps", type=int, default=10, help="training steps")
    add("--seed", type=int, default=0, help="same seed, same CPU: same numbers")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the frozen weights")
    add("--learning-rate", type=float, default=4.5e-3, help="of AdamW, constant")
    add("--max-completion-length", type=int, default=32, help="tokens a completion may have")
    add("--micro-batch-size", type=int, default=16, help="sequences in a training pass")
    add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob")
    add("--prompts", type=Path, help="file to train on instead of the built-in prompts, one per line")
    add("--prompts-per-step", type=int, default=8, help="prompts in a batch")
    add("--num-generations", type=int, default=8, help="answers to each prompt: the group")
    add("--num-iterations", type=int, default=1, help="optimizer steps on each batch of answers")
    add("--beta", type=float, default=0.1, help="weight of the KL; 0 trains without the reference")
    add("--epsilon", type=number_or_none, default=0.2, help="clip range of the ratio; none = no clipping")
    add("--epsilon-high", type=number_or_none, help="clip range above, if different (DAPO: 0.28)")
    add("--delta", type=number_or_none, help="bound on the ratio where the advantage is negative, above 1 + epsilon")
    add("--loss-type", choices=["grpo", "dapo", "dr_grpo"], default="grpo", help="how the tokens' losses are averaged")
    add("--scale-rewards", choices=["group", "batch", "none"], default="group", help="std that divides the advantages")
    add("--importance-sampling-level", choices=["token", "sequence"], default="token", help="sequence: GSPO")
    args = check_args(parser.parse_args(argv))
    if args.num_generations < 2:
        stop("--num-generations must be at least 2: an answer is compared with the others to its prompt")
    if args.epsilon is None and args.epsilon_high is not None:
        stop("--epsilon-high has no meaning with --epsilon none")
    high = 1 + (args.epsilon_high or args.epsilon or 0)  # where the clip ends
    if args.delta is not None and args.delta <= high:
        stop(f"--delta must be above 1 + epsilon-high = {high}, not {args.delta}")
    return args


def main(argv=None):
    """Train, from the command line or from Python: main(["--steps", "5"]). Returns the summary."""
    start, args = time.perf_counter(), parse_args(argv)
    model, tokenizer = load(args)
    prompts = read_prompts(args, model, tokenizer)
    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.0, target_modules=args.lora_targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config).eval()  # LoRA's B is 0 at the start: policy and reference are equal
    judge = functools.partial(evaluate, model, tokenizer, args)
    write = functools.partial(model.save_pretrained, save_embedding_layers=False)
    shown = {"reward": "reward", "kl": "kl", "clip": "clip_ratio/high_mean"}
    return run(args, model, start, train(model, tokenizer, prompts, args), judge, write, shown)


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
